#!/usr/bin/env python3
"""A fleet of GPUs on a computer that has none: who is refused, how full is it, how long does joining take?

    scripts/simulate_fleet.py [--nodes 125] [--gpus 8] [--rows 64] [--callers 60000] [--steps RECORDED.json]

By events, with the code that serves: calls are placed by `server.engines.by_room` (the node with the most room, on it
the GPU with the most room), and rows are leased by `engine.rows.RowPool`. Callers come by a daily curve, talk for a
lognormal time, and call again after Retry-After when they are refused, three times; nodes fail and come back, and
whoever was on one calls again at once. For ten GPUs the busiest minutes are then played out tick by tick with
`engine.scheduler.Scheduler`, prefill included.

The day is compressed into `--hours`, which makes its slopes steeper than they are. Step times are read from `--steps`,
a JSON object of recorded milliseconds by number of rows; without it they are the design's estimates for an H200 and a
7B model with its whole window full, which nobody has measured. `--phases` cuts a tick into sub-ticks: each steps a part
of the rows, so that an answer is there sooner, and the GPU works longer in all.
"""

import argparse
import heapq
import json
import math
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from webrtc_duplex.engine.rows import Row, RowPool, Tenant  # noqa: E402
from webrtc_duplex.engine.scheduler import Begin, Joined, Prefill, Scheduler, Step, Wait  # noqa: E402
from webrtc_duplex.errors import CapacityError  # noqa: E402
from webrtc_duplex.messages import Close, Lease, Leased, Live, Open, Prompt, Refused, Start  # noqa: E402
from webrtc_duplex.server.engines import by_room  # noqa: E402
from webrtc_duplex.server.failures import RETRY_AFTER_S  # noqa: E402
from webrtc_duplex.settings import EngineSettings  # noqa: E402

ESTIMATED_STEP_MS = {1: [7.5], 16: [13.4], 32: [20.3], 64: [34.4], 128: [68.0]}
JITTER = 0.03
"""Of an estimated step: graph replays on an idle card vary by so much."""
PROMPT_COLUMNS = 150
COLUMN_S = 30e-6
"""A piece of 256 columns is estimated to take 6 to 8 ms."""
BEGIN_S = 0.001
MEDIA_UP_S = 0.25
"""From the lease until the caller's media is there, as seen on one machine; a network adds its round trips."""

MEAN_CALL_S, SPREAD = 300.0, 0.8
NIGHT = 0.15
"""Callers at the quietest hour, as a share of those at the busiest."""
ATTEMPTS = 4
REPAIR_S = 300.0
SAMPLED_GPUS = 10


Entry = tuple[float, bool, int]
"""When a call (by its number) was opened (True) or closed."""


@dataclass(slots=True, eq=False)
class Gpu:
    """One engine, as far as its rows go."""

    pool: RowPool
    log: list[Entry] | None = None
    """Of a sampled one: what was opened and closed."""

    def free_rows(self) -> int:
        return self.pool.free_rows


