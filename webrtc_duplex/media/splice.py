"""Making sound a little shorter or longer where nobody hears it.

Two places that look alike, one pitch period or several apart, are laid over each other: what is between them is left
out, or heard twice. In silence any two places will do.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from webrtc_duplex.audio import SAMPLE_RATE, Pcm

OVERLAP = SAMPLE_RATE // 100
"""Samples over which one place passes into the other: 10 ms."""

SHORTEST_LAG = SAMPLE_RATE // 400
LONGEST_LAG = SAMPLE_RATE * 15 // 1000
"""A pitch period lies between 2.5 and 15 ms (400 and 66 Hz)."""

_GRID = OVERLAP // 2
_QUIET_RMS = 100.0  # -50 dB of full scale
_RISE = np.linspace(0, 1, OVERLAP, dtype=np.float32)


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
    """The two places that look most alike, between `shortest` and `longest` samples apart."""
    sound = pcm.astype(np.float32)
    last = len(sound) - OVERLAP - longest
    if last < 0:
        return None
    windows = sliding_window_view(sound, OVERLAP)  # [n, OVERLAP]
    energy = np.einsum("ij,ij->i", windows, windows) + 1.0
    best = Splice(0, shortest, -1.0)
    for at in range(0, last + 1, _GRID):
        ahead = slice(at + shortest, at + longest + 1)
        likeness = windows[ahead] @ windows[at] / np.sqrt(energy[ahead] * energy[at])
        found = int(np.argmax(likeness))
        if likeness[found] > best.likeness:
            best = Splice(at, shortest + found, float(likeness[found]))
    return best


def shorten(pcm: Pcm, splice: Splice) -> Pcm:
    """`pcm` without `lag` samples: passes from `at` to `at + lag`."""
    here, there = splice.at, splice.at + splice.lag
    return np.concatenate([pcm[:here], _cross(pcm[here:], pcm[there:]), pcm[there + OVERLAP :]])


def lengthen(pcm: Pcm, splice: Splice) -> Pcm:
    """`pcm` with `lag` samples more: passes from `at + lag` back to `at`."""
    here, there = splice.at, splice.at + splice.lag
    return np.concatenate([pcm[:there], _cross(pcm[there:], pcm[here:]), pcm[here + OVERLAP :]])


def _cross(out: Pcm, into: Pcm) -> Pcm:
    """`OVERLAP` samples that begin as `out` and end as `into`."""
    mixed: NDArray[np.float32] = out[:OVERLAP] + (into[:OVERLAP] - out[:OVERLAP].astype(np.float32)) * _RISE
    return np.rint(mixed).astype(np.int16)
