"""A caller for tests: a recorded person where the shared data is at hand, else a synthetic voice."""

import shutil
import subprocess
from pathlib import Path

import numpy as np

from tests.conftest import SHARED
from tests.listening import Sound, read_wav, resample, write_wav

RATE = 24_000
SENTENCE = "Hello there. Could you please tell me something about the weather and the sea?"


def caller(folder: Path, *, silence_s: float, then_silence_s: float = 0.0) -> tuple[Path, Sound]:
    """A WAV to be a microphone: silence, one turn of speech of three to five seconds, silence. And the turn alone."""
    turn = recorded_turn()
    if turn is None:
        turn = spoken_turn(folder)
    pauses = [np.zeros(int(length * RATE), np.int16) for length in (silence_s, then_silence_s)]
    return write_wav(folder / "caller.wav", np.concatenate([pauses[0], turn, pauses[1]]), RATE), turn


def recorded_turn() -> Sound | None:
    """The first turn of the person who calls an assistant: 4.4 s."""
    path = SHARED / "data" / "speech" / "human_assistant_40s.wav"
    if not path.is_file():
        return None
    pcm, rate = read_wav(path)
    return resample(pcm[int(3.2 * rate) : int(7.8 * rate)], rate, RATE)


def spoken_turn(folder: Path) -> Sound:
    """By flite or espeak-ng; by nobody, if neither is installed."""
    path = folder / "spoken.wav"
    if flite := shutil.which("flite"):
        subprocess.run([flite, "-voice", "slt", "-t", SENTENCE, "-o", str(path)], check=True)
    elif espeak := shutil.which("espeak-ng"):
        subprocess.run([espeak, "-w", str(path), SENTENCE], check=True)
    else:
        return babble(4.0)
    pcm, rate = read_wav(path)
    return resample(pcm, rate, RATE)


def babble(length_s: float) -> Sound:
    """Speech as far as loudness and pitch go: a gliding buzz through a vowel's formants, four syllables a second."""
    time = np.arange(int(length_s * RATE)) / RATE
    pitch = 2 * np.pi * np.cumsum(120 + 25 * np.sin(2 * np.pi * 0.7 * time)) / RATE
    voice = np.zeros_like(time)
    for harmonic in range(1, 30):
        away = [(harmonic * 120 - formant) / 150 for formant in (500, 1_500, 2_500)]
        voice += sum(np.exp(-(x**2)) for x in away) * np.sin(harmonic * pitch)
    syllables = np.clip(np.sin(2 * np.pi * 4 * time), 0, None) ** 0.5
    sound: Sound = (9_000 * voice / np.abs(voice).max() * syllables).astype(np.int16)
    return sound
