"""Whether somebody speaks: cheap, and only advice. The model hears everything and decides for itself."""

import math
from dataclasses import dataclass

import numpy as np

from webrtc_duplex.audio import SAMPLE_RATE, Pcm

BLOCK_SAMPLES = SAMPLE_RATE // 100
"""Loudness is judged 10 ms at a time."""

_ABOVE_FLOOR_DB = 10.0
_AUDIBLE_DB = -50.0  # of full scale; nothing quieter is speech
_LOWEST_FLOOR_DB = -60.0
_FIRST_FLOOR_DB = -35.0  # the first block is taken for the room's noise, unless it is louder than this
_FLOOR_RISES_DB = 0.02  # a block: 2 dB a second, so that a sentence does not lift it, and a fan does
_FLOOR_FALLS = 0.2  # of the way down to a quieter block
_STARTS_WITH = 5  # loud blocks among the last ...
_STARTS_WITHIN = 8
_MEAN = np.full(BLOCK_SAMPLES, 1 / BLOCK_SAMPLES, np.float32)
_FULL_SCALE_DB = 20 * math.log10(32768)
_HANGOVER_BLOCKS = 40  # pauses within a sentence are shorter than this


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Somebody began to speak at this sample, counted from the first one heard."""

    sample: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """Nobody has spoken since this sample."""

    sample: int


class VoiceDetector:
    """Finds where speech starts and stops: loudness against a floor that follows the room."""

    def __init__(self) -> None:
        self.speaking = False
        self._floor_db = _FIRST_FLOOR_DB
        self._blocks = 0
        self._rest: Pcm = np.zeros(0, np.int16)
        self._loud: list[int] = []  # the last loud blocks, at most _STARTS_WITH

    def hear(self, pcm: Pcm) -> list[SpeechStarted | SpeechStopped]:
        """What starts or stops in the next piece of sound, of any length."""
        sound = np.concatenate([self._rest, pcm]) if len(self._rest) else pcm
        whole = len(sound) // BLOCK_SAMPLES * BLOCK_SAMPLES
        self._rest = sound[whole:]
        events = [self._hear_block(level) for level in _levels_db(sound[:whole])]
        return [event for event in events if event is not None]

    def _hear_block(self, level_db: float) -> SpeechStarted | SpeechStopped | None:
        block = self._blocks
        self._blocks += 1
        if block == 0:
            self._floor_db = min(self._floor_db, max(level_db, _LOWEST_FLOOR_DB))
        if level_db > max(_AUDIBLE_DB, self._floor_db + _ABOVE_FLOOR_DB):
            self._loud = [*self._loud[1 - _STARTS_WITH :], block]
        self._follow_room(level_db)
        if not self.speaking and len(self._loud) == _STARTS_WITH and self._loud[0] > block - _STARTS_WITHIN:
            self.speaking = True
            return SpeechStarted(self._loud[0] * BLOCK_SAMPLES)
        if self.speaking and block - self._loud[-1] >= _HANGOVER_BLOCKS:
            self.speaking = False
            return SpeechStopped((self._loud[-1] + 1) * BLOCK_SAMPLES)
        return None

    def _follow_room(self, level_db: float) -> None:
        if level_db > self._floor_db:
            self._floor_db += min(_FLOOR_RISES_DB, level_db - self._floor_db)
        else:
            self._floor_db += _FLOOR_FALLS * (max(level_db, _LOWEST_FLOOR_DB) - self._floor_db)


def _levels_db(pcm: Pcm) -> list[float]:
    """Loudness of each block in dB of full scale, without its DC."""
    blocks = pcm.reshape(-1, BLOCK_SAMPLES).astype(np.float32)
    power = np.einsum("ij,ij->i", blocks, blocks) / BLOCK_SAMPLES - (blocks @ _MEAN) ** 2
    levels: list[float] = (10 * np.log10(np.maximum(power, 1e-3)) - _FULL_SCALE_DB).tolist()
    return levels
