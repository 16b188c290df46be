"""The clock of a caller's sound card, from timestamps and arrivals."""

import numpy as np
import pytest

from webrtc_duplex.media.drift import SPAN_S, SPANS, ClockDrift
from webrtc_duplex.media.jitter import Packet

RTP_CLOCK = 48_000
HEARD_S = SPAN_S * (SPANS + 1)


def play(ppm: float, seconds: float = HEARD_S, later_after_s: float = float("inf")) -> ClockDrift:
    """Packets of a caller whose clock is off, over a network with 30 ms of jitter that may become 20 ms longer."""
    chance, drift = np.random.default_rng(1), ClockDrift(RTP_CLOCK)
    for number in range(round(seconds / 0.02)):
        sent_at = number * 0.02 / (1 + ppm / 1e6)
        delay_s = 0.04 + chance.exponential(0.01) + (0.02 if sent_at > later_after_s else 0.0)
        timestamp = (4_294_900_000 + number * 960) & 0xFFFFFFFF
        drift.note(Packet(number & 0xFFFF, timestamp, b"", 111, ssrc=1), sent_at + delay_s)
    return drift


@pytest.mark.parametrize("ppm", [-2000, -400, 0, 100, 400, 2000])
def test_a_clock_that_is_off_is_found_through_the_networks_jitter(ppm: float) -> None:
    found = play(ppm).ppm
    assert found is not None and abs(found - ppm) < 60


def test_a_way_that_becomes_longer_is_no_drift() -> None:
    found = play(0, later_after_s=HEARD_S / 2).ppm
    assert found is not None and abs(found) < 60


def test_nothing_is_said_before_a_minute_has_been_heard() -> None:
    assert play(2000, seconds=SPAN_S * (SPANS - 1)).ppm is None


def test_another_stream_and_a_jump_of_the_timestamp_begin_anew() -> None:
    for packet in (Packet(1, 0, b"", 111, ssrc=2), Packet(1, 12_345_678, b"", 111, ssrc=1)):
        drift = play(400)
        drift.note(packet, HEARD_S + 0.06)
        assert drift.ppm is None
