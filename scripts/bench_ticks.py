#!/usr/bin/env python3
"""What a tick costs beside the model: scheduler, ring, messages, sockets - measured with a model that does nothing.

    python scripts/bench_ticks.py [--rows 64] [--servers 1] [--ticks 500]

The engine runs here; server processes beside it share the calls, a row each, speak at every position and take every
answer.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import FRAME_S, FRAME_SAMPLES, Pcm, SoundRing
from webrtc_duplex.engine.inbox import Received, SocketInbox
from webrtc_duplex.engine.loop import RING_NAME, SOCKET_NAME, run_engine
from webrtc_duplex.messages import Event, ModelCard, Prompt, Stepped
from webrtc_duplex.server.engine_client import DuplexStream, EngineClient

WARM_UP_TICKS = 25


@dataclass(frozen=True, slots=True)
class TickCost:
    """Milliseconds that the engine is busy a tick, by the clock and of CPU time, and all servers' CPU time for one.

    On a machine with other work the clock also counts what the engine waited for a core.
    """

    rows: int
    servers: int
    ticks: int
    p50_ms: float
    p99_ms: float
    cpu_p50_ms: float
    cpu_p99_ms: float
    server_cpu_ms: float


class NullRunner:
    """A model that says nothing, at once."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.card = ModelCard("null", (), None, takes_text=False, max_text_chars=0, pieces=("",))
        self._said = np.zeros((rows, FRAME_SAMPLES), np.int16)
        self._texts = np.zeros(rows, np.int64)
        self._sound = np.ones(rows, np.bool_)

    def load_prompt(self, prompt: Prompt) -> int:
        return 0

    def begin(self, row: int, prompt: Prompt) -> int:
        return 0

    def prefill(self, row: int, columns: int) -> int:
        return 0

    def reset(self, row: int) -> None:
        pass

    def fill(self, row: int) -> None:
        pass

    def step(self, rows: NDArray[np.int64], pcm: Pcm) -> tuple[Pcm, NDArray[np.int64], NDArray[np.bool_]]:
        return self._said[: len(rows)], self._texts[: len(rows)], self._sound[: len(rows)]


class BusyMeter:
    """An inbox that measures how long the engine is busy between its waits, for each tick with everybody at it."""

    def __init__(self, inbox: SocketInbox, rows: int, ticks: int) -> None:
        self.busy_s: list[NDArray[np.float64]] = []  # each [2]: by the clock, of CPU time
        self._inbox = inbox
        self._rows = rows
        self._ticks = ticks
        self._stepped = 0
        self._since = _now()
        self._sum = np.zeros(2)

    @property
    def closed(self) -> bool:
        return self._inbox.closed or len(self.busy_s) >= self._ticks

    def poll(self, timeout_s: float) -> Sequence[Received]:
        self._sum += _now() - self._since
        if timeout_s > 0:
            if self._stepped == self._rows:
                self.busy_s.append(self._sum)
            self._sum, self._stepped = np.zeros(2), 0
        received = self._inbox.poll(timeout_s)
        self._since = _now()
        return received

    def send(self, connection: int, event: Event) -> None:
        self._stepped += len(event.outputs) if isinstance(event, Stepped) else 0
        self._inbox.send(connection, event)


def _now() -> NDArray[np.float64]:
    return np.array([time.perf_counter(), time.thread_time()])


def tick_cost(rows: int = 64, *, servers: int = 1, ticks: int = 500) -> TickCost:
    """Measure so many ticks of so many callers, after some to warm up; takes ticks * 80 ms and some seconds."""
    with tempfile.TemporaryDirectory() as directory:
        lifeline, parent = os.pipe()
        ring = SoundRing.create(Path(directory) / RING_NAME, rows)
        with SocketInbox(Path(directory) / SOCKET_NAME, lifeline) as inbox:
            meter = BusyMeter(inbox, rows, WARM_UP_TICKS + ticks)
            callers = [_start_callers(directory, rows // servers) for _ in range(servers)]
            run_engine(meter, ring, NullRunner(rows), time.monotonic)
        told = sum(float(process.communicate(timeout=30)[0]) for process in callers)
        os.close(parent)
        os.close(lifeline)
    (p50, cpu_p50), (p99, cpu_p99) = np.percentile(np.array(meter.busy_s[WARM_UP_TICKS:]) * 1e3, [50, 99], axis=0)
    return TickCost(rows, servers, ticks, p50, p99, cpu_p50, cpu_p99, told)


def _start_callers(directory: str, calls: int) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--rows", str(calls), "--caller", directory]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def _callers(directory: Path, rows: int) -> None:
    """Open the calls and talk until the engine ends; prints the CPU milliseconds a tick."""
    async with EngineClient(directory / SOCKET_NAME) as client, AsyncExitStack() as calls:
        await client.wait_ready(20)
        streams = [await calls.enter_async_context(client.open(f"call {n}", Prompt())) for n in range(rows)]
        for stream in streams:
            stream.start()
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*map(_talk, streams), return_exceptions=True)
        print((time.process_time() - cpu) * 1e3 / ((time.monotonic() - began) / FRAME_S))


async def _talk(stream: DuplexStream) -> None:
    frame = np.zeros(FRAME_SAMPLES, np.int16)
    async for said in stream:
        stream.hear(said.position + 1, frame)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--servers", type=int, default=1, help="a divisor of the rows")
    parser.add_argument("--ticks", type=int, default=500)
    parser.add_argument("--caller", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.caller is not None:
        asyncio.run(_callers(options.caller, options.rows))
    else:
        print(json.dumps(asdict(tick_cost(options.rows, servers=options.servers, ticks=options.ticks)), indent=2))


if __name__ == "__main__":
    main()
