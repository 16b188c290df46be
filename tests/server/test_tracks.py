"""The ticker and the agent's track, on a clock that passes when told to."""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np
import pytest

from tests.engine_doubles import FakeClock, tone
from webrtc_duplex.audio import CHUNK_S
from webrtc_duplex.media.opus import Decoder
from webrtc_duplex.media.playout import Playout
from webrtc_duplex.server.tracks import AgentAudioTrack, Ticker, decoders, encoder


class ManualTicker(Ticker):
    """A ticker whose alarm is the test."""

    def __init__(self, clock: FakeClock) -> None:
        self.lateness: list[float] = []
        super().__init__(clock, self.lateness.append)
        self.time = clock

    def pass_until(self, end: float) -> None:
        while self._beats and self._beats[0][0] <= end:
            self.time.now = max(self.time.now, self._beats[0][0])
            self._wake()
        self.time.now = end

    def _set_alarm(self, due: float) -> None:
        self._alarm_at = due


@pytest.fixture
def ticker() -> ManualTicker:
    return ManualTicker(FakeClock())


@dataclass
class Wire:
    """What has left: payload, time and marker of each packet."""

    payloads: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    markers: list[bool] = field(default_factory=list)

    def send(self, payload: bytes, timestamp: int, marker: bool) -> None:
        self.payloads.append(payload)
        self.times.append(timestamp)
        self.markers.append(marker)


def a_track(ticker: ManualTicker, codec: str = "opus") -> tuple[AgentAudioTrack, Wire]:
    wire = Wire()
    playout = Playout(continuous=codec != "opus")
    return AgentAudioTrack(encoder(codec), playout, ticker, ticker.time, wire.send), wire


def nothing() -> None: ...


def test_beats_come_in_the_order_they_are_due_and_those_together_at_once(ticker: ManualTicker) -> None:
    start, seen = ticker.time.now, list[float]()
    for offset in (0.03, 0.01, 0.0105, 0.02):
        ticker.at(start + offset, seen.append)
    ticker.time.now = start + 0.01
    ticker._wake()
    assert seen == [start + 0.01, start + 0.0105]
    assert ticker._alarm_at == start + 0.02


def test_a_late_wake_up_delays_no_beat_after_it(ticker: ManualTicker) -> None:
    start, seen = ticker.time.now, list[tuple[float, float]]()

    def beat(due: float) -> None:
        seen.append((round(due - start, 6), ticker.time.now))
        ticker.at(due + CHUNK_S, beat)

    ticker.at(start + 0.02, beat)
    ticker.time.now = start + 0.05
    ticker._wake()
    ticker.pass_until(start + 0.065)
    assert [due for due, _ in seen] == [0.02, 0.04, 0.06]
    assert ticker.lateness == pytest.approx([0.03, 0.0])


def test_a_beat_that_fails_does_not_stop_the_clock(ticker: ManualTicker) -> None:
    def fail(due: float) -> None:
        raise ZeroDivisionError

    ticker.at(ticker.time.now, fail)
    ticker.at(ticker.time.now + 1, fail)
    with pytest.raises(ZeroDivisionError):
        ticker._wake()
    assert ticker._alarm_at == ticker.time.now + 1


async def test_the_ticker_wakes_by_itself() -> None:
    loop = asyncio.get_running_loop()
    ticker = Ticker(loop.time, lambda late_s: None)
    due = loop.time() + 0.02
    await ticker.until(due)
    assert loop.time() >= due - 0.001
    ticker.at(loop.time() + 60, lambda due: None)
    ticker.stop()


async def test_a_ticker_that_was_stopped_wakes_no_more() -> None:
    loop, seen = asyncio.get_running_loop(), list[float]()
    ticker = Ticker(loop.time, lambda late_s: None)
    ticker.at(loop.time() + 0.01, seen.append)
    ticker.stop()
    ticker.at(loop.time() + 0.01, seen.append)
    await asyncio.sleep(0.03)
    assert not seen


