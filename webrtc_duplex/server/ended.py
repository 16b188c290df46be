"""Calls that are over, for those who ask after them a little later."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

KEPT_S = 60.0
MOST_KEPT = 10_000

C = TypeVar("C")


class Ended(Generic[C]):
    """Each call for a minute after its end. Bounded: beyond `MOST_KEPT` the oldest is forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: OrderedDict[str, tuple[float, C]] = OrderedDict()

    def add(self, call_id: str, call: C) -> None:
        """Keep a call that has ended now."""
        self._calls[call_id] = self._clock(), call
        self._forget_old_ones()

    def find(self, call_id: str) -> C | None:
        """The call of this id; None if none has ended of late."""
        self._forget_old_ones()
        kept = self._calls.get(call_id)
        return None if kept is None else kept[1]

    def _forget_old_ones(self) -> None:
        while self._calls:
            ended_at, _ = next(iter(self._calls.values()))
            if self._clock() - ended_at < KEPT_S and len(self._calls) <= MOST_KEPT:
                return
            self._calls.popitem(last=False)
