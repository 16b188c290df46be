"""The events of a call for those without a data channel: a stream of server-sent events, and a WebSocket sideband."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress

from aiohttp import WSMsgType, web

from webrtc_duplex.errors import RequestError
from webrtc_duplex.server.events import MAX_MESSAGE_BYTES, Event, QueueListener
from webrtc_duplex.server.signaling import CALLS_PATH, Desk, token_of

COMMANDS = (WSMsgType.TEXT, WSMsgType.BINARY)
STILL_HERE_S = 15.0
"""A stream with nothing to say says so after this long, lest a proxy take it for dead."""


class Streams:
    """Events of a call, for its owner."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(f"{CALLS_PATH}/{{id}}/events", self.events),
            web.get("/v1/realtime", self.sideband),
        ]

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET .../events: `data: {event}` lines, from `session.created` to the end of the call."""
        session, _ = self._desk.owned(request.match_info["id"], token_of(request))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        with session.listen() as listener, suppress(ConnectionResetError):  # a reader may leave when it likes
            await response.prepare(request)
            async for event in _with_pauses(listener):
                line = ": still here\n\n" if event is None else f"data: {json.dumps(event)}\n\n"
                await _read_in_time(response.write(line.encode()), request)
            await _read_in_time(response.write_eof(), request)
        return response

    async def sideband(self, request: web.Request) -> web.WebSocketResponse:
        """GET /v1/realtime?call_id=ID, a WebSocket: the owner's server follows a call, and may give it orders."""
        call_id = request.query.get("call_id")
        if call_id is None:
            where = "sound is carried by WebRTC here: POST an offer to /v1/realtime/calls, or name a call_id"
            raise RequestError(where, code="missing_call_id", param="call_id")
        session, _ = self._desk.owned(call_id, token_of(request))
        socket = web.WebSocketResponse(heartbeat=STILL_HERE_S, max_msg_size=MAX_MESSAGE_BYTES)
        if not socket.can_prepare(request):
            raise RequestError("a WebSocket is wanted", status=426, code="upgrade_required")
        await socket.prepare(request)
        with session.listen() as listener:
            telling = asyncio.create_task(_tell(socket, listener), name=f"sideband of {session.id}")
            try:
                while (message := await socket.receive()).type in COMMANDS:
                    session.tell(message.data)
            finally:
                telling.cancel()
                await asyncio.wait([telling])
        return socket


async def _read_in_time(writing: Awaitable[None], request: web.Request) -> None:
    """Raises ConnectionResetError, and makes it true, where the reader takes nothing for too long."""
    try:
        async with asyncio.timeout(STILL_HERE_S):
            await writing
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the reader of the events does not read") from None


async def _tell(socket: web.WebSocketResponse, listener: QueueListener) -> None:
    """Pass events on until the call is over, then close."""
    with suppress(ConnectionResetError):
        async for event in listener:
            await socket.send_json(event)
        await socket.close()


async def _with_pauses(listener: QueueListener) -> AsyncIterator[Event | None]:
    """The events, and None whenever there was none for a while."""
    while True:
        try:
            async with asyncio.timeout(STILL_HERE_S):
                event = await anext(listener)
        except TimeoutError:
            yield None
        except StopAsyncIteration:
            return
        else:
            yield event
