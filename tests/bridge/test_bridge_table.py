"""The bridge's table: who gets which agent, and what is said of a table that is wrong."""

import tomllib
from pathlib import Path

import pytest

from webrtc_duplex.bridge.table import Agent, BridgeSettings, KeyAction
from webrtc_duplex.errors import RequestError

HOTEL = """
[sip]
address = "sip:agent@192.0.2.10"
lines = 3

[default]
voice = "NATF2"

[[route]]
number = "1001"
instructions = "You are the night desk."

[[route]]
header = "X-Agent: sales"
seed = 7

[keys]
"#" = "hang_up"
"""


def parse(text: str) -> BridgeSettings:
    return BridgeSettings.parse(tomllib.loads(text), Path())


def test_the_first_route_that_fits_chooses_the_agent() -> None:
    settings = parse(HOTEL)
    assert settings.agent_for("1001", {}) == Agent(instructions="You are the night desk.")
    assert settings.agent_for("1002", {"x-agent": " sales"}) == Agent(seed=7)
    assert settings.agent_for("1001", {"X-Agent": "sales"}) == Agent(instructions="You are the night desk.")


def test_a_call_that_no_route_fits_gets_the_default_agent() -> None:
    assert parse(HOTEL).agent_for("2000", {"X-Agent": "support"}) == Agent(voice="NATF2")


def test_an_agent_without_wishes_asks_the_server_for_nothing() -> None:
    assert Agent().as_session() == {}
    assert Agent(voice="NATF2", seed=0).as_session() == {"voice": "NATF2", "seed": 0}


def test_the_headers_that_routes_ask_about_are_named_to_janus() -> None:
    assert parse(HOTEL).header_names == ["x-agent"]


def test_a_key_hangs_up() -> None:
    assert parse(HOTEL).keys == {"#": KeyAction.HANG_UP}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "sip.address must be a SIP address"),
        ("[sip]\naddress = 5", "sip.address must be a text, not 5"),
        ('[sip]\naddress = "sip:a@b"\nlines = 0', "sip.lines must be at least 1, not 0"),
        ('[sip]\naddress = "sip:a@b"\nline = 1', "it does not know line"),
        ('[sip]\naddress = "sip:a@b"\n[[route]]\nvoice = "x"', "route 1 needs a number or a header"),
        ('[sip]\naddress = "sip:a@b"\n[[route]]\nheader = "X-Agent"', 'must read "Name: value"'),
        ('[sip]\naddress = "sip:a@b"\n[keys]\n"#" = "dance"', "it cannot do 'dance'"),
        ('[sip]\naddress = "sip:a@b"\n[keys]\n"x" = "hang_up"', "it does not know x"),
        ('[sip]\naddress = "sip:a@b"\n[metrics]\nport = 70000', "metrics.port must be 1 to 65535, not 70000"),
        ('[sip]\naddress = "sip:a@b"\n[server]\napi_key_file = "gone"', "api_key_file gone cannot be read"),
    ],
)
def test_a_wrong_table_is_refused_with_what_was_wanted_and_what_was_there(text: str, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        parse(text)


def test_a_table_that_is_no_toml_is_named(tmp_path: Path) -> None:
    table = tmp_path / "bridge.toml"
    table.write_text("[sip")
    with pytest.raises(RequestError, match=r"bridge\.toml is not TOML"):
        BridgeSettings.read(table)
    with pytest.raises(RequestError, match=r"other\.toml cannot be read"):
        BridgeSettings.read(tmp_path / "other.toml")
