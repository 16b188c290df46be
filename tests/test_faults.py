"""The whole system when one of its processes dies or hangs: real processes, real callers."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from tests.conftest import ROOT
from tests.processes import children, is_running
from tests.serving import serving
from webrtc_duplex.client.call import Call, connect


def server_and_engine() -> tuple[int, int]:
    """Process ids of the server that this test has started, and of its engine."""
    (server,) = [pid for pid in children(os.getpid()) if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (engine,) = children(server)
    return server, engine


async def readiness(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/readyz") as answer:
        return answer.status


async def is_greeted(call: Call) -> None:
    """The call is up, and so is its channel."""
    assert (await anext(call.events())).type == "session.created"


async def reason_of_the_end(call: Call) -> str:
    async for event in call.events():
        if event.type == "ext.session.closing":
            return str(event.body["reason"])
    return "the channel closed without a reason"


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
async def test_when_the_engine_dies_or_hangs_calls_end_with_a_reason_within_2_s_and_a_new_engine_serves(
    tmp_path: Path, fate: signal.Signals
) -> None:
    async with serving("echo", rows=2, log=tmp_path / "log") as url:
        _, engine = server_and_engine()
        async with connect(url) as one, connect(url) as other:
            await is_greeted(one)
            await is_greeted(other)
            os.kill(engine, fate)
            struck = time.monotonic()
            reasons = await asyncio.gather(reason_of_the_end(one), reason_of_the_end(other))
            took_s = time.monotonic() - struck
            assert set(reasons) == {"engine_lost"}
            assert took_s < 2
            assert await readiness(url) == 503
        async with asyncio.timeout(30):
            while await readiness(url) != 200:
                await asyncio.sleep(0.05)
            async with connect(url) as call:
                await call.wait_connected()
                await anext(call.sound())
        assert not is_running(engine)


async def test_when_the_server_is_killed_its_engine_ends_within_2_s(tmp_path: Path) -> None:
    async with serving("echo", rows=2, log=tmp_path / "log"):
        server, engine = server_and_engine()
        os.kill(server, signal.SIGKILL)
        async with asyncio.timeout(2):
            while is_running(engine):
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("request_to_end", [signal.SIGINT, signal.SIGTERM])
async def test_a_server_that_is_asked_to_end_says_goodbye_and_takes_its_engine_along(
    tmp_path: Path, request_to_end: signal.Signals
) -> None:
    async with serving("echo", "--drain-timeout-s", "60", rows=2, log=tmp_path / "log") as url:
        server, engine = server_and_engine()
        async with connect(url) as call:
            await is_greeted(call)
            os.kill(server, request_to_end)
            async with asyncio.timeout(10):
                assert await reason_of_the_end(call) == "drained"
                await anext(call.sound())
                os.kill(server, request_to_end)  # asked twice, it waits no longer
                while is_running(server):
                    await asyncio.sleep(0.02)
        assert not is_running(engine)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_model_that_is_not_there_ends_the_server_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "webrtc_duplex", "serve", "--port", "0", "--model", str(tmp_path / "nowhere")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("webrtc-duplex: ") and ended.stderr.count("\n") == 1
    assert ended.stderr.count(f"{tmp_path / 'nowhere'}") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "tiny", "--rows", "1000000"), "rows must be between 1 and 3840"),
        (("--model", "tiny", "--device", "cuda:99"), "there is no cuda"),
        (("--model", "tiny", "--device", "gpu7"), "device must be cpu, cuda or cuda:N, not 'gpu7'"),
        (("--model", "echo", "--host", "nowhere.invalid", "--insecure"), "cannot listen on nowhere.invalid:0"),
        (("--model", "echo", "--host", "203.0.113.9", "--insecure"), "Cannot assign requested address"),
    ],
)
def test_settings_that_this_machine_cannot_have_end_the_server_with_one_sentence(
    options: tuple[str, ...], sentence: str
) -> None:
    command = [sys.executable, "-m", "webrtc_duplex", "serve", "--port", "0", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr and "listening" not in ended.stderr
    assert [line.startswith("webrtc-duplex: ") for line in ended.stderr.splitlines() if sentence in line] == [True]


def test_a_port_that_is_taken_ends_the_server_with_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "webrtc_duplex", "serve", "--model", "echo", "--port", port]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr and f"cannot listen on 127.0.0.1:{port}" in ended.stderr
