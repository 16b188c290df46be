"""Who is next, and how long that will take."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from webrtc_duplex.server.line import CALLS_REMEMBERED, LIKELY_CALL_S, LONGEST_WAIT_S, Line, Turnover


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as it:
        yield it


def test_who_came_first_is_next(stack: ExitStack) -> None:
    line = Line()
    for call in ("one", "two", "three"):
        stack.enter_context(line.place(call))
        line.see(call, True)
    assert [line.position(call) for call in ("one", "two", "three")] == [1, 2, 3]
    assert len(line) == 3


def test_who_is_not_there_stands_in_nobodys_way_and_keeps_the_place(stack: ExitStack) -> None:
    line = Line()
    for call in ("one", "two"):
        stack.enter_context(line.place(call))
    line.see("two", True)
    assert (len(line), line.position("two")) == (1, 1)
    line.see("one", True)
    assert (line.position("one"), line.position("two")) == (1, 2)


def test_who_leaves_is_forgotten(stack: ExitStack) -> None:
    line = Line()
    with line.place("one"):
        line.see("one", True)
        stack.enter_context(line.place("two"))
        line.see("two", True)
    assert (len(line), line.position("two")) == (1, 1)


def have_lasted(turnover: Turnover, clock: Clock, seconds: float, calls: int) -> None:
    for number in range(calls):
        with turnover.call(f"call {number}"):
            clock.now += seconds


def test_before_any_call_has_ended_one_of_a_likely_length_is_assumed() -> None:
    assert Turnover(None, Clock()).wait_s(1, rows=4) == LIKELY_CALL_S / 4


def test_the_longer_calls_last_and_the_fewer_rows_there_are_the_longer_is_the_wait() -> None:
    clock = Clock()
    turnover = Turnover(None, clock)
    have_lasted(turnover, clock, 200.0, CALLS_REMEMBERED)
    assert turnover.wait_s(1, rows=4) == pytest.approx(200 / 4, rel=0.02)
    assert turnover.wait_s(1, rows=64) == pytest.approx(200 / 64, rel=0.02)
    assert turnover.wait_s(3, rows=64) == pytest.approx(3 * 200 / 64, rel=0.02)


def test_old_calls_are_forgotten() -> None:
    clock = Clock()
    turnover = Turnover(None, clock)
    have_lasted(turnover, clock, 1000.0, 10)
    have_lasted(turnover, clock, 8.0, CALLS_REMEMBERED)
    assert turnover.wait_s(1, rows=1) == pytest.approx(8.8, abs=0.1)


def test_calls_that_run_long_make_the_wait_longer(stack: ExitStack) -> None:
    clock = Clock()
    turnover = Turnover(None, clock)
    for name in ("a", "b"):
        stack.enter_context(turnover.call(name))
    clock.now += 30
    assert turnover.wait_s(1, rows=2) == (LIKELY_CALL_S + 60) / 2


def test_the_longest_duration_bounds_the_wait(stack: ExitStack) -> None:
    clock = Clock()
    turnover = Turnover(100.0, clock)
    stack.enter_context(turnover.call("older"))
    clock.now += 70
    stack.enter_context(turnover.call("younger"))
    clock.now += 20
    assert turnover.wait_s(1, rows=2) == 10
    assert turnover.wait_s(2, rows=2) == 80


@pytest.mark.parametrize(("lasted_s", "rows", "expected_s"), [(0.1, 1000, 1.0), (10_000.0, 1, LONGEST_WAIT_S)])
def test_a_wait_is_never_less_than_a_second_nor_longer_than_two_minutes(
    lasted_s: float, rows: int, expected_s: float
) -> None:
    clock = Clock()
    turnover = Turnover(None, clock)
    have_lasted(turnover, clock, lasted_s, 5)
    assert turnover.wait_s(1, rows) == expected_s
