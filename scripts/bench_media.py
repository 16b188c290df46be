#!/usr/bin/env python3
"""What the media plane costs and how late it is, beside plain aiortc, in one run on one machine.

    scripts/bench_media.py                  # everything, about five minutes
    scripts/bench_media.py --quick          # 16 callers, half a minute
    scripts/bench_media.py --peers 16 32    # only so many callers, no faults
    scripts/bench_media.py --faults loss5   # only this fault
    scripts/bench_media.py --realtime       # on a machine that does other things as well
    scripts/bench_media.py --json OUT

Two echo servers take turns: ours (`webrtc-duplex serve --model echo`), and one that does the same in the way of
aiortc's own examples: track, resampler, 80 ms frames, an 80 ms tick, a track of 20 ms frames. Each round has a server
of its own, so that no round hears of the one before. Past 16 callers, where one plain process is full and begins to
lose sound, both have two processes (ours `--media-workers 2`), on a core each.

Callers are real peers in processes of their own, on the other core; as they are to leave the machine to the servers,
their RTP goes past aiortc (`Inlet`, `Outlet`). They send a continuous stream of Opus as a browser does, a hum with a
chirp in it each second, and note by the kernel's clock when each packet comes. Faults are put on what they send, by
`tests/relay.py`.

- CPU: user and system time of all processes of the server (ours has an engine beside them, printed apart) per second of
  sound that a caller really heard back. `back` is how much that was: a server that loses sound is not cheap for that.
- Mouth to ear: from when a chirp is spoken until it could be heard, without a jitter buffer at the ear; with the 20 ms
  that a packet takes to fill. After a lost packet, also how much later it has become than before it, call by call.
- Pacing: how far the time between two packets of the server's is from 20 ms.
- Concealed: the share of what our model heard that the jitter buffer had to make up, by our `/metrics`.

Milliseconds depend on the machine and on what else it does. The ratio of the two servers in one round decides, and is
read beside `probe`: the CPU time that a fixed loop on the server's core took meanwhile, against its best of all rounds;
and beside `callers late`: by how much the callers missed their own schedule (p99), which is delay that no server made.
"""

import argparse
import asyncio
import fcntl
import gc
import json
import math
import multiprocessing
import os
import struct
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import av
import numpy as np
import uvloop
from aiohttp import web
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtp import RtpPacket
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.stress_peers import await_ready, children_of, cpu_seconds, free_port, kind_of  # noqa: E402
from tests.relay import Link, Network  # noqa: E402
from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES, FRAME_S, FRAME_SAMPLES, SAMPLE_RATE, Pcm  # noqa: E402
from webrtc_duplex.client.call import DECODER_QUEUE, JITTER_BUFFER  # noqa: E402
from webrtc_duplex.media.jitter import Packet, signed  # noqa: E402
from webrtc_duplex.media.opus import RTP_CLOCK, Decoder, Encoder  # noqa: E402
from webrtc_duplex.server.transport import Inlet, Outlet, SilentTrack  # noqa: E402

