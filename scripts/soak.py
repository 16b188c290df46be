#!/usr/bin/env python3
"""A server that is treated badly for a long time: does it lose anything, and does it keep its callers apart?

    scripts/soak.py --seconds 3600 --report soak.md

Callers come and go over good and bad networks, and leave in every way there is; other clients send nonsense; now and
then a media worker or the engine is killed or made to hang. Each caller says a tone of its own and looks what it hears.
Before and after, with nobody there, everything is counted; at the end nothing must be left over:

- every row is free, no call is known, and the server's tasks, descriptors, threads and memory are what they were;
- every call that ended, whoever ended it, ended with a reason;
- no caller heard the tone of another.

The exit code is 0 only if all of that holds.
"""

import argparse
import asyncio
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.relay import NETWORKS, Relay  # noqa: E402
from tests.serving import Server, running, until_ready  # noqa: E402
from webrtc_duplex.audio import CHUNK_SAMPLES, SAMPLE_RATE, Pcm  # noqa: E402
from webrtc_duplex.client.call import Call, connect  # noqa: E402
from webrtc_duplex.errors import CapacityError, DuplexError, EngineError  # noqa: E402
from webrtc_duplex.media.opus import Decoder, Encoder  # noqa: E402

ROWS_SPARE = 1
"""Rows fewer than callers, so that some are refused."""
WARM_UP_S = 12.0
"""All that is only made once - caches, pools, the interpreter's own - is there after so long."""
RECOVERY_S = 60.0
"""After a strike the server is ready again by then."""
QUIET_S = 25.0
"""By then whatever a call has left behind is gone, if it ever goes."""
STAY_S = (2.0, 8.0)
LONGEST_VISIT_S = 60.0
"""Whatever takes longer hangs, here or there."""
SILENT_S = 2.0
"""A call of which nothing comes for so long is asked after."""

NETWORKS_OF_CALLERS = ("clean", "clean", "loss5", "mobile", "reordering", "jitter")
WAYS_TO_LEAVE = ("hang up", "close", "vanish")

TRACEBACK = re.compile(r"^Traceback.*?(?=^\d{4}-|\Z)", re.MULTILINE | re.DOTALL)
"""In a log, up to the next line of it."""

TONE_HZ, TONE_STEP_HZ = 400, 100
WINDOW = 4096
LOUD_RMS = 300.0

MORE_MEMORY_MB = 40.0
MORE_DESCRIPTORS = 3
MORE_THREADS = 1
MORE_TASKS = 0


# ---- the server


def serving(rows: int, log: Path) -> AbstractAsyncContextManager[Server]:
    """An echo with two media workers, ready."""
    timeouts = ["--media-timeout-s", "2", "--resume-grace-s", "1", "--connect-deadline-s", "3"]
    return running("echo", "--media-workers", "2", *timeouts, rows=rows, log=log)


# ---- what is left over


@dataclass(frozen=True, slots=True)
class Census:
    """What there is while nobody calls: by name, the server's own count or its processes' from the kernel."""

    counts: dict[str, float]

    def grown_since(self, before: "Census", allowed: dict[str, float]) -> list[str]:
        """A sentence for everything that there is more of than is allowed."""
        return [
            f"{name}: {before.counts[name]:g} before, {now:g} after"
            for name, now in self.counts.items()
            if now - before.counts[name] > allowed[name.rpartition(" ")[2]]
        ]


ALLOWED = {
    "rows": 0.0,
    "calls": 0.0,
    "tasks": MORE_TASKS,
    "descriptors": MORE_DESCRIPTORS,
    "threads": MORE_THREADS,
    "MB": MORE_MEMORY_MB,
}


async def census(server: Server) -> Census:
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{server.url}/readyz") as answer:
            told = await answer.json()
        async with http.get(f"{server.url}/metrics") as answer:
            metrics = await answer.text()
    tasks = re.search(r"^webrtc_duplex_tasks (\S+)", metrics, re.MULTILINE)
    assert tasks is not None, "the server tells how many tasks it has"
    counts = {"leased rows": float(told["rows"] - told["free_rows"]), "calls": float(told["calls"])}
    counts["tasks"] = float(tasks[1])
    processes = {"front": [server.pid]}
    processes |= {kind: server.children(f"{kind}_process") for kind in ("worker", "engine")}
    for kind, pids in processes.items():
        for what in ("descriptors", "threads", "MB"):
            counts[f"{kind} {what}"] = max(_of_process(pid)[what] for pid in pids)
    return Census(counts)


