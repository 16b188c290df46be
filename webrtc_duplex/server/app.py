"""The web application: what is served where, and how a failure becomes an answer."""

import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from webrtc_duplex.errors import CapacityError, DuplexError, EngineError
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.places import Places
from webrtc_duplex.server.session import Calls
from webrtc_duplex.server.signaling import JSON_BYTES, SDP_TYPE, Desk
from webrtc_duplex.settings import ServerSettings, Settings

log = logging.getLogger(__name__)

ENGINE = web.AppKey("engine", EngineClient)
DESK = web.AppKey("desk", Desk)
PAGE = web.AppKey("page", Path)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_AFTER_S = 5.0
"""What a caller is told to wait where nobody knows better."""

PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; media-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Permissions-Policy": "microphone=(self), camera=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page runs only its own scripts, is asked for again each time, and is not framed by others."""


def make_app(settings: Settings, engine: EngineClient) -> web.Application:
    """The whole application around an engine that the caller of this has opened (or not yet)."""
    app = web.Application(middlewares=[answer_errors], client_max_size=JSON_BYTES)
    app[ENGINE] = engine
    app[PAGE] = find_page(settings.server)
    app.cleanup_ctx.append(lambda app: _run_calls(app, settings.server))
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/", page),
            web.get("/static/{name}", page),
        ]
    )
    app[DESK] = Desk(engine, Places("0", secrets.token_bytes(32)))
    app.add_routes(app[DESK].routes())
    return app


async def _run_calls(app: web.Application, settings: ServerSettings) -> AsyncIterator[None]:
    """Calls live as long as the application; its end hangs all of them up."""
    async with Calls(app[ENGINE], settings) as calls:
        app[DESK].open(calls)
        yield


# ---- failures


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure is one JSON body, `{"error": {type, code, message, param}}`, and never a 200."""
    try:
        return await handler(request)
    except DuplexError as error:
        return error_response(error, request)
    except web.HTTPException as error:
        return _http_error_response(error)
    except Exception:
        name = f"req_{secrets.token_hex(8)}"
        log.exception("%s: %s %s failed", name, request.method, request.path)
        body = _error_body("server_error", "internal_error", f"a fault of the server's; it is logged as {name}", None)
        return web.json_response(body, status=500, headers={"X-Request-Id": name})


def error_response(error: DuplexError, request: web.Request) -> web.Response:
    """The answer that an error of ours asks for."""
    body = _error_body(error.kind, error.code, error.message, error.param)
    return web.json_response(body, status=error.status, headers=_error_headers(error, request.app[ENGINE]))


def _error_body(kind: str, code: str, message: str, param: str | None) -> dict[str, dict[str, str | None]]:
    return {"error": {"type": kind, "code": code, "message": message, "param": param}}


def _error_headers(error: DuplexError, engine: EngineClient) -> dict[str, str]:
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


def _http_error_response(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals: no such path, wrong method, too large a body."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{error.method} is not for this path; it takes {allowed}"
            body = _error_body("invalid_request_error", "method_not_allowed", message, None)
            return web.json_response(body, status=405, headers={"Allow": allowed})
        case web.HTTPRequestEntityTooLarge():
            body = _error_body("invalid_request_error", "payload_too_large", "the body is too large", None)
        case web.HTTPNotFound():
            body = _error_body("invalid_request_error", "not_found", "there is nothing at this path", None)
        case _:
            body = _error_body("invalid_request_error", "invalid_request", error.reason, None)
    return web.json_response(body, status=error.status)


# ---- health


async def healthz(_: web.Request) -> web.Response:
    """This process answers."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """Whether a new call would be taken, were a row free; if not, why."""
    reason = request.app[DESK].unready_because
    if reason is None:
        return web.json_response({"status": "ready"})
    return web.json_response({"status": "unready", "reason": reason}, status=503, headers={"Retry-After": "1"})


# ---- the page


def find_page(settings: ServerSettings) -> Path:
    """The folder of the page: the one in the settings, in the installed package, or in the checkout."""
    package = Path(__file__).resolve().parent.parent
    folders = [settings.static] if settings.static else [package / "static", package.parent / "static"]
    return next((folder for folder in folders if folder.is_dir()), folders[-1])


async def page(request: web.Request) -> web.FileResponse:
    """A file of the page; the start page at `/`."""
    folder = request.app[PAGE]
    path = folder / request.match_info.get("name", "index.html")
    if path.parent != folder or not path.is_file():
        raise web.HTTPNotFound
    return web.FileResponse(path, headers=PAGE_HEADERS)
