"""The composition root: starts the engine and the media workers, joins all, restarts what dies or hangs.

`serve` runs in the server process, `engine_process` in the engine's, `worker_process` in a media worker's. The latter
two get their start order by their standard input, which is their lifeline afterwards: they end when that closes, that
is with their parent.
"""

import asyncio
import ctypes
import fcntl
import gc
import logging
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from webrtc_duplex import logs
from webrtc_duplex.engine.capacity import check_rows, most_rows
from webrtc_duplex.engine.loop import RING_NAME, SOCKET_NAME, ModelRunner, serve_engine
from webrtc_duplex.errors import DuplexError, EngineError, RequestError
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.engines import Engines, join
from webrtc_duplex.settings import EngineSettings, Settings, workers_for

if TYPE_CHECKING:
    from webrtc_duplex.server.workers import Workers

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_BAD_START = 2
"""Exit code, of engine and server, where starting again would fail again: a bad checkpoint, impossible rows."""
EXIT_GAVE_UP = 1

DEATHS = 3
DEATHS_WITHIN_S = 60.0
"""An engine that dies so often in so short a time is given up."""

BACK_OFF_S = (0.1, 1.0)
"""Pause before a restart, after the first and the second death of the last minute."""

ENGINE_NICENESS = -10
"""An engine that waits for a core makes all its callers wait: it goes before what else runs, where that is allowed."""

FAREWELL_S = 1.0
"""How long an engine may take to end by itself when its lifeline is cut."""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """What an engine process is told, and the environment it is told it in."""

    settings: EngineSettings
    directory: Path
    log_level: int
    log_format: str = "text"
    environment: Mapping[str, str] = field(default_factory=dict)


def start_orders(settings: EngineSettings, directory: Path, log_format: str = "text") -> Iterator[StartOrder]:
    """An order for each device, each with a private directory of its own.

    A GPU of several is the only one that its engine sees, so that nothing of it can stray to another.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // 2 // len(settings.devices))
    for number, device in enumerate(settings.devices):
        own = directory / str(number)
        own.mkdir(mode=0o700)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        if len(settings.devices) > 1 and device.startswith("cuda:"):
            environment["CUDA_VISIBLE_DEVICES"] = _visible_gpu(int(device.removeprefix("cuda:")))
            device = "cuda"
        level = logging.getLogger().getEffectiveLevel()
        yield StartOrder(replace(settings, device=device), own, level, log_format, environment)


def _visible_gpu(number: int) -> str:
    """What CUDA_VISIBLE_DEVICES is to be, so that only this one of those visible to us is seen. Raises RequestError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(number)
    names = visible.split(",")
    if number >= len(names):
        raise RequestError(f"there is no cuda:{number}: CUDA_VISIBLE_DEVICES names {len(names)}", param="device")
    return names[number]


# ---- the server process

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


def allow_descriptors() -> int:
    """Let this process, and those that it starts, open as many descriptors as the system's hard limit says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextmanager
def runtime_directory(base: Path = Path("/dev/shm")) -> Iterator[Path]:
    """A private directory for socket and ring, in memory if there is such a place; removed at the end.

    A lock in it is held as long as it is used, so that what a killed server has left is known and swept.
    """
    parent = base if os.access(base, os.W_OK) else Path(tempfile.gettempdir())
    _sweep(parent)
    directory = Path(tempfile.mkdtemp(prefix="webrtc-duplex-", dir=parent))  # of mode 0700
    try:
        with (directory / "unlocked").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (directory / "unlocked").rename(directory / "lock")
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove directories of this user whose server is gone."""
    for path in parent.glob("webrtc-duplex-*/lock"):
        try:
            with path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # in use, or somebody else's
            continue


