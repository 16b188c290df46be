"""Events out and commands in, without a wire."""

import json
from typing import Any, cast

import numpy as np
import pytest
from aiortc import RTCDataChannel
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_doubles import tone
from webrtc_duplex.audio import FRAME_S, FRAME_SAMPLES, Pcm
from webrtc_duplex.errors import RequestError
from webrtc_duplex.server import events

SILENCE: Pcm = np.zeros(FRAME_SAMPLES, np.int16)
QUIET_FRAMES = 8
KINDS = (
    "session.update",
    "response.cancel",
    "response.create",
    "output_audio_buffer.clear",
    "input_audio_buffer.clear",
)


class Told:
    """A feed with one listener that writes down what it is told."""

    def __init__(self) -> None:
        self.feed = events.Feed()
        self.events: list[Any] = []
        self.responses = events.Responses(self.feed, FRAME_S)
        self.feed.add(self.events.append)

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event["type"] == kind]

    def quiet(self, frames: int = QUIET_FRAMES) -> None:
        for _ in range(frames):
            self.responses.said("", SILENCE)


@pytest.fixture
def told() -> Told:
    return Told()


class FakeChannel:
    """As much of a data channel as a listener needs."""

    readyState = "open"

    def __init__(self) -> None:
        self.bufferedAmount = 0
        self.sent: list[Any] = []

    def send(self, text: str) -> None:
        self.sent.append(json.loads(text))


def channel_listener(channel: FakeChannel, stuck: list[bool]) -> events.ChannelListener:
    return events.ChannelListener(cast(RTCDataChannel, channel), lambda: stuck.append(True))


def test_a_response_opens_with_the_first_word_and_closes_after_a_pause(told: Told) -> None:
    told.responses.said(" Hello", SILENCE)
    told.responses.said("", tone())
    told.responses.said(" there", tone())
    told.quiet(QUIET_FRAMES - 1)
    assert "response.done" not in told.kinds()
    told.quiet(1)
    assert told.kinds() == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "output_audio_buffer.started",
        "response.output_audio_transcript.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "output_audio_buffer.stopped",
    ]
    assert told.of("response.output_audio_transcript.done")[0]["transcript"] == "Hello there"
    done = told.of("response.done")[0]["response"]
    assert done["status"] == "completed" and done["output"][0]["content"][0]["transcript"] == "Hello there"


def test_a_short_pause_stays_within_the_response_and_a_new_one_has_a_new_name(told: Told) -> None:
    told.responses.said(" one", tone())
    told.quiet(QUIET_FRAMES - 1)
    told.responses.said(" two", tone())
    told.quiet()
    told.responses.said(" three", tone())
    ids = [event["response"]["id"] for event in told.of("response.created")]
    assert len(set(ids)) == len(ids) == 2


def test_silence_alone_opens_nothing(told: Told) -> None:
    told.quiet(100)
    assert told.events == []


def test_every_event_has_a_number_of_its_own(told: Told) -> None:
    told.responses.said(" one", tone())
    told.quiet()
    assert len({event["event_id"] for event in told.events}) == len(told.events)


def test_a_hushed_agent_is_not_told_of_until_it_has_paused(told: Told) -> None:
    told.responses.said(" one", tone())
    told.responses.hush()
    assert told.kinds()[-1] == "response.done" and "output_audio_buffer.cleared" in told.kinds()
    assert told.of("response.done")[0]["response"]["status"] == "cancelled"
    before = len(told.events)
    told.responses.said(" two", tone())
    assert len(told.events) == before
    told.quiet()
    told.responses.said(" three", tone())
    assert told.events[before]["type"] == "response.created"


def test_hushing_an_agent_who_is_silent_changes_nothing(told: Told) -> None:
    told.responses.hush()
    assert not told.responses.hushed and told.events == []


def test_a_response_that_is_asked_for_is_opened_and_closed(told: Told) -> None:
    told.responses.create()
    assert told.kinds()[0] == "response.created" and told.kinds()[-1] == "response.done"


def test_asking_for_a_response_while_one_is_open_opens_no_other(told: Told) -> None:
    told.responses.said(" one", tone())
    told.responses.create()
    assert len(told.of("response.created")) == 1 and told.of("response.done") == []


@pytest.mark.parametrize("user_goes_on", [True, False])
def test_an_agent_who_yields_to_the_user_is_interrupted_and_one_who_ends_is_done(
    told: Told, user_goes_on: bool
) -> None:
    turns = events.Turns(told.feed, told.responses)
    told.responses.said(" well", tone())
    for frame in [SILENCE] + [tone()] * 10 + [SILENCE] * (0 if user_goes_on else 10):
        turns.heard(frame)
    told.quiet()
    response = told.of("response.done")[0]["response"]
    assert told.kinds().count("ext.overlap") == 1
    if user_goes_on:
        assert response["status"] == "cancelled" and response["status_details"]["reason"] == "turn_detected"
        assert "output_audio_buffer.cleared" in told.kinds()
    else:
        assert response["status"] == "completed"


def test_speech_of_the_user_is_told_with_its_times(told: Told) -> None:
    turns = events.Turns(told.feed, told.responses)
    for frame in [SILENCE] * 5 + [tone()] * 10 + [SILENCE] * 10:
        turns.heard(frame)
    started, stopped = told.events
    assert started["type"] == "input_audio_buffer.speech_started" and abs(started["audio_start_ms"] - 400) <= 20
    assert stopped["type"] == "input_audio_buffer.speech_stopped" and abs(stopped["audio_end_ms"] - 1200) <= 20
    assert started["item_id"] == stopped["item_id"]


