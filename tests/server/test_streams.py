"""Events without a data channel, and orders given by the way of a WebSocket."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import WSServerHandshakeError

from tests.server.served import Http, error_of, open_call, serving
from webrtc_duplex.server import streams
from webrtc_duplex.server.app import DESK
from webrtc_duplex.server.session import Session, SessionState


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Http]:
    async with serving(tmp_path) as http:
        yield http


async def test_a_stream_tells_the_session_first_and_ends_with_the_call(http: Http) -> None:
    call = await open_call(http, voice="bob")
    async with http.get(f"{call.place}/events", headers=call.headers) as stream:
        assert stream.content_type == "text/event-stream"
        first = json.loads((await stream.content.readline()).removeprefix(b"data: "))
        assert first["type"] == "session.created"
        assert first["session"]["audio"]["output"]["voice"] == "bob"
        await http.delete(call.place, headers=call.headers)
        rest = (await stream.content.read()).decode().splitlines()
    kinds = [json.loads(line.removeprefix("data: "))["type"] for line in rest if line.startswith("data: ")]
    assert kinds[-1] == "ext.session.closing"


async def test_whoever_follows_a_call_that_has_ended_hears_of_its_session_and_no_more(http: Http) -> None:
    call = await open_call(http)
    await http.delete(call.place, headers=call.headers)
    async with http.get(f"{call.place}/events", headers=call.headers) as stream:
        assert (await stream.content.read()).count(b"data: ") == 1
    async with http.ws_connect(f"/v1/realtime?call_id={call.id}", headers=call.headers) as socket:
        assert [json.loads(message.data)["type"] async for message in socket] == ["session.created"]


async def test_the_end_of_the_server_ends_the_streams_of_its_calls(http: Http) -> None:
    call = await open_call(http)
    async with http.get(f"{call.place}/events", headers=call.headers) as stream:
        await http.server.close()
        assert b'"reason": "drained"' in (await stream.content.read()).splitlines()[-2]


async def test_who_never_reads_a_stream_is_not_kept(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STILL_HERE_S", 0.05)
    call = await open_call(http)
    assert http.app is not None
    session = http.app[DESK].calls.find(call.id)
    assert isinstance(session, Session)
    feed = session.feed
    with socket.create_connection(("127.0.0.1", http.port)) as deaf:
        head = f"GET {call.place}/events HTTP/1.1\r\nHost: x\r\nAuthorization: {call.headers['Authorization']}\r\n\r\n"
        deaf.sendall(head.encode())
        async with asyncio.timeout(10):
            while not feed._listeners:
                await asyncio.sleep(0)
            while feed._listeners:
                feed.emit("ext.test", filler="x" * 100_000)
                await asyncio.sleep(0.001)
        deaf.setblocking(False)
        while await asyncio.get_running_loop().sock_recv(deaf, 1 << 20):
            pass
    assert session.state is not SessionState.ENDED


async def test_who_can_set_no_header_shows_the_secret_in_the_query(http: Http) -> None:
    call = await open_call(http)
    secret = call.headers["Authorization"].removeprefix("Bearer ")
    async with http.get(f"{call.place}/events", params={"secret": secret}) as stream:
        assert stream.status == 200


async def test_the_owner_follows_a_call_and_gives_it_orders_over_a_websocket(http: Http) -> None:
    call = await open_call(http)
    async with http.ws_connect(f"/v1/realtime?call_id={call.id}", headers=call.headers) as socket:
        assert (await socket.receive_json())["type"] == "session.created"
        await socket.send_str("nonsense")
        answer = await socket.receive_json()
        assert answer["type"] == "error"
        await http.delete(call.place, headers=call.headers)
        kinds = [json.loads(message.data)["type"] async for message in socket]
    assert "ext.session.closing" in kinds
    assert socket.closed


async def test_nobody_else_may_listen_in(http: Http) -> None:
    mine, other = await open_call(http), await open_call(http)
    with pytest.raises(WSServerHandshakeError) as refusal:
        await http.ws_connect(f"/v1/realtime?call_id={mine.id}", headers=other.headers)
    assert refusal.value.status == 403


async def test_a_sideband_names_a_call_and_is_a_websocket(http: Http) -> None:
    assert await error_of(await http.get("/v1/realtime")) == (400, "missing_call_id", "call_id")
    call = await open_call(http)
    plain = await http.get("/v1/realtime", params={"call_id": call.id}, headers=call.headers)
    assert await error_of(plain) == (426, "upgrade_required", None)


async def test_a_reader_who_leaves_is_no_fault(http: Http, caplog: pytest.LogCaptureFixture) -> None:
    call = await open_call(http)
    for _ in range(2):
        stream = await http.get(f"{call.place}/events", headers=call.headers)
        await stream.content.readline()
        stream.close()
        socket = await http.ws_connect(f"/v1/realtime?call_id={call.id}", headers=call.headers)
        await socket.receive_json()
        await socket.close()
    await http.delete(call.place, headers=call.headers)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
