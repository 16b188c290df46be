"""As many rows as a machine can serve in time."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine_doubles import EchoDouble, FakeClock
from webrtc_duplex.audio import Pcm
from webrtc_duplex.engine.capacity import check_rows, load_for_most_rows
from webrtc_duplex.errors import CheckpointError


class Heavy(EchoDouble):
    """A model whose step takes 9 ms, and 2 ms more a row."""

    def step(self, rows: NDArray[np.int64], pcm: Pcm) -> tuple[Pcm, NDArray[np.int64], NDArray[np.bool_]]:
        self.step_s = 0.009 + 0.002 * len(rows)
        return super().step(rows, pcm)


def test_the_largest_batch_that_leaves_a_margin_is_taken() -> None:
    clock, loads = FakeClock(), list[int]()

    def load(rows: int) -> EchoDouble:
        loads.append(rows)
        return Heavy(rows, clock)

    runner = load_for_most_rows(load, most_rows=100, phases=1, clock=clock)
    assert runner.rows == 16, "41 ms of the 56 that a step may take; 24 rows would take 57"
    assert loads == [96, 16]


def test_memory_bounds_the_rows() -> None:
    clock = FakeClock()
    assert load_for_most_rows(lambda rows: Heavy(rows, clock), most_rows=7, phases=1, clock=clock).rows == 6


def test_the_steps_of_all_phases_share_a_frame() -> None:
    clock = FakeClock()
    assert load_for_most_rows(lambda rows: Heavy(rows, clock), most_rows=100, phases=4, clock=clock).rows == 8


def test_a_row_that_was_measured_with_is_fresh_afterwards() -> None:
    clock = FakeClock()
    runner = Heavy(4, clock)
    assert load_for_most_rows(lambda rows: runner, most_rows=4, phases=1, clock=clock) is runner
    assert runner.batches and not runner.heard.any()


def test_a_model_too_slow_for_one_caller_is_refused_with_the_numbers() -> None:
    clock = FakeClock()
    with pytest.raises(CheckpointError, match="a step takes 200 ms, and 56 ms are what it may take"):
        load_for_most_rows(lambda rows: EchoDouble(rows, clock, step_s=0.2), most_rows=8, phases=1, clock=clock)


@pytest.mark.parametrize("step_s, level", [(0.03, "INFO"), (0.07, "WARNING"), (0.3, "WARNING")])
def test_rows_that_were_asked_for_are_measured_and_too_many_are_warned_of(
    step_s: float, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    runner = EchoDouble(4, clock, step_s)
    with caplog.at_level("INFO"):
        assert check_rows(runner, 1, clock) is runner
    assert [record.levelname for record in caplog.records] == [level]
    assert f"4 callers: steps take {step_s * 1000:.1f} ms of 80" in caplog.text
    assert not runner.heard.any()


def test_rows_whose_steps_would_seem_a_hang_are_refused() -> None:
    clock = FakeClock()
    with pytest.raises(CheckpointError, match="too slow for 4 rows .* take 900 ms"):
        check_rows(EchoDouble(4, clock, step_s=0.9), 1, clock)
