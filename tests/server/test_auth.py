"""Who may come in, and whose a call is."""

import inspect
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from webrtc_duplex.errors import AuthError, RequestError
from webrtc_duplex.server import auth
from webrtc_duplex.server.auth import NOBODY, Caller, Door, Keys, Origins, bearer_of, digest, new_key
from webrtc_duplex.settings import AccessSettings


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def door(settings: AccessSettings | None = None, clock: Clock | None = None) -> Door:
    clock = clock or Clock()
    return Door(settings or AccessSettings(), b"signing key", clock, clock)


def request(token: str | None = None, **headers: str) -> web.Request:
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return make_mocked_request("POST", "/v1/realtime/calls", headers={"Host": "voice.example", **named})


KEYED = AccessSettings(api_keys=("alpha", "beta"))


# ---- keys


def test_a_key_is_known_by_its_digest_and_named_without_it() -> None:
    keys = Keys.read(KEYED)
    assert keys.owner_of("alpha") != keys.owner_of("beta")
    assert keys.owner_of("gamma") is None
    assert "alpha" not in str(vars(keys)) + str(keys.owner_of("alpha"))


def test_keys_are_read_from_a_file_of_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# whose\n\n{digest('gamma').hex()}  the shop\n")
    assert Keys.read(AccessSettings(api_key_file=file)).owner_of("gamma") is not None


def test_a_key_file_with_a_plain_key_is_refused_without_quoting_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("my-plain-key\n")
    with pytest.raises(RequestError) as refusal:
        Keys.read(AccessSettings(api_key_file=file))
    assert "my-plain-key" not in refusal.value.message


@pytest.mark.parametrize("content", [b"", b"# none yet\n", b"\xff\xfe\x00", bytes(100)])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(RequestError, match="the key file"):
        Keys.read(AccessSettings(api_key_file=file))


def test_every_comparison_of_secrets_takes_constant_time() -> None:
    for method in (Keys.owner_of, Door.require_owner):
        assert "hmac.compare_digest" in inspect.getsource(method)


def test_new_keys_do_not_repeat() -> None:
    assert len({new_key() for _ in range(100)}) == 100


# ---- the door


def test_without_keys_everybody_may_call() -> None:
    assert door().admit(request()).owner == NOBODY
    assert door().admit(request("whatever")).owner == NOBODY


def test_with_keys_only_their_holders_may_call() -> None:
    keyed = door(KEYED)
    assert keyed.admit(request("alpha")).owner.startswith("key_")
    for wrong in (None, "gamma", "ek_unknown"):
        with pytest.raises(AuthError) as refusal:
            keyed.admit(request(wrong))
        assert refusal.value.status == 401


@pytest.mark.parametrize("header", ["Basic YTpi", "Bearer", "Bearer a b", "Bearer é", "Bearer " + "x" * 600])
def test_an_authorization_that_is_no_bearer_token_is_refused(header: str) -> None:
    with pytest.raises(AuthError):
        bearer_of(make_mocked_request("GET", "/", headers={"Authorization": header}))


def test_an_ephemeral_secret_brings_its_session_until_it_expires() -> None:
    clock = Clock()
    keyed = door(KEYED, clock)
    owner = keyed.admit(request("alpha")).owner
    value, _ = keyed.secrets.issue(owner, {"voice": "ann"}, 60)
    caller = keyed.admit(request(value))
    assert (caller.owner, dict(caller.bound)) == (owner, {"voice": "ann"})
    clock.now += 60
    with pytest.raises(AuthError) as refusal:
        keyed.admit(request(value))
    assert (refusal.value.status, refusal.value.code) == (401, "expired_client_secret")


def test_ephemeral_secrets_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "SECRETS", 2)
    keyed = door(KEYED)
    values = [keyed.secrets.issue("o", {}, 60)[0] for _ in range(3)]
    with pytest.raises(AuthError):
        keyed.secrets.find(values[0])
    keyed.secrets.find(values[2])


def test_a_secret_issues_no_secrets() -> None:
    keyed = door(KEYED)
    value, _ = keyed.secrets.issue("o", {}, 60)
    with pytest.raises(AuthError) as refusal:
        keyed.admit_issuer(request(value))
    assert refusal.value.status == 403


