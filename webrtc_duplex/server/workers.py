"""The media workers as the front process sees them: one register of calls, wherever they are carried."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

from prometheus_client.core import Metric

from webrtc_duplex.errors import CallNotFoundError, DuplexError, EngineError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.server.ended import Ended
from webrtc_duplex.server.events import Event, QueueListener
from webrtc_duplex.server.metrics import Metrics
from webrtc_duplex.server.pipe import (
    AddCandidate,
    AnnounceEnd,
    Answer,
    Answered,
    Ask,
    Count,
    Counted,
    HangUp,
    Happened,
    Listen,
    Outcome,
    Over,
    Pipe,
    Prompted,
    Question,
    Reply,
    Report,
    Resume,
    Seen,
    Tell,
    ToFront,
    ToWorker,
    Unlisten,
    Withdraw,
)
from webrtc_duplex.server.realtime import Json
from webrtc_duplex.server.session import CallRequest, SessionState

log = logging.getLogger(__name__)

CHECK_S = 0.25
SILENT_CHECKS = 6
"""A worker of which nothing came between so many checks hangs. Checks, not seconds: `engine_client` says why."""

LOST = "worker_lost"
"""Why a call has ended whose worker has died."""

K = TypeVar("K", Answered, Seen, Counted)


class Workers:
    """Every call of every media worker; the same face as `session.Calls`.

    Whoever starts a worker process has its pipe carried here for as long as it lives. A new call goes to the worker
    with the fewest; but while callers stand in line for a row, which they do at one worker, all offers go to that one,
    so that there is one line.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._workers: dict[str, _Worker] = {}  # by name; only those that have said that they are ready
        self._calls: dict[str, RemoteCall] = {}
        self._ended = Ended[RemoteCall](clock)
        self._wanted: int | None = None
        self._begun = False
        """Whether all that are wanted have been there; from then on any of them will do."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- the register

    @property
    def unready_because(self) -> str | None:
        if self._begun and self._workers:
            return None
        if self._wanted is None:
            return "the media workers are being started"
        return f"{len(self._workers)} of {self._wanted} media workers are ready"

    def want(self, count: int) -> None:
        """So many workers are being started: the server is ready with the last of them."""
        self._wanted = count

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> "Iterator[RemoteCall]":
        return iter(list(self._calls.values()))

    def find(self, call_id: str) -> "RemoteCall":
        """The call of this id, also one that has ended within the last minute.

        Raises CallNotFoundError, `call_lost` (410) if its worker has died.
        """
        call = self._calls.get(call_id) or self._ended.find(call_id)
        if call is None:
            raise CallNotFoundError(f"there is no call {call_id}")
        if call.ended_because == LOST:
            raise CallNotFoundError("the process that held this call is gone", status=410, code="call_lost")
        return call

    async def answer(self, request: CallRequest) -> "RemoteCall":
        """Have a worker answer; raises what `session.Calls.answer` does."""
        worker = self._choose()
        call = self._calls[request.id] = worker.calls[request.id] = RemoteCall(worker, request, self._clock)
        try:
            call.be_answered(await worker.ask(Answer(request), Answered))
        except BaseException:
            self._drop(call)
            raise
        return call

    async def resume(self, call_id: str, offer: str) -> "RemoteCall":
        """Have the call's worker put it on a new peer connection; raises what `session.Calls.resume` does."""
        call = self.find(call_id)
        call.be_answered(await call.worker.ask(Resume(call_id, offer), Answered))
        return call

    async def close(self, reason: str = "drained") -> None:
        """Hang up every call, each with its reason, and wait for them."""
        await asyncio.gather(*(call.hang_up(reason) for call in self), return_exceptions=True)

    def _choose(self) -> "_Worker":
        if not self._workers:
            raise EngineError("no media worker is ready; try again in a second", retry_after_s=1.0)
        workers = self._workers.values()
        with_line = [worker for worker in workers if worker.has_line]
        return min(with_line or workers, key=lambda worker: len(worker.calls))

    def _drop(self, call: "RemoteCall") -> None:
        """Forget a call that has come to nothing."""
        self._calls.pop(call.id, None)
        call.worker.calls.pop(call.id, None)

    # ---- the workers

    async def carry(self, name: str, pipe: Pipe) -> None:
        """Be the front's end of a worker's pipe until the worker is lost: dead, or silent."""
        worker = _Worker(name, pipe)
        reading = asyncio.create_task(self._read(worker))
        try:
            await _watch(worker, reading)
        finally:
            reading.cancel()
            pipe.close()
            await asyncio.wait({reading})
            if not reading.cancelled() and (error := reading.exception()) is not None:
                log.error("media worker %s says what cannot be taken: %s", name, error)
            self._lose(worker)

    async def metrics(self) -> dict[str, list[Metric]]:
        """What each worker has counted."""
        workers = list(self._workers.values())
        counted = await asyncio.gather(*(worker.ask(Count(), Counted) for worker in workers), return_exceptions=True)
        told = zip(workers, counted, strict=True)
        return {worker.name: list(outcome.metrics) for worker, outcome in told if isinstance(outcome, Counted)}

    async def _read(self, worker: "_Worker") -> None:
        while (message := await worker.pipe.receive()) is not None:
            worker.heard_of = True
            self._take(worker, message)

    def _take(self, worker: "_Worker", message: ToFront | ToWorker) -> None:
        match message:
            case Report(calls):
                self._workers.setdefault(worker.name, worker)
                self._begun = self._begun or len(self._workers) == self._wanted
                for seen in calls:
                    worker.see(seen)
            case Prompted(call, prompt):
                if call in worker.calls:
                    worker.calls[call].prompt = prompt
            case Over(seen):
                self._end(worker, seen)
            case Reply(number, outcome):
                if isinstance(outcome, Seen) and outcome.state is SessionState.ENDED:
                    self._end(worker, outcome)
                worker.resolve(number, outcome)
            case Happened(number, event):
                worker.tell(number, event)
            case _:
                raise ValueError(f"{type(message).__name__} is nothing that a worker says")

    def _end(self, worker: "_Worker", seen: Seen) -> None:
        call = worker.calls.pop(seen.call, None)
        if call is not None:
            call.take(seen)
            self._bury(call)

    def _lose(self, worker: "_Worker") -> None:
        """All of its calls are over, and only those."""
        self._workers.pop(worker.name, None)
        if worker.calls:
            log.error("media worker %s is lost, and %d calls with it", worker.name, len(worker.calls))
        for call in worker.calls.values():
            call.lose()
            self._metrics.calls_ended.labels(LOST).inc()
            self._bury(call)
        worker.lose()

    def _bury(self, call: "RemoteCall") -> None:
        self._calls.pop(call.id, None)
        self._ended.add(call.id, call)


