"""The API as clients of Pipecat and FastRTC expect it.

Both send JSON offers and add candidates later by an id of the peer connection. Pipecat's `pc_id` is ours, and holds the
call's secret. FastRTC's `webrtc_id` is the client's own choice and its only credential, so it counts only together with
the address it first came from.
"""

from collections.abc import Mapping

from aiohttp import web

from webrtc_duplex.errors import AuthError, CallNotFoundError, RequestError
from webrtc_duplex.server.auth import Caller
from webrtc_duplex.server.reading import Wish, as_object, read_json, read_offer, read_query, read_queue
from webrtc_duplex.server.realtime import Json
from webrtc_duplex.server.signaling import SECRET_LASTS_S, Desk

SUCCESS: dict[str, Json] = {"status": "success"}


class Aliases:
    """Other names of the same calls."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._webrtc_ids: dict[tuple[str, str], str] = {}  # (address, webrtc_id) -> call; as many as live calls

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/offer", self.pipecat_offer),
            web.patch("/api/offer", self.pipecat_trickle),
            web.post("/start", self.pipecat_start),
            web.post("/sessions/{session}/api/offer", self.pipecat_offer),
            web.patch("/sessions/{session}/api/offer", self.pipecat_trickle),
            web.post("/webrtc/offer", self.fastrtc_offer),
        ]

    # ---- Pipecat

    async def pipecat_start(self, request: web.Request) -> web.Response:
        """A session to be offered to; `body` is its session object. Its id is an ephemeral secret."""
        caller = self._desk.door.admit_issuer(request)
        body = as_object(await read_json(request), "body") if request.can_read_body else {}
        value, _, _ = self._desk.issue(caller, body, SECRET_LASTS_S[1])
        return web.json_response({"sessionId": value, "iceConfig": {"iceServers": self._desk.ice_for(caller)}})

    async def pipecat_offer(self, request: web.Request) -> web.Response:
        """POST {sdp, type, pc_id?, restart_pc?, requestData?}: 200 {sdp, type, pc_id}."""
        caller = self._admit(request)
        body = await read_json(request)
        offer, resumes = read_offer(body)
        answered = await self._desk.answer(caller, _wish(request, body, offer, resumes))
        return web.json_response(self._desk.answer_object(answered))

    async def pipecat_trickle(self, request: web.Request) -> web.Response:
        """PATCH {pc_id, candidates: [{candidate, sdp_mid, sdp_mline_index}]}."""
        body = await read_json(request)
        call_id, _, secret = _text(body, "pc_id").partition(".")
        session, _ = self._desk.owned(call_id, secret or None)
        candidates = body.get("candidates")
        if not isinstance(candidates, list):
            raise RequestError("candidates must be a list", code="invalid_value", param="candidates")
        for candidate in candidates:
            if isinstance(candidate, dict):
                await session.add_candidate(*_candidate(candidate, "sdp_mid"))
        return web.json_response(SUCCESS)

    def _admit(self, request: web.Request) -> Caller:
        """Who asks: by the session in the path, if there is one, else as everywhere."""
        session = request.match_info.get("session")
        if session is None:
            return self._desk.admit(request)
        try:
            return self._desk.admit(request, session)
        except AuthError as error:
            raise CallNotFoundError("there is no such session", code="session_not_found") from error

    # ---- FastRTC

    async def fastrtc_offer(self, request: web.Request) -> web.Response:
        """POST {sdp, type: "offer", webrtc_id}, and afterwards {candidate, type: "ice-candidate", webrtc_id}."""
        caller = self._desk.admit(request)
        body = await read_json(request)
        name = (caller.address, _text(body, "webrtc_id"))
        if body.get("type") == "ice-candidate":
            return await self._fastrtc_candidate(name, body)
        offer, _ = read_offer(body)
        self._forget_ended()
        if name in self._webrtc_ids:
            raise RequestError("this webrtc_id is in use", status=409, code="call_conflict", param="webrtc_id")
        answered = await self._desk.answer(caller, _wish(request, body, offer, None))
        self._webrtc_ids[name] = answered.session.id
        return web.json_response(self._desk.answer_object(answered))

    async def _fastrtc_candidate(self, name: tuple[str, str], body: Mapping[str, Json]) -> web.Response:
        if name not in self._webrtc_ids:
            raise CallNotFoundError("there is no call of this webrtc_id")
        session = self._desk.calls.find(self._webrtc_ids[name])
        await session.add_candidate(*_candidate(as_object(body, "candidate"), "sdpMid"))
        return web.json_response(SUCCESS)

    def _forget_ended(self) -> None:
        live = {session.id for session in self._desk.live()}
        self._webrtc_ids = {name: call_id for name, call_id in self._webrtc_ids.items() if call_id in live}


def _wish(request: web.Request, body: Mapping[str, Json], offer: str, resumes: str | None) -> Wish:
    """Wishes stand in the query, in `session`, or in Pipecat's `requestData`."""
    session = {**read_query(request.query), **as_object(body, "requestData"), **as_object(body, "session")}
    return Wish(offer, session, resumes, read_queue(request.query), session.get("recording") is True)


def _text(body: Mapping[str, Json], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise RequestError(f"{name} must be a text of 1 to 256 characters", code="invalid_value", param=name)
    return value


def _candidate(candidate: Mapping[str, Json], mid_name: str) -> tuple[str | None, str | None]:
    """The candidate's line and its section; an empty line says that there will be no more."""
    line, mid = candidate.get("candidate"), candidate.get(mid_name)
    return line if isinstance(line, str) and line else None, mid if isinstance(mid, str) else None
