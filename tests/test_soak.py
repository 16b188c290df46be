"""The soak: how it judges, and two minutes of it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.soak import ALLOWED, WINDOW, Census, Tone, loudest_seat
from tests.conftest import ROOT
from webrtc_duplex.audio import SAMPLE_RATE, Pcm


def tone(hz: float, loudness: float = 5000.0) -> Pcm:
    return (loudness * np.sin(2 * np.pi * hz * np.arange(WINDOW) / SAMPLE_RATE)).astype(np.int16)


@pytest.mark.parametrize("seat", [0, 3, 7])
def test_whose_tone_is_heard_is_known(seat: int) -> None:
    assert loudest_seat(tone(Tone(seat).hz), seats=8) == seat


def test_silence_noise_and_a_stranger_are_nobodys() -> None:
    noise = np.random.default_rng(1).normal(0, 3000, WINDOW).astype(np.int16)
    assert loudest_seat(tone(Tone(1).hz, loudness=100.0), seats=8) is None
    assert loudest_seat(noise, seats=8) is None
    assert loudest_seat(tone(Tone(9).hz), seats=8) is None


def test_what_has_grown_beyond_what_is_allowed_is_told() -> None:
    before = Census({"leased rows": 0, "front descriptors": 20, "front MB": 90.0})
    assert Census({"leased rows": 0, "front descriptors": 22, "front MB": 99.0}).grown_since(before, ALLOWED) == []
    after = Census({"leased rows": 1, "front descriptors": 20, "front MB": 190.0})
    assert len(after.grown_since(before, ALLOWED)) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_minutes_of_churn_loss_nonsense_and_killed_processes_leave_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/soak.py", "--seconds", "120", "--report", str(tmp_path / "report.md")]
    soak = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert soak.returncode == 0, soak.stdout + soak.stderr
    report = (tmp_path / "report.md").read_text()
    assert "SIGKILL to worker" in report and "SIGKILL to engine" in report
