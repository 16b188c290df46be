"""Who is served when, on a clock that the test turns."""

from collections.abc import Callable
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.scheduling import HERE, ORIGIN, Desk
from webrtc_duplex.audio import FRAME_S
from webrtc_duplex.engine.load import Strain
from webrtc_duplex.engine.scheduler import LIVE_LEAD_S, Begin, Joined, Left, Prefill, Wait
from webrtc_duplex.messages import (
    Close,
    Ended,
    Hold,
    Lease,
    Leased,
    Live,
    Open,
    Prompt,
    Ready,
    Refused,
    Request,
    Start,
    Stats,
    Stepped,
    Update,
)
from webrtc_duplex.settings import EngineSettings

LONG = Prompt(text="x" * 150)


# ---- ticks


def test_every_live_row_is_stepped_at_every_tick() -> None:
    desk = Desk(4, step_s=0.03)
    leases = {desk.live(call) for call in "abcd"}
    desk.run(0.2)
    desk.steps.clear()
    desk.run(8.0)
    assert len(desk.steps) == 100
    assert all(set(step.leases) == leases and step.skipped == 0 for step in desk.steps)


def test_for_an_hour_ticks_are_80_ms_apart_and_do_not_drift() -> None:
    desk = Desk(1, step_s=0.0333)
    desk.live("a")
    desk.run(3600.0)
    assert [step.tick_at for step in desk.steps[:3]] == pytest.approx([ORIGIN, ORIGIN + 0.08, ORIGIN + 0.16])
    assert desk.steps[-1].tick_at == pytest.approx(ORIGIN + (len(desk.steps) - 1) * FRAME_S)
    assert max(step.began_at - step.tick_at for step in desk.steps) < 1e-6


def test_a_late_step_skips_ticks_and_never_bursts() -> None:
    desk = Desk(1)
    lease = desk.live("a")
    desk.run(0.5)
    desk.step_s = 0.35  # over four ticks and a bit
    stalled = desk.tick()
    desk.step_s = 0.01
    after, next_one = desk.tick(), desk.tick()
    assert after.skipped == 3
    assert after.tick_at == pytest.approx(stalled.tick_at + 4 * FRAME_S)
    assert after.positions[0] == stalled.positions[0] + 4
    assert next_one.tick_at == pytest.approx(after.tick_at + FRAME_S) and next_one.skipped == 0
    assert [one.position for one in desk.outputs(lease)][-3:] == [stalled.positions[0] + n for n in (0, 4, 5)]


def test_there_are_never_more_steps_than_ticks_however_long_steps_take() -> None:
    desk = Desk(1)
    desk.live("a")
    for step_s in (0.01, 0.2, 0.081, 0.079, 0.16, 0.5, 0.0, 0.08, 0.24):
        desk.step_s = step_s
        desk.tick()
        desk.tick()
    ticks = [step.tick_at for step in desk.steps]
    assert all(later - earlier > FRAME_S - 1e-6 for earlier, later in zip(ticks, ticks[1:], strict=False))
    assert all(step.began_at >= step.tick_at - 1e-5 for step in desk.steps)


def test_rows_are_spread_evenly_over_the_phases_and_each_is_stepped_at_its_own() -> None:
    desk = Desk(8, EngineSettings(phases=4))
    for call in "abcdef":
        desk.live(call)
    desk.run(0.2)
    frame = [desk.tick() for _ in range(4)]
    assert sorted(len(step.leases) for step in frame) == [1, 1, 2, 2]
    assert sorted(round((step.tick_at - ORIGIN) / 0.02) % 4 for step in frame) == [0, 1, 2, 3]


def test_a_late_step_does_not_make_another_phase_skip() -> None:
    desk = Desk(4, EngineSettings(phases=4), step_s=0.019)
    for call in "abcd":
        desk.live(call)
    desk.run(1.0)
    desk.step_s = 0.05
    desk.tick()
    desk.step_s = 0.015
    desk.run(0.4)
    assert all(step.skipped == 0 for step in desk.steps)


def test_a_tick_without_callers_is_a_heartbeat_to_every_server() -> None:
    desk = Desk(1)
    desk.tell(Joined(), connection=2)
    desk.run(1.0)
    beats = [connection for connection, event in desk.events if isinstance(event, Stepped)]
    assert beats.count(HERE) == beats.count(2) == 13


