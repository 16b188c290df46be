"""Keeps the processes of a server running: an engine for each device, and the media workers.

Each is told how to begin by its standard input, which is its lifeline afterwards. What dies or hangs is restarted.
"""

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from webrtc_duplex.engine.loop import RING_NAME, SOCKET_NAME
from webrtc_duplex.errors import RequestError
from webrtc_duplex.launch.engine_process import EXIT_BAD_START, StartOrder
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.engines import Engines
from webrtc_duplex.server.pipe import Begin, Pipe
from webrtc_duplex.server.workers import Workers
from webrtc_duplex.settings import EngineSettings, Settings, workers_for

logger = logging.getLogger(__name__)

EXIT_GAVE_UP = 1

DEATHS = 3
DEATHS_WITHIN_S = 60.0
"""An engine that dies so often in so short a time is given up."""

BACK_OFF_S = (0.1, 1.0)
"""Pause before a restart, after the first and the second death of the last minute."""

WORKER_BACK_OFF_S = (0.1, 1.0, 5.0)
"""Pause before a restart, after the first, second and any later death of the last minute. A worker is never given up:
the others serve meanwhile."""

FAREWELL_S = 1.0
"""How long a process may take to end by itself when its lifeline is cut."""

ENGINE_CODE = (
    "from webrtc_duplex.launch.engine_process import engine_process, prepare_runner;"
    "raise SystemExit(engine_process(prepare_runner))"
)
ENGINE_COMMAND = (sys.executable, "-c", ENGINE_CODE)

WORKER_CODE = "from webrtc_duplex.launch.worker_process import worker_process; raise SystemExit(worker_process())"
WORKER_COMMAND = (sys.executable, "-c", WORKER_CODE)


# ---- engines


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


@dataclass(frozen=True, slots=True)
class Charge:
    """An engine that is to be kept running."""

    order: StartOrder
    client: EngineClient
    """Only listened to: it notices a hung engine as it does a dead one."""
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the engine has found its order possible; its model may still be loading."""


async def until_accepted(charges: Iterable[Charge]) -> None:
    """Wait until every engine has found its order possible."""
    for charge in charges:
        await charge.accepted.wait()


async def supervise_all(charges: Iterable[Charge]) -> int:
    """Keep every engine running. Returns the exit code for this process: when one cannot start as it was told to, or
    when the last one is given up; until then the others serve on.
    """
    tasks = [asyncio.create_task(supervise(ENGINE_COMMAND, charge)) for charge in charges]
    try:
        for ended in asyncio.as_completed(tasks):
            if (code := await ended) == EXIT_BAD_START:
                break
        return code
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def supervise(command: Sequence[str], charge: Charge, back_off_s: Sequence[float] = BACK_OFF_S) -> int:
    """Keep an engine process running. Returns the exit code for this process when it is given up."""
    deaths: deque[float] = deque(maxlen=DEATHS)
    while True:
        how = await _engine_life(command, charge)
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


async def _engine_life(command: Sequence[str], charge: Charge) -> int | None:
    """Start an engine and wait for its end; returns its exit code (None: it hung and was killed).

    It runs in a session of its own: Ctrl-C is for the server, which takes its leave of the callers first.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, start_new_session=True, env=charge.order.environment or None
    )
    assert process.stdin is not None and process.stdout is not None
    exited = asyncio.create_task(process.wait())
    lost = asyncio.create_task(charge.client.wait_lost())
    accepting = asyncio.create_task(_accept(process.stdout, charge.accepted))
    try:
        process.stdin.write(pickle.dumps(charge.order))
        await asyncio.wait({exited, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():  # dying, or hung
            await asyncio.wait({exited}, timeout=0.1)
        return process.returncode
    finally:
        accepting.cancel()
        lost.cancel()
        process.stdin.close()
        await _end(process, exited, FAREWELL_S if not lost.done() else 0.0)
        _clear(charge.order.directory)


async def _accept(output: asyncio.StreamReader, accepted: asyncio.Event) -> None:
    """An engine says one byte, if it finds its order possible."""
    if await output.read(1):
        accepted.set()


def _clear(directory: Path) -> None:
    """Remove what a killed engine has left, so that nobody joins it."""
    for name in (SOCKET_NAME, RING_NAME):
        (directory / name).unlink(missing_ok=True)


# ---- media workers


async def keep_workers(workers: Workers, settings: Settings, engine: Engines, sockets: tuple[Path, ...]) -> None:
    """Keep as many media workers running as the settings want, for ever."""
    await engine.wait_ready(None)
    count = settings.media_workers or workers_for(engine.rows)
    workers.want(count)
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            own = replace(settings, ice=settings.ice.share(number, count))
            tasks.create_task(_keep_worker(str(number), workers, own, sockets))


async def _keep_worker(name: str, workers: Workers, settings: Settings, sockets: tuple[Path, ...]) -> None:
    deaths: deque[float] = deque(maxlen=len(WORKER_BACK_OFF_S))
    while True:
        await _worker_life(name, workers, settings, sockets)
        now = time.monotonic()
        deaths.append(now)
        recent = sum(now - death < DEATHS_WITHIN_S for death in deaths)
        await asyncio.sleep(WORKER_BACK_OFF_S[recent - 1])


async def _worker_life(name: str, workers: Workers, settings: Settings, sockets: tuple[Path, ...]) -> None:
    """Start a media worker and wait for its end."""
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


# ---- how a process ends


async def _end(process: asyncio.subprocess.Process, exited: asyncio.Task[int], patience_s: float) -> None:
    """See the process end, if need be by SIGKILL, which a stopped process obeys as well."""
    if not exited.done():
        await asyncio.wait({exited}, timeout=patience_s)
    if not exited.done():
        process.kill()
        await exited


def _spell(exit_code: int | None) -> str:
    if exit_code is None:
        return "it hung"
    return f"exit code {exit_code}" if exit_code >= 0 else signal.Signals(-exit_code).name
