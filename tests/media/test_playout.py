"""What the agent says, on its schedule."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from tests.media import wire
from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES, FRAME_S, FRAME_SAMPLES, Pcm
from webrtc_duplex.media.playout import LOOK_S, PATIENCE_S, REST_AFTER_CHUNKS, REST_EVERY_CHUNKS, Playout, Slot

SILENCE: Pcm = np.zeros(FRAME_SAMPLES, np.int16)


def ramp(position: int) -> Pcm:
    return (np.arange(FRAME_SAMPLES) + 1000 + position).astype(np.int16)


def run(
    playout: Playout,
    frames: list[tuple[float, Pcm]],
    until: float,
    held_up: Callable[[float], float] = lambda due: due,
    steady_at: Callable[[int], float] = lambda n: -math.inf,
) -> list[tuple[float, Slot]]:
    """Push each frame when it comes and pop each slot when it is due; (when, slot) of all that was sent."""
    coming = list(reversed(list(enumerate(frames))))
    sent: list[tuple[float, Slot]] = []
    while True:
        frame_at = coming[-1][1][0] if coming else math.inf
        due = held_up(playout.next_due)
        if min(frame_at, due) > until:
            return sent
        if frame_at <= due:
            position, (now, frame) = coming.pop()
            playout.push(frame, position, now, steady_at(position))
        elif (slot := playout.pop(due)) is not None:
            sent.append((due, slot))


def every_tick(frames: list[Pcm], late: Callable[[int], float] = lambda n: 0.0) -> list[tuple[float, Pcm]]:
    return [(10.0 + FRAME_S * n + late(n), frame) for n, frame in enumerate(frames)]


def steady(n: int, until: int, late_s: float) -> float:
    """The engine is slow up to a frame, and quick from then on."""
    return 10.0 + FRAME_S * n + late_s * (n < until)


def held_up(at: int, by_s: float) -> Callable[[int], float]:
    """How late frames are of a server that stands still for a while before one of them."""
    return lambda n: max(0.0, by_s - FRAME_S * (n - at)) if n >= at else 0.0


def held_up_until(begin: float, by_s: float) -> Callable[[float], float]:
    """When what is due is done by a server that stands still for a while."""
    return lambda due: begin + by_s if begin <= due < begin + by_s else due


def timestamps(sent: list[tuple[float, Slot]]) -> list[int]:
    return [slot.timestamp for _, slot in sent]


def test_the_first_chunk_leaves_when_the_frame_arrives_and_the_rest_every_20_ms() -> None:
    sent = run(Playout(), every_tick([ramp(0)]), 10.075)
    assert [when for when, _ in sent] == pytest.approx([10.0, 10.02, 10.04, 10.06])
    assert np.array_equal(np.concatenate([slot.pcm for _, slot in sent])[60:], ramp(0)[60:])
    assert timestamps(sent) == [0, 480, 960, 1440]


def test_nothing_is_due_before_the_first_frame() -> None:
    assert Playout().next_due == math.inf


def test_a_slot_says_which_frame_it_is_of() -> None:
    playout = Playout()
    sent = run(playout, every_tick([ramp(0), ramp(1)]), 10.15)
    assert [slot.position for _, slot in sent] == [0] * 4 + [1] * 4
    assert playout.playing == 1


def test_steps_that_take_turns_being_late_neither_break_nor_shift_the_sound() -> None:
    playout = Playout()
    frames = every_tick([ramp(n) for n in range(100)], lambda n: 0.015 * (n % 3))
    sent = run(playout, frames, 17.95, steady_at=lambda n: 10.03 + FRAME_S * n)
    assert all(slot.position is not None for _, slot in sent)
    assert timestamps(sent) == list(range(0, 480 * len(sent), 480)) and len(sent) > 390
    assert np.all(np.diff([when for when, _ in sent]) == pytest.approx(CHUNK_S))
    assert playout.counters.underruns == 0 and playout.counters.waits == 0
    assert playout.lead_s == pytest.approx(0.03)


def test_in_a_voice_the_schedule_moves_by_three_milliseconds_a_frame() -> None:
    playout = Playout()
    frames = every_tick([ramp(n) for n in range(200)])
    sent = run(playout, frames, 25.99, steady_at=lambda n: 10 + FRAME_S * n + 0.015 * (50 <= n < 120))
    gaps = np.diff([when for when, _ in sent])
    leads = {slot.position: when - 10 - FRAME_S * (slot.position or 0) for when, slot in reversed(sent)}
    assert abs(gaps - CHUNK_S).max() == pytest.approx(0.003)
    assert [leads[n] for n in (49, 119, 199)] == pytest.approx([0.0, 0.015, 0.0])
    assert playout.counters.merged == 0


@pytest.mark.parametrize(("stall_s", "left_s"), [(0.03, 0.0), (0.06, 0.0), (0.1, 0.012)])
def test_a_voice_is_in_time_again_2_s_after_the_server_was_held_up(stall_s: float, left_s: float) -> None:
    playout = Playout()
    run(playout, every_tick([ramp(n) for n in range(60)], held_up(20, stall_s)), 10 + 20 * FRAME_S + stall_s + 2.05)
    assert playout.lead_s <= left_s + 1e-9


def test_a_frame_that_is_late_for_once_is_sent_at_once_and_moves_none_of_those_after_it() -> None:
    frames = every_tick([ramp(n) for n in range(30)], held_up(20, 0.03))
    sent = run(
        Playout(), frames, 10 + 30 * FRAME_S, held_up_until(10 + 20 * FRAME_S, 0.03), lambda n: 10.01 + FRAME_S * n
    )
    late = [when - 10.01 - CHUNK_S * n for n, (when, _) in enumerate(sent)]
    assert late[80:82] == pytest.approx([0.02, 0.0]) and late[:80] + late[82:] == pytest.approx([0.0] * 118)
    assert all(slot.position is not None for _, slot in sent)


def test_in_a_rest_the_schedule_moves_at_once() -> None:
    playout = Playout()
    frames = every_tick([ramp(0), *[SILENCE] * 20, ramp(21), ramp(22)])
    sent = run(playout, frames, 12, steady_at=lambda n: 10 + FRAME_S * n + 0.03 * (n > 10))
    assert [when for when, slot in sent if slot.marker] == pytest.approx([10.03 + 21 * FRAME_S])


def test_no_frame_waits_long_for_those_of_a_slow_engine() -> None:
    playout = Playout()
    playout.push(ramp(0), 0, 10.0, 11.0)
    assert playout.next_due == pytest.approx(10.06)


def test_a_voice_that_is_far_behind_is_hurried_by_merging_two_chunks_and_then_by_the_schedule_alone() -> None:
    playout = Playout()
    run(playout, every_tick([ramp(n) for n in range(160)], held_up(5, 0.1)), 22.7)
    assert playout.counters.merged == 1
    assert playout.lead_s < 0.001


def test_a_voice_is_not_hurried_because_all_frames_come_sooner_than_they_did() -> None:
    playout = Playout()
    steady_at = partial(steady, until=50, late_s=0.05)
    run(playout, every_tick([ramp(n) for n in range(160)]), 22.7, steady_at=steady_at)
    assert playout.counters.merged == 0 and playout.lead_s < 0.001


def test_a_pause_is_shortened_where_a_voice_would_be_hurried() -> None:
    playout = Playout()
    frames = [ramp(0), *[SILENCE] * 5]
    run(playout, every_tick(frames), 10.5, steady_at=partial(steady, until=2, late_s=0.05))
    assert playout.counters.merged == 2


def test_a_late_frame_is_waited_for_a_little() -> None:
    playout = Playout()
    playout.push(ramp(0), 0, 10.0)
    for n in range(4):
        playout.pop(10 + CHUNK_S * n)
    assert playout.pop(10.08) is None
    assert playout.next_due == pytest.approx(10.08 + PATIENCE_S)
    playout.push(ramp(1), 1, 10.085)
    assert playout.next_due == pytest.approx(10.085)
    slot = playout.pop(10.085)
    assert (
        slot is not None and slot.timestamp == 4 * CHUNK_SAMPLES and np.array_equal(slot.pcm, ramp(1)[:CHUNK_SAMPLES])
    )
    assert playout.counters.waits == 1


def test_a_server_that_was_held_up_looks_for_the_frame_before_it_is_silent() -> None:
    playout = Playout()
    run(playout, every_tick([ramp(0)]), 10.079)
    assert playout.pop(10.13) is None and playout.next_due == pytest.approx(10.13 + LOOK_S)
    playout.push(ramp(1), 1, 10.131, 10.08)
    slot = playout.pop(10.131)
    assert slot is not None and slot.position == 1 and playout.counters.underruns == 0


def test_a_server_that_was_held_up_looks_but_once() -> None:
    playout = Playout()
    run(playout, every_tick([ramp(0)]), 10.079)
    slots = [playout.pop(10.13), playout.pop(10.15)]
    assert slots[0] is None and slots[1] is not None and slots[1].position is None


def test_an_underrun_is_silence_that_fades_in_a_continuous_timeline() -> None:
    loud = [wire.sine(FRAME_S, 250)] * 2
    sent = run(Playout(), [(10.0, loud[0]), (10.24, loud[1])], 10.31)
    assert timestamps(sent) == list(range(0, 480 * len(sent), 480))
    positions = [slot.position for _, slot in sent]
    assert positions[:4] == [0] * 4 and positions[4] is None and positions[-1] == 1
    sound = np.concatenate([slot.pcm for _, slot in sent]).astype(np.int32)
    assert np.abs(np.diff(sound)).max() < 1000
    assert not sent[5][1].pcm.any()


def test_an_interruption_drops_what_has_not_left_and_keeps_the_timeline() -> None:
    playout = Playout()
    playout.push(wire.sine(FRAME_S, 250), 0, 10.0)
    first = playout.pop(10.0)
    assert playout.flush() == 3
    rest = run(playout, [(10.09, wire.sine(FRAME_S, 250))], 10.16)
    assert first is not None
    assert timestamps(rest) == list(range(480, 480 * (len(rest) + 1), 480))
    faded = rest[0][1].pcm
    assert np.abs(faded[:120]).max() > 2000 and abs(int(faded[-1])) < 10


def test_more_than_two_frames_are_not_kept() -> None:
    playout = Playout()
    for n in range(5):
        playout.push(ramp(n), n, 10.0)
    slot = playout.pop(10.0)
    assert slot is not None and slot.position == 3
    assert playout.counters.dropped == 12


def test_silence_is_sent_for_a_while_and_then_every_400_ms() -> None:
    playout = Playout()
    sent = run(playout, every_tick([ramp(0), *[SILENCE] * 60]), 10.0 + 61 * FRAME_S)
    quiet = timestamps(sent)[4:]
    assert quiet[:REST_AFTER_CHUNKS] == [480 * (4 + n) for n in range(REST_AFTER_CHUNKS)]
    assert set(np.diff(quiet[REST_AFTER_CHUNKS:])) == {REST_EVERY_CHUNKS * CHUNK_SAMPLES}
    assert playout.counters.rested > 200


def test_sound_after_a_rest_carries_the_marker_and_leaves_at_once() -> None:
    playout = Playout()
    sent = run(playout, every_tick([ramp(0), *[SILENCE] * 20, ramp(21), ramp(22)]), 10 + 23 * FRAME_S)
    marked = [(when, slot) for when, slot in sent if slot.marker]
    assert len(marked) == 1
    when, slot = marked[0]
    assert slot.position == 21 and when == pytest.approx(10 + 21 * FRAME_S)
    assert slot.timestamp == 21 * FRAME_SAMPLES


def test_the_position_that_plays_is_known_while_silence_rests() -> None:
    playout = Playout()
    run(playout, every_tick([SILENCE] * 30), 10 + 29.5 * FRAME_S)
    assert playout.resting and playout.playing == 29


def test_a_telephone_hears_something_in_every_slot() -> None:
    playout = Playout(continuous=True)
    playout.start(9.5)
    sent = run(playout, every_tick([ramp(0), *[SILENCE] * 30]), 15.0)
    assert np.diff(timestamps(sent)).tolist() == [480] * (len(sent) - 1)
    assert sent[0][0] == 9.5 and len(sent) == pytest.approx(5.5 / CHUNK_S, abs=2)
    assert not any(slot.marker for _, slot in sent)


def test_a_pacer_that_wakes_late_does_not_shift_the_schedule() -> None:
    def held_up(due: float) -> float:
        return due + 0.004

    sent = run(Playout(), every_tick([ramp(n) for n in range(50)]), 13.9, held_up)
    whens = np.array([when for when, _ in sent])
    assert whens[-1] == pytest.approx(10.004 + CHUNK_S * (len(whens) - 1), abs=0.005)


def test_a_server_held_up_for_long_lets_time_pass_instead_of_a_burst() -> None:
    playout = Playout()
    for n in range(2):
        playout.push(ramp(n), n, 10 + FRAME_S * n)
    playout.pop(10.0)
    assert playout.pop(10.5) is None and playout.counters.dropped == 7
    slot = playout.pop(playout.next_due)
    assert slot is not None and slot.timestamp == 25 * CHUNK_SAMPLES and not slot.pcm[-1]
    assert playout.next_due == pytest.approx(10.52)


def test_rtp_time_goes_on_while_nobody_paces() -> None:
    playout = Playout()
    playout.push(ramp(0), 0, 10.0)
    for n in range(4):
        playout.pop(10 + CHUNK_S * n)
    playout.push(ramp(25), 25, 12.0)
    slot = playout.pop(12.0)
    assert slot is not None and slot.position == 25
    assert slot.timestamp == pytest.approx(2.0 / CHUNK_S * CHUNK_SAMPLES, abs=CHUNK_SAMPLES)


def test_an_underrun_is_counted_where_it_breaks_a_voice_and_not_where_nobody_spoke() -> None:
    voice, silence = Playout(), Playout()
    run(voice, every_tick([ramp(0)]), 10.175)
    run(silence, every_tick([SILENCE]), 10.175)
    assert (voice.counters.underruns, silence.counters.underruns) == (5, 0)


def test_silence_after_an_interruption_is_no_underrun() -> None:
    playout = Playout()
    playout.push(ramp(0), 0, 10.0)
    playout.flush()
    run(playout, [], 10.2)
    assert playout.counters.underruns == 0


def test_silence_before_the_first_frame_is_no_underrun() -> None:
    playout = Playout(continuous=True)
    playout.start(9.0)
    run(playout, every_tick([ramp(0)]), 10.05)
    assert playout.counters.underruns == 0
