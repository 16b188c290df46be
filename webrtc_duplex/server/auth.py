"""Who asks, and what they may: keys, secrets, owners, origins.

- An **API key** may open calls and issue ephemeral secrets. Only its SHA-256 is kept.
- An **ephemeral secret** (`ek_...`) opens calls until it expires, with the session it is bound to.
- A **call secret** (`cs_...`) comes with each answer: who holds it owns the call, key or no key.
- The **operator key** reads metrics and the list of calls.

Where no keys are set everybody may call; the settings allow that on loopback only, unless told otherwise.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from webrtc_duplex.errors import AuthError, RequestError
from webrtc_duplex.server.limits import Rate
from webrtc_duplex.server.realtime import Json
from webrtc_duplex.settings import AccessSettings, is_loopback

SECRETS = 10_000
"""Ephemeral secrets kept; then the oldest goes."""
NOBODY = "nobody"
"""Owner of what was opened where no key is asked for."""

MAX_TOKEN = 512
_TOKEN = re.compile(rf"[!-~]{{1,{MAX_TOKEN}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks for a call."""

    owner: str
    """The key behind it, by a name that is no secret; `nobody` where none is asked for."""
    address: str
    token: str | None = None
    """What was shown."""
    bound: Mapping[str, Json] = field(default_factory=dict)
    """The session that an ephemeral secret is bound to."""

    @property
    def is_local(self) -> bool:
        return is_loopback(self.address)


# ---- keys and secrets


class Keys:
    """Keys, known by their SHA-256."""

    def __init__(self, digests: Iterable[bytes]) -> None:
        self._digests = tuple(digests)

    @classmethod
    def read(cls, settings: AccessSettings) -> "Keys":
        """Those of the settings and of their file. Raises RequestError for a file that holds none, or anything else."""
        plain = [digest(key) for key in settings.api_keys]
        return cls([*plain, *(_read_digests(settings.api_key_file) if settings.api_key_file else [])])

    def owner_of(self, key: str) -> str | None:
        """The name of this key's owner; None for a key that is none. All are compared, each in constant time."""
        shown = digest(key)
        owner = None
        for known in self._digests:
            if hmac.compare_digest(shown, known):
                owner = f"key_{known.hex()[:12]}"
        return owner


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _read_digests(path: Path) -> list[bytes]:
    """A line holds a SHA-256 in hex, then whatever helps to remember whose it is; `#` begins a comment."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise RequestError(f"the key file {path} cannot be read: {error.strerror}", param="api_key_file") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"the key file {path} is no text", param="api_key_file") from error
    words = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if bad := [word for word in words if not re.fullmatch(r"[0-9a-f]{64}", word)]:
        raise RequestError(
            f"the key file {path} holds {len(bad)} lines that begin with no SHA-256", param="api_key_file"
        )
    if not words:
        raise RequestError(f"the key file {path} holds no key, so nobody could call", param="api_key_file")
    return [bytes.fromhex(word) for word in words]


def new_key() -> str:
    return f"wd_{secrets.token_urlsafe(32)}"


@dataclass(frozen=True, slots=True)
class EphemeralSecret:
    """What an `ek_` secret is good for."""

    owner: str
    session: Mapping[str, Json]
    expires_at: float
    """By the wall clock, as its holder is told."""


class EphemeralSecrets:
    """The ephemeral secrets of this process, known by their SHA-256."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._secrets: OrderedDict[bytes, EphemeralSecret] = OrderedDict()

    def issue(self, owner: str, session: Mapping[str, Json], ttl_s: float) -> tuple[str, EphemeralSecret]:
        """A fresh one and what it is good for."""
        value = f"ek_{secrets.token_urlsafe(32)}"
        secret = EphemeralSecret(owner, session, self._clock() + ttl_s)
        self._secrets[digest(value)] = secret
        if len(self._secrets) > SECRETS:
            self._secrets.popitem(last=False)
        return value, secret

    def find(self, value: str) -> EphemeralSecret:
        """Raises AuthError `expired_client_secret` for one that is over or was never issued."""
        secret = self._secrets.get(digest(value))
        if secret is None or secret.expires_at <= self._clock():
            raise AuthError("this client secret has expired; ask for a new one", code="expired_client_secret")
        return secret


# ---- origins


class Origins:
    """Pages of which origins may call (browsers say theirs; nobody else is asked)."""

    def __init__(self, settings: AccessSettings) -> None:
        self._allowed = {origin.rstrip("/").lower() for origin in settings.allowed_origins}
        self._trusts_host = not settings.open or settings.insecure

    def allow(self, origin: str, host: str) -> bool:
        """Those of the settings, pages of this machine, and the page that the server itself has served.

        Where no key is asked for, `host` is believed only if it is loopback: a page elsewhere could have its own name
        point here (DNS rebinding), and would look like ours.
        """
        origin = origin.lower()
        if "*" in self._allowed or origin in self._allowed:
            return True
        try:
            place = urlsplit(origin)
        except ValueError:  # such as `http://[`
            return False
        if place.scheme not in ("http", "https") or place.hostname is None:
            return False
        return is_loopback(place.hostname) or (self._trusts_host and place.netloc == host.lower())


