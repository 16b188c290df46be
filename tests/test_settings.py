"""Settings: where a value comes from, and what is said of one that will not do."""

import argparse
from pathlib import Path

import pytest

from webrtc_duplex import settings
from webrtc_duplex.__main__ import main
from webrtc_duplex.errors import RequestError
from webrtc_duplex.settings import Settings


def flags(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    return vars(parser.parse_args(arguments))


def test_nothing_given_is_the_defaults() -> None:
    assert settings.read(flags(), {}) == Settings()


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[server]\nport = 1\nhost = "::1"\nmedia_timeout_s = 3\n')
    environment = {"WEBRTC_DUPLEX_PORT": "2", "WEBRTC_DUPLEX_HOST": "0.0.0.0"}
    server = settings.read(flags("--config", str(file), "--port", "3", "--insecure"), environment).server
    assert (server.port, server.host, server.media_timeout_s) == (3, "0.0.0.0", 3.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "voice.example"])
def test_a_server_without_keys_refuses_to_serve_others(host: str) -> None:
    with pytest.raises(RequestError, match="everybody who reaches this machine could call"):
        settings.read(flags("--host", host), {})
    for choice in (["--insecure"], ["--api-keys", "k"], ["--api-key-file", "keys.txt"]):
        assert settings.read(flags("--host", host, *choice), {}).server.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_server_without_keys_serves_its_own_machine(host: str) -> None:
    assert settings.read(flags("--host", host), {}).server.host == host


@pytest.mark.parametrize("key", ["two words", "é", "x" * 513])
def test_a_key_that_no_header_could_hold_is_refused_without_quoting_it(key: str) -> None:
    with pytest.raises(RequestError, match="visible ASCII") as refusal:
        settings.read(flags("--api-keys", key), {})
    assert key not in refusal.value.message


def test_turn_servers_need_a_secret() -> None:
    with pytest.raises(RequestError, match="turn_secret"):
        settings.read(flags("--turn-urls", "turn:turn.example:3478"), {})


def test_rows_may_be_measured() -> None:
    assert settings.read(flags("--rows", "auto"), {}).engine.rows is None


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        (["--rows", "60"], 1),
        (["--rows", "61"], 2),
        (["--rows", "64", "--device", "cuda:0,cuda:1"], 3),
        (["--rows", "auto"], None),
        (["--rows", "64", "--media-workers", "1"], 1),
    ],
)
def test_there_are_media_workers_enough_for_all_rows(arguments: list[str], workers: int | None) -> None:
    assert settings.read(flags(*arguments), {}).media_workers == workers


def test_no_knob_has_two_sections() -> None:
    names = [knob.name for knob in settings.knobs()]
    assert len(names) == len(set(names))


