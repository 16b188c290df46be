"""The way in: an ASGI app that hands offers to whoever has a row, and everything else of a call to where the call is.

It keeps nothing: the id of a call says where it is, and is signed, so that nobody can point a request elsewhere. So any
number of these may run, and one that was started a moment ago finds every call.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from webrtc_duplex.cluster.replica import Answer, Headers, call_of, url_of
from webrtc_duplex.errors import CallNotFoundError, CapacityError, DuplexError, EngineError, RequestError
from webrtc_duplex.server.failures import error_body
from webrtc_duplex.server.places import Places

RETRY_AFTER_S = 2.0
ANSWER_S = 20.0
"""An offer that nobody has answered by then is refused: there may be no replica at all."""
MOST_BYTES = 1 << 20
METHODS = ["DELETE", "GET", "OPTIONS", "PATCH", "POST"]

_CALL_ID = re.compile(r"rtc_[a-z0-9]{11,42}_[a-z2-7]{26}", re.ASCII)
_OF_ONE_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
_FOR_EVER = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
_HERE = ("/v1/realtime/client_secrets", "/v1/realtime/sessions", "/start", "/sessions")
"""Secrets of these are known to the server alone that has issued them, so a cluster issues none."""


class Engines(Protocol):
    """Whoever finds a replica with room. Raises CapacityError if none has."""

    def call(self, method: str, path: str, headers: Headers, body: bytes) -> AsyncIterator[Answer]: ...


class Gate:
    """Routes every request by what it says of a call."""

    def __init__(self, engines: Engines, signing_key: str) -> None:
        self._engines = engines
        self._places = Places("gate", signing_key.encode())
        self._http: aiohttp.ClientSession | None = None
        self._last_place: str | None = None
        """Of a call opened or asked after here: whoever it is can show the page while all rows are taken."""
        self._held: set[asyncio.Task[None]] = set()  # one a call that was opened here; bounded by the rows there are

    def app(self) -> Starlette:
        """The ASGI app."""
        routes = [WebSocketRoute("/{path:path}", self.follow), Route("/{path:path}", self.pass_on, methods=METHODS)]
        return Starlette(routes=routes, lifespan=self._open)

    @asynccontextmanager
    async def _open(self, _: Starlette) -> AsyncIterator[None]:
        """While it serves there is a way to the servers, and then nothing is left of it."""
        async with aiohttp.ClientSession(auto_decompress=False) as self._http:
            yield
        for task in self._held:
            task.cancel()

    async def pass_on(self, request: Request) -> Response:
        """Have it answered where its call is, or by whoever has room."""
        try:
            if request.url.path == "/-/healthz":
                return JSONResponse({"status": "ok"})
            body = await _body_of(request)
            call_id = _call_named(request.url.path, request.query_params, body)
            if call_id is not None:
                self._last_place = self._places.place_of(call_id)
                return await self._by_its_server(request, self._last_place, body)
            if request.url.path.startswith(_HERE):
                raise RequestError("a cluster issues no client secrets; use an API key", status=501, code="no_secrets")
            return await self._by_anybody(request, body)
        except CapacityError as full:
            return await self._without_a_row(request, full)
        except DuplexError as error:
            return _refusal(error)

    async def _by_anybody(self, request: Request, body: bytes) -> Response:
        """The answer of a replica with room; if it has opened a call, the replica's row is held for as long as that."""
        answers = self._engines.call(request.method, _target(request), _passed_on(request.headers.items()), body)
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await anext(answers)
        except TimeoutError:
            raise EngineError("no replica has answered; try again", retry_after_s=RETRY_AFTER_S) from None
        if (opened := call_of(answer)) is not None:
            self._last_place = self._places.place_of(opened[0])
        self._hold(answers)
        return _response(answer)

    async def _without_a_row(self, request: Request, full: CapacityError) -> Response:
        """Serve counts every request as a row; what only looks needs none, and any server will do."""
        if request.method not in ("GET", "OPTIONS") or self._last_place is None:
            return _refusal(full)
        try:
            return await self._by_its_server(request, self._last_place, b"")
        except CallNotFoundError:  # it is gone
            return _refusal(full)

    def _hold(self, answers: AsyncIterator[Answer]) -> None:
        """Read the stream to its end, which is the call's."""

        async def read() -> None:
            async for _ in answers:
                pass

        task = asyncio.create_task(read())
        self._held.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Whatever has broken the stream, the call is over or its replica frees the row."""
        self._held.discard(task)
        if not task.cancelled():
            task.exception()

    async def _by_its_server(self, request: Request, place: str, body: bytes) -> Response:
        """Everything as the server says it, as it comes: event streams too."""
        try:
            answer = await self._session().request(
                request.method,
                url_of(place) + _target(request),
                headers=_passed_on(request.headers.items()),
                data=body,
                timeout=_FOR_EVER,
            )
        except aiohttp.ClientError as error:
            message = "the process that held this call is gone"
            raise CallNotFoundError(message, status=410, code="call_lost") from error
        response = StreamingResponse(_content_of(answer), answer.status)
        response.raw_headers[:] = _raw(_passed_on(answer.headers.items()))
        return response

    async def follow(self, socket: WebSocket) -> None:
        """A sideband: messages both ways until one side closes."""
        call_id = socket.query_params.get("call_id", "")
        try:
            url = url_of(self._places.place_of(call_id)).replace("http", "ws", 1) + _target(socket)
            headers = [(name, value) for name, value in socket.headers.items() if name == "authorization"]
            async with self._session().ws_connect(url, headers=headers) as server:
                await socket.accept()
                telling = asyncio.create_task(_tell(socket, server))
                try:
                    await _obey(socket, server)
                finally:
                    telling.cancel()
                    await asyncio.wait([telling])
        except (DuplexError, aiohttp.ClientError):
            await socket.close(code=4404)

    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "the app serves"
        return self._http


async def _tell(socket: WebSocket, server: aiohttp.ClientWebSocketResponse) -> None:
    async for message in server:
        await socket.send_text(message.data)
    await socket.close()


async def _obey(socket: WebSocket, server: aiohttp.ClientWebSocketResponse) -> None:
    try:
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            if (text := message.get("text")) is not None:
                await server.send_str(text)
            else:
                await server.send_bytes(message["bytes"])
    except RuntimeError:  # closed by us meanwhile
        pass
    finally:
        await server.close()


async def _content_of(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for chunk in answer.content.iter_any():
            yield chunk


async def _body_of(request: Request) -> bytes:
    """Raises RequestError (413) for one that is too large for any request there is."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise RequestError("the body is too large", status=413, code="payload_too_large")
    return body


