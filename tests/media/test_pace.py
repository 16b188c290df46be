"""When nearly every frame of an engine is there."""

import pytest

from webrtc_duplex.audio import FRAME_S
from webrtc_duplex.media.pace import Pace


def note(pace: Pace, delays_s: list[float], begin: float = 0.0) -> None:
    """A frame a tick."""
    for n, delay_s in enumerate(delays_s):
        tick_at = begin + n * FRAME_S
        pace.note(tick_at, tick_at + delay_s - 0.001, tick_at + delay_s)


def test_before_anything_has_come_a_frame_waits_for_nothing() -> None:
    assert Pace().usual_s == 0.0


def test_nearly_every_frame_is_there_by_then_and_a_rare_stall_does_not_count() -> None:
    pace = Pace()
    note(pace, [0.5 if n == 100 else 0.03 + 0.001 * (n % 20) for n in range(256)])
    assert pace.usual_s == pytest.approx(0.049)


def test_what_was_20_s_ago_is_forgotten() -> None:
    pace = Pace()
    note(pace, [0.06] * 300 + [0.03] * 256)
    assert pace.usual_s == pytest.approx(0.03)


def test_who_calls_after_a_quiet_hour_does_not_wait_for_what_was_slow_before_it() -> None:
    pace = Pace()
    note(pace, [0.06] * 256)
    note(pace, [0.03], begin=3600.0)
    assert pace.usual_s == pytest.approx(0.03)


def test_frames_do_not_wait_for_what_held_up_this_process_itself() -> None:
    pace = Pace()
    for n in range(256):
        pace.note(n * FRAME_S, n * FRAME_S + 0.02, n * FRAME_S + (0.06 if n % 10 == 0 else 0.021))
    assert pace.usual_s == pytest.approx(0.025)
