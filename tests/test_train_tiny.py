"""The small agent's teacher, tokenizer and prompts, and a smoke run of the whole training."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from scripts.train_tiny import lm
from scripts.train_tiny.codes import Tables, Track
from scripts.train_tiny.dialogue import ASKED, FRESH, USUAL, Act, Teacher, Turn, play
from scripts.train_tiny.sentences import ANSWERS, GREETINGS, QUESTION, ROLES, agent_sentences
from scripts.train_tiny.tokenizer import pieces, write_tokenizer
from scripts.train_tiny.voices import AGENT_VOICES, missing_packages
from webrtc_duplex.model.config import LMConfig
from webrtc_duplex.model.prompter import wrapped
from webrtc_duplex.model.prompts import VoiceCodes, system_prompt

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 20
LENGTHS = {sentence.text: LENGTH for sentence in agent_sentences()}


def call(frames: int, *turns: Turn, role: str = "assistant", seed: int = 0) -> list[Act]:
    """What the teacher does when a caller speaks in exactly these turns."""
    voiced = np.zeros(frames, bool)
    for turn in turns:
        voiced[turn.start : turn.end] = True
    return play(Teacher(role, LENGTHS, np.random.default_rng(seed)), voiced, turns)


def said(acts: Sequence[Act]) -> list[str]:
    """The sentences that were begun."""
    return [act.sentence for act in acts if act.sentence is not None and act.frame == 0]


# ---- turn taking


def test_a_silent_caller_is_greeted_once_and_asked_once() -> None:
    acts = call(750)

    assert len(said(acts)) == 2
    assert said(acts)[0] in GREETINGS["assistant"]
    assert said(acts)[1] == QUESTION
    assert acts[-1] == Act(None, 0, ASKED)


def test_the_greeting_comes_within_a_second_and_a_half() -> None:
    for seed in range(20):
        acts = call(40, seed=seed)
        assert next(n for n, act in enumerate(acts) if act.sentence) * 0.08 < 1.5


@pytest.mark.parametrize("role", ROLES)
def test_every_intent_gets_its_own_answer(role: str) -> None:
    for intent, answers in ANSWERS[role].items():
        acts = call(120, Turn(40, 60, intent), role=role)
        assert said(acts)[1] in answers


def test_what_only_the_other_role_knows_is_answered_as_unknown() -> None:
    assert said(call(120, Turn(40, 60, "breakfast"), role="assistant"))[1] in ANSWERS["assistant"]["other"]


def test_nothing_is_said_while_the_caller_speaks_or_pauses_for_breath() -> None:
    acts = call(200, Turn(60, 100, "name"), Turn(105, 140, "name"))

    assert all(act.sentence is None for act in acts[60:147])


def test_an_interrupted_agent_falls_silent_and_lets_the_caller_go_ahead() -> None:
    acts = call(200, Turn(60, 70, "name"), Turn(80, 110, "other"))

    answer = next(n for n, act in enumerate(acts) if n > 70 and act.sentence)
    assert answer < 82
    assert all(act.sentence is None for act in acts[92:110])
    assert said(acts)[-1] == "Sorry, go ahead."


def test_an_interruption_that_is_a_known_question_is_answered() -> None:
    acts = call(200, Turn(60, 70, "name"), Turn(80, 110, "joke"))

    assert said(acts)[-1] in ANSWERS["assistant"]["joke"]


def test_a_click_is_no_turn() -> None:
    assert len(said(call(100, Turn(50, 52, "other")))) == 1


# ---- tokens


def test_each_word_of_each_sentence_is_one_token_and_they_spell_the_sentence(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.model")

    for sentence in agent_sentences():
        ids = tokenizer.encode(sentence.text)
        assert tokenizer.decode(ids) == sentence.text
        assert [tokenizer.id_to_piece(token).strip("\u2581") for token in ids] == list(sentence.words)
    assert tokenizer.get_piece_size() == len(pieces())


def test_words_that_nobody_knows_are_one_unknown_token_each(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.model")

    ids = tokenizer.encode(wrapped("You work for Grzegorz hotel"))

    assert [tokenizer.id_to_piece(token) for token in ids] == [
        "\u2581<system>", "\u2581You", "\u2581work", "\u2581for", "<unk>", "\u2581hotel", "\u2581<system>",
    ]  # fmt: skip


# ---- columns


def tables() -> Tables:
    rng = np.random.default_rng(1)
    sentences = {v: {s.text: rng.integers(0, 512, (LENGTH, 8)) for s in agent_sentences()} for v in AGENT_VOICES}
    words = {v: {s.text: np.arange(len(s.words)) for s in agent_sentences()} for v in AGENT_VOICES}
    return Tables(sentences, words, rng.integers(0, 512, (2, 3, 8)), rng.integers(0, 512, 8))


def sample(tmp_path: Path, seed: int) -> tuple[lm.Sample, Tables]:
    made = tables()
    made.silence[:] = made.silence[0, 0]
    user = np.random.default_rng(2).integers(0, 512, (160, 8))
    track = Track(user, np.zeros(160, bool), (), "hotel", "heart", tuple(call(160, role="hotel")))
    samples = lm.Samples(made, [track], write_tokenizer(tmp_path / "tokenizer.model"), lm.Sizes())
    return samples.draw(np.random.default_rng(seed)), made


def test_a_training_prompt_is_laid_out_as_the_package_prefills_it(tmp_path: Path) -> None:
    found, made = sample(tmp_path, 3)

    text = found.columns[: found.prompt, 0]
    system = write_tokenizer(tmp_path / "tokenizer.model").piece_to_id("\u2581<system>")
    tags = np.flatnonzero(text == system)
    spoken = tags[0] - lm.GAP if len(tags) else found.prompt - 2 * lm.GAP
    tokens = text[tags[0] : tags[1] + 1].tolist() if len(tags) else []
    voice = next(
        codes for codes in made.sentences["heart"].values() if np.array_equal(codes[1:, 0], found.columns[1:spoken, 1])
    )
    sizes = LMConfig(
        width=224, heads=4, keys=200, text_card=len(pieces()), card=512, depformer_width=64, depformer_heads=4,
        silence_codes=tuple(made.silence[0, 0].tolist()), sine_codes=tuple(made.sine.tolist()),
    )  # fmt: skip
    import torch

    wanted = system_prompt(sizes, VoiceCodes(torch.from_numpy(voice.T.copy())), tokens)
    assert np.array_equal(found.columns[: found.prompt], wanted.tokens.numpy())


def test_the_role_is_remembered_in_the_padding_and_the_voice_in_the_silence(tmp_path: Path) -> None:
    found, made = sample(tmp_path, 3)

    assert found.columns[-1, 0] == lm.PADDING["hotel"]
    assert made.silence.shape == (len(AGENT_VOICES), 1 + max(FRESH, USUAL, ASKED), 8)


def test_in_some_calls_the_role_is_told_by_the_prompt_alone_until_the_agent_has_begun(tmp_path: Path) -> None:
    found, _ = sample(tmp_path, 3)
    batch = lm.stacked([found] * 8, lm.Sizes(), np.random.default_rng(0))

    opening = batch.columns[:, found.prompt : found.prompt + lm.OPENING, 0]
    silent = batch.targets[:, found.prompt : found.prompt + lm.OPENING, 0] == lm.PADDING["hotel"]
    hidden = [bool((row[quiet] == -1).all()) for row, quiet in zip(opening, silent, strict=True)]
    assert set(hidden) == {True, False}
    assert (batch.columns[:, found.prompt + lm.OPENING :, 0] >= 0).all()
    assert (batch.opening.sum(1) == lm.OPENING).all()


# ---- all of it


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_smoke_run_makes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    missing = missing_packages(smoke=True)
    if missing:
        pytest.skip(f"training needs {'; '.join(missing)}")
    command = [sys.executable, "-m", "scripts.train_tiny", "--smoke", "--work", str(tmp_path / "work")]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"CI": "1"}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr

    command = [sys.executable, "-m", "webrtc_duplex", "inspect", str(tmp_path / "work" / "tiny")]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "heart" in shown.stdout
    assert (tmp_path / "work" / "tiny" / "MODEL_CARD.md").exists()
