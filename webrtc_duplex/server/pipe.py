"""What the front process and a media worker say to each other, and the pipe they say it through.

The pipe is a pair of connected unix sockets that nobody else can reach. The front puts questions (`Ask`), each of which
is answered once (`Reply`), and gives orders, which are not; the worker also tells unasked how its calls fare:

    front                                 worker
    Begin(...)                    ->
    Ask(1, Answer(request))       ->                         a call
                                  <-     Reply(1, Answered(sdp, Seen(...))) or Reply(1, error)
                                  <-     Report((Seen, ...)) four times a second: also a sign of life
                                  <-     Prompted(call, ...) when the caller has changed the prompt
    Listen(call, 7)               ->
                                  <-     Happened(7, event)
    Unlisten(7)                   ->
    Ask(2, HangUp(call, reason))  ->
                                  <-     Reply(2, Seen(...))
                                  <-     Over(Seen(...))     it has ended, whoever wanted it
"""

import asyncio
import pickle
import socket
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from prometheus_client.core import Metric

from webrtc_duplex.errors import DuplexError
from webrtc_duplex.messages import Prompt, Unpacker, pack
from webrtc_duplex.server.events import Event
from webrtc_duplex.server.realtime import Json
from webrtc_duplex.server.session import CallRequest, SessionState
from webrtc_duplex.settings import Settings

BEAT_S = 0.25
"""A worker reports so often, if only to show that it lives."""
BEATS = 4
"""Reports from one that tells of all calls to the next: as often as a call's statistics change."""

UNSENT_LIMIT = 8 << 20
"""Bytes that wait for a process which does not read; beyond that it is given up."""

READ_BYTES = 1 << 16


# ---- front to worker


@dataclass(frozen=True, slots=True)
class Begin:
    """What a worker is told first."""

    name: str
    settings: Settings
    engine_sockets: tuple[Path, ...]
    log_level: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Open this call."""

    request: CallRequest


@dataclass(frozen=True, slots=True)
class Resume:
    """Put a call on a new peer connection."""

    call: str
    offer: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """End a call; answered when it has ended."""

    call: str
    reason: str


@dataclass(frozen=True, slots=True)
class Count:
    """Tell all metrics."""


Question: TypeAlias = Answer | Resume | HangUp | Count


@dataclass(frozen=True, slots=True)
class Ask:
    """A question, and the number that its answer is to bear."""

    number: int
    question: Question


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody waits for the answer of this number any more."""

    number: int


@dataclass(frozen=True, slots=True)
class AddCandidate:
    """A candidate of the caller's."""

    call: str
    candidate: str | None
    mid: str | None


@dataclass(frozen=True, slots=True)
class Tell:
    """A message of the client's."""

    call: str
    text: str | bytes


@dataclass(frozen=True, slots=True)
class AnnounceEnd:
    """Let the caller know that the call will be ended."""

    call: str
    reason: str
    in_s: float


@dataclass(frozen=True, slots=True)
class Listen:
    """Send the call's events under this number."""

    call: str
    number: int


@dataclass(frozen=True, slots=True)
class Unlisten:
    """Send no more events of this number."""

    number: int


ToWorker: TypeAlias = Begin | Ask | Withdraw | AddCandidate | Tell | AnnounceEnd | Listen | Unlisten


# ---- worker to front


@dataclass(frozen=True, slots=True)
class Seen:
    """A call as its worker sees it."""

    call: str
    state: SessionState
    ended_because: str | None
    stats: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Answered:
    """A call has its answer, or our offer."""

    sdp: str
    seen: Seen


@dataclass(frozen=True, slots=True)
class Counted:
    """All metrics of the worker."""

    metrics: tuple[Metric, ...]


Outcome: TypeAlias = Answered | Seen | Counted | DuplexError


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the question of this number."""

    number: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Report:
    """Calls that have not ended: all, or those in another state than when last told of."""

    calls: tuple[Seen, ...]


@dataclass(frozen=True, slots=True)
class Prompted:
    """The call has another prompt now."""

    call: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Over:
    """This call has ended."""

    seen: Seen


@dataclass(frozen=True, slots=True)
class Happened:
    """An event for who listens under this number; None: there will be no more."""

    number: int
    event: Event | None


ToFront: TypeAlias = Reply | Report | Prompted | Over | Happened


# ---- the pipe


class Pipe:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unpacker = Unpacker(_load, UNSENT_LIMIT)
        self._received: deque[ToWorker | ToFront] = deque()  # no more than one read has brought

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """The pipe whose end this socket is; closing it closes the socket."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: ToWorker | ToFront) -> None:
        """Send without waiting; a no-op if the other end is gone, and its end if it does not read."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(pack(message))
        if transport.get_write_buffer_size() > UNSENT_LIMIT:
            transport.abort()

    async def receive(self) -> ToWorker | ToFront | None:
        """The next message; None once the other end is closed. Raises ValueError, UnpicklingError for what is none."""
        while not self._received:
            try:
                received = await self._reader.read(READ_BYTES)
            except ConnectionError:
                return None
            if not received:
                return None
            self._received.extend(self._unpacker.feed(received))
        return self._received.popleft()

    def close(self) -> None:
        self._writer.transport.abort()


def _load(body: bytes) -> ToWorker | ToFront:
    """Anything is unpickled, as both ends are ours, and nobody else can reach them."""
    message: ToWorker | ToFront = pickle.loads(body)
    return message
