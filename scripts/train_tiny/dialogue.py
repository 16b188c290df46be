"""How the agent behaves, as a teacher: what it does at each frame of a call whose caller is known.

The teacher hears only when somebody speaks, and is told what a turn meant when it is over. All its decisions are
hazards: a chance at each frame once a condition holds, never "at exactly this frame", so that a model that samples
can follow it. The model sees none of these rules; it learns them from dialogues.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scripts.train_tiny.sentences import ANSWERS, FALLBACK, GREETINGS, INTERRUPTION, QUESTION, answers_to

GREET_AFTER, GREET_CHANCE = 4, 0.5
ANSWER_AFTER, ANSWER_CHANCE = 8, 0.5
STOP_AFTER, STOP_CHANCE = 3, 0.7
"""Frames of speech within five that interrupt the agent, and its chance to fall silent at each frame then."""
ASK_AFTER, ASK_CHANCE = 100, 0.2
LEAST_VOICED = 3
"""Frames of speech that make a turn; less is a click."""

FRESH, USUAL, ASKED = range(3)
"""The agent's states of silence: before its first word; in the call; and after it asked whether anyone is there."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a caller says in one go: frames `start` to `end` (exclusive), and what it means."""

    start: int
    end: int
    intent: str


@dataclass(frozen=True, slots=True)
class Act:
    """What the agent does in one frame: a frame of a sentence, or silence of one of three states."""

    sentence: str | None
    frame: int
    silence: int


class Teacher:
    """The turn-taking rules, one call after `step`."""

    def __init__(self, role: str, lengths: dict[str, int], rng: np.random.Generator) -> None:
        self._role, self._lengths, self._rng = role, lengths, rng
        self._speaking: str | None = None
        self._at = 0
        self._time = -1
        self._quiet = 0
        self._idle = 0
        self._voiced = 0
        self._recent = [False] * 5
        self._silence = FRESH
        self._interrupted = False

    def step(self, voiced: bool, intent: str) -> Act:
        """The caller's last frame was speech or not; `intent` is the meaning of the turn that it belongs to, or of the
        one before."""
        self._time += 1
        self._listen(voiced)
        if self._speaking is not None:
            self._go_on()
        if self._speaking is None:
            self._consider(intent)
        if self._speaking is None:
            return Act(None, 0, self._silence)
        return Act(self._speaking, self._at, self._silence)

    def _listen(self, voiced: bool) -> None:
        self._recent = [*self._recent[1:], voiced]
        self._quiet = 0 if voiced else self._quiet + 1
        self._voiced += voiced
        self._idle = 0 if voiced or self._speaking else self._idle + 1

    def _go_on(self) -> None:
        self._at += 1
        assert self._speaking is not None
        if self._at >= self._lengths[self._speaking]:
            self._speaking = None
        elif sum(self._recent) >= STOP_AFTER and self._rng.random() < STOP_CHANCE:
            self._speaking, self._interrupted = None, True

    def _consider(self, intent: str) -> None:
        turn_over = self._voiced >= LEAST_VOICED and self._quiet >= ANSWER_AFTER
        if turn_over and self._rng.random() < ANSWER_CHANCE:
            self._say(self._answer(intent))
            self._voiced, self._interrupted, self._silence = 0, False, USUAL
        elif self._silence == FRESH and self._voiced < LEAST_VOICED and self._quiet and self._time >= GREET_AFTER:
            if self._rng.random() < GREET_CHANCE:
                self._say(self._one_of(GREETINGS[self._role]))
                self._silence = USUAL
        elif self._silence == USUAL and self._idle >= ASK_AFTER and self._rng.random() < ASK_CHANCE:
            self._say(QUESTION)
            self._voiced, self._silence = 0, ASKED
        elif self._silence == ASKED and self._voiced >= LEAST_VOICED:
            self._silence = USUAL
        if self._quiet > 2 * ANSWER_AFTER and self._voiced < LEAST_VOICED:
            self._voiced = 0

    def _answer(self, intent: str) -> str:
        known = intent in ANSWERS[self._role] and intent != FALLBACK
        if self._interrupted and not known:
            intent = INTERRUPTION
        return self._one_of(answers_to(intent, self._role))

    def _one_of(self, texts: Sequence[str]) -> str:
        return texts[int(self._rng.integers(len(texts)))]

    def _say(self, text: str) -> None:
        self._speaking, self._at = text, 0


def intents(turns: Sequence[Turn], frames: int) -> list[str]:
    """The meaning of the turn that each frame belongs to, or of the last one before it."""
    meaning = [FALLBACK] * frames
    for turn in turns:
        meaning[turn.start :] = [turn.intent] * (frames - turn.start)
    return meaning


def play(teacher: Teacher, voiced: NDArray[np.bool_], turns: Sequence[Turn]) -> list[Act]:
    """What the agent does at each frame of a call; it has heard the frames before, not this one."""
    meaning = intents(turns, len(voiced))
    acts = [teacher.step(False, FALLBACK)]
    acts += [teacher.step(bool(voiced[t]), meaning[t]) for t in range(len(voiced) - 1)]
    return acts
