"""The session object, and the prompt it stands for."""

import pytest

from webrtc_duplex.errors import RequestError
from webrtc_duplex.messages import ModelCard, Prompt
from webrtc_duplex.server.realtime import Json, read_idle_timeout, read_session, session_object, what_counts

CARD = ModelCard("double", ("ann", "bob"), "ann", takes_text=True, max_text_chars=10, pieces=("",))
MUTE = ModelCard("echo", (), None, takes_text=False, max_text_chars=0, pieces=("",))


def test_a_session_names_voice_instructions_seed_and_temperatures() -> None:
    session: dict[str, Json] = {
        "audio": {"output": {"voice": "bob"}},
        "instructions": "Be kind.",
        "seed": 7,
        "text_temperature": 0,
        "audio_top_k": 250,
    }
    prompt = read_session(session, Prompt(), CARD)
    assert prompt == Prompt("bob", "Be kind.", 7, text_temperature=0.0, audio_top_k=250)


@pytest.mark.parametrize("session", [{"voice": "bob"}, {"audio": {"output": {"voice": {"id": "bob"}}}}])
def test_a_voice_may_be_named_in_older_ways(session: dict[str, Json]) -> None:
    assert read_session(session, Prompt(), CARD).voice == "bob"


def test_what_is_not_named_stays_and_what_means_nothing_is_passed_over() -> None:
    base = Prompt("bob", "Be kind.", 7)
    assert read_session({"tracing": "auto", "tools": [], "turn_detection": {}}, base, CARD) == base


def test_a_model_without_voices_and_text_passes_over_wishes_for_them() -> None:
    assert read_session({"voice": "alloy", "instructions": "Be kind."}, Prompt(), MUTE) == Prompt()


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({"voice": "eve"}, "unknown_voice", "session.audio.output.voice"),
        ({"voice": 7}, "unknown_voice", "session.audio.output.voice"),
        ({"instructions": 7}, "invalid_value", "session.instructions"),
        ({"instructions": "be \ud83d"}, "invalid_value", "session.instructions"),
        ({"instructions": "x" * 11}, "string_above_max_length", "session.instructions"),
        ({"seed": True}, "invalid_value", "session.seed"),
        ({"seed": -1}, "invalid_value", "session.seed"),
        ({"seed": 1.5}, "invalid_value", "session.seed"),
        ({"text_temperature": -0.1}, "invalid_value", "session.text_temperature"),
        ({"audio_temperature": "warm"}, "invalid_value", "session.audio_temperature"),
        ({"text_top_k": 0}, "invalid_value", "session.text_top_k"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_and_named(session: dict[str, Json], code: str, param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read_session(session, Prompt(), CARD)
    assert (refusal.value.code, refusal.value.param) == (code, param)


def test_of_a_session_that_is_kept_no_more_stays_than_counts() -> None:
    session: dict[str, Json] = {"seed": 7, "instructions": "Be kind.", "tools": ["x"] * 1000, "model": "gpt-realtime"}
    session["audio"] = {"input": {"format": "x" * 1000}, "output": {"voice": {"id": "bob"}}}
    kept = what_counts(session, CARD)
    assert kept == {"seed": 7, "instructions": "Be kind.", "voice": "bob"}
    assert read_session(kept, Prompt(), CARD) == read_session(session, Prompt(), CARD)
    assert what_counts(session, MUTE) == {"seed": 7}


def test_the_session_in_force_is_shown() -> None:
    shown = session_object("rtc_1", Prompt(seed=7), CARD)
    assert (shown["model"], shown["seed"]) == ("double", 7)
    assert shown["audio"]["output"]["voice"] == "ann"  # type: ignore[index,call-overload]


def detection(limit: Json) -> dict[str, Json]:
    return {"audio": {"input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": limit}}}}


def test_a_client_may_ask_to_be_told_of_silence() -> None:
    assert read_idle_timeout(detection(6000), None) == 6000
    assert read_idle_timeout({"audio": {"input": {"turn_detection": None}}}, 6000) is None
    assert read_idle_timeout(detection(None), 6000) == 6000
    assert read_idle_timeout({"audio": {"output": {"voice": "bob"}}}, 6000) == 6000
    shown = session_object("rtc_1", Prompt(), CARD, 6000)
    assert read_idle_timeout(shown, None) == 6000
    assert read_idle_timeout(what_counts(detection(6000), CARD), None) == 6000


@pytest.mark.parametrize("limit", [4999, 30_001, True, 6000.5, "6000", [6000]])
def test_a_silence_of_another_length_is_refused(limit: Json) -> None:
    with pytest.raises(RequestError, match="5000 to 30000") as refused:
        read_idle_timeout(detection(limit), None)
    assert refused.value.param == "session.audio.input.turn_detection.idle_timeout_ms"