# ---- a row's life


def test_the_prompt_is_prefilled_before_the_row_is_ready() -> None:
    desk = Desk(1)
    desk.column_s = 0.001
    lease = desk.open("a", LONG)
    assert sum(piece.columns for piece in desk.pieces) == 150
    assert desk.last(Ready).lease == lease
    assert desk.last(Ready).prefill_s == pytest.approx(0.150)


def test_a_row_goes_live_at_its_next_tick_with_time_left_for_the_first_frame() -> None:
    desk = Desk(1)
    desk.clock.now = ORIGIN + 10 * FRAME_S - LIVE_LEAD_S / 2
    desk.live("a")
    live = desk.last(Live)
    assert live.position == 0 and live.tick_at == pytest.approx(ORIGIN + 11 * FRAME_S)
    desk.run(0.2)
    first = next(step for step in desk.steps if step.leases)
    assert first.tick_at == pytest.approx(live.tick_at) and first.positions == (0,)


def test_a_start_before_the_prompt_is_in_is_remembered() -> None:
    desk = Desk(1)
    desk.tell(Open("a", LONG))
    desk.do(desk.until(Begin))
    assert desk.tell(Start(desk.last(Leased).lease)) == []
    desk.settle()
    assert desk.last(Live).lease == desk.last(Leased).lease


def test_a_repeated_start_changes_nothing() -> None:
    desk = Desk(1)
    lease = desk.live("a")
    assert desk.tell(Start(lease)) == []
    assert len(desk.of(Live)) == 1


def test_a_held_row_is_not_stepped_and_goes_on_at_its_next_position() -> None:
    desk = Desk(2)
    held, other = desk.live("a"), desk.live("b")
    desk.run(1.0)
    desk.tell(Hold(held))
    last = desk.outputs(held)[-1].position
    desk.run(5.0)
    assert desk.outputs(held)[-1].position == last
    assert all(other in step.leases for step in desk.steps[-20:])
    desk.tell(Start(held))
    assert desk.last(Live).position == last + 1
    desk.run(0.2)
    assert desk.outputs(held)[-1].position > last


def test_a_row_held_before_its_first_tick_begins_at_position_0_when_it_is_resumed() -> None:
    desk = Desk(1)
    lease = desk.live("a")
    desk.tell(Hold(lease), Start(lease))
    assert desk.last(Live).position == 0


def test_a_held_row_is_free_after_the_grace_of_10_s() -> None:
    desk = Desk(1)
    lease = desk.live("a")
    desk.run(1.0)
    desk.tell(Hold(lease))
    desk.run(9.9)
    assert not desk.of(Ended)
    desk.run(0.2)
    assert desk.last(Ended).lease == lease and desk.last(Ended).reason == "media_timeout"
    assert desk.last(Stepped).free_rows == 1


def test_where_resume_is_off_a_held_row_is_free_at_once() -> None:
    desk = Desk(1, EngineSettings(resume_grace_s=0))
    lease = desk.live("a")
    (ended,) = desk.tell(Hold(lease))
    assert isinstance(ended, Ended) and ended.reason == "media_timeout"


@pytest.mark.parametrize("prompt", [Prompt(), LONG])
def test_a_call_that_never_starts_is_ended_after_15_s(prompt: Prompt) -> None:
    desk = Desk(1)
    lease = desk.open("a", prompt)
    desk.run(14.8)
    assert not desk.of(Ended)
    desk.run(0.3)
    assert desk.last(Ended).lease == lease and desk.last(Ended).reason == "connect_timeout"
    assert desk.last(Stepped).free_rows == 1


def test_a_connection_that_closes_frees_its_leases_and_no_others() -> None:
    desk = Desk(3)
    desk.tell(Joined(), connection=2)
    mine = desk.live("a"), desk.live("b")
    theirs = desk.live("a", connection=2)
    desk.tell(Left())
    desk.run(0.2)
    assert desk.steps[-1].leases == (theirs,)
    assert desk.last(Stepped).free_rows == 2
    assert all(not desk.tell(Start(lease)) for lease in mine)


