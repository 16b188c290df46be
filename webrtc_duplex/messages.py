"""The values and messages that cross between a server process and the engine; all but the sound itself.

A server process and the engine hold one unix stream socket. Requests go one way, events the other; each is a frozen
dataclass, and both sides `match` on them. The life of a call in messages:

    server                         engine
    Open(call, prompt)      ->                         a row is leased before the SDP is answered
                            <-     Leased(call, lease) or Refused(call, ...)
    Update(lease, prompt)   ->                         only before the first step: prefill again
                            <-     Ready(lease)        the prompt is in the row
    Start(lease)            ->                         media is up
                            <-     Live(lease, position, tick_at)
                            <-     Stepped(outputs)    every tick, one message to each server process
    Hold(lease)             ->                         media lost: model time stops
    Start(lease)            ->                         resumed: Live again, positions go on
    Close(lease)            ->                         no answer; anything later of this lease is dropped
                            <-     Ended(lease, ...)   the engine ended it: a fault, a deadline, a refused prompt
"""

from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use a row. An old epoch is a stale lease: the row has been leased again since."""

    row: int
    epoch: int


# ---- server to engine


@dataclass(frozen=True, slots=True)
class Open:
    """Lease a row for this call and prefill its prompt. `call` is the call's id, unique among the live ones."""

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
    """The row is the call's; its prompt is being prefilled."""

    call: str
    lease: Lease


@dataclass(frozen=True, slots=True)
class Refused:
    """An open or an update was refused; nothing was changed. `error` names the class of `errors` to raise."""

    call: str
    error: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


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


@dataclass(frozen=True, slots=True)
class Output:
    """One row's share of a step; its sound lies in the ring's `said` slots under (epoch, position)."""

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
    admitting: bool
    """False while sustained lateness has closed admission."""
    outputs: tuple[Output, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine ended this lease, and the row is free; `reason` is a code of `webrtc.md` 5.2, for programs."""

    lease: Lease
    reason: str
    message: str


Event = Hello | Leased | Refused | Ready | Live | Stepped | Ended
