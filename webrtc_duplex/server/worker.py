"""A media worker: a process that carries calls, and does as the front process says.

It has a connection to the engine of its own, so that its rows are freed when it dies, and no HTTP at all.
"""

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import assert_never

from webrtc_duplex.errors import DuplexError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.server.engines import Engine
from webrtc_duplex.server.metrics import Metrics
from webrtc_duplex.server.pipe import (
    BEAT_S,
    BEATS,
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
from webrtc_duplex.server.session import Calls, Session, SessionState, fault_of_ours
from webrtc_duplex.settings import Settings

log = logging.getLogger(__name__)

ENGINE_WAIT_S = 2.0
"""So long an offer waits for the engine, which the front may have found a moment earlier."""


async def work(pipe: Pipe, engine: Engine, settings: Settings) -> None:
    """Carry calls until the pipe's other end is closed."""
    metrics = Metrics(None)
    async with Calls(engine, settings, metrics) as calls:
        await Worker(pipe, engine, calls, metrics).run()


class Worker:
    """Acts on the front's messages. Owns a task for every question, every listener, and every call's end."""

    def __init__(self, pipe: Pipe, engine: Engine, calls: Calls, metrics: Metrics) -> None:
        self._pipe = pipe
        self._engine = engine
        self._calls = calls
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[int, asyncio.Task[None]] = {}  # by the number of the question
        self._listening: dict[int, asyncio.Task[None]] = {}  # by the number of the listener
        self._prompts: dict[str, Prompt] = {}  # by call: the one that the front knows

    async def run(self) -> None:
        """Returns when the front is gone."""
        self._start(self._report())
        try:
            while (message := await self._pipe.receive()) is not None:
                self._take(message)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _report(self) -> None:
        """Tell once a second how all calls fare; in between, as a sign of life, of those in another state."""
        states: dict[str, SessionState] = {}
        for beat in itertools.cycle(range(BEATS)):
            calls = list(self._calls)
            for session in calls:
                self._tell_prompt(session)
            told = [session for session in calls if not beat or session.state is not states.get(session.id)]
            self._pipe.send(Report(tuple(map(seen, told))))
            states = {session.id: session.state for session in calls}
            await asyncio.sleep(BEAT_S)

    def _take(self, message: ToWorker | ToFront) -> None:
        match message:
            case Ask(number, question):
                self._asked[number] = self._start(self._reply(number, question))
            case Withdraw(number):
                self._stop(self._asked, number)
            case Listen(call, number):
                self._listening[number] = self._start(self._listen(number, call))
            case Unlisten(number):
                self._stop(self._listening, number)
            case AddCandidate() | Tell() | AnnounceEnd():
                self._start(self._order(message))
            case _:
                raise ValueError(f"{type(message).__name__} is nothing that a worker is told")

    def _stop(self, tasks: dict[int, asyncio.Task[None]], number: int) -> None:
        """A no-op for what is over."""
        if (task := tasks.pop(number, None)) is not None:
            task.cancel()

    # ---- questions

    async def _reply(self, number: int, question: Question) -> None:
        """Answer, also with what went wrong."""
        try:
            outcome = await self._answer(question)
        except DuplexError as error:
            outcome = error
        except Exception:
            log.exception("a question of the front's failed: %s", type(question).__name__)
            outcome = fault_of_ours()
        finally:
            self._asked.pop(number, None)
        self._pipe.send(Reply(number, outcome))

    async def _answer(self, question: Question) -> Outcome:
        match question:
            case Answer(request):
                await self._engine.wait_ready(ENGINE_WAIT_S)
                session = await self._calls.answer(request)
                self._prompts[session.id] = request.prompt
                self._start(self._follow(session))
                return Answered(session.answer, seen(session))
            case Resume(call, offer):
                session = await self._calls.resume(call, offer)
                return Answered(session.answer, seen(session))
            case HangUp(call, reason):
                session = self._calls.find(call)
                await session.hang_up(reason)
                return seen(session)
            case Count():
                return Counted(tuple(self._metrics.registry.collect()))
            case _:
                assert_never(question)

    async def _follow(self, session: Session) -> None:
        await session.wait_over()
        self._tell_prompt(session)
        del self._prompts[session.id]
        self._pipe.send(Over(seen(session)))

    def _tell_prompt(self, session: Session) -> None:
        """Let the front know of a prompt that has changed, once: it may be long."""
        known = self._prompts.get(session.id)
        if known is not None and session.prompt != known:
            self._prompts[session.id] = session.prompt
            self._pipe.send(Prompted(session.id, session.prompt))

    # ---- orders

    async def _order(self, order: AddCandidate | Tell | AnnounceEnd) -> None:
        """Do as told; a call that is over meanwhile needs nothing."""
        with suppress(DuplexError):
            session = self._calls.find(order.call)
            match order:
                case AddCandidate(_, candidate, mid):
                    await session.add_candidate(candidate, mid)
                case Tell(_, text):
                    session.tell(text)
                case AnnounceEnd(_, reason, in_s):
                    session.announce_end(reason, in_s)

    async def _listen(self, number: int, call: str) -> None:
        with suppress(DuplexError), self._calls.find(call).listen() as listener:
            async for event in listener:
                self._pipe.send(Happened(number, event))
        self._listening.pop(number, None)
        self._pipe.send(Happened(number, None))


def seen(session: Session) -> Seen:
    """The call as it stands."""
    return Seen(session.id, session.state, session.ended_because, session.stats())