def test_a_lease_obeys_only_the_connection_that_holds_it() -> None:
    desk = Desk(1)
    desk.tell(Joined(), connection=2)
    lease = desk.live("a")
    desk.tell(Close(lease), connection=2)
    desk.run(0.2)
    assert desk.steps[-1].leases == (lease,)


def test_what_a_connection_said_before_it_went_leases_nothing_afterwards() -> None:
    desk = Desk(1)
    desk.tell(Left())
    assert desk.tell(Open("a", Prompt())) == []
    desk.run(0.2)
    assert not desk.begins


# ---- prompts


def test_an_update_before_the_first_step_prefills_again() -> None:
    desk = Desk(1)
    lease = desk.open("a", LONG)
    desk.pieces.clear()
    desk.tell(Update(lease, Prompt(text="abc")))
    desk.settle()
    assert [type(event) for _, event in desk.events if isinstance(event, Leased | Ready)] == [Leased, Ready] * 2
    assert [event.lease for event in desk.of(Leased)] == [lease, lease]
    assert sum(piece.columns for piece in desk.pieces) == 3


def test_an_update_after_the_first_step_is_refused_and_the_call_goes_on() -> None:
    desk = Desk(1)
    lease = desk.live("a")
    desk.run(0.2)
    (refused,) = desk.tell(Update(lease, LONG))
    assert isinstance(refused, Refused) and refused.code == "cannot_update"
    assert desk.tick().leases == (lease,)


def test_an_update_to_an_unknown_voice_leaves_the_prompt_as_it_was() -> None:
    desk = Desk(1)
    lease = desk.open("a", LONG)
    desk.tell(Update(lease, Prompt(voice="nobody")))
    assert desk.tell(Start(lease)) == [], "it is not known yet which prompt it is"
    desk.settle()
    assert desk.last(Refused).code == "unknown_voice"
    assert desk.last(Live).lease == lease


def test_of_two_updates_the_newer_one_is_begun() -> None:
    desk = Desk(1)
    lease = desk.open("a")
    desk.tell(Update(lease, Prompt(text="older")), Update(lease, Prompt(text="new")))
    desk.settle()
    assert [begin.prompt.text for begin in desk.begins] == [None, "new"]


def test_prompts_are_prefilled_the_oldest_first() -> None:
    desk = Desk(3)
    desk.tell(*(Open(call, LONG) for call in "abc"))
    desk.settle()
    order = [piece.lease.row for piece in desk.pieces]
    assert order == sorted(order) and set(order) == {0, 1, 2}


def test_work_on_prompts_never_makes_a_live_row_late() -> None:
    desk = Desk(3, step_s=0.05)
    desk.column_s = 0.003
    desk.live("a")
    desk.run(1.0)
    desk.tell(Open("b", LONG), Open("c", LONG))
    desk.run(3.0)
    assert len(desk.of(Ready)) == 3
    assert max(step.began_at - step.tick_at for step in desk.steps) < 1e-6
    assert max(piece.columns for piece in desk.pieces) == 8, "0.027 s are left of each tick, with a margin"


def test_nobody_being_live_a_prompt_is_prefilled_in_few_pieces() -> None:
    desk = Desk(1)
    desk.column_s = 0.001
    desk.open("a", LONG)
    desk.tell(Close(desk.last(Leased).lease))
    desk.pieces.clear()
    desk.open("b", LONG)
    assert [piece.columns for piece in desk.pieces] == [128, 22]


def test_one_slow_piece_is_not_held_against_prompts_for_ever() -> None:
    desk = Desk(2, step_s=0.02)
    desk.live("a")
    desk.run(0.5)
    desk.tell(Open("b", LONG))
    desk.column_s = 0.5
    desk.do(desk.until(Prefill))
    desk.column_s = 0.001
    desk.run(8.0)
    assert sum(piece.columns for piece in desk.pieces) == 150


def test_one_slow_begin_is_not_held_against_callers_for_ever() -> None:
    desk = Desk(3, step_s=0.02)
    desk.live("a")
    desk.tell(Open("b", Prompt()))
    begin = desk.until(Begin)
    desk.clock.advance(1.0)
    desk.scheduler.begun(begin, 0, desk.clock.now)
    desk.tell(Open("c", Prompt()))
    desk.run(4.0)
    assert desk.last(Leased).call == "c"


