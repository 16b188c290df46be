"""A scheduler driven by hand on a fake clock, with a model that does as it is told."""

from collections.abc import Callable
from typing import TypeVar

from tests.engine_doubles import FakeClock
from webrtc_duplex.engine.scheduler import Begin, Joined, Left, Prefill, Scheduler, Sent, Step, Wait
from webrtc_duplex.errors import RequestError
from webrtc_duplex.messages import (
    Event,
    Lease,
    Leased,
    Open,
    Output,
    Prompt,
    Request,
    Start,
    Stepped,
)
from webrtc_duplex.settings import EngineSettings

A = TypeVar("A", Begin, Prefill, Step)
E = TypeVar("E")

ORIGIN = 1000.0
HERE = 1
"""The connection that speaks where a test names none."""


class Desk:
    """Carries out what the scheduler says. A prompt has a column a letter; the voice `nobody` is refused."""

    def __init__(self, rows: int, settings: EngineSettings | None = None, step_s: float = 0.0) -> None:
        self.clock = FakeClock(ORIGIN)
        self.scheduler = Scheduler(rows, settings or EngineSettings(), ORIGIN)
        self.step_s = step_s
        self.column_s = 0.0
        self.faulty: set[int] = set()
        self.events: list[Sent] = []
        self.steps: list[Step] = []
        self.pieces: list[Prefill] = []
        self.begins: list[Begin] = []
        self._columns: dict[Lease, int] = {}
        self.during_step: Callable[[], None] = lambda: None
        self.tell(Joined())

    # ---- messages

    def tell(self, *messages: Request | Joined | Left, connection: int = HERE) -> list[Event]:
        """Hand messages over now; returns what was answered at once."""
        return self._keep([sent for one in messages for sent in self.scheduler.handle(connection, one, self.clock.now)])

    def _keep(self, sent: list[Sent]) -> list[Event]:
        self.events += sent
        return [event for _, event in sent]

    # ---- actions

    def act(self) -> Begin | Prefill | Step | Wait:
        """Do the next action; a wait lets its time pass."""
        action = self.scheduler.next_action(self.clock.now)
        self.do(action)
        return action

    def do(self, action: Begin | Prefill | Step | Wait) -> None:
        match action:
            case Wait(until):
                self.clock.now = max(self.clock.now, until)
            case Begin(lease, prompt):
                self.begins.append(action)
                refusal = RequestError("there is no such voice", code="unknown_voice", param="voice")
                outcome = refusal if prompt.voice == "nobody" else len(prompt.text or "")
                self._columns[lease] = len(prompt.text or "")
                self._keep(self.scheduler.begun(action, outcome, self.clock.now))
            case Prefill(lease, columns):
                self.pieces.append(action)
                self.clock.advance(columns * self.column_s)
                self._columns[lease] -= columns
                self._keep(self.scheduler.prefilled(action, self._columns[lease], self.clock.now))
            case Step(leases=leases):
                self.steps.append(action)
                self.clock.advance(self.step_s)
                self.during_step()
                sound = [lease.row not in self.faulty for lease in leases]
                rows = len(leases)
                self._keep(self.scheduler.stepped(action, [7] * rows, sound, [True] * rows, self.clock.now))

    def settle(self) -> None:
        """Do all that can be done now, until there is nothing but to wait."""
        while not isinstance(action := self.scheduler.next_action(self.clock.now), Wait):
            self.do(action)

    def until(self, kind: type[A]) -> A:
        """Go on until such an action is next, and return it undone."""
        while not isinstance(action := self.scheduler.next_action(self.clock.now), kind):
            self.do(action)
        return action

    def tick(self) -> Step:
        """Go on until a step is done, and return it."""
        step = self.until(Step)
        self.do(step)
        return step

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.act()

    # ---- shorthands

    def open(self, call: str, prompt: Prompt | None = None, connection: int = HERE) -> Lease:
        """Lease a row, go on until the caller knows of it, and settle."""
        known = len(self.of(Leased))
        self.tell(Open(call, prompt or Prompt()), connection=connection)
        while len(self.of(Leased)) == known:
            self.act()
        self.settle()
        return self.last(Leased).lease

    def live(self, call: str, connection: int = HERE) -> Lease:
        """A call that is live."""
        lease = self.open(call, connection=connection)
        self.tell(Start(lease), connection=connection)
        return lease

    def last(self, kind: type[E]) -> E:
        return self.of(kind)[-1]

    def of(self, kind: type[E]) -> list[E]:
        return [event for _, event in self.events if isinstance(event, kind)]

    def outputs(self, lease: Lease) -> list[Output]:
        """All that was said under a lease."""
        steps = self.of(Stepped)
        return [one for step in steps for one in step.outputs if Lease(one.row, one.epoch) == lease]
