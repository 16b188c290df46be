"""Several engines as one: real engines in threads."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from tests.engine_doubles import CARD, EchoDouble, engine_thread
from webrtc_duplex.errors import CapacityError, EngineError, RequestError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.server.engines import Engines, join


@pytest.fixture
def threads(tmp_path: Path) -> Iterator[tuple[list[Path], list[ExitStack]]]:
    """Two engines of two rows: their sockets, and what ends each."""
    sockets, ends = [], []
    with ExitStack() as both:
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            ends.append(both.enter_context(ExitStack()))
            sockets.append(ends[-1].enter_context(engine_thread(tmp_path / name, EchoDouble(rows=2))))
        yield sockets, ends


@pytest.fixture
async def engines(threads: tuple[list[Path], list[ExitStack]]) -> AsyncIterator[Engines]:
    async with join(threads[0]) as (engines, clients):
        for client in clients:
            await client.wait_ready(5)
        while any(client.last_step is None for client in clients):
            await asyncio.sleep(0.01)
        yield engines


async def rows_free(engines: Engines, rows: int) -> None:
    async with asyncio.timeout(5):
        while engines.last_step is None or engines.last_step.free_rows != rows:
            await asyncio.sleep(0.01)


async def test_two_engines_have_the_rows_of_both_and_not_one_more(engines: Engines) -> None:
    assert engines.ready and engines.rows == 4 and engines.card == CARD
    async with AsyncExitStack() as calls:
        for call in "abcd":
            await calls.enter_async_context(engines.open(call, Prompt()))
        with pytest.raises(CapacityError):
            await calls.enter_async_context(engines.open("e", Prompt()))
        await rows_free(engines, 0)
    await rows_free(engines, 4)


async def test_a_call_goes_to_the_engine_with_the_most_room(engines: Engines) -> None:
    async with engines.open("a", Prompt()) as one, engines.open("b", Prompt()) as other:
        assert one.lease == other.lease  # the same row, of two engines
        await rows_free(engines, 2)


async def test_a_burst_is_spread_though_no_engine_has_told_of_its_rows_meanwhile(engines: Engines) -> None:
    async with AsyncExitStack() as calls:
        opened = [calls.enter_async_context(engines.open(str(number), Prompt())) for number in range(4)]
        streams = await asyncio.gather(*opened)
        assert sorted(stream.lease.row for stream in streams) == [0, 0, 1, 1]


async def test_a_prompt_that_is_refused_is_not_taken_to_another_engine(engines: Engines) -> None:
    with pytest.raises(RequestError, match="nobody"):
        async with engines.open("a", Prompt(voice="nobody")):
            pass
    await rows_free(engines, 4)


async def test_an_engine_that_ends_takes_only_its_own_calls_with_it(
    threads: tuple[list[Path], list[ExitStack]], engines: Engines
) -> None:
    async with engines.open("a", Prompt()) as one, engines.open("b", Prompt()) as other:
        for stream in (one, other):
            stream.start()
            await stream.live.wait()
        await asyncio.to_thread(threads[1][0].close)
        fates = await asyncio.gather(anext(one), anext(other), return_exceptions=True)
        async with asyncio.timeout(5):
            while engines.rows != 2:
                await asyncio.sleep(0.01)
        lost = [stream for stream in (one, other) if await _is_lost(stream)]
        assert len(lost) == 1 and len(fates) == 2
        assert engines.ready
        async with engines.open("c", Prompt()):
            with pytest.raises(CapacityError):
                async with engines.open("d", Prompt()):
                    pass


async def _is_lost(stream: AsyncIterator[object]) -> bool:
    try:
        for _ in range(3):
            await anext(stream)
    except EngineError as error:
        return error.code == "engine_lost"
    return False


async def test_what_engines_have_counted_is_summed(engines: Engines) -> None:
    async with engines.open("a", Prompt()), engines.open("b", Prompt()):
        async with asyncio.timeout(5):
            while engines.stats is None or engines.stats.leases != 2:
                await asyncio.sleep(0.05)


async def test_without_any_engine_nothing_is_opened() -> None:
    async with join([Path("no-engine.sock")]) as (engines, _):
        assert not engines.ready and engines.unready_because and engines.last_step is None
        with pytest.raises(EngineError):
            async with engines.open("a", Prompt()):
                pass
        with pytest.raises(EngineError):
            await engines.wait_ready(0.1)
