"""The HTTP API as an OpenAPI 3.1 document, told by the server itself; schemathesis holds it against the server."""

from collections.abc import Mapping, Sequence

from webrtc_duplex.server.auth import MAX_TOKEN
from webrtc_duplex.server.reading import FORM_TYPE, FRAGMENT_TYPE, JSON_TYPE, LONGEST_QUEUE_S, SDP_TYPE
from webrtc_duplex.server.realtime import MAX_SEED, MAX_TEMPERATURE, MAX_TOP_K
from webrtc_duplex.server.signaling import CALLS_PATH, SECRET_HEADER, SECRET_LASTS_S, WHIP_PATH

Part = dict[str, object]

REFUSALS = {
    400: "what was sent cannot be read, or names a voice or value there is not",
    401: "a key or secret is wanted",
    403: "known, but not allowed",
    404: "there is no such call, model or session",
    408: "the body did not come in time",
    409: "there is one already",
    410: "the process that held the call is gone",
    412: "the ICE session is another by now",
    413: "too large",
    415: "another content type is wanted",
    422: "the offer can be read but not answered",
    426: "a WebSocket is wanted",
    428: "If-Match is wanted",
    429: "too often, or too many",
    503: "every row is leased, or the engine cannot serve",
}
OPENING = (400, 401, 403, 404, 408, 413, 415, 422, 429, 503)
OWNING = (400, 401, 403, 404, 410, 503)


