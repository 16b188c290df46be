"""The engine as asyncio sees it, with a real engine at a real socket."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from tests.engine_doubles import EchoDouble, engine_thread, tone
from webrtc_duplex.audio import FRAME_S
from webrtc_duplex.engine.loop import SOCKET_NAME
from webrtc_duplex.errors import CapacityError, EngineError, RequestError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.server.engine_client import DuplexStream, EngineClient, Said
from webrtc_duplex.settings import EngineSettings


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[EngineClient]:
    """A client of an engine with two rows."""
    with engine_thread(tmp_path, EchoDouble(2)) as socket_path:
        async with EngineClient(socket_path) as client:
            await client.wait_ready(5)
            yield client


async def go_live(stream: DuplexStream) -> int:
    """Start the stream; returns its first position."""
    stream.start()
    await stream.live.wait()
    assert stream.schedule is not None
    return stream.schedule.position


async def test_what_is_put_before_the_model_comes_back_under_its_position(client: EngineClient) -> None:
    async with client.open("a", Prompt(text="hello")) as stream:
        await stream.prefilled.wait()
        first = await go_live(stream)
        stream.hear(first, tone(440))
        stream.hear(first + 1, tone(880))
        said = [await anext(stream) for _ in range(3)]
    assert [frame.position for frame in said] == [first, first + 1, first + 2]
    assert np.array_equal(said[0].pcm, tone(440)) and np.array_equal(said[1].pcm, tone(880))
    assert [frame.heard for frame in said] == [True, True, False] and not said[2].pcm.any()
    assert [frame.text for frame in said] == [" yes", " no", ""]
    assert said[1].at - said[0].at == pytest.approx(FRAME_S)


def test_the_client_works_on_uvloop_as_well(tmp_path: Path) -> None:
    async def say_and_hear() -> Said:
        async with EngineClient(tmp_path / SOCKET_NAME) as client:
            await client.wait_ready(5)
            async with client.open("a", Prompt()) as stream:
                stream.hear(await go_live(stream), tone())
                return await anext(stream)

    with engine_thread(tmp_path, EchoDouble(1)):
        assert np.array_equal(uvloop.run(say_and_hear()).pcm, tone())


async def test_a_call_beyond_the_rows_is_refused_and_gets_in_after_one_leaves(client: EngineClient) -> None:
    async with client.open("a", Prompt()):
        async with client.open("b", Prompt()):
            with pytest.raises(CapacityError, match="all 2 rows are leased"):
                async with client.open("c", Prompt()):
                    pass
        async with client.open("c", Prompt()):
            pass


async def test_an_unknown_voice_is_the_callers_error_and_leases_nothing(client: EngineClient) -> None:
    for _ in range(3):
        with pytest.raises(RequestError, match="nobody") as caught:
            async with client.open("a", Prompt(voice="nobody")):
                pass
        assert caught.value.code == "unknown_voice" and caught.value.param == "voice"
    async with client.open("a", Prompt()), client.open("b", Prompt()):
        pass


async def test_an_update_is_obeyed_before_the_first_step_only(client: EngineClient) -> None:
    async with client.open("a", Prompt()) as stream:
        await stream.update(Prompt(voice="bob", text="short"))
        await stream.prefilled.wait()
        with pytest.raises(RequestError) as refused:
            await stream.update(Prompt(voice="nobody"))
        assert refused.value.code == "unknown_voice"
        await go_live(stream)
        with pytest.raises(RequestError) as late:
            await stream.update(Prompt())
        assert late.value.code == "cannot_update"


async def test_a_position_that_goes_back_is_an_error_of_that_call_only(client: EngineClient) -> None:
    async with client.open("a", Prompt()) as one, client.open("b", Prompt()) as other:
        one.hear(5, tone())
        one.hear(5, tone())
        with pytest.raises(RequestError, match="4 came after 5"):
            one.hear(4, tone())
        other.hear(0, tone())


async def test_a_call_that_was_held_goes_on_where_it_was(client: EngineClient) -> None:
    async with client.open("a", Prompt()) as stream:
        await go_live(stream)
        position = (await anext(stream)).position
        stream.hold()
        await asyncio.sleep(0.2)
        last = max([position] + [frame.position for frame in stream._queue])
        assert await go_live(stream) == last + 1


async def test_a_schedule_that_crosses_a_hold_is_not_taken(client: EngineClient) -> None:
    async with client.open("a", Prompt()) as stream:
        stream.start()
        stream.hold()
        await asyncio.sleep(0.05)
        assert stream.schedule is None and not stream.live.is_set()
        assert await go_live(stream) == 0


async def test_an_open_that_was_given_up_leaves_no_lease_behind(client: EngineClient) -> None:
    for _ in range(5):
        opening = asyncio.create_task(client.open("a", Prompt()).__aenter__())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    async with client.open("b", Prompt()), client.open("c", Prompt()):
        pass


async def test_a_second_open_of_a_call_that_is_still_being_opened_is_a_conflict(client: EngineClient) -> None:
    opening = asyncio.create_task(client.open("a", Prompt()).__aenter__())
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as conflict:
        await client.open("a", Prompt()).__aenter__()
    assert conflict.value.status == 409
    (await opening).close()


async def test_a_slow_reader_gets_the_newest_frames_and_the_loss_is_counted(client: EngineClient) -> None:
    async with client.open("a", Prompt()) as stream:
        await go_live(stream)
        first = await anext(stream)
        await asyncio.sleep(8 * FRAME_S)
        frames = [await anext(stream) for _ in range(4)]
        assert stream.dropped >= 3
        assert frames[0].position == first.position + 1 + stream.dropped


async def test_leaving_the_block_ends_the_iteration_quietly(client: EngineClient) -> None:
    async with client.open("a", Prompt()) as stream:
        await go_live(stream)
        reader = asyncio.create_task(collect(stream))
        await asyncio.sleep(3 * FRAME_S)
    assert len(await reader) >= 1


async def test_a_lost_engine_ends_every_stream_and_the_next_engine_is_found(tmp_path: Path) -> None:
    with ExitStack() as engine:
        path = engine.enter_context(engine_thread(tmp_path, EchoDouble(2)))
        async with EngineClient(path) as client:
            await client.wait_ready(5)
            async with client.open("a", Prompt()) as stream, client.open("b", Prompt()) as other:
                engine.close()
                for each in (stream, other):
                    with pytest.raises(EngineError) as lost:
                        await anext(each)
                    assert lost.value.code == "engine_lost"
            assert not client.ready and client.unready_because == "the engine is starting"
            assert client.last_step is None and client.stats is None
            with pytest.raises(EngineError):
                async with client.open("c", Prompt()):
                    pass
            with engine_thread(tmp_path, EchoDouble(2)):
                await client.wait_ready(5)
                async with client.open("c", Prompt()) as stream:
                    await go_live(stream)
                    await anext(stream)


async def test_the_ring_of_a_lost_engine_is_let_go_while_its_calls_still_end(tmp_path: Path) -> None:
    with ExitStack() as engine:
        path = engine.enter_context(engine_thread(tmp_path, EchoDouble(1)))
        async with EngineClient(path) as client:
            await client.wait_ready(5)
            async with client.open("a", Prompt()) as stream:
                ring = weakref.ref(stream._engine.ring)
                engine.close()
                with pytest.raises(EngineError):
                    await anext(stream)
                stream.hear(0, tone())
                assert ring() is None


async def test_leases_belong_to_a_connection_and_end_with_it(tmp_path: Path) -> None:
    with engine_thread(tmp_path, EchoDouble(1)) as path:
        async with EngineClient(path) as other:
            await other.wait_ready(5)
            async with EngineClient(path) as client:
                await client.wait_ready(5)
                never_left = client.open("a", Prompt())
                await never_left.__aenter__()
                with pytest.raises(CapacityError):
                    await other.open("a", Prompt()).__aenter__()
            while (step := other.last_step) is None or not step.free_rows:
                await asyncio.sleep(0.01)
            async with other.open("a", Prompt()):
                pass


async def test_a_caller_who_never_comes_is_told_so(tmp_path: Path) -> None:
    with engine_thread(tmp_path, EchoDouble(1), EngineSettings(connect_deadline_s=0.2)) as path:
        async with EngineClient(path) as client:
            await client.wait_ready(5)
            async with client.open("a", Prompt()) as stream:
                with pytest.raises(EngineError) as ended:
                    await anext(stream)
                assert ended.value.code == "connect_timeout"


async def test_an_engine_that_says_hello_while_it_is_being_connected_to_serves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it there was one that closed without a Hello, as one that is killed while it starts."""
    loop = asyncio.get_running_loop()
    connect = loop.create_unix_connection
    path = tmp_path / SOCKET_NAME
    client = EngineClient(path)
    closed = asyncio.Event()

    async def return_after_hello(*args: Any) -> Any:
        connected = await connect(*args)
        if closed.is_set():
            await client.wait_ready(5)
        return connected

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()
        closed.set()

    monkeypatch.setattr(loop, "create_unix_connection", return_after_hello)
    async with client:
        async with await asyncio.start_unix_server(close, path):
            await closed.wait()
            with pytest.raises(EngineError, match="starting"):
                _ = client.card
        path.unlink(missing_ok=True)
        with engine_thread(tmp_path, EchoDouble(2)):
            await client.wait_ready(5)
            assert client.rows == 2 and client.card.pieces


async def test_one_rows_fault_ends_that_call_and_no_other(tmp_path: Path) -> None:
    runner = EchoDouble(2)
    with engine_thread(tmp_path, runner) as path:
        async with EngineClient(path) as client:
            await client.wait_ready(5)
            async with client.open("a", Prompt()) as sick, client.open("b", Prompt()) as well:
                await go_live(sick)
                await go_live(well)
                runner.faulty = {sick.lease.row}
                with pytest.raises(EngineError) as ended:
                    await collect(sick)
                assert ended.value.code == "server_error"
                runner.faulty = set()
                for _ in range(5):
                    await anext(well)
                async with client.open("c", Prompt()) as heir:
                    assert heir.lease.row == sick.lease.row and heir.lease.epoch == sick.lease.epoch + 1
                    await go_live(heir)
                    assert (await anext(heir)).token == 1


async def collect(stream: DuplexStream) -> list[Said]:
    return [said async for said in stream]
