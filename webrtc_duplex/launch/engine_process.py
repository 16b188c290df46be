"""The engine's process, from its start order to its end.

The order comes by its standard input, which is its lifeline afterwards: it ends when that closes, that is with its
parent.
"""

import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from webrtc_duplex import logs
from webrtc_duplex.engine.capacity import check_rows, most_rows
from webrtc_duplex.engine.loop import ModelRunner, serve_engine
from webrtc_duplex.errors import DuplexError
from webrtc_duplex.launch.process import keep_what_is_loaded, leave_ending_to_the_parent
from webrtc_duplex.settings import EngineSettings

logger = logging.getLogger(__name__)

EXIT_BAD_START = 2
"""Exit code, of engine and server, where starting again would fail again: a bad checkpoint, impossible rows."""

ENGINE_NICENESS = -10
"""An engine that waits for a core makes all its callers wait: it goes before what else runs, where that is allowed."""

ECHO_ROWS = 64
"""Callers of an echo where their number is to be found out: it costs nothing, but packets do."""

Loading = Callable[[], ModelRunner]
"""Reads the weights, which may take minutes. Raises CheckpointError."""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """What an engine process is told, and the environment it is told it in."""

    settings: EngineSettings
    directory: Path
    log_level: int
    log_format: str = "text"
    environment: Mapping[str, str] = field(default_factory=dict)


def engine_process(prepare: Callable[[EngineSettings], Loading]) -> int:
    """Be an engine until the lifeline is cut; returns the exit code.

    A byte on its standard output says that the order was found possible; the model is loaded after that.
    """
    order = pickle.load(sys.stdin.buffer)
    assert isinstance(order, StartOrder)
    leave_ending_to_the_parent()
    accepted = _take_output()
    logs.configure(order.log_level, order.log_format, process="engine")
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, ENGINE_NICENESS)
    try:
        load = prepare(order.settings)
        accepted()
        runner = load()
    except DuplexError as error:
        sys.stderr.write(f"webrtc-duplex: {error.message}\n")
        return EXIT_BAD_START
    logger.info("%s is ready for %d callers", runner.card.name, runner.rows)
    keep_what_is_loaded()
    try:
        serve_engine(order.directory, sys.stdin.fileno(), runner, time.monotonic, order.settings)
    except Exception:
        logger.exception("the engine dies")
        return 1
    return 0


def _take_output() -> Callable[[], None]:
    """Whatever is printed goes to standard error from now on; what says to the parent that the order is possible."""
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def accept() -> None:
        with os.fdopen(output, "wb") as file:
            file.write(b"!")

    return accept


def prepare_runner(settings: EngineSettings) -> Loading:
    """What loads the model that the settings name, for their rows or as many as it serves in time.

    Raises CheckpointError or RequestError with what can be known to be wrong before the weights are read; loading
    raises the rest. An echo is loaded without torch.
    """
    if settings.model == "echo":
        from webrtc_duplex.model.echo import EchoRunner

        return lambda: EchoRunner(settings.rows or ECHO_ROWS)
    from webrtc_duplex.model.memory import available_bytes
    from webrtc_duplex.model.runner import Placement, load_runner

    chosen = Placement.choose(settings.model, settings.device, settings.kv_dtype)
    plan, available = chosen.plan(), available_bytes(chosen.device)
    plan.require(settings.rows or 1, available)

    def load(rows: int) -> ModelRunner:
        return load_runner(settings.model, rows, settings.device, settings.kv_dtype)

    def load_rows() -> ModelRunner:
        rows = settings.rows or most_rows(load, plan.rows_in(available), settings.phases, time.monotonic)
        return check_rows(load(rows), settings.phases, time.monotonic)

    return load_rows
