"""How many callers a model can serve in time on this machine, measured at start-up."""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from webrtc_duplex.audio import FRAME_S, FRAME_SAMPLES
from webrtc_duplex.engine.loop import Clock, ModelRunner
from webrtc_duplex.errors import CheckpointError

logger = logging.getLogger(__name__)

STAGES = ((1, 2, 3, 4, 6, 8), (12, 16, 24, 32), (48, 64, 96, 128))
"""Numbers of rows that are tried; the model is loaded once a stage, as rows that nobody needs cost time too."""

BUSY_SHARE = 0.7
"""Share of a frame that the steps of all phases together may take, at p99; the rest is for prompts and for hiccups."""

HANGS_S = 0.5
"""An engine that is not heard of for a second is taken for hung, so its steps must be well below that."""

STEPS = 50
CHECK_STEPS = 8
"""Steps that are measured, and after how many it can be seen that it is no use."""


def most_rows(load: Callable[[int], ModelRunner], most: int, phases: int, clock: Clock) -> int:
    """How many rows of a model are stepped in time, of at most those that fit into memory (`most`).

    Raises CheckpointError if it is too slow for a single caller.
    """
    rows = 0
    for stage in STAGES:
        sizes = [size for size in stage if size <= most]
        if not sizes:
            break
        punctual = punctual_rows(load(sizes[-1]), sizes, phases, clock)
        rows = max(rows, punctual)
        if punctual < sizes[-1]:
            break
    if not rows:
        raise CheckpointError("the model is too slow for this machine: it cannot step even a single caller in time")
    logger.info("%d callers can be served in time", rows)
    return rows


def check_rows(runner: ModelRunner, phases: int, clock: Clock) -> ModelRunner:
    """Say how long the steps of all rows take (the median: who asked for these rows may know better than a hiccup).

    The rows are fresh afterwards. Raises CheckpointError if the engine would seem to hang.
    """
    busy_s = phases * float(np.median(step_times(runner, -(-runner.rows // phases), CHECK_STEPS, clock)))
    _refresh(runner)
    if busy_s > HANGS_S:
        raise CheckpointError(
            f"{runner.card.name} is too slow for {runner.rows} rows on this machine: the steps of a frame of"
            f" {FRAME_S * 1e3:g} ms take {busy_s * 1e3:.0f} ms"
        )
    level = logging.INFO if busy_s <= BUSY_SHARE * FRAME_S else logging.WARNING
    logger.log(level, "%d callers: steps take %.1f ms of %g", runner.rows, busy_s * 1e3, FRAME_S * 1e3)
    return runner


def punctual_rows(runner: ModelRunner, sizes: Sequence[int], phases: int, clock: Clock) -> int:
    """The largest of these sizes (ascending) whose steps leave enough of a frame; 0 if none does."""
    rows = 0
    for size in sizes:
        busy_s = phases * _step_p99(runner, -(-size // phases), BUSY_SHARE * FRAME_S / phases, clock)
        logger.info("%d callers: steps take %.1f ms of %g at p99", size, busy_s * 1e3, FRAME_S * 1e3)
        if busy_s > BUSY_SHARE * FRAME_S:
            break
        rows = size
    return rows


def _step_p99(runner: ModelRunner, rows: int, limit_s: float, clock: Clock) -> float:
    """Seconds of a step, at p99: the better of two tries, as a busy moment of the machine is not the model's fault.

    Measured only roughly if it is clearly above the limit.
    """
    roughly = step_times(runner, rows, CHECK_STEPS, clock)
    if min(roughly) > limit_s:
        return _p99(roughly)
    p99 = _p99(step_times(runner, rows, STEPS, clock))
    return p99 if p99 <= limit_s else min(p99, _p99(step_times(runner, rows, STEPS, clock)))


def _p99(times: list[float]) -> float:
    return float(np.percentile(times, 99))


def step_times(runner: ModelRunner, rows: int, steps: int, clock: Clock) -> list[float]:
    """Seconds of each of so many steps of the first rows, as old as rows that cost the most, which hear noise."""
    listed = np.arange(rows)
    for row in range(rows):
        runner.fill(row)
    noise = np.random.default_rng(seed=1).normal(0, 3000, (rows, FRAME_SAMPLES)).astype(np.int16)
    times = [clock()]
    for _ in range(steps):
        runner.step(listed, noise)
        times.append(clock())
    return np.diff(times).tolist()


def _refresh(runner: ModelRunner) -> None:
    for row in range(runner.rows):
        runner.reset(row)
