"""When what the agent says is there to be played: not all steps of a model take the same time."""

from bisect import bisect_left, insort
from collections import deque


class Pace:
    """How long after its tick a frame comes, all but the slowest. One for each engine, whose calls step together."""

    _REMEMBERED = 256  # ticks: 20 s
    _SLOWER = 0.02  # this share comes later still: `Playout` waits for it, or is silent

    def __init__(self) -> None:
        self._delays: deque[float] = deque()  # at most _REMEMBERED: the oldest goes
        self._sorted: list[float] = []

    def note(self, delay_s: float) -> None:
        """The frames of a tick came so long after it."""
        if len(self._delays) == self._REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._delays.popleft())]
        self._delays.append(delay_s)
        insort(self._sorted, delay_s)

    @property
    def usual_s(self) -> float:
        """By so long after its tick nearly every frame is there; 0 before the first one."""
        return self._sorted[int(len(self._sorted) * (1 - self._SLOWER))] if self._sorted else 0.0
