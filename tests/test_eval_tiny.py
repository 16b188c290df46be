"""How the small agent's evaluation counts: turns, answers, interruptions, and what a model is asked for."""

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("pocketsphinx", reason="the evaluation's recogniser is not installed")
pytest.importorskip("scipy", reason="the evaluation resamples with scipy")

from scripts.eval_tiny import FRAME, Heard, TurnFigures, Utterance, Wish, closest, judge, prompt, turns_in
from scripts.train_tiny.dialogue import Turn
from scripts.train_tiny.sentences import DEFAULT_TEXT
from webrtc_duplex.messages import ModelCard, Prompt

NAME = "My name is Tiny."


def heard(frames: int, *utterances: Utterance) -> Heard:
    """An agent that sounds in exactly these utterances."""
    loud = np.zeros((frames, FRAME), np.float32)
    for utterance in utterances:
        loud[utterance.start : utterance.end] = 0.1
    return Heard(loud.reshape(-1), utterances)


def counted(turns: Sequence[Turn], *utterances: Utterance) -> TurnFigures:
    sums = TurnFigures()
    judge(turns, heard(200, *utterances), "assistant", sums)
    return sums


def test_an_answer_within_two_seconds_counts_and_has_a_latency() -> None:
    sums = TurnFigures()
    (reply,) = judge([Turn(20, 40, "name")], heard(200, Utterance(50, 70, NAME)), "assistant", sums)

    assert (sums.awaited, sums.answered, sums.answered_late, sums.premature) == (1, 1, 1, 0)
    assert reply.latency_s == pytest.approx(0.8)
    assert reply.right


def test_an_answer_to_another_question_is_wrong() -> None:
    turns = [Turn(20, 40, "joke")]
    (reply,) = judge(turns, heard(200, Utterance(50, 70, NAME)), "assistant", TurnFigures())

    assert (reply.wanted, reply.found, reply.right) == ("joke", "name", False)


def test_an_answer_after_three_seconds_is_late_and_none_is_none() -> None:
    late = counted([Turn(20, 40, "name")], Utterance(74, 90, NAME))
    assert (late.awaited, late.answered, late.answered_late) == (1, 0, 1)
    assert counted([Turn(20, 40, "name")]).answered_late == 0


def test_a_start_inside_a_turn_is_premature() -> None:
    assert counted([Turn(20, 40, "name")], Utterance(30, 50, NAME)).premature == 1


def test_an_interrupted_agent_yields_if_it_is_silent_within_eight_tenths_of_a_second() -> None:
    turns = [Turn(20, 50, "name")]

    assert counted(turns, Utterance(5, 28, NAME)).yielded == 1
    stubborn = counted(turns, Utterance(5, 35, NAME))
    assert (stubborn.interruptions, stubborn.yielded) == (1, 0)


def test_what_was_said_is_the_nearest_sentence() -> None:
    assert closest("name is tiny") == NAME


def test_turns_are_found_by_energy_and_pauses_for_breath_do_not_end_them() -> None:
    level = np.zeros(100)
    level[20:30] = level[35:45] = level[70:80] = 0.1
    pcm = (np.repeat(level, FRAME) * np.where(np.arange(100 * FRAME) % 2, 1, -1)).astype(np.float32)

    assert [(turn.start, turn.end) for turn in turns_in(pcm)] == [(20, 45), (70, 80)]


def test_a_model_is_asked_for_no_more_than_it_takes() -> None:
    wish = Wish("assistant", "heart", 5)

    card = ModelCard("tiny", ("joe", "heart"), "joe", True, 1000, ())
    assert prompt(card, wish) == Prompt(voice="heart", text=DEFAULT_TEXT, seed=5)
    bare = ModelCard("older", (), None, False, 0, ())
    assert prompt(bare, wish) == Prompt(voice=None, text=None, seed=5)
