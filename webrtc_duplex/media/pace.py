"""When what the agent says is there to be played: not all steps of a model take the same time."""

from bisect import bisect_left, insort
from collections import deque

from webrtc_duplex.audio import FRAME_S


class Pace:
    """How long after its tick a frame comes, all but the slowest. One for each engine, whose calls step together.

    Where this process itself was held up, as it is by every call that comes in, the next frames need not wait for that:
    it could not have sent them meanwhile either.
    """

    _REMEMBERED_S = 256 * FRAME_S
    _SLOWER = 0.02  # this share comes later still: `Playout` waits for it, or is silent
    _LONGEST_WAY_S = 0.005  # from the engine's end of a step until its frames are here

    def __init__(self) -> None:
        self._delays: deque[tuple[float, float]] = deque()  # (tick, delay), at most one a tick of _REMEMBERED_S
        self._sorted: list[float] = []

    def note(self, tick_at: float, said_at: float, now: float) -> None:
        """The frames of a tick have come, which the engine had said at `said_at`."""
        delay_s = min(now, said_at + self._LONGEST_WAY_S) - tick_at
        while self._delays and self._delays[0][0] <= tick_at - self._REMEMBERED_S:
            _, forgotten = self._delays.popleft()
            del self._sorted[bisect_left(self._sorted, forgotten)]
        self._delays.append((tick_at, delay_s))
        insort(self._sorted, delay_s)

    @property
    def usual_s(self) -> float:
        """By so long after its tick nearly every frame is there; 0 before the first one."""
        return self._sorted[int(len(self._sorted) * (1 - self._SLOWER))] if self._sorted else 0.0