def _call_named(path: str, query: Mapping[str, str], body: bytes) -> str | None:
    """The call that a request is about: named in its path, in its query, or as `pc_id` in its JSON."""
    if found := _CALL_ID.search(path):
        return found[0]
    if "call_id" in query:
        return query["call_id"]
    try:
        told = json.loads(body) if body[:1] == b"{" else {}
    except ValueError:
        return None  # for the server to say
    name = told.get("pc_id") if isinstance(told, dict) else None
    return name.partition(".")[0] if isinstance(name, str) else None


def _target(request: Request | WebSocket) -> str:
    return f"{request.url.path}?{request.url.query}" if request.url.query else str(request.url.path)


def _passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """A list, since names may repeat; without what is between two hops."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_HOP]


def _raw(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    length = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
    response.raw_headers[:] = [*_raw(_passed_on(answer.headers)), *length]
    return response


def _refusal(error: DuplexError) -> Response:
    """As a server's own: the same body, and Retry-After where trying again helps."""
    retry_after_s = error.retry_after_s or RETRY_AFTER_S
    headers = {"Retry-After": f"{retry_after_s:.0f}"} if isinstance(error, CapacityError | EngineError) else {}
    body = error_body(error.kind, error.code, error.message, error.param)
    return JSONResponse(body, error.status, headers)
