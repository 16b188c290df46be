"""How often one may ask: token buckets, time an argument."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from webrtc_duplex.errors import RequestError

BURST_S = 10.0
"""So much of the allowance may be used at once after a rest."""
ASKERS = 10_000
"""Askers remembered; the one who has not asked for longest is forgotten first, and starts with a full bucket."""


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class Rate:
    """An allowance of so many a minute for each asker, ten seconds' worth of it in one go."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._burst = max(1.0, self._per_s * BURST_S)
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    def take(self, asker: Hashable, now: float) -> None:
        """Use one up. Raises RequestError `rate_limit_exceeded` (429), which says when there will be another."""
        bucket = self._buckets.pop(asker, None) or _Bucket(self._burst, now)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.at) * self._per_s)
        bucket.at = now
        self._buckets[asker] = bucket
        if len(self._buckets) > ASKERS:
            self._buckets.popitem(last=False)
        if bucket.tokens < 1:
            raise too_many("too many requests in a short time", (1 - bucket.tokens) / self._per_s)
        bucket.tokens -= 1


def too_many(message: str, retry_after_s: float) -> RequestError:
    return RequestError(message, status=429, code="rate_limit_exceeded", retry_after_s=retry_after_s)