async def _watch(worker: "_Worker", reading: asyncio.Task[None]) -> None:
    """Return when the worker is gone, or hangs once it has begun to talk."""
    silent_checks, talks = 0, False
    while silent_checks < SILENT_CHECKS:
        done, _ = await asyncio.wait({reading}, timeout=CHECK_S)
        if done:
            return
        talks = talks or worker.heard_of
        silent_checks = silent_checks + 1 if talks and not worker.heard_of else 0
        worker.heard_of = False
    log.error("media worker %s hangs: nothing came from it for %g s", worker.name, CHECK_S * SILENT_CHECKS)


class _Worker:
    """One worker: its pipe, its calls, and what is awaited of it."""

    def __init__(self, name: str, pipe: Pipe) -> None:
        self.name = name
        self.pipe = pipe
        self.calls: dict[str, RemoteCall] = {}
        self.heard_of = False
        """Since the last check."""
        self._lost = False
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Outcome]] = {}
        self._listeners: dict[int, QueueListener] = {}

    @property
    def has_line(self) -> bool:
        """Whether callers wait for a row here."""
        return any(call.state is SessionState.QUEUED for call in self.calls.values())

    async def ask(self, question: Question, kind: type[K]) -> K:
        """The worker's answer, of this kind. Raises the error that it answers with, or EngineError if it is lost."""
        if self._lost:
            raise _lost()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self.pipe.send(Ask(number, question))
        try:
            outcome: Outcome = await answer
        except asyncio.CancelledError:
            self.pipe.send(Withdraw(number))
            raise
        finally:
            del self._asked[number]
        if isinstance(outcome, DuplexError):
            raise outcome
        assert isinstance(outcome, kind)
        return outcome

    @contextmanager
    def listen(self, call: str) -> Iterator[QueueListener]:
        """The call's events while the block lasts."""
        number, listener = next(self._numbers), QueueListener()
        if self._lost:
            listener(None)
        self._listeners[number] = listener
        self.pipe.send(Listen(call, number))
        try:
            yield listener
        finally:
            del self._listeners[number]
            self.pipe.send(Unlisten(number))

    def see(self, seen: Seen) -> None:
        if seen.call in self.calls:
            self.calls[seen.call].take(seen)

    def resolve(self, number: int, outcome: Outcome) -> None:
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(outcome)

    def tell(self, number: int, event: Event | None) -> None:
        if number in self._listeners:
            self._listeners[number](event)

    def lose(self) -> None:
        """Nothing that is awaited will come."""
        self._lost = True
        self.calls = {}
        for number in self._asked:
            self.resolve(number, _lost())
        for listener in self._listeners.values():
            listener({"type": "ext.session.closing", "event_id": "event_lost", "reason": LOST, "in_ms": 0})
            listener(None)


