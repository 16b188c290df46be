"""Names of calls: `rtc_<signed place>_<random>`.

The place says which server process holds the call, so that a later request finds its way there; it is signed, so that
nobody can send a request to a place that has never named a call.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable

from webrtc_duplex.errors import CallNotFoundError

_TAG_CHARACTERS = 10
_RANDOM_BYTES = 16
CALL_ID = re.compile(r"rtc_([a-z0-9]{1,32})([a-z2-7]{10})_([a-z2-7]{26})", re.ASCII)


class Places:
    """Makes and reads the names of calls. All processes that serve together share `key`; `place` is this one's own."""

    def __init__(self, place: str, key: bytes, random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> None:
        if not re.fullmatch(r"[a-z0-9]{1,32}", place, re.ASCII):
            raise ValueError(f"a place is 1 to 32 lower-case letters and digits, not {place!r}")
        self.place = place
        self._key = key
        self._random_bytes = random_bytes

    def new_call_id(self) -> str:
        return f"rtc_{self.place}{self._tag(self.place)}_{_letters(self._random_bytes(_RANDOM_BYTES))}"

    def place_of(self, call_id: str) -> str:
        """The place that named this call. Raises CallNotFoundError for a name that no place of ours has made."""
        match = CALL_ID.fullmatch(call_id)
        if match is None or not hmac.compare_digest(match[2], self._tag(match[1])):
            raise CallNotFoundError(f"there is no call {call_id[:80]!r}")
        return match[1]

    def require_here(self, call_id: str) -> None:
        """Raises CallNotFoundError unless this process named the call; `call_lost` (410) if one did that is gone."""
        if self.place_of(call_id) != self.place:
            raise CallNotFoundError("the process that held this call is gone", status=410, code="call_lost")

    def _tag(self, place: str) -> str:
        return _letters(hmac.digest(self._key, b"place:" + place.encode(), hashlib.sha256))[:_TAG_CHARACTERS]


def _letters(data: bytes) -> str:
    """Bytes as lower-case letters and digits, five bits each."""
    return base64.b32encode(data).decode().rstrip("=").lower()
