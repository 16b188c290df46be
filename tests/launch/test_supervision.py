"""The engine as a process: started, lost, restarted, given up."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import children, is_running
from webrtc_duplex.engine.loop import SOCKET_NAME
from webrtc_duplex.errors import EngineError, RequestError
from webrtc_duplex.launch import supervision
from webrtc_duplex.launch.engine_process import ENGINE_NICENESS, EXIT_BAD_START, StartOrder
from webrtc_duplex.launch.supervision import EXIT_GAVE_UP, Charge, start_orders, supervise, supervise_all
from webrtc_duplex.messages import Prompt
from webrtc_duplex.server.engine_client import DuplexStream, EngineClient
from webrtc_duplex.server.engines import join
from webrtc_duplex.settings import EngineSettings


def engine_command(load: str) -> tuple[str, ...]:
    """A command that is an engine with the runner that the expression gives for `settings`."""
    code = (
        "from tests.engine_doubles import *; from webrtc_duplex.launch.engine_process import *;"
        f"raise SystemExit(engine_process(lambda settings: lambda: {load}))"
    )
    return (sys.executable, "-c", code)


ECHO = engine_command("EchoDouble(settings.rows)")
BROKEN_MODEL = engine_command("refuse('no weights are in this directory')")
IMPOSSIBLE = (sys.executable, "-c", BROKEN_MODEL[-1].replace("lambda settings: lambda:", "lambda settings:"))
DYING_MODEL = engine_command("EchoDouble(0)")  # there is no sound ring without rows

MUTE_CODE = """
import pickle, socket, sys, time
from webrtc_duplex.engine.loop import SOCKET_NAME
order = pickle.load(sys.stdin.buffer)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(str(order.directory / SOCKET_NAME))
    listener.listen()
    time.sleep(60)