# ---- capacity


def test_beyond_the_rows_an_open_is_refused_without_any_work_and_the_others_go_on() -> None:
    desk = Desk(2)
    leases = desk.live("a"), desk.live("b")
    begins = len(desk.begins)
    (refused,) = desk.tell(Open("c", Prompt()))
    assert isinstance(refused, Refused)
    assert refused.error == "CapacityError" and refused.status == 503
    desk.run(0.3)
    assert len(desk.begins) == begins and desk.steps[-1].leases == leases
    desk.tell(Close(leases[0]))
    heir = desk.open("c")
    assert heir == Lease(leases[0].row, leases[0].epoch + 1)


def test_a_refused_prompt_gives_its_row_back_once() -> None:
    desk = Desk(1)
    desk.tell(Open("a", Prompt(voice="nobody")))
    desk.settle()
    assert desk.last(Refused).code == "unknown_voice" and desk.last(Refused).call == "a"
    desk.tick()
    assert desk.last(Stepped).free_rows == 1
    desk.live("b")


def test_a_connection_that_closes_while_its_prompt_is_begun_gives_its_row_back_once() -> None:
    desk = Desk(1)
    desk.tell(Joined(), connection=2)
    desk.tell(Open("a", Prompt()))
    action = desk.until(Begin)
    desk.tell(Left())
    desk.open("b", connection=2)
    assert desk.scheduler.begun(action, 0, desk.clock.now) == []
    desk.run(0.2)
    assert desk.last(Stepped).free_rows == 0
    assert desk.scheduler.stats().stale == 1


# ---- the epoch fence


def test_output_of_a_closed_lease_is_dropped() -> None:
    desk = Desk(2)
    closing, other = desk.live("a"), desk.live("b")
    desk.run(0.3)
    said = len(desk.outputs(closing)), len(desk.outputs(other))
    desk.during_step = lambda: close_once(desk, closing)
    desk.tick()
    assert (len(desk.outputs(closing)), len(desk.outputs(other))) == (said[0], said[1] + 1)


def close_once(desk: Desk, lease: Lease) -> None:
    desk.during_step = lambda: None
    desk.tell(Close(lease))


def test_no_output_of_an_old_owner_reaches_the_new_owner_of_its_row() -> None:
    desk = Desk(1)
    old = desk.live("a")
    desk.run(0.3)
    desk.during_step = lambda: close_and_reopen(desk, old)
    desk.tick()
    desk.run(0.2)
    assert desk.last(Leased).lease == Lease(old.row, old.epoch + 1)
    assert desk.outputs(desk.last(Leased).lease) == []


def close_and_reopen(desk: Desk, lease: Lease) -> None:
    desk.during_step = lambda: None
    desk.tell(Close(lease), Open("b", Prompt()))


@pytest.mark.parametrize("request_of", [Start, Hold, Close, lambda lease: Update(lease, LONG)])
def test_a_stale_lease_moves_nothing(request_of: Callable[[Lease], Request]) -> None:
    desk = Desk(1)
    old = desk.live("a")
    desk.tell(Close(old))
    new = desk.open("b")
    assert desk.tell(request_of(old)) == []
    desk.run(0.3)
    assert all(not step.leases for step in desk.steps[-3:]), "the new call was not started"
    assert len(desk.begins) == 2 and desk.scheduler.stats().stale == 1
    desk.tell(Start(new))
    desk.run(0.3)
    assert desk.steps[-1].leases == (new,)


def test_a_late_piece_of_prefill_is_nothing_to_the_new_owner() -> None:
    desk = Desk(1)
    desk.tell(Open("a", LONG))
    piece = desk.until(Prefill)
    desk.tell(Close(piece.lease), Open("b", LONG))
    desk.act()
    assert desk.scheduler.prefilled(piece, 0, desk.clock.now) == []
    assert not desk.of(Ready)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("order", list(permutations(["close the old", "open the new"])))