TICKS = round(CHUNK_S * RTP_CLOCK)
CHIRP_EVERY_S = 1.0
SETTLE_S = 3.0
"""After all callers are in, and until what is measured counts."""
LOST_AT_S = 3.0
"""So long after that a packet is lost, where one is; what is said within a second of it is not looked at."""
FULL_PROCESS = 16
"""Callers that a process of plain aiortc is given; one stops near 25."""
FAULTY_CALLERS = 8
PATIENCE_S = 60.0
SIOCGSTAMPNS = 0x8907  # asm-generic/sockios.h: when the packet read last came to this machine
PROBE_LOOPS = 60_000
SOUND_RMS = 40.0  # -58 dB of full scale: what callers say is louder throughout, what a server puts in its place is not


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a caller."""

    network: Network = Network()
    fec: bool = True
    loses_one: bool = False


FAULTS = {
    "clean": Fault(),
    "loss1": Fault(Network(loss=0.01)),
    "loss5": Fault(Network(loss=0.05)),
    "loss5_no_fec": Fault(Network(loss=0.05), fec=False),
    "jitter30": Fault(Network(jitter_s=0.03)),
    "one_lost": Fault(loses_one=True),
}


# ---- what is said, and how it is found again


def chirp() -> NDArray[np.float64]:
    """100 ms from 300 to 3000 Hz."""
    t = np.arange(SAMPLE_RATE // 10) / SAMPLE_RATE
    return np.sin(2 * np.pi * (300 * t + (2700 / 0.1) * t * t / 2)) * np.hanning(len(t))


def hum(seconds: int) -> NDArray[np.float64]:
    """Syllables of a gliding voice over a little noise; each second is like the others, and none of it is silent."""
    t = np.arange(seconds * SAMPLE_RATE) / SAMPLE_RATE
    phase = 2 * np.pi * np.cumsum(140 + 30 * np.sin(2 * np.pi * t)) / SAMPLE_RATE
    voice = np.sum([np.sin(k * phase) / k for k in range(1, 8)], axis=0) * np.abs(np.sin(2.5 * np.pi * t))
    return np.asarray(np.random.default_rng(0).normal(0, 60, len(t)) + 2000 * voice)


def speech(fec: bool) -> list[bytes]:
    """One second that is said over and over, as a browser codes it; the chirp is in its middle."""
    pcm = hum(3)
    for second in range(3):
        at = second * SAMPLE_RATE + SAMPLE_RATE // 2
        pcm[at : at + SAMPLE_RATE // 10] += 9000 * chirp()
    encoder = Encoder()
    if fec:
        encoder.set_loss(0.05)
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
    before_s: list[float] = field(default_factory=list)
    """Delays until a packet was lost, where one was; `delays_s` are those after that."""
    chirps: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between packets that follow each other in RTP time."""
    late_s: list[float] = field(default_factory=list)
    """How long after its time each packet of the caller's own left."""
    back: float = 0.0
    """The share of the time in which it heard sound."""
    error: str | None = None


class Wire:
    """A socket of a caller's whose RTP meets a fault on its way out; all else passes."""

    def __init__(self, socket: asyncio.DatagramTransport, link: Link) -> None:
        self.drop_next = False
        self._socket = socket
        self._link = link
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        if not _is_rtp(data):
            self._socket.sendto(data, address)
            return
        dropped, self.drop_next = self.drop_next, False
        now = self._loop.time()
        for arrival in () if dropped else self._link.carry(len(data), now, 0.0):
            if arrival <= now:
                self._socket.sendto(data, address)
            else:
                self._loop.call_at(arrival, self._send_late, data, address)

    def _send_late(self, data: bytes, address: tuple[str, int]) -> None:
        if not self._socket.is_closing():
            self._socket.sendto(data, address)


