"""Who sits where."""

from itertools import product

import pytest

from webrtc_duplex.engine.rows import LIFE, Row, RowEvent, RowPool, RowState, Tenant
from webrtc_duplex.errors import CapacityError, StaleEpochError
from webrtc_duplex.messages import Lease, Prompt


def lease_a_row(pool: RowPool, call: str = "a") -> Row:
    return pool.open(Tenant(1, call), Prompt(), now=0.0, deadline=15.0)


def test_every_state_but_free_can_be_freed_and_no_free_row_can() -> None:
    freed = {state for (state, event) in LIFE if event is RowEvent.FREED}
    assert freed == set(RowState) - {RowState.FREE}
    assert {state for (state, event), to in LIFE.items() if to is RowState.FREE} == freed


@pytest.mark.parametrize("state, event", [pair for pair in product(RowState, RowEvent) if pair not in LIFE])
def test_what_is_not_in_the_table_is_no_transition(state: RowState, event: RowEvent) -> None:
    with pytest.raises(KeyError):
        Row(0, 0, Lease(0, 0), state=state).after(event)


def test_each_lease_of_a_row_is_of_the_next_epoch_and_starts_anew() -> None:
    pool = RowPool(1, phases=1)
    first = lease_a_row(pool)
    first.columns_left, first.position, first.wants_start, first.leased = 3, 70, True, True
    pool.free(first)
    second = lease_a_row(pool)
    assert (first.lease.epoch, second.lease.epoch) == (1, 2)
    assert (second.columns_left, second.position, second.wants_start, second.leased) == (0, 0, False, False)


def test_a_lease_of_an_earlier_epoch_is_stale() -> None:
    pool = RowPool(1, phases=1)
    row = lease_a_row(pool)
    old = row.lease
    assert pool.require(old) is row
    pool.free(row)
    with pytest.raises(StaleEpochError):
        pool.require(old)
    new = lease_a_row(pool)
    with pytest.raises(StaleEpochError):
        pool.require(old)
    assert pool.require(new.lease) is new
    with pytest.raises(StaleEpochError):
        pool.require(Lease(7, 1))


def test_when_all_rows_are_leased_the_refusal_names_their_number() -> None:
    pool = RowPool(2, phases=1)
    lease_a_row(pool), lease_a_row(pool)
    with pytest.raises(CapacityError, match="all 2 rows are leased"):
        lease_a_row(pool)


def test_the_row_that_was_free_the_longest_is_leased_first() -> None:
    pool = RowPool(3, phases=1)
    rows = [lease_a_row(pool) for _ in range(3)]
    for row in (rows[2], rows[0], rows[1]):
        pool.free(row)
    assert [lease_a_row(pool).index for _ in range(3)] == [2, 0, 1]


def test_rows_go_to_the_phase_with_the_fewest_calls() -> None:
    pool = RowPool(6, phases=3)
    rows = [lease_a_row(pool) for _ in range(6)]
    assert sorted(row.phase for row in rows[:3]) == [0, 1, 2]
    leaving = next(row for row in rows if row.phase == 1)
    pool.free(rows[0])
    pool.free(leaving)
    assert {lease_a_row(pool).phase, lease_a_row(pool).phase} == {rows[0].phase, 1}
