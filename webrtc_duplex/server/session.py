"""The story of a call, from offer to hang-up, and the register of all calls of this process."""

import asyncio
import enum
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, cast

from aiortc import RTCDataChannel

from webrtc_duplex import logs
from webrtc_duplex.audio import FRAME_S, SAMPLE_RATE, Pcm
from webrtc_duplex.errors import CallNotFoundError, CapacityError, DuplexError, EngineError, RequestError
from webrtc_duplex.media.echo import EchoDetector
from webrtc_duplex.media.jitter import CutLead
from webrtc_duplex.messages import Prompt
from webrtc_duplex.server import events
from webrtc_duplex.server.ended import Ended
from webrtc_duplex.server.engine_client import DuplexStream
from webrtc_duplex.server.engines import Engine
from webrtc_duplex.server.leg import Leg, wait
from webrtc_duplex.server.line import Line, Turnover
from webrtc_duplex.server.metrics import Metrics
from webrtc_duplex.server.orders import Orders
from webrtc_duplex.server.realtime import Json, read_idle_timeout, read_session, session_object
from webrtc_duplex.server.recording import Shelf
from webrtc_duplex.server.tape import Tape, no_recordings
from webrtc_duplex.server.tracks import Ticker
from webrtc_duplex.server.transport import Transport, TransportStats
from webrtc_duplex.server.vigil import Vigil
from webrtc_duplex.settings import Settings

log = logging.getLogger(__name__)

STATISTICS_EVERY_S = 1.0
LINE_MOVES_EVERY_S = 0.5
CONNECT_S = 15.0
"""So soon who waits in line must have connected, and who wanted an offer have answered it.

For all others the engine's deadline holds.
"""
ABSENT_S = 2.5
"""A caller in line who was not heard of for so long is not given a row: one who is there answers every 1.5 s or so."""
CHANNEL_LABEL = "oai-events"
CLOSING = "ext.session.closing"
"""The event that tells of a call's end: soon, or now."""
NOTHING_REPORTED = TransportStats(rtt_s=None, jitter_in_s=None, lost_in=0, lost_out=0.0)

E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """What a caller asks for, made sane: whatever way it came in by."""

    id: str
    """`rtc_<signed place>_<random>`, unique among the live calls."""
    offer: str | None
    """SDP that `sdp.safe_offer` has passed; None: the caller wants an offer of ours, and will answer it."""
    prompt: Prompt = field(default_factory=Prompt)
    record: bool = False
    """Whether both voices and the events are to be written down."""
    queue_s: float = 0.0
    """How long to wait for a row, already connected, where none is free; 0: be refused."""
    voice_locked: bool = False
    """Whether `session.update` must leave the voice as it is."""
    idle_timeout_ms: int | None = None
    """After so long a silence of both the client is told of it, as OpenAI's `turn_detection` has it."""


class SessionState(enum.Enum):
    """Where a call stands; `.value` is what the API says."""

    CONNECTING = "connecting"
    QUEUED = "queued"
    LIVE = "live"
    HELD = "held"
    ENDED = "ended"


class CallOver(Exception):
    """Ends the block of a call; `reason` is what `Session.ended_because` will say."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all calls of a process share."""

    engine: Engine
    settings: Settings
    metrics: Metrics
    ticker: Ticker
    line: Line
    turnover: Turnover
    shelf: Shelf | None
    """Where calls are recorded; None where none is."""
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Offer:
    """An offer, and where its answer is awaited. Or none, and where ours is; or the answer to that one."""

    sdp: str | None
    answer: asyncio.Future[str]