def test_a_silence_of_both_is_told_of_once_until_somebody_speaks(told: Told) -> None:
    turns = events.Turns(told.feed, told.responses, idle_timeout_ms=800)
    for frame in [SILENCE] * 40 + [tone()] * 5 + [SILENCE] * 40:
        turns.heard(frame)
    first, second = told.of("input_audio_buffer.timeout_triggered")
    assert (first["audio_start_ms"], first["audio_end_ms"]) == (0, 800)
    assert second["audio_end_ms"] - second["audio_start_ms"] == 800 and second["audio_start_ms"] > 40 * 80
    assert first["item_id"] != second["item_id"]


def test_while_the_agent_speaks_nobody_is_idle(told: Told) -> None:
    turns = events.Turns(told.feed, told.responses, idle_timeout_ms=800)
    told.responses.said(" well", tone())
    for _ in range(40):
        turns.heard(SILENCE)
    assert told.of("input_audio_buffer.timeout_triggered") == []


def test_a_slow_channel_loses_statistics_and_no_word() -> None:
    channel, stuck = FakeChannel(), list[bool]()
    listener = channel_listener(channel, stuck)
    channel.bufferedAmount = listener.SLOW_BYTES + 1
    listener({"type": "ext.stats"})
    listener({"type": "response.output_audio_transcript.delta", "delta": "word"})
    assert [event["type"] for event in channel.sent] == ["response.output_audio_transcript.delta"]
    assert listener.dropped == 1 and not stuck


def test_an_event_too_large_for_the_client_is_dropped_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> None:
        raise ValueError("the remote party only supports messages up to 10 bytes")

    channel, stuck = FakeChannel(), list[bool]()
    listener = channel_listener(channel, stuck)
    monkeypatch.setattr(channel, "send", refuse)
    listener({"type": "session.updated"})
    assert listener.dropped == 1 and not stuck


def test_a_channel_that_does_not_move_is_given_up() -> None:
    channel, stuck = FakeChannel(), list[bool]()
    listener = channel_listener(channel, stuck)
    channel.bufferedAmount = listener.STUCK_BYTES + 1
    listener({"type": "response.done"})
    assert stuck == [True] and channel.sent == []


async def test_a_reader_gets_every_event_in_order_and_the_end() -> None:
    told, listener = Told(), events.QueueListener()
    told.feed.add(listener)
    told.feed.emit("one")
    told.feed.emit("two", field=2)
    told.feed.end()
    assert [event["type"] async for event in listener] == ["one", "two"]
    assert [event async for event in listener] == []


async def test_a_reader_that_does_not_come_loses_statistics_and_is_then_cut_off() -> None:
    listener = events.QueueListener()
    for _ in range(listener.DEPTH):
        listener({"type": "word"})
    listener({"type": "ext.stats"})
    listener({"type": "word"})
    assert listener.dropped == 1
    assert len([event async for event in listener]) == listener.DEPTH


async def test_nothing_is_kept_for_a_reader_that_was_cut_off() -> None:
    listener = events.QueueListener()
    for _ in range(listener.DEPTH + 1):
        listener({"type": "word"})
    await anext(listener)
    for _ in range(2 * listener.DEPTH):
        listener({"type": "late"})
    assert [event["type"] async for event in listener] == ["word"] * (listener.DEPTH - 1)
    assert [event async for event in listener] == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "invalid_json"),
        ("null", "invalid_json"),
        ('{"type": 7}', "invalid_json"),
        ("[" * 100_000, "message_too_large"),
        ("[" * 60_000, "invalid_json"),
        ('{"type": "dance"}', "unknown_event"),
        ('{"type": "session.update"}', "invalid_value"),
        ('{"type": "session.update", "session": []}', "invalid_value"),
        ('{"type": "conversation.item.create", "item": {}}', "unsupported"),
        ('{"type": "input_audio_buffer.append", "audio": ""}', "unsupported"),
        (b"\xff\xfe", "invalid_json"),
    ],
)
def test_what_cannot_be_acted_on_is_named(text: str | bytes, code: str) -> None:
    command = events.read_message(text).command
    assert isinstance(command, RequestError) and command.code == code


@given(st.text() | st.binary() | st.recursive(st.none() | st.text(), st.lists).map(json.dumps))
def test_no_message_whatever_it_holds_does_more_than_be_refused(text: str | bytes) -> None:
    assert isinstance(events.read_message(text).command, RequestError)


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text()), st.sampled_from(KINDS))
def test_strange_fields_are_passed_over(fields: dict[str, object], kind: str) -> None:
    text = json.dumps({**fields, "type": kind, "session": fields})
    assert not isinstance(events.read_message(text).command, RequestError)


def test_a_message_keeps_the_name_that_its_client_gave_it() -> None:
    message = events.read_message('{"type": "response.cancel", "event_id": "mine"}')
    assert message == events.Message("mine", events.Silence())


@pytest.mark.parametrize("name", ["NaN", "7", '["x"]', "[" * 800 + "]" * 800, f'"{"x" * 513}"'])
def test_a_name_that_is_no_short_text_is_not_sent_back(name: str) -> None:
    assert events.read_message(f'{{"type": "response.cancel", "event_id": {name}}}').event_id is None
