"""How fast a caller's sound card runs beside the server's clock."""

from collections import deque
from itertools import pairwise
from statistics import median

from webrtc_duplex.media.jitter import Packet, signed

SPAN_S = 10.0
"""The least delayed packet of each such span tells how far apart the two clocks are."""
SPANS = 7
_JUMP_S = 0.5  # a timestamp that jumps so far begins anew; at 1 % a clock needs longer than a span for it


class ClockDrift:
    """Compares timestamps with the times that their packets came at.

    The network only ever adds to the difference, so of each span the smallest counts; and of the steps from span to
    span the median, as a way that has become longer is one step.
    """

    def __init__(self, rtp_clock: int) -> None:
        self._rtp_clock = rtp_clock
        self._ssrc: int | None = None
        self._timestamp = 0
        self._sent_s = 0.0
        self._span_end = 0.0
        self._least = 0.0
        self._delays: deque[tuple[float, float]] = deque(maxlen=SPANS)  # (end of a span, its smallest difference)

    def note(self, packet: Packet, now: float) -> None:
        """A packet of sound has come."""
        step_s = signed(packet.timestamp - self._timestamp, 32) / self._rtp_clock
        self._timestamp = packet.timestamp
        self._sent_s += step_s
        if packet.ssrc != self._ssrc or abs(now - self._sent_s - self._least) > _JUMP_S:
            self._begin(packet.ssrc, now)
        self._least = min(self._least, now - self._sent_s)
        if now >= self._span_end:
            self._delays.append((now, self._least))
            self._span_end, self._least = now + SPAN_S, now - self._sent_s

    @property
    def ppm(self) -> float | None:
        """How much faster than ours the caller's clock runs, in millionths; None until a minute has been heard."""
        if len(self._delays) < SPANS:
            return None
        return -1e6 * median((late - early) / (end - begin) for (begin, early), (end, late) in pairwise(self._delays))

    def _begin(self, ssrc: int, now: float) -> None:
        self._ssrc = ssrc
        self._sent_s = now
        self._least = 0.0
        self._span_end = now + SPAN_S
        self._delays.clear()