def _of_process(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)}
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"descriptors": descriptors, "threads": numbers["Threads"], "MB": numbers["VmRSS"] / 1024}


# ---- callers


@dataclass(slots=True)
class Tally:
    """What all callers met."""

    visits: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    heard_itself: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    nonsense: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """What must not be."""


@dataclass(frozen=True, slots=True)
class Tone:
    """What one caller says: nobody else says it meanwhile."""

    seat: int

    @property
    def hz(self) -> int:
        return TONE_HZ + self.seat * TONE_STEP_HZ

    def payload(self) -> bytes:
        """20 ms of it, encoded: whole periods, so that it can be said over and over."""
        chunk = (9000 * np.sin(2 * np.pi * self.hz * np.arange(CHUNK_SAMPLES) / SAMPLE_RATE)).astype(np.int16)
        encoder = Encoder()
        return [encoder.encode(chunk) for _ in range(10)][-1]


def loudest_seat(window: Pcm, seats: int) -> int | None:
    """Whose tone carries most of a window's sound; None if nobody's does."""
    sound = window.astype(np.float64) * np.hanning(len(window))
    if np.sqrt(np.mean(np.square(window.astype(np.float64)))) < LOUD_RMS:
        return None
    power = np.square(np.abs(np.fft.rfft(sound)))
    hz = np.fft.rfftfreq(len(window), 1 / SAMPLE_RATE)
    of_seats = [power[np.abs(hz - Tone(seat).hz) < 20].sum() for seat in range(seats)]
    loudest = int(np.argmax(of_seats))
    return loudest if of_seats[loudest] > power.sum() / 2 else None


@dataclass(frozen=True, slots=True)
class Load:
    """How much there is to bear."""

    callers: int
    rest_s: float
    """Between a caller's visits, on average."""
    strike_every_s: float


