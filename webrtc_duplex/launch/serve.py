"""The composition root: starts the engine and the media workers, joins all, and serves until it is asked to end."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from webrtc_duplex.engine.loop import SOCKET_NAME
from webrtc_duplex.errors import EngineError
from webrtc_duplex.launch.directory import runtime_directory
from webrtc_duplex.launch.process import allow_descriptors, keep_what_is_loaded
from webrtc_duplex.launch.supervision import FAREWELL_S, keep_workers, start_orders, supervise_all
from webrtc_duplex.server.app import DESK, WORKERS, PathLogger, make_app
from webrtc_duplex.server.engines import Engines, join
from webrtc_duplex.server.tls import make_tls
from webrtc_duplex.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_S = 20.0
"""A connection on which no request comes whole for so long is closed: idle, silent, or slow on purpose."""
BACKLOG = 1024
"""Connections that the system may hold for us while this process is busy."""


async def serve(settings: Settings) -> int:
    """Serve calls until SIGTERM or SIGINT, or until the engine is given up; returns the exit code.

    The first signal lets the callers take their leave for a while, a second one ends that.
    """
    allow_descriptors()
    with runtime_directory() as directory:
        orders = list(start_orders(settings.engine, directory, settings.server.log_format))
        sockets = tuple(order.directory / SOCKET_NAME for order in orders)
        async with (
            join(sockets) as (engine, clients),
            _running(supervise_all(orders, clients)) as supervisor,
            _http(settings, engine, sockets) as drain,
            _signals() as signals,
        ):
            async with _running(signals.acquire()) as asked:
                await asyncio.wait({supervisor, asked}, return_when=asyncio.FIRST_COMPLETED)
            async with _running(drain()) as drained, _running(signals.acquire()) as asked_again:
                await asyncio.wait({supervisor, drained, asked_again}, return_when=asyncio.FIRST_COMPLETED)
            return supervisor.result() if supervisor.done() else 0


@asynccontextmanager
async def _http(
    settings: Settings, engine: Engines, sockets: tuple[Path, ...]
) -> AsyncIterator[Callable[[], Coroutine[None, None, None]]]:
    """The HTTP server while the block lasts; leaving it ends all calls. Gives what lets them end by themselves."""
    host, port = settings.server.host, settings.server.port
    tls = make_tls(settings.server)
    app = make_app(settings, engine)
    runner = web.AppRunner(app, access_log_class=PathLogger, shutdown_timeout=FAREWELL_S, keepalive_timeout=REQUEST_S)
    await runner.setup()
    keep_what_is_loaded()
    async with AsyncExitStack() as stack:
        if WORKERS in app:
            await stack.enter_async_context(_running(keep_workers(app[WORKERS], settings, engine, sockets)))
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls, backlog=BACKLOG).start()
        except OSError as error:
            raise EngineError(f"cannot listen on {host}:{port}: {_reason(error)}") from error
        for address in runner.addresses:
            logger.info("listening on %s://%s:%d", "https" if tls else "http", address[0], address[1])
        yield partial(app[DESK].drain, settings.server.drain_timeout_s)


def _reason(error: OSError) -> str:
    """What the system says; asyncio puts more before it, but a name that is not found has a number of its own kind."""
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    return os.strerror(error.errno or 0)


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
