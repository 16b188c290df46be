"""What a caller heard, counted on timelines made by hand."""

import numpy as np
import pytest

from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES, Pcm
from webrtc_duplex.client.timeline import Heard, Unwrapper, count

VOICE: Pcm = np.tile(np.array([3000, -3000], np.int16), CHUNK_SAMPLES // 2)
SILENCE: Pcm = np.zeros(CHUNK_SAMPLES, np.int16)


def sounds(chunks: int, delay: float = 0.05, pcm: Pcm = VOICE) -> list[Heard]:
    """A perfect delivery: every packet `delay` after its place, on a clock that reads 100 at place 0."""
    return [Heard(100 + i * CHUNK_S + delay, i * CHUNK_S, pcm) for i in range(chunks)]


def test_a_perfect_delivery_has_no_deficit_and_no_gap() -> None:
    counted = count(sounds(60), 100.05, 10)
    assert (counted.due, counted.heard, counted.deficit, counted.gaps_s) == (10, 10, 0, ())
    assert counted.voiced_s == pytest.approx(0.8)


def test_silence_is_not_counted_as_voice() -> None:
    assert count(sounds(60, pcm=SILENCE), 100.05, 10).voiced_s == 0


def test_a_hole_in_a_voice_is_a_gap_and_costs_its_frame() -> None:
    heard = sounds(60)
    del heard[9:11]
    counted = count(heard, 100.05, 10)
    assert counted.deficit == 1
    assert counted.gaps_s == pytest.approx((0.04,))


def test_silence_that_was_not_sent_is_no_gap() -> None:
    heard = sounds(60)
    heard[8:12] = sounds(60, pcm=SILENCE)[8:9]
    counted = count(heard, 100.05, 10)
    assert (counted.deficit, counted.gaps_s) == (0, ())


def test_a_silence_in_which_nothing_at_all_is_sent_for_long_is_lost() -> None:
    heard = sounds(200, pcm=SILENCE)
    del heard[10:40]
    assert count(heard, 100.05, 40).deficit == 8


def test_voice_that_comes_late_stalls_a_player_once() -> None:
    heard = sounds(60)
    heard[12:] = [Heard(sound.at + 0.1, sound.place, VOICE) for sound in heard[12:]]
    counted = count(heard, 100.05, 10)
    assert counted.deficit == 0
    assert counted.gaps_s == pytest.approx((0.04,))
    assert counted.latest_s == pytest.approx(0.1)


def test_a_player_that_has_stalled_comes_back_and_can_be_stalled_again() -> None:
    heard = sounds(200)
    for late in (20, 150):
        heard[late] = Heard(heard[late].at + 0.1, heard[late].place, VOICE)
    assert count(heard, 100.05, 45).gaps_s == pytest.approx((0.04, 0.04))


def test_late_silence_is_no_gap() -> None:
    heard = sounds(60, pcm=SILENCE)
    heard[12] = Heard(heard[12].at + 0.3, heard[12].place, SILENCE)
    assert count(heard, 100.05, 10).gaps_s == ()


def test_what_comes_after_the_tail_was_not_heard() -> None:
    heard = sounds(60)
    heard[36:] = [Heard(sound.at + 1, sound.place, VOICE) for sound in heard[36:]]
    assert count(heard, 100.05, 10).deficit == 1


def test_an_agent_that_stops_owes_the_rest() -> None:
    assert count(sounds(20), 100.05, 10).deficit == 5


def test_who_heard_nothing_is_owed_everything() -> None:
    assert count([], 100, 10).deficit == 10


def test_a_gap_while_the_machine_stalled_is_excused() -> None:
    heard = sounds(60)
    del heard[9:11]
    counted = count(heard, 100.05, 10, excused=[(100.05 + 8 * CHUNK_S, 100.05 + 12 * CHUNK_S)])
    assert (counted.deficit, counted.gaps_s, counted.excused) == (0, (), 1)


def test_packets_out_of_order_are_laid_in_order() -> None:
    heard = sounds(60)
    heard[10], heard[11] = heard[11], heard[10]
    assert count(heard, 100.05, 10).deficit == 0


def test_timestamps_go_on_over_their_wrap_and_back() -> None:
    unwrapper = Unwrapper(48_000)
    stamps = [2**32 - 960, 0, 960, 0]
    assert [unwrapper.place(stamp) for stamp in stamps] == pytest.approx([0, 0.02, 0.04, 0.02])
