"""The engine as asyncio sees it: one client a server process, one stream a call."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import numpy as np

from webrtc_duplex.audio import FRAME_SAMPLES, Pcm, SoundRing
from webrtc_duplex.errors import DuplexError, EngineError, RequestError
from webrtc_duplex.media.pace import Pace
from webrtc_duplex.messages import (
    Close,
    Ended,
    Event,
    Hello,
    Hold,
    Lease,
    Leased,
    Live,
    ModelCard,
    Open,
    Output,
    Prompt,
    Ready,
    Refused,
    Request,
    Start,
    Stats,
    Stepped,
    Unpacker,
    Update,
    load,
    pack,
)

logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""How often a client without an engine looks for one."""

CHECK_S = 0.25
SILENT_CHECKS = 4
"""An engine of which nothing came between so many checks hangs. Checks, not seconds, are counted: after a stall of this
process the first thing it does is to read what has come meanwhile, so its own stall is one silent check at most."""

QUEUE_FRAMES = SoundRing.SLOTS
"""Frames said that wait for their reader; older ones are dropped and counted, as late speech is worth nothing."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the agent said in one frame."""

    position: int
    pcm: Pcm
    """[1920]"""
    token: int
    text: str
    """What the token adds to the transcript; often nothing."""
    heard: bool
    """Whether the caller's frame was there in time; else silence stood in."""
    at: float
    """When the step was due."""
    steady_at: float
    """When it would have been there if the step had been a slow one, as they go."""


class EngineClient:
    """Holds one connection to the engine, and finds the next engine by itself when that one is lost.

    `async with` it: connecting, listening and the watch for a hung engine live in that block. When the engine dies, or
    is silent for over a second, every open stream raises EngineError(code="engine_lost").
    """

    def __init__(self, socket_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket_path = socket_path
        self._clock = clock
        self._engine: _Engine | None = None  # the one that serves: from its Hello until it is lost
        self._found = asyncio.Event()
        self._ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep_connected(), name="engine client")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        if not self._keeper.cancelled():
            self._keeper.result()

    # ---- what is known of the engine

    @property
    def ready(self) -> bool:
        """Whether an engine serves, be it full or not."""
        return self._ready.is_set()

    @property
    def unready_because(self) -> str | None:
        """Why a call cannot be had though rows may be free, as a sentence; None if it can."""
        if not self.ready:
            return "the engine is starting"
        return None if self.last_step is None else self.last_step.closed_because

    @property
    def card(self) -> ModelCard:
        """The model; raises EngineError while no engine serves."""
        return self._require().hello.card

    @property
    def rows(self) -> int:
        """Callers the engine takes at once; raises EngineError while no engine serves."""
        return self._require().hello.rows

    @property
    def last_step(self) -> Stepped | None:
        """The last tick heard of, while an engine serves."""
        return self._engine.last_step if self._engine is not None else None

    @property
    def stats(self) -> Stats | None:
        """What the engine had counted a second or so ago, while one serves."""
        return self._engine.stats if self._engine is not None else None

    async def wait_ready(self, timeout_s: float | None) -> None:
        """Wait until an engine serves; raises EngineError if none does in time (None: for as long as it takes)."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise EngineError(f"no engine is ready after {timeout_s:g} s") from None

    async def wait_lost(self) -> None:
        """Wait until the engine that listens now, or the next one to do so, is lost: dead, or silent.

        One that never says its Hello is silent as well.
        """
        await self._found.wait()
        await self._lost.wait()

    def _require(self) -> "_Engine":
        if self._engine is None:
            raise EngineError("the engine is starting; try again in some seconds")
        return self._engine

    # ---- calls

    @asynccontextmanager
    async def open(self, call: str, prompt: Prompt) -> "AsyncIterator[DuplexStream]":
        """Lease a row for a call; leaving the block gives it back.

        Raises CapacityError, RequestError, CheckpointError or EngineError; then nothing is leased.
        """
        engine = self._require()
        stream = await engine.open(call, prompt)
        try:
            yield stream
        finally:
            stream.close()

    # ---- the connection

    def _new_engine(self) -> "_Engine":
        return _Engine(self._serve, self._clock)

    def _serve(self, engine: "_Engine") -> None:
        """An engine has said Hello; it may do so before who connected to it is told that there is a connection."""
        self._engine = engine
        self._ready.set()

    async def _keep_connected(self) -> None:
        """Serve one engine after the other, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, engine = await loop.create_unix_connection(self._new_engine, str(self._socket_path))
            except OSError:  # there is no socket yet, or its engine has died
                await asyncio.sleep(RETRY_S)
                continue
            self._lost.clear()
            self._found.set()
            try:
                await engine.watch()
            finally:
                self._found.clear()
                self._engine = None
                self._ready.clear()
                self._lost.set()
                engine.lose()


