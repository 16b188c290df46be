"""The telephone: Janus' SIP plugin takes the phone's side of a call, our HTTP API the agent's, and this ties them.

    phone --SIP, RTP--> Janus --offer--> here --POST--> server --answer--> here --accept--> Janus --200 OK--> phone

A line is one Janus handle, and each line takes one call at a time; all lines share one registration. The server is
asked before the phone is answered, so a full house is a 503 with Retry-After in SIP too.
"""

import asyncio
import logging
from collections.abc import Mapping

import aiohttp

from webrtc_duplex.bridge.janus import JanusEvent, JanusHandle, JanusLostError, JanusRefusedError, JanusSession
from webrtc_duplex.bridge.janus import open_session as open_janus
from webrtc_duplex.bridge.metrics import End, Metrics, serving
from webrtc_duplex.bridge.server import Server, ServerCall, ServerRefusedError
from webrtc_duplex.bridge.table import BridgeSettings, KeyAction

logger = logging.getLogger(__name__)

RETRY_S = (1.0, 2.0, 5.0)
"""Pauses between attempts to reach Janus; the last one repeats."""

SIP_STATUS: Mapping[int, int] = {0: 503, 400: 488, 401: 403, 403: 403, 404: 404, 415: 488, 422: 488, 429: 503, 503: 503}
"""What a refusal over HTTP is called in SIP; anything else is 500, and 0 is a server that does not answer."""


async def run(settings: BridgeSettings) -> None:
    """Bridge calls until cancelled. While Janus is away, try again; its calls ended with it."""
    metrics = Metrics()
    async with serving(metrics, settings.metrics_host, settings.metrics_port), aiohttp.ClientSession() as http:
        server = Server(http, settings.server_url, settings.api_key)
        pauses = iter(RETRY_S)
        while True:
            try:
                async with open_janus(settings.janus_url) as janus:
                    bridge = Bridge(settings, janus, server, metrics)
                    lines = await bridge.register()
                    pauses = iter(RETRY_S)
                    await bridge.serve(lines)
            except (JanusLostError, JanusRefusedError) as error:
                pause = next(pauses, RETRY_S[-1])
                logger.warning("%s; trying again in %g s", error, pause)
                await asyncio.sleep(pause)


