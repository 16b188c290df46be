"""Who is served when: admission, ticks, the order of prefill, the epoch fence.

Pure bookkeeping: no clock, no model, no sockets. Messages go in with the time (`handle`), the next thing to do comes
out (`next_action`), and what came of it goes back in (`begun`, `prefilled`, `stepped`). Each of these returns the
events to send. One thing is done at a time, and nothing but `handle` may happen between an action and its result.

Time is cut into ticks of FRAME_S from an origin, each tick into `phases` sub-ticks, and every row is stepped at its own
phase. What is due goes first; work on prompts fills the gaps, and only what is expected to end before the next tick.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import assert_never

from webrtc_duplex.audio import FRAME_S
from webrtc_duplex.engine.load import ChunkCost, Cost, Counts, Strain
from webrtc_duplex.engine.rows import Row, RowEvent, RowPool, RowState, Tenant
from webrtc_duplex.errors import CapacityError, DuplexError, EngineError, RequestError, StaleEpochError
from webrtc_duplex.messages import (
    Close,
    Ended,
    Event,
    Hold,
    Lease,
    Leased,
    Live,
    Open,
    Output,
    Prompt,
    Ready,
    Refused,
    Request,
    Start,
    Stats,
    Stepped,
    Update,
)
from webrtc_duplex.settings import EngineSettings

LIVE_LEAD_S = 0.020
"""A row goes live at the first tick at least so far ahead: its caller's first frame must still be cut and written."""

IDLE_WORK_S = 0.250
"""While nobody is live a piece of prefill may take so long; the engine must stay heard every second."""

SPARE_S = 0.002
SPARE_SHARE = 0.1
"""What work between ticks leaves free before the next one: a constant and a share of the gap."""

STATS_EVERY_S = 1.0

BLINK_S = 1e-6
"""A tick is due so much early: a wait until its time must find it due whatever the last bits of the sums are."""


# ---- what comes in beside the requests of a connection


@dataclass(frozen=True, slots=True)
class Joined:
    """A server process has connected."""


@dataclass(frozen=True, slots=True)
class Left:
    """A server process has gone, and its calls with it."""


# ---- what is to be done next


@dataclass(frozen=True, slots=True)
class Begin:
    """Reset the row and put a new prompt before it."""

    lease: Lease
    prompt: Prompt
    began_at: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run so many more columns of the row's prompt."""

    lease: Lease
    columns: int
    began_at: float


