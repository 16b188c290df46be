"""Clients that connect and then dawdle: they are put out after a while, and stop nobody else meanwhile."""

import asyncio
import logging
import re
import resource
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from webrtc_duplex.launch import process, serve
from webrtc_duplex.server.app import make_app
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.engines import Engines
from webrtc_duplex.settings import ServerSettings, Settings

PATIENCE_S = 0.5


@pytest.fixture
async def url(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> AsyncIterator[str]:
    """A server that waits half a second for a request, and has no engine."""
    monkeypatch.setattr(serve, "REQUEST_S", PATIENCE_S)
    settings, engine = Settings(server=ServerSettings(port=0)), Engines([EngineClient(Path("no-engine.sock"))])
    with caplog.at_level(logging.INFO):
        async with serve._http(make_app(settings, engine), settings.server, None):
            listening = re.search(r"http://\S+", caplog.text)
            assert listening is not None
            yield listening[0]


async def open_connection(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def closed(reader: asyncio.StreamReader) -> None:
    """Wait until the server has hung up."""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(10):
            await reader.read()


async def test_who_connects_and_says_nothing_is_put_out(url: str) -> None:
    reader, writer = await open_connection(url)
    await closed(reader)
    writer.close()


async def test_who_sends_headers_byte_by_byte_is_put_out(url: str) -> None:
    reader, writer = await open_connection(url)

    async def dawdle() -> None:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: here\r\nX-Slow: ")
        while True:
            writer.write(b"a")
            await asyncio.sleep(PATIENCE_S / 10)

    dawdling = asyncio.create_task(dawdle())
    await closed(reader)
    dawdling.cancel()
    writer.close()


async def test_the_second_request_of_a_connection_may_not_dawdle_either(url: str) -> None:
    reader, writer = await open_connection(url)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\nGET /healthz HT")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await closed(reader)
    writer.close()


async def test_hundreds_of_them_stop_nobody_else(url: str) -> None:
    silent = [await open_connection(url) for _ in range(300)]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/healthz") as answer:
        assert answer.status == 200
    await asyncio.gather(*(closed(reader) for reader, _ in silent))
    for _, writer in silent:
        writer.close()


def test_a_server_may_open_as_many_descriptors_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 65_536)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert process.allow_descriptors() == 65_536
    assert limits[-1] == (65_536, 65_536)