# ---- the door


class Door:
    """Lets in who may come in, and says whose a call is."""

    def __init__(
        self,
        settings: AccessSettings,
        signing_key: bytes,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.origins = Origins(settings)
        self.secrets = EphemeralSecrets(wall_clock)
        self.open = settings.open
        self._keys = Keys.read(settings)
        self._operators = Keys([digest(settings.operator_key)] if settings.operator_key else [])
        self._has_operator = settings.operator_key is not None
        self._trust_proxy = settings.trust_proxy
        self._signing_key = signing_key
        self._clock = clock
        self._by_key = Rate(settings.requests_per_minute_per_key)
        self._by_address = Rate(settings.requests_per_minute_per_address)

    def admit(self, request: web.Request, token: str | None = None) -> Caller:
        """Who asks to open a call, by a bearer's token or by `token`.

        Raises AuthError (401, 403), RequestError (429).
        """
        self.check_origin(request)
        caller = self._identify(token or bearer_of(request), self.address_of(request))
        now = self._clock()
        if not caller.is_local:
            self._by_address.take(caller.address, now)
        if caller.owner != NOBODY:
            self._by_key.take(caller.owner, now)
        return caller

    def check_origin(self, request: web.Request) -> None:
        """Raises AuthError (403) for a page that may not ask."""
        origin = request.headers.get("Origin")
        if origin is not None and not self.origins.allow(origin, request.host):
            raise AuthError(f"pages of {origin[:80]} may not call here", status=403, code="forbidden")

    def admit_issuer(self, request: web.Request) -> Caller:
        """Who asks for an ephemeral secret: the holder of a key, not of another secret."""
        caller = self.admit(request)
        if caller.token is not None and caller.token.startswith(("ek_", "cs_")):
            raise AuthError("client secrets are issued to holders of an API key", status=403, code="forbidden")
        return caller

    def _identify(self, token: str | None, address: str) -> Caller:
        if token is not None and token.startswith("ek_"):
            secret = self.secrets.find(token)
            return Caller(secret.owner, address, token, secret.session)
        owner = self._keys.owner_of(token) if token is not None else None
        if owner is None and not self.open and not (token or "").startswith("cs_"):
            raise AuthError("an API key is wanted: Authorization: Bearer KEY")
        return Caller(owner or NOBODY, address, token)

    def require_key(self, caller: Caller) -> None:
        """Raises AuthError for one who has shown no more than the secret of another call."""
        if caller.owner == NOBODY and not self.open:
            raise AuthError("a call's secret opens no other call; an API key is wanted")

    # ---- calls

    def call_secret(self, call_id: str) -> str:
        """What proves that a call is its holder's; nothing is kept of it."""
        mac = hmac.digest(self._signing_key, b"call:" + call_id.encode(), hashlib.sha256)
        return f"cs_{base64.urlsafe_b64encode(mac[:24]).decode()}"

    def require_owner(self, token: str | None, call_id: str, opened_by: Caller) -> None:
        """Raises AuthError unless the token is the call's secret, or what the call was opened with, or its key."""
        if token is None:
            raise AuthError("this call belongs to who holds its secret: Authorization: Bearer SECRET")
        if hmac.compare_digest(token.encode(), self.call_secret(call_id).encode()):
            return
        if opened_by.token is not None and hmac.compare_digest(token.encode(), opened_by.token.encode()):
            return
        owner = self._keys.owner_of(token)
        if owner is None or owner != opened_by.owner:
            raise AuthError("this call is not yours", status=403, code="forbidden")

    def require_operator(self, request: web.Request) -> None:
        """Raises AuthError for one who is not the operator; where nobody needs a key, everybody is."""
        if not self._has_operator:
            if not self.open:
                raise AuthError("no operator_key is set, so nobody may see this", status=403, code="forbidden")
            return
        token = bearer_of(request)
        if token is None or self._operators.owner_of(token) is None:
            raise AuthError("the operator's key is wanted: Authorization: Bearer KEY")

    def address_of(self, request: web.Request) -> str:
        """Where a request comes from."""
        forwarded = request.headers.get("X-Forwarded-For", "") if self._trust_proxy else ""
        return forwarded.rpartition(",")[2].strip() or request.remote or "unknown"


def bearer_of(request: web.Request) -> str | None:
    """The token of `Authorization: Bearer TOKEN`. Raises AuthError for any other authorization."""
    header = request.headers.get("Authorization")
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not _TOKEN.fullmatch(token.strip()):
        raise AuthError("Authorization must be: Bearer TOKEN")
    return token.strip()
