"""Several processes carry calls: real processes, real callers."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import compress
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from tests.engine_doubles import tone
from tests.processes import is_running
from tests.serving import running, serving
from tests.test_faults import readiness, reason_of_the_end
from webrtc_duplex.client.call import Call, connect
from webrtc_duplex.errors import CapacityError, RequestError
from webrtc_duplex.settings import IceSettings, ServerSettings, Settings

WORKERS = ("--media-workers", "2")

GOES_ON_S = 1.0
"""On a machine so busy that callers hardly get to speak there are gaps, but none so long; on a quiet one there is none
over 60 ms (`scripts/stress_peers.py --kill-worker`)."""


@asynccontextmanager
async def calls(url: str, count: int) -> AsyncIterator[list[Call]]:
    """So many callers who hear the agent; the workers take turns, as each time one has fewer."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connect(url)) for _ in range(count)]


async def ask(url: str, call: Call, path: str = "", method: str = "GET") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {call.secret}"}
    place = f"{url}/v1/realtime/calls/{call.id}{path}"
    async with aiohttp.ClientSession(headers=headers) as http, http.request(method, place) as answer:
        return answer.status, await answer.text()


async def longest_gap(call: Call, seconds: float) -> float:
    """Between packets of an echo's, in RTP time, while its caller talks for so long without a pause."""
    talking = asyncio.create_task(call.send(np.tile(tone(), round((seconds + 1) / 0.08))))
    places: list[int] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for packet in call.packets():
                places.append(packet.timestamp)
    talking.cancel()
    steps = [after - before for before, after in zip(places, places[1:], strict=False)]
    return max(steps[len(steps) // 4 :]) / 48_000 - 0.02  # by then it hears itself


async def metrics(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        return await answer.text()


async def rows_free(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/readyz") as answer:
        return int((await answer.json())["free_rows"])


@pytest.mark.parametrize(("fate", "callers"), [(signal.SIGKILL, 16), (signal.SIGSTOP, 4)])
async def test_a_worker_that_dies_or_hangs_takes_only_its_own_callers_with_it_and_is_restarted(
    tmp_path: Path, fate: signal.Signals, callers: int
) -> None:
    half = callers // 2
    log = tmp_path / "log"
    async with running("echo", *WORKERS, rows=callers, log=log) as server, calls(server.url, callers) as all_calls:
        url = server.url
        with pytest.raises(CapacityError):
            async with connect(url):
                pass
        victim, survivor = server.children("worker_process")
        gaps = [asyncio.create_task(longest_gap(call, 4.0)) for call in all_calls]
        following = [asyncio.create_task(ask(url, call, "/events")) for call in all_calls]
        await asyncio.sleep(2.0)
        os.kill(victim, fate)
        async with asyncio.timeout(4):
            while await rows_free(url) != half:
                await asyncio.sleep(0.02)
        answers = [await ask(url, call) for call in all_calls]
        lost = [status == 410 and "call_lost" in text for status, text in answers]
        assert sum(lost) == half
        for stream in compress(following, lost):
            assert '"reason": "worker_lost"' in (await stream)[1].splitlines()[-2]
        kept = [not gone for gone in lost]
        assert max(compress(await asyncio.gather(*gaps), kept)) < GOES_ON_S
        assert not any(stream.done() for stream in compress(following, kept))
        async with asyncio.timeout(60):
            while len(server.children("worker_process")) < 2:
                await asyncio.sleep(0.05)
            async with calls(url, 2) as newcomers:
                for call in newcomers:
                    await anext(call.packets())
        assert survivor in server.children("worker_process") and not is_running(victim)
        assert f'webrtc_duplex_calls_ended_total{{reason="worker_lost"}} {half}.0' in await metrics(url)
        for stream in following:
            stream.cancel()


async def test_a_server_is_ready_only_with_all_of_its_workers(tmp_path: Path) -> None:
    async with serving("echo", "--media-workers", "3", rows=3, log=tmp_path / "log") as url:
        told = await metrics(url)
        assert all(f'worker="{number}"' in told for number in range(3))


async def test_everything_of_a_call_finds_the_worker_that_carries_it(tmp_path: Path) -> None:
    async with serving("echo", *WORKERS, rows=4, log=tmp_path / "log") as url, calls(url, 4) as four:
        for call in four:
            assert (await anext(call.events())).type == "session.created"
            status, text = await ask(url, call)
            assert status == 200 and f'"id": "{call.id}"' in text
            await a_sideband_gives_orders(url, call)
        listening = [asyncio.create_task(ask(url, call, "/events")) for call in four]
        await asyncio.sleep(0.5)
        assert 'webrtc_duplex_calls{state="live"} 4.0' in await metrics(url)
        for call in four[:2]:
            await ask(url, call, method="DELETE")
        async with asyncio.timeout(2):
            while await rows_free(url) != 2:
                await asyncio.sleep(0.02)
        assert [status for status, _ in [await ask(url, call) for call in four]] == [200] * 4
        assert (await ask(url, four[0]))[1].count('"ended_because": "hangup"') == 1
        for call in four[2:]:
            await ask(url, call, method="DELETE")
        for status, events in await asyncio.gather(*listening):
            assert status == 200 and '"session.created"' in events
            assert '"reason": "hangup"' in events.splitlines()[-2]


async def a_sideband_gives_orders(url: str, call: Call) -> None:
    headers = {"Authorization": f"Bearer {call.secret}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.ws_connect(f"{url}/v1/realtime?call_id={call.id}") as socket,
    ):
        assert (await socket.receive_json())["type"] == "session.created"
        await socket.send_json({"type": "session.update", "event_id": "mine", "session": {"seed": "none"}})
        async for message in socket:
            if message.json()["type"] == "error":
                assert message.json()["error"]["event_id"] == "mine"
                return


async def test_workers_hang_up_with_a_reason_and_leave_nothing_when_the_server_ends(tmp_path: Path) -> None:
    async with running("echo", *WORKERS, rows=2, log=tmp_path / "log") as server:
        mine = server.children("worker_process")
        async with calls(server.url, 2) as (one, other):
            for call in (one, other):
                assert (await anext(call.events())).type == "session.created"
            os.kill(server.pid, signal.SIGTERM)
            assert await reason_of_the_end(one) == await reason_of_the_end(other) == "drained"
        async with asyncio.timeout(10):
            while any(map(is_running, [server.pid, *mine])):
                await asyncio.sleep(0.05)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("fate", [signal.SIGCONT, signal.SIGSTOP])
async def test_workers_end_within_2_s_when_the_front_is_killed(tmp_path: Path, fate: signal.Signals) -> None:
    async with running("echo", *WORKERS, rows=2, log=tmp_path / "log") as server:
        mine = server.children("worker_process")
        os.kill(mine[0], fate)
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            while any(map(is_running, mine)):
                await asyncio.sleep(0.02)


async def test_when_the_engine_dies_the_calls_of_all_workers_end_with_a_reason(tmp_path: Path) -> None:
    async with running("echo", *WORKERS, rows=2, log=tmp_path / "log") as server, calls(server.url, 2) as (one, other):
        for call in (one, other):
            assert (await anext(call.events())).type == "session.created"
        (engine,) = server.children("engine_process")
        os.kill(engine, signal.SIGKILL)
        assert await reason_of_the_end(one) == await reason_of_the_end(other) == "engine_lost"
        async with asyncio.timeout(20):
            while await readiness(server.url) != 200:
                await asyncio.sleep(0.05)
            async with connect(server.url) as call:
                await anext(call.packets())


async def test_workers_have_ports_of_their_own() -> None:
    ice = IceSettings(udp_ports="50000-50010")
    shares = [ice.share(number, 3).ports for number in range(3)]
    assert shares == [range(50000, 50003), range(50003, 50007), range(50007, 50011)]


async def test_fewer_ports_than_workers_are_refused() -> None:
    with pytest.raises(RequestError, match="a UDP port each"):
        Settings(server=ServerSettings(media_workers=3), ice=IceSettings(udp_ports="50000-50001"))


async def test_two_devices_have_an_engine_each_and_all_workers_use_both(tmp_path: Path) -> None:
    devices = ("--device", "cpu,cpu")
    async with serving("echo", *WORKERS, *devices, rows=1, log=tmp_path / "log") as url:
        async with asyncio.timeout(20):
            while await rows_free(url) != 2:
                await asyncio.sleep(0.05)
        async with calls(url, 2) as both:
            for call in both:
                await anext(call.packets())
            with pytest.raises(CapacityError):
                async with connect(url):
                    pass
