"""The composition root: starts the engine and the media workers, joins all, and serves until it is asked to end."""

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from webrtc_duplex.engine.loop import SOCKET_NAME
from webrtc_duplex.launch.directory import runtime_directory
from webrtc_duplex.launch.port import naming_port, require_port
from webrtc_duplex.launch.process import allow_descriptors, keep_what_is_loaded
from webrtc_duplex.launch.supervision import (
    FAREWELL_S,
    Charge,
    keep_workers,
    start_orders,
    supervise_all,
    until_accepted,
)
from webrtc_duplex.server.app import CROWD, DESK, WORKERS, PathLogger, make_app
from webrtc_duplex.server.engines import Engines, join
from webrtc_duplex.server.tls import make_tls
from webrtc_duplex.settings import ServerSettings, Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_S = 20.0
"""A connection on which no request comes whole for so long is closed: idle, silent, or slow on purpose."""
BACKLOG = 1024
"""Connections that the system may hold for us while this process is busy."""


async def serve(settings: Settings) -> int:
    """Serve calls until SIGTERM or SIGINT, or until the engine is given up; returns the exit code.

    Raises DuplexError for what cannot be had here. That is found out, as far as it can be, before anybody is listened
    to, and before a model is loaded.
    """
    require_port(settings.server.host, settings.server.port)
    allow_descriptors()
    with runtime_directory() as directory:
        orders = list(start_orders(settings.engine, directory, settings.server.log_format))
        sockets = tuple(order.directory / SOCKET_NAME for order in orders)
        async with _signals() as signals, join(sockets) as (engine, clients):
            app, tls = make_app(settings, engine), make_tls(settings.server)
            charges = list(map(Charge, orders, clients))
            async with _running(supervise_all(charges)) as supervisor, _running(signals.acquire()) as asked:
                async with _running(until_accepted(charges)) as accepted:
                    await asyncio.wait({supervisor, asked, accepted}, return_when=asyncio.FIRST_COMPLETED)
                if not supervisor.done() and not asked.done():
                    async with _media_workers(app, settings, engine, sockets), _http(app, settings.server, tls):
                        await asyncio.wait({supervisor, asked}, return_when=asyncio.FIRST_COMPLETED)
                        await _drain(app[DESK].drain(settings.server.drain_timeout_s), supervisor, signals)
                return supervisor.result() if supervisor.done() else 0


async def _drain(drain: Coroutine[None, None, None], supervisor: asyncio.Task[int], signals: asyncio.Semaphore) -> None:
    """Let the callers take their leave for a while; a second signal ends that."""
    async with _running(drain) as drained, _running(signals.acquire()) as asked_again:
        await asyncio.wait({supervisor, drained, asked_again}, return_when=asyncio.FIRST_COMPLETED)


@asynccontextmanager
async def _media_workers(
    app: web.Application, settings: Settings, engine: Engines, sockets: tuple[Path, ...]
) -> AsyncIterator[None]:
    """The processes that carry calls while the block lasts, where it is not this one."""
    if WORKERS not in app:
        yield
        return
    async with _running(keep_workers(app[WORKERS], settings, engine, sockets)):
        yield


@asynccontextmanager
async def _http(app: web.Application, settings: ServerSettings, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    """The HTTP server while the block lasts; leaving it ends all calls."""
    runner = web.AppRunner(app, access_log_class=PathLogger, shutdown_timeout=FAREWELL_S, keepalive_timeout=REQUEST_S)
    await runner.setup()
    assert runner.server is not None, "it is set up"
    keep_what_is_loaded()
    try:
        with naming_port(settings.host, settings.port):
            await web.TCPSite(runner, settings.host, settings.port, ssl_context=tls, backlog=BACKLOG).start()
        for address in runner.addresses:
            logger.info("listening on %s://%s:%d", "https" if tls else "http", address[0], address[1])
        async with _running(app[CROWD].keep(runner.server)):
            yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Semaphore]:
    """What can be acquired once for each time that this process is asked to end."""
    loop = asyncio.get_running_loop()
    signals = asyncio.Semaphore(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.release)
    try:
        yield signals
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def _running(work: Coroutine[None, None, T]) -> AsyncIterator[asyncio.Task[T]]:
    """A task while the block lasts."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