@dataclass(slots=True, eq=False)
class Node:
    """A machine: its GPUs fail together."""

    gpus: list[Gpu]
    room: int
    up: bool = True

    def free_rows(self) -> int:
        return self.room


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a call is."""

    node: Node
    gpu: Gpu
    row: Row


@dataclass(slots=True)
class Figures:
    """What came of it."""

    calls: int = 0
    refusals: int = 0
    given_up: int = 0
    lost: int = 0
    attempts: Counter[int] = field(default_factory=Counter)
    """Calls by how often they had to ask."""
    used: list[tuple[float, float]] = field(default_factory=list)
    """Time, and the share of the rows of nodes that are up that was leased then."""


class Fleet:
    """The simulation: a heap of events, each a time and something to do."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.figures = Figures()
        self._options = options
        self._random = Random(options.seed)
        self._day_s = options.hours * 3600.0
        per_node = options.gpus * options.rows
        self.nodes = [
            Node([Gpu(RowPool(options.rows, 1)) for _ in range(options.gpus)], per_node) for _ in range(options.nodes)
        ]
        self.sampled = [self.nodes[i * len(self.nodes) // SAMPLED_GPUS].gpus[0] for i in range(SAMPLED_GPUS)]
        for gpu in self.sampled:
            gpu.log = []
        self._now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, str, object]] = []
        self._seats: dict[int, Seat] = {}
        self._numbers = count()

    def run(self) -> None:
        """Until the day is over."""
        for node in self._random.choices(self.nodes, k=self._options.failures):
            self._at(self._random.uniform(0.2, 0.9) * self._day_s, "fail", node)
        for second in range(0, int(self._day_s), 10):
            self._at(float(second), "look", None)
        self._at(0.0, "arrive", None)
        while self._events and self._events[0][0] < self._day_s:
            self._now, _, what, about = heapq.heappop(self._events)
            self._do(what, about)

    def wanted(self, at: float) -> float:
        """Callers who would be there were nobody refused: a cosine from the night to the evening and back."""
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * at / self._day_s)
        return float(self._options.callers) * (NIGHT + (1 - NIGHT) * wave)

    def _do(self, what: str, about: object) -> None:
        match what, about:
            case "arrive", None:
                self._call(1)
                self._at(self._now + self._random.expovariate(self.wanted(self._now) / MEAN_CALL_S), "arrive", None)
            case "again", int(attempt):
                self._call(attempt)
            case "leave", int(number):
                self._leave(number)
            case "fail", Node() as node:
                self._fail(node)
            case "repair", Node() as node:
                node.up = True
            case "look", None:
                self._look()

    def _call(self, attempt: int) -> None:
        """Ask for a row, as one machine after the other is asked."""
        if attempt == 1:
            self.figures.calls += 1
        number = next(self._numbers)
        for node in by_room(node for node in self.nodes if node.up)[:2]:
            for gpu in by_room(node.gpus):
                try:
                    row = gpu.pool.open(Tenant(0, str(number)), Prompt(), self._now, math.inf)
                except CapacityError:
                    continue
                self._seat(number, Seat(node, gpu, row))
                self.figures.attempts[attempt] += 1
                return
        self.figures.refusals += 1
        if attempt == ATTEMPTS:
            self.figures.given_up += 1
        else:
            self._at(self._now + RETRY_AFTER_S * self._random.uniform(1, 1.5), "again", attempt + 1)

    def _seat(self, number: int, seat: Seat) -> None:
        self._seats[number] = seat
        seat.node.room -= 1
        if seat.gpu.log is not None:
            seat.gpu.log.append((self._now, True, number))
        mean_of_log = math.log(MEAN_CALL_S) - SPREAD**2 / 2
        self._at(self._now + self._random.lognormvariate(mean_of_log, SPREAD), "leave", number)

    def _leave(self, number: int) -> None:
        seat = self._seats.pop(number, None)
        if seat is None:  # its node had failed
            return
        seat.gpu.pool.free(seat.row)
        seat.node.room += 1
        if seat.gpu.log is not None:
            seat.gpu.log.append((self._now, False, number))

    def _fail(self, node: Node) -> None:
        """Everybody on it is cut off, and calls again at once."""
        node.up = False
        cut_off = [number for number, seat in self._seats.items() if seat.node is node]
        self.figures.lost += len(cut_off)
        for number in cut_off:
            self._leave(number)
            self._at(self._now + self._random.uniform(0, 2), "again", 1)
        self._at(self._now + REPAIR_S, "repair", node)

    def _look(self) -> None:
        rows = sum(self._options.gpus * self._options.rows for node in self.nodes if node.up)
        self.figures.used.append((self._now, len(self._seats) / max(1, rows)))

    def _at(self, when: float, what: str, about: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, about))


# ---- tick by tick


class StepTimes:
    """Seconds of a step of so many rows: one of those recorded for the next larger number, or an estimate."""

    def __init__(self, milliseconds: Mapping[int, Sequence[float]], jitter: float, random: Random) -> None:
        self._sizes = sorted(milliseconds)
        self._milliseconds = milliseconds
        self._jitter = jitter
        self._random = random

    def draw(self, rows: int) -> float:
        if not rows:
            return 0.0
        size = self._sizes[min(bisect_left(self._sizes, rows), len(self._sizes) - 1)]
        return self._random.choice(self._milliseconds[size]) * self._random.uniform(1, 1 + self._jitter) / 1000


@dataclass(slots=True)
class Ticks:
    """What happened on the GPUs that were played out."""

    join_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    """From a row's tick until what it says is there: once for each row of each step"""
    played_s: float = 0.0
    skipped: int = 0
    refused: int = 0

    @property
    def busy(self) -> float:
        """Share of the time in which GPUs ran steps."""
        return sum(self.step_s) / max(self.played_s, 1e-9)


def play(
    log: Sequence[Entry], settings: EngineSettings, window: tuple[float, float], steps: StepTimes, to: Ticks
) -> None:
    """Play out one GPU's window with the engine's own scheduler. Whoever was there before joins as it begins."""
    begin, end = window
    there = {number for at, opened, number in log if at < begin and opened}
    there -= {number for at, opened, number in log if at < begin and not opened}
    coming = [(begin, True, number) for number in sorted(there)] + [entry for entry in log if begin <= entry[0] < end]
    messages = [(at, Open(str(number), Prompt()) if opened else number) for at, opened, number in coming]
    heap: list[tuple[float, int, object]] = [(at, order, what) for order, (at, what) in enumerate(messages)]
    heapq.heapify(heap)
    order = count(len(heap))
    scheduler = Scheduler(settings.rows or 1, settings, begin)
    scheduler.handle(1, Joined(), begin)
    leases: dict[str, Lease] = {}
    asked: dict[Lease, float] = {}
    opened_at: dict[str, float] = {}
    now = begin
    to.played_s += end - begin
    while now < end:
        sent = []
        while heap and heap[0][0] <= now:
            at, _, what = heapq.heappop(heap)
            match what:
                case Open(call):
                    opened_at[call] = at
                    sent += scheduler.handle(1, what, now)
                case Lease() as lease:
                    sent += scheduler.handle(1, Start(lease), now)
                case int(number) if str(number) in leases:
                    sent += scheduler.handle(1, Close(leases.pop(str(number))), now)
        match action := scheduler.next_action(now):
            case Begin():
                now += BEGIN_S
                sent += scheduler.begun(action, PROMPT_COLUMNS, now)
            case Prefill(_, columns):
                now += columns * COLUMN_S
                scheduler_left = _columns_left(scheduler, action, columns)
                sent += scheduler.prefilled(action, scheduler_left, now)
            case Step(tick_at, began_at, skipped, stepped):
                n = len(stepped)
                took = steps.draw(n)
                now += took
                to.skipped += skipped
                if n:
                    to.late_s.append(began_at - tick_at)
                    to.step_s.append(took)
                    to.answer_s += [now - tick_at] * n
                sent += scheduler.stepped(action, [0] * n, [True] * n, [True] * n, now)
            case Wait(until):
                now = min(until, heap[0][0]) if heap else until
        for _, event in sent:
            match event:
                case Leased(call, lease):
                    leases[call], asked[lease] = lease, opened_at[call]
                    heapq.heappush(heap, (opened_at[call] + MEDIA_UP_S, next(order), lease))
                case Live(lease, _, tick_at) if asked[lease] > begin + 5:
                    to.join_s.append(tick_at - asked[lease])
                case Refused():
                    to.refused += 1


