"""The values and messages that cross between a server process and the engine; all but the sound itself.

A server process and the engine hold one unix stream socket. Requests go one way, events the other; each is a frozen
dataclass, and both sides `match` on them. The life of a call in messages:

    server                         engine
    Open(call, prompt)      ->                         a row is leased before the SDP is answered
                            <-     Leased(call, lease) or Refused(call, ...)
    Update(lease, prompt)   ->                         only before the first step: prefill again
                            <-     Leased(call, lease) or Refused(call, ...)
                            <-     Ready(lease)        the prompt is in the row
    Start(lease)            ->                         media is up
                            <-     Live(lease, position, tick_at)
                            <-     Stepped(outputs)    every tick, one message to each server process
    Hold(lease)             ->                         media lost: model time stops
    Start(lease)            ->                         resumed: Live again, positions go on
    Close(lease)            ->                         no answer; anything later of this lease is dropped
                            <-     Ended(lease, ...)   the engine ended it: a fault, a deadline, a newer open

Hello comes first on every connection, Stats about once a second.
"""

import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar, cast

from webrtc_duplex.errors import (
    AuthError,
    CallNotFoundError,
    CapacityError,
    CheckpointError,
    DuplexError,
    EngineError,
    RequestError,
    StaleEpochError,
)

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the caller wishes of the agent. In the HTTP API `text` is called `instructions`.

    None means the model's own default. `seed` keys all sampling noise of the call: the same seed, prompt and sound give
    the same call. A temperature of 0 is greedy.
    """

    voice: str | None = None
    text: str | None = None
    seed: int = 0
    text_temperature: float | None = None
    text_top_k: int | None = None
    audio_temperature: float | None = None
    audio_top_k: int | None = None

    def __post_init__(self) -> None:
        """Raises RequestError for text that no tokenizer takes: JSON can smuggle in half a surrogate pair."""
        if self.text is not None and not _is_unicode(self.text):
            sentence = "instructions must be Unicode text; here is half a surrogate pair"
            raise RequestError(sentence, code="invalid_value", param="session.instructions")


def _is_unicode(text: str) -> bool:
    """False for text that cannot be written down as UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a server has to know of the model to answer callers without asking the engine."""

    name: str
    voices: tuple[str, ...]
    """Names of the voices that a prompt may ask for; empty if the model has one voice and no choice."""
    default_voice: str | None
    takes_text: bool
    """Whether the model obeys a text prompt."""
    max_text_chars: int
    pieces: tuple[str, ...]
    """Text of each text token, with a leading space where a word begins; '' for tokens that are not shown."""
    delay_s: float = 0.0
    """How much later than its step what the model has decided is heard whole: its acoustic codes stand so late."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use a row. An old epoch is a stale lease: the row has been leased again since."""

    row: int
    epoch: int


# ---- server to engine


@dataclass(frozen=True, slots=True)
class Open:
    """Lease a row for this call and prefill its prompt.

    `call` is the call's id, unique among the live ones of a connection: a newer open of it ends the older lease.
    """

    call: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Update:
    """Change the prompt; refused once the row has been stepped."""

    lease: Lease
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Start:
    """Media is up (or back): let model time run from the next tick, once the prompt is in."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Hold:
    """Media is lost: stop model time, keep the row for the grace period."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Close:
    """Free the row. A late or repeated close is a no-op."""

    lease: Lease


Request = Open | Update | Start | Hold | Close


# ---- engine to server


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a connection: the model, its rows, and the file of the sound ring."""

    card: ModelCard
    rows: int
    ring: str


@dataclass(frozen=True, slots=True)
class Leased:
    """The row is the call's; its prompt is good and being prefilled. Answers Open, and Update with the same lease."""

    call: str
    lease: Lease


@dataclass(frozen=True, slots=True)
class Refused:
    """An open or an update was refused; nothing was changed. `error` names the class of `errors` to raise."""

    call: str
    error: str
    code: str
    message: str
    status: int
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def because(cls, call: str, error: DuplexError) -> Self:
        """What `error` says, as a message."""
        name, status = type(error).__name__, error.status
        return cls(call, name, error.code, error.message, status, error.param, error.retry_after_s)

    def exception(self) -> DuplexError:
        """The error again, to raise on the other side."""
        return _ERRORS[self.error](
            self.message, code=self.code, status=self.status, param=self.param, retry_after_s=self.retry_after_s
        )