@asynccontextmanager
async def _running(work: Coroutine[None, None, T]) -> AsyncIterator[asyncio.Task[T]]:
    """A task while the block lasts."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def _http(
    settings: Settings, engine: Engines, sockets: tuple[Path, ...]
) -> AsyncIterator[Callable[[], Coroutine[None, None, None]]]:
    """The HTTP server while the block lasts; leaving it ends all calls. Gives what lets them end by themselves."""
    from aiohttp import web  # here, as an engine process needs none of it

    from webrtc_duplex.server.app import DESK, WORKERS, PathLogger, make_app
    from webrtc_duplex.server.tls import make_tls

    host, port = settings.server.host, settings.server.port
    tls = make_tls(settings.server)
    app = make_app(settings, engine)
    runner = web.AppRunner(app, access_log_class=PathLogger, shutdown_timeout=FAREWELL_S, keepalive_timeout=REQUEST_S)
    await runner.setup()
    _keep_what_is_loaded()
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


# ---- the supervisor

ECHO_ROWS = 64
"""Callers of an echo where their number is to be found out: it costs nothing, but packets do."""

ENGINE_CODE = "from webrtc_duplex import launch; raise SystemExit(launch.engine_process(launch.load_runner))"
ENGINE_COMMAND = (sys.executable, "-c", ENGINE_CODE)


async def supervise_all(orders: Sequence[StartOrder], engines: Sequence[EngineClient]) -> int:
    """Keep an engine running for each order. Returns the exit code for this process: when one cannot start as it was
    told to, or when the last one is given up; until then the others serve on.
    """
    pairs = zip(orders, engines, strict=True)
    tasks = [asyncio.create_task(supervise(ENGINE_COMMAND, order, engine)) for order, engine in pairs]
    try:
        for ended in asyncio.as_completed(tasks):
            if (code := await ended) == EXIT_BAD_START:
                break
        return code
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def supervise(
    command: Sequence[str], order: StartOrder, engine: EngineClient, back_off_s: Sequence[float] = BACK_OFF_S
) -> int:
    """Keep an engine process running. Returns the exit code for this process when it is given up.

    `engine` is only listened to: its client notices a hung engine as it does a dead one.
    """
    deaths: deque[float] = deque(maxlen=DEATHS)
    while True:
        how = await _engine_life(command, order, engine)
        if how == EXIT_BAD_START:
            return EXIT_BAD_START
        now = time.monotonic()
        deaths.append(now)
        recent = sum(now - death < DEATHS_WITHIN_S for death in deaths)
        logger.error("the engine is lost (%s), for the %d. time in %g s", _spell(how), recent, DEATHS_WITHIN_S)
        if recent == DEATHS:
            logger.error("the engine is given up")
            return EXIT_GAVE_UP
        await asyncio.sleep(back_off_s[recent - 1])


async def _engine_life(command: Sequence[str], order: StartOrder, engine: EngineClient) -> int | None:
    """Start an engine and wait for its end; returns its exit code (None: it hung and was killed).

    It runs in a session of its own: Ctrl-C is for the server, which takes its leave of the callers first.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, start_new_session=True, env=order.environment or None
    )
    assert process.stdin is not None
    exited = asyncio.create_task(process.wait())
    lost = asyncio.create_task(engine.wait_lost())
    try:
        process.stdin.write(pickle.dumps(order))
        await asyncio.wait({exited, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():  # dying, or hung
            await asyncio.wait({exited}, timeout=0.1)
        return process.returncode
    finally:
        lost.cancel()
        process.stdin.close()
        await _end(process, exited, FAREWELL_S if not lost.done() else 0.0)
        _clear(order.directory)


async def _end(process: asyncio.subprocess.Process, exited: asyncio.Task[int], patience_s: float) -> None:
    """See the process end, if need be by SIGKILL, which a stopped process obeys as well."""
    if not exited.done():
        await asyncio.wait({exited}, timeout=patience_s)
    if not exited.done():
        process.kill()
        await exited


def _clear(directory: Path) -> None:
    """Remove what a killed engine has left, so that nobody joins it."""
    for name in (SOCKET_NAME, RING_NAME):
        (directory / name).unlink(missing_ok=True)


def _spell(exit_code: int | None) -> str:
    if exit_code is None:
        return "it hung"
    return f"exit code {exit_code}" if exit_code >= 0 else signal.Signals(-exit_code).name


# ---- the media workers

WORKER_CODE = "from webrtc_duplex import launch; raise SystemExit(launch.worker_process())"
WORKER_COMMAND = (sys.executable, "-c", WORKER_CODE)

WORKER_BACK_OFF_S = (0.1, 1.0, 5.0)
"""Pause before a restart, after the first, second and any later death of the last minute. A worker is never given up:
the others serve meanwhile."""


async def keep_workers(workers: "Workers", settings: Settings, engine: Engines, sockets: tuple[Path, ...]) -> None:
    """Keep as many media workers running as the settings want, for ever."""
    await engine.wait_ready(None)
    count = settings.media_workers or workers_for(engine.rows)
    workers.want(count)
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            own = replace(settings, ice=settings.ice.share(number, count))
            tasks.create_task(_keep_worker(str(number), workers, own, sockets))


async def _keep_worker(name: str, workers: "Workers", settings: Settings, sockets: tuple[Path, ...]) -> None:
    deaths: deque[float] = deque(maxlen=len(WORKER_BACK_OFF_S))
    while True:
        await _worker_life(name, workers, settings, sockets)
        now = time.monotonic()
        deaths.append(now)
        recent = sum(now - death < DEATHS_WITHIN_S for death in deaths)
        await asyncio.sleep(WORKER_BACK_OFF_S[recent - 1])


async def _worker_life(name: str, workers: "Workers", settings: Settings, sockets: tuple[Path, ...]) -> None:
    """Start a media worker and wait for its end."""
    from webrtc_duplex.server.pipe import Begin, Pipe

    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(*WORKER_COMMAND, stdin=theirs.fileno(), start_new_session=True)
    exited = asyncio.create_task(process.wait())
    patience_s = FAREWELL_S
    try:
        pipe = await Pipe.over(ours)
        pipe.send(Begin(name, settings, sockets, logging.getLogger().getEffectiveLevel()))
        await workers.carry(name, pipe)
        await asyncio.wait({exited}, timeout=0.1)
        patience_s = 0.0  # what has not ended by now hangs
        logger.error("media worker %s is lost (%s)", name, _spell(process.returncode))
    finally:
        await _end(process, exited, patience_s)


def worker_process() -> int:
    """Be a media worker until the front process is gone; returns the exit code."""
    import uvloop

    _leave_ending_to_the_parent()
    return uvloop.run(_carry_calls(socket.socket(fileno=os.dup(sys.stdin.fileno()))))


async def _carry_calls(end: socket.socket) -> int:
    from webrtc_duplex.server.pipe import Begin, Pipe
    from webrtc_duplex.server.worker import work

    pipe = await Pipe.over(end)
    begin = await pipe.receive()
    assert isinstance(begin, Begin)
    logs.configure(begin.log_level, begin.settings.server.log_format, process=f"worker {begin.name}")
    _keep_what_is_loaded()
    async with join(begin.engine_sockets) as (engine, _):
        await work(pipe, engine, begin.settings)
    return 0


# ---- the engine process


def engine_process(load: Callable[[EngineSettings], ModelRunner]) -> int:
    """Be an engine until the lifeline is cut; returns the exit code."""
    order = pickle.load(sys.stdin.buffer)
    assert isinstance(order, StartOrder)
    _leave_ending_to_the_parent()
    logs.configure(order.log_level, order.log_format, process="engine")
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, ENGINE_NICENESS)
    try:
        runner = load(order.settings)
    except DuplexError as error:
        sys.stderr.write(f"webrtc-duplex: {error.message}\n")
        return EXIT_BAD_START
    logger.info("%s is ready for %d callers", runner.card.name, runner.rows)
    _keep_what_is_loaded()
    try:
        serve_engine(order.directory, sys.stdin.fileno(), runner, time.monotonic, order.settings)
    except Exception:
        logger.exception("the engine dies")
        return 1
    return 0


def _keep_what_is_loaded() -> None:
    """Model and modules are no garbage: collections between two ticks, or two packets, need not look at them.

    All that a media worker has imported took one 45 ms (2026-12-01), in which it sends nothing.
    """
    gc.collect()
    gc.freeze()


def _leave_ending_to_the_parent() -> None:
    """Ignore signals meant for the whole service, as the server ends the calls first; but do not outlive it.

    The kernel kills us when the parent dies: a belt beside the lifeline, which an engine that hangs does not watch.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def load_runner(settings: EngineSettings) -> ModelRunner:
    """The model that the settings name, for their rows or as many as it serves in time.

    Raises CheckpointError or RequestError with what is wrong. An echo is loaded without torch.
    """
    if settings.model == "echo":
        from webrtc_duplex.model.echo import EchoRunner

        return EchoRunner(settings.rows or ECHO_ROWS)
    from webrtc_duplex.model import runner

    def load(rows: int) -> ModelRunner:
        return runner.load_runner(settings.model, rows, settings.device, settings.kv_dtype)

    rows = settings.rows
    if rows is None:
        fitting = runner.rows_in_memory(settings.model, settings.device, settings.kv_dtype)
        rows = most_rows(load, fitting, settings.phases, time.monotonic)
    return check_rows(load(rows), settings.phases, time.monotonic)