def document() -> Part:
    """The whole API."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "webrtc_duplex",
            "version": "1",
            "description": "Calls over WebRTC to a speech-to-speech model, in the manner of OpenAI's Realtime API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"bearer": []}],
        "paths": {**_calls(), **_whip(), **_sessions(), **_aliases(), **_model(), **_health()},
        "components": {
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": f"An API key, an `ek_` client secret, or a call's own secret (`{SECRET_HEADER}`).",
                }
            },
            "schemas": _schemas(),
        },
    }


# ---- paths


def _calls() -> Part:
    created: Part = {
        "description": "the answer",
        "headers": {
            "Location": _header("the call", required=True),
            "ETag": _header("the ICE session, for PATCH", required=True),
            SECRET_HEADER: _header("proves that the call is yours", required=True),
            "Link": _header("an ICE server"),
        },
        "content": {SDP_TYPE: {"schema": {"type": "string"}}, JSON_TYPE: {"schema": _ref("Answer")}},
    }
    either: Part = {JSON_TYPE: {"schema": {"anyOf": [_ref("Answer"), _ref("Call")]}}}
    resumed: Part = {
        **created,
        "headers": {"ETag": _header("the new ICE session", required=True)},
        "content": {SDP_TYPE: {"schema": {"type": "string"}}, **either},
    }
    offer = _offer_in_any_form()
    one = [_in_path("id", "a call")]
    return {
        CALLS_PATH: {
            "post": _operation(
                "Open a call", _wishes(), _offer_in_any_form("OfferRequest"), {201: created}, OPENING + (410,)
            ),
            "get": _operation("List the live calls, for the operator", (), None, {200: _json("Calls")}, (401, 403)),
        },
        f"{CALLS_PATH}/{{id}}": {
            "parameters": one,
            "get": _operation("Show a call", (), None, {200: _json("Call")}, OWNING),
            "post": _operation(
                "Go on with a call on a new peer connection, or answer the server's offer",
                (),
                _offer_in_any_form("JsonAnswer"),
                {200: resumed},
                OPENING + (409, 410),
            ),
            "delete": _operation("End a call", (), None, {200: _json("Call")}, OWNING),
            "patch": _trickle(),
        },
        f"{CALLS_PATH}/{{id}}/hangup": {
            "parameters": one,
            "post": _operation("End a call", (), None, {200: _json("Call")}, OWNING),
        },
        f"{CALLS_PATH}/{{id}}/events": {
            "parameters": one,
            "get": _operation("Follow a call's events", (), None, {200: _stream()}, OWNING),
        },
        "/v1/realtime": {
            "post": _operation("Open a call, as in 2024", _wishes(), offer, {201: created}, OPENING + (410,)),
            "get": _operation(
                "Follow a call by WebSocket, and give it orders",
                [_in_query("call_id", {"type": "string"}, required=True)],
                None,
                {101: {"description": "a WebSocket of events"}},
                (*OWNING, 426),
            ),
        },
    }


def _whip() -> Part:
    created: Part = {
        "description": "the answer",
        "headers": {
            "Location": _header("the session", required=True),
            "ETag": _header("its ICE session", required=True),
        },
        "content": {SDP_TYPE: {"schema": {"type": "string"}}},
    }
    offer = _body({SDP_TYPE: {"type": "string"}})
    described: Part = {"description": "what is taken", "headers": {"Accept-Post": _header(SDP_TYPE, required=True)}}
    return {
        WHIP_PATH: {
            "post": _operation("Publish (RFC 9725)", _wishes(), offer, {201: created}, OPENING),
            "options": _operation("Say what is taken", (), None, {200: described}, ()),
        },
        f"{WHIP_PATH}/{{id}}": {
            "parameters": [_in_path("id", "a call"), _in_query("secret", {"type": "string"})],
            "delete": _operation("End a call", (), None, {200: _json("Call")}, OWNING),
            "patch": _trickle(),
        },
    }


def _sessions() -> Part:
    asked = _body({JSON_TYPE: _ref("SecretRequest")}, required=False)
    session = _body({JSON_TYPE: _ref("Session")}, required=False)
    refusals = (400, 401, 403, 404, 408, 413, 415, 429, 503)
    return {
        "/v1/realtime/client_secrets": {
            "post": _operation("Issue a client secret for a page", (), asked, {200: _json("Secret")}, refusals)
        },
        "/v1/realtime/sessions": {
            "post": _operation("Issue a client secret, as in 2025", (), session, {200: _json("Session")}, refusals)
        },
        "/v1/realtime/ice-servers": {
            "get": _operation("STUN and TURN servers", (), None, {200: _json("IceServers")}, (401, 403, 429))
        },
    }


def _aliases() -> Part:
    answer, success = {200: _json("Answer")}, {200: _json("Success")}
    offer = _body({JSON_TYPE: _ref("JsonOffer")})
    started = _body({JSON_TYPE: _object(body=_or_null("Session"))}, required=False)
    candidates = _body({JSON_TYPE: _ref("Candidates")})
    trickled = (400, 401, 403, 404, 408, 410, 413, 415, 503)
    session = [_in_path("session", "a session that was started")]
    return {
        "/offer": {"post": _operation("Open a call", _wishes(), offer, answer, OPENING + (410,))},
        "/api/offer": {
            "post": _operation("Open a call (Pipecat)", _wishes(), offer, answer, OPENING + (410,)),
            "patch": _operation("Add candidates (Pipecat)", (), candidates, success, trickled),
        },
        "/start": {"post": _operation("Start a session (Pipecat)", (), started, {200: _json("Started")}, OPENING)},
        "/sessions/{session}/api/offer": {
            "parameters": session,
            "post": _operation("Open a call (Pipecat)", _wishes(), offer, answer, OPENING + (410,)),
            "patch": _operation("Add candidates (Pipecat)", (), candidates, success, trickled),
        },
        "/webrtc/offer": {
            "post": _operation(
                "Open a call, or add a candidate (FastRTC)",
                _wishes(),
                _body({JSON_TYPE: _ref("FastRtcOffer")}),
                {200: {"description": "the answer", "content": {JSON_TYPE: {"schema": {"type": "object"}}}}},
                OPENING + (409, 410),
            )
        },
    }


def _model() -> Part:
    return {
        "/v1/models": {"get": _operation("The model", (), None, {200: _json("Models")}, (503,))},
        "/v1/voices": {"get": _operation("Its voices", (), None, {200: _json("Voices")}, (503,))},
    }


def _health() -> Part:
    text: Part = {"description": "all counts", "content": {"text/plain": {"schema": {"type": "string"}}}}
    unready = {200: _json("Readiness"), 503: _json("Readiness")}
    return {
        "/healthz": {"get": _operation("Whether this process answers", (), None, {200: _json("Health")}, ())},
        "/readyz": {"get": _operation("Whether calls are taken", (), None, unready, ())},
        "/metrics": {"get": _operation("Counts for Prometheus", (), None, {200: text}, (401, 403))},
        "/openapi.json": {"get": _operation("This document", (), None, {200: _json("Anything")}, ())},
    }


# ---- pieces


def _operation(
    summary: str,
    parameters: Sequence[Part],
    body: Part | None,
    answers: Mapping[int, object],
    refusals: tuple[int, ...],
) -> Part:
    responses: Part = {str(status): answer for status, answer in answers.items()}
    responses |= {
        str(status): {"description": REFUSALS[status], "content": {JSON_TYPE: {"schema": _ref("Error")}}}
        for status in refusals
    }
    operation: Part = {"summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = [*parameters]
    if body is not None:
        operation["requestBody"] = body
    return operation


def _trickle() -> Part:
    match: Part = {"name": "If-Match", "in": "header", "schema": {"type": "string"}, "description": "ETag, or `*`"}
    done: Part = {"description": "taken", "headers": {"ETag": _header("the ICE session", required=True)}}
    body = _body({FRAGMENT_TYPE: {"type": "string"}})
    return _operation("Add candidates (RFC 8840)", [match], body, {204: done}, (*OWNING, 408, 412, 413, 415, 422, 428))


def _offer_in_any_form(*others: str) -> Part:
    """SDP, JSON or a form; JSON may also be of these other schemas."""
    form: Part = {
        "type": "object",
        "properties": {"sdp": {"type": "string"}, "session": _ref("Session")},
        "required": ["sdp"],
    }
    json: Part = {"anyOf": [_ref(schema) for schema in ("JsonOffer", *others)]}
    return _body({SDP_TYPE: {"type": "string"}, JSON_TYPE: json, FORM_TYPE: form})


def _wishes() -> list[Part]:
    """The query of everything that opens a call."""
    number: Part = {"type": "number", "minimum": 0, "maximum": MAX_TEMPERATURE}
    top_k: Part = {"type": "integer", "minimum": 1, "maximum": MAX_TOP_K}
    return [
        _in_query("voice", {"type": "string"}),
        _in_query("instructions", {"type": "string"}),
        _in_query("model", {"type": "string"}),
        _in_query("seed", {"type": "integer", "minimum": 0, "maximum": MAX_SEED}),
        _in_query("text_temperature", number),
        _in_query("text_top_k", top_k),
        _in_query("audio_temperature", number),
        _in_query("audio_top_k", top_k),
        _in_query("queue", {"type": "number", "minimum": 0, "maximum": LONGEST_QUEUE_S}),
        _in_query("record", {"type": "boolean"}),
    ]


def _in_query(name: str, schema: Part, required: bool = False) -> Part:
    return {"name": name, "in": "query", "required": required, "schema": schema}


def _in_path(name: str, description: str) -> Part:
    schema: Part = {"type": "string", "minLength": 1, "maxLength": MAX_TOKEN}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def _header(description: str, required: bool = False) -> Part:
    return {"description": description, "required": required, "schema": {"type": "string"}}


def _body(content: Mapping[str, Part], required: bool = True) -> Part:
    return {"required": required, "content": {kind: {"schema": schema} for kind, schema in content.items()}}


def _json(schema: str) -> Part:
    return {"description": schema, "content": {JSON_TYPE: {"schema": _ref(schema)}}}


def _stream() -> Part:
    return {"description": "events of the call", "content": {"text/event-stream": {"schema": {"type": "string"}}}}


def _ref(schema: str) -> Part:
    return {"$ref": f"#/components/schemas/{schema}"}


def _or_null(schema: str) -> Part:
    return {"anyOf": [_ref(schema), {"type": "null"}]}


def _nullable(**properties: object) -> Part:
    return {"type": ["object", "null"], "properties": properties}


def _object(required: str = "", **properties: object) -> Part:
    """An object of these properties; `required` names those that are always there."""
    return {"type": "object", "properties": properties, "required": [*required.split()]}


# ---- schemas


def _schemas() -> Part:
    text: Part = {"type": "string"}
    texts: Part = {"type": ["string", "null"]}
    number: Part = {"type": "number"}
    whole: Part = {"type": "integer"}
    return {
        "Anything": {"type": "object"},
        "Error": _object(
            "error", error=_object("type code message param", type=text, code=text, message=text, param=texts)
        ),
        "Session": _object(
            model=texts,
            instructions=texts,
            audio={"properties": {"output": {"properties": {"voice": {"description": "one of /v1/voices"}}}}},
            seed={"type": ["integer", "null"], "minimum": 0, "maximum": MAX_SEED},
        ),
        "JsonOffer": _object(
            "type sdp",
            type={"const": "offer"},
            sdp=text,
            session=_or_null("Session"),
            pc_id=texts,
            restart_pc={"type": ["boolean", "null"]},
        ),
        "OfferRequest": _object("type", type={"const": "request-offer"}, session=_or_null("Session")),
        "JsonAnswer": _object("type sdp", type={"const": "answer"}, sdp=text),
        "FastRtcOffer": _object("type webrtc_id", type=text, webrtc_id=text, sdp=text, candidate={"type": "object"}),
        "Candidates": _object(
            "pc_id candidates",
            pc_id=text,
            candidates={"type": "array", "items": _object(candidate=text, sdp_mid=texts)},
        ),
        "Answer": _object(
            "sdp type call_id pc_id client_secret",
            sdp=text,
            type={"enum": ["answer", "offer"]},
            call_id=text,
            pc_id=text,
            client_secret=_object("value", value=text),
        ),
        "Call": _object(
            "id object state ended_because voice age_s stats",
            id=text,
            object={"const": "realtime.call"},
            state={"enum": ["queued", "connecting", "live", "held", "ended"]},
            ended_because=texts,
            voice=texts,
            age_s=number,
            stats={"type": "object"},
        ),
        "Calls": _object("object data", object={"const": "list"}, data={"type": "array", "items": _ref("Call")}),
        "SecretRequest": _object(
            expires_after=_nullable(
                seconds={"type": "integer", "minimum": SECRET_LASTS_S[0], "maximum": SECRET_LASTS_S[2]}
            ),
            session=_or_null("Session"),
        ),
        "Secret": _object("value expires_at session", value=text, expires_at=whole, session=_ref("Session")),
        "IceServers": _object("iceServers ttl", iceServers={"type": "array", "items": {"type": "object"}}, ttl=whole),
        "Started": _object("sessionId iceConfig", sessionId=text, iceConfig={"type": "object"}),
        "Success": _object("status", status={"const": "success"}),
        "Models": _object(
            "object data",
            object={"const": "list"},
            data={"type": "array", "items": _object("id takes_text", id=text, takes_text={"type": "boolean"})},
        ),
        "Voices": _object(
            "object data default",
            object={"const": "list"},
            data={"type": "array", "items": _object("id", id=text)},
            default=texts,
        ),
        "Health": _object("status", status=text),
        "Readiness": _object(
            "status rows free_rows calls", status=text, reason=text, rows=whole, free_rows=whole, calls=whole
        ),
    }