@pytest.mark.parametrize("work_between", [False, True])
def test_of_an_old_and_a_new_lease_of_one_call_only_the_newest_is_stepped(
    rows: int, order: tuple[str, str], work_between: bool
) -> None:
    desk = Desk(rows)
    old = desk.live("a")
    desk.run(0.3)
    messages: dict[str, Request] = {"close the old": Close(old), "open the new": Open("a", Prompt())}
    for name in order:
        desk.tell(messages[name])
        if work_between:
            desk.settle()
    desk.settle()
    new = desk.last(Leased).lease
    desk.tell(Start(new))
    desk.run(0.3)
    assert new != old and desk.steps[-1].leases == (new,)
    assert desk.last(Stepped).free_rows == rows - 1
    assert len(desk.begins) == 2
    assert [ended.reason for ended in desk.of(Ended)] == (["superseded"] if order[0] == "open the new" else [])


def test_the_same_call_id_from_two_servers_is_two_calls() -> None:
    desk = Desk(2)
    desk.tell(Joined(), connection=2)
    mine, theirs = desk.live("a"), desk.live("a", connection=2)
    desk.run(0.2)
    assert set(desk.steps[-1].leases) == {mine, theirs}


# ---- faults and overload


def test_a_rows_numbers_that_are_not_finite_end_that_call_only() -> None:
    desk = Desk(2)
    sick, well = desk.live("a"), desk.live("b")
    desk.run(0.3)
    desk.faulty = {sick.row}
    desk.tick()
    assert desk.last(Ended).lease == sick and desk.last(Ended).reason == "server_error"
    assert desk.last(Stepped).outputs[0].row == well.row and len(desk.last(Stepped).outputs) == 1
    desk.faulty = set()
    heir = desk.live("c")
    assert heir == Lease(sick.row, sick.epoch + 1)
    desk.run(0.3)
    assert set(desk.steps[-1].leases) == {well, heir}


def test_sustained_lateness_closes_admission_with_the_reason_and_reopens_it_when_it_is_over() -> None:
    desk = Desk(2, step_s=0.02)
    desk.live("a")
    desk.run(5.0)
    assert desk.last(Stepped).admitting
    desk.step_s = 0.1
    desk.run(3.0)
    assert not desk.last(Stepped).admitting
    assert "took 100 ms of 80" in (desk.last(Stepped).closed_because or "")
    (refused,) = desk.tell(Open("b", Prompt()))
    assert isinstance(refused, Refused) and refused.code == "overloaded" and "took 100 ms" in refused.message
    assert refused.retry_after_s == Strain.LASTS_S
    desk.step_s = 0.02
    desk.run(1.0)
    assert not desk.last(Stepped).admitting, "it does not flutter"
    desk.run(12.0)
    assert desk.last(Stepped).admitting
    desk.open("b")


def test_one_late_step_does_not_close_admission() -> None:
    desk = Desk(1, step_s=0.02)
    desk.live("a")
    desk.run(2.0)
    desk.step_s = 0.5
    desk.tick()
    desk.step_s = 0.02
    desk.run(2.0)
    assert all(step.admitting for step in desk.of(Stepped))


def test_steps_that_leave_no_time_close_admission_before_they_are_late() -> None:
    desk = Desk(2, step_s=0.075)
    desk.live("a")
    desk.run(2.0)
    assert not desk.last(Stepped).admitting
    assert max(step.late_s for step in desk.of(Stepped)) < 1e-6


def test_overload_is_seen_with_sub_ticks_as_well() -> None:
    desk = Desk(4, EngineSettings(phases=4), step_s=0.019)
    for call in "abc":
        desk.live(call)
    desk.run(3.0)
    assert desk.last(Stepped).admitting, "3 phases of 19 ms"
    desk.live("d")
    desk.run(3.0)
    assert not desk.last(Stepped).admitting, "4 phases of 19 ms take 76 ms of 80"


def test_a_call_that_is_opened_again_keeps_its_place_while_admission_is_closed() -> None:
    desk = Desk(1, step_s=0.075)
    old = desk.live("a")
    desk.run(2.0)
    assert not desk.last(Stepped).admitting
    assert desk.open("a") == Lease(old.row, old.epoch + 1)


