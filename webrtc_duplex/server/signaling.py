"""Every way in becomes one `CallRequest`, and every `CallRequest` one answer.

The order of checks is the API's promise: is a call taken at all - what is the body - is the SDP usable - does the model
have what is wished for - is there a row. Whatever fails, fails before a row is leased, except the answer itself.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http import HttpProcessingError

from webrtc_duplex.errors import EngineError, RequestError
from webrtc_duplex.messages import ModelCard, Prompt
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.places import Places
from webrtc_duplex.server.realtime import Json, read_session
from webrtc_duplex.server.sdp import finish_answer, safe_offer
from webrtc_duplex.server.session import CallRequest, Calls, Session

SDP_TYPE: Final = "application/sdp"
JSON_TYPE: Final = "application/json"
FORM_TYPE: Final = "multipart/form-data"
SDP_BYTES = 64 * 1024
JSON_BYTES = 256 * 1024

MODEL_ALIASES = ("gpt-realtime", "gpt-4o-realtime", "gpt-4o-mini-realtime")
"""Model names beginning so are taken for whatever model is here: clients of OpenAI's have one built in."""

QUERY_NUMBERS: Mapping[str, Callable[[str], Json]] = {
    "seed": int,
    "text_temperature": float,
    "text_top_k": int,
    "audio_temperature": float,
    "audio_top_k": int,
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request brought, whatever its form: an offer, a session object, and the call to be resumed, if any."""

    offer: str
    session: Mapping[str, Json]
    resumes: str | None = None


class Desk:
    """Takes requests for calls to `Calls`, and its answers back."""

    def __init__(self, engine: EngineClient, places: Places) -> None:
        self._engine = engine
        self._places = places
        self._calls: Calls | None = None

    def open(self, calls: Calls) -> None:
        """Take calls from now on."""
        self._calls = calls

    @property
    def calls(self) -> Calls:
        if self._calls is None:
            raise EngineError("the server is starting")
        return self._calls

    @property
    def unready_because(self) -> str | None:
        """Why no call is taken now, as a sentence; None if it is."""
        return self._engine.unready_because

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/realtime/calls", self.create),
            web.get("/v1/realtime/calls/{id}", self.show),
            web.delete("/v1/realtime/calls/{id}", self.hang_up),
            web.post("/v1/realtime/calls/{id}/hangup", self.hang_up),
            web.post("/offer", self.offer),
            web.get("/v1/models", self.models),
            web.get("/v1/voices", self.voices),
        ]

    # ---- calls

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/realtime/calls: 201, in the form that was asked in."""
        wish = await self._read(request)
        session = await self._answer(wish)
        answer = finish_answer(session.answer, wish.offer)
        headers = {"Location": f"/v1/realtime/calls/{session.id}", "ETag": etag_of(session)}
        if request.content_type == JSON_TYPE:
            return web.json_response(_answer_object(session, answer), status=201, headers=headers)
        return web.Response(text=answer, status=201, content_type=SDP_TYPE, headers=headers)

    async def offer(self, request: web.Request) -> web.Response:
        """POST /offer, as aiortc's examples do: JSON only, 200."""
        if request.content_type != JSON_TYPE:
            raise _unsupported(request.content_type, JSON_TYPE)
        wish = await self._read(request)
        session = await self._answer(wish)
        return web.json_response(_answer_object(session, finish_answer(session.answer, wish.offer)))

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response(_call_object(self._find(request)), headers={"Cache-Control": "no-store"})

    async def hang_up(self, request: web.Request) -> web.Response:
        """End a call. One that has ended within the last minute has been ended."""
        session = self._find(request)
        await session.hang_up()
        return web.json_response(_call_object(session))

    def _find(self, request: web.Request) -> Session:
        call_id = request.match_info["id"]
        self._places.require_here(call_id)
        return self.calls.find(call_id)

    async def _read(self, request: web.Request) -> Wish:
        if not self._engine.ready:
            raise EngineError(self._engine.unready_because or "the engine is starting", retry_after_s=5.0)
        return await read_wish(request)

    async def _answer(self, wish: Wish) -> Session:
        offer = safe_offer(wish.offer)
        card = self._engine.card
        check_model(wish.session, card)
        if wish.resumes is not None:
            self._places.require_here(wish.resumes)
            return await self.calls.resume(wish.resumes, offer)
        prompt = read_session(wish.session, Prompt(), card)
        return await self.calls.answer(CallRequest(self._places.new_call_id(), offer, prompt))

    # ---- the model

    async def models(self, _: web.Request) -> web.Response:
        card = self._engine.card
        model = {
            "id": card.name,
            "object": "model",
            "owned_by": "webrtc-duplex",
            "takes_text": card.takes_text,
            "max_text_chars": card.max_text_chars,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def voices(self, _: web.Request) -> web.Response:
        card = self._engine.card
        data = [{"id": voice, "object": "voice"} for voice in card.voices]
        return web.json_response({"object": "list", "data": data, "default": card.default_voice})


def etag_of(session: Session) -> str:
    """Names the ICE session of a call: changes when the call is put on a new peer connection."""
    return f'"{hashlib.sha256(session.answer.encode()).hexdigest()[:16]}"'


def check_model(session: Mapping[str, Json], card: ModelCard) -> None:
    """Raises RequestError `model_not_found` (404, as OpenAI) if another model is wished for."""
    model = session.get("model")
    if model is None or model == card.name or (isinstance(model, str) and model.startswith(MODEL_ALIASES)):
        return
    message = f"no model {str(model)[:80]!r}; there is {card.name!r}"
    raise RequestError(message, status=404, code="model_not_found", param="model")


def _answer_object(session: Session, answer: str) -> dict[str, Json]:
    return {"sdp": answer, "type": "answer", "call_id": session.id, "pc_id": session.id}


def _call_object(session: Session) -> dict[str, Json]:
    return {
        "id": session.id,
        "object": "realtime.call",
        "state": session.state.value,
        "ended_because": session.ended_because,
        "voice": session.prompt.voice,
        "age_s": round(session.age_s, 3),
        "stats": session.stats(),
    }


# ---- reading a request


async def read_wish(request: web.Request) -> Wish:
    """Read a request in any of the three forms.

    Raises RequestError: 413 `payload_too_large`, 415 `unsupported_media_type`, 400 `invalid_json`, `invalid_sdp`,
    `invalid_sdp_type`, `invalid_multipart`, `invalid_value`.
    """
    wished = read_query(request.query)
    match request.content_type:
        case "application/sdp":
            return Wish(_as_text(await _body(request, SDP_BYTES)), wished)
        case "application/json":
            return _from_json(parse_json(await _body(request, JSON_BYTES)), wished)
        case "multipart/form-data":
            return await _from_form(request, wished)
    raise _unsupported(request.content_type, f"{SDP_TYPE}, {JSON_TYPE} or {FORM_TYPE}")


def read_query(query: Mapping[str, str]) -> dict[str, Json]:
    """The session object that a query string stands for; `text_prompt` is an older name of `instructions`."""
    session: dict[str, Json] = {}
    for name, value in query.items():
        if name in ("model", "voice", "instructions"):
            session[name] = value
        elif name == "text_prompt":
            session.setdefault("instructions", value)
        elif name in QUERY_NUMBERS:
            session[name] = _number(name, value)
    return session


def _number(name: str, value: str) -> Json:
    try:
        return QUERY_NUMBERS[name](value)
    except ValueError:
        raise RequestError(f"{name} must be a number, not {value[:40]!r}", code="invalid_value", param=name) from None


async def _body(request: web.Request, limit: int) -> bytes:
    """The body, unless it is larger than `limit` bytes: then as little of it is read as possible."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body may have {limit} bytes", status=413, code="payload_too_large")


def _unsupported(given: str, wanted: str) -> RequestError:
    message = f"the body must be {wanted}, not {given!r:.80}"
    return RequestError(message, status=415, code="unsupported_media_type")


def _as_text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise RequestError("a session description is UTF-8 text", code="invalid_sdp", param="sdp") from None


def parse_json(body: bytes) -> dict[str, Json]:
    """The JSON object in a body. Raises RequestError `invalid_json`."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _from_json(body: Mapping[str, Json], wished: Mapping[str, Json]) -> Wish:
    """`{sdp, type, session?}`; with `pc_id` and `restart_pc` a call goes on that has lost its connection."""
    if body.get("type") != "offer":
        message = f"type must be 'offer', not {body.get('type')!r:.40}"
        raise RequestError(message, code="invalid_sdp_type", param="type")
    offer, session, pc_id = body.get("sdp"), body.get("session", {}), body.get("pc_id")
    if not isinstance(offer, str):
        raise RequestError("sdp must be a string", code="invalid_sdp", param="sdp")
    resumes = pc_id if isinstance(pc_id, str) and body.get("restart_pc") is True else None
    return Wish(offer, {**wished, **_as_session(session)}, resumes)


def _as_session(session: Json) -> dict[str, Json]:
    if session is None:
        return {}
    if not isinstance(session, dict):
        raise RequestError("session must be a JSON object", code="invalid_json", param="session")
    return session


async def _from_form(request: web.Request, wished: Mapping[str, Json]) -> Wish:
    """Parts `sdp` and `session`, as OpenAI's servers are sent; others are passed over."""
    try:
        parts = await _parts(await request.multipart())
    except (HttpProcessingError, ValueError, AssertionError, LookupError) as error:
        raise RequestError("the form cannot be read", code="invalid_multipart") from error
    if "sdp" not in parts:
        raise RequestError("the form has no part 'sdp'", code="invalid_multipart", param="sdp")
    session = parse_json(parts["session"]) if "session" in parts else {}
    return Wish(_as_text(parts["sdp"]), {**wished, **session})


async def _parts(reader: MultipartReader) -> dict[str, bytes]:
    """The form's parts by name, all together no larger than a JSON body may be."""
    parts: dict[str, bytes] = {}
    room = JSON_BYTES
    while isinstance(part := await reader.next(), BodyPartReader):
        body = bytearray()
        while piece := await part.read_chunk():
            body += piece
            if len(body) > room:
                raise _too_large(JSON_BYTES)
        room -= len(body) + 1  # empty parts have their end too
        parts[part.name or ""] = bytes(body)
    return parts