class Bridge:
    """The lines of one Janus session."""

    def __init__(self, settings: BridgeSettings, janus: JanusSession, server: Server, metrics: Metrics) -> None:
        self._settings = settings
        self._janus = janus
        self._server = server
        self._metrics = metrics

    async def serve(self, lines: list[JanusHandle]) -> None:
        """Answer on every line; ends only by an exception, and then every call is over."""
        logger.info("registered %s with %d lines", self._settings.address, len(lines))
        with self._metrics.registered(len(lines)):
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(self._answer_calls(line))

    async def register(self) -> list[JanusHandle]:
        """One handle is the registration; the others help it, so that it can have several calls at once.

        Raises JanusRefusedError, JanusLostError.
        """
        first = await self._janus.attach("janus.plugin.sip")
        await first.send("register", self._registration())
        registered = await first.next_event("registered", "registration_failed")
        if registered.name == "registration_failed":
            raise JanusRefusedError(f"{self._settings.address} could not be registered: {dict(registered.result)}")
        lines, address, master_id = [first], self._settings.address, registered.result["master_id"]
        for _ in range(self._settings.lines - 1):
            helper = await self._janus.attach("janus.plugin.sip")
            await helper.send("register", {"type": "helper", "username": address, "master_id": master_id})
            await helper.next_event("registered")
            lines.append(helper)
        return lines

    def _registration(self) -> dict[str, object]:
        settings = self._settings
        # Where Janus knows `automatic_ringing` (from 1.3) the phone does not ring before the server has a row for it.
        wishes: dict[str, object] = {"username": settings.address, "automatic_ringing": False}
        if settings.header_names:
            wishes["incoming_header_prefixes"] = settings.header_names
        if settings.secret is None:
            return {**wishes, "type": "guest"}
        return {**wishes, "secret": settings.secret, "proxy": settings.proxy}

    async def _answer_calls(self, line: JanusHandle) -> None:
        while True:
            try:
                incoming = await line.next_event("incomingcall")
                with self._metrics.busy.track_inprogress():
                    await self._take_or_decline(line, incoming)
            except JanusRefusedError as error:
                logger.warning("line %d: a call came to nothing: %s", line.number, error)

    async def _take_or_decline(self, line: JanusHandle, incoming: JanusEvent) -> None:
        try:
            await self._take(line, incoming)
        except ServerRefusedError as refusal:
            await self._decline(line, incoming, refusal)

    async def _take(self, line: JanusHandle, incoming: JanusEvent) -> None:
        """One call from INVITE to BYE."""
        number, headers = called_number(incoming), headers_of(incoming)
        async with self._server.call(incoming.sdp, self._settings.agent_for(number, headers)) as call:
            with self._metrics.talking() as ending:
                await self._accept(line, call)
                logger.info("%s: SIP call %s to %s is answered", call.call_id, incoming.call_id, number)
                ending.by = await self._until_either_ends(line, call)
            logger.info("%s: ended by the %s", call.call_id, ending.by)
            if ending.by is not End.PHONE:
                await line.send("hangup")

    async def _accept(self, line: JanusHandle, call: ServerCall) -> None:
        """Pick up. An INVITE without an offer gets the server's, and the phone's answer to that comes with its ACK."""
        await line.send("accept", jsep={"type": call.type, "sdp": call.sdp})
        if call.type == "offer":
            accepted = await line.next_event("accepted", "hangup")
            if accepted.sdp is None:
                raise JanusRefusedError(f"the phone did not answer our offer: {accepted.name}")
            try:
                await self._server.answer(call, accepted.sdp)
            except ServerRefusedError as refusal:  # too late to decline
                await line.send("hangup")
                raise JanusRefusedError(f"the server has no use for the phone's answer: {refusal}") from refusal

    async def _until_either_ends(self, line: JanusHandle, call: ServerCall) -> End:
        """Wait until either side ends the call; raises JanusRefusedError if Janus cannot go on with it."""
        phone = asyncio.create_task(line.next_event("hangup"))
        agent = asyncio.create_task(self._follow(call))
        try:
            await asyncio.wait((phone, agent), return_when=asyncio.FIRST_COMPLETED)
            if phone.done():
                phone.result()
                return End.PHONE
            return agent.result()
        finally:
            for task in (phone, agent):
                task.cancel()
            await asyncio.gather(phone, agent, return_exceptions=True)

    async def _follow(self, call: ServerCall) -> End:
        """Read the call's events until it is over, or a key ends it."""
        recorded = False
        async with self._server.sideband(call) as sideband:
            async for event in sideband.events():
                match event:
                    case {"type": "input_audio_buffer.dtmf_event_received", "event": str(key)}:
                        logger.info("%s: key %s", call.call_id, key)
                        self._metrics.keys.inc()
                        match self._settings.keys.get(key):
                            case KeyAction.HANG_UP:
                                return End.KEY
                            case KeyAction.RECORDING:
                                await sideband.record(not recorded)
                    case {"type": "session.created" | "session.updated", "session": {"recording": bool(recorded)}}:
                        logger.info("%s: it is %s", call.call_id, "recorded" if recorded else "not recorded")
                    case {"type": "error", "error": {"message": str(message)}}:
                        logger.warning("%s: %s", call.call_id, message)
        return End.AGENT

    async def _decline(self, line: JanusHandle, incoming: JanusEvent, refusal: ServerRefusedError) -> None:
        status = SIP_STATUS.get(refusal.status, 500)
        self._metrics.refusals.labels(status).inc()
        logger.warning("SIP call %s is refused with %d: %s", incoming.call_id, status, refusal)
        headers = {"Retry-After": refusal.retry_after} if refusal.retry_after else {}
        try:
            await line.send("decline", {"code": status, "headers": headers})
        except JanusRefusedError as error:  # the phone has given up already
            logger.info("SIP call %s could not be declined: %s", incoming.call_id, error)


def called_number(incoming: JanusEvent) -> str:
    """The user part of the address that was called: `sip:1001@host` is 1001."""
    callee = str(incoming.result.get("callee", ""))
    return callee.partition(":")[2].partition("@")[0]


def headers_of(incoming: JanusEvent) -> dict[str, str]:
    """The INVITE's headers that Janus was asked to pass on."""
    headers = incoming.result.get("headers")
    return {str(name): str(value) for name, value in headers.items()} if isinstance(headers, dict) else {}
