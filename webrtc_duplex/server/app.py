"""The web application: what is served where, to whom."""

import asyncio
import logging
import os.path
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from webrtc_duplex import logs
from webrtc_duplex.errors import RequestError
from webrtc_duplex.server import aliases, streams
from webrtc_duplex.server.auth import Door
from webrtc_duplex.server.crowd import Crowd
from webrtc_duplex.server.engines import Engine
from webrtc_duplex.server.failures import ENGINE, METRICS, Handler, answer_errors
from webrtc_duplex.server.ice import IceServers
from webrtc_duplex.server.metrics import CONTENT_TYPE, Metrics
from webrtc_duplex.server.openapi import document
from webrtc_duplex.server.places import CALL_ID, Places
from webrtc_duplex.server.reading import JSON_BYTES
from webrtc_duplex.server.recording import require_folder
from webrtc_duplex.server.session import Calls
from webrtc_duplex.server.signaling import SECRET_HEADER, Desk
from webrtc_duplex.server.workers import Workers
from webrtc_duplex.settings import ServerSettings, Settings

DESK = web.AppKey("desk", Desk)
CROWD = web.AppKey("crowd", Crowd)
PAGE = web.AppKey("page", Path)
WORKERS = web.AppKey("workers", Workers)
"""Where media workers carry the calls; absent where this process does."""

START_PAGE = "index.html"
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

EXPOSED_HEADERS = ("Accept-Post", "ETag", "Link", "Location", "Retry-After", "Warning", "X-Request-Id", SECRET_HEADER)
"""Headers that scripts of other origins may read."""
PREFLIGHT_LASTS_S = 600


def make_app(settings: Settings, engine: Engine) -> web.Application:
    """The whole application around an engine that the caller of this has opened (or not yet).

    Raises RequestError for files and directories of the settings that are not what they should be.
    """
    if settings.server.recordings is not None:
        require_folder(settings.server.recordings)
    crowd = Crowd()
    app = web.Application(middlewares=[crowd.note, answer_errors, answer_preflights], client_max_size=JSON_BYTES)
    app[CROWD] = crowd
    shared_key = settings.server.signing_key
    signing_key = shared_key.encode() if shared_key is not None else secrets.token_bytes(32)
    door = Door(settings.access, signing_key, time.monotonic, time.time)
    desk = Desk(engine, Places(settings.server.place, signing_key), door, IceServers(settings.ice), settings)
    app[ENGINE] = engine
    app[METRICS] = Metrics(engine)
    app[DESK] = desk
    app[PAGE] = find_page(settings.server)
    if settings.media_workers != 1:
        app[WORKERS] = Workers(app[METRICS])
    app.cleanup_ctx.append(lambda app: _run_calls(app, settings))
    app.on_shutdown.append(_hang_up)
    app.on_response_prepare.append(share_with_origin)
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics),
            web.get("/openapi.json", openapi),
            web.get("/", page),
            web.get("/ops", operator_page),
            web.get("/static/{name}", page),
        ]
    )
    app.add_routes([*desk.routes(), *aliases.Aliases(desk).routes(), *streams.Streams(desk).routes()])
    return app


async def _run_calls(app: web.Application, settings: Settings) -> AsyncIterator[None]:
    """Calls live as long as the application; its end hangs all of them up."""
    async with app[WORKERS] if WORKERS in app else Calls(app[ENGINE], settings, app[METRICS]) as calls:
        app[DESK].open(calls)
        yield


async def _hang_up(app: web.Application) -> None:
    """End all calls, and with them the streams of their events, which would be waited for otherwise."""
    await asyncio.gather(*(session.hang_up("drained") for session in app[DESK].live()), return_exceptions=True)


class PathLogger(AbstractAccessLogger):
    """One line a request, without its query: that may hold instructions or a secret."""

    ROUTINE = ("/static/", "/healthz", "/readyz", "/metrics")

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        routine = request.path.startswith(self.ROUTINE) and response.status < 400
        level = logging.DEBUG if routine else logging.INFO
        line = "%s %s %s %d, %.0f ms"
        facts = request.remote, request.method, request.path, response.status, 1000 * time
        call = CALL_ID.search(request.path) or CALL_ID.search(response.headers.get("Location", ""))
        with logs.of_call(call[0]) if call else nullcontext():
            self.logger.log(level, line, *facts)


# ---- other origins


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A browser's question whether a page of another origin may ask what it is about to ask."""
    asked = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or asked is None:
        return await handler(request)
    request.app[DESK].door.check_origin(request)
    headers = {
        "Access-Control-Allow-Methods": asked,
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
        "Access-Control-Max-Age": str(PREFLIGHT_LASTS_S),
    }
    return web.Response(status=204, headers=headers)


async def share_with_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of the origins that may call read the answer."""
    origin = request.headers.get("Origin")
    response.headers.add("Vary", "Origin")
    if origin is not None and request.app[DESK].door.origins.allow(origin, request.host):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = ", ".join(EXPOSED_HEADERS)


# ---- health and counts


async def healthz(_: web.Request) -> web.Response:
    """This process answers."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """Whether a new call would be taken, were a row free; if not, why."""
    desk, engine = request.app[DESK], request.app[ENGINE]
    rows = engine.rows if engine.ready else 0
    free_rows = engine.last_step.free_rows if engine.last_step is not None else rows
    counts = {"rows": rows, "free_rows": free_rows, "calls": len(desk.calls)}
    if (reason := desk.unready_because) is None:
        return web.json_response({"status": "ready", **counts})
    return web.json_response(
        {"status": "unready", "reason": reason, **counts}, status=503, headers={"Retry-After": "1"}
    )


async def metrics(request: web.Request) -> web.Response:
    """Everything counted, for Prometheus."""
    request.app[DESK].door.require_operator(request)
    workers = request.app.get(WORKERS)
    of_workers = await workers.metrics() if workers is not None else {}
    body = request.app[METRICS].exposition(of_workers)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def openapi(_: web.Request) -> web.Response:
    """This API, told to programs."""
    return web.json_response(document())


# ---- the page


def find_page(settings: ServerSettings) -> Path:
    """The folder of the page: the one in the settings, in the installed package, or in the checkout.

    Raises RequestError where the settings name one that holds no page.
    """
    if settings.static is not None:
        if not (settings.static / START_PAGE).is_file():
            raise RequestError(f"static: there is no {START_PAGE} in {settings.static}", param="static")
        return settings.static
    package = Path(__file__).resolve().parent.parent
    return next(folder for folder in (package / "static", package.parent / "static") if folder.is_dir())


async def page(request: web.Request) -> web.FileResponse:
    """A file of the page; the start page at `/`."""
    return _file(request, request.match_info.get("name", START_PAGE))


async def operator_page(request: web.Request) -> web.FileResponse:
    return _file(request, "ops.html")


def _file(request: web.Request, name: str) -> web.FileResponse:
    folder = request.app[PAGE]
    path = folder / name
    if path.parent != folder or not os.path.isfile(path):  # which no name is too long for
        raise web.HTTPNotFound
    return web.FileResponse(path, headers=PAGE_HEADERS)
