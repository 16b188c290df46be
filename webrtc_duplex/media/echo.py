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
        likeness = [_likeness(heard, said[len(said) - WINDOW_CHUNKS - lag : len(said) - lag]) for lag in LAGS]
        best = int(np.argmax(likeness))
        return LAGS[best] if likeness[best] > LIKE else None


class _History:
    """The levels of the last `WINDOW_CHUNKS + LAGS` chunks of a voice, by position."""

    CHUNKS = WINDOW_CHUNKS + LAGS[-1] + CHUNKS_PER_FRAME

    def __init__(self) -> None:
        self.end = 0
        """The chunk after the last one."""
        self._levels: deque[Levels] = deque(maxlen=self.CHUNKS // CHUNKS_PER_FRAME)  # [4, BANDS] each

    def put(self, position: int, frame: Pcm) -> None:
        """A position that was left out was silent; one that goes back begins anew."""
        left_out = position - self.end // CHUNKS_PER_FRAME
        if not 0 <= left_out < self.CHUNKS:
            self._levels.clear()
            left_out = 0
        self._levels.extend([np.zeros((CHUNKS_PER_FRAME, BANDS), np.float32)] * left_out)
        self._levels.append(_levels(frame))
        self.end = (position + 1) * CHUNKS_PER_FRAME

    def before(self, end: int, chunks: int) -> Levels | None:
        """The levels [chunks, BANDS] before this chunk; None if not so many are known."""
        known = np.concatenate(self._levels) if self._levels else np.zeros((0, BANDS), np.float32)
        known = known[: len(known) - (self.end - end)]
        return known[-chunks:] if len(known) >= chunks else None


def _levels(frame: Pcm) -> Levels:
    """Loudness [4, BANDS] of a frame [1920]; 0 for silence."""
    chunks = frame.reshape(CHUNKS_PER_FRAME, FRAME_SAMPLES // CHUNKS_PER_FRAME).astype(np.float32) * _SHAPE
    spectrum = np.fft.rfft(chunks)
    power = spectrum.real**2 + spectrum.imag**2
    bands = np.add.reduceat(power, _BINS, axis=1)[:, :BANDS] / CHUNK_SAMPLES
    return (np.log1p(bands / _FLOOR) / 2).astype(np.float32)


def _likeness(heard: Levels, said: Levels) -> float:
    """Correlation, -1..1, of the levels while the agent spoke, whatever the loudness of each band.

    Only then, as two bursts of speech with silence around them look alike whatever is said.
    """
    voiced = said.max(axis=1) > _VOICED
    if np.count_nonzero(voiced) < VOICED_CHUNKS:
        return 0.0
    a, b = (levels[voiced] - levels[voiced].mean(axis=0) for levels in (heard, said))
    scale = float(np.sqrt(np.sum(a * a) * np.sum(b * b)))
    return float(np.sum(a * b)) / scale if scale > 0 else 0.0
