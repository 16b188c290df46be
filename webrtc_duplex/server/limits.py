"""How often one may ask: token buckets, time an argument."""

from collections import OrderedDict
from collections.abc import Hashable

from webrtc_duplex.errors import RequestError

BURST_S = 10.0
"""So much of the allowance may be used at once after a rest."""
ASKERS = 10_000
"""Askers remembered; the one who has not asked for longest is forgotten first, and starts with a full bucket."""


class Bucket:
    """An allowance of `per_s`, of which up to `burst` may be used at once after a rest."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float) -> bool:
        """Use one up; False if there is none."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    @property
    def empty_for_s(self) -> float:
        """How long after the last `take` there will be another."""
        return max(0.0, (1 - self._tokens) / self._per_s)


class Rate:
    """An allowance of so many a minute for each asker, ten seconds' worth of it in one go."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._burst = max(1.0, self._per_s * BURST_S)
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def take(self, asker: Hashable, now: float) -> None:
        """Use one up. Raises RequestError `rate_limit_exceeded` (429), which says when there will be another."""
        bucket = self._buckets.pop(asker, None) or Bucket(self._per_s, self._burst, now)
        self._buckets[asker] = bucket
        if len(self._buckets) > ASKERS:
            self._buckets.popitem(last=False)
        if not bucket.take(now):
            raise too_many("too many requests in a short time", bucket.empty_for_s)


def too_many(message: str, retry_after_s: float) -> RequestError:
    return RequestError(message, status=429, code="rate_limit_exceeded", retry_after_s=retry_after_s)
