"""What Prometheus is told of the bridge: its lines, its calls and how they ended, what it refused."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

logger = logging.getLogger(__name__)


class End(StrEnum):
    """What ended a call."""

    PHONE = "phone"
    AGENT = "agent"
    """The server hung up, or is gone."""
    KEY = "key"
    CUT = "cut"
    """Janus is gone or would not go on, or the bridge was stopped."""


@dataclass
class Ending:
    """How a call ends; whoever does not say so has cut it."""

    by: End = End.CUT


class Metrics:
    """The counters of one bridge, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lines = Gauge("webrtc_duplex_bridge_lines", "Lines registered at the gateway", registry=self.registry)
        self.busy = Gauge("webrtc_duplex_bridge_lines_busy", "Lines with a call", registry=self.registry)
        self.ended = Counter(
            "webrtc_duplex_bridge_calls_ended",
            "Calls that are over, by who ended them",
            ["end"],
            registry=self.registry,
        )
        self.refusals = Counter(
            "webrtc_duplex_bridge_refusals", "Calls refused, by SIP status", ["status"], registry=self.registry
        )
        self.keys = Counter("webrtc_duplex_bridge_keys", "Keys that callers pressed", registry=self.registry)
        self.call = Histogram(
            "webrtc_duplex_bridge_call_seconds",
            "How long calls were, from the answer on",
            buckets=(1, 5, 15, 30, 60, 120, 300, 600, 1200, 3600),
            registry=self.registry,
        )
        for end in End:
            self.ended.labels(end)

    @contextmanager
    def registered(self, lines: int) -> Iterator[None]:
        """So many lines are there while the block runs."""
        self.lines.set(lines)
        try:
            yield
        finally:
            self.lines.set(0)

    @contextmanager
    def talking(self) -> Iterator[Ending]:
        """A call goes on while the block runs, which writes down how it ends."""
        ending = Ending()
        try:
            with self.call.time():
                yield ending
        finally:
            self.ended.labels(ending.by).inc()


@asynccontextmanager
async def serving(metrics: Metrics, host: str, port: int | None) -> AsyncIterator[None]:
    """`/metrics`, and `/healthz` for who only asks whether the bridge lives, while the block runs; None: neither."""
    if port is None:
        yield
        return
    runner = web.AppRunner(_app(metrics), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        logger.info("metrics on http://%s:%d/metrics", host, port)
        yield
    finally:
        await runner.cleanup()


def _app(metrics: Metrics) -> web.Application:
    async def show(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def live(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.add_routes([web.get("/metrics", show), web.get("/healthz", live)])
    return app
