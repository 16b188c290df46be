"""Every way in becomes one `CallRequest`, and every `CallRequest` one answer.

The order of checks is the API's promise: may who asks ask - are calls taken now - what does the body say - is the SDP
usable - does the model have what is wished for - is there a row. Whatever fails leaves no row leased.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from aiohttp import web
from multidict import CIMultiDict

from webrtc_duplex.errors import AuthError, CallNotFoundError, EngineError, RequestError
from webrtc_duplex.messages import ModelCard, Prompt
from webrtc_duplex.server.auth import NOBODY, Caller, Door, bearer_of
from webrtc_duplex.server.engines import Engine
from webrtc_duplex.server.failures import error_response
from webrtc_duplex.server.ice import IceServers
from webrtc_duplex.server.limits import too_many
from webrtc_duplex.server.places import Places
from webrtc_duplex.server.reading import (
    ANSWER,
    FRAGMENT_TYPE,
    JSON_TYPE,
    OFFER,
    REQUEST_OFFER,
    SDP_BYTES,
    SDP_TYPE,
    Wish,
    as_object,
    as_text,
    read_body,
    read_json,
    read_wish,
    unsupported,
)
from webrtc_duplex.server.realtime import Json, read_idle_timeout, read_session, session_object, what_counts
from webrtc_duplex.server.register import Register, RegisteredCall
from webrtc_duplex.server.sdp import finish_answer, finish_offer, is_heard, parse_fragment, safe_offer, ufrag_of
from webrtc_duplex.server.session import CallRequest, SessionState
from webrtc_duplex.settings import Settings

CALLS_PATH = "/v1/realtime/calls"
WHIP_PATH = "/whip"
SECRET_HEADER = "X-Call-Secret"

MODEL_ALIASES = ("gpt-realtime", "gpt-4o-realtime", "gpt-4o-mini-realtime")
"""Model names beginning so are taken for whatever model is here: clients of OpenAI's have one built in."""

SECRET_LASTS_S = (10, 600, 7200)
"""An ephemeral secret's life: at least, by default, at most."""

NOT_YET = (SessionState.QUEUED, SessionState.CONNECTING)
TRY_AGAIN_S = 10.0
"""What who holds too many calls is told to wait."""


@dataclass(frozen=True, slots=True)
class Record:
    """What the desk remembers of a call, for as long as `Calls` knows it."""

    opened_by: Caller
    ufrag: str | None
    """ICE user name of the caller's offer: another one in a PATCH is an ICE restart."""
    awaits_answer: bool = False
    """The offer was ours; what comes next to the call is its answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A call, and the answer to the offer that opened or resumed it; or an offer of ours."""

    session: RegisteredCall
    answer: str
    heard: bool
    """Whether the caller's side takes sound at all."""
    type: str = ANSWER