class Caller:
    """One peer. Everything it sends passes its fault first; what comes is noted and never decoded while it lasts."""

    def __init__(self, payloads: list[bytes], fault: str, seed: int) -> None:
        random = Random(seed)
        self.outcome = Outcome(fault)
        self._payloads = payloads
        self._phase_s = random.uniform(0, FRAME_S)
        self._link = Link(FAULTS[fault].network, random)
        self._began = 0.0
        self._lost_at: float | None = None
        self._late_s: list[float] = []  # of each packet said
        self._arrived = 0.0  # when the datagram that is being read came
        self._came: list[Came] = []
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._connected = asyncio.Event()
        self._pc.on("connectionstatechange", self._follow_state)
        self._wires: list[Wire] = []
        self._speaking: asyncio.Task[None] | None = None

    async def call(self, http: aiohttp.ClientSession, url: str) -> None:
        audio = self._pc.addTransceiver(SilentTrack())
        setattr(audio.receiver, JITTER_BUFFER, self)
        getattr(audio.receiver, DECODER_QUEUE).put(None)
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
        inlet = Inlet(audio, self._note, lambda: None)
        for protocol in audio.receiver.transport.transport._connection._protocols:
            self._tap(protocol, inlet)
        self._speaking = asyncio.create_task(self._speak(Outlet(audio)))

    def lose_one(self) -> None:
        """Drop the next packet, if that is this caller's fault."""
        if FAULTS[self.outcome.fault].loses_one:
            self._lost_at = time.time()
            for wire in self._wires:
                wire.drop_next = True

    async def close(self) -> None:
        """Hang up."""
        if self._speaking is not None:
            self._speaking.cancel()
            with suppress(asyncio.CancelledError):
                await self._speaking
        await self._pc.close()

    def measure(self, since: float, until: float) -> Outcome:
        """Work out what was met in this stretch of time."""
        if not self._came:
            self.outcome.error = "nothing was heard"
            return self.outcome
        self._measure_own(since, until)
        self._measure_pacing([packet for packet in self._came if since <= packet.at < until])
        heard, times = self._timeline()
        self.outcome.back = share_of_sound(heard[(times >= since) & (times < until)], until - since)
        self._measure_delays(find_chirps(heard), times, since, until)
        return self.outcome

    def add(self, packet: RtpPacket) -> tuple[bool, None]:
        """Where aiortc keeps its jitter buffer: a stream's first packet comes through there."""
        self._came.append(Came(packet.timestamp, packet.payload, time.time()))
        return False, None

    async def _speak(self, outlet: Outlet) -> None:
        """20 ms packets of Opus on an absolute schedule, round and round."""
        self._began = time.time() + self._phase_s
        while True:
            count = len(self._late_s)
            due = self._began + count * CHUNK_S
            await asyncio.sleep(due - time.time())
            outlet.send(self._payloads[count % len(self._payloads)], count * TICKS, not count)
            self._late_s.append(time.time() - due)

    def _note(self, packet: Packet) -> None:
        self._came.append(Came(packet.timestamp, packet.payload, self._arrived))

    def _follow_state(self) -> None:
        if self._pc.connectionState in ("connected", "failed", "closed"):
            self._connected.set()

    def _tap(self, protocol: Any, inlet: Inlet) -> None:
        """Take RTP off this socket and note when it came, and let the fault have what goes out."""
        number = protocol.transport.get_extra_info("socket").fileno()
        otherwise = protocol.datagram_received

        def received(data: bytes, address: tuple[str, int]) -> None:
            self._arrived = _arrived_at(number)
            if not inlet.take(data):
                otherwise(data, address)

        protocol.datagram_received = received
        protocol.transport = Wire(protocol.transport, self._link)
        self._wires.append(protocol.transport)

    def _measure_own(self, since: float, until: float) -> None:
        first, end = (math.ceil((at - self._began) / CHUNK_S) for at in (since, until))
        self.outcome.late_s = self._late_s[max(0, first) : end]

    def _timeline(self) -> tuple[Pcm, NDArray[np.float64]]:
        """All that was heard in its place, and when each sample could be; not a number where nothing came."""
        first = self._came[0].timestamp
        places = [signed(packet.timestamp - first, 32) * SAMPLE_RATE // RTP_CLOCK for packet in self._came]
        heard = np.zeros(max(places) + CHUNK_SAMPLES, np.int16)
        times = np.full(len(heard), np.nan)
        decoder = Decoder()
        for place, packet in zip(places, self._came, strict=True):
            pcm = decoder.decode(packet.payload)
            if pcm is not None and place >= 0:
                pcm = pcm[: len(heard) - place]
                heard[place : place + len(pcm)] = pcm
                times[place : place + len(pcm)] = packet.at + np.arange(len(pcm)) / SAMPLE_RATE
        return heard, times

    def _measure_pacing(self, came: list[Came]) -> None:
        for before, after in pairwise(came):
            if signed(after.timestamp - before.timestamp, 32) == TICKS:
                self.outcome.gaps_s.append(after.at - before.at)

    def _measure_delays(
        self, likeness: NDArray[np.float64], times: NDArray[np.float64], since: float, until: float
    ) -> None:
        first = self._began - CHUNK_S + CHIRP_EVERY_S / 2
        first += CHIRP_EVERY_S * max(0, math.ceil((since - first) / CHIRP_EVERY_S))
        for said in np.arange(first, until - CHIRP_EVERY_S, CHIRP_EVERY_S).tolist():
            if self._lost_at is not None and abs(said - self._lost_at) < CHIRP_EVERY_S:
                continue
            here = np.flatnonzero((times >= said) & (times < said + 0.95 * CHIRP_EVERY_S))
            self.outcome.chirps += 1
            if here.size and likeness[here].max() > 0.5:
                delay = float(times[here[np.argmax(likeness[here])]] - said)
                before = self._lost_at is not None and said < self._lost_at
                (self.outcome.before_s if before else self.outcome.delays_s).append(delay)


def share_of_sound(heard: Pcm, seconds: float) -> float:
    """How much of so many seconds is neither missing nor silent."""
    chunks = heard[: len(heard) // CHUNK_SAMPLES * CHUNK_SAMPLES].reshape(-1, CHUNK_SAMPLES).astype(np.float64)
    return float(np.sum(np.mean(chunks**2, axis=1) > SOUND_RMS**2)) * CHUNK_S / seconds


def _is_rtp(data: bytes) -> bool:
    return len(data) > 12 and 128 <= data[0] <= 191 and not 192 <= data[1] <= 223


def _arrived_at(number: int) -> float:
    """When the packet that was read last came in, by the kernel."""
    try:
        seconds, nanoseconds = struct.unpack("qq", fcntl.ioctl(number, SIOCGSTAMPNS, bytes(16)))
    except OSError:  # the first packet: the kernel begins to keep the time only now
        return time.time()
    return float(seconds + nanoseconds * 1e-9)


# ---- a process of callers


@dataclass(frozen=True, slots=True)
class Load:
    """What a process of callers is told."""

    url: str
    faults: list[str]
    seed: int
    core: int


def callers_in_process(load: Load, pipe: Connection) -> None:
    _pin(load.core)
    pipe.send(uvloop.run(_callers(load, pipe)))


async def _callers(load: Load, pipe: Connection) -> list[Outcome]:
    payloads = {fec: speech(fec) for fec in {FAULTS[fault].fec for fault in load.faults}}
    callers = [Caller(payloads[FAULTS[fault].fec], fault, load.seed + n) for n, fault in enumerate(load.faults)]
    async with aiohttp.ClientSession() as http:
        for caller in callers:
            await caller.call(http, load.url)
    gc.collect()
    gc.freeze()  # a look at all that takes longer than two packets
    pipe.send("in")
    since: float = await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(since + LOST_AT_S - time.time())
    for caller in callers:
        caller.lose_one()
    await asyncio.to_thread(pipe.recv)
    until = time.time()
    for caller in callers:
        await caller.close()
    return [caller.measure(since, until) for caller in callers]


def _pin(core: int) -> None:
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
    processes: int = 1
    cpu_ms: float = 0.0
    """Of the server's processes, per caller and second."""
    engine_ms: float = 0.0
    back: float = 1.0
    """The share of what was said that came back as sound."""
    memory_mb: float = 0.0
    """Resident memory of the server's processes."""
    probe: float = 1.0
    """How much longer than at its best a fixed loop took on the server's core."""
    callers_late_ms: float = 0.0
    """p99 of how long after their time the callers' packets left."""
    concealed: float | None = None
    """The share of what the model heard that was made up; of ours only."""
    delay_ms: dict[str, float] = field(default_factory=dict)
    """Mouth to ear: by fault, the median over callers of each one's median."""
    added_ms: float | None = None
    """How much later, after a lost packet, than before it; the median over callers who lost one."""
    heard: dict[str, float] = field(default_factory=dict)
    """Share of chirps that came through."""
    pacing_ms: tuple[float, float] = (0.0, 0.0)
    """p50 and p99 of |gap - 20 ms|."""
    errors: int = 0

    @property
    def cost_ms(self) -> float:
        """CPU time for a second of sound that came back."""
        return self.cpu_ms / max(self.back, 1e-9)


@dataclass(frozen=True, slots=True)
class Server:
    """A server on this machine; each of `urls` for its share of the callers."""

    name: str
    urls: list[str]
    pids: list[int]
    """What answers callers: not the engine."""
    engines: list[int]

    def cpu(self) -> tuple[float, float]:
        """Seconds that the server has used, and its engine."""
        return sum(map(cpu_seconds, self.pids)), sum(map(cpu_seconds, self.engines))

    def memory_mb(self) -> float:
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in self.pids]
        return sum(int(status.partition("VmRSS:")[2].split()[0]) / 1024 for status in statuses)

    def samples_heard(self) -> dict[str, float]:
        """Towards the model so far, by origin; plain aiortc does not tell."""
        if self.name != "ours":
            return {}
        with urllib.request.urlopen(f"{self.urls[0]}/metrics", timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
        return {s.labels["origin"]: s.value for s in samples if s.name == "webrtc_duplex_heard_samples_total"}


def running(name: str, rows: int, processes: int) -> AbstractContextManager[Server]:
    """Start a server, wait until it is ready, end it."""
    return _plain(processes) if name == "plain" else _ours(rows, processes)


@contextmanager
def _plain(processes: int) -> Iterator[Server]:
    with ExitStack() as stack:
        ports = [free_port() for _ in range(processes)]
        pids = [
            stack.enter_context(_process([__file__, "--serve-plain", str(port)], port, core_of(n)))
            for n, port in enumerate(ports)
        ]
        yield Server("plain", [f"http://127.0.0.1:{port}" for port in ports], pids, [])


@contextmanager
def _ours(rows: int, processes: int) -> Iterator[Server]:
    port = free_port()
    command = ["-m", "webrtc_duplex", "serve", "--model", "echo", "--port", str(port), "--rows", str(rows)]
    with _process([*command, "--media-workers", str(processes)], port, core_of(0)) as front:
        children = {kind: [pid for pid in children_of(front) if kind_of(pid) == kind] for kind in ("server", "engine")}
        for engine in children["engine"]:
            os.sched_setaffinity(engine, os.sched_getaffinity(0))
        for n, worker in enumerate(children["server"]):
            os.sched_setaffinity(worker, {core_of(n)})
        yield Server("ours", [f"http://127.0.0.1:{port}"] * processes, [front, *children["server"]], children["engine"])


@contextmanager
def _process(arguments: list[str], port: int, core: int) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(_pin, core),
    )
    try:
        await_ready(f"http://127.0.0.1:{port}", process, PATIENCE_S)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def core_of(process: int) -> int:
    """Where a server's process runs; its callers are on the next one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[process % len(allowed)]


def play_round(server: Server, faults: list[str], seconds: float, seed: int) -> Round:
    """So many callers at once, each with its fault, for so many seconds; `probe` is still in seconds."""
    result = Round(server.name, len(faults), len(server.urls))
    with callers(server.urls, faults, seed) as pipes:
        for pipe in pipes:
            _expect(pipe)
        time.sleep(SETTLE_S)
        _tell(pipes, time.time())
        heard, before, began = server.samples_heard(), server.cpu(), time.monotonic()
        result.probe = probe_until(began + seconds, core_of(0))
        after, passed = server.cpu(), time.monotonic() - began
        result.memory_mb = server.memory_mb()
        result.concealed = concealed(heard, server.samples_heard())
        _tell(pipes, "stop")
        outcomes = [outcome for pipe in pipes for outcome in _expect(pipe)]
    result.cpu_ms, result.engine_ms = (
        (b - a) * 1000 / passed / len(faults) for a, b in zip(before, after, strict=True)
    )
    _sum_up(outcomes, result)
    return result


def concealed(before: dict[str, float], after: dict[str, float]) -> float | None:
    """The share of what was heard meanwhile that was made up."""
    heard = {origin: after[origin] - before.get(origin, 0.0) for origin in after}
    return heard["concealed"] / max(1.0, sum(heard.values())) if heard else None


@contextmanager
def callers(urls: list[str], faults: list[str], seed: int) -> Iterator[list[Connection]]:
    """A process of callers for each of the server's; ended with the block."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    share = -(-len(faults) // len(urls))
    for n, url in enumerate(urls):
        ours, theirs = context.Pipe()
        load = Load(url, faults[n * share : (n + 1) * share], seed + n * share, core_of(n + 1))
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


def probe_until(end: float, core: int) -> float:
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
        found = sum(len(outcome.delays_s) + len(outcome.before_s) for outcome in same)
        result.heard[fault] = found / max(1, chirps)
    later = [np.median(o.delays_s) - np.median(o.before_s) for o in outcomes if o.before_s and o.delays_s]
    result.added_ms = 1000 * float(np.median(later)) if later else None
    off = [abs(gap - CHUNK_S) * 1000 for outcome in outcomes for gap in outcome.gaps_s]
    if off:
        result.pacing_ms = float(np.percentile(off, 50)), float(np.percentile(off, 99))
    late = [1000 * late_s for outcome in outcomes for late_s in outcome.late_s]
    result.callers_late_ms = float(np.percentile(late, 99)) if late else math.nan
    result.back = float(np.mean([outcome.back for outcome in outcomes]))
    result.errors = sum(outcome.error is not None for outcome in outcomes)


# ---- the run


def plan(quick: bool, peers: list[int] | None, faults: list[str] | None) -> list[list[str]]:
    """The rounds: for each, the fault of every caller. The largest, which leave no core in peace, come last."""
    if quick:
        return [["clean", "loss5", "one_lost", "jitter30"] * 4]
    if peers is None and faults is None:
        peers, faults = [1, 16, 32, 64], [fault for fault in FAULTS if fault != "clean"]
    rounds = [["clean"] * number for number in peers or ()] + [[fault] * FAULTY_CALLERS for fault in faults or ()]
    return sorted(rounds, key=lambda of: len(of) > FULL_PROCESS)


def run(rounds_of: list[list[str]], seconds: float, say: Callable[[str], None]) -> list[Round]:
    """Each round by both servers, one after the other."""
    rounds = []
    for n, faults in enumerate(rounds_of):
        for name in ("plain", "ours"):
            with running(name, len(faults), 1 if len(faults) <= FULL_PROCESS else 2) as server:
                rounds.append(play_round(server, faults, seconds, 1000 * n))
            say(line_of(rounds[-1]))
    best = min(result.probe for result in rounds)
    for result in rounds:
        result.probe /= best
    return rounds


HEADER = (
    f"{'server':6} {'peers':>5}  {'CPU ms':>6} {'back':>5} {'engine':>6}  {'RSS MB':>6}  {'pacing p50/p99':>14}  "
    f"{'callers late':>12}  {'concealed':>9}  mouth to ear, ms (chirps heard)"
)


def line_of(result: Round) -> str:
    peers = f"{result.peers}/{result.processes}" if result.processes > 1 else str(result.peers)
    pacing = "/".join(f"{value:.2f}" for value in result.pacing_ms)
    delays = "  ".join(f"{f} {result.delay_ms[f]:.0f} ({result.heard[f]:.0%})" for f in result.delay_ms)
    return (
        f"{result.server:6} {peers:>5}  {result.cost_ms:6.1f} {result.back:5.0%} {result.engine_ms:6.1f}  "
        f"{result.memory_mb:6.0f}  {pacing:>14}  {result.callers_late_ms:9.1f} ms  "
        f"{'' if result.concealed is None else f'{result.concealed:.2%}':>9}  {delays}"
        + ("" if result.added_ms is None else f"  {result.added_ms:+.1f} since it was lost")
        + (f"  {result.errors} ERRORS" if result.errors else "")
    )


def ratios(rounds: list[Round]) -> list[str]:
    """Ours against plain, round by round."""
    lines = []
    for plain, ours in zip(rounds[::2], rounds[1::2], strict=True):
        cost = ours.cost_ms / max(plain.cost_ms, 1e-9)
        lines.append(
            f"{ours.peers} callers: CPU {cost:.2f} of plain (probe {ours.probe:.2f} and {plain.probe:.2f}), "
            f"{ours.back:.0%} back against {plain.back:.0%}; "
            f"pacing p99 {ours.pacing_ms[1]:.1f} ms against {plain.pacing_ms[1]:.1f}"
        )
        lines += [f"    {f}: mouth to ear {d:.0f} ms against {plain.delay_ms[f]:.0f}" for f, d in ours.delay_ms.items()]
    return lines


def memory_per_caller(rounds: list[Round], server: str) -> float | None:
    """MB more for each caller between the smallest and the largest clean round of one process."""
    clean = [r for r in rounds if r.server == server and r.processes == 1 and set(r.delay_ms) == {"clean"}]
    if len(clean) < 2 or clean[-1].peers == clean[0].peers:
        return None
    return (clean[-1].memory_mb - clean[0].memory_mb) / (clean[-1].peers - clean[0].peers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 callers, faults mixed, under a minute")
    parser.add_argument("--peers", type=int, nargs="+", metavar="N", help="rounds of so many callers, without faults")
    parser.add_argument("--faults", nargs="+", metavar="FAULT", choices=FAULTS, help="rounds of 8 callers with a fault")
    parser.add_argument("--seconds", type=float, help="of each round that count (default 8)")
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
    seconds = options.seconds or 8
    rounds = run(plan(options.quick, options.peers, options.faults), seconds, lambda line: print(line, flush=True))
    print("\n" + "\n".join(ratios(rounds)))
    for server in ("plain", "ours"):
        if (each := memory_per_caller(rounds, server)) is not None:
            print(f"memory per caller, {server}: {each:.2f} MB")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in rounds], indent=1) + "\n")
    return 1 if any(result.errors for result in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
