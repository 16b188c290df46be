"""Whether a caller's microphone picks up the agent: its own voice comes back to it, and it would answer itself.

Loudness over time, in a few bands, is compared with that of what was said before, at every delay up to over a second.
An echo follows it closely whatever room, loudspeaker and codec did to it; another person's speech does not. It is
advice only: echo cancelling is for the caller's side to do.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import CHUNK_SAMPLES, CHUNKS_PER_FRAME, FRAME_SAMPLES, SAMPLE_RATE, Pcm

Levels = NDArray[np.float32]
"""Loudness by chunk and band, [chunks, BANDS], in units of about 9 dB."""

WINDOW_CHUNKS = 200
"""4 s are compared at a time."""
LAGS = range(CHUNKS_PER_FRAME, 60)
"""Delays in chunks: nothing said comes back within the frame it is said in, or later than 1.2 s."""
LIKE = 0.6
"""Correlation from which it is an echo. Of two people's speech it was at most 0.37; of an echo 20 dB down in a small
room 0.78 and more, 30 dB down 0.65 (2026-12-01)."""
VOICED_CHUNKS = 60
"""So much of the window must be the agent's voice, or there is nothing to come back."""
IN_A_ROW = 2
"""Windows in a row that must be alike, at the same delay."""

_EDGES_HZ = (100, 500, 1200, 2500, 5000)
BANDS = len(_EDGES_HZ) - 1
_BINS = [round(edge * CHUNK_SAMPLES / SAMPLE_RATE) for edge in _EDGES_HZ]
_FLOOR = 30.0**2 * CHUNK_SAMPLES  # below -60 dB of full scale all is equally silent
_VOICED = 2.0
_SILENCE = np.zeros(FRAME_SAMPLES, np.int16)
_SHAPE = np.hanning(CHUNK_SAMPLES).astype(np.float32)


class EchoDetector:
    """Hears both voices of one call, frame by frame."""

    def __init__(self) -> None:
        self._heard = _History()
        self._said = _History()
        self._lags: deque[int | None] = deque(maxlen=IN_A_ROW)  # of the last windows; None where they were not alike

    def hear(self, position: int, frame: Pcm) -> None:
        """The caller's frame [1920] of this position."""
        self._heard.put(position, frame)

    def say(self, position: int, frame: Pcm) -> None:
        """The agent's frame [1920] of this position."""
        self._said.put(position, frame)

    def look(self) -> bool:
        """Whether an echo is suspected; to be asked about once a second."""
        self._lags.append(self._lag())
        lags = [lag for lag in self._lags if lag is not None]
        return len(lags) == IN_A_ROW and max(lags) - min(lags) <= 1

    def _lag(self) -> int | None:
        end = min(self._heard.end, self._said.end)
        heard = self._heard.before(end, WINDOW_CHUNKS)
        said = self._said.before(end, WINDOW_CHUNKS + LAGS[-1])
        if heard is None or said is None:
            return None
        likeness = _likeness(heard, said)
        best = int(np.argmax(likeness))
        return LAGS[best] if likeness[best] > LIKE else None


class _History:
    """The levels of the last `WINDOW_CHUNKS + LAGS` chunks of a voice, by position.

    Frames are kept as they are until levels are asked for: all of a second at once cost a third.
    """

    CHUNKS = WINDOW_CHUNKS + LAGS[-1] + CHUNKS_PER_FRAME

    def __init__(self) -> None:
        self.end = 0
        """The chunk after the last one."""
        self._levels: Levels = np.zeros((0, BANDS), np.float32)
        self._frames: deque[Pcm] = deque(maxlen=self.CHUNKS // CHUNKS_PER_FRAME)  # whose levels are not known yet

    def put(self, position: int, frame: Pcm) -> None:
        """A position that was left out was silent; one that goes back begins anew."""
        left_out = position - self.end // CHUNKS_PER_FRAME
        if not 0 <= left_out < self.CHUNKS:
            self._levels = self._levels[:0]
            self._frames.clear()
            left_out = 0
        self._frames.extend([_SILENCE] * left_out)
        self._frames.append(frame)
        self.end = (position + 1) * CHUNKS_PER_FRAME

    def before(self, end: int, chunks: int) -> Levels | None:
        """The levels [chunks, BANDS] before this chunk; None if not so many are known."""
        if self._frames:
            self._levels = np.concatenate([self._levels, _levels(np.concatenate(self._frames))])[-self.CHUNKS :]
            self._frames.clear()
        known = self._levels[: len(self._levels) - (self.end - end)]
        return known[-chunks:] if len(known) >= chunks else None


def _levels(sound: Pcm) -> Levels:
    """Loudness [n, BANDS] of the chunks of a sound [n * 480]; 0 for silence."""
    chunks = sound.reshape(-1, CHUNK_SAMPLES).astype(np.float32) * _SHAPE
    spectrum = np.fft.rfft(chunks)
    power = spectrum.real**2 + spectrum.imag**2
    bands = np.add.reduceat(power, _BINS, axis=1)[:, :BANDS] / CHUNK_SAMPLES
    return (np.log1p(bands / _FLOOR) / 2).astype(np.float32)


def _likeness(heard: Levels, said: Levels) -> NDArray[np.float64]:
    """For each of `LAGS`: correlation, -1..1, of what was heard with what was said so much earlier.

    Counted is only where the agent spoke, as two bursts of speech with silence around them look alike whatever is said;
    and the loudness of each band is left out of it. Everything is sums of products over a window that slides.
    """
    first = len(said) - WINDOW_CHUNKS - LAGS[-1]
    said = said[first : len(said) - LAGS[0]].astype(np.float64)
    voiced = (said.max(axis=1) > _VOICED).astype(np.float64)
    count = np.correlate(voiced, np.ones(WINDOW_CHUNKS))
    if count.max() < VOICED_CHUNKS:
        return np.zeros(len(LAGS))
    both, ours, theirs = (np.zeros(len(LAGS)) for _ in range(3))
    for a, b in zip(heard.astype(np.float64).T, said.T * voiced, strict=True):
        sum_a, sum_b = np.correlate(voiced, a), np.correlate(b, np.ones(WINDOW_CHUNKS))
        both += np.correlate(b, a) - sum_a * sum_b / np.maximum(count, 1)
        theirs += np.correlate(voiced, a * a) - sum_a**2 / np.maximum(count, 1)
        ours += np.correlate(b * b, np.ones(WINDOW_CHUNKS)) - sum_b**2 / np.maximum(count, 1)
    scale = np.sqrt(np.maximum(ours * theirs, 1e-9))
    likeness: NDArray[np.float64] = np.where(count < VOICED_CHUNKS, 0.0, both / scale)[::-1]
    return likeness
