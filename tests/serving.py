"""`webrtc-duplex serve` as a process, for whole-system tests.

async with serving("echo", rows=1) as url:
    ...
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.conftest import ROOT
from tests.processes import children, command_of

START_S = 60.0
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that was started here."""

    url: str
    pid: int

    def children(self, kind: str) -> list[int]:
        """Its processes of this kind: `worker_process` or `engine_process`."""
        return sorted(pid for pid in children(self.pid) if kind.encode() in command_of(pid))


@asynccontextmanager
async def serving(
    model: str, *arguments: str, rows: int = 1, log: Path, within: Sequence[str] = ()
) -> AsyncIterator[str]:
    """A server with its engine, ready; yields its address. `within`: a command to run it in (`ip netns exec NAME`).

    What it writes is in `log`. In a network namespace its readiness cannot be asked from here; then it only listens.
    """
    async with running(model, *arguments, rows=rows, log=log, within=within) as server:
        yield server.url


@asynccontextmanager
async def running(
    model: str, *arguments: str, rows: int = 1, log: Path, within: Sequence[str] = ()
) -> AsyncIterator[Server]:
    """The same, for who wants to know its processes."""
    serve = ("serve", "--model", model, "--rows", str(rows), "--port", "0", "--drain-timeout-s", "0", *arguments)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(*within, sys.executable, "-m", "webrtc_duplex", *serve), cwd=ROOT, stdout=output, stderr=output
        )
    try:
        async with asyncio.timeout(START_S):
            url = await _address(process, log)
            if not within:
                await until_ready(url)
        yield Server(url, process.pid)
    finally:
        await _end(process)


async def _address(process: asyncio.subprocess.Process, log: Path) -> str:
    while not (listening := re.search(r"listening on (http://\S+)", log.read_text())):
        if process.returncode is not None:
            raise AssertionError(f"the server ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        await asyncio.sleep(0.1)
    return listening[1]


async def until_ready(url: str) -> None:
    """Wait until a new call would be taken."""
    async with aiohttp.ClientSession(url) as http:
        while (await http.get("/readyz")).status != 200:
            await asyncio.sleep(0.1)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
