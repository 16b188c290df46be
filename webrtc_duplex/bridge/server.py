"""Our own HTTP API, as the bridge calls it: a telephone call is a call like any other."""

import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp

from webrtc_duplex.bridge.table import Agent

logger = logging.getLogger(__name__)

OPEN_S = 10.0
"""An answer later than this is too late for a caller who hears nothing."""

HEARTBEAT_S = 15.0
"""A server that does not answer for so long is gone."""


class ServerRefusedError(Exception):
    """The server would not take the call; `status` is HTTP's (0: it did not answer at all)."""

    def __init__(self, status: int, message: str, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A call that the server has taken: its resource, what it says to the phone, and what proves that it is ours."""

    url: str
    type: str
    """`answer`, or `offer` where the phone has made none."""
    sdp: str
    headers: Mapping[str, str]

    @property
    def call_id(self) -> str:
        """The id that the server's logs use."""
        return self.url.rpartition("/")[2]


class Sideband:
    """A call as its owner follows it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse | None) -> None:
        self._socket = socket

    async def events(self) -> AsyncIterator[dict[str, object]]:
        """What the data channel would carry, until the call or the server is over."""
        if self._socket is not None:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    yield message.json()

    async def record(self, wanted: bool) -> None:
        """Have the call written down from now on, or no longer; a no-op once the call is over."""
        if self._socket is not None:
            with suppress(ConnectionError):
                await self._socket.send_json({"type": "session.update", "session": {"recording": wanted}})


class Server:
    """The server at `url`, reached through `http`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, api_key: str | None) -> None:
        self._http = http
        self._url = url
        self._headers = _owner(api_key)

    @asynccontextmanager
    async def call(self, offer: str | None, agent: Agent) -> AsyncIterator[ServerCall]:
        """A call for this offer while the block runs; hung up when it ends. Without an offer the server makes one.

        Raises ServerRefusedError.
        """
        call = await self._open(offer, agent)
        try:
            yield call
        finally:
            await self._hang_up(call)

    @asynccontextmanager
    async def sideband(self, call: ServerCall) -> AsyncIterator["Sideband"]:
        """The call's events, and a way to give it orders, while the block runs; without events if there is no way."""
        url = f"{self._url}/v1/realtime"
        async with AsyncExitStack() as open_things:
            socket = None
            try:
                connecting = self._http.ws_connect(
                    url, params={"call_id": call.call_id}, headers=call.headers, heartbeat=HEARTBEAT_S
                )
                socket = await open_things.enter_async_context(connecting)
            except (aiohttp.ClientError, TimeoutError) as error:
                logger.info("%s: the server does not tell how the call fares: %s", call.call_id, error)
            yield Sideband(socket)

    async def answer(self, call: ServerCall, sdp: str) -> None:
        """Give the server the phone's answer to its offer. Raises ServerRefusedError."""
        await self._post(call.url, {"type": "answer", "sdp": sdp}, call.headers)

    async def _open(self, offer: str | None, agent: Agent) -> ServerCall:
        wish = {"type": "request-offer"} if offer is None else {"type": "offer", "sdp": offer}
        url = f"{self._url}/v1/realtime/calls"
        answer = await self._post(url, {**wish, "session": agent.as_session()}, self._headers)
        match answer:
            case {"call_id": str(call_id), "type": str(kind), "sdp": str(sdp), "client_secret": {"value": str(secret)}}:
                return ServerCall(f"{url}/{call_id}", kind, sdp, _owner(secret))
        raise ServerRefusedError(500, f"{url} is no server of ours")

    async def _post(self, url: str, body: Mapping[str, object], headers: Mapping[str, str]) -> object:
        limit = aiohttp.ClientTimeout(total=OPEN_S)
        try:
            async with self._http.post(url, json=body, headers=headers, timeout=limit) as answer:
                text = await answer.text()
                if answer.status not in (200, 201):
                    raise ServerRefusedError(answer.status, _message(text), answer.headers.get("Retry-After"))
                return json.loads(text)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ServerRefusedError(0, f"the server does not answer at {url}: {error}") from error

    async def _hang_up(self, call: ServerCall) -> None:
        try:
            async with self._http.delete(
                call.url, headers=call.headers, timeout=aiohttp.ClientTimeout(total=OPEN_S)
            ) as answer:
                logger.debug("%s: hung up, %d", call.call_id, answer.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.info("%s: the server was not there to hang up: %s", call.call_id, error)


def _owner(secret: str | None) -> dict[str, str]:
    """The header that proves who asks."""
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def _message(body: str) -> str:
    """The sentence of our error body, else the body itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()