class Caller:
    """One seat: calls, says its tone, leaves, calls again, until it is cancelled."""

    def __init__(self, url: str, seat: int, load: Load, tally: Tally) -> None:
        self._url = url
        self._seat = seat
        self._load = load
        self._tally = tally
        self._random = Random(seat)
        self._payload = Tone(seat).payload()

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self._visit()
                await asyncio.sleep(self._random.uniform(0, 2 * self._load.rest_s))
            except (CapacityError, EngineError) as refusal:
                self._tally.refused[refusal.code] += 1
                await asyncio.sleep(1.0)
            except (DuplexError, aiohttp.ClientError, TimeoutError) as error:
                self._tally.refused[type(error).__name__] += 1
                await asyncio.sleep(1.0)

    async def _visit(self) -> None:
        network, way = self._random.choice(NETWORKS_OF_CALLERS), self._random.choice(WAYS_TO_LEAVE)
        async with AsyncExitStack() as wire:
            route = None
            if network != "clean" or way == "vanish":
                route = await wire.enter_async_context(Relay(NETWORKS[network], seed=self._random.randrange(1000)))
            limit = asyncio.timeout(LONGEST_VISIT_S)
            try:
                async with limit, connect(self._url, route=route) as call:
                    self._tally.visits += 1
                    await self._converse(call, way, wire)
            finally:
                if limit.expired():
                    self._tally.faults.append(f"a visit of seat {self._seat} over {network} hung ({way})")

    async def _converse(self, call: Call, way: str, wire: AsyncExitStack) -> None:
        """Talk for a while and leave; see to it that the call has a reason for its end."""
        heard: list[bytes] = []
        ends: list[str] = []
        tasks = [asyncio.create_task(self._talk(call)), asyncio.create_task(_listen(call, heard))]
        tasks.append(asyncio.create_task(_follow(call, ends)))
        stay = time.monotonic() + self._random.uniform(*STAY_S)
        packets, since = 0, time.monotonic()
        try:
            while time.monotonic() < stay and not ends and not call.over.is_set():
                await asyncio.sleep(0.1)
                if len(heard) > packets:
                    packets, since = len(heard), time.monotonic()
                if time.monotonic() - since > SILENT_S and await self._is_over(call):
                    break
            else:
                await self._leave(call, way if not ends else "hang up", wire)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self._tally.reasons[await self._reason(call, ends)] += 1
        self._judge(heard)

    async def _talk(self, call: Call) -> None:
        while True:
            await call.send_packet(self._payload)

    async def _leave(self, call: Call, way: str, wire: AsyncExitStack) -> None:
        match way:
            case "close":
                await call._pc.close()
            case "vanish":
                await wire.aclose()  # nothing passes any more, either way
            case "hang up":
                await self._ask(call, "DELETE")

    async def _reason(self, call: Call, ends: Sequence[str]) -> str:
        """Why the call has ended, by its own word or its place's; looked for until it has ended."""
        if ends:
            return ends[0]
        for _ in range(100):
            status, body = await self._ask(call, "GET")
            if status in (404, 410):
                return str(body["error"]["code"])
            if body.get("ended_because"):
                return str(body["ended_because"])
            await asyncio.sleep(0.1)
        self._tally.faults.append(f"call {call.id} has not ended though its caller has: {body}")
        return "none"

    async def _is_over(self, call: Call) -> bool:
        status, body = await self._ask(call, "GET")
        return status in (404, 410) or body.get("state") == "ended"

    async def _ask(self, call: Call, method: str) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {call.secret}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.request(method, f"{self._url}/v1/realtime/calls/{call.id}") as answer,
        ):
            return answer.status, await answer.json()

    def _judge(self, heard: list[bytes]) -> None:
        """Look window by window whose tone it was."""
        decoder = Decoder()
        pieces = [pcm for payload in heard if (pcm := decoder.decode(payload)) is not None]
        if not pieces:
            return
        sound = np.concatenate(pieces)
        windows = sound[: len(sound) // WINDOW * WINDOW].reshape(-1, WINDOW)
        seats = {loudest_seat(window, self._load.callers) for window in windows} - {None}
        self._tally.heard_itself += self._seat in seats
        if strangers := seats - {self._seat}:
            self._tally.faults.append(f"the caller of seat {self._seat} heard seats {strangers}")


async def _listen(call: Call, heard: list[bytes]) -> None:
    async for packet in call.packets():
        heard.append(packet.payload)


async def _follow(call: Call, ends: list[str]) -> None:
    async for event in call.events():
        if event.type == "ext.session.closing":
            ends.append(str(event.body["reason"]))


# ---- mischief


async def strike(server: Server, every_s: float, until: float, tally: Tally) -> None:
    """Kill a worker, let one hang, the same with the engine: one after the other, each time waiting for recovery."""
    fates = [(kind, fate) for kind in ("worker_process", "engine_process") for fate in (signal.SIGKILL, signal.SIGSTOP)]
    number = 0
    while time.monotonic() + every_s < until:
        await asyncio.sleep(every_s)
        kind, fate = fates[number % len(fates)]
        victims = server.children(kind)
        if victims:
            os.kill(victims[0], fate)
            tally.strikes[f"{fate.name} to {kind.removesuffix('_process')}"] += 1
        number += 1
        async with asyncio.timeout(RECOVERY_S):
            await until_ready(server.url)


async def talk_nonsense(url: str, until: float, tally: Tally, random: Random) -> None:
    """Be a client as there are many: of another protocol, half a request, an offer that is none or never connects."""
    corpus = sorted((ROOT / "tests" / "sdp").rglob("*.sdp"))
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < until:
            body = bytearray(random.choice(corpus).read_bytes())
            for _ in range(random.randrange(4) if body else 0):
                body[random.randrange(len(body))] = random.randrange(256)
            content_type = random.choice(["application/sdp", "application/json", "text/html"])
            with suppress(aiohttp.ClientError):
                async with http.post(
                    f"{url}/v1/realtime/calls", data=bytes(body), headers={"Content-Type": content_type}
                ) as answer:
                    tally.nonsense[answer.status] += 1
                    if answer.status == 500:
                        tally.faults.append(f"a fault of the server's: {await answer.text()}")
            await _half_a_request(url)
            await asyncio.sleep(0.5)


async def _half_a_request(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with suppress(OSError):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/realtime/calls HTTP/1.1\r\nContent-Length: 100000\r\nContent-Type: applic")
        await asyncio.sleep(0.2)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


# ---- the run


async def soak(seconds: float, load: Load, log: Path) -> tuple[Census, Census, Tally]:
    """Returns what there was after a warm-up, what there was at the end, and what was met."""
    tally = Tally()
    async with serving(load.callers - ROWS_SPARE, log) as server:
        warm = time.monotonic() + WARM_UP_S
        nonsense = asyncio.create_task(talk_nonsense(server.url, warm, tally, Random(0)))
        await be_busy(server, replace(load, rest_s=0.0), WARM_UP_S, tally)
        await nonsense
        await asyncio.sleep(QUIET_S)
        before = await census(server)
        end = time.monotonic() + seconds
        mischief = [
            asyncio.create_task(strike(server, load.strike_every_s, end, tally)),
            asyncio.create_task(talk_nonsense(server.url, end, tally, Random(1))),
        ]
        await be_busy(server, load, seconds, tally)
        await asyncio.gather(*mischief)
        await until_ready(server.url)
        await asyncio.sleep(QUIET_S)
        after = await census(server)
        tally.faults += after.grown_since(before, ALLOWED)
    text = log.read_text(errors="replace")
    tally.faults += [f"logged:\n{trace}" for trace in TRACEBACK.findall(text)]
    tally.faults += ["never destroyed" for line in text.splitlines() if "was destroyed but it is pending" in line]
    return before, after, tally


async def be_busy(server: Server, load: Load, seconds: float, tally: Tally) -> None:
    until = time.monotonic() + seconds
    await asyncio.gather(*(Caller(server.url, seat, load, tally).run(until) for seat in range(load.callers)))


def told(seconds: float, took_s: float, before: Census, after: Census, tally: Tally) -> str:
    """The report, in Markdown."""
    lines = [f"# Soak of {seconds:g} s: {'passed' if not tally.faults else 'FAILED'}", ""]
    lines += [*circumstances(took_s), ""]
    lines += [f"- {tally.visits} calls, {tally.heard_itself} of which heard themselves"]
    for name, counter in (
        ("refused", tally.refused),
        ("ended", tally.reasons),
        ("strikes", tally.strikes),
        ("answers to nonsense", tally.nonsense),
    ):
        lines.append(f"- {name}: " + (", ".join(f"{what} {n}" for what, n in counter.most_common()) or "none"))
    lines += ["", "| while nobody calls | before | after |", "|---|---|---|"]
    lines += [f"| {name} | {before.counts[name]:g} | {now:g} |" for name, now in after.counts.items()]
    return "\n".join([*lines, "", *(f"- FAULT: {fault}" for fault in tally.faults)])


def circumstances(took_s: float) -> list[str]:
    """When and where this ran, and what it took, from the server's start to its end."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cores, memory_gb = os.cpu_count(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    ours, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    shares = [(usage.ru_utime + usage.ru_stime) / took_s for usage in (theirs, ours)]
    return [
        f"- `{' '.join(sys.argv)}`, ended {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, "
        f"commit {commit.stdout.strip() or 'unknown'}",
        f"- {model[1] if model else platform.machine()}, {cores} cores, {memory_gb:.0f} GB, "
        f"Linux {platform.release()}, Python {platform.python_version()}",
        f"- CPU: server {shares[0]:.0%} of a core, its callers {shares[1]:.0%}; load average {os.getloadavg()[2]:.1f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long (default: %(default)g)")
    parser.add_argument("--callers", type=int, default=6, help="callers at once, one of whom finds no row")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between a caller's visits (default: none)")
    parser.add_argument(
        "--strike-every",
        type=float,
        default=15.0,
        help="seconds between strikes (default: %(default)g; an engine that dies three times in a minute is given up)",
    )
    parser.add_argument("--report", type=Path, help="file for the report")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        load = Load(options.callers, options.rest, options.strike_every)
        began = time.monotonic()
        before, after, tally = asyncio.run(soak(options.seconds, load, log))
        if tally.faults:
            sys.stderr.write(log.read_text(errors="replace")[-20_000:])
    report = told(options.seconds, time.monotonic() - began, before, after, tally)
    print(report)
    if options.report:
        options.report.write_text(report + "\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
