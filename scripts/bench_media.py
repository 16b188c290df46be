#!/usr/bin/env python3
"""What the media plane costs and how late it is, beside plain aiortc, in one run on one machine.

    scripts/bench_media.py                  # everything, about four minutes
    scripts/bench_media.py --quick          # 16 callers, half a minute
    scripts/bench_media.py --realtime       # on a machine that does other things as well
    scripts/bench_media.py --json OUT

Two echo servers take turns: ours (`webrtc-duplex serve --model echo`), and one that does the same in the way of
aiortc's own examples: track, resampler, 80 ms frames, an 80 ms tick, a track of 20 ms frames. Callers are real peers in
processes of their own. They send a continuous stream of Opus as a browser does, with a chirp in it each second, and
note by the kernel's clock when each packet leaves and comes. Faults are put on what they send, by `tests/relay.py`.

- CPU: user and system time of the server process alone (ours has an engine beside it, printed apart) per caller and
  second of sound, both ways.
- Mouth to ear: from when a chirp is spoken until it could be heard, without a jitter buffer at the ear; with the 20 ms
  that a packet takes to fill.
- Pacing: how far the time between two packets of the server's is from 20 ms.

Milliseconds depend on the machine and on what else it does. The ratio of the two servers in one round decides, and is
read beside `probe`: the CPU time that a fixed loop on the server's core took meanwhile, against its best of all rounds.
"""

import argparse
import asyncio
import fcntl
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import av
import numpy as np
from aiohttp import web
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtp import RtpPacket
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.stress_peers import await_ready, children_of, cpu_seconds, free_port  # noqa: E402
from tests.relay import Link, Network  # noqa: E402
from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES, FRAME_S, FRAME_SAMPLES, SAMPLE_RATE, Pcm  # noqa: E402
from webrtc_duplex.client.call import DECODER_QUEUE, JITTER_BUFFER  # noqa: E402
from webrtc_duplex.media.jitter import signed  # noqa: E402
from webrtc_duplex.media.opus import RTP_CLOCK, Decoder, Encoder  # noqa: E402

if TYPE_CHECKING:
    from av.stream import Stream

TICKS = round(CHUNK_S * RTP_CLOCK)
CHIRP_EVERY_S = 1.0
SETTLE_S = 3.0
"""After all callers are in, and until what is measured counts."""
ONE_LOST_AT_S = 1.0
CALLERS_A_PROCESS = 32
PATIENCE_S = 60.0
SIOCGSTAMPNS = 0x8907  # asm-generic/sockios.h: when the packet read last came to this machine
PROBE_LOOPS = 60_000

FAULTS = {
    "clean": Network(),
    "loss1": Network(loss=0.01),
    "loss5": Network(loss=0.05),
    "jitter30": Network(jitter_s=0.03),
    "one_lost": Network(),
}


# ---- what is said, and how it is found again


