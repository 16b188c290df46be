"""How many callers a model can serve in time on this machine, measured at start-up."""

import logging
from collections.abc import Callable

import numpy as np

from webrtc_duplex.audio import FRAME_S, FRAME_SAMPLES
from webrtc_duplex.engine.loop import Clock, ModelRunner
from webrtc_duplex.errors import CheckpointError

logger = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of rows that are tried."""

BUSY_SHARE = 0.7
"""Share of a frame that the steps of all phases together may take, at p99; the rest is for prompts and for hiccups."""

HANGS_S = 0.5
"""An engine that is not heard of for a second is taken for hung, so its steps must be well below that."""

STEPS = 50
CHECK_STEPS = 8
"""Steps that are measured, and after how many it can be seen that it is no use."""


def load_for_most_rows(load: Callable[[int], ModelRunner], most_rows: int, phases: int, clock: Clock) -> ModelRunner:
    """The model, loaded for as many rows as it steps in time, at most those that fit into memory (`most_rows`).

    Raises CheckpointError if it is too slow for a single caller.
    """
    sizes = [size for size in SIZES if size <= most_rows]
    runner = load(sizes[-1])
    rows = punctual_rows(runner, sizes, phases, clock)
    if rows == runner.rows:
        return runner
    del runner  # before the next one is loaded: both might not fit
    return load(rows)


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


def punctual_rows(runner: ModelRunner, sizes: list[int], phases: int, clock: Clock) -> int:
    """The largest of these sizes (ascending) whose steps leave enough of a frame; the rows are fresh afterwards."""
    rows = 0
    for size in sizes:
        busy_s = phases * _step_p99(runner, -(-size // phases), BUSY_SHARE * FRAME_S / phases, clock)
        logger.info("%d callers: steps take %.1f ms of %g at p99", size, busy_s * 1e3, FRAME_S * 1e3)
        if busy_s > BUSY_SHARE * FRAME_S:
            break
        rows = size
    _refresh(runner)
    if not rows:
        raise CheckpointError(
            f"{runner.card.name} is too slow for this machine: with a single caller a step takes {busy_s * 1e3:.0f} ms,"
            f" and {BUSY_SHARE * FRAME_S * 1e3:.0f} ms are what it may take of a frame of {FRAME_S * 1e3:g}"
        )
    return rows


def _step_p99(runner: ModelRunner, rows: int, limit_s: float, clock: Clock) -> float:
    """Seconds of a step, at p99; measured only roughly if it is clearly above the limit."""
    took = step_times(runner, rows, CHECK_STEPS, clock)
    if min(took) <= limit_s:
        took += step_times(runner, rows, STEPS - CHECK_STEPS, clock)
    return float(np.percentile(took, 99))


def step_times(runner: ModelRunner, rows: int, steps: int, clock: Clock) -> list[float]:
    """Seconds of each of so many steps of the first rows, which hear noise."""
    listed = np.arange(rows)
    noise = np.random.default_rng(seed=1).normal(0, 3000, (rows, FRAME_SAMPLES)).astype(np.int16)
    times = [clock()]
    for _ in range(steps):
        runner.step(listed, noise)
        times.append(clock())
    return np.diff(times).tolist()


def _refresh(runner: ModelRunner) -> None:
    for row in range(runner.rows):
        runner.reset(row)
