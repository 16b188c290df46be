#!/usr/bin/env python3
"""Many callers at once, as many processes, each a WebRTC peer that speaks for real: does every one hear all it is due?

    scripts/stress_peers.py --peers 8 --frames 375 --model tiny     # starts a server of its own
    scripts/stress_peers.py --url http://localhost:8080 --peers 16

All callers are admitted before a common start (with `--ramp`, one after the other). From then on each sends `--frames`
frames of speech as 20 ms packets on an absolute schedule, and what it hears is counted on the timeline of RTP
(`webrtc_duplex.client.timeline`). Silence that the server puts in where the model is late is not taken for sound: by
its own count it is taken off. A caller passes

- by the driver's rule, that of the public PersonaPlex driver: no error, at most 4 frames missing, some voice;
- by ours: at most 1 frame missing, and no gap in a voice longer than 60 ms.

With `--churn 0.05` a twentieth of the callers leave every second and others come in their place; every visit is counted
by itself, by the same rules, and callers hum, so that each has something to say. With `--kill-worker 10` a media worker
is killed after ten seconds; its callers are to lose their calls, with a reason, and all others are judged as ever.

The exit code is 0 only if every caller passes by both. On each core a probe looks whether the machine itself stalls;
what was due while it did is excused, and counted apart.
"""

import argparse
import asyncio
import gc
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, Self

import aiohttp
import av
import numpy as np
import uvloop
from aiortc.mediastreams import MediaStreamError
from av.stream import Stream

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES, CHUNKS_PER_FRAME, FRAME_S, SAMPLE_RATE, Pcm  # noqa: E402
from webrtc_duplex.client.call import Call, ReceivedPacket, Route, connect  # noqa: E402
from webrtc_duplex.client.microphone import TICKS, Microphone  # noqa: E402
from webrtc_duplex.client.timeline import TAIL_S, Count, Heard, Unwrapper, count  # noqa: E402
from webrtc_duplex.errors import DuplexError  # noqa: E402
from webrtc_duplex.media.jitter import Packet  # noqa: E402
from webrtc_duplex.media.opus import RTP_CLOCK, Decoder, Encoder  # noqa: E402
from webrtc_duplex.server.transport import Inlet, Outlet  # noqa: E402

DRIVER_DEFICIT, DRIVER_VOICED_S = 4, 0.4
OUR_DEFICIT, OUR_GAP_S = 1, 0.06

LOST = "call_lost"
"""What is said of a call whose worker has died."""

ADMISSION_S = 60.0
"""So long all callers together may take to get in."""
START_IN_S = 1.0
PATIENCE_S = 60.0
"""With a caller's process that should have said something."""
OFFSET_CHUNKS = 19
"""Each caller begins so much later in the recording, lest all of them say the same at once."""
GREETING_S = 10.0
"""A data channel takes no longer to open, if it ever does."""
SETTLE_S = 0.5
"""So soon after that the server lets model time run: until then nothing is due."""
LAST_WORD_S = 1.1
"""The server says once a second how a call fares."""
SHORTEST_STAY = 25
"""Frames of the shortest visit, where callers come and go."""
TRY_AGAIN_S = 1.0
PROGRESS_EVERY_S = 2.0
PROBE_STEP_S = 0.005
STALL_S = 0.02
"""A probe that wakes so late was stalled with its core."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every caller is told."""

    url: str
    frames: int
    voice: str | None
    instructions: str | None
    echo: bool
    network: tuple[str, str] = ("clean", "clean")
    """Names of `tests.relay.NETWORKS`, towards the server and back."""
    ramp: float = 0.0
    """Callers a second who come before the start; 0: all at once."""
    light: bool = False
    """Whether RTP takes the short way."""
    churn: float = 0.0
    """The share of the callers who leave every second, each followed by another."""