class _Engine(asyncio.Protocol):
    """One connection to one engine, from its Hello until it is lost."""

    hello: Hello

    def __init__(self, serve: Callable[["_Engine"], None], clock: Callable[[], float]) -> None:
        self.last_step: Stepped | None = None
        self.stats: Stats | None = None
        self.lost = False
        self._serve = serve  # called with Hello
        self._clock = clock
        self._pace = Pace()
        self._ended = asyncio.Event()
        self._heard_of = False  # since the last check
        self._unpacker = Unpacker(load)
        self._opening: dict[str, asyncio.Future[DuplexStream]] = {}  # opens without an answer, by call
        self._updating: dict[str, asyncio.Future[None]] = {}  # updates without an answer, by call
        self._streams: dict[Lease, DuplexStream] = {}
        self._transport: asyncio.Transport | None = None
        self._ring: SoundRing | None = None

    # ---- connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._heard_of = True
        try:
            for event in self._unpacker.feed(data):
                self._take(event)
        except (ValueError, OSError) as error:  # OSError: its ring is gone, so it has died since Hello
            logger.error("the engine's message cannot be taken: %s", error)
            self._ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()

    async def watch(self) -> None:
        """Return when the engine is dead or hangs."""
        silent_checks = 0
        while silent_checks < SILENT_CHECKS:
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._ended.wait()
                logger.info("the engine has closed its connection")
                return
            except TimeoutError:
                silent_checks = 0 if self._heard_of else silent_checks + 1
                self._heard_of = False
        logger.error("the engine hangs: nothing came from it for %g s", CHECK_S * SILENT_CHECKS)

    def lose(self) -> None:
        """Give the engine up: every call on it ends."""
        self.lost = True
        self._ring = None  # a file's worth of memory, which calls that are over hold on to until they are collected
        error = EngineError("the engine was lost; the call is over", code="engine_lost")
        for call in {*self._opening, *self._updating}:
            self._refuse(call, error)
        for stream in list(self._streams.values()):
            stream._end(error)
        if self._transport is not None:
            self._transport.abort()

    def send(self, request: Request) -> None:
        """Send a request, unless the engine is lost: then nobody is there to act on it."""
        if not self.lost and self._transport is not None:
            self._transport.write(pack(request))

    # ---- calls

    async def open(self, call: str, prompt: Prompt) -> "DuplexStream":
        """Lease a row. One that comes after the asker has given up is given back."""
        self._check_asking(call)
        answer: asyncio.Future[DuplexStream] = asyncio.get_running_loop().create_future()
        self._opening[call] = answer
        self.send(Open(call, prompt))
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().close()
            raise
        finally:
            del self._opening[call]

    async def update(self, call: str, lease: Lease, prompt: Prompt) -> None:
        """Ask for another prompt."""
        self._check_asking(call)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._updating[call] = answer
        self.send(Update(lease, prompt))
        try:
            await answer
        finally:
            del self._updating[call]

    def _check_asking(self, call: str) -> None:
        """Raise unless an engine is there and the call awaits no answer yet."""
        if self.lost:
            raise EngineError("the engine was lost", code="engine_lost")
        if call in self._opening or call in self._updating:
            raise RequestError(f"call {call} has asked already and awaits its answer", code="call_conflict", status=409)

    def leave(self, stream: "DuplexStream") -> None:
        """Drop whatever comes later of this lease, and give it back."""
        if self._streams.pop(stream.lease, None) is not None:
            self.send(Close(stream.lease))

    @property
    def ring(self) -> SoundRing:
        """Where sound crosses."""
        assert self._ring is not None, "sound crosses from Hello until the engine is lost"
        return self._ring

    def _take(self, event: Event | Request) -> None:
        match event:
            case Stepped():
                self.last_step = event
                self._deliver(event)
            case Leased(call, lease):
                self._leased(call, lease)
            case Refused(call):
                self._refuse(call, event.exception())
            case Ready(lease):
                if lease in self._streams:
                    self._streams[lease].prefilled.set()
            case Live(lease):
                if lease in self._streams:
                    self._streams[lease]._go_live(event)
            case Ended(lease, reason, message):
                stream = self._streams.pop(lease, None)
                if stream is not None:
                    stream._end(EngineError(message, code=reason))
            case Stats():
                self.stats = event
            case Hello():
                self.hello = event
                self._ring = SoundRing.join(Path(event.ring), event.rows)
                self._serve(self)
            case _:
                raise ValueError(f"{type(event).__name__} is no event")

    def _leased(self, call: str, lease: Lease) -> None:
        """The stream is made here, not by the asker, who runs later: Ready may stand in the same bytes."""
        opening, updating = self._opening.get(call), self._updating.get(call)
        if lease in self._streams:
            self._streams[lease].prefilled.clear()
            if updating is not None and not updating.done():
                updating.set_result(None)
        elif opening is not None and not opening.done():
            self._streams[lease] = stream = DuplexStream(self, call, lease)
            opening.set_result(stream)
        else:
            self.send(Close(lease))

    def _refuse(self, call: str, error: DuplexError) -> None:
        answer = self._opening.get(call) or self._updating.get(call)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def _deliver(self, step: Stepped) -> None:
        """Hand each call what its row said."""
        if step.outputs:
            self._pace.note(step.tick_at, step.tick_at + step.late_s + step.step_s, self._clock())
        steady_at = step.tick_at + self._pace.usual_s
        for output in step.outputs:
            stream = self._streams.get(Lease(output.row, output.epoch))
            if stream is not None:
                stream._take(output, step.tick_at, steady_at)