def test_a_call_belongs_to_its_secret_its_opener_and_its_key() -> None:
    keyed = door(KEYED)
    opener = keyed.admit(request("alpha"))
    keyed.require_owner(keyed.call_secret("rtc_a"), "rtc_a", opener)
    keyed.require_owner("alpha", "rtc_a", opener)
    for token, status in (("beta", 403), (keyed.call_secret("rtc_b"), 403), ("cs_", 403), (None, 401)):
        with pytest.raises(AuthError) as refusal:
            keyed.require_owner(token, "rtc_a", opener)
        assert refusal.value.status == status


def test_where_no_key_is_asked_for_a_call_still_belongs_to_who_holds_its_secret() -> None:
    opened = door()
    opener = opened.admit(request())
    opened.require_owner(opened.call_secret("rtc_a"), "rtc_a", opener)
    for token in (None, "x", opened.call_secret("rtc_b")):
        with pytest.raises(AuthError):
            opened.require_owner(token, "rtc_a", opener)


def test_a_calls_secret_opens_no_other_call() -> None:
    keyed = door(KEYED)
    caller = keyed.admit(request(keyed.call_secret("rtc_a")))
    with pytest.raises(AuthError):
        keyed.require_key(caller)


def test_only_the_operator_sees_everything() -> None:
    operated = door(AccessSettings(api_keys=("alpha",), operator_key="omega"))
    operated.require_operator(request("omega"))
    for token in ("alpha", None):
        with pytest.raises(AuthError):
            operated.require_operator(request(token))
    with pytest.raises(AuthError):
        door(KEYED).require_operator(request("alpha"))
    door().require_operator(request())


def test_attempts_by_one_address_are_limited_but_not_by_loopback() -> None:
    limited = door(AccessSettings(requests_per_minute_per_address=6, trust_proxy=True, insecure=True))
    limited.admit(request(X_Forwarded_For="evil, 192.0.2.1"))
    with pytest.raises(RequestError) as refusal:
        limited.admit(request(X_Forwarded_For="192.0.2.1"))
    assert refusal.value.status == 429
    for _ in range(20):
        limited.admit(request(X_Forwarded_For="127.0.0.1"))


def test_attempts_by_one_key_are_limited_wherever_they_come_from() -> None:
    limited = door(AccessSettings(api_keys=("alpha",), requests_per_minute_per_key=6, trust_proxy=True))
    limited.admit(request("alpha", X_Forwarded_For="127.0.0.1"))
    with pytest.raises(RequestError):
        limited.admit(request("alpha", X_Forwarded_For="127.0.0.1"))


def test_a_forwarded_address_is_believed_only_from_a_proxy_of_ours() -> None:
    assert door().address_of(request(X_Forwarded_For="192.0.2.1")) != "192.0.2.1"
    assert door(AccessSettings(trust_proxy=True)).address_of(request(X_Forwarded_For="192.0.2.1")) == "192.0.2.1"


def test_a_loopback_caller_is_local() -> None:
    assert Caller(NOBODY, "127.0.0.1").is_local
    assert not Caller(NOBODY, "192.0.2.1").is_local


# ---- origins


@pytest.mark.parametrize(
    ("settings", "origin", "host", "allowed"),
    [
        (AccessSettings(), "http://localhost:3000", "localhost:8080", True),
        (AccessSettings(), "http://127.0.0.1:8080", "127.0.0.1:8080", True),
        (AccessSettings(), "https://evil.example", "localhost:8080", False),
        (AccessSettings(), "http://evil.example:8080", "evil.example:8080", False),
        (AccessSettings(), "null", "localhost:8080", False),
        (AccessSettings(), "file://", "localhost:8080", False),
        (AccessSettings(), "http://[", "localhost:8080", False),
        (KEYED, "https://voice.example", "voice.example", True),
        (KEYED, "https://evil.example", "voice.example", False),
        (AccessSettings(insecure=True), "http://voice.example", "voice.example", True),
        (AccessSettings(allowed_origins=("https://Shop.example/",)), "https://shop.example", "x", True),
        (AccessSettings(allowed_origins=("*",)), "null", "x", True),
    ],
)
def test_a_page_may_call_if_its_origin_may(settings: AccessSettings, origin: str, host: str, allowed: bool) -> None:
    assert Origins(settings).allow(origin, host) is allowed


def test_a_page_that_may_not_call_is_told_so() -> None:
    with pytest.raises(AuthError) as refusal:
        door().admit(request(Origin="https://evil.example"))
    assert (refusal.value.status, refusal.value.code) == (403, "forbidden")
