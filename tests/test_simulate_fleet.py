"""The simulator of a fleet: small ones, whose figures can be reasoned about."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from scripts.simulate_fleet import ESTIMATED_STEP_MS, Fleet, StepTimes, Ticks, parser, play, simulate
from webrtc_duplex.settings import EngineSettings

SMALL = ["--nodes", "2", "--gpus", "2", "--rows", "8", "--hours", "0.5", "--minutes", "0.2"]


def test_a_fleet_with_room_refuses_nobody() -> None:
    fleet = Fleet(parser().parse_args([*SMALL, "--callers", "12", "--failures", "0"]))
    fleet.run()
    assert fleet.figures.calls > 20
    assert fleet.figures.refusals == fleet.figures.lost == 0


def test_a_fleet_that_is_too_small_is_full_and_refuses() -> None:
    fleet = Fleet(parser().parse_args([*SMALL, "--callers", "120", "--failures", "0"]))
    fleet.run()
    assert fleet.figures.refusals > 0
    assert max(share for _, share in fleet.figures.used) == 1.0


def test_who_is_cut_off_by_a_failure_finds_another_node() -> None:
    fleet = Fleet(parser().parse_args([*SMALL, "--callers", "12", "--failures", "2"]))
    fleet.run()
    assert fleet.figures.lost > 0
    assert fleet.figures.given_up == 0


def test_the_scheduler_lets_callers_in_between_ticks_and_never_leaves_one_out() -> None:
    ticks = Ticks()
    log = [(10.0 + number / 10, True, number) for number in range(64)]
    steps = StepTimes(ESTIMATED_STEP_MS, 0.03, Random(1))
    play(log, EngineSettings(rows=64), (0.0, 30.0), steps, ticks)
    assert len(ticks.join_s) == 64 and max(ticks.join_s) < 0.6
    assert ticks.skipped == 0 and ticks.refused == 0


def played(phases: int) -> Ticks:
    """64 callers of a GPU, in steps that take what is estimated of an H200."""
    ticks = Ticks()
    log = [(10.0 + number / 20, True, number) for number in range(64)]
    play(log, EngineSettings(rows=64, phases=phases), (0.0, 30.0), StepTimes(ESTIMATED_STEP_MS, 0.0, Random(1)), ticks)
    return ticks


def test_with_two_sub_ticks_answers_are_there_sooner_for_more_work_and_joins_still_find_time() -> None:
    whole, halves = played(phases=1), played(phases=2)
    assert np.percentile(whole.answer_s, 50) == pytest.approx(0.0344, abs=1e-3)
    assert np.percentile(halves.answer_s, 50) == pytest.approx(0.0203, abs=1e-3)
    assert whole.busy < halves.busy < 0.55
    for ticks in (whole, halves):
        assert ticks.skipped == ticks.refused == 0 and len(ticks.join_s) == 64
        assert max(ticks.answer_s) < 0.04


def test_recorded_step_times_are_used(tmp_path: Path) -> None:
    recorded = tmp_path / "steps.json"
    recorded.write_text(json.dumps({"1": [3.0], "8": [5.0]}))
    text = simulate(parser().parse_args([*SMALL, "--callers", "12", "--failures", "0", "--steps", str(recorded)]))
    assert "steps (recorded): p50 5 ms" in text
