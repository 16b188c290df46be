"""Making sound a little shorter or longer where nobody hears it.

Two places that look alike, one pitch period or several apart, are laid over each other: what is between them is left
out, or heard twice. In silence any two places will do.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from webrtc_duplex.audio import SAMPLE_RATE, Pcm

OVERLAP = SAMPLE_RATE // 100
"""Samples over which one place passes into the other: 10 ms."""

SHORTEST_LAG = SAMPLE_RATE // 400
LONGEST_LAG = SAMPLE_RATE * 15 // 1000
"""A pitch period lies between 2.5 and 15 ms (400 and 66 Hz)."""

_GRID = OVERLAP // 2
_QUIET_RMS = 100.0  # -50 dB of full scale
_FURTHER_IS_BETTER = 0.05
_RISE = np.linspace(0, 1, OVERLAP, dtype=np.float32)
_SHORT_RISE = np.linspace(0, 1, SAMPLE_RATE // 400, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Splice:
    """`pcm[at:]` and `pcm[at + lag:]` look alike over `OVERLAP` samples."""

    at: int
    lag: int
    likeness: float
    """1: the same, or both silent; 0: unrelated."""


def find_quiet(pcm: Pcm, lag: int) -> Splice | None:
    """The first place where `lag` samples and the overlap are all silence."""
    needed = lag + OVERLAP
    blocks = pcm[: len(pcm) // _GRID * _GRID].reshape(-1, _GRID).astype(np.float32)
    loud = np.einsum("ij,ij->i", blocks, blocks) > _QUIET_RMS**2 * _GRID
    span = -(-needed // _GRID)
    if len(loud) < span:
        return None
    silent = np.flatnonzero(~sliding_window_view(loud, span).any(axis=1))
    return Splice(int(silent[0]) * _GRID, lag, 1.0) if silent.size else None


def find_alike(pcm: Pcm, shortest: int, longest: int) -> Splice | None:
    """The two places that look most alike, between `shortest` and `longest` samples apart; of equals the furthest."""
    sound = pcm.astype(np.float32)
    last = len(sound) - OVERLAP - longest
    if last < 0:
        return None
    squares = np.concatenate([[0.0], np.cumsum(sound * sound, dtype=np.float64)])
    loudness = np.sqrt(squares[OVERLAP:] - squares[:-OVERLAP] + 1.0)  # of the OVERLAP samples from each place on
    bonus = np.linspace(0, _FURTHER_IS_BETTER, longest - shortest + 1)
    best, best_score = None, -np.inf
    for at in range(0, last + 1, OVERLAP):
        here = sound[at : at + OVERLAP]
        product = np.correlate(sound[at + shortest : at + longest + OVERLAP], here, "valid")
        likeness = product / (loudness[at + shortest : at + longest + 1] * loudness[at])
        found = int(np.argmax(likeness + bonus))
        if likeness[found] + bonus[found] > best_score:
            best_score = likeness[found] + bonus[found]
            best = Splice(at, shortest + found, float(likeness[found]))
    return best


def shorten(pcm: Pcm, splice: Splice) -> Pcm:
    """`pcm` without `lag` samples: passes from `at` to `at + lag`."""
    here, there = splice.at, splice.at + splice.lag
    return np.concatenate([pcm[:here], crossed(pcm[here : here + OVERLAP], pcm[there:])])


def lengthen(pcm: Pcm, splice: Splice) -> Pcm:
    """`pcm` with `lag` samples more: passes from `at + lag` back to `at`."""
    here, there = splice.at, splice.at + splice.lag
    return np.concatenate([pcm[:there], crossed(pcm[there : there + OVERLAP], pcm[here:])])


def faded_in(pcm: Pcm) -> Pcm:
    """`pcm` with its first 2.5 ms rising from nothing, where it would begin with a step."""
    rise = _SHORT_RISE[: len(pcm)]
    return np.concatenate([(pcm[: len(rise)] * rise).astype(np.int16), pcm[len(rise) :]])


def crossed(out: Pcm, into: Pcm) -> Pcm:
    """`into`, its first `OVERLAP` samples passing over from `out` [OVERLAP]."""
    mixed = out + (into[:OVERLAP] - out.astype(np.float32)) * _RISE
    return np.concatenate([np.rint(mixed).astype(np.int16), into[OVERLAP:]])
