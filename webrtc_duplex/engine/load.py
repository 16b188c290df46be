"""What the engine measures of itself: the cost of prefill, whether there is too much to do, and its counts."""

from bisect import bisect_left

from webrtc_duplex.audio import FRAME_S
from webrtc_duplex.messages import Histogram, Stats

AGEING = 0.99
"""What is left of an estimate after a tick (half after 5.5 s): a page fault is not held against prompts for ever."""


MOST_COLUMNS = 256
"""Columns of a prompt that are run at once: at 7B sizes on an H200 6 to 8 ms by estimate, which fits between two steps
of 64 callers; more would gain nothing, as from there on the products take in proportion."""


class Cost:
    """Expected seconds of a piece of work: rises at once and falls slowly, as it is there to keep steps punctual."""

    FALL = 0.2
    MOST_S = FRAME_S
    """What takes longer does not fit between two ticks anyway."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def learn(self, seconds: float) -> None:
        """It took so long."""
        seconds = min(seconds, self.MOST_S)
        self.seconds = max(seconds, self.seconds + (seconds - self.seconds) * self.FALL)

    def age(self) -> None:
        """A tick has passed."""
        self.seconds *= AGEING


class ChunkCost:
    """Expected seconds of a prefill of n columns, learned from those whose size was a power of two."""

    def __init__(self) -> None:
        self._costs: dict[int, Cost] = {}

    def learn(self, columns: int, seconds: float) -> None:
        """A piece of so many columns took so long. Other sizes teach nothing."""
        if columns & (columns - 1) == 0:
            self._costs.setdefault(columns, Cost()).learn(seconds)

    def age(self) -> None:
        """A tick has passed."""
        for cost in self._costs.values():
            cost.age()

    def expected(self, columns: int) -> float:
        """Seconds of so many; in proportion from the next smaller size that was measured, which is rather too much."""
        below = max((size for size in self._costs if size <= columns), default=0)
        if below:
            return self._costs[below].seconds * columns / below
        return min((cost.seconds for cost in self._costs.values()), default=0.0)

    def fitting(self, gap_s: float, columns_left: int) -> int:
        """How many of the columns left to run so that they end within the gap: all, or a power of two, or 0.

        Never more than MOST_COLUMNS. Before anything was measured it is one column, and then at most twice what was.
        """
        if gap_s <= 0:
            return 0
        largest = min(columns_left, MOST_COLUMNS, 2 * max(self._costs, default=0) or 1)
        if self.expected(largest) <= gap_s:
            return largest
        sizes = (1 << bits for bits in reversed(range(largest.bit_length())))
        return next((size for size in sizes if self.expected(size) <= gap_s), 0)


class Strain:
    """Whether the engine has too much to do, judged over some seconds, with a wide gap between yes and no.

    A step is strained if it began late, left ticks out, or took nearly all of its time. `closed_because` is None while
    new calls are welcome: admission closes after 0.8 s of nothing but strained steps (or some of them for longer), and
    opens again when hardly any was strained for about 8 s.
    """

    LATE_S = 0.020
    BUSY_SHARE = 0.9
    MEMORY_STEPS = 32
    CLOSE_ABOVE = 0.25
    OPEN_BELOW = 0.02
    LASTS_S = 8.0
    """What a refused caller is told to wait. Once steps are at ease, admission opens after 6.4 s where a quarter of
    them had been strained, after 9.9 s where all had."""

    def __init__(self) -> None:
        self.closed_because: str | None = None
        self._share = 0.0  # of strained steps lately, exponentially forgotten

    def note(self, late_s: float, step_s: float, busy_s: float, skipped: int) -> None:
        """A step began `late_s` late and took `step_s`; `busy_s` is that over all the sub-ticks of a frame."""
        strained = late_s > self.LATE_S or skipped > 0 or busy_s > self.BUSY_SHARE * FRAME_S
        self._share += (strained - self._share) / self.MEMORY_STEPS
        if self.closed_because is None and self._share > self.CLOSE_ABOVE:
            self.closed_because = (
                f"the engine is overloaded: {self._share:.0%} of its steps of late were strained; the last one"
                f" began {late_s * 1e3:.0f} ms late and took {step_s * 1e3:.0f} ms of {FRAME_S * 1e3:.0f}"
            )
        elif self._share < self.OPEN_BELOW:
            self.closed_because = None

    def relax(self) -> None:
        """A tick without anybody to step."""
        self.note(0.0, 0.0, 0.0, 0)


class Tally:
    """A histogram in the making."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Histogram:
        """The counts so far."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


_MILLISECONDS = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 120, 160, 320, 640)
_STEP_BOUNDS_S = tuple(ms / 1000 for ms in _MILLISECONDS)
_BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)
_PREFILL_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Counts:
    """Everything that is counted since the engine's start."""

    def __init__(self) -> None:
        self.step_s = Tally(_STEP_BOUNDS_S)
        self.late_s = Tally(_STEP_BOUNDS_S)
        self.batch = Tally(_BATCH_BOUNDS)
        self.prefill_s = Tally(_PREFILL_BOUNDS_S)
        self.skipped_ticks = 0
        self.missing_frames = 0
        self.leases = 0
        self.refused = 0
        self.faults = 0
        self.stale = 0

    def note(self, late_s: float, step_s: float, rows: int, skipped: int, missing: int) -> None:
        """A step of so many rows was made."""
        self.late_s.add(late_s)
        self.step_s.add(step_s)
        self.batch.add(rows)
        self.skipped_ticks += skipped
        self.missing_frames += missing

    def snapshot(self) -> Stats:
        """The counts as a message."""
        return Stats(
            step_s=self.step_s.snapshot(),
            late_s=self.late_s.snapshot(),
            batch=self.batch.snapshot(),
            prefill_s=self.prefill_s.snapshot(),
            skipped_ticks=self.skipped_ticks,
            missing_frames=self.missing_frames,
            leases=self.leases,
            refused=self.refused,
            faults=self.faults,
            stale=self.stale,
        )