class Session:
    """One call. Owned by `Calls`; everything it opened is closed when `run` returns."""

    def __init__(self, request: CallRequest, around: Surroundings) -> None:
        self.id = request.id
        self.prompt = request.prompt
        """The prompt in force."""
        self.answer = ""
        """The peer connection's own answer; `sdp.finish_answer` makes it fit the caller's offer. Or its offer."""
        self.state = SessionState.CONNECTING
        self.ended_because: str | None = None
        """Why, once the call is over: `hangup`, `drained`, `connect_timeout`, `ice_failed`, `dtls_failed`,
        `idle_timeout`, `max_duration`, `evicted_slow`, or the code of the error that ended it."""
        self.feed = events.Feed()
        self.responses = events.Responses(self.feed, FRAME_S)
        self.turns = events.Turns(self.feed, self.responses, request.idle_timeout_ms)
        self._request = request
        self._around = around
        self._engine = around.engine
        self._card = around.engine.card
        self._settings = around.settings.server
        self._clock = around.clock
        self._began_at = around.clock()
        self._echo = EchoDetector()
        self._live_at: float | None = None
        self._leg: Leg | None = None
        self._started = False
        self._tape = Tape(self.id, around.shelf, request.record, self.feed, self._greet)
        self._orders = Orders(self.feed, around.clock)
        self._closing: tuple[str, float] | None = None
        """Why the call will be ended, and when."""
        self._offer: _Offer | None = None
        self._offers: asyncio.Queue[_Offer] = asyncio.Queue(1)  # a second one is refused
        self._listener: events.ChannelListener | None = None
        self._lead = CutLead()
        self._wish: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._network = NOTHING_REPORTED
        self._last_stats: dict[str, Json] = {}

    # ---- the story

    async def run(self, first: _Offer) -> None:
        """Lease a row, answer, and carry sound both ways until either side ends the call; then close both."""
        self._count_state(+1)
        try:
            async with self._row(first) as stream:
                with self._around.turnover.call(self.id), self._tape:
                    await self._converse(stream)
        except CallOver as over:
            self.ended_because = over.reason
        except DuplexError as error:
            self._fail(first, error)
        except Exception:
            log.exception("a fault of ours ends the call")
            self._fail(first, fault_of_ours())
        finally:
            await self._close(first)

    @asynccontextmanager
    async def _row(self, first: _Offer) -> AsyncIterator[DuplexStream]:
        """A row, leased before the caller is answered - or after a wait in line, if the caller has asked for one."""
        async with AsyncExitStack() as row:
            stream = await self._lease(row)
            await self._answer(first)
            yield stream or await self._stand_in_line(row)

    async def _lease(self, row: AsyncExitStack) -> DuplexStream | None:
        """A row at once; None if there is none and the caller is ready to wait. Raises CapacityError if not."""
        try:
            if len(self._around.line):
                raise CapacityError("callers stand in line for a row")
            return await row.enter_async_context(self._engine.open(self.id, self.prompt))
        except CapacityError as full:
            if not self._request.queue_s:
                raise self._estimate_wait(full) from None
            return None

    async def _stand_in_line(self, row: AsyncExitStack) -> DuplexStream:
        """Wait for a row; raises CapacityError when that has taken too long, CallOver if the caller does not wait."""
        self._enter(SessionState.QUEUED)
        began_at = self._clock()
        with self._around.line.place(self.id):
            while (waited_s := self._clock() - began_at) < self._request.queue_s:
                if not self._current.transport.connected.is_set() and waited_s > CONNECT_S:
                    raise CallOver("connect_timeout")
                self._around.line.see(self.id, self._is_there())
                if await wait(self._current.over, LINE_MOVES_EVERY_S):
                    await self._come_anew()
                if self._wish.done():
                    raise CallOver(self._wish.result())
                if stream := await self._take_turn(row):
                    self._enter(SessionState.CONNECTING)
                    return stream
        raise self._estimate_wait(CapacityError(f"no row became free in {self._request.queue_s:g} s"))

    def _is_there(self) -> bool:
        """Whether the caller is connected, and was heard of just now."""
        transport = self._current.transport
        return transport.connected.is_set() and self._clock() - transport.heard_at < ABSENT_S

    def _estimate_wait(self, full: CapacityError) -> CapacityError:
        """The refusal, saying when to try again: behind all who stand in line. Overload is the engine's to judge."""
        if full.code == CapacityError.code and self._engine.ready:
            around = self._around
            full.retry_after_s = around.turnover.wait_s(1 + len(around.line), self._engine.rows)
        return full

    async def _come_anew(self) -> None:
        """In line, a caller whose connection is over may have another; raises CallOver for one who has none."""
        if self._offers.empty():
            raise CallOver(self._current.transport.failure or "hangup")
        await self._close_leg()
        try:
            await self._answer(self._offers.get_nowait())
        except RequestError as error:  # there is no row whose grace would end the wait for a better offer
            log.info("an offer to resume the call cannot be answered: %s", error)
            raise CallOver("hangup") from None

    async def _take_turn(self, row: AsyncExitStack) -> DuplexStream | None:
        """A row if it is this caller's turn and one is free; else say how long the line is, and how long it takes."""
        around, position = self._around, self._around.line.position(self.id)
        if position == 1 and self._is_there():
            with suppress(CapacityError):
                return await row.enter_async_context(self._engine.open(self.id, self.prompt))
        eta_s = around.turnover.wait_s(position, self._engine.rows) if self._engine.ready else None
        self.feed.emit("ext.queue", position=position, eta_s=eta_s)
        return None

    async def _converse(self, stream: DuplexStream) -> None:
        """One leg after the other, while what the agent says is carried to whichever there is."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._speak(stream))
                tasks.create_task(self._orders.obey(partial(self._act_on, stream)))
                tasks.create_task(self._report())
                tasks.create_task(self._await_wish())
                while True:
                    listening = tasks.create_task(self._listen(stream, self._current))
                    await self._watch(self._current)
                    listening.cancel()
                    self._hold(stream)
                    await self._close_leg()
                    await self._next_leg()
        except* CallOver as group:
            self.ended_because = _first(group, CallOver).reason
        except* DuplexError as group:
            self.ended_because = _first(group, DuplexError).code

    async def _listen(self, stream: DuplexStream, leg: Leg) -> None:
        """Once media is up, give the model a frame before every tick, whatever the network did to it."""
        await leg.media_up()
        stream.start()
        self._started = True
        await stream.live.wait()
        self._go_live()
        schedule, n = stream.schedule, 0
        while schedule is not None:
            due = schedule.tick_at + n * FRAME_S - self._lead.lead_s
            await self._around.ticker.until(due)
            if stream.schedule is schedule:
                self._hear(stream, schedule.position + n, leg.cut_frame(due))
                self._lead.note(self._clock() - due)
                n += 1
            else:  # the engine has begun anew
                schedule, n = stream.schedule, 0

    def _hear(self, stream: DuplexStream, position: int, frame: Pcm) -> None:
        """Put a frame [1920] of the caller's before the model."""
        stream.hear(position, frame)
        self.turns.heard(frame)
        self._echo.hear(position, frame)
        self._tape.hear(position, frame)

    async def _speak(self, stream: DuplexStream) -> None:
        """Send what the agent says, and its words when they are heard.

        Raises EngineError when the engine ends the call.
        """
        async for said in stream:
            tell = partial(self.responses.said, said.text, said.pcm)
            if self.responses.hushed:
                tell()
            else:
                self._current.track.speak(said.pcm, said.position, said.steady_at, tell)
            self._echo.say(said.position, said.pcm)
            self._tape.say(said.position, said.pcm)

    async def _watch(self, leg: Leg) -> None:
        """Return when the caller has vanished, or comes anew; raises CallOver for one who has hung up."""
        while not await wait(leg.over, self._patience_s(leg)):
            if self._patience_s(leg) <= 0:
                return
        if not self._offers.empty():
            return
        if leg.transport.failure is None:
            raise CallOver("hangup")
        if self.state is SessionState.CONNECTING:
            raise CallOver(leg.transport.failure)

    def _patience_s(self, leg: Leg) -> float:
        """How much longer nothing may come. While it connects, the deadline is the engine's."""
        if not leg.transport.connected.is_set():
            return self._settings.media_timeout_s
        return leg.transport.heard_at + self._settings.media_timeout_s - self._clock()

    async def _next_leg(self) -> None:
        """Wait until the caller comes back; it is the engine who ends the wait, with the row's grace."""
        while True:
            offer = await self._offers.get()
            try:
                return await self._answer(offer)
            except RequestError as error:
                log.info("an offer to resume the call cannot be answered: %s", error)

    async def _answer(self, offer: _Offer) -> None:
        """Make the offer's connection the current leg. Raises RequestError, to whoever offered too."""
        self._offer = offer
        around = self._around
        transport = Transport(self.id, around.settings.ice, self._take_channel, around.clock)
        try:
            if offer.sdp is None:
                offer = await self._have_ours_answered(transport, offer)
                leg = Leg(transport, around.ticker, around.metrics, around.clock, self._take_key)
                leg.begin()
            else:
                await transport.receive(offer.sdp)
                leg = Leg(transport, around.ticker, around.metrics, around.clock, self._take_key)
                self.answer = await leg.answer()
        except BaseException as error:
            await transport.close()
            if isinstance(error, DuplexError):
                _resolve(self._offer.answer, error)
            raise
        self.feed.remove(self._listener)
        self._listener = None
        self._leg = leg
        _resolve(offer.answer, self.answer)
        if not self._offers.empty():  # one came meanwhile, and is next
            leg.over.set()

    async def _have_ours_answered(self, transport: Transport, wanted: _Offer) -> _Offer:
        """Offer, and take the caller's answer, which comes by `resume`. Raises CallOver if it does not come in time."""
        self.answer = await transport.offer()
        _resolve(wanted.answer, self.answer)
        coming = asyncio.create_task(self._offers.get())
        try:
            await asyncio.wait((coming, self._wish), timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            came = not coming.cancel()
        if not came:
            raise CallOver(self._wish.result() if self._wish.done() else "connect_timeout")
        self._offer = coming.result()
        assert self._offer.sdp is not None, "who resumes a call brings SDP"
        await transport.accept(self._offer.sdp)
        return self._offer

    @property
    def _current(self) -> Leg:
        assert self._leg is not None, "a call that runs has been answered"
        return self._leg

    async def _await_wish(self) -> None:
        raise CallOver(await self._wish)

    # ---- where it stands

    def _go_live(self) -> None:
        if self._live_at is None:
            self._live_at = self._clock()
            self._around.metrics.join.observe(self.age_s)
        self._enter(SessionState.LIVE)

    def _hold(self, stream: DuplexStream) -> None:
        """Stop model time, if it runs."""
        if self._started:
            stream.hold()
            self._started = False
            self._enter(SessionState.HELD)

    def _enter(self, state: SessionState) -> None:
        self._count_state(-1)
        self.state = state
        self._count_state(+1)
        log.info("the call is %s", state.value)

    def _count_state(self, change: int) -> None:
        self._around.metrics.calls.labels(self.state.value).inc(change)

    def _fail(self, first: _Offer, error: DuplexError) -> None:
        self.ended_because = error.code
        _resolve(first.answer, error)

    async def _close(self, first: _Offer) -> None:
        """Say goodbye, and close what is open beside the row, which is given back by now."""
        reason = self.ended_because or "cancelled"
        self.responses.finish("cancelled", "client_cancelled" if reason == "hangup" else reason)
        self.feed.emit(CLOSING, **_closing(reason, 0))
        await self._close_leg()
        self.ended_because = reason
        self._count_state(-1)
        self.state = SessionState.ENDED
        self._count_end(reason)
        self._refuse_offers(first)
        self.feed.end()
        self._let_go()
        self._over.set()
        log.info("the call has ended: %s", reason)

    def _let_go(self) -> None:
        """A call that is over is asked after for a while, but needs no peer connection for that, and no codecs."""
        self._last_stats = self.stats()
        self._leg = self._listener = None
        self._echo = EchoDetector()

    async def _close_leg(self) -> None:
        if self._leg is not None:
            self._leg.count()
            if obstacle := self._leg.transport.obstacle:
                log.warning("the caller never connected: %s", obstacle)
            await self._leg.close()

    def _count_end(self, reason: str) -> None:
        if self._leg is not None:
            self._around.metrics.calls_ended.labels(reason).inc()
        if self._live_at is not None:
            self._around.metrics.call.observe(self._clock() - self._live_at)

    def _refuse_offers(self, first: _Offer) -> None:
        """Nobody waits for the answer of a call that is over."""
        error = CallNotFoundError(f"call {self.id} has ended")
        for offer in (first, self._offer or first):
            _resolve(offer.answer, error)
        while not self._offers.empty():
            _resolve(self._offers.get_nowait().answer, error)

    # ---- what others ask of it

    def announce_end(self, reason: str, in_s: float) -> None:
        """Let the client know that the call will be ended; one who listens only later is told then."""
        self._closing = reason, self._clock() + in_s
        self.feed.emit(CLOSING, **_closing(reason, in_s))

    async def hang_up(self, reason: str = "hangup") -> None:
        """End the call and wait until all of it is closed; a no-op for one that is over."""
        _resolve(self._wish, reason)
        await self.wait_over()

    async def wait_over(self) -> None:
        """Wait until all of the call is closed, whoever ended it."""
        await self._over.wait()

    async def resume(self, offer: str) -> str:
        """Go on with the same row on a new peer connection, at any time; returns the answer.

        For a call whose offer was ours this is at first how it gets the answer.

        Raises RequestError for an offer that cannot be answered, CallNotFoundError if the call ends meanwhile.
        """
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            self._offers.put_nowait(_Offer(offer, answer))
        except asyncio.QueueFull:
            raise RequestError("the call is being resumed already", code="call_conflict", status=409) from None
        if self._leg is not None:
            self._leg.over.set()
        return await answer

    async def add_candidate(self, candidate: str | None, mid: str | None) -> None:
        """A candidate that the caller found after its offer (`candidate:...`).

        One that is not to be called is passed over, and so is None, the end of candidates: deadlines are our own.
        """
        if candidate is not None and self._leg is not None and self.state is not SessionState.ENDED:
            await self._leg.transport.add_candidate(candidate, mid)

    @contextmanager
    def listen(self) -> Iterator[events.QueueListener]:
        """All events of the call from now on, `session.created` first, until the block is left or the call ends."""
        listener = events.QueueListener()
        self._greet(listener)
        try:
            yield listener
        finally:
            self.feed.remove(listener)

    def tell(self, text: str | bytes) -> None:
        """Take a message of the client's, by whatever way it came; it is answered by events."""
        self._orders.take(text)

    def session(self) -> dict[str, Json]:
        """The session in force, as the API shows it."""
        shown = session_object(self.id, self.prompt, self._card, self.turns.idle_timeout_ms)
        return {**shown, "recording": self._tape.wanted}

    @property
    def age_s(self) -> float:
        return self._clock() - self._began_at

    def stats(self) -> dict[str, Json]:
        """How the call fares, or fared at last: what `ext.stats` says."""
        leg, step = self._leg, self._engine.last_step
        if leg is None:
            return self._last_stats
        heard, out = leg.jitter.counters, leg.playout
        step_s = step.step_s if step else 0.0
        wait_s = leg.jitter.delay_s + self._lead.lead_s
        ours_s = wait_s + FRAME_S + step_s + self._card.delay_s + out.lead_s
        return {
            "rtt_ms": _ms(self._network.rtt_s),
            "jitter_ms": _ms(self._network.jitter_in_s),
            "loss_in": self._network.lost_in,
            "loss_out": round(self._network.lost_out, 3),
            "recovered": heard.recovered,
            "late": heard.late,
            "concealed_ms": _ms(heard.concealed_samples / SAMPLE_RATE),
            "jb_ms": _ms(leg.jitter.delay_s),
            "frame_wait_ms": _ms(wait_s),
            "step_ms": _ms(step_s),
            "model_delay_ms": _ms(self._card.delay_s),
            "step_lag": _ms(step.late_s if step else None),
            "out_buffer_ms": _ms(out.lead_s),
            "underruns": out.counters.underruns,
            "est_mouth_to_ear_ms": _ms(ours_s + (self._network.rtt_s or 0.0)),
            "slots": self._engine.rows if self._engine.ready else None,
        }

    # ---- events and commands

    def _take_channel(self, channel: RTCDataChannel) -> None:
        """Every channel may give orders; events go by the one called `oai-events`, or else by the first."""
        channel.on("message", self.tell)
        if self._listener is not None and channel.label != CHANNEL_LABEL:
            return
        self.feed.remove(self._listener)
        self._listener = events.ChannelListener(channel, partial(_resolve, self._wish, "evicted_slow"))
        self._greet(self._listener)

    def _greet(self, listener: events.Listener) -> None:
        listener(self.feed.event("session.created", session=self.session()))
        if self._closing is not None:
            reason, at = self._closing
            listener(self.feed.event(CLOSING, **_closing(reason, at - self._clock())))
        self.feed.add(listener)

    def _take_key(self, key: str) -> None:
        """A key of a telephone; its time is the wall clock's, as the API has it."""
        self.feed.emit("input_audio_buffer.dtmf_event_received", event=key, received_at=int(time.time()))

    async def _act_on(self, stream: DuplexStream, command: events.Command) -> None:
        match command:
            case events.UpdateSession(session):
                prompt = read_session(session, self.prompt, self._card)
                idle_timeout_ms = read_idle_timeout(session, self.turns.idle_timeout_ms)
                recording = _wants_recording(session, self._tape.wanted)
                if recording and self._around.shelf is None:
                    raise no_recordings()
                await self._update(prompt, stream)
                self._tape.switch(recording)
                self.turns.idle_timeout_ms = idle_timeout_ms
                self.feed.emit("session.updated", session=self.session())
            case events.Silence():
                self.responses.hush()
                self._current.track.flush()
            case events.CreateResponse():
                self.responses.create()
            case events.InputBuffer(commits=True):
                self.feed.emit("input_audio_buffer.committed", previous_item_id=None, item_id=self.turns.item_id)
            case events.InputBuffer():
                self.feed.emit("input_audio_buffer.cleared")

    async def _update(self, prompt: Prompt, stream: DuplexStream) -> None:
        """Put another prompt into the row; raises RequestError once the agent has begun to listen."""
        if prompt == self.prompt:
            return
        voice = "session.audio.output.voice"
        if self._request.voice_locked and prompt.voice != self.prompt.voice:
            raise RequestError("this call is bound to its voice", code="forbidden", status=403, param=voice)
        try:
            await stream.update(prompt)
        except RequestError as error:
            if error.code == "cannot_update" and prompt.voice != self.prompt.voice:
                error.code, error.param = "cannot_update_voice", voice
            raise
        self.prompt = prompt

    async def _report(self) -> None:
        """Say once a second how the call fares, let the encoder know of losses; raises CallOver where it has to end."""
        vigil = Vigil(self.feed, self._settings, self._clock)
        while True:
            await asyncio.sleep(STATISTICS_EVERY_S)
            leg = self._current
            self._network = await leg.transport.stats()
            leg.encoder.set_loss(self._network.lost_out)
            leg.count()
            self.feed.emit("ext.stats", **self.stats())
            self._look_after(leg, vigil)

    def _look_after(self, leg: Leg, vigil: Vigil) -> None:
        """Warn of troubles, and of the end of the call's time; raises CallOver when that has come."""
        vigil.voices(self.turns.speaking, self.responses.speaking, self.state is SessionState.LIVE)
        vigil.warn(self._engine.last_step, self._echo.look(), leg.drift.ppm)
        if vigil.over_because is not None:
            raise CallOver(vigil.over_because)
        if vigil.left_s is not None and self._closing is None:
            self.announce_end("max_duration", vigil.left_s)


class Calls:
    """Every call of this process. `async with calls` ends them all at its end."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ticker = Ticker(clock, metrics.loop_lag.observe)
        folder, quota_mb = settings.server.recordings, settings.server.recordings_quota_mb
        shelf = Shelf(folder, quota_mb * 1_000_000) if folder is not None else None
        turnover = Turnover(settings.server.max_duration_s, clock)
        self._around = Surroundings(engine, settings, metrics, self._ticker, Line(), turnover, shelf, clock)
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = Ended[Session](clock)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        self._ticker.stop()

    @property
    def unready_because(self) -> str | None:
        """This process carries calls for as long as it runs."""
        return None

    def __len__(self) -> int:
        """Calls that have not ended."""
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Those that have not ended."""
        return iter(list(self._sessions.values()))

    async def answer(self, request: CallRequest) -> Session:
        """Lease a row, answer the offer, and let the call run.

        Raises CapacityError, RequestError, CheckpointError, EngineError; then nothing of the call is left.
        """
        if request.id in self._sessions:
            raise RequestError(f"there is a call {request.id}", code="call_conflict", status=409)
        if request.record and self._around.shelf is None:
            raise no_recordings()
        session = self._sessions[request.id] = Session(request, self._around)
        offer = _Offer(request.offer, asyncio.get_running_loop().create_future())
        task = asyncio.create_task(self._carry(session, offer), name=f"call {request.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(offer.answer)
        except DuplexError:  # the call has said so itself, and is ending
            raise
        except BaseException:
            offer.answer.cancel()
            asyncio.get_running_loop().call_soon(task.cancel)  # a task that never began would not end the call either
            raise
        return session

    async def resume(self, call_id: str, offer: str) -> Session:
        """Put a call on a new peer connection: same row, model state, transcript; `Session.answer` is the new answer.

        Raises CallNotFoundError for a call that is over, RequestError for an offer that cannot be answered.
        """
        session = self.find(call_id)
        if session.state is SessionState.ENDED:
            raise CallNotFoundError(f"call {call_id} has ended")
        await session.resume(offer)
        return session

    def find(self, call_id: str) -> Session:
        """The call of this id, also one that has ended within the last minute (`SessionState.ENDED`).

        Raises CallNotFoundError.
        """
        session = self._sessions.get(call_id) or self._ended.find(call_id)
        if session is None:
            raise CallNotFoundError(f"there is no call {call_id}")
        return session

    async def close(self, reason: str = "drained") -> None:
        """Hang up every call, each with its reason, and wait for them."""
        await asyncio.gather(*(session.hang_up(reason) for session in self))
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _carry(self, session: Session, offer: _Offer) -> None:
        try:
            with logs.of_call(session.id):
                await session.run(offer)
        finally:
            del self._sessions[session.id]
            self._ended.add(session.id, session)


def _wants_recording(session: Mapping[str, Json], base: bool) -> bool:
    """Raises RequestError for what is neither true nor false."""
    wanted = session.get("recording")
    if wanted is None:
        return base
    if not isinstance(wanted, bool):
        message = f"recording must be true or false, not {wanted!r:.40}"
        raise RequestError(message, code="invalid_value", param="session.recording")
    return wanted


def fault_of_ours() -> EngineError:
    """What a caller is told where we failed in a way that nobody has thought of; the log says more."""
    return EngineError("the server met a fault of its own", code="server_error", status=500)


def _closing(reason: str, in_s: float) -> dict[str, Json]:
    """What `CLOSING` says."""
    return {"reason": reason, "in_ms": round(1000 * max(0.0, in_s))}


def _resolve(future: asyncio.Future[str], outcome: str | DuplexError) -> None:
    """A no-op for a future that is done: nobody awaits it any more, or it has its outcome."""
    if future.done():
        return
    if isinstance(outcome, DuplexError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _first(group: BaseExceptionGroup[E], kind: type[E]) -> E:
    """The first exception in the group, or in the groups in it."""
    inner = group.exceptions[0]
    return inner if isinstance(inner, kind) else _first(cast("BaseExceptionGroup[E]", inner), kind)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