def _columns_left(scheduler: Scheduler, action: Prefill, columns: int) -> int:
    row = scheduler._pool.require(action.lease)
    return max(0, row.columns_left - columns)


# ---- telling


def told(options: argparse.Namespace, fleet: Fleet, ticks: Ticks, recorded: bool) -> str:
    figures, calls = fleet.figures, max(1, fleet.figures.calls)
    used = np.array([share for _, share in figures.used])
    gpus = options.nodes * options.gpus
    source = "recorded" if recorded else "estimated, not measured"
    lines = [
        f"{gpus} GPUs of {options.rows} rows ({gpus * options.rows} rows), {options.callers} callers at the peak,"
        f" a day in {options.hours:g} h, {options.failures} nodes of {options.gpus} GPUs lost for {REPAIR_S:g} s each",
        f"calls: {figures.calls}; refused at the first try: {1 - figures.attempts[1] / calls:.3%};"
        f" given up after {ATTEMPTS} tries: {figures.given_up} ({figures.given_up / calls:.3%})",
        f"cut off by failures: {figures.lost} ({figures.lost / calls:.3%})",
        f"rows leased: mean {used.mean():.0%}, busiest 10 s {used.max():.1%}",
        f"steps ({source}): p50 {_ms(ticks.step_s, 50)}, p99 {_ms(ticks.step_s, 99)};"
        f" begun late p99 {_ms(ticks.late_s, 99)}, worst {_ms(ticks.late_s, 100)};"
        f" {ticks.skipped} of {len(ticks.step_s)} ticks skipped; {ticks.refused} refused by the engine",
        f"sub-ticks: {options.phases}; an answer is there {_ms(ticks.answer_s, 50)} after its tick (p50),"
        f" p99 {_ms(ticks.answer_s, 99)}; GPUs run steps {ticks.busy:.0%} of the time",
        f"join, from the offer until model time runs: p50 {_ms(ticks.join_s, 50)}, p99 {_ms(ticks.join_s, 99)},"
        f" worst {_ms(ticks.join_s, 100)} ({len(ticks.join_s)} calls on {SAMPLED_GPUS} GPUs)",
    ]
    return "\n".join(lines)


def _ms(seconds: Sequence[float], percentile: float) -> str:
    return f"{1000 * np.percentile(seconds, percentile):.0f} ms" if seconds else "-"


def simulate(options: argparse.Namespace) -> str:
    fleet = Fleet(options)
    fleet.run()
    recorded = options.steps is not None
    times = {int(n): ms for n, ms in json.loads(options.steps.read_text()).items()} if recorded else ESTIMATED_STEP_MS
    steps = StepTimes(times, 0.0 if recorded else JITTER, Random(options.seed))
    peak, half = options.hours * 1800.0, options.minutes * 30.0
    engine, ticks = EngineSettings(rows=options.rows, phases=options.phases), Ticks()
    for gpu in fleet.sampled:
        play(gpu.log or (), engine, (peak - half, peak + half), steps, ticks)
    return told(options, fleet, ticks, recorded)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=125)
    parser.add_argument("--gpus", type=int, default=8, help="on each node")
    parser.add_argument("--rows", type=int, default=64, help="on each GPU")
    parser.add_argument("--phases", type=int, default=1, help="sub-ticks in 80 ms")
    parser.add_argument("--callers", type=int, default=60_000, help="at the busiest moment")
    parser.add_argument("--hours", type=float, default=2.0, help="that the day is compressed into")
    parser.add_argument("--minutes", type=float, default=2.0, help="around the peak, played out tick by tick")
    parser.add_argument("--failures", type=int, default=6, help="nodes that fail in the day")
    parser.add_argument("--steps", type=Path, help="JSON of recorded step times: {rows: [milliseconds, ...]}")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    print(simulate(parser().parse_args()))