def test_every_knob_stands_in_the_table() -> None:
    table = settings.table()
    assert all(f"`{knob.flag}`" in table and knob.help in table for knob in settings.knobs())


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["--port", "http"], {}, "--port must be a whole number, not 'http'"),
        (["--port", "70000"], {}, "port must be between 0 and 65535, not 70000"),
        (["--rows", "0"], {}, "rows must be between 1 and 3840, not 0"),
        (["--kv-dtype", "int4"], {}, "kv_dtype must be auto or int8, not 'int4'"),
        (["--rows", "2.5"], {}, "--rows must be a whole number, not '2.5'"),
        ([], {"WEBRTC_DUPLEX_MEDIA_TIMEOUT_S": "soon"}, "WEBRTC_DUPLEX_MEDIA_TIMEOUT_S must be a number, not 'soon'"),
        (["--resume-grace-s", "nan"], {}, "--resume-grace-s must be a number, not 'nan'"),
        (["--turn-ttl-s", "inf"], {}, "--turn-ttl-s must be a number, not 'inf'"),
        (["--port", "1" * 400], {}, "--port must be a whole number, not '1"),
        (["--max-calls-per-key", "0"], {}, "max_calls_per_key must be at least 1, not 0"),
        (["--idle-timeout-s", "-1"], {}, "idle_timeout_s must be between 0 and 31536000, not -1"),
    ],
)
def test_a_wrong_value_is_refused_where_it_was_given(
    arguments: list[str], environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        settings.read(flags(*arguments), environment)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[server]\nports = 1", "does not know ports"),
        ("[server", "is not TOML"),
        ("[disco]\nlights = true", "it does not know disco"),
        ("[server]\nport = true", "server.port in .* must be a whole number, not True"),
        ("[server]\nhost = 4", "server.host in .* must be a text, not 4"),
        ("[server]\nmedia_timeout_s = 1" + "0" * 400, "server.media_timeout_s in .* must be a number, not 1"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(RequestError, match=sentence):
        settings.read(flags("--config", str(file)), {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"gone\.toml cannot be read"):
        settings.read(flags("--config", str(tmp_path / "gone.toml")), {})


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(b"[server]\nplace = '\xff'")
    with pytest.raises(RequestError, match=r"settings\.toml is not TOML"):
        settings.read(flags("--config", str(file)), {})


NONSENSE = {
    "rows": ["-1", "2.5", "many", "1000000000"],
    "phases": ["0", "17", "x"],
    "device": ["gpu7", "cuda:x", "cuda:0,", "cpu cuda"],
    "kv_dtype": ["", "int4"],
    "resume_grace_s": ["", "-1", "soon", "inf", "1e300"],
    "connect_deadline_s": ["-1", "soon", "1e300"],
    "host": ["", "0.0.0.0", "http://localhost"],
    "port": ["-1", "65536", "http", "80.0"],
    "media_workers": ["0", "65", "x"],
    "media_timeout_s": ["-1", "nan", "1e300"],
    "max_duration_s": ["-1", "x", "1e300"],
    "idle_timeout_s": ["-1", "x", "1e300"],
    "drain_timeout_s": ["-1", "x", "1e300"],
    "recordings_quota_mb": ["0", "-1", "x"],
    "log_format": ["", "xml"],
    "place": ["", "A", "a-b", "a" * 33],
    "signing_key": ["short"],
    "tls_cert": ["alone.pem"],
    "tls_key": ["alone.pem"],
    "tls_dev": ["", "maybe"],
    "api_keys": ["two words", "x" * 513],
    "operator_key": [" ", "two words"],
    "insecure": ["", "maybe"],
    "allowed_origins": ["example", "https://", "https://a/path", "https://a,b"],
    "trust_proxy": ["", "maybe"],
    "requests_per_minute_per_key": ["0", "x", "1.5"],
    "requests_per_minute_per_address": ["0", "x"],
    "max_calls_per_key": ["0", "x"],
    "max_calls_per_address": ["0", "x"],
    "max_connecting_per_address": ["0", "x"],
    "udp_ports": ["x", "50000", "50999-50000", "1-2", "60000-70000"],
    "public_ip": ["voice.example", "1.2.3"],
    "stun_urls": ["host:3478", "turn:host", "stun:", "stun:a>b"],
    "turn_urls": ["turn:host:3478", "stun:host", "turn:host?transport=pigeon"],
    "turn_ttl_s": ["59", "x", "1e300"],
    "gather": ["", "maybe"],
    "relay_only": ["", "maybe", "true"],
}
SEEN_LATER = {"model", "recordings", "static", "api_key_file", "turn_secret"}
"""What any text may be, as long as nobody looks what is there."""


def test_every_knob_has_its_nonsense() -> None:
    assert NONSENSE.keys() | SEEN_LATER == {knob.name for knob in settings.knobs()}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NONSENSE.items() for value in values])
def test_nonsense_is_refused_with_one_sentence_that_names_the_knob(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"WEBRTC_DUPLEX_{name.upper()}", value)
    assert main(["doctor", "--model", "echo"]) == 2  # it reads them as `serve` does, and never serves
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("webrtc-duplex: ") and name in sentence.lower()


@pytest.mark.parametrize("knob", list(settings.knobs()), ids=lambda knob: knob.name)
def test_a_file_may_hold_anything_at_all(knob: settings.Knob, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    for value in ("1979-05-27", "[[1]]", "{}", "inf", "-1", '"\\u0000"', "[1, 2]", "9223372036854775807"):
        file.write_text(f"[{knob.section}]\n{knob.name} = {value}\n")
        try:
            settings.read(flags("--config", str(file)), {})
        except RequestError as refusal:
            assert knob.name in refusal.message