def test_a_frames_first_packet_leaves_at_once_and_the_others_20_ms_apart(ticker: ManualTicker) -> None:
    (track, wire), start, sent = a_track(ticker), ticker.time.now, list[int]()
    track.speak(tone(), 7, -inf, nothing)
    for offset in (0.0, 0.019, 0.02, 0.04, 0.06):
        ticker.pass_until(start + offset)
        sent.append(len(wire.payloads))
    assert sent == [1, 1, 2, 3, 4]
    assert wire.times == [0, 960, 1920, 2880]


def test_words_are_told_when_their_frame_is_on_the_air(ticker: ManualTicker) -> None:
    (track, _), start, told = a_track(ticker), ticker.time.now, list[int]()
    for position in (0, 1):
        track.speak(tone(), position, -inf, partial(told.append, position))
    assert told == [0]
    ticker.pass_until(start + 0.076)
    assert told == [0]
    ticker.pass_until(start + 0.08)
    assert told == [0, 1]


def test_words_of_a_silent_frame_are_told_too(ticker: ManualTicker) -> None:
    (track, wire), start, told = a_track(ticker), ticker.time.now, list[int]()
    silence = np.zeros_like(tone())
    for position in range(10):
        track.speak(silence, position, -inf, partial(told.append, position))
        ticker.pass_until(start + 0.08 * (position + 1))
    assert told == list(range(10))
    assert len(wire.payloads) < 40


def test_a_flush_drops_what_waits_and_keeps_the_timeline(ticker: ManualTicker) -> None:
    (track, wire), start, told = a_track(ticker), ticker.time.now, list[int]()
    for position in (0, 1):
        track.speak(tone(), position, -inf, partial(told.append, position))
    track.flush()
    ticker.pass_until(start + 0.5)
    assert told == [0, 1]
    gaps = np.diff(wire.times)
    assert (gaps > 0).all() and (gaps % 960 == 0).all()
    assert loudness(wire.payloads[-1]) < 1


def loudness(payload: bytes) -> float:
    pcm = Decoder().decode(payload)
    assert pcm is not None
    return float(np.abs(pcm).mean())


def test_sound_after_a_rest_is_marked(ticker: ManualTicker) -> None:
    (track, wire), start = a_track(ticker), ticker.time.now
    track.speak(tone(), 0, -inf, nothing)
    ticker.pass_until(start + 2)
    before = len(wire.markers)
    track.speak(tone(), 1, -inf, nothing)
    assert wire.markers[before] and not any(wire.markers[:before])


def test_a_track_that_has_stopped_sends_nothing_and_tells_what_it_held(ticker: ManualTicker) -> None:
    (track, wire), start, told = a_track(ticker), ticker.time.now, list[int]()
    for position in (0, 1):
        track.speak(tone(), position, -inf, partial(told.append, position))
    track.stop()
    sent = len(wire.payloads)
    track.speak(tone(), 2, -inf, nothing)
    ticker.pass_until(start + 1)
    assert told == [0, 1] and len(wire.payloads) == sent and ticker._beats == []


@pytest.mark.parametrize("codec", ["pcmu", "pcma", "g722"])
def test_a_telephone_hears_an_unbroken_stream_at_its_own_clock(ticker: ManualTicker, codec: str) -> None:
    (track, wire), start = a_track(ticker, codec), ticker.time.now
    track.start()
    ticker.pass_until(start + 0.139)
    assert wire.times == [0, 160, 320, 480, 640, 800, 960]
    assert {len(payload) for payload in wire.payloads} == {160}


def test_every_voice_codec_has_a_decoder_and_digits_have_none() -> None:
    made = decoders({111: "opus", 0: "pcmu", 8: "pcma", 9: "g722", 13: "cn", 126: "telephone-event"})
    assert {number: decoder.rtp_clock for number, decoder in made.items()} == {
        111: 48_000,
        0: 8000,
        8: 8000,
        9: 8000,
        13: 8000,
    }
