"""A server of paper for the page's tests: answers as the real one would, and refuses every call."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.conftest import ROOT

KEY = "sesame"

CALL: dict[str, Any] = {
    "id": "rtc_0_abcdef012345",
    "state": "live",
    "voice": "ada",
    "age_s": 83.0,
    "stats": {"rtt_ms": 12.34, "jb_ms": 15.0, "loss_in": 3, "concealed_ms": 60},
}

METRICS = """# HELP webrtc_duplex_rows Callers the engine takes at once
# TYPE webrtc_duplex_rows gauge
webrtc_duplex_engine_ready 1.0
webrtc_duplex_rows 8.0
webrtc_duplex_rows_free 5.0
webrtc_duplex_admitting 1.0
webrtc_duplex_refusals_total{{code="at_capacity"}} 3.0
webrtc_duplex_refusals_total{{code="invalid_sdp"}} 2.0
webrtc_duplex_step_seconds_bucket{{le="0.02"}} {few}
webrtc_duplex_step_seconds_bucket{{le="0.04"}} {all}
webrtc_duplex_step_seconds_bucket{{le="+Inf"}} {all}
"""


@dataclass(slots=True)
class PaperServer:
    """Has a model, no free row, an operator's key. Each look at its metrics finds twelve more steps of 20 to 40 ms."""

    url: str = ""
    refusal: int = 503
    code: str = "at_capacity"
    retry_after: str = "3"
    loading: int = 0
    """How often it will say that the model is still loading."""
    locked: bool = False
    """Whether even the page needs the key."""
    takes_text: bool = True
    records: bool = False
    voices: list[str] = field(default_factory=lambda: ["ada", "bob"])
    offers: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/", page("index.html"))
        app.router.add_get("/ops", page("ops.html"))
        app.router.add_static("/static", ROOT / "static")
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/voices", self.list_voices)
        app.router.add_get("/v1/realtime/ice-servers", self.ice_servers)
        app.router.add_post("/v1/realtime/calls", self.refuse)
        app.router.add_get("/v1/realtime/calls", self.calls)
        app.router.add_get("/metrics", self.metrics)
        return app

    async def models(self, request: web.Request) -> web.Response:
        if self.locked:
            require_key(request)
        if self.loading > 0:
            self.loading -= 1
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"})
        model = {"id": "paper", "takes_text": self.takes_text, "max_text_chars": 400, "recording": self.records}
        return web.json_response({"object": "list", "data": [model]})

    async def list_voices(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.voices], "default": "bob"})

    async def ice_servers(self, request: web.Request) -> web.Response:
        return web.json_response({"iceServers": []})

    async def refuse(self, request: web.Request) -> web.Response:
        self.offers.append(await request.json())
        error = {"type": "capacity_error", "code": self.code, "message": "the house is made of paper", "param": None}
        headers = {"Retry-After": self.retry_after} if self.refusal == 503 else {}
        return web.json_response({"error": error}, status=self.refusal, headers=headers)

    async def metrics(self, request: web.Request) -> web.Response:
        require_key(request)
        self.steps += 12
        return web.Response(text=METRICS.format(few=0, all=self.steps))

    async def calls(self, request: web.Request) -> web.Response:
        require_key(request)
        return web.json_response({"data": [CALL]})


def page(name: str) -> Callable[[web.Request], Awaitable[web.FileResponse]]:
    async def serve(request: web.Request) -> web.FileResponse:
        return web.FileResponse(ROOT / "static" / name)

    return serve


def require_key(request: web.Request) -> None:
    if request.headers.get("Authorization") != f"Bearer {KEY}":
        raise web.HTTPUnauthorized