@dataclass(frozen=True, slots=True)
class Step:
    """A tick: step these rows, each with the frame of its position. Without rows it is a heartbeat only."""

    tick_at: float
    began_at: float
    skipped: int
    leases: tuple[Lease, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until then, unless a message comes."""

    until: float


Action = Begin | Prefill | Step | Wait

Sent = tuple[int, Event]
"""An event and the connection it goes to."""


class Scheduler:
    """What the engine knows of its callers. `origin` is the time of tick 0."""

    def __init__(self, rows: int, settings: EngineSettings, origin: float) -> None:
        self._pool = RowPool(rows, settings.phases)
        self._settings = settings
        self._grid = _Grid(settings.phases, origin)
        self._connections: set[int] = set()
        self._chunks = ChunkCost()
        self._begins = Cost()
        self._strain = Strain()
        self._counts = Counts()
        self._stats_at = origin

    @property
    def free_rows(self) -> int:
        """How many rows nobody holds."""
        return self._pool.free_rows

    # ---- messages

    def handle(self, connection: int, message: Request | Joined | Left, now: float) -> list[Sent]:
        """Take a message; a request of a lease that is over is dropped and counted."""
        try:
            return self._handle(connection, message, now)
        except StaleEpochError:
            self._counts.stale += 1
            return []

    def _handle(self, connection: int, message: Request | Joined | Left, now: float) -> list[Sent]:
        match message:
            case Joined():
                self._connections.add(connection)
            case _ if connection not in self._connections:
                raise StaleEpochError("the server process has gone")
            case Left():
                self._connections.discard(connection)
                for row in self._pool.of_connection(connection):
                    self._pool.free(row)
            case Open(call, prompt):
                return self._open(Tenant(connection, call), prompt, now)
            case Update(lease, prompt):
                return self._update(self._own(connection, lease), prompt, now)
            case Start(lease):
                return self._start(self._own(connection, lease), now)
            case Hold(lease):
                return self._hold(self._own(connection, lease), now)
            case Close(lease):
                self._pool.free(self._own(connection, lease))
            case _:
                assert_never(message)
        return []

    def _own(self, connection: int, lease: Lease) -> Row:
        """The row of a lease that this connection holds; raises StaleEpochError."""
        row = self._pool.require(lease)
        if row.tenant.connection != connection:
            raise StaleEpochError(f"row {lease.row} is leased to another server process")
        return row

    def _open(self, tenant: Tenant, prompt: Prompt, now: float) -> list[Sent]:
        """Lease a row; the answer is sent once the model has taken the prompt (`begun`), a refusal at once."""
        older = self._pool.of_tenant(tenant)
        events = [] if older is None else self._end(older, "superseded", "the call was opened again")
        try:
            if older is None:
                self._check_admission()
            self._pool.open(tenant, prompt, now, now + self._settings.connect_deadline_s)
        except CapacityError as error:
            self._counts.refused += 1
            return [(tenant.connection, Refused.because(tenant.call, error))]
        self._counts.leases += 1
        return events

    def _check_admission(self) -> None:
        """Raise CapacityError while there is too much to do."""
        if self._strain.closed_because is not None:
            raise CapacityError(self._strain.closed_because, code="overloaded", retry_after_s=Strain.LASTS_S)

    def _update(self, row: Row, prompt: Prompt, now: float) -> list[Sent]:
        """Take another prompt while the model has not heard the caller yet."""
        if row.state in (RowState.LIVE, RowState.HELD):
            message = "the prompt cannot change any more: the agent has begun to listen"
            return self._refuse(row, RequestError(message, code="cannot_update"))
        row.awaiting, row.asked_at = prompt, now
        return []

    def _start(self, row: Row, now: float) -> list[Sent]:
        """Go live, or remember to; a repeated start changes nothing."""
        row.wants_start = True
        return self._go_live_if_wanted(row, now)

    def _go_live_if_wanted(self, row: Row, now: float) -> list[Sent]:
        ready = row.state in (RowState.READY, RowState.HELD) and row.awaiting is None
        if not (ready and row.wants_start):
            return []
        row.after(RowEvent.STARTED)
        row.deadline = None
        row.from_tick = self._grid.tick_from(row.phase, now + LIVE_LEAD_S)
        return self._tell(row, Live(row.lease, row.position, self._grid.time_of(row.phase, row.from_tick)))

    def _hold(self, row: Row, now: float) -> list[Sent]:
        """Stop the row's time and begin its grace; before it is live, only forget that it should start."""
        row.wants_start = False
        if row.state is not RowState.LIVE:
            return []
        row.position = row.position_at(self._grid.next_tick(row.phase))
        row.after(RowEvent.HELD)
        row.deadline = now + self._settings.resume_grace_s
        return self._expire(row, now)

    # ---- what is next

    def next_action(self, now: float) -> Action:
        """What to do now: a step that is due, else work on a prompt that fits before the next one, else wait."""
        phases = self._phases_awake()
        phase = self._grid.due(phases, now)
        if phase is not None:
            return self._step(phase, now)
        return self._work(now) or Wait(self._grid.next_at(phases))

    def _phases_awake(self) -> set[int]:
        """Phases whose ticks matter: those with live rows, and phase 0 for the heartbeat."""
        return {0} | {row.phase for row in self._live()}

    def _live(self) -> list[Row]:
        return [row for row in self._pool.leased() if row.state is RowState.LIVE]

    def _step(self, phase: int, now: float) -> Step:
        """The phase's latest tick that is due; those before it are skipped, so late steps never come in a burst."""
        tick, skipped = self._grid.take(phase, now)
        rows = [row for row in self._live() if row.phase == phase and row.from_tick <= tick]
        leases = tuple(row.lease for row in rows)
        positions = tuple(row.position_at(tick) for row in rows)
        return Step(self._grid.time_of(phase, tick), now, skipped, leases, positions)

    def _work(self, now: float) -> Begin | Prefill | None:
        """The oldest prompt first: begin it, or run as many of its columns as end before the next live tick."""
        gap = self._gap(now)
        for row in self._pool.leased():
            if row.awaiting is not None and self._begins.seconds <= gap:
                return Begin(row.lease, row.awaiting, now)
            if row.awaiting is None and row.columns_left:
                columns = self._chunks.fitting(gap, row.columns_left)
                return Prefill(row.lease, columns, now) if columns else None
        return None

    def _gap(self, now: float) -> float:
        """Seconds that work may take without making a live row late."""
        phases = {row.phase for row in self._live()}
        if not phases:
            return IDLE_WORK_S
        return (self._grid.next_at(phases) - now) * (1 - SPARE_SHARE) - SPARE_S

    # ---- what came of it

    def begun(self, action: Begin, outcome: int | DuplexError, now: float) -> list[Sent]:
        """The model has taken a prompt (columns left to prefill) or refused it."""
        self._begins.learn(now - action.began_at)
        row = self._still(action.lease)
        if row is None or row.awaiting is not action.prompt:  # closed meanwhile, or there is a newer prompt
            return []
        row.awaiting = None
        if isinstance(outcome, DuplexError):
            return self._refuse(row, outcome) + self._go_live_if_wanted(row, now)
        if row.leased:
            row.after(RowEvent.UPDATED)
        row.leased, row.columns_left = True, outcome
        return self._tell(row, Leased(row.tenant.call, row.lease)) + self._ready_if_done(row, now)

    def prefilled(self, action: Prefill, columns_left: int, now: float) -> list[Sent]:
        """A piece of prompt is in."""
        self._chunks.learn(action.columns, now - action.began_at)
        row = self._still(action.lease)
        if row is None:
            return []
        row.columns_left = columns_left
        return self._ready_if_done(row, now)

    def stepped(
        self, action: Step, texts: Sequence[int], sound: Sequence[bool], heard: Sequence[bool], now: float
    ) -> list[Sent]:
        """A tick is done: text token, soundness and whether the caller was heard, for each of the action's rows."""
        outputs: dict[int, list[Output]] = defaultdict(list)
        events: list[Sent] = []
        for lease, position, text, finite, was_heard in zip(
            action.leases, action.positions, texts, sound, heard, strict=True
        ):
            row = self._still(lease)
            if row is None:  # the epoch fence: nothing of an ended lease passes here
                continue
            if not finite:
                self._counts.faults += 1
                events += self._end(row, "server_error", "the model's numbers for this call were not finite")
                continue
            outputs[row.tenant.connection].append(Output(lease.row, lease.epoch, position, text, was_heard))
        self._note(action, heard, now)
        for row in self._pool.leased():
            events += self._expire(row, now)
        return self._reports(action, outputs, now) + events

    def _note(self, action: Step, heard: Sequence[bool], now: float) -> None:
        """Count the step, and judge from it whether there is too much to do."""
        late_s, step_s = action.began_at - action.tick_at, now - action.began_at
        phases = len({row.phase for row in self._live()})
        self._begins.age()
        self._chunks.age()
        if action.leases:
            self._counts.note(late_s, step_s, len(action.leases), action.skipped, heard.count(False))
            self._strain.note(late_s, step_s, step_s * phases, action.skipped)
        elif not phases:
            self._strain.relax()

    def _reports(self, action: Step, outputs: dict[int, list[Output]], now: float) -> list[Sent]:
        """Stepped for every connection, and Stats from time to time."""
        events: list[Sent] = [
            (
                connection,
                Stepped(
                    tick_at=action.tick_at,
                    step_s=now - action.began_at,
                    late_s=action.began_at - action.tick_at,
                    skipped=action.skipped,
                    free_rows=self._pool.free_rows,
                    closed_because=self._strain.closed_because,
                    outputs=tuple(outputs.get(connection, ())),
                ),
            )
            for connection in sorted(self._connections)
        ]
        if now >= self._stats_at:
            self._stats_at = now + STATS_EVERY_S
            stats = self.stats()
            events += [(connection, stats) for connection in sorted(self._connections)]
        return events

    def stats(self) -> Stats:
        """All that was counted since the start."""
        return self._counts.snapshot()

    # ---- one row

    def _still(self, lease: Lease) -> Row | None:
        """The row of the lease an action was for; None, and counted, if it ended meanwhile."""
        try:
            return self._pool.require(lease)
        except StaleEpochError:
            self._counts.stale += 1
            return None

    def _tell(self, row: Row, event: Event) -> list[Sent]:
        return [(row.tenant.connection, event)]

    def _ready_if_done(self, row: Row, now: float) -> list[Sent]:
        if row.columns_left:
            return []
        row.after(RowEvent.PREFILLED)
        self._counts.prefill_s.add(now - row.asked_at)
        return self._tell(row, Ready(row.lease, now - row.asked_at)) + self._go_live_if_wanted(row, now)

    def _refuse(self, row: Row, error: DuplexError) -> list[Sent]:
        """Refuse the row's prompt: a lease nobody knows of is over, another one stays as it was."""
        events = self._tell(row, Refused.because(row.tenant.call, error))
        if not row.leased:
            self._pool.free(row)
        return events

    def _end(self, row: Row, reason: str, message: str) -> list[Sent]:
        """End a lease from this side and say why."""
        events = self._tell(row, Ended(row.lease, reason, message)) if row.leased else []
        self._pool.free(row)
        return events

    def _expire(self, row: Row, now: float) -> list[Sent]:
        """End the lease if its deadline is over."""
        if row.deadline is None or now < row.deadline:
            return []
        if row.state is RowState.HELD:
            return self._end(row, "media_timeout", f"no media for {self._settings.resume_grace_s:g} s more")
        if not row.leased:
            return self._refuse(row, EngineError("the engine did not get to the prompt in time"))
        return self._end(row, "connect_timeout", f"no media within {self._settings.connect_deadline_s:g} s")


class _Grid:
    """The ticks: tick k of phase p is at `origin + (k + p / phases) * FRAME_S`."""

    def __init__(self, phases: int, origin: float) -> None:
        self._phases = phases
        self._origin = origin
        self._next = [0] * phases  # first tick of each phase that is neither taken nor skipped

    def time_of(self, phase: int, tick: int) -> float:
        """When this tick is."""
        return self._origin + (tick * self._phases + phase) * (FRAME_S / self._phases)

    def next_tick(self, phase: int) -> int:
        """The phase's first tick not yet taken."""
        return self._next[phase]

    def next_at(self, phases: set[int]) -> float:
        """When the first of these phases' next ticks is."""
        return min(self.time_of(phase, self._next[phase]) for phase in phases)

    def due(self, phases: set[int], now: float) -> int | None:
        """The phase whose tick has been due the longest, or None. Ticks of phases not asked for just pass."""
        for phase in set(range(self._phases)) - phases:
            self._next[phase] = max(self._next[phase], self._latest(phase, now) + 1)
        first = min(phases, key=lambda phase: self.time_of(phase, self._next[phase]))
        return first if self._latest(first, now) >= self._next[first] else None

    def take(self, phase: int, now: float) -> tuple[int, int]:
        """The latest tick of the phase that is due, and how many before it are skipped."""
        tick = self._latest(phase, now)
        skipped = tick - self._next[phase]
        self._next[phase] = tick + 1
        return tick, skipped

    def tick_from(self, phase: int, earliest: float) -> int:
        """The phase's first tick, not yet taken, at `earliest` or later."""
        return max(self._next[phase], ceil(self._ticks(phase, earliest - BLINK_S)))

    def _latest(self, phase: int, now: float) -> int:
        """The phase's last tick that is due."""
        return floor(self._ticks(phase, now + BLINK_S))

    def _ticks(self, phase: int, at: float) -> float:
        return (at - self._origin) / FRAME_S - phase / self._phases