class Desk:
    """Takes requests for calls to `Calls`, and its answers back."""

    def __init__(
        self,
        engine: Engine,
        places: Places,
        door: Door,
        ice: IceServers,
        settings: Settings,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.door = door
        self._engine = engine
        self._places = places
        self._ice = ice
        self._settings = settings.access
        self._keeps_recordings = settings.server.recordings is not None
        self._wall_clock = wall_clock
        self._clock = clock
        self._calls: Register | None = None
        self._records: dict[str, Record] = {}
        self._gone_at: float | None = None
        """When this process will be gone, once it drains."""

    def open(self, calls: Register) -> None:
        """Take calls from now on."""
        self._calls = calls

    @property
    def calls(self) -> Register:
        if self._calls is None:
            raise EngineError("the server is starting")
        return self._calls

    @property
    def unready_because(self) -> str | None:
        """Why no call is taken now, as a sentence; None if it is."""
        if self._gone_at is not None:
            return "the server is draining"
        return self._engine.unready_because or self.calls.unready_because

    async def drain(self, timeout_s: float) -> None:
        """Take no more calls, tell the callers, and wait so long for them to hang up by themselves."""
        self._gone_at = self._clock() + timeout_s
        for session in self.live():
            session.announce_end("drained", timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.calls):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            return

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(CALLS_PATH, self.create),
            web.get(CALLS_PATH, self.show_all),
            web.get(f"{CALLS_PATH}/{{id}}", self.show),
            web.delete(f"{CALLS_PATH}/{{id}}", self.hang_up),
            web.patch(f"{CALLS_PATH}/{{id}}", self.trickle),
            web.post(f"{CALLS_PATH}/{{id}}", self.resume),
            web.post(f"{CALLS_PATH}/{{id}}/hangup", self.hang_up),
            web.post("/v1/realtime", self.create),
            web.post("/v1/realtime/client_secrets", self.issue_secret),
            web.post("/v1/realtime/sessions", self.issue_session),
            web.get("/v1/realtime/ice-servers", self.ice_servers),
            web.get("/v1/models", self.models),
            web.get("/v1/voices", self.voices),
            web.post("/offer", self.offer),
            web.post(WHIP_PATH, self.publish),
            web.options(WHIP_PATH, self.describe_whip),
            web.delete(f"{WHIP_PATH}/{{id}}", self.hang_up),
            web.patch(f"{WHIP_PATH}/{{id}}", self.trickle),
        ]

    # ---- opening calls

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/realtime/calls: 201, in the form that was asked in.

        With `{"type": "request-offer"}` the offer is ours, and its answer is posted to the call.
        """
        caller = self.admit(request)
        answered = await self.answer(caller, await read_wish(request, (OFFER, REQUEST_OFFER)))
        headers = self._headers(answered, caller, f"{CALLS_PATH}/{answered.session.id}")
        if request.content_type == JSON_TYPE:
            return web.json_response(self.answer_object(answered), status=201, headers=headers)
        return web.Response(text=answered.answer, status=201, content_type=SDP_TYPE, headers=headers)

    async def offer(self, request: web.Request) -> web.Response:
        """POST /offer, as aiortc's examples do: JSON only, 200."""
        caller = self.admit(request)
        if request.content_type != JSON_TYPE:
            raise unsupported(request.content_type, JSON_TYPE)
        answered = await self.answer(caller, await read_wish(request))
        return web.json_response(self.answer_object(answered), headers=self._headers(answered, caller))

    async def publish(self, request: web.Request) -> web.Response:
        """POST /whip: SDP only. Its clients know no secrets but the address they are told."""
        caller = self.admit(request)
        if request.content_type != SDP_TYPE:
            raise unsupported(request.content_type, SDP_TYPE)
        answered = await self.answer(caller, await read_wish(request))
        call_id = answered.session.id
        place = f"{WHIP_PATH}/{call_id}?secret={self.door.call_secret(call_id)}"
        headers = self._headers(answered, caller, place)
        if not answered.heard:
            headers.add("Warning", '299 - "this client only sends, so it will not hear the agent"')
        return web.Response(text=answered.answer, status=201, content_type=SDP_TYPE, headers=headers)

    async def describe_whip(self, _: web.Request) -> web.Response:
        return web.Response(headers={"Accept-Post": SDP_TYPE, "Allow": "OPTIONS, POST"})

    async def resume(self, request: web.Request) -> web.Response:
        """POST to the call itself: its owner answers our offer; or comes on a new peer connection, and talk goes on."""
        session, record = self._owned(request)
        self._check_ready()
        wish = await read_wish(request, (ANSWER,) if record.awaits_answer else (OFFER,))
        if record.awaits_answer and wish.offer is not None:
            await self._go_on(session.id, safe_offer(wish.offer))
            return web.json_response(call_object(session), headers={"ETag": etag_of(session)})
        answered = await self.answer(record.opened_by, replace(wish, resumes=session.id), proven=True)
        headers = self._headers(answered, record.opened_by)
        if request.content_type == JSON_TYPE:
            return web.json_response(self.answer_object(answered), headers=headers)
        return web.Response(text=answered.answer, content_type=SDP_TYPE, headers=headers)

    def admit(self, request: web.Request, token: str | None = None) -> Caller:
        """Who asks to open a call, if calls are taken; `token` stands for a bearer's.

        Raises AuthError, RequestError (429), EngineError.
        """
        caller = self.door.admit(request, token)
        self._check_ready()
        return caller

    def _check_ready(self) -> None:
        if self._gone_at is not None:
            left_s = max(1.0, self._gone_at - self._clock())
            raise EngineError("the server is draining; it takes no more calls", code="draining", retry_after_s=left_s)
        if not self._engine.ready:
            raise EngineError(self._engine.unready_because or "the engine is starting")

    async def answer(self, caller: Caller, wish: Wish, proven: bool = False) -> Answered:
        """Open a call, or resume one (`proven`: its ownership is)."""
        if wish.offer is None:
            self.door.require_key(caller)
            session = await self._open(caller, wish, None)
            return Answered(session, finish_offer(session.answer), heard=True, type=OFFER)
        offer = safe_offer(wish.offer)
        if wish.resumes is not None:
            session = await self._resume(caller, wish.resumes, offer, proven)
        else:
            self.door.require_key(caller)
            session = await self._open(caller, wish, offer)
        return Answered(session, finish_answer(session.answer, wish.offer), is_heard(offer))

    async def _open(self, caller: Caller, wish: Wish, offer: str | None) -> RegisteredCall:
        prompt, voice_locked = self._prompt(wish.session, caller)
        idle_timeout_ms = read_idle_timeout(wish.session, read_idle_timeout(caller.bound, None))
        self._check_share(caller)
        call_id = self._places.new_call_id()
        request = CallRequest(
            call_id, offer, prompt, wish.record, wish.queue_s, voice_locked, idle_timeout_ms=idle_timeout_ms
        )
        ufrag = None if offer is None else ufrag_of(offer)
        self._records[call_id] = Record(caller, ufrag, awaits_answer=offer is None)
        try:
            return await self.calls.answer(request)
        except BaseException:
            del self._records[call_id]
            raise

    async def _resume(self, caller: Caller, name: str, offer: str, proven: bool) -> RegisteredCall:
        """`name` is the call's id, or its id and secret with a dot between, as JSON answers call it `pc_id`."""
        call_id, _, secret = name.partition(".")
        record = self._record(call_id)
        if not proven:
            self.door.require_owner(secret or caller.token, call_id, record.opened_by)
        if record.awaits_answer:
            raise RequestError("this call awaits the answer to its offer", status=409, code="call_conflict")
        return await self._go_on(call_id, offer)

    async def _go_on(self, call_id: str, sdp: str) -> RegisteredCall:
        """Give the call an offer to resume it by, or the answer to ours."""
        session = await self.calls.resume(call_id, sdp)
        self._records[call_id] = replace(self._record(call_id), ufrag=ufrag_of(sdp), awaits_answer=False)
        return session

    def _prompt(self, wished: Mapping[str, Json], caller: Caller) -> tuple[Prompt, bool]:
        """What is wished for, over what the caller's secret is bound to; and whether that settles the voice.

        Who names no seed gets one of their own. Raises RequestError, or AuthError (403) for another voice.
        """
        card = self._engine.card
        for session in (caller.bound, wished):
            check_model(session, card)
        bound = read_session(caller.bound, Prompt(seed=secrets.randbits(63)), card)
        prompt = read_session(wished, bound, card)
        if bound.voice is not None and prompt.voice != bound.voice:
            message = f"this client secret is bound to the voice {bound.voice!r}"
            raise AuthError(message, status=403, code="forbidden", param="session.audio.output.voice")
        return prompt, bound.voice is not None

    def _check_share(self, caller: Caller) -> None:
        """Raises RequestError (429) for one who has as many calls as one may have."""
        self._forget_old_ones()
        settings = self._settings
        by_key = [s for s in self.live() if self._records[s.id].opened_by.owner == caller.owner]
        if caller.owner != NOBODY and settings.max_calls_per_key and len(by_key) >= settings.max_calls_per_key:
            raise too_many(f"one key may have {settings.max_calls_per_key} calls at once", TRY_AGAIN_S)
        if caller.is_local:
            return
        here = [s for s in self.live() if self._records[s.id].opened_by.address == caller.address]
        if settings.max_calls_per_address and len(here) >= settings.max_calls_per_address:
            raise too_many(f"one address may have {settings.max_calls_per_address} calls at once", TRY_AGAIN_S)
        connecting = sum(session.state in NOT_YET for session in here)
        if connecting >= settings.max_connecting_per_address:
            raise too_many(f"{connecting} calls from this address have not connected yet", TRY_AGAIN_S)

    # ---- calls that are

    async def show_all(self, request: web.Request) -> web.Response:
        """Every live call, for the operator."""
        self.door.require_operator(request)
        data = [call_object(session) for session in self.live()]
        return web.json_response({"object": "list", "data": data}, headers={"Cache-Control": "no-store"})

    async def show(self, request: web.Request) -> web.Response:
        session, _ = self._owned(request)
        return web.json_response(call_object(session), headers={"Cache-Control": "no-store", "ETag": etag_of(session)})

    async def hang_up(self, request: web.Request) -> web.Response:
        """End a call. One that has ended within the last minute has been ended."""
        session, _ = self._owned(request)
        await session.hang_up()
        return web.json_response(call_object(session))

    async def trickle(self, request: web.Request) -> web.Response:
        """Candidates that the caller found after its offer (RFC 8840, as WHIP has it)."""
        session, record = self._owned(request)
        if request.content_type != FRAGMENT_TYPE:
            raise unsupported(request.content_type, FRAGMENT_TYPE)
        etag = etag_of(session)
        match request.headers.get("If-Match"):
            case None:
                missing = RequestError("If-Match is wanted", status=428, code="precondition_required")
                return error_response(missing, request, {"ETag": etag})
            case given if given not in (etag, "*"):
                stale = RequestError("the ICE session is another by now", status=412, code="precondition_failed")
                return error_response(stale, request, {"ETag": etag})
        fragment = parse_fragment(as_text(await read_body(request, SDP_BYTES)))
        if fragment.ufrag not in (None, record.ufrag):
            message = "ICE is not restarted here; resume the call with a new offer"
            raise RequestError(message, status=422, code="ice_restart_unsupported")
        for mid, candidate in fragment.candidates:
            await session.add_candidate(candidate, mid)
        return web.Response(status=204, headers={"ETag": etag})

    def owned(self, call_id: str, token: str | None) -> tuple[RegisteredCall, Record]:
        """A call and its record, for who owns it. Raises CallNotFoundError, AuthError."""
        record = self._record(call_id)
        self.door.require_owner(token, call_id, record.opened_by)
        return self.calls.find(call_id), record

    def _owned(self, request: web.Request) -> tuple[RegisteredCall, Record]:
        return self.owned(request.match_info["id"], token_of(request))

    def _record(self, call_id: str) -> Record:
        self._places.require_here(call_id)
        self.calls.find(call_id)
        return self._records[call_id]

    def live(self) -> list[RegisteredCall]:
        """Calls that have not ended."""
        return list(self.calls)

    def _found(self, call_id: str) -> RegisteredCall | None:
        try:
            return self.calls.find(call_id)
        except CallNotFoundError:
            return None

    def _forget_old_ones(self) -> None:
        for call_id in [call_id for call_id in self._records if self._found(call_id) is None]:
            del self._records[call_id]

    # ---- secrets, ICE servers, the model

    async def issue_secret(self, request: web.Request) -> web.Response:
        """POST /v1/realtime/client_secrets: an `ek_` secret for a page, bound to a session."""
        caller = self.door.admit_issuer(request)
        body = await read_json(request) if request.can_read_body else {}
        value, expires_at, session = self.issue(caller, as_object(body, "session"), _lifetime_s(body))
        return web.json_response({"value": value, "expires_at": expires_at, "session": session})

    async def issue_session(self, request: web.Request) -> web.Response:
        """POST /v1/realtime/sessions: the same in the form of 2025, where the session is the body."""
        caller = self.door.admit_issuer(request)
        body = await read_json(request) if request.can_read_body else {}
        value, expires_at, session = self.issue(caller, body, SECRET_LASTS_S[1])
        return web.json_response({**session, "client_secret": {"value": value, "expires_at": expires_at}})

    def issue(self, caller: Caller, session: Mapping[str, Json], ttl_s: float) -> tuple[str, int, dict[str, Json]]:
        """A secret, when it expires, and the session it is bound to. Raises RequestError for one that cannot be had."""
        self._check_ready()
        prompt, _ = self._prompt(session, caller)
        idle_timeout_ms, card = read_idle_timeout(session, None), self._engine.card
        value, secret = self.door.secrets.issue(caller.owner, what_counts(session, card), ttl_s)
        shown = session_object(secrets.token_hex(8), prompt, card, idle_timeout_ms)
        return value, round(secret.expires_at), shown

    async def ice_servers(self, request: web.Request) -> web.Response:
        """Told to who may call, as TURN costs."""
        caller = self.door.admit(request)
        return web.json_response({"iceServers": self.ice_for(caller), "ttl": self._ice.ttl_s})

    def ice_for(self, caller: Caller) -> list[Json]:
        return self._ice.as_json(caller.owner, self._wall_clock())

    async def models(self, _: web.Request) -> web.Response:
        card = self._engine.card
        model = {
            "id": card.name,
            "object": "model",
            "created": 0,
            "owned_by": "webrtc-duplex",
            "takes_text": card.takes_text,
            "max_text_chars": card.max_text_chars,
            "recording": self._keeps_recordings,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def voices(self, _: web.Request) -> web.Response:
        card = self._engine.card
        data = [{"id": voice, "object": "voice"} for voice in card.voices]
        return web.json_response({"object": "list", "data": data, "default": card.default_voice})

    # ---- the form of answers

    def answer_object(self, answered: Answered) -> dict[str, Json]:
        """An answer in JSON. `pc_id` is all that a client of Pipecat's keeps, so it holds the secret too."""
        call_id = answered.session.id
        secret = self.door.call_secret(call_id)
        return {
            "sdp": answered.answer,
            "type": answered.type,
            "call_id": call_id,
            "pc_id": f"{call_id}.{secret}",
            "client_secret": {"value": secret},
        }

    def _headers(self, answered: Answered, caller: Caller, place: str | None = None) -> CIMultiDict[str]:
        call_id = answered.session.id
        headers = CIMultiDict({"ETag": etag_of(answered.session), SECRET_HEADER: self.door.call_secret(call_id)})
        if place is not None:
            headers["Location"] = place
        for link in self._ice.as_links(caller.owner, self._wall_clock()):
            headers.add("Link", link)
        return headers


def etag_of(session: RegisteredCall) -> str:
    """Names the ICE session of a call: changes when the call is put on a new peer connection."""
    return f'"{hashlib.sha256(session.answer.encode()).hexdigest()[:16]}"'


def token_of(request: web.Request) -> str | None:
    """What proves a call's ownership: a bearer token, or `?secret=` for those who can set no header."""
    return bearer_of(request) or request.query.get("secret")


def check_model(session: Mapping[str, Json], card: ModelCard) -> None:
    """Raises RequestError `model_not_found` (404, as OpenAI) if another model is wished for."""
    model = session.get("model")
    if model is None or model == card.name or (isinstance(model, str) and model.startswith(MODEL_ALIASES)):
        return
    message = f"no model {str(model)[:80]!r}; there is {card.name!r}"
    raise RequestError(message, status=404, code="model_not_found", param="model")


def call_object(session: RegisteredCall) -> dict[str, Json]:
    return {
        "id": session.id,
        "object": "realtime.call",
        "state": session.state.value,
        "ended_because": session.ended_because,
        "voice": session.prompt.voice,
        "age_s": round(session.age_s, 3),
        "stats": session.stats(),
    }


def _lifetime_s(body: Mapping[str, Json]) -> float:
    """`expires_after.seconds` of a request for a secret."""
    least, default, most = SECRET_LASTS_S
    seconds = as_object(body, "expires_after").get("seconds", default)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not least <= seconds <= most:
        message = f"seconds must be a whole number from {least} to {most}, not {seconds!r:.40}"
        raise RequestError(message, code="invalid_value", param="expires_after.seconds")
    return seconds
