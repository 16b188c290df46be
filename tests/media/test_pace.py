"""When nearly every frame of an engine is there."""

import pytest

from webrtc_duplex.media.pace import Pace


def test_before_anything_has_come_a_frame_waits_for_nothing() -> None:
    assert Pace().usual_s == 0.0


def test_nearly_every_frame_is_there_by_then_and_a_rare_stall_does_not_count() -> None:
    pace = Pace()
    for n in range(256):
        pace.note(0.5 if n == 100 else 0.03 + 0.001 * (n % 20))
    assert pace.usual_s == pytest.approx(0.049)


def test_what_was_20_s_ago_is_forgotten() -> None:
    pace = Pace()
    for delay_s in [0.06] * 300 + [0.03] * 256:
        pace.note(delay_s)
    assert pace.usual_s == 0.03
