"""Callers' sides of calls: who says what when, on what line; with the agent's echo where it is heard."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scripts.train_tiny import sound
from scripts.train_tiny.dialogue import Act, Turn
from scripts.train_tiny.sentences import CALLER, FALLBACK
from scripts.train_tiny.voices import RATE, CallerPool, Sound

FRAME = 1920


@dataclass(frozen=True, slots=True)
class Call:
    """A caller's side: the clean voice, what it says, and what its line adds."""

    voice: Sound
    turns: tuple[Turn, ...]
    voiced: NDArray[np.bool_]

    @property
    def frames(self) -> int:
        return len(self.voiced)


class Callers:
    """Makes calls out of the pool: one voice family a call, so that voices differ between calls as people do."""

    def __init__(self, pool: CallerPool, unseen: bool = False) -> None:
        self._pool, self._unseen = pool, unseen
        self._by_intent: dict[str, list[int]] = {intent: [] for intent in CALLER}
        for index, clip in enumerate(pool.clips):
            if clip.unseen == unseen:
                self._by_intent[clip.intent].append(index)
        self._known = [intent for intent in CALLER if intent != FALLBACK and self._by_intent[intent]]

    def call(self, seconds: float, rng: np.random.Generator, gaps: tuple[float, float] | None = None) -> Call:
        """A call of so many seconds; with `gaps` every gap between turns lies in these seconds."""
        samples = int(seconds * RATE) // FRAME * FRAME
        voice = np.zeros(samples, np.float32)
        turns: list[Turn] = []
        at = int(self._first_gap(rng, gaps) * RATE)
        while rng.random() > 0.02:
            spoken, intent = self._turn(rng)
            if at + len(spoken) + RATE > samples:
                break
            voice[at : at + len(spoken)] = spoken
            turns.append(Turn(at // FRAME, -(-(at + len(spoken)) // FRAME), intent))
            at += len(spoken) + int(self._gap(rng, gaps) * RATE)
        return Call(voice, tuple(turns), sound.voiced_frames(voice))

    def _turn(self, rng: np.random.Generator) -> tuple[Sound, str]:
        """One turn: a known question, sometimes after a hello or some other sentence; or one to three others."""
        if rng.random() < 0.72:
            intent = str(rng.choice(self._known))
            parts = [self._clip(intent, rng)]
            if intent != "hello" and rng.random() < 0.15:
                parts.insert(0, self._clip("hello" if rng.random() < 0.7 else FALLBACK, rng))
        else:
            intent = FALLBACK
            parts = [self._clip(FALLBACK, rng) for _ in range(rng.choice([1, 2, 3], p=[0.6, 0.3, 0.1]))]
        joined = [parts[0]]
        for part in parts[1:]:
            joined += [np.zeros(int(rng.uniform(0.04, 0.3) * RATE), np.float32), part]
        return np.concatenate(joined), intent

    def _clip(self, intent: str, rng: np.random.Generator) -> Sound:
        """A clip a little louder or quieter, and in training mostly by somebody who does not exist."""
        clip = self._pool.sound(int(rng.choice(self._by_intent[intent])))
        if not self._unseen:
            clip, _ = sound.somebody(clip, rng)
        return clip * sound.decibels(rng.uniform(-4, 2))

    def _first_gap(self, rng: np.random.Generator, gaps: tuple[float, float] | None) -> float:
        if gaps is None and rng.random() < 0.07:
            return 1e4  # an empty line
        return float(rng.uniform(0.1, 1.5) if rng.random() < 0.2 else rng.uniform(2.0, 6.5))

    def _gap(self, rng: np.random.Generator, gaps: tuple[float, float] | None) -> float:
        if gaps is not None:
            return float(rng.uniform(*gaps))
        kind = rng.random()
        if kind < 0.35:
            return float(rng.uniform(1.0, 2.6))  # most of these interrupt the agent
        return float(rng.uniform(2.6, 6.0) if kind < 0.9 else rng.uniform(9.0, 15.0))


def on_a_line(call: Call, rng: np.random.Generator) -> Sound:
    """The call as it arrives."""
    return sound.line(call.voice, rng) + sound.background(len(call.voice), rng)


def echo(said: Sound, rng: np.random.Generator) -> Sound:
    """What of the agent comes back: late by 20 to 250 ms, 25 to 40 dB down, through a small speaker."""
    late = int(rng.uniform(0.02, 0.25) * RATE)
    back = sound.band_pass(np.concatenate([np.zeros(late, np.float32), said])[: len(said)], 250, 5000)
    return back * sound.decibels(-rng.uniform(25, 40))


def said(acts: Sequence[Act], sentences: dict[str, Sound]) -> Sound:
    """What the agent's acts sound like, [frames * 1920]."""
    out = np.zeros((len(acts), FRAME), np.float32)
    for frame, act in enumerate(acts):
        if act.sentence is not None:
            piece = sentences[act.sentence][act.frame * FRAME : (act.frame + 1) * FRAME]
            out[frame, : len(piece)] = piece
    return out.reshape(-1)
