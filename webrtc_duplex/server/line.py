"""The line of callers who wait for a row, connected already; and how long a wait for a row will be."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Line:
    """Who waits, by call id; first come, first served.

    Only who is there counts: a caller who has not connected yet, or is not heard of any more, keeps a place but stands
    in nobody's way. Bounded by the calls there may be, each of which waits for so long as it asked to.
    """

    def __init__(self) -> None:
        self._there: dict[str, bool] = {}  # in the order in which they came

    def __len__(self) -> int:
        """How many are there."""
        return sum(self._there.values())

    @contextmanager
    def place(self, call: str) -> Iterator[None]:
        """Stand at its end for as long as the block lasts."""
        self._there[call] = False
        try:
            yield
        finally:
            del self._there[call]

    def see(self, call: str, there: bool) -> None:
        """Whether a caller in line is there."""
        self._there[call] = there

    def position(self, call: str) -> int:
        """1 for whoever is next."""
        before = list(self._there.values())[: list(self._there).index(call)]
        return 1 + sum(before)


LIKELY_CALL_S = 60.0
"""Taken for the length of one call that has ended, lest the first ones say too much."""
CALLS_REMEMBERED = 64
LONGEST_WAIT_S = 120.0
"""Nobody is told to wait longer: it is an estimate, and somebody may hang up."""


class Turnover:
    """How soon rows become free, from how long calls have lasted of late.

    With R rows leased, and calls of L seconds on average, a row becomes free every L / R seconds. L is the time spent
    in calls, running ones too, by the number of those that have ended. Where calls are ended after a longest duration,
    the next end is no later than that of the oldest.
    """

    def __init__(self, longest_s: float | None, clock: Callable[[], float]) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._began: dict[str, float] = {}  # of running calls, the oldest first
        self._lasted = deque[float](maxlen=CALLS_REMEMBERED)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A call that holds a row for as long as the block lasts."""
        self._began[name] = self._clock()
        try:
            yield
        finally:
            self._lasted.append(self._clock() - self._began.pop(name))

    def wait_s(self, turns: int, rows: int) -> float:
        """How long it will take until so many of all rows have become free, of which this process may hold a part."""
        now = self._clock()
        running = [now - began for began in self._began.values()]
        length_s = (LIKELY_CALL_S + sum(running) + sum(self._lasted)) / (1 + len(self._lasted))
        wait_s = min(turns * length_s / rows, LONGEST_WAIT_S)
        if self._longest_s is not None and turns <= len(running):
            wait_s = min(wait_s, self._longest_s - running[turns - 1])
        return max(1.0, wait_s)
