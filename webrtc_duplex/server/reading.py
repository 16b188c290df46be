"""What a request for a call says, in whatever form: SDP, JSON, a form, and the query."""

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from aiohttp import web

from webrtc_duplex.errors import RequestError
from webrtc_duplex.server.realtime import Json

SDP_TYPE = "application/sdp"
JSON_TYPE = "application/json"
FORM_TYPE = "multipart/form-data"
FRAGMENT_TYPE = "application/trickle-ice-sdpfrag"

OFFER = "offer"
REQUEST_OFFER = "request-offer"
ANSWER = "answer"

SDP_BYTES = 64 * 1024
JSON_BYTES = 256 * 1024

MOST_PARTS = 16
"""Parts of a form; two mean something."""

BODY_S = 10.0
"""Who has not sent a body after so long is not waited for."""

LONGEST_QUEUE_S = 300.0

_BOUNDARY = re.compile(r';\s*boundary=(?:"([!-~ ]{1,70})"|([!#-+\--:<-~]{1,70}))', re.IGNORECASE | re.ASCII)
_PART_NAME = re.compile(rb'\r\ncontent-disposition:[^\r\n]*?;[ \t]*name=(?:"([^"\r\n]*)"|([^\s";]+))', re.IGNORECASE)

QUERY_TEXTS = ("model", "voice", "instructions")
QUERY_NUMBERS: Mapping[str, Callable[[str], Json]] = {
    "seed": int,
    "text_temperature": float,
    "text_top_k": int,
    "audio_temperature": float,
    "audio_top_k": int,
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request brought: an offer, a session object, and how the call is to be had."""

    offer: str | None
    """Or the answer to an offer of ours; None: such an offer is wanted."""
    session: Mapping[str, Json]
    resumes: str | None = None
    """The call that is to go on with this offer."""
    queue_s: float = 0.0
    """How long the caller would wait for a row."""
    record: bool = False


async def read_wish(request: web.Request, types: Sequence[str] = (OFFER,)) -> Wish:
    """Read a request in any of the three forms. JSON must be of one of these types; the others have none.

    Raises RequestError: 413 `payload_too_large`, 415 `unsupported_media_type`, 400 `invalid_json`, `invalid_sdp`,
    `invalid_sdp_type`, `invalid_multipart`, `invalid_value`.
    """
    session = read_query(request.query)
    queue_s, record = read_queue(request.query), request.query.get("record") == "true"
    offer, resumes = None, None
    if request.content_type == SDP_TYPE:
        offer = as_text(await read_body(request, SDP_BYTES))
    elif request.content_type == JSON_TYPE:
        body = parse_json(await read_body(request, JSON_BYTES))
        if body.get("type") != REQUEST_OFFER or REQUEST_OFFER not in types:
            offer, resumes = read_offer(body, types)
        session |= as_object(body, "session")
    elif request.content_type == FORM_TYPE:
        offer, in_form = await _read_form(request)
        session |= in_form
    else:
        raise unsupported(request.content_type, f"{SDP_TYPE}, {JSON_TYPE} or {FORM_TYPE}")
    return Wish(offer, session, resumes, queue_s, record or session.get("recording") is True)


# ---- the query


def read_query(query: Mapping[str, str]) -> dict[str, Json]:
    """The session object that a query string stands for; `text_prompt` is an older name of `instructions`."""
    session: dict[str, Json] = {}
    for name, value in query.items():
        if name in QUERY_TEXTS:
            session[name] = value
        elif name == "text_prompt":
            session.setdefault("instructions", value)
        elif name in QUERY_NUMBERS:
            session[name] = _number(name, value, QUERY_NUMBERS[name])
    return session


def read_queue(query: Mapping[str, str]) -> float:
    """`?queue=30`: seconds that the caller would wait in line."""
    if "queue" not in query:
        return 0.0
    seconds = _number("queue", query["queue"], float)
    if not isinstance(seconds, float) or not 0 <= seconds <= LONGEST_QUEUE_S:
        message = f"queue must be 0 to {LONGEST_QUEUE_S:g} seconds, not {query['queue'][:40]!r}"
        raise RequestError(message, code="invalid_value", param="queue")
    return seconds


def _number(name: str, value: str, kind: Callable[[str], Json]) -> Json:
    try:
        number = kind(value)
    except ValueError:
        number = math.nan
    if isinstance(number, float) and not math.isfinite(number):
        raise RequestError(f"{name} must be a number, not {value[:40]!r}", code="invalid_value", param=name)
    return number


# ---- bodies


async def read_body(request: web.Request, limit: int) -> bytes:
    """The body, unless it is larger than `limit` bytes: then as little of it is read as possible."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise RequestError("the body did not come in time", status=408, code="request_timeout") from None
    except (web.RequestPayloadError, ConnectionError):  # broken, or its sender has left
        raise RequestError("the body cannot be read") from None
    return bytes(body)


async def read_json(request: web.Request) -> dict[str, Json]:
    """The JSON object that is the body. Raises RequestError 415, 413, 400."""
    if request.content_type != JSON_TYPE:
        raise unsupported(request.content_type, JSON_TYPE)
    return parse_json(await read_body(request, JSON_BYTES))


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body may have {limit} bytes", status=413, code="payload_too_large")


def unsupported(given: str, wanted: str) -> RequestError:
    message = f"the body must be {wanted}, not {given!r:.80}"
    return RequestError(message, status=415, code="unsupported_media_type")


def as_text(body: bytes) -> str:
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


def read_offer(body: Mapping[str, Json], types: Sequence[str] = (OFFER,)) -> tuple[str, str | None]:
    """The SDP of `{sdp, type}`, and the call that is to go on with it: `pc_id`, if `restart_pc` is true."""
    if body.get("type") not in types:
        message = f"type must be {' or '.join(map(repr, types))}, not {body.get('type')!r:.40}"
        raise RequestError(message, code="invalid_sdp_type", param="type")
    offer, pc_id = body.get("sdp"), body.get("pc_id")
    if not isinstance(offer, str):
        raise RequestError("sdp must be a string", code="invalid_sdp", param="sdp")
    return offer, pc_id if isinstance(pc_id, str) and body.get("restart_pc") is True else None


def as_object(body: Mapping[str, Json], name: str) -> dict[str, Json]:
    """The object under this name; empty if there is none. Raises RequestError for anything else."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object", code="invalid_json", param=name)
    return value


# ---- forms


async def _read_form(request: web.Request) -> tuple[str, dict[str, Json]]:
    """Parts `sdp` and `session`, as OpenAI's servers are sent; others are passed over."""
    parts = parse_form(request.headers["Content-Type"], await read_body(request, JSON_BYTES))
    if "sdp" not in parts:
        raise RequestError("the form has no part 'sdp'", code="invalid_multipart", param="sdp")
    return as_text(parts["sdp"]), parse_json(parts["session"]) if "session" in parts else {}


def parse_form(content_type: str, body: bytes) -> dict[str, bytes]:
    """The parts of a form by name (RFC 7578). Raises RequestError `invalid_multipart`.

    Read in one pass: parts in parts, and ways to encode them, are for mail, and cost whoever opens them dearly.
    """
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise _no_form("its Content-Type names no boundary")
    delimiter = b"\r\n--" + (boundary[1] or boundary[2]).encode()
    _, *pieces = (b"\r\n" + body).split(delimiter, MOST_PARTS + 1)
    if not any(piece.startswith(b"--") for piece in pieces):
        raise _no_form(f"it has no end, or over {MOST_PARTS} parts")
    parts: dict[str, bytes] = {}
    for piece in takewhile(lambda piece: not piece.startswith(b"--"), pieces):
        head, blank, content = piece.partition(b"\r\n\r\n")
        if not blank:
            raise _no_form("a part has no empty line after its headers")
        if name := _PART_NAME.search(head):
            parts[(name[1] if name[2] is None else name[2]).decode(errors="replace")] = content
    return parts


def _no_form(why: str) -> RequestError:
    return RequestError(f"the form cannot be read: {why}", code="invalid_multipart")
