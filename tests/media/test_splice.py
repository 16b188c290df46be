"""Making sound shorter and longer without a trace."""

import numpy as np
import pytest

from tests.media import wire
from webrtc_duplex.audio import SAMPLE_RATE, Pcm
from webrtc_duplex.media import splice


def bend(pcm: Pcm) -> int:
    return int(np.abs(np.diff(pcm.astype(np.int32), 2)).max())


@pytest.mark.parametrize("hz", [80, 130, 220, 390])
def test_a_vowel_loses_or_gains_whole_periods(hz: float) -> None:
    pcm = wire.sine(0.095, hz)
    found = splice.find_alike(pcm, splice.SHORTEST_LAG, splice.LONGEST_LAG)
    assert found is not None and found.likeness > 0.98
    period = SAMPLE_RATE / hz
    assert abs(found.lag / period - round(found.lag / period)) < 0.05
    for changed, samples in (
        (splice.shorten(pcm, found), len(pcm) - found.lag),
        (splice.lengthen(pcm, found), len(pcm) + found.lag),
    ):
        assert len(changed) == samples
        assert bend(changed) <= bend(pcm) + 10


def test_of_places_equally_alike_the_furthest_is_taken() -> None:
    found = splice.find_alike(wire.sine(0.1, 390), splice.SHORTEST_LAG, splice.LONGEST_LAG)
    assert found is not None and found.lag > splice.LONGEST_LAG - SAMPLE_RATE / 390


def test_silence_is_found_between_sounds() -> None:
    pcm = np.concatenate([wire.sine(0.05), np.zeros(2400, np.int16), wire.sine(0.05)])
    found = splice.find_quiet(pcm, 1200)
    assert found is not None and found.lag == 1200
    assert np.array_equal(splice.shorten(pcm, found), np.delete(pcm, np.s_[1200:2400]))


def test_where_all_is_loud_no_silence_is_found() -> None:
    assert splice.find_quiet(wire.sine(0.1), 240) is None


def test_too_little_sound_is_not_spliced() -> None:
    assert splice.find_alike(wire.sine(0.01), splice.SHORTEST_LAG, splice.LONGEST_LAG) is None
    assert splice.find_quiet(np.zeros(100, np.int16), 480) is None
