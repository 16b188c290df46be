"""The story of a call, from offer to hang-up, and the register of all calls of this process."""

import enum
from dataclasses import dataclass, field

from webrtc_duplex.messages import Prompt


@dataclass(frozen=True, slots=True)
class CallRequest:
    """What a caller asks for, made sane: whatever way it came in by."""

    id: str
    """`rtc_<signed place>_<random>`, unique among the live calls."""
    offer: str
    """SDP that `sdp.safe_offer` has passed."""
    prompt: Prompt = field(default_factory=Prompt)


class SessionState(enum.Enum):
    """Where a call stands; `.value` is what the API says."""

    CONNECTING = "connecting"
    LIVE = "live"
    HELD = "held"
    ENDED = "ended"


class Session:
    """One call. Owned by `Calls`; everything it opened is closed when `run` returns."""

    id: str
    answer: str
    """The peer connection's own answer; `sdp.finish_answer` makes it fit the caller's offer."""
    prompt: Prompt
    """The prompt in force."""
    state: SessionState
    ended_because: str | None
    """A code of `webrtc.md` 5.2, once the call is over."""

    async def hang_up(self, reason: str = "hangup") -> None:
        """End the call and wait until all of it is closed; a no-op for one that is over."""
        raise NotImplementedError

    async def add_candidate(self, candidate: str | None, mid: str | None) -> None:
        """A candidate that the caller found after its offer (`candidate:...`); None: there will be no more.

        Raises RequestError for one that cannot be read.
        """
        raise NotImplementedError


class Calls:
    """Every call of this process. `async with calls` ends them all at its end."""

    async def answer(self, request: CallRequest) -> Session:
        """Lease a row, answer the offer, and let the call run.

        Raises CapacityError, RequestError, CheckpointError, EngineError; then nothing of the call is left.
        """
        raise NotImplementedError

    async def resume(self, call_id: str, offer: str) -> Session:
        """Put a call on a new peer connection: same row, model state and transcript; `Session.answer` is the new answer.

        Raises CallNotFoundError for a call that is over.
        """
        raise NotImplementedError

    def find(self, call_id: str) -> Session:
        """The call of this id, also one that has ended within the last minute (`SessionState.ENDED`).

        Raises CallNotFoundError.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        """Calls that have not ended."""
        raise NotImplementedError

    async def close(self) -> None:
        """Hang up every call, each with its reason, and wait for them."""
        raise NotImplementedError
