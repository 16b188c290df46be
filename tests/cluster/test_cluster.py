"""A real Ray cluster on this machine, two replicas of two rows, and real callers. `scripts/test_cluster.sh` runs it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import IO

import aiohttp
import pytest

from tests.conftest import ROOT
from tests.test_faults import reason_of_the_end
from tests.test_media_workers import a_sideband_gives_orders
from webrtc_duplex.client.call import Call, connect
from webrtc_duplex.errors import CapacityError, DuplexError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S, RECOVERY_S = 180.0, 180.0
REFUSALS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `webrtc-duplex serve --cluster 2`: the tiny model, with two rows a replica."""
    pytest.importorskip("ray", reason="needs Ray: scripts/test_cluster.sh")
    port = free_port()
    command = [sys.executable, "-m", "webrtc_duplex", "serve", "--cluster", "2", "--rows", "2"]
    log = tmp_path_factory.mktemp("cluster") / "log"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONWARNINGS": "default"}
    with log.open("wb") as output:
        options = ["--port", str(port), "--drain-timeout-s", "3"]
        process = subprocess.Popen([*command, *options], cwd=ROOT, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + START_S
        while "listening on" not in log.read_text(errors="replace"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Operator:
    """Deploys one version of the application after the other, in a cluster of its own (`operator_of_serve.py`)."""

    def __init__(self, log: IO[bytes]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("operator_of_serve.py")), str(port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"},
        )

    def deploy(self, replicas: int, router: str = "rows") -> None:
        settings = {"model": "echo", "rows": 1, "signing_key": "k" * 32, "insecure": "true"}
        engine = {"num_replicas": replicas, "graceful_shutdown_timeout_s": 60, "max_surge_percent": 100}
        args = {"settings": settings, "engine": engine, "front": {"num_replicas": 1}, "router": router}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(args) + "\n")
        self._process.stdin.flush()
        assert any("told" in line for line in iter(self._process.stdout.readline, "")), "the operator has ended"

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def calls(url: str, count: int) -> AsyncIterator[list[Call]]:
    """So many callers, each of whom hears the agent. One who is refused tries again: a row may be on its way back."""
    async with AsyncExitStack() as stack:
        callers: list[Call] = []
        async with asyncio.timeout(RECOVERY_S):
            while len(callers) < count:
                try:
                    callers.append(await stack.enter_async_context(connect(url)))
                    await anext(callers[-1].packets())
                except (
                    DuplexError,
                    aiohttp.ClientError,
                    ValueError,
                ):  # ValueError: the proxy's own answer, as it starts
                    await asyncio.sleep(0.2)
        yield callers


async def ask(url: str, call: Call, path: str = "", method: str = "GET") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {call.secret}"}
    place = f"{url}/v1/realtime/calls/{call.id}{path}"
    async with aiohttp.ClientSession(headers=headers) as http, http.request(method, place) as answer:
        return answer.status, await answer.text()


def place_in(call: Call) -> str:
    return call.id[4:16]


def replicas(name: str) -> list[int]:
    """Process ids of Serve's replicas of a deployment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"ray::ServeReplica:webrtc-duplex:{name}".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def goes_on(call: Call) -> None:
    """The agent is heard, now."""
    now = time.monotonic()
    async with asyncio.timeout(5):
        async for packet in call.packets():
            if packet.at > now:
                return


async def test_every_row_of_every_replica_is_had_and_not_one_more(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with calls(cluster, 4) as four:
        places = [place_in(call) for call in four]
        assert sorted(places.count(place) for place in set(places)) == [2, 2]
        with pytest.raises(CapacityError) as refused:
            async with connect(cluster):
                pass
        assert refused.value.code == "at_capacity" and refused.value.retry_after_s
        took_ms = sorted([1000 * await time_of_a_refusal(cluster) for _ in range(REFUSALS)])
        with capsys.disabled():
            print(f"\n{REFUSALS} refusals took {took_ms[REFUSALS // 2]:.0f} ms (p50), {took_ms[-1]:.0f} ms (worst)")
        await whoever_only_looks_is_shown(cluster)
        await ask(cluster, four[0], method="DELETE")
        async with calls(cluster, 1):
            pass


async def whoever_only_looks_is_shown(url: str) -> None:
    """The page and what there is to choose, though every row is taken."""
    async with aiohttp.ClientSession(url) as http:
        for path in ("/", "/v1/models", "/readyz"):
            async with http.get(path) as answer:
                assert answer.status == 200, path


async def time_of_a_refusal(url: str) -> float:
    """Seconds from an offer to its 503, on a connection that is there."""
    offer = (ROOT / "tests" / "sdp" / "good" / "aiortc.sdp").read_bytes()
    async with aiohttp.ClientSession(url, headers={"Content-Type": "application/sdp"}) as http:
        await (await http.get("/v1/models")).read()
        began = time.monotonic()
        async with http.post("/v1/realtime/calls", data=offer) as answer:
            took_s = time.monotonic() - began
            assert answer.status == 503 and float(answer.headers["Retry-After"]) > 0
            return took_s


async def test_twelve_at_once_are_given_the_four_rows_there_are(cluster: str) -> None:
    async with AsyncExitStack() as stack:
        asked = [stack.enter_async_context(connect(cluster)) for _ in range(12)]
        met = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(call, Call) for call in met) == 4
    assert sum(isinstance(call, CapacityError) for call in met) == 8


async def test_everything_of_a_call_is_answered_where_it_is(cluster: str) -> None:
    async with calls(cluster, 2) as both:
        for call in both:
            status, text = await ask(cluster, call)
            assert status == 200 and call.id in text
            await a_sideband_gives_orders(cluster, call)
            events = asyncio.create_task(ask(cluster, call, "/events"))
            await asyncio.sleep(0.5)
            await ask(cluster, call, method="DELETE")
            status, text = await events
            assert status == 200 and '"reason": "hangup"' in text


async def test_a_forged_id_leads_nowhere(cluster: str) -> None:
    async with calls(cluster, 1) as (call,):
        forged = f"{call.id[:4]}7f0000011f90{call.id[16:]}"
        async with aiohttp.ClientSession() as http, http.get(f"{cluster}/v1/realtime/calls/{forged}") as answer:
            assert answer.status == 404


async def test_a_replica_that_is_killed_takes_only_its_own_callers_with_it_and_comes_back(cluster: str) -> None:
    async with calls(cluster, 4) as four:
        victims = [call for call in four if place_in(call) == place_in(four[0])]
        others = [call for call in four if place_in(call) != place_in(four[0])]
        os.kill(replica_with(place_in(four[0])), signal.SIGKILL)
        assert await reason_of_the_end(victims[0]) == await reason_of_the_end(victims[1]) == "drained"
        for call in others:
            await goes_on(call)
            assert (await ask(cluster, call))[0] == 200
        async with asyncio.timeout(10):
            while (await ask(cluster, victims[0]))[0] != 410:
                await asyncio.sleep(0.1)
        async with calls(cluster, 2) as newcomers:
            assert {place_in(call) for call in newcomers}.isdisjoint({place_in(four[0])})
        for call in others:
            await goes_on(call)


def replica_with(place: str) -> int:
    """The Serve replica whose server listens at this place."""
    port = int(place[8:], 16)
    for replica in replicas("Engine"):
        for task in Path(f"/proc/{replica}/task").iterdir():
            for server in (task / "children").read_text().split():
                if f"WEBRTC_DUPLEX_PORT={port}".encode() in Path(f"/proc/{server}/environ").read_bytes():
                    return replica
    raise AssertionError(f"nobody is at {place}")


async def test_live_calls_do_not_hear_of_a_front_that_is_killed(cluster: str) -> None:
    async with calls(cluster, 2) as both:
        for front in replicas("Front"):
            os.kill(front, signal.SIGKILL)
        for call in both:
            await goes_on(call)
        async with asyncio.timeout(RECOVERY_S):
            while (await ask(cluster, both[0]))[0] != 200:
                await asyncio.sleep(0.5)
        await ask(cluster, both[0], method="DELETE")
        async with calls(cluster, 3):
            pass


async def test_an_upgrade_that_is_also_a_downscale_drops_nobody(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: scripts/test_cluster.sh")
    with (tmp_path / "log").open("wb") as log:
        operator = await asyncio.to_thread(Operator, log)
        try:
            await asyncio.to_thread(operator.deploy, 2)
            async with calls(operator.url, 2) as both:
                await asyncio.to_thread(operator.deploy, 1)
                async with calls(operator.url, 1) as (newcomer,):
                    assert place_in(newcomer) not in map(place_in, both)
                    for call in both:
                        await goes_on(call)
                        assert (await ask(operator.url, call))[0] == 200
                for call in both:
                    await ask(operator.url, call, method="DELETE")
                async with asyncio.timeout(RECOVERY_S):
                    while [(await ask(operator.url, call))[0] for call in both] != [410, 410]:
                        await asyncio.sleep(0.2)
        finally:
            await asyncio.to_thread(operator.close)


async def test_without_a_router_of_ours_a_full_cluster_refuses_as_well(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: scripts/test_cluster.sh")
    with (tmp_path / "log").open("wb") as log:
        operator = await asyncio.to_thread(Operator, log)
        try:
            await asyncio.to_thread(operator.deploy, 2, "choice")
            async with calls(operator.url, 2) as both:
                assert place_in(both[0]) != place_in(both[1])
                with pytest.raises(CapacityError):
                    async with connect(operator.url):
                        pass
                await ask(operator.url, both[0], method="DELETE")
                async with calls(operator.url, 1):
                    await goes_on(both[1])
        finally:
            await asyncio.to_thread(operator.close)


def test_a_cluster_whose_servers_cannot_start_ends_with_what_they_said(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: scripts/test_cluster.sh")
    command = [sys.executable, "-m", "webrtc_duplex", "serve", "--cluster", "--port", str(free_port())]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONWARNINGS": "default"}
    ended = subprocess.run(
        [*command, "--model", "/nowhere"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 2
    assert "there is no model /nowhere" in ended.stdout + ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("webrtc-duplex: no replica has started")
