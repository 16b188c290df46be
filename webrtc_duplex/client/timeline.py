"""Counting what a caller heard, on the timeline of RTP: pure, so that a call can be counted after it is over.

The timeline runs on the sender's clock: a packet's timestamp says where its sound belongs. The packet that came
soonest after its place fixes the line between that clock and ours; all lateness is measured from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from webrtc_duplex.audio import CHUNK_S, CHUNKS_PER_FRAME, FRAME_S, Pcm
from webrtc_duplex.media.jitter import signed

LATE_S = 0.06
"""What a player's jitter buffer forgives. A packet later than this stalls it once; then it plays that much later."""
RECOVERY_S = 0.001
"""So much of a delay beyond that a player takes back with every chunk."""
VOICED_RMS = 1e-3
"""A chunk is voiced above this share of full scale, as the public driver counts."""
TAIL_S = 0.32
"""Sound may come so long after the last frame was sent."""
REST_S = 0.5
"""A server that sends no silence is heard of more often than this; one that is not has gone."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One packet's sound: when it came, where it belongs (RTP seconds, unwrapped), and what it holds."""

    at: float
    place: float
    pcm: Pcm


@dataclass(frozen=True, slots=True)
class Count:
    """What a caller was due, and what it heard."""

    due: int
    """Frames it spoke, and so was to hear."""
    heard: int
    gaps_s: tuple[float, ...]
    """Each stretch of voiced sound that came late or never."""
    voiced_s: float
    latest_s: float
    """The worst lateness of a packet that came."""
    excused: int = 0
    """Frames among the heard that were not, while the machine itself stalled."""

    @property
    def deficit(self) -> int:
        return self.due - self.heard

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)


class Unwrapper:
    """RTP timestamps (32 bits, any start) to seconds."""

    def __init__(self, clock_rate: int) -> None:
        self._clock_rate = clock_rate
        self._last: int | None = None
        self._ticks = 0

    def place(self, timestamp: int) -> float:
        """Seconds since the first timestamp; negative for a packet from before it."""
        if self._last is not None:
            self._ticks += signed(timestamp - self._last, 32)
        self._last = timestamp
        return self._ticks / self._clock_rate


def count(sounds: Sequence[Heard], start: float, frames: int, excused: Sequence[tuple[float, float]] = ()) -> Count:
    """Count the `frames` that were due from `start` (our clock) on.

    `excused` are spans of our clock in which the machine itself stalled: what was due then is not held against anyone.
    """
    if not sounds:
        return Count(due=frames, heard=0, gaps_s=(), voiced_s=0.0, latest_s=0.0)
    end = start + frames * FRAME_S + TAIL_S
    offset = min(sound.at - sound.place for sound in sounds)
    slots = _slots(sounds, start - offset, frames * CHUNKS_PER_FRAME, end)
    lateness = [0.0 if sound is None else sound.at - sound.place - offset for sound in slots]
    voiced = [sound is not None and is_voiced(sound.pcm) for sound in slots]
    pardoned = [_within(start + i * CHUNK_S, excused) for i in range(len(slots))]
    lost = _lost(slots, voiced)
    silent_s = [
        0.0 if pardon else CHUNK_S if gone else stall_s * voice
        for pardon, gone, stall_s, voice in zip(pardoned, lost, _stalls(lateness), voiced, strict=True)
    ]
    whole = [not broken for broken in _frames(lost)]
    spared = sum(pardon and not heard for pardon, heard in zip(_frames(pardoned), whole, strict=True))
    return Count(
        due=frames,
        heard=sum(whole) + spared,
        gaps_s=tuple(_runs(silent_s)),
        voiced_s=sum(voiced) * CHUNK_S,
        latest_s=max(lateness, default=0.0),
        excused=spared,
    )


def is_voiced(pcm: Pcm) -> bool:
    return bool(np.sqrt(np.mean(np.square(pcm / 32_768))) >= VOICED_RMS)


def _slots(sounds: Sequence[Heard], first: float, count: int, end: float) -> list[Heard | None]:
    """The sound of each 20 ms from place `first` on; None where none came before `end`."""
    slots: list[Heard | None] = [None] * count
    for sound in sounds:
        index = round((sound.place - first) / CHUNK_S)
        if 0 <= index < count and slots[index] is None and sound.at <= end:
            slots[index] = sound
    return slots


def _lost(slots: Sequence[Heard | None], voiced: Sequence[bool]) -> list[bool]:
    """Where sound is missing: a hole that cuts a voice off, or one too long for a rest.

    Any other hole is silence that was not sent.
    """
    lost = [False] * len(slots)
    start = 0
    while start < len(slots):
        stop = start
        while stop < len(slots) and slots[stop] is None:
            stop += 1
        if stop > start:
            cut_off = start > 0 and voiced[start - 1]
            lost[start:stop] = [cut_off or (stop - start) * CHUNK_S > REST_S] * (stop - start)
        start = stop + 1
    return lost


def _frames(marks: Sequence[bool]) -> list[bool]:
    """Whether any chunk of each frame is marked."""
    return [any(marks[i : i + CHUNKS_PER_FRAME]) for i in range(0, len(marks), CHUNKS_PER_FRAME)]


def _within(moment: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(begin <= moment < end for begin, end in spans)


def _stalls(lateness: Sequence[float]) -> list[float]:
    """How long a player stands still before each chunk, as it has not come yet."""
    stalls: list[float] = []
    delay = LATE_S
    for late_s in lateness:
        stalls.append(max(0.0, late_s - delay))
        delay = max(late_s, delay if late_s > delay - RECOVERY_S else delay - RECOVERY_S, LATE_S)
    return stalls


def _runs(silent_s: Sequence[float]) -> list[float]:
    """Lengths of the stretches in which nothing was to be heard."""
    lengths = [0.0]
    for length in silent_s:
        if length > 0:
            lengths[-1] += length
        elif lengths[-1] > 0:
            lengths.append(0.0)
    return [length for length in lengths if length > 0]
