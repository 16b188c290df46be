"""Connections that ask for nothing, more than there are places."""

import asyncio
from contextlib import suppress

import aiohttp
import pytest
from aiohttp import web

from webrtc_duplex.server import crowd
from webrtc_duplex.server.crowd import Crowd

MOST = 5


async def test_the_oldest_idle_connections_make_room_and_who_is_being_answered_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crowd, "LOOK_EVERY_S", 0.01)
    places, asked, answer = Crowd(MOST), asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        asked.set()
        await answer.wait()
        return web.Response(text="late")

    app = web.Application(middlewares=[places.note])
    app.router.add_get("/", slow)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    assert runner.server is not None
    keeping = asyncio.create_task(places.keep(runner.server))
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.get(f"http://{host}:{port}/"))
        await asked.wait()
        silent = [await asyncio.open_connection(host, port) for _ in range(3 * MOST)]
        async with asyncio.timeout(10):
            for reader, _ in silent[: 2 * MOST + 1]:
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
        assert len(runner.server.connections) == MOST
        answer.set()
        assert await (await asking).text() == "late"
    for _, writer in silent:
        writer.close()
    keeping.cancel()
    await runner.cleanup()
