"""Janus' HTTP API, as far as a controller of its SIP plugin needs it.

A session holds handles; a handle is one telephone line. Requests are posted and acknowledged at once; what becomes of
them, and what happens by itself, comes as events from one long poll a session (Janus' own documentation calls this the
plain HTTP transport). A session that is not polled for 60 s is dropped by Janus, so the poll is also the keep-alive.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

logger = logging.getLogger(__name__)

Json = Mapping[str, object]

POLL_S = 30.0
"""Janus answers a long poll after this long at the latest, with a keep-alive."""

EVENTS_WAITING = 64
"""Events of one handle that may wait; a line that does not read them is broken, so one more ends the session."""


class JanusLostError(Exception):
    """Janus is gone, or has forgotten the session: everything on it is over."""


class JanusRefusedError(Exception):
    """Janus understood a request and would not do it."""


@dataclass(frozen=True, slots=True)
class JanusEvent:
    """Something that happened on a handle; `name` is the plugin's (`incomingcall`) or Janus' own (`webrtcup`)."""

    name: str
    result: Json
    sdp: str | None = None
    call_id: str | None = None


class JanusHandle:
    """One attached plugin handle. Its events wait in `events`, bounded by `EVENTS_WAITING`."""

    def __init__(self, session: "JanusSession", number: int) -> None:
        self._session = session
        self.number = number
        self.events: asyncio.Queue[JanusEvent] = asyncio.Queue(EVENTS_WAITING)

    async def send(self, request: str, body: Json | None = None, jsep: Json | None = None) -> None:
        """Post a request to the plugin; its outcome comes as an event. Raises JanusLostError, JanusRefusedError."""
        message: dict[str, object] = {"janus": "message", "body": {"request": request, **(body or {})}}
        if jsep is not None:
            message["jsep"] = jsep
        await self._session.post(f"/{self.number}", message)

    async def next_event(self, *names: str) -> JanusEvent:
        """The next event of one of these names; others are passed over. An `error` of the plugin is raised."""
        while True:
            event = await self.events.get()
            if event.name == "error":
                raise JanusRefusedError(str(event.result.get("error", event.result)))
            if event.name in names:
                return event


class JanusSession:
    """A session with Janus; made by `open_session`, which polls it for as long as the block lasts."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._handles: dict[int, JanusHandle] = {}

    async def attach(self, plugin: str) -> JanusHandle:
        """A new handle of the plugin, by its Janus name (`janus.plugin.sip`)."""
        answer = await self.post("", {"janus": "attach", "plugin": plugin})
        handle = JanusHandle(self, _id_of(answer))
        self._handles[handle.number] = handle
        return handle

    async def post(self, path: str, message: Json) -> Json:
        """Post a message below the session; returns Janus' acknowledgement."""
        return await _post(self._http, self._url + path, message)

    async def poll(self) -> None:
        """Hand every event to its handle, until Janus is gone: ends only by an exception."""
        limit = aiohttp.ClientTimeout(total=POLL_S + 10)
        while True:
            try:
                async with self._http.get(self._url, params={"maxev": "10"}, timeout=limit) as answer:
                    events = await answer.json(content_type=None)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                raise JanusLostError(f"Janus does not answer: {error}") from error
            for event in events if isinstance(events, list) else [events]:
                self._deliver(event)

    def _deliver(self, event: Json) -> None:
        match event:
            case {"janus": "keepalive"}:
                return
            case {"janus": "timeout"} | {"janus": "error"}:
                raise JanusLostError(f"Janus ended the session: {event.get('error', 'timeout')}")
            case {"sender": int(number)} if number in self._handles:
                handle = self._handles[number]
            case _:
                return
        try:
            handle.events.put_nowait(_read_event(event))
        except asyncio.QueueFull:
            raise JanusLostError(f"{EVENTS_WAITING} events wait on handle {number}; its line does not read") from None


@asynccontextmanager
async def open_session(url: str) -> AsyncIterator[JanusSession]:
    """A session with the Janus at `url` (such as http://127.0.0.1:8088/janus), polled while the block runs.

    If Janus goes away the block is cancelled and JanusLostError raised from here; what Janus refuses in the block is
    raised from here too.
    """
    async with aiohttp.ClientSession() as http:
        answer = await _post(http, url, {"janus": "create"})
        session_url = f"{url}/{_id_of(answer)}"
        session = JanusSession(http, session_url)
        try:
            async with asyncio.TaskGroup() as group:
                polling = group.create_task(session.poll())
                yield session
                polling.cancel()
        except* (JanusLostError, JanusRefusedError) as failure:
            raise _innermost(failure) from None
        finally:
            await _destroy(http, session_url)


def _innermost(error: BaseException) -> BaseException:
    """The first plain exception of groups within groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _destroy(http: aiohttp.ClientSession, url: str) -> None:
    try:
        await _post(http, url, {"janus": "destroy"})
    except (JanusLostError, JanusRefusedError):
        logger.debug("Janus had already forgotten the session")


async def _post(http: aiohttp.ClientSession, url: str, message: Json) -> Json:
    body = {**message, "transaction": secrets.token_hex(8)}
    try:
        async with http.post(url, json=body, timeout=aiohttp.ClientTimeout(total=10)) as response:
            answer = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise JanusLostError(f"Janus does not answer at {url}: {error}") from error
    match answer:
        case {"janus": "error", "error": {"code": 458 | 459, "reason": reason}}:  # no such session, no such handle
            raise JanusLostError(str(reason))
        case {"janus": "error", "error": {"reason": reason}}:
            raise JanusRefusedError(str(reason))
        case {"janus": "success" | "ack"}:
            return dict(answer)
    raise JanusRefusedError(f"Janus answered what was not understood: {answer}")


def _id_of(answer: Json) -> int:
    match answer:
        case {"data": {"id": int(number)}}:
            return number
    raise JanusRefusedError(f"Janus gave no id: {answer}")


def _read_event(event: Json) -> JanusEvent:
    sdp = _sdp_of(event)
    match event:
        case {"plugindata": {"data": {"error": error}}}:
            return JanusEvent("error", {"error": error})
        case {"plugindata": {"data": {"result": {"event": str(name)} as result, **rest}}}:
            call_id = rest.get("call_id")
            return JanusEvent(name, result, sdp, call_id if isinstance(call_id, str) else None)
    return JanusEvent(str(event.get("janus")), event, sdp)


def _sdp_of(event: Json) -> str | None:
    match event:
        case {"jsep": {"sdp": str(sdp)}}:
            return sdp
    return None
