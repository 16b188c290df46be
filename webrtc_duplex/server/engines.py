"""Several engines, one a device, as one: a call goes to the one with the most room."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from webrtc_duplex.errors import CapacityError, EngineError
from webrtc_duplex.messages import Histogram, ModelCard, Prompt, Stats, Stepped
from webrtc_duplex.server.engine_client import DuplexStream, EngineClient


class Engine(Protocol):
    """What calls are opened on. `EngineClient` says what each of these is."""

    @property
    def ready(self) -> bool: ...
    @property
    def unready_because(self) -> str | None: ...
    @property
    def card(self) -> ModelCard: ...
    @property
    def rows(self) -> int: ...
    @property
    def last_step(self) -> Stepped | None: ...
    @property
    def stats(self) -> Stats | None: ...

    async def wait_ready(self, timeout_s: float | None) -> None: ...
    def open(self, call: str, prompt: Prompt) -> AbstractAsyncContextManager[DuplexStream]: ...


class HasRoom(Protocol):
    """Something that calls can be put on."""

    def free_rows(self) -> int: ...


R = TypeVar("R", bound=HasRoom)


def by_room(places: Iterable[R]) -> list[R]:
    """In which order places are asked to take a call: the one with the most room first."""
    return sorted(places, key=lambda place: place.free_rows(), reverse=True)


class Engines:
    """Engines that serve the same model. One that is lost takes its own calls with it; the others go on."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self._engines = engines
        self._seats = [_Seat(engine) for engine in engines]

    @property
    def ready(self) -> bool:
        """Whether any of them serves."""
        return any(engine.ready for engine in self._engines)

    @property
    def unready_because(self) -> str | None:
        if not self.ready:
            return self._engines[0].unready_because
        return None if self.last_step is None else self.last_step.closed_because

    @property
    def card(self) -> ModelCard:
        """Raises EngineError while none serves."""
        return (self._serving() or list(self._engines))[0].card

    @property
    def rows(self) -> int:
        """Of all that serve; raises EngineError while none does."""
        if not self.ready:
            return self._engines[0].rows
        return sum(engine.rows for engine in self._serving())

    @property
    def last_step(self) -> Stepped | None:
        """All rows that are free, and the worst of their last steps; closed only if all are."""
        steps = [step for engine in self._serving() if (step := engine.last_step) is not None]
        if not steps:
            return None
        closed = [step.closed_because for step in steps if step.closed_because is not None]
        return Stepped(
            tick_at=max(step.tick_at for step in steps),
            step_s=max(step.step_s for step in steps),
            late_s=max(step.late_s for step in steps),
            skipped=max(step.skipped for step in steps),
            free_rows=sum(step.free_rows for step in steps),
            closed_because=closed[0] if len(closed) == len(steps) else None,
        )

    @property
    def stats(self) -> Stats | None:
        """What all that serve have counted together."""
        stats = [stats for engine in self._serving() if (stats := engine.stats) is not None]
        return _together(stats) if stats else None

    async def wait_ready(self, timeout_s: float | None) -> None:
        """Wait until one of them serves; raises EngineError if none does in time (None: for as long as it takes)."""
        waits = [asyncio.create_task(engine.wait_ready(timeout_s)) for engine in self._engines]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            next(wait for wait in waits if wait.done()).result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)

    @asynccontextmanager
    async def open(self, call: str, prompt: Prompt) -> AsyncIterator[DuplexStream]:
        """Lease a row where there is one; raises what `EngineClient.open` does, CapacityError only if all are full."""
        async with AsyncExitStack() as row:
            yield await self._lease(row, call, prompt)

    async def _lease(self, row: AsyncExitStack, call: str, prompt: Prompt) -> DuplexStream:
        refusal: CapacityError | EngineError = EngineError("the engine is starting", retry_after_s=5.0)
        for seat in by_room(self._seats):
            if seat.engine.ready:
                try:
                    return await row.enter_async_context(seat.open(call, prompt))
                except CapacityError as full:
                    refusal = full
        raise refusal

    def _serving(self) -> list[EngineClient]:
        return [engine for engine in self._engines if engine.ready]


class _Seat:
    """An engine, and how much room there is on it: by its last step, less what has been opened since."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self._since: Stepped | None = None
        self._opened = 0

    def free_rows(self) -> int:
        """By what is known; the engine itself decides."""
        step = self.engine.last_step
        if step is not self._since:
            self._since, self._opened = step, 0
        return (step.free_rows if step is not None else 0) - self._opened

    def open(self, call: str, prompt: Prompt) -> AbstractAsyncContextManager[DuplexStream]:
        self._opened += 1
        return self.engine.open(call, prompt)


@asynccontextmanager
async def join(sockets: Iterable[Path]) -> AsyncIterator[tuple[Engines, list[EngineClient]]]:
    """Connections to the engines at these sockets while the block lasts: as one, and one by one."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(EngineClient(path)) for path in sockets]
        yield Engines(clients), clients


def _together(stats: Sequence[Stats]) -> Stats:
    return Stats(
        step_s=_sum([one.step_s for one in stats]),
        late_s=_sum([one.late_s for one in stats]),
        batch=_sum([one.batch for one in stats]),
        prefill_s=_sum([one.prefill_s for one in stats]),
        skipped_ticks=sum(one.skipped_ticks for one in stats),
        missing_frames=sum(one.missing_frames for one in stats),
        leases=sum(one.leases for one in stats),
        refused=sum(one.refused for one in stats),
        faults=sum(one.faults for one in stats),
        stale=sum(one.stale for one in stats),
    )


def _sum(histograms: Sequence[Histogram]) -> Histogram:
    """All have the same bounds, as all engines run the same code."""
    counts = tuple(map(sum, zip(*(one.counts for one in histograms), strict=True)))
    return Histogram(histograms[0].bounds, counts, sum(one.total for one in histograms))
