"""What the engine measures of itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webrtc_duplex.engine.load import ChunkCost, Cost, Tally


def test_the_first_piece_ever_is_one_column_and_then_pieces_double() -> None:
    cost, pieces = ChunkCost(), []
    left = 100
    while left:
        pieces.append(cost.fitting(10.0, left))
        cost.learn(pieces[-1], 0.001 * pieces[-1])
        left -= pieces[-1]
    assert pieces == [1, 2, 4, 8, 16, 32, 37]


def test_a_piece_takes_no_more_than_the_gap() -> None:
    cost = ChunkCost()
    for size in (1, 2, 4, 8, 16):
        cost.learn(size, 0.004 + 0.001 * size)
    assert cost.fitting(0.013, 100) == 8
    assert cost.fitting(0.0049, 100) == 0
    assert cost.fitting(-1.0, 100) == 0


def test_however_long_a_prompt_and_a_gap_are_a_piece_has_at_most_256_columns() -> None:
    cost = ChunkCost()
    for bits in range(12):
        cost.learn(1 << bits, 1e-6)
    assert cost.fitting(0.25, 3000) == 256
    assert cost.fitting(0.25, 200) == 200


def test_an_estimate_rises_at_once_and_falls_slowly_and_with_time() -> None:
    cost = Cost()
    cost.learn(0.010)
    cost.learn(0.030)
    assert cost.seconds == pytest.approx(0.030)
    cost.learn(0.010)
    assert cost.seconds == pytest.approx(0.026)
    for _ in range(69):
        cost.age()
    assert cost.seconds == pytest.approx(0.013, rel=0.01)


@given(columns_left=st.integers(1, 5000), gap_s=st.floats(0, 1), fixed_s=st.floats(0, 0.02), each_s=st.floats(0, 0.01))
def test_a_piece_that_fits_is_never_above_the_gap_where_its_size_was_measured(
    columns_left: int, gap_s: float, fixed_s: float, each_s: float
) -> None:
    cost = ChunkCost()
    for bits in range(9):
        cost.learn(1 << bits, fixed_s + each_s * (1 << bits))
    columns = cost.fitting(gap_s, columns_left)
    assert 0 <= columns <= columns_left
    assert columns == 0 or min(fixed_s + each_s * columns, Cost.MOST_S) <= gap_s + 1e-12


def test_a_histogram_counts_a_value_under_the_first_bound_it_does_not_exceed() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5, 9.0):
        tally.add(value)
    histogram = tally.snapshot()
    assert histogram.counts == (2, 1, 2) and histogram.total == pytest.approx(14.5)