@dataclass(slots=True)
class Outcome:
    """What one caller met."""

    caller: int
    visit: int = 0
    """Which of its calls, where callers come and go."""
    error: str | None = None
    join_s: float = 0.0
    first_sound_s: float = 0.0
    counted: Count | None = None
    underruns: int = 0
    """20 ms pieces of silence that the server put in, by its own count."""
    underruns_together: int = 0
    """The most of them from one of its words to the next, about a second: they may have been one gap."""
    said_at: float = 0.0
    rtt_s: float | None = None
    echo_s: float | None = None
    """From a sound said until its echo came."""

    @property
    def deficit(self) -> int:
        """Frames due that were not the agent's."""
        if self.counted is None:
            return 0
        return self.counted.deficit + math.ceil(self.underruns / CHUNKS_PER_FRAME)

    @property
    def longest_gap_s(self) -> float:
        if self.counted is None:
            return 0.0
        return max(self.counted.longest_gap_s, self.underruns_together * CHUNK_S)

    @property
    def passes_driver(self) -> bool:
        return (
            self.error is None
            and self.counted is not None
            and 0 <= self.deficit <= DRIVER_DEFICIT
            and self.counted.voiced_s >= DRIVER_VOICED_S
        )

    @property
    def passes_ours(self) -> bool:
        return self.passes_driver and self.deficit <= OUR_DEFICIT and self.longest_gap_s <= OUR_GAP_S + 1e-9


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run."""

    plan: Plan
    outcomes: list[Outcome]
    load: dict[str, float] = field(default_factory=dict)
    """Share of one core that each process of ours used while calls were counted; and the machine's load."""

    killed: bool = False
    """Whether a media worker was, on purpose: then its callers, and only they, are to lose their calls."""

    @property
    def lost(self) -> list[Outcome]:
        """Calls that ended with their worker."""
        return [outcome for outcome in self.outcomes if self.killed and outcome.error == LOST]

    @property
    def passed(self) -> bool:
        lost = self.lost
        kept = [outcome for outcome in self.outcomes if outcome not in lost]
        return bool(kept) and all(o.passes_driver and o.passes_ours for o in kept) and bool(lost) == self.killed


# ---- the recording


