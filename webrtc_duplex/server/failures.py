"""How a failure becomes an answer: one JSON body, `{"error": {type, code, message, param}}`, and never a 200."""

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from webrtc_duplex.errors import CapacityError, DuplexError, EngineError
from webrtc_duplex.server.engines import Engine
from webrtc_duplex.server.metrics import Metrics
from webrtc_duplex.server.reading import SDP_TYPE

log = logging.getLogger(__name__)

ENGINE = web.AppKey[Engine]("engine")
METRICS = web.AppKey("metrics", Metrics)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_AFTER_S = 5.0
"""What a caller is told to wait where nobody knows better."""


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost `except` of a request: whatever it raises ends it, and it alone."""
    try:
        return await handler(request)
    except DuplexError as error:
        return error_response(error, request)
    except web.HTTPException as error:
        return _refusal_of_aiohttp(error)
    except Exception:
        name = f"req_{secrets.token_hex(8)}"
        log.exception("%s: %s %s failed", name, request.method, request.path)
        body = error_body("server_error", "internal_error", f"a fault of the server's; it is logged as {name}")
        return web.json_response(body, status=500, headers={"X-Request-Id": name})


def error_response(error: DuplexError, request: web.Request, headers: Mapping[str, str] | None = None) -> web.Response:
    """The answer that an error of ours asks for. Counts it."""
    request.app[METRICS].refusals.labels(error.code).inc()
    body = error_body(error.kind, error.code, error.message, error.param)
    own = _headers_of(error, request.app[ENGINE])
    return web.json_response(body, status=error.status, headers={**own, **(headers or {})})


def error_body(kind: str, code: str, message: str, param: str | None = None) -> dict[str, dict[str, str | None]]:
    return {"error": {"type": kind, "code": code, "message": message, "param": param}}


def _headers_of(error: DuplexError, engine: Engine) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or RETRY_AFTER_S)))
    if isinstance(error, CapacityError) and engine.ready:
        free_rows = engine.last_step.free_rows if engine.last_step is not None else 0
        headers["X-Capacity-Limit"] = str(engine.rows)
        headers["X-Capacity-InUse"] = str(engine.rows - free_rows)
    if isinstance(error, EngineError) and error.status == 503:
        headers["Connection"] = "close"
    match error.status:
        case 401:
            headers["WWW-Authenticate"] = "Bearer"
        case 415:
            headers["Accept-Post"] = SDP_TYPE
    return headers


def _refusal_of_aiohttp(error: web.HTTPException) -> web.Response:
    """What aiohttp itself refuses: no such path, a wrong method, too large a body."""
    kind, headers = "invalid_request_error", {}
    match error:
        case web.HTTPMethodNotAllowed():
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            message = f"{error.method} is not for this path; it takes {headers['Allow']}"
            body = error_body(kind, "method_not_allowed", message)
        case web.HTTPRequestEntityTooLarge():
            body = error_body(kind, "payload_too_large", "the body is too large")
        case web.HTTPNotFound():
            body = error_body(kind, "not_found", "there is nothing at this path")
        case _:
            body = error_body(kind, "invalid_request", error.reason)
    return web.json_response(body, status=error.status, headers=headers)