class RemoteCall:
    """A call that a worker carries, as it was last seen: at most a quarter of a second ago."""

    def __init__(self, worker: _Worker, request: CallRequest, clock: Callable[[], float]) -> None:
        self.id = request.id
        self.worker = worker
        self.answer = ""
        self.prompt: Prompt = request.prompt
        self.state = SessionState.CONNECTING
        self.ended_because: str | None = None
        self._clock = clock
        self._began_at = clock()
        self._stats: dict[str, Json] = {}

    @property
    def age_s(self) -> float:
        return self._clock() - self._began_at

    def stats(self) -> dict[str, Json]:
        return self._stats

    def tell(self, text: str | bytes) -> None:
        self.worker.pipe.send(Tell(self.id, text))

    def announce_end(self, reason: str, in_s: float) -> None:
        self.worker.pipe.send(AnnounceEnd(self.id, reason, in_s))

    @contextmanager
    def listen(self) -> Iterator[QueueListener]:
        with self.worker.listen(self.id) as listener:
            yield listener

    async def add_candidate(self, candidate: str | None, mid: str | None) -> None:
        self.worker.pipe.send(AddCandidate(self.id, candidate, mid))

    async def hang_up(self, reason: str = "hangup") -> None:
        """End the call and wait until it is over; a no-op for one that is."""
        if self.state is not SessionState.ENDED:
            self.take(await self.worker.ask(HangUp(self.id, reason), Seen))

    def be_answered(self, answered: Answered) -> None:
        """It has an answer, be it the first or one for another peer connection."""
        self.answer = answered.sdp
        self.take(answered.seen)

    def take(self, seen: Seen) -> None:
        """See it as its worker does. What is over stays so."""
        if self.state is not SessionState.ENDED:
            self.state, self.ended_because, self._stats = seen.state, seen.ended_because, seen.stats

    def lose(self) -> None:
        """Its worker is gone."""
        self.state, self.ended_because = SessionState.ENDED, LOST


def _lost() -> EngineError:
    return EngineError("the media worker of this call was lost", code=LOST, retry_after_s=1.0)