@dataclass(frozen=True, slots=True)
class Speech:
    """Whole chunks of 24 kHz mono, as sound [n * 480] and as packets: encoded once, so that callers cost little."""

    pcm: Pcm
    packets: Sequence[bytes]

    @classmethod
    def of(cls, pcm: Pcm) -> Self:
        """Whatever is left of a last chunk is not said."""
        encoder, chunks = Encoder(), pcm[: len(pcm) // CHUNK_SAMPLES * CHUNK_SAMPLES].reshape(-1, CHUNK_SAMPLES)
        return cls(chunks.reshape(-1), [encoder.encode(chunk) for chunk in chunks])

    @property
    def frames(self) -> int:
        return len(self.packets) // CHUNKS_PER_FRAME

    def share_of(self, caller: int, frames: int) -> "Speech":
        """What this caller says: so many frames of the recording, from a place of its own, going round."""
        places = (caller * OFFSET_CHUNKS + np.arange(frames * CHUNKS_PER_FRAME)) % len(self.packets)
        chunks = self.pcm.reshape(-1, CHUNK_SAMPLES)
        return Speech(chunks[places].reshape(-1), [self.packets[int(place)] for place in places])


def read_speech(path: Path | None) -> Speech:
    """The recording; without one, a caller who hums in phrases."""
    if path is None:
        return Speech.of(hum(20.0))
    resampler = av.AudioResampler("s16", "mono", SAMPLE_RATE)
    with av.open(str(path)) as file:
        pieces = [out.to_ndarray()[0] for frame in file.decode(audio=0) for out in resampler.resample(frame)]
        pieces += [out.to_ndarray()[0] for out in resampler.resample(None)]
    return Speech.of(np.concatenate(pieces).astype(np.int16))


def hum(seconds: float) -> Pcm:
    """Phrases of two seconds with a second between them, gliding, with overtones."""
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    phase = 2 * np.pi * np.cumsum(140 + 30 * np.sin(2 * np.pi * 0.7 * t)) / SAMPLE_RATE
    voice = sum(np.sin(k * phase) / k for k in range(1, 8))
    loud = (t % 3 < 2) * np.abs(np.sin(2 * np.pi * 2.5 * t))
    return np.asarray(6000 * voice * loud, np.int16)


def default_speech() -> Path | None:
    shared = Path(os.environ.get("WEBRTC_DUPLEX_SHARED", ROOT.parent / "shared"))
    path = shared / "data" / "speech" / "human_assistant_40s.wav"
    return path if path.is_file() else None


# ---- one caller


@dataclass(frozen=True, slots=True)
class Notes:
    """What a caller wrote down while it spoke; read when the call is over."""

    packets: list[ReceivedPacket] = field(default_factory=list)
    underruns: list[tuple[float, int]] = field(default_factory=list)
    """The server's count, each time it was told."""
    greeted: asyncio.Event = field(default_factory=asyncio.Event)
    """The data channel is open: `SETTLE_S` later model time runs."""


@dataclass(slots=True)
class Visit:
    """One call of a caller's: what was said from when on, and what was met."""

    outcome: Outcome
    said: Speech
    notes: Notes = field(default_factory=Notes)
    start: float | None = None
    """None for a call that never came about."""


class ShortWay(Microphone):
    """The microphone of a caller that costs little: RTP goes past aiortc's own way, in and out, as in the server.

    So more callers fit on a machine that also serves them. ICE, DTLS, keys, RTCP and the data channel stay aiortc's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outlet: Outlet | None = None
        self._packets = 0

    async def recv(self) -> "av.Packet[Stream]":
        """Never comes; the sender's end cancels it."""
        await asyncio.Event().wait()
        raise MediaStreamError

    def take_over(self, call: Call, notes: Notes) -> None:
        """From now on: the call is connected."""
        (audio,) = call._pc.getTransceivers()
        self._outlet = Outlet(audio)

        def note(packet: Packet) -> None:
            notes.packets.append(ReceivedPacket(packet.sequence, packet.timestamp, packet.payload, time.monotonic()))

        inlet = Inlet(audio, note, lambda: None)
        sockets: list[Any] = audio.receiver.transport.transport._connection._protocols
        for protocol in sockets:
            protocol.datagram_received = partial(_take_rtp, inlet, protocol.datagram_received)

    async def say_packet(self, payload: bytes) -> None:
        """Say 20 ms that are Opus already, in their time."""
        assert self._outlet is not None, "the call is connected"
        self.sent_at = self.sent_at + CHUNK_S if self.sent_at is not None else time.monotonic()
        await asyncio.sleep(self.sent_at - time.monotonic())
        self._outlet.send(payload, self._packets * TICKS, self._packets == 0)
        self._packets += 1


def _take_rtp(inlet: Inlet, otherwise: Callable[[bytes, Any], None], data: bytes, address: Any) -> None:
    if not inlet.take(data):
        otherwise(data, address)


class Start:
    """The common start: a process says when all of its callers are in (or were refused), and is told when it is."""

    def __init__(self, callers: int) -> None:
        self.at = 0.0
        self._given = asyncio.Event()
        self._ready = asyncio.Barrier(callers + 1)

    async def ready(self) -> None:
        """Be one of the callers who are in; returns when the start is known."""
        await self._ready.wait()
        await self._given.wait()

    async def give(self, pipe: Connection) -> None:
        """Wait for all callers, say so, and pass on when the start is."""
        await self._ready.wait()
        pipe.send("in")
        self.at = await asyncio.to_thread(pipe.recv)
        self._given.set()


def call_in_process(plan: Plan, callers: Sequence[int], speech: Speech, core: int, pipe: Connection) -> None:
    """A process of callers: says when they are in, waits for the start, says when they have done, reports all."""
    os.sched_setaffinity(0, {core})
    gc.freeze()  # what is imported is no garbage, and a look at it takes longer than two packets
    visits = uvloop.run(_call_all(plan, callers, speech, pipe))
    pipe.send("done")
    stalls = pipe.recv()
    for visit in visits:
        if visit.start is not None:
            _count(plan, visit, stalls)
    pipe.send([visit.outcome for visit in visits])


async def _call_all(plan: Plan, callers: Sequence[int], speech: Speech, pipe: Connection) -> list[Visit]:
    start = Start(len(callers))
    tasks = [asyncio.create_task(_keep_calling(plan, caller, speech, start)) for caller in callers]
    await start.give(pipe)
    return [visit for visits in await asyncio.gather(*tasks) for visit in visits]


async def _keep_calling(plan: Plan, caller: int, speech: Speech, start: Start) -> list[Visit]:
    """One call for the whole run; with churn, one after the other."""
    if plan.ramp:
        await asyncio.sleep(caller / plan.ramp)
    random = Random(caller)
    first = Visit(Outcome(caller), speech.share_of(caller, _stay(plan, random, plan.frames)))
    await _visit(plan, first, start)
    visits = [first]
    end = start.at + plan.frames * FRAME_S
    while plan.churn and (left := int((end - time.monotonic()) / FRAME_S)) > SHORTEST_STAY:
        if visits[-1].start is None:
            await asyncio.sleep(TRY_AGAIN_S)
        frames = _stay(plan, random, left)
        visits.append(Visit(Outcome(caller, len(visits)), speech.share_of(caller + len(visits), frames)))
        await _visit(plan, visits[-1], None)
    return visits


def _stay(plan: Plan, random: Random, left: int) -> int:
    """Frames until a caller leaves, of those that are left."""
    if not plan.churn:
        return left
    return min(left, max(SHORTEST_STAY, round(random.expovariate(plan.churn) / FRAME_S)))


async def _visit(plan: Plan, visit: Visit, start: Start | None) -> None:
    """Call, and write down what went wrong; `start` is waited for in any case."""
    try:
        await _call(plan, visit, start)
    except (DuplexError, aiohttp.ClientError, OSError, TimeoutError) as error:
        visit.outcome.error = f"{type(error).__name__}: {error}"
        if start is not None and visit.start is None:
            await start.ready()


async def _call(plan: Plan, visit: Visit, start: Start | None) -> None:
    """Call, say it all from the start on (without one, at once), and hear it out."""
    outcome, notes, packets = visit.outcome, visit.notes, visit.said.packets
    microphone = ShortWay() if plan.light else Microphone()
    began = time.monotonic()
    async with _calling(plan, outcome.caller, microphone) as call:
        outcome.join_s = call.join_s
        if isinstance(microphone, ShortWay):
            microphone.take_over(call, notes)
        listening = [asyncio.create_task(_gather(call, notes)), asyncio.create_task(_note_underruns(call, notes))]
        while not notes.packets and not call.over.is_set():
            await asyncio.sleep(CHUNK_S)
        outcome.first_sound_s = time.monotonic() - began
        async with asyncio.timeout(GREETING_S):
            await notes.greeted.wait()
        visit.start = time.monotonic() + SETTLE_S
        if start is not None:
            await start.ready()
            visit.start = start.at
        await asyncio.sleep(visit.start - time.monotonic())
        for packet in packets:  # the microphone paces them
            await call.send_packet(packet)
        await asyncio.sleep(visit.start + visit.said.frames * FRAME_S + TAIL_S - time.monotonic())
        outcome.rtt_s = await call.rtt_s()
        outcome.said_at = (call.sent_at or visit.start) - (len(packets) - 1) * CHUNK_S
        outcome.error = await _ended_because(plan, call)
        await asyncio.sleep(LAST_WORD_S)
        for task in listening:
            task.cancel()


@asynccontextmanager
async def _calling(plan: Plan, seed: int, microphone: Microphone) -> AsyncIterator[Call]:
    """A call as the plan wants it."""
    async with _route(plan, seed) as route:
        wishes = partial(connect, plan.url, voice=plan.voice, instructions=plan.instructions, seed=seed)
        async with wishes(route=route, microphone=microphone) as call:
            yield call


async def _ended_because(plan: Plan, call: Call) -> str | None:
    """Why a call is over that should not be, by its server's word."""
    headers = {"Authorization": f"Bearer {call.secret}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.get(f"{plan.url}/v1/realtime/calls/{call.id}") as answer,
    ):
        told = await answer.json()
    if answer.status != 200:
        return str(told["error"]["code"])
    return told["ended_because"] or ("its connection is over" if call.over.is_set() else None)


def _count(plan: Plan, visit: Visit, stalls: list[tuple[float, float]]) -> None:
    outcome, start = visit.outcome, visit.start or 0.0
    sounds = decoded(visit.notes.packets)
    outcome.counted = count(sounds, start, visit.said.frames, stalls)
    counts = _counts_around(visit.notes.underruns, start, start + visit.said.frames * FRAME_S + TAIL_S)
    outcome.underruns = counts[-1] - counts[0]
    outcome.underruns_together = max(later - earlier for earlier, later in pairwise([*counts, counts[-1]]))
    outcome.echo_s = echo_delay(visit.said.pcm, outcome.said_at, sounds) if plan.echo else None


@asynccontextmanager
async def _route(plan: Plan, seed: int) -> AsyncIterator[Route | None]:
    """The network that the plan wants between this caller and the server."""
    if plan.network == ("clean", "clean"):
        yield None
        return
    from tests.relay import NETWORKS, Relay

    up, down = (NETWORKS[name] for name in plan.network)
    async with Relay(up, down, seed=seed) as relay:
        yield relay


async def _gather(call: Call, notes: Notes) -> None:
    async for packet in call.packets():
        notes.packets.append(packet)


async def _note_underruns(call: Call, notes: Notes) -> None:
    async for event in call.events():
        notes.greeted.set()
        if event.type == "ext.stats":
            notes.underruns.append((event.at, int(event.body.get("underruns") or 0)))


def decoded(packets: list[ReceivedPacket]) -> list[Heard]:
    """The sound of each packet at its place; a packet that holds no Opus counts as never come."""
    decoder, unwrapper = Decoder(), Unwrapper(RTP_CLOCK)
    heard = [(packet, unwrapper.place(packet.timestamp), decoder.decode(packet.payload)) for packet in packets]
    return [Heard(packet.at, place, pcm) for packet, place, pcm in heard if pcm is not None]


def _counts_around(counts: list[tuple[float, int]], start: float, end: float) -> list[int]:
    """What the server counted from its last word before a span to its first one after, in order."""
    before = [number for at, number in counts if at <= start][-1:] or [0]
    during = [number for at, number in counts if start < at < end]
    after = [number for at, number in counts if at >= end][:1]
    return [*before, *during, *after]


def echo_delay(said: Pcm, said_at: float, sounds: list[Heard]) -> float | None:
    """Where what was heard fits best over what was said, in seconds; None if nothing was heard."""
    if not sounds:
        return None
    offset = min(sound.at - sound.place for sound in sounds)
    heard = np.zeros(round((sounds[-1].place + 1) * SAMPLE_RATE), np.float32)
    for sound in sounds:
        at = round(sound.place * SAMPLE_RATE)
        if 0 <= at and at + len(sound.pcm) <= len(heard):
            heard[at : at + len(sound.pcm)] = sound.pcm
    size = 1 << (len(heard) + len(said)).bit_length()
    product = np.fft.rfft(heard, size) * np.conj(np.fft.rfft(said.astype(np.float32), size))
    lag = int(np.argmax(np.fft.irfft(product, size)[: len(heard)]))
    return lag / SAMPLE_RATE + offset - said_at


# ---- the machine


def probe(core: int, pipe: Connection) -> None:
    """Note every stretch in which this core did not let a light sleeper wake in time, until told to stop."""
    os.sched_setaffinity(0, {core})
    stalls: list[tuple[float, float]] = []
    due = time.monotonic()
    while not pipe.poll():
        due = max(due + PROBE_STEP_S, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        woke = time.monotonic()
        if woke - due > STALL_S:
            stalls.append((due, woke))
    pipe.send(stalls)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@dataclass(slots=True)
class Meter:
    """CPU time of a server of ours, its media workers and its engines, and of the callers, from `begin` on."""

    server: int | None
    callers: Sequence[int] = ()
    _begun: dict[int, tuple[str, float]] = field(default_factory=dict)
    _at: float = 0.0

    def begin(self) -> None:
        self._at = time.monotonic()
        servers = [] if self.server is None else [self.server, *children_of(self.server)]
        kinds = {pid: kind_of(pid) for pid in servers} | dict.fromkeys(self.callers, "callers")
        self._begun = {pid: (kind, cpu_seconds(pid)) for pid, kind in kinds.items()}

    def read(self) -> dict[str, float]:
        """Shares of a core, by kind of process: `server` is the front and its workers together."""
        passed = time.monotonic() - self._at
        used: dict[str, float] = {}
        for pid, (kind, before) in self._begun.items():
            used[kind] = used.get(kind, 0.0) + (cpu_seconds(pid) - before) / passed
        return {**used, "load": os.getloadavg()[0]}


def kind_of(pid: int) -> str:
    """Of a server's processes: `engine`, or `server` for the front and its workers."""
    return "engine" if b"engine_process" in _command(pid) else "server"


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# ---- a server of our own


@contextmanager
def own_server(model: str, rows: int, *options: str) -> Iterator[tuple[str, int]]:
    """A server on a free port of this machine, and its process id; ended with the block."""
    port = free_port()
    command = [sys.executable, "-m", "webrtc_duplex", "serve", "--port", str(port), "--model", model]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen([*command, "--rows", str(rows), *options], cwd=ROOT, stdout=log, stderr=log)
        try:
            await_ready(f"http://127.0.0.1:{port}", server)
            yield f"http://127.0.0.1:{port}", server.pid
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
        finally:
            server.terminate()
            server.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_ready(url: str, server: "subprocess.Popen[bytes]", timeout_s: float = 180.0) -> None:
    """Wait for `/readyz`. Raises SystemExit if the server ends or takes too long."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("the server did not become ready")


def model_name(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


# ---- the run


class Worker:
    """A process of ours: a caller or a probe."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["webrtc_duplex.client.call", "webrtc_duplex.client.timeline"])
        self.pipe, theirs = processes.Pipe()
        process = processes.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        self.pid = process.pid or 0


class Peers(Worker):
    """A process of callers. `outcomes` are there once it has failed or come to its end."""

    def __init__(self, plan: Plan, callers: Sequence[int], speech: Speech, core: int) -> None:
        super().__init__(call_in_process, plan, callers, speech, core)
        self.callers = callers
        self.core = core
        self.outcomes: list[Outcome] = []

    def says(self, word: str, timeout_s: float) -> bool:
        """Whether it says this word in time, and not how it ended instead."""
        if self.outcomes:
            return False
        message = self._next(timeout_s)
        if isinstance(message, list):
            self.outcomes = message
        return message == word

    def _next(self, timeout_s: float) -> str | list[Outcome]:
        try:
            if self.pipe.poll(max(0.0, timeout_s)):
                message: str | list[Outcome] = self.pipe.recv()
                return message
        except EOFError:
            return [Outcome(caller, error="its process died") for caller in self.callers]
        return [Outcome(caller, error="its process said nothing in time") for caller in self.callers]


def run(
    plan: Plan, peers: int, speech: Speech, meter: Meter, together: int = 1, kill_after_s: float | None = None
) -> Report:
    """Admit everybody, start everybody, and gather what each met; so many callers share a process.

    `kill_after_s`: so long after the start a media worker of the server is killed.
    """
    cores = sorted(os.sched_getaffinity(0))
    probes = {core: Worker(probe, core) for core in cores}
    groups = [range(first, min(first + together, peers)) for first in range(0, peers, together)]
    callers = [Peers(plan, group, speech, cores[number % len(cores)]) for number, group in enumerate(groups)]
    give_up = time.monotonic() + ADMISSION_S + (peers / plan.ramp if plan.ramp else 0.0)
    with progress(plan.url):
        admitted = [peer for peer in callers if peer.says("in", give_up - time.monotonic())]
        meter.callers = [peer.pid for peer in admitted]
        meter.begin()
        start = time.monotonic() + START_IN_S
        for peer in admitted:
            peer.pipe.send(start)
        if kill_after_s is not None:
            time.sleep(start + kill_after_s - time.monotonic())
            kill_a_worker(meter.server)
        over = start + plan.frames * FRAME_S + PATIENCE_S
        done = [peer for peer in admitted if peer.says("done", over - time.monotonic())]
    load = meter.read()
    for worker in probes.values():
        worker.pipe.send("stop")
    stalls = {core: worker.pipe.recv() for core, worker in probes.items()}
    for peer in done:
        peer.pipe.send(stalls[peer.core])
        peer.says("", PATIENCE_S)
    outcomes = [outcome for peer in callers for outcome in peer.outcomes]
    return Report(plan, outcomes, load, killed=kill_after_s is not None)


def kill_a_worker(server: int | None) -> None:
    """The first one of a server of ours that has two or more."""
    workers = [pid for pid in children_of(server or 0) if b"worker_process" in _command(pid)]
    os.kill(workers[0], signal.SIGKILL)


@contextmanager
def progress(url: str) -> Iterator[None]:
    """Tell on the way how the server fares, by its own word."""
    ended = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        while not ended.wait(PROGRESS_EVERY_S):
            print(f"{time.monotonic() - began:4.0f} s: {_readiness(url)}", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _readiness(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            told = json.load(answer)
    except (urllib.error.URLError, OSError) as error:
        return f"the server does not answer: {error}"
    return f"{told['calls']} calls, {told['free_rows']} of {told['rows']} rows free, {told['status']}"


# ---- telling


def table(report: Report) -> str:
    lines = [
        f"{'caller':>6} {'due':>5} {'heard':>5} {'deficit':>7} {'excused':>7} {'gaps':>5} {'longest':>8} {'late':>7} "
        f"{'silence':>8} {'voiced':>7} {'join':>7} {'sound':>7} {'rtt':>7} {'echo':>7}  driver ours"
    ]
    lines += [_line(outcome) for outcome in report.outcomes]
    lines += summary(report.outcomes)
    passed = [sum(o.passes_driver for o in report.outcomes), sum(o.passes_ours for o in report.outcomes)]
    lines.append(f"{passed[0]} of {len(report.outcomes)} pass by the driver's rule, {passed[1]} by ours")
    if report.killed:
        lines.append(f"a media worker was killed, and {len(report.lost)} calls were lost with it")
    names = {"server": "Server CPU", "engine": "Engine CPU", "callers": "Callers' CPU"}
    peers = len({outcome.caller for outcome in report.outcomes})
    for key, name in names.items():
        if share := report.load.get(key):
            lines.append(f"{name}: {share:.0%} of a core, {1000 * share / peers:.1f} ms per caller and second")
    lines.append(f"Load average: {report.load.get('load', 0.0):.1f}")
    return "\n".join(lines)


def summary(outcomes: list[Outcome]) -> list[str]:
    """Percentiles over all calls that were counted."""
    counted = [(o, o.counted) for o in outcomes if o.counted is not None]
    rows = {
        "join": [1000 * o.join_s for o, _ in counted],
        "first sound": [1000 * o.first_sound_s for o, _ in counted],
        "round trip": [1000 * o.rtt_s for o, _ in counted if o.rtt_s is not None],
        "echo": [1000 * o.echo_s for o, _ in counted if o.echo_s is not None],
        "longest gap": [1000 * o.longest_gap_s for o, _ in counted],
        "latest packet": [1000 * c.latest_s for _, c in counted],
    }
    lines = [f"{'':>14} {'p50':>8} {'p99':>8} {'worst':>8}"]
    lines += [
        f"{name:>14} " + " ".join(f"{ms:>5.0f} ms" for ms in _spread(values)) for name, values in rows.items() if values
    ]
    lines.append(
        f"{'deficit':>14} " + " ".join(f"{frames:>5.0f} fr" for frames in _spread([o.deficit for o, _ in counted]))
    )
    due, heard = sum(c.due for _, c in counted), sum(c.heard for _, c in counted)
    refused = sum((o.error or "").startswith("CapacityError") for o in outcomes)
    lines.append(f"{len(outcomes)} calls, {refused} of them refused; {heard} of {due} frames heard")
    return lines


def _spread(values: Sequence[float]) -> list[float]:
    """Median, 99th percentile and worst; nothing of nothing."""
    return [float(value) for value in np.percentile(values, (50, 99, 100))] if values else []


def _line(o: Outcome) -> str:
    if o.counted is None:
        return f"{o.caller:>6} {o.error}"
    c = o.counted
    return (
        f"{o.caller:>6} {c.due:>5} {c.heard:>5} {o.deficit:>7} {c.excused:>7} {len(c.gaps_s):>5} "
        f"{_ms(o.longest_gap_s)} {_ms(c.latest_s, 4)} {_ms(o.underruns * CHUNK_S)} {c.voiced_s:>5.1f} s "
        f"{_ms(o.join_s, 4)} {_ms(o.first_sound_s, 4)} {_ms(o.rtt_s, 4)} {_ms(o.echo_s, 4)}  "
        f"{_verdict(o.passes_driver):<6} {_verdict(o.passes_ours)}{'  ' + o.error if o.error else ''}"
    )


def _ms(seconds: float | None, width: int = 5) -> str:
    return f"{'-':>{width}}   " if seconds is None else f"{1000 * seconds:>{width}.0f} ms"


def _verdict(passes: bool) -> str:
    return "pass" if passes else "FAIL"


def as_json(report: Report) -> dict[str, object]:
    return {
        "plan": asdict(report.plan),
        "passed": report.passed,
        "load": report.load,
        "callers": [
            {
                **asdict(outcome),
                "deficit": outcome.deficit,
                "longest_gap_s": outcome.longest_gap_s,
                "passes_driver": outcome.passes_driver,
                "passes_ours": outcome.passes_ours,
            }
            for outcome in report.outcomes
        ],
    }


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.kill_worker is not None and (options.url or options.media_workers < 2):
        parser.error("--kill-worker wants a server that is started here, with --media-workers 2 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then too
    speech = read_speech(options.wav or (None if options.churn else default_speech()))
    if options.url:
        report = _run_against(options, options.url, speech, Meter(None))
    else:
        workers = ("--media-workers", str(options.media_workers))
        with own_server(options.model, options.peers, *workers) as (url, pid):
            report = _run_against(options, url, speech, Meter(pid))
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(as_json(report), indent=2))
    return 0 if report.passed else 1


def _run_against(options: argparse.Namespace, url: str, speech: Speech, meter: Meter) -> Report:
    network = (options.network, options.network_down)
    echo = model_name(url) == "echo"
    wishes = (options.voice, options.instructions)
    plan = Plan(url, options.frames, *wishes, echo, network, options.ramp, options.light, options.churn)
    return run(plan, options.peers, speech, meter, options.together, options.kill_worker)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs; without it one is started")
    parser.add_argument("--model", default="tiny", help="model of the server that is started (default: %(default)s)")
    parser.add_argument("--peers", type=int, default=8, help="callers (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=375, help="frames of 80 ms each says (default: %(default)s)")
    parser.add_argument("--ramp", type=float, default=0.0, help="callers who come a second (default: all at once)")
    parser.add_argument("--churn", type=float, default=0.0, help="share of the callers who leave every second")
    parser.add_argument("--together", type=int, default=1, help="callers that share a process (default: %(default)s)")
    parser.add_argument("--media-workers", type=int, default=1, help="of the server that is started (default: 1)")
    parser.add_argument("--light", action="store_true", help="callers' RTP goes past aiortc, so that they cost little")
    parser.add_argument("--kill-worker", type=float, metavar="S", help="kill a media worker so long after the start")
    parser.add_argument("--wav", type=Path, help="what they say (default: a recording beside the repository, or a hum)")
    parser.add_argument("--voice", help="voice to ask for")
    parser.add_argument("--instructions", help="instructions to give")
    parser.add_argument("--network", default="clean", help="of tests/relay.py, towards the server (default: clean)")
    parser.add_argument("--network-down", default="clean", help="the same, back to the callers (default: clean)")
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