class DuplexStream:
    """A call's way to its row: sound in with `hear`, what the agent says out by `async for`.

    The iteration raises EngineError, its code the reason, when the engine ends the lease or is lost; it ends quietly
    when the block of `EngineClient.open` is left.
    """

    def __init__(self, engine: _Engine, call: str, lease: Lease) -> None:
        self.lease = lease
        self.prefilled = asyncio.Event()
        """The prompt is in."""
        self.live = asyncio.Event()
        """Model time runs; `schedule` says since when."""
        self.schedule: Live | None = None
        self.dropped = 0
        """Frames said that nobody fetched in time."""
        self._engine = engine
        self._call = call
        self._queue: deque[Said] = deque()  # at most QUEUE_FRAMES
        self._wake = asyncio.Event()
        self._started = False
        self._error: EngineError | None = None
        self._closed = False
        self._heard_position = -1

    async def update(self, prompt: Prompt) -> None:
        """Change the prompt; it is prefilled again. Raises RequestError (`cannot_update` once the agent listens)."""
        await self._engine.update(self._call, self.lease, prompt)

    def start(self) -> None:
        """Media is up, or back: let model time run once the prompt is in."""
        self._started = True
        self._engine.send(Start(self.lease))

    def hold(self) -> None:
        """Media is lost: stop model time; the engine keeps the row for its grace period."""
        self._started = False
        self.live.clear()
        self.schedule = None
        self._engine.send(Hold(self.lease))

    def hear(self, position: int, frame: Pcm) -> None:
        """Put the caller's frame [1920] of a position before the model.

        The same position again replaces the frame if it was not heard yet. Nobody hears it once the engine is lost.
        Raises RequestError if the position goes back.
        """
        if position < self._heard_position:
            message = f"positions only go on: {position} came after {self._heard_position}"
            raise RequestError(message, code="position_went_back")
        self._heard_position = position
        if not self._engine.lost:
            self._engine.ring.heard.write(self.lease.row, self.lease.epoch, position, frame)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Said:
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._queue.popleft()

    def close(self) -> None:
        """Give the row back; called by the block that opened the stream."""
        self._closed = True
        self._queue.clear()
        self._wake.set()
        self._engine.leave(self)

    # ---- for the client only

    def _go_live(self, live: Live) -> None:
        if not self._started:  # it crossed our hold
            return
        self.schedule = live
        self.live.set()

    def _take(self, output: Output, tick_at: float, steady_at: float) -> None:
        """Fetch what was said from the ring and queue it."""
        pcm = np.empty(FRAME_SAMPLES, np.int16)
        if not self._engine.ring.said.read(output.row, output.epoch, output.position, pcm):
            self.dropped += 1  # this process stalled, and the engine has come round the ring
            return
        if len(self._queue) == QUEUE_FRAMES:
            self._queue.popleft()
            self.dropped += 1
        pieces = self._engine.hello.card.pieces
        text = pieces[output.text] if 0 <= output.text < len(pieces) else ""
        self._queue.append(Said(output.position, pcm, output.text, text, output.heard, tick_at, steady_at))
        self._wake.set()

    def _end(self, error: EngineError) -> None:
        self._error = error
        self._wake.set()
