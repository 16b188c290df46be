"""As many rows as a machine can serve in time."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine_doubles import EchoDouble, FakeClock
from webrtc_duplex.audio import Pcm
from webrtc_duplex.engine.capacity import check_rows, most_rows
from webrtc_duplex.errors import CheckpointError


class Heavy(EchoDouble):
    """A model whose step takes 9 ms, and 2 ms more a row; and what else happens at a step."""

    at_step: dict[int, Callable[[], None]] = {}

    def step(self, rows: NDArray[np.int64], pcm: Pcm) -> tuple[Pcm, NDArray[np.int64], NDArray[np.bool_]]:
        self.at_step.get(len(self.batches), lambda: None)()
        self.step_s = 0.009 + 0.002 * len(rows)
        return super().step(rows, pcm)


def test_the_largest_batch_that_leaves_a_margin_is_taken_and_no_more_is_loaded_than_needed() -> None:
    clock, loads = FakeClock(), list[int]()

    def load(rows: int) -> EchoDouble:
        loads.append(rows)
        return Heavy(rows, clock)

    rows = most_rows(load, most=100, phases=1, clock=clock)
    assert rows == 16, "41 ms of the 56 that a step may take; 24 rows would take 57"
    assert loads == [8, 32]


class Ageing(EchoDouble):
    """A model whose step takes 5 ms a row, and twice that where the row's windows are full."""

    def step(self, rows: NDArray[np.int64], pcm: Pcm) -> tuple[Pcm, NDArray[np.int64], NDArray[np.bool_]]:
        self.step_s = sum(0.010 if row in self.full else 0.005 for row in rows.tolist())
        return super().step(rows, pcm)


def test_rows_are_measured_as_old_as_they_will_be() -> None:
    clock = FakeClock()
    assert most_rows(lambda rows: Ageing(rows, clock), most=8, phases=1, clock=clock) == 4


def test_memory_bounds_the_rows() -> None:
    clock = FakeClock()
    assert most_rows(lambda rows: Heavy(rows, clock), most=7, phases=1, clock=clock) == 6


def test_the_steps_of_all_phases_share_a_frame() -> None:
    clock = FakeClock()
    assert most_rows(lambda rows: Heavy(rows, clock), most=100, phases=4, clock=clock) == 8


def test_a_busy_moment_of_the_machine_does_not_count() -> None:
    clock = FakeClock()
    runner = Heavy(4, clock)
    runner.at_step = {30: lambda: clock.advance(1.0)}
    assert most_rows(lambda rows: runner, most=4, phases=1, clock=clock) == 4


def test_a_model_too_slow_for_one_caller_is_refused() -> None:
    clock = FakeClock()
    with pytest.raises(CheckpointError, match="too slow for this machine"):
        most_rows(lambda rows: EchoDouble(rows, clock, step_s=0.2), most=8, phases=1, clock=clock)


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
