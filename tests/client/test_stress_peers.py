"""How the stress run judges; that it runs is shown by the whole-system test at the end."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from scripts.stress_peers import (
    SHORTEST_STAY,
    Outcome,
    Plan,
    Report,
    Speech,
    _counts_around,
    _stay,
    echo_delay,
    hum,
    summary,
    table,
)
from tests.conftest import ROOT
from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES
from webrtc_duplex.client.timeline import Count, Heard

PLAN = Plan("http://localhost", 375, None, None, echo=True)


def outcome(
    deficit: int = 0, gap_s: float = 0.0, voiced_s: float = 10.0, underruns: int = 0, together: int = 0
) -> Outcome:
    gaps = (gap_s,) if gap_s else ()
    counted = Count(due=375, heard=375 - deficit, gaps_s=gaps, voiced_s=voiced_s, latest_s=0.01)
    return Outcome(0, counted=counted, underruns=underruns, underruns_together=together)


@pytest.mark.parametrize(
    ("met", "driver", "ours"),
    [
        (outcome(), True, True),
        (outcome(deficit=1, gap_s=0.06), True, True),
        (outcome(deficit=2), True, False),
        (outcome(gap_s=0.08), True, False),
        (outcome(deficit=4), True, False),
        (outcome(deficit=5), False, False),
        (outcome(voiced_s=0.2), False, False),
        (outcome(underruns=4, together=3), True, True),
        (outcome(underruns=4, together=4), True, False),
        (outcome(underruns=20), False, False),
        (Outcome(0, error="refused"), False, False),
    ],
)
def test_a_caller_is_judged_by_both_rules(met: Outcome, driver: bool, ours: bool) -> None:
    assert (met.passes_driver, met.passes_ours) == (driver, ours)


def test_a_run_passes_only_if_everyone_does() -> None:
    assert Report(PLAN, [outcome(), outcome()]).passed
    assert not Report(PLAN, [outcome(), outcome(deficit=2)]).passed
    assert not Report(PLAN, []).passed


def test_where_a_worker_was_killed_its_callers_are_to_lose_their_calls_and_the_others_pass() -> None:
    lost = Outcome(0, error="call_lost")
    assert Report(PLAN, [outcome(), lost], killed=True).passed
    assert not Report(PLAN, [outcome(deficit=2), lost], killed=True).passed
    assert not Report(PLAN, [outcome(), lost]).passed
    assert not Report(PLAN, [outcome(), outcome()], killed=True).passed
    assert "1 calls were lost with it" in table(Report(PLAN, [outcome(), lost], killed=True))


def test_underruns_are_counted_between_the_words_around_the_run() -> None:
    counts = [(0.5, 3), (1.5, 4), (2.5, 6), (3.5, 9)]
    assert _counts_around(counts, 1.0, 3.0) == [3, 4, 6, 9]
    assert _counts_around(counts, 1.0, 9.0) == [3, 4, 6, 9]
    assert _counts_around(counts, 3.0, 3.1) == [6, 9]
    assert _counts_around([], 1.0, 3.0) == [0]


def test_the_delay_of_an_echo_is_found() -> None:
    said = hum(4.0)
    delayed = np.concatenate([np.zeros(4800, np.int16), said])[: len(said)]
    heard = [
        Heard(at=200 + i * CHUNK_S, place=i * CHUNK_S, pcm=chunk)
        for i, chunk in enumerate(delayed.reshape(-1, CHUNK_SAMPLES))
    ]
    assert echo_delay(said, 200.0, heard) == pytest.approx(0.2, abs=1e-3)


def test_callers_say_different_things() -> None:
    speech = Speech.of(hum(10.0))
    one, other = speech.share_of(0, 10), speech.share_of(1, 10)
    assert (len(one.pcm), len(one.packets), one.frames) == (10 * 1920, 40, 10)
    assert not np.array_equal(one.pcm, other.pcm)


def test_a_caller_who_has_said_all_begins_again_with_the_packets_of_the_same_sound() -> None:
    speech = Speech.of(hum(1.0))
    share = speech.share_of(0, 25)
    assert np.array_equal(share.pcm[24_000:], speech.pcm[:24_000])
    assert share.packets[50:] == speech.packets


def test_a_caller_who_was_refused_has_a_line_too() -> None:
    assert "CapacityError" in table(Report(PLAN, [Outcome(0, error="CapacityError: all rows are leased")]))


def test_callers_who_come_and_go_stay_as_long_as_the_churn_says_and_never_beyond_the_end() -> None:
    random = Random(1)
    coming_and_going = replace(PLAN, churn=0.1)
    stays = [_stay(coming_and_going, random, 375) for _ in range(300)]
    assert SHORTEST_STAY == min(stays) and max(stays) == 375
    assert _stay(coming_and_going, random, SHORTEST_STAY) == SHORTEST_STAY
    assert _stay(PLAN, random, 375) == 375


def test_the_summary_counts_who_was_refused_and_shows_the_worst() -> None:
    met = [outcome(deficit=3), outcome(gap_s=0.25), Outcome(0, error="CapacityError: all rows are leased")]
    text = "\n".join(summary(met))
    assert "3 calls, 1 of them refused; 747 of 750 frames heard" in text
    assert "250 ms" in next(line for line in text.splitlines() if "longest gap" in line)
    assert next(line for line in text.splitlines() if "deficit" in line).endswith("3 fr")


@pytest.mark.slow
def test_two_callers_of_an_echo_hear_all_they_are_due(tmp_path: Path) -> None:
    numbers = tmp_path / "run.json"
    command = [sys.executable, "scripts/stress_peers.py", "--peers", "2", "--frames", "50", "--model", "echo"]
    subprocess.run([*command, "--json", str(numbers)], cwd=ROOT, check=True)
    callers = json.loads(numbers.read_text())["callers"]
    assert [caller["counted"]["due"] for caller in callers] == [50, 50]
    assert all(caller["echo_s"] < 1 for caller in callers)


@pytest.mark.slow
def test_callers_who_come_and_go_at_two_workers_are_all_counted(tmp_path: Path) -> None:
    numbers = tmp_path / "run.json"
    command = [sys.executable, "scripts/stress_peers.py", "--peers", "4", "--frames", "100", "--model", "echo"]
    options = ["--together", "2", "--ramp", "8", "--churn", "0.4", "--media-workers", "2", "--json", str(numbers)]
    subprocess.run([*command, *options], cwd=ROOT, check=False)
    callers = json.loads(numbers.read_text())["callers"]
    assert {caller["caller"] for caller in callers} == {0, 1, 2, 3}
    assert len(callers) > 4 and all(caller["error"] is None for caller in callers)
