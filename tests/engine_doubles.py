"""Doubles at the engine's two seams - the model, and the inbox with its clock - and an engine in a thread."""

import heapq
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import FRAME_SAMPLES, Pcm
from webrtc_duplex.engine.inbox import Received
from webrtc_duplex.engine.loop import SOCKET_NAME, serve_engine
from webrtc_duplex.engine.scheduler import Joined, Left
from webrtc_duplex.errors import CheckpointError, RequestError
from webrtc_duplex.messages import Event, ModelCard, Prompt, Request
from webrtc_duplex.settings import EngineSettings

CARD = ModelCard("double", ("ann", "bob"), "ann", takes_text=True, max_text_chars=100, pieces=("", " yes", " no"))


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class EchoDouble:
    """A model that says what it hears.

    The text token of a step is how many frames the row has heard since it was begun, so that a trace of a predecessor,
    a frame heard twice or a tick left out shows in it. The voice `nobody` is unknown; a prompt has a column a letter.
    """

    def __init__(self, rows: int, clock: FakeClock | None = None, step_s: float = 0.0, column_s: float = 0.0) -> None:
        self.rows = rows
        self.card = CARD
        self.step_s = step_s
        self.column_s = column_s
        self.faulty: set[int] = set()
        self.full: set[int] = set()
        self.heard = np.zeros(rows, np.int64)
        self.began: list[tuple[int, Prompt]] = []
        self.pieces: list[tuple[int, int]] = []
        self.batches: list[list[int]] = []
        self.resets: list[int] = []
        self._left = [0] * rows
        self._clock = clock

    def load_prompt(self, prompt: Prompt) -> int:
        if prompt.voice == "nobody":
            raise RequestError("no voice is called nobody; there are ann and bob", code="unknown_voice", param="voice")
        return len(prompt.text or "")

    def begin(self, row: int, prompt: Prompt) -> int:
        self.reset(row)
        self.began.append((row, prompt))
        self._left[row] = len(prompt.text or "")
        return self._left[row]

    def prefill(self, row: int, columns: int) -> int:
        self._pass(columns * self.column_s)
        self.pieces.append((row, columns))
        self._left[row] = max(0, self._left[row] - columns)
        return self._left[row]

    def reset(self, row: int) -> None:
        self.resets.append(row)
        self.full.discard(row)
        self.heard[row] = 0

    def fill(self, row: int) -> None:
        self.full.add(row)

    def step(self, rows: NDArray[np.int64], pcm: Pcm) -> tuple[Pcm, NDArray[np.int64], NDArray[np.bool_]]:
        self._pass(self.step_s)
        self.batches.append(rows.tolist())
        self.heard[rows] += 1
        sound = np.array([row not in self.faulty for row in rows.tolist()])
        return pcm.copy(), self.heard[rows], sound

    def _pass(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.advance(seconds)


class ScriptedInbox:
    """An inbox that plays a script on a fake clock; who waits in it lets time pass.

    `at` adds a message, or something to be done, at a time; `answer` is called with every event sent.
    """

    def __init__(self, clock: FakeClock, ends_at: float) -> None:
        self.sent: list[tuple[float, int, Event]] = []
        self.answer: Callable[[int, Event], None] = lambda connection, event: None
        self._clock = clock
        self._ends_at = ends_at
        self._script: list[tuple[float, int, int, Request | Joined | Left | Callable[[], None]]] = []
        self._order = count()

    @property
    def closed(self) -> bool:
        return self._clock.now >= self._ends_at

    def at(self, when: float, connection: int, what: Request | Joined | Left | Callable[[], None]) -> None:
        heapq.heappush(self._script, (when, next(self._order), connection, what))

    def poll(self, timeout_s: float) -> list[Received]:
        until = self._clock.now + timeout_s
        if self._script and self._script[0][0] < until:
            until = max(self._clock.now, self._script[0][0])
        self._clock.now = max(until, self._clock.now)
        received: list[Received] = []
        while self._script and self._script[0][0] <= self._clock.now:
            _, _, connection, what = heapq.heappop(self._script)
            if callable(what):
                what()
            else:
                received.append((connection, what))
        return received

    def send(self, connection: int, event: Event) -> None:
        self.sent.append((self._clock.now, connection, event))
        self.answer(connection, event)


@contextmanager
def engine_thread(directory: Path, runner: EchoDouble, settings: EngineSettings | None = None) -> Iterator[Path]:
    """An engine in a thread, with real sockets, ring and time, until the block is left; gives its socket's path."""
    lifeline, parent = os.pipe()
    arguments = (directory, lifeline, runner, time.monotonic, settings or EngineSettings())
    thread = threading.Thread(target=serve_engine, args=arguments, name="engine")
    thread.start()
    try:
        yield directory / SOCKET_NAME
    finally:
        os.close(parent)
        thread.join()
        os.close(lifeline)


def refuse(message: str) -> EchoDouble:
    """A model that cannot be loaded."""
    raise CheckpointError(message)


def tone(frequency_hz: float = 440.0) -> Pcm:
    """A frame [1920] of a tone."""
    return (8000 * np.sin(2 * np.pi * frequency_hz * np.arange(FRAME_SAMPLES) / 24_000)).astype(np.int16)