def chirp() -> NDArray[np.float64]:
    """100 ms from 300 to 3000 Hz."""
    t = np.arange(SAMPLE_RATE // 10) / SAMPLE_RATE
    return np.sin(2 * np.pi * (300 * t + (2700 / 0.1) * t * t / 2)) * np.hanning(len(t))


def speech() -> list[bytes]:
    """One second that is said over and over, as a browser codes it; the chirp is in its middle."""
    pcm = np.random.default_rng(0).normal(0, 180, 3 * SAMPLE_RATE)
    for second in range(3):
        at = second * SAMPLE_RATE + SAMPLE_RATE // 2
        pcm[at : at + SAMPLE_RATE // 10] += 9000 * chirp()
    encoder = Encoder()
    encoder.set_loss(0.05)  # a browser sends FEC
    return [encoder.encode(chunk) for chunk in pcm.astype(np.int16).reshape(-1, CHUNK_SAMPLES)][50:100]


def find_chirps(pcm: Pcm) -> NDArray[np.float64]:
    """How much of a chirp begins at each sample: 1 is all of what is there."""
    template = chirp()
    sound: NDArray[np.float64] = pcm.astype(np.float64)
    size = 1 << (len(sound) + len(template)).bit_length()
    product = np.fft.irfft(np.fft.rfft(sound, size) * np.conj(np.fft.rfft(template, size)), size)[: len(sound)]
    energy = np.concatenate([[0.0], np.cumsum(sound**2)])
    until = np.minimum(np.arange(len(sound)) + len(template), len(sound))
    return np.asarray(product / np.sqrt((energy[until] - energy[: len(sound)] + 1e4) * np.sum(template**2)))


# ---- one caller


class Voice(MediaStreamTrack):
    """20 ms packets of Opus on an absolute schedule, round and round."""

    kind = "audio"

    def __init__(self, payloads: list[bytes], phase_s: float) -> None:
        super().__init__()
        self.began = 0.0
        self._payloads = payloads
        self._phase_s = phase_s
        self._count = 0

    async def recv(self) -> "av.Packet[Stream]":
        if self.readyState != "live":
            raise MediaStreamError
        if not self._count:
            self.began = time.time() + self._phase_s
        await asyncio.sleep(self.began + self._count * CHUNK_S - time.time())
        packet: av.Packet[Stream] = av.Packet(self._payloads[self._count % len(self._payloads)])
        packet.pts, packet.time_base = self._count * TICKS, Fraction(1, RTP_CLOCK)
        self._count += 1
        return packet


@dataclass(frozen=True, slots=True)
class Came:
    """A packet of the server's."""

    timestamp: int
    payload: bytes
    at: float


@dataclass(slots=True)
class Outcome:
    """What one caller met."""

    fault: str
    delays_s: list[float] = field(default_factory=list)
    chirps: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between packets that follow each other in RTP time."""
    error: str | None = None


class Caller:
    """One peer. Everything it sends passes its fault first; what comes is noted and never decoded while it lasts."""

    def __init__(self, payloads: list[bytes], fault: str, seed: int) -> None:
        random = Random(seed)
        self.outcome = Outcome(fault)
        self._voice = Voice(payloads, random.uniform(0, FRAME_S))
        self._link = Link(FAULTS[fault], random)
        self._arrivals: dict[int, float] = {}  # by sequence number
        self._came: list[tuple[int, Came]] = []
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._connected = asyncio.Event()
        self._pc.on("connectionstatechange", self._follow_state)
        self._drop_next = False

    async def call(self, http: aiohttp.ClientSession, url: str) -> None:
        transceiver = self._pc.addTransceiver(self._voice)
        setattr(transceiver.receiver, JITTER_BUFFER, self)
        getattr(transceiver.receiver, DECODER_QUEUE).put(None)
        await self._pc.setLocalDescription(await self._pc.createOffer())
        offer = self._pc.localDescription.sdp.encode()
        async with http.post(
            f"{url}/v1/realtime/calls", data=offer, headers={"Content-Type": "application/sdp"}
        ) as reply:
            reply.raise_for_status()
            answer = await reply.text()
        await self._pc.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        async with asyncio.timeout(PATIENCE_S):
            await self._connected.wait()
        for protocol in transceiver.receiver.transport.transport._connection._protocols:
            self._tap(protocol)

    def lose_one(self) -> None:
        """Drop the next packet, if that is this caller's fault."""
        self._drop_next = self.outcome.fault == "one_lost"

    async def close(self, since: float) -> Outcome:
        """Hang up, and work out what was met from `since` on."""
        await self._pc.close()
        self._measure(since)
        return self.outcome

    def add(self, packet: RtpPacket) -> tuple[bool, None]:
        """Where aiortc keeps its jitter buffer."""
        at = self._arrivals.pop(packet.sequence_number, time.time())
        self._came.append((packet.sequence_number, Came(packet.timestamp, packet.payload, at)))
        return False, None

    def _follow_state(self) -> None:
        if self._pc.connectionState in ("connected", "failed", "closed"):
            self._connected.set()

    def _tap(self, protocol: Any) -> None:
        """Note when RTP comes in on this socket, and let the fault have what goes out."""
        send, receive, transport = protocol.send_data, protocol.datagram_received, protocol.transport
        number = transport.get_extra_info("socket").fileno()
        loop = asyncio.get_running_loop()

        def received(data: bytes, address: tuple[str, int]) -> None:
            if _is_rtp(data):
                self._arrivals[int.from_bytes(data[2:4], "big")] = _arrived_at(number)
            receive(data, address)

        async def send_data(data: bytes, address: tuple[str, int]) -> None:
            if not _is_rtp(data):
                await send(data, address)
                return
            if self._drop_next:
                self._drop_next = False
                return
            now = loop.time()
            for arrival in self._link.carry(len(data), now, 0.0):
                if arrival <= now:
                    await send(data, address)
                else:
                    loop.call_at(arrival, _send_if_open, transport, data, address)

        protocol.send_data, protocol.datagram_received = send_data, received

    def _measure(self, since: float) -> None:
        came = [packet for _, packet in self._came]
        if not came:
            self.outcome.error = "nothing was heard"
            return
        self._measure_pacing([packet for packet in came if packet.at >= since])
        first = came[0].timestamp
        places = [signed(packet.timestamp - first, 32) * SAMPLE_RATE // RTP_CLOCK for packet in came]
        heard = np.zeros(max(places) + CHUNK_SAMPLES, np.int16)
        times = np.full(len(heard), np.nan)
        decoder = Decoder()
        for place, packet in zip(places, came, strict=True):
            pcm = decoder.decode(packet.payload)
            if pcm is not None and place >= 0:
                pcm = pcm[: len(heard) - place]
                heard[place : place + len(pcm)] = pcm
                times[place : place + len(pcm)] = packet.at + np.arange(len(pcm)) / SAMPLE_RATE
        self._measure_delay(find_chirps(heard), times, since)

    def _measure_pacing(self, came: list[Came]) -> None:
        for before, after in zip(came, came[1:], strict=False):
            if signed(after.timestamp - before.timestamp, 32) == TICKS:
                self.outcome.gaps_s.append(after.at - before.at)

    def _measure_delay(self, likeness: NDArray[np.float64], times: NDArray[np.float64], since: float) -> None:
        said = self._voice.began - CHUNK_S + CHIRP_EVERY_S / 2
        while said < since:
            said += CHIRP_EVERY_S
        end = np.nanmax(times) - CHIRP_EVERY_S
        while said < end:
            here = np.flatnonzero((times >= said) & (times < said + 0.95 * CHIRP_EVERY_S))
            self.outcome.chirps += 1
            if here.size and likeness[here].max() > 0.5:
                self.outcome.delays_s.append(float(times[here[np.argmax(likeness[here])]] - said))
            said += CHIRP_EVERY_S


def _is_rtp(data: bytes) -> bool:
    return len(data) > 12 and 128 <= data[0] <= 191 and not 192 <= data[1] <= 223


def _arrived_at(number: int) -> float:
    """When the packet that was read last came in, by the kernel."""
    try:
        seconds, nanoseconds = struct.unpack("qq", fcntl.ioctl(number, SIOCGSTAMPNS, bytes(16)))
    except OSError:  # the first packet: the kernel begins to keep the time only now
        return time.time()
    return float(seconds + nanoseconds * 1e-9)


def _send_if_open(transport: asyncio.DatagramTransport, data: bytes, address: tuple[str, int]) -> None:
    if not transport.is_closing():
        transport.sendto(data, address)


# ---- a process of callers


@dataclass(frozen=True, slots=True)
class Load:
    """What a process of callers is told."""

    url: str
    faults: list[str]
    seed: int
    core: int | None


def callers_in_process(load: Load, pipe: Connection) -> None:
    _pin(load.core)
    pipe.send(asyncio.run(_callers(load, pipe)))


async def _callers(load: Load, pipe: Connection) -> list[Outcome]:
    payloads = speech()
    callers = [Caller(payloads, fault, load.seed + n) for n, fault in enumerate(load.faults)]
    async with aiohttp.ClientSession() as http:
        for caller in callers:
            await caller.call(http, load.url)
    pipe.send("in")
    await asyncio.to_thread(pipe.recv)  # all the others are in as well
    await asyncio.sleep(ONE_LOST_AT_S)
    for caller in callers:
        caller.lose_one()
    since: float = await asyncio.to_thread(pipe.recv)
    await asyncio.to_thread(pipe.recv)
    return [await caller.close(since) for caller in callers]


def _pin(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})


# ---- plain aiortc


class PlainCall:
    """An echo of 80 ms frames with nothing but aiortc's own tools."""

    def __init__(self) -> None:
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.track = PlainTrack()
        self.pc.addTrack(self.track)
        self.pc.on("track", self._listen)
        self._heard = np.zeros(0, np.int16)
        self._task: asyncio.Task[None] | None = None

    def tick(self) -> None:
        """Take a frame, if there is one, and say it."""
        if len(self._heard) >= FRAME_SAMPLES:
            self.track.say(self._heard[:FRAME_SAMPLES])
            self._heard = self._heard[FRAME_SAMPLES:]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        await self.pc.close()

    def _listen(self, track: MediaStreamTrack) -> None:
        self._task = asyncio.ensure_future(self._take(track))

    async def _take(self, track: MediaStreamTrack) -> None:
        resampler = av.AudioResampler("s16", "mono", SAMPLE_RATE)
        while True:
            try:
                frame = await track.recv()
            except MediaStreamError:
                return
            assert isinstance(frame, av.AudioFrame)
            for resampled in resampler.resample(frame):
                self._heard = np.concatenate([self._heard, resampled.to_ndarray()[0].astype(np.int16)])


class PlainTrack(MediaStreamTrack):
    """20 ms frames at 24 kHz on aiortc's usual schedule; silence where there is nothing to say."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._chunks: deque[Pcm] = deque()
        self._began: float | None = None
        self._count = 0

    def say(self, frame: Pcm) -> None:
        self._chunks.extend(frame.reshape(-1, CHUNK_SAMPLES))

    async def recv(self) -> av.AudioFrame:
        if self.readyState != "live":
            raise MediaStreamError
        if self._began is None:
            self._began = time.time()
        await asyncio.sleep(self._began + self._count * CHUNK_S - time.time())
        chunk = self._chunks.popleft() if self._chunks else np.zeros(CHUNK_SAMPLES, np.int16)
        frame = av.AudioFrame.from_ndarray(chunk[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = SAMPLE_RATE, self._count * CHUNK_SAMPLES
        frame.time_base = Fraction(1, SAMPLE_RATE)
        self._count += 1
        return frame


def serve_plain(port: int) -> None:
    """The plain server, until it is killed."""
    calls: set[PlainCall] = set()

    async def answer(request: web.Request) -> web.Response:
        call = PlainCall()
        calls.add(call)

        async def follow_state() -> None:
            if call.pc.connectionState in ("failed", "closed"):
                calls.discard(call)
                await call.close()

        call.pc.on("connectionstatechange", follow_state)
        await call.pc.setRemoteDescription(RTCSessionDescription(await request.text(), "offer"))
        await call.pc.setLocalDescription(await call.pc.createAnswer())
        return web.Response(text=call.pc.localDescription.sdp, content_type="application/sdp", status=201)

    async def tick() -> None:
        due = time.monotonic()
        while True:
            due += FRAME_S
            await asyncio.sleep(due - time.monotonic())
            for call in list(calls):
                call.tick()

    async def start(app: web.Application) -> None:
        app["ticker"] = asyncio.create_task(tick())

    app = web.Application()
    app.router.add_post("/v1/realtime/calls", answer)
    app.router.add_get("/readyz", lambda request: asyncio.sleep(0, web.Response()))
    app.on_startup.append(start)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


# ---- rounds


@dataclass(slots=True)
class Round:
    """What one server did for so many callers."""

    server: str
    peers: int
    cpu_ms: float = 0.0
    """Of the server process, per caller and second."""
    engine_ms: float = 0.0
    memory_mb: float = 0.0
    """Resident memory of the server process."""
    probe: float = 1.0
    """How much longer than at its best a fixed loop took on the server's core."""
    delay_ms: dict[str, float] = field(default_factory=dict)
    """Mouth to ear: by fault, the median over callers of each one's median."""
    heard: dict[str, float] = field(default_factory=dict)
    """Share of chirps that came through."""
    pacing_ms: tuple[float, float] = (0.0, 0.0)
    """p50 and p99 of |gap - 20 ms|."""
    errors: int = 0


@dataclass(frozen=True, slots=True)
class Cores:
    """Where servers and callers run; None: anywhere."""

    server: int | None
    callers: int | None


class Server:
    """A server in a process of its own."""

    def __init__(self, name: str, url: str, pid: int) -> None:
        self.name, self.url, self.pid = name, url, pid

    def cpu(self) -> tuple[float, float]:
        """Seconds that the server and what it started have used."""
        return cpu_seconds(self.pid), sum(cpu_seconds(child) for child in children_of(self.pid))

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextmanager
def running(name: str, rows: int, core: int | None) -> Iterator[Server]:
    """Start a server, wait until it is ready, end it."""
    port = free_port()
    ours = [sys.executable, "-m", "webrtc_duplex", "serve", "--model", "echo", "--port", str(port), "--rows", str(rows)]
    ours += ["--media-workers", "1"]  # one process against one
    plain = [sys.executable, __file__, "--serve-plain", str(port)]
    process = subprocess.Popen(
        ours if name == "ours" else plain,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: _pin(core),
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await_ready(url, process, PATIENCE_S)
        for engine in children_of(process.pid):
            os.sched_setaffinity(engine, os.sched_getaffinity(0))
        yield Server(name, url, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def play_round(server: Server, faults: list[str], seconds: float, seed: int, cores: Cores) -> Round:
    """So many callers at once, each with its fault, for so many seconds; `probe` is still in seconds."""
    result = Round(server.name, len(faults))
    with callers(server.url, faults, seed, cores.callers) as pipes:
        for pipe in pipes:
            _expect(pipe)
        _tell(pipes, "all are in")
        time.sleep(SETTLE_S)
        _tell(pipes, time.time())
        before, began = server.cpu(), time.monotonic()
        result.probe = probe_until(began + seconds, cores.server)
        after, passed = server.cpu(), time.monotonic() - began
        result.memory_mb = server.memory_mb()
        _tell(pipes, "stop")
        outcomes = [outcome for pipe in pipes for outcome in _expect(pipe)]
    result.cpu_ms, result.engine_ms = (
        (b - a) * 1000 / passed / len(faults) for a, b in zip(before, after, strict=True)
    )
    _sum_up(outcomes, result)
    return result


@contextmanager
def callers(url: str, faults: list[str], seed: int, core: int | None) -> Iterator[list[Connection]]:
    """Processes of callers; ended with the block."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for begin in range(0, len(faults), CALLERS_A_PROCESS):
        ours, theirs = context.Pipe()
        load = Load(url, faults[begin : begin + CALLERS_A_PROCESS], seed + begin, core)
        process = context.Process(target=callers_in_process, args=(load, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        yield pipes
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _expect(pipe: Connection) -> Any:
    if not pipe.poll(3 * PATIENCE_S):
        raise SystemExit("callers do not answer any more")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("callers ended before their time") from None


def _tell(pipes: list[Connection], word: object) -> None:
    for pipe in pipes:
        pipe.send(word)


def probe_until(end: float, core: int | None) -> float:
    """CPU time of a fixed loop on a core, the median of many."""
    allowed = os.sched_getaffinity(0)
    _pin(core)
    took = []
    while time.monotonic() < end:
        began = time.thread_time()
        for _ in range(PROBE_LOOPS):
            pass
        took.append(time.thread_time() - began)
        time.sleep(max(0.0, min(0.2, end - time.monotonic())))
    os.sched_setaffinity(0, allowed)
    return float(np.median(took))


def _sum_up(outcomes: list[Outcome], result: Round) -> None:
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        same = [outcome for outcome in outcomes if outcome.fault == fault]
        medians = [float(np.median(outcome.delays_s)) for outcome in same if outcome.delays_s]
        result.delay_ms[fault] = 1000 * float(np.median(medians)) if medians else float("nan")
        chirps = sum(outcome.chirps for outcome in same)
        result.heard[fault] = sum(len(outcome.delays_s) for outcome in same) / max(1, chirps)
    off = [abs(gap - CHUNK_S) * 1000 for outcome in outcomes for gap in outcome.gaps_s]
    if off:
        result.pacing_ms = float(np.percentile(off, 50)), float(np.percentile(off, 99))
    result.errors = sum(outcome.error is not None for outcome in outcomes)


# ---- the run


def plan(quick: bool, peers: list[int] | None) -> list[list[str]]:
    """The rounds: for each, the fault of every caller."""
    if peers:
        return [["clean"] * number for number in peers]
    if quick:
        return [["clean", "loss5", "one_lost", "jitter30"] * 4]
    return [["clean"] * number for number in (1, 16, 32, 64)] + [
        [fault] * 16 for fault in ("loss1", "loss5", "jitter30", "one_lost")
    ]


def run(rounds_of: list[list[str]], seconds: float, say: Callable[[str], None]) -> list[Round]:
    """Each round by both servers, one after the other."""
    rounds = []
    allowed = sorted(os.sched_getaffinity(0))
    cores = Cores(allowed[0], allowed[1]) if len(allowed) > 1 else Cores(None, None)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running(name, max(map(len, rounds_of)), cores.server)) for name in ("plain", "ours")
        ]
        for n, faults in enumerate(rounds_of):
            for server in servers:
                result = play_round(server, faults, seconds, 1000 * n, cores)
                rounds.append(result)
                say(line_of(result))
    best = min(result.probe for result in rounds)
    for result in rounds:
        result.probe /= best
    return rounds


HEADER = (
    f"{'server':6} {'peers':>5}  {'CPU ms':>7} {'engine':>6}  {'RSS MB':>6}  {'pacing p50/p99':>14}  "
    f"mouth to ear, ms (chirps heard)"
)


def line_of(result: Round) -> str:
    pacing = "/".join(f"{value:.2f}" for value in result.pacing_ms)
    delays = "  ".join(f"{f} {result.delay_ms[f]:.0f} ({result.heard[f]:.0%})" for f in result.delay_ms)
    return (
        f"{result.server:6} {result.peers:5}  {result.cpu_ms:7.1f} {result.engine_ms:6.1f}  {result.memory_mb:6.0f}  "
        f"{pacing:>14}  {delays}" + (f"  {result.errors} ERRORS" if result.errors else "")
    )


def ratios(rounds: list[Round]) -> list[str]:
    """Ours against plain, round by round."""
    lines = []
    for plain, ours in zip(rounds[::2], rounds[1::2], strict=True):
        cost = ours.cpu_ms / max(plain.cpu_ms, 1e-9)
        lines.append(
            f"{ours.peers} callers: CPU {cost:.2f} of plain (probe {ours.probe:.2f} and {plain.probe:.2f}); "
            f"pacing p99 {ours.pacing_ms[1]:.1f} ms against {plain.pacing_ms[1]:.1f}"
        )
        lines += [f"    {f}: mouth to ear {d:.0f} ms against {plain.delay_ms[f]:.0f}" for f, d in ours.delay_ms.items()]
    return lines


def memory_per_caller(rounds: list[Round], server: str) -> float | None:
    """MB more for each caller between the smallest and the largest clean round."""
    clean = [r for r in rounds if r.server == server and set(r.delay_ms) == {"clean"}]
    if len(clean) < 2 or clean[-1].peers == clean[0].peers:
        return None
    return (clean[-1].memory_mb - clean[0].memory_mb) / (clean[-1].peers - clean[0].peers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 callers, faults mixed, under a minute")
    parser.add_argument("--peers", type=int, nargs="+", metavar="N", help="rounds of so many callers, without faults")
    parser.add_argument("--seconds", type=float, help="of each round that count (default 8; 6 if quick)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--realtime", action="store_true", help="ahead of all else the machine does (needs the right)")
    parser.add_argument("--serve-plain", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_plain:
        serve_plain(options.serve_plain)
        return 0
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))  # and so all that it starts
    print(HEADER)
    seconds = options.seconds or (6 if options.quick else 8)
    rounds = run(plan(options.quick, options.peers), seconds, lambda line: print(line, flush=True))
    print("\n" + "\n".join(ratios(rounds)))
    for server in ("plain", "ours"):
        if (each := memory_per_caller(rounds, server)) is not None:
            print(f"memory per caller, {server}: {each:.2f} MB")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in rounds], indent=1) + "\n")
    return 1 if any(result.errors for result in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
