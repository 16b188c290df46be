"""The line of callers who wait for a row, connected already: first come, first served."""

from collections.abc import Iterator
from contextlib import contextmanager


class Line:
    """Who waits, by call id. Bounded by the calls there may be, each of which waits for so long as it asked to."""

    def __init__(self) -> None:
        self._waiting: list[str] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def place(self, call: str) -> Iterator[None]:
        """Stand at its end for as long as the block lasts."""
        self._waiting.append(call)
        try:
            yield
        finally:
            self._waiting.remove(call)

    def position(self, call: str) -> int:
        """1 for whoever is next."""
        return 1 + self._waiting.index(call)