def test_what_is_counted_is_told_every_second() -> None:
    desk = Desk(2, step_s=0.012)
    desk.live("a")
    desk.live("b")
    desk.run(10.0)
    assert 9 <= len(desk.of(Stats)) <= 11
    stats = desk.scheduler.stats()
    assert stats.leases == 2 and sum(stats.step_s.counts) == sum(stats.batch.counts) > 120
    assert stats.step_s.total == pytest.approx(0.012 * sum(stats.step_s.counts))
    assert stats.batch.counts[1] == sum(stats.batch.counts), "all steps were of two rows"


# ---- any order

CALLS = "abc"
DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["open", "open", "close", "start", "start", "hold", "update", "stale", "act", "act", "leave"]),
        st.sampled_from(CALLS),
        st.integers(1, 2),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(deeds=DEEDS, rows=st.integers(1, 3), phases=st.integers(1, 3))
def test_in_any_order_of_deeds_rows_are_neither_lost_nor_shared(
    deeds: list[tuple[str, str, int]], rows: int, phases: int
) -> None:
    desk = Desk(rows, EngineSettings(phases=phases), step_s=0.01)
    desk.tell(Joined(), connection=2)
    leases: dict[tuple[int, str], list[Lease]] = {}
    for deed, call, connection in deeds:
        seen = len(desk.events)
        mine = leases.setdefault((connection, call), [])
        for request in requests(deed, call, mine):
            desk.tell(request, connection=connection)
        if deed == "act":
            desk.act()
        if deed == "leave":
            desk.tell(Left(), Joined(), connection=connection)
        for to, event in desk.events[seen:]:
            if isinstance(event, Leased) and event.lease not in leases.setdefault((to, event.call), []):
                leases[to, event.call].append(event.lease)
        check_rows(desk, rows)
    desk.tell(Left(), connection=1)
    desk.tell(Left(), connection=2)
    assert desk.scheduler.free_rows == rows


def requests(deed: str, call: str, leases: list[Lease]) -> list[Request]:
    """What a server might send of this call, of its newest lease or of an older one."""
    match deed, leases:
        case "open", _:
            return [Open(call, Prompt(text="text"))]
        case "close", [*_, lease]:
            return [Close(lease)]
        case "start", [*_, lease]:
            return [Start(lease)]
        case "hold", [*_, lease]:
            return [Hold(lease)]
        case "update", [*_, lease]:
            return [Update(lease, LONG)]
        case "stale", [lease, _, *_]:
            return [Start(lease), Hold(lease), Close(lease), Update(lease, LONG)]
    return []


def check_rows(desk: Desk, rows: int) -> None:
    assert 0 <= desk.scheduler.free_rows <= rows
    if desk.steps:
        stepped = [lease.row for lease in desk.steps[-1].leases]
        assert len(set(stepped)) == len(stepped) <= rows


@settings(max_examples=50, deadline=None)
@given(deeds=DEEDS)
def test_every_open_is_answered_once_and_no_output_is_of_an_ended_lease(deeds: list[tuple[str, str, int]]) -> None:
    desk = Desk(2)
    opened = 0
    for serial, (deed, _, _) in enumerate(deeds):
        if deed == "open":
            desk.tell(Open(f"call {serial}", Prompt()))
            opened += 1
        elif deed == "act":
            desk.act()
        elif desk.of(Leased):
            for request in requests(deed, "", [desk.last(Leased).lease]):
                desk.tell(request)
    desk.run(0.5)
    answered = [event.call for event in desk.of(Leased)] + [event.call for event in desk.of(Refused)]
    updates = sum(1 for deed, _, _ in deeds if deed == "update")
    assert len(set(answered)) == opened and opened <= len(answered) <= opened + updates
    ended: set[Lease] = set()
    for _, event in desk.events:
        if isinstance(event, Ended):
            ended.add(event.lease)
        if isinstance(event, Stepped):
            assert not ended & {Lease(output.row, output.epoch) for output in event.outputs}


def test_waiting_is_never_longer_than_until_the_next_tick() -> None:
    desk = Desk(1)
    desk.tick()
    action = desk.scheduler.next_action(desk.clock.now)
    assert isinstance(action, Wait) and action.until == pytest.approx(ORIGIN + FRAME_S)
