"""The engine: ask the scheduler, run the model, send the outputs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import FRAME_SAMPLES, Pcm, SoundRing
from webrtc_duplex.engine.inbox import Received, SocketInbox
from webrtc_duplex.engine.scheduler import Begin, Joined, Prefill, Scheduler, Sent, Step, Wait
from webrtc_duplex.errors import DuplexError
from webrtc_duplex.messages import Close, Event, Hello, ModelCard, Prompt
from webrtc_duplex.settings import EngineSettings

SOCKET_NAME = "engine.sock"
RING_NAME = "sound.ring"

Clock = Callable[[], float]
"""Seconds of `time.monotonic`, or of a test."""


class ModelRunner(Protocol):
    """The model as the engine sees it: rows of state, numpy in, numpy out. Exceptions but the named ones are fatal."""

    rows: int
    card: ModelCard

    def load_prompt(self, prompt: Prompt) -> int:
        """Make ready what the prompt needs; returns the columns of its prefill.

        Raises RequestError or CheckpointError, with a sentence for the caller, and then has changed nothing.
        """

    def begin(self, row: int, prompt: Prompt) -> int:
        """Make the row a fresh one with the call's seed and sampling; returns the columns left to prefill.

        0 if there are none: no prompt, or joined from the prompt cache. Short, as live rows wait meanwhile.
        """

    def prefill(self, row: int, columns: int) -> int:
        """Run at most so many more columns of the row's prompt; returns the columns left."""

    def reset(self, row: int) -> None:
        """Make the row equal a fresh one."""

    def fill(self, row: int) -> None:
        """Make the row cost as much as one whose windows are full; for who measures, and resets it afterwards."""

    def step(self, rows: NDArray[np.int64], pcm: Pcm) -> tuple[Pcm, NDArray[np.int64], NDArray[np.bool_]]:
        """One frame for the listed rows [n]: pcm [n, 1920] heard -> pcm [n, 1920] said, text token [n], sound [n].

        `sound` is False where a row's numbers were not finite; all other rows are untouched by that.
        """


class Inbox(Protocol):
    """Where requests come from and events go to."""

    @property
    def closed(self) -> bool:
        """Whether the engine is to end."""

    def poll(self, timeout_s: float) -> Sequence[Received]:
        """Wait at most so long for something; returns all that has come."""

    def send(self, connection: int, event: Event) -> None:
        """Send without blocking."""


def serve_engine(
    directory: Path, lifeline: int, runner: ModelRunner, clock: Clock, settings: EngineSettings | None = None
) -> None:
    """Run an engine at a socket and a ring in this private directory until the lifeline's other end is closed."""
    ring_path = directory / RING_NAME
    ring_path.unlink(missing_ok=True)
    ring = SoundRing.create(ring_path, runner.rows)
    try:
        with SocketInbox(directory / SOCKET_NAME, lifeline) as inbox:
            run_engine(inbox, ring, runner, clock, settings)
    finally:
        ring_path.unlink(missing_ok=True)


def run_engine(
    inbox: Inbox, ring: SoundRing, runner: ModelRunner, clock: Clock, settings: EngineSettings | None = None
) -> None:
    """Serve until the inbox is closed. Waits only for its inbox, its tick or the device.

    The same code runs in a process of its own and in a thread of a test. A failure of the runner is the engine's end;
    only what is of one row (a refused prompt, numbers that are not finite) ends just that call.
    """
    scheduler = Scheduler(runner.rows, settings or EngineSettings(), clock())
    hands = _Hands(ring, runner, scheduler, clock)
    patience_s = 0.0
    while True:
        for connection, message in _frees_first(inbox.poll(patience_s)):
            if isinstance(message, Joined):
                inbox.send(connection, Hello(runner.card, runner.rows, ring.name))
            _send_all(inbox, scheduler.handle(connection, message, clock()))
        if inbox.closed:
            return
        action = scheduler.next_action(clock())
        patience_s = max(0.0, action.until - clock()) if isinstance(action, Wait) else 0.0
        _send_all(inbox, hands.do(action))


def _frees_first(received: Sequence[Received]) -> list[Received]:
    """Of what came together, a row that is given back serves who asks for one, whichever stood first."""
    return sorted(received, key=lambda item: not isinstance(item[1], Close))


def _send_all(inbox: Inbox, events: list[Sent]) -> None:
    for connection, event in events:
        inbox.send(connection, event)


class _Hands:
    """Does what the scheduler says, with the ring and the model, and tells it what came of it."""

    def __init__(self, ring: SoundRing, runner: ModelRunner, scheduler: Scheduler, clock: Clock) -> None:
        self._ring = ring
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._heard = np.zeros((runner.rows, FRAME_SAMPLES), np.int16)

    def do(self, action: Begin | Prefill | Step | Wait) -> list[Sent]:
        """Do it; returns the events to send."""
        match action:
            case Begin():
                return self._scheduler.begun(action, self._begin(action), self._clock())
            case Prefill():
                columns_left = self._runner.prefill(action.lease.row, action.columns)
                return self._scheduler.prefilled(action, columns_left, self._clock())
            case Step():
                return self._step(action)
            case Wait():
                return []
            case _:
                assert_never(action)

    def _begin(self, action: Begin) -> int | DuplexError:
        """Columns left to prefill, or why the model does not take the prompt."""
        row = action.lease.row
        try:
            self._runner.load_prompt(action.prompt)
            self._ring.heard.empty(row)
            self._ring.said.empty(row)
            return self._runner.begin(row, action.prompt)
        except DuplexError as error:
            return error

    def _step(self, action: Step) -> list[Sent]:
        """Hear, step and say one frame of the rows that are due."""
        if not action.leases:
            return self._scheduler.stepped(action, (), (), (), self._clock())
        rows = np.array([lease.row for lease in action.leases])
        epochs = np.array([lease.epoch for lease in action.leases])
        positions = np.array(action.positions)
        pcm = self._heard[: len(rows)]
        heard = self._ring.heard.read_many(rows, epochs, positions, into=pcm)
        said, texts, sound = self._runner.step(rows, pcm)
        self._ring.said.write_many(rows, epochs, positions, said)
        for row in rows[~sound]:
            self._runner.reset(int(row))
        return self._scheduler.stepped(action, texts.tolist(), sound.tolist(), heard.tolist(), self._clock())