_ERRORS = {
    error.__name__: error
    for error in (
        AuthError,
        CallNotFoundError,
        CapacityError,
        CheckpointError,
        DuplexError,
        EngineError,
        RequestError,
        StaleEpochError,
    )
}


@dataclass(frozen=True, slots=True)
class Ready:
    """The prompt is in the row; `prefill_s` is how long that took since the lease (or the update)."""

    lease: Lease
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Live:
    """Model time runs: the frame of `position` must be in the ring by `tick_at`, the next one `FRAME_S` later."""

    lease: Lease
    position: int
    tick_at: float


class Output(NamedTuple):
    """One row's share of a step; its sound lies in the ring's `said` slots under (epoch, position).

    A tuple, as there is one for every row at every tick, and a tuple is pickled in a fifth of the time.
    """

    row: int
    epoch: int
    position: int
    text: int
    """Text token; `ModelCard.pieces` spells it."""
    heard: bool
    """Whether the caller's frame was in the ring; else silence stood in."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A tick is done. Sent to every server process at every tick, rows or none: it is also the engine's heartbeat."""

    tick_at: float
    step_s: float
    late_s: float
    """How long after `tick_at` the step began."""
    skipped: int
    """Ticks that were skipped before this one, because the step before had not ended."""
    free_rows: int
    closed_because: str | None = None
    """Why no new call is admitted though rows may be free: sustained lateness, with its numbers."""
    outputs: tuple[Output, ...] = ()

    @property
    def admitting(self) -> bool:
        """Whether admission is open."""
        return self.closed_because is None


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine ended this lease, and the row is free.

    `reason` is for programs: `connect_timeout`, `media_timeout`, `superseded`, `server_error`; `message` is for people.
    """

    lease: Lease
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts since the engine's start: `counts[i]` values were at most `bounds[i]`, the last one are all above."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    """Sum of all values."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What the engine has counted since its start, over all its callers; sent about once a second."""

    step_s: Histogram
    late_s: Histogram
    batch: Histogram
    """Rows a step."""
    prefill_s: Histogram
    """From the lease (or the update) until the prompt was in."""
    skipped_ticks: int
    missing_frames: int
    """Ticks of a row at which its caller's frame was not in the ring."""
    leases: int
    refused: int
    """Opens refused because no row was free, or admission closed."""
    faults: int
    """Leases ended because their numbers were not finite."""
    stale: int
    """Requests and outputs of leases that were over: dropped."""


Event = Hello | Leased | Refused | Ready | Live | Stepped | Ended | Stats


# ---- on the socket: a length of four bytes, little-endian, then the pickled message

MESSAGE_LIMIT = 1 << 20
"""Bytes of the longest message; a connection that announces more is broken."""

_LENGTH = struct.Struct("<I")


def pack(message: object) -> bytes:
    """A message as it goes on the socket."""
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


class Unpacker(Generic[M]):
    """Bytes of a socket in, messages out. `load` makes a message of its pickle, and raises ValueError if it is none."""

    def __init__(self, load: Callable[[bytes], M], limit: int = MESSAGE_LIMIT) -> None:
        self._load = load
        self._limit = limit
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[M]:
        """Add what was received; returns the messages now whole. Raises ValueError when they cannot be any."""
        self._bytes += received
        messages: list[M] = []
        start = 0
        while len(self._bytes) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if length > self._limit:
                raise ValueError(f"a message has at most {self._limit} bytes, not {length}")
            end = start + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(self._load(bytes(self._bytes[start + _LENGTH.size : end])))
            start = end
        del self._bytes[:start]
        return messages


def load(body: bytes) -> Request | Event:
    """A message of this module from its pickle. Raises ValueError for anything else."""
    try:
        return cast(Request | Event, _OnlyMessages(io.BytesIO(body)).load())
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"not a message: {error}") from error


class _OnlyMessages(pickle.Unpickler):
    """Makes nothing but the classes of this module, though both ends of the socket are ours."""

    def find_class(self, module_name: str, global_name: str) -> object:
        if module_name != __name__ or global_name.startswith("_"):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no message")
        return super().find_class(module_name, global_name)
