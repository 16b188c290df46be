"""Who sits where: the rows of the model, in which epoch, state and phase.

The life of a row:

    from                event                                                       to
    ------------------  ----------------------------------------------------------  ----------
    FREE                OPENED: a call has leased it; epoch + 1, state reset        PREFILLING
    PREFILLING          PREFILLED: the prompt is in                                 READY
    PREFILLING, READY   UPDATED: another prompt before the first step: begin again  PREFILLING
    READY               STARTED: media is up; stepped at every tick from now on     LIVE
    LIVE                HELD: media is lost: model time stops                       HELD
    HELD                STARTED: media is back; positions go on                     LIVE
    any but FREE        FREED: closed, refused, past a deadline, or at fault        FREE

`LIFE` is this table. What is not in it is no transition, and asking for it is a fault of this package (KeyError).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from webrtc_duplex.errors import CapacityError, StaleEpochError
from webrtc_duplex.messages import Lease, Prompt


class RowState(Enum):
    """What a row is doing."""

    FREE = auto()
    PREFILLING = auto()
    READY = auto()
    LIVE = auto()
    HELD = auto()


class RowEvent(Enum):
    """What may happen to a row."""

    OPENED = auto()
    PREFILLED = auto()
    UPDATED = auto()
    STARTED = auto()
    HELD = auto()
    FREED = auto()


LIFE: dict[tuple[RowState, RowEvent], RowState] = {
    (RowState.FREE, RowEvent.OPENED): RowState.PREFILLING,
    (RowState.PREFILLING, RowEvent.PREFILLED): RowState.READY,
    (RowState.PREFILLING, RowEvent.UPDATED): RowState.PREFILLING,
    (RowState.READY, RowEvent.UPDATED): RowState.PREFILLING,
    (RowState.READY, RowEvent.STARTED): RowState.LIVE,
    (RowState.LIVE, RowEvent.HELD): RowState.HELD,
    (RowState.HELD, RowEvent.STARTED): RowState.LIVE,
    (RowState.PREFILLING, RowEvent.FREED): RowState.FREE,
    (RowState.READY, RowEvent.FREED): RowState.FREE,
    (RowState.LIVE, RowEvent.FREED): RowState.FREE,
    (RowState.HELD, RowEvent.FREED): RowState.FREE,
}


@dataclass(frozen=True, slots=True)
class Tenant:
    """For whom a row is leased: a call of one connection."""

    connection: int
    call: str


NOBODY = Tenant(connection=-1, call="")


@dataclass(slots=True)
class Row:
    """One seat of state. Its lease (the next one is of the next epoch) and all below that is of one tenant only."""

    index: int
    phase: int
    """Which of the sub-ticks of a frame it is stepped at."""
    lease: Lease
    """The right to this row; in epoch 0 nobody has had it yet."""
    state: RowState = RowState.FREE
    tenant: Tenant = NOBODY
    awaiting: Prompt | None = None
    """A prompt that the model has still to begin; answered by Leased or Refused."""
    leased: bool = False
    """Whether the caller knows of the lease: a refusal before that is the end of it."""
    columns_left: int = 0
    """Columns of the prompt still to be prefilled."""
    wants_start: bool = False
    """Media is up, so it goes live as soon as the prompt is in."""
    asked_at: float = 0.0
    """When the prompt in the row was asked for."""
    deadline: float | None = None
    """When it is freed if nothing happens; None while it is live."""
    position: int = 0
    """Position of the frame heard at `from_tick`."""
    from_tick: int = 0

    def after(self, event: RowEvent) -> None:
        """Move on by the table."""
        self.state = LIFE[self.state, event]

    def position_at(self, tick: int) -> int:
        """The position heard at this tick, or the first one if the row is not live by then."""
        return self.position + max(0, tick - self.from_tick)


class RowPool:
    """All rows, and who holds them. Rows are spread evenly over the phases."""

    def __init__(self, rows: int, phases: int) -> None:
        self._rows = [Row(index, index % phases, Lease(index, epoch=0)) for index in range(rows)]
        self._free = list(self._rows)  # longest free first: a stale writer has had the most time to notice
        self._leased: dict[int, Row] = {}  # by index; the oldest lease first

    @property
    def free_rows(self) -> int:
        """How many rows nobody holds."""
        return len(self._free)

    def leased(self) -> list[Row]:
        """Rows held by somebody, the oldest lease first."""
        return list(self._leased.values())

    def open(self, tenant: Tenant, prompt: Prompt, now: float, deadline: float) -> Row:
        """Lease a row in a new epoch; raises CapacityError when none is free. For how long, the server knows better."""
        if not self._free:
            raise CapacityError(f"all {len(self._rows)} rows are leased")
        crowd = self._crowds()
        old = min(self._free, key=lambda row: crowd[row.phase])  # of equals the first, that is the longest free
        self._free.remove(old)
        lease = Lease(old.index, old.lease.epoch + 1)
        row = Row(old.index, old.phase, lease, tenant=tenant, awaiting=prompt, asked_at=now, deadline=deadline)
        row.after(RowEvent.OPENED)
        self._rows[row.index] = self._leased[row.index] = row
        return row

    def _crowds(self) -> dict[int, int]:
        """How many leased rows each phase has."""
        crowd = {row.phase: 0 for row in self._rows}
        for row in self._leased.values():
            crowd[row.phase] += 1
        return crowd

    def free(self, row: Row) -> None:
        """End the lease."""
        row.after(RowEvent.FREED)
        row.tenant = NOBODY
        del self._leased[row.index]
        self._free.append(row)

    def require(self, lease: Lease) -> Row:
        """The row of a lease; raises StaleEpochError if the lease is over (or never was)."""
        row = self._leased.get(lease.row)
        if row is None or row.lease != lease:
            raise StaleEpochError(f"row {lease.row} is no longer leased in epoch {lease.epoch}")
        return row

    def of_tenant(self, tenant: Tenant) -> Row | None:
        """The row that this call of this connection holds."""
        return next((row for row in self._leased.values() if row.tenant == tenant), None)

    def of_connection(self, connection: int) -> Iterable[Row]:
        """All rows that calls of this connection hold."""
        return [row for row in self._leased.values() if row.tenant.connection == connection]