"""
MUTE = (sys.executable, "-c", MUTE_CODE)
"""It listens, and stops there."""


@pytest.fixture(autouse=True)
def from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def order(tmp_path: Path) -> StartOrder:
    return StartOrder(EngineSettings(rows=2), tmp_path, log_level=30)


@asynccontextmanager
async def supervised(order: StartOrder) -> AsyncIterator[EngineClient]:
    """A client whose engine is kept running."""
    async with EngineClient(order.directory / SOCKET_NAME) as client:
        supervisor = asyncio.create_task(supervise(ECHO, Charge(order, client)))
        try:
            await client.wait_ready(20)
            yield client
        finally:
            supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await supervisor


async def go_live(stream: DuplexStream) -> None:
    stream.start()
    await stream.live.wait()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
async def test_calls_end_with_a_reason_within_2_s_when_the_engine_dies_or_hangs_and_the_next_one_serves(
    order: StartOrder, fate: signal.Signals
) -> None:
    async with supervised(order) as client:
        async with client.open("a", Prompt()) as one, client.open("b", Prompt()) as other:
            await go_live(one)
            (engine,) = children()
            os.kill(engine, fate)
            async with asyncio.timeout(2):
                for stream in (one, other):
                    with pytest.raises(EngineError) as lost:
                        async for _ in stream:
                            pass
                    assert lost.value.code == "engine_lost"
            assert not client.ready
        await client.wait_ready(20)
        assert children() != [engine]
        async with client.open("c", Prompt()) as stream:
            await go_live(stream)
            assert (await anext(stream)).token == 1


async def test_a_bad_start_is_one_sentence_and_no_restart(order: StartOrder, capfd: pytest.CaptureFixture[str]) -> None:
    async with EngineClient(order.directory / SOCKET_NAME) as client:
        assert await supervise(BROKEN_MODEL, Charge(order, client)) == EXIT_BAD_START
    assert capfd.readouterr().err == "webrtc-duplex: no weights are in this directory\n"


@pytest.mark.parametrize(("command", "accepts"), [(ECHO, True), (IMPOSSIBLE, False)])
async def test_an_engine_says_whether_its_order_is_possible(
    order: StartOrder, command: tuple[str, ...], accepts: bool
) -> None:
    async with EngineClient(order.directory / SOCKET_NAME) as client:
        charge = Charge(order, client)
        supervisor = asyncio.create_task(supervise(command, charge))
        accepting = asyncio.create_task(charge.accepted.wait())
        async with asyncio.timeout(20):
            await asyncio.wait({supervisor, accepting}, return_when=asyncio.FIRST_COMPLETED)
        assert accepting.done() is accepts and supervisor.done() is not accepts
        for task in (supervisor, accepting):
            task.cancel()
        await asyncio.wait({supervisor, accepting})


async def test_an_engine_that_dies_three_times_in_a_minute_is_given_up(
    order: StartOrder, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with EngineClient(order.directory / SOCKET_NAME) as client:
        assert await supervise(DYING_MODEL, Charge(order, client), back_off_s=(0, 0)) == EXIT_GAVE_UP
    assert capfd.readouterr().err.count("the engine dies") == 3
    assert "given up" in caplog.text


async def test_an_engine_that_stops_before_its_first_word_is_noticed(
    order: StartOrder, caplog: pytest.LogCaptureFixture
) -> None:
    async with EngineClient(order.directory / SOCKET_NAME) as client, asyncio.timeout(40):
        assert await supervise(MUTE, Charge(order, client), back_off_s=(0, 0)) == EXIT_GAVE_UP
    assert caplog.text.count("the engine is lost (it hung)") == 3
    assert not children()


@pytest.mark.parametrize("engine_fate", [None, signal.SIGSTOP])
async def test_the_engine_ends_within_2_s_when_its_server_is_killed(
    tmp_path: Path, engine_fate: signal.Signals | None
) -> None:
    code = (
        "import asyncio; from pathlib import Path; from tests.launch.test_supervision import *\n"
        "async def main():\n"
        f"    order = StartOrder(EngineSettings(rows=2), Path({str(tmp_path)!r}), 30)\n"
        "    async with supervised(order):\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    async with EngineClient(tmp_path / SOCKET_NAME) as client:
        await client.wait_ready(20)
        (engine,) = children(server.pid)
        if engine_fate is not None:
            os.kill(engine, engine_fate)
        server.kill()
        await server.wait()
        async with asyncio.timeout(2):
            while is_running(engine):
                await asyncio.sleep(0.02)


async def test_an_engine_goes_before_what_else_runs_where_that_is_allowed(order: StartOrder) -> None:
    may = subprocess.run(
        [sys.executable, "-c", "import os; os.setpriority(os.PRIO_PROCESS, 0, -10)"], capture_output=True
    )
    async with supervised(order):
        (engine,) = children()
        assert os.getpriority(os.PRIO_PROCESS, engine) == (ENGINE_NICENESS if may.returncode == 0 else 0)


async def test_an_engine_leaves_nothing_behind_when_its_server_ends(order: StartOrder) -> None:
    began = time.monotonic()
    async with supervised(order):
        assert len(list(order.directory.iterdir())) == 2
    assert not children() and not list(order.directory.iterdir())
    assert time.monotonic() - began < 60


def test_each_device_has_an_engine_of_its_own_that_sees_no_other_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    one, other = start_orders(EngineSettings(device="cuda:1, cpu"), tmp_path)
    assert (one.settings.device, one.environment["CUDA_VISIBLE_DEVICES"]) == ("cuda", "7")
    assert (other.settings.device, other.environment["CUDA_VISIBLE_DEVICES"]) == ("cpu", "5,7")
    assert one.directory != other.directory and one.directory.stat().st_mode & 0o777 == 0o700
    (tmp_path / "alone").mkdir()
    (alone,) = start_orders(EngineSettings(device="cuda:1"), tmp_path / "alone")
    assert alone.settings.device == "cuda:1"


def test_a_gpu_that_is_not_to_be_seen_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(RequestError, match="there is no cuda:1"):
        list(start_orders(EngineSettings(device="cuda:0,cuda:1"), tmp_path))


async def test_an_engine_that_is_given_up_leaves_the_other_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        supervision, "ENGINE_COMMAND", engine_command("EchoDouble(settings.rows if settings.rows > 1 else 0)")
    )
    orders = [StartOrder(EngineSettings(rows=rows), tmp_path / str(rows), 50) for rows in (1, 2)]
    for order in orders:
        order.directory.mkdir()
    async with join([order.directory / SOCKET_NAME for order in orders]) as (engines, clients):
        supervisor = asyncio.create_task(supervise_all(map(Charge, orders, clients)))
        async with asyncio.timeout(20):
            await clients[1].wait_ready(20)
            while "given up" not in caplog.text:
                await asyncio.sleep(0.05)
        assert not clients[0].ready and engines.rows == 2 and not supervisor.done()
        supervisor.cancel()
        with suppress(asyncio.CancelledError):
            await supervisor
