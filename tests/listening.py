"""Ears for tests: which sentence is this, and is that sound in this one?"""

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pocketsphinx import Decoder

Sound = NDArray[np.int16]

RECOGNISER_RATE = 16_000


def read_wav(path: Path) -> tuple[Sound, int]:
    """Mono samples and their rate."""
    with wave.open(str(path)) as file:
        assert file.getnchannels() == 1 and file.getsampwidth() == 2
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.int16), file.getframerate()


def write_wav(path: Path, pcm: Sound, rate: int) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm.astype("<i2").tobytes())
    return path


def resample(pcm: Sound, rate: int, to: int) -> Sound:
    """By the spectrum of the whole recording: slow, and exact enough for ears."""
    length = round(len(pcm) * to / rate)
    spectrum = np.fft.rfft(pcm.astype(np.float64))
    bins = length // 2 + 1
    fitted = np.zeros(bins, dtype=np.complex128)
    kept = min(bins, len(spectrum))
    fitted[:kept] = spectrum[:kept]
    return np.clip(np.fft.irfft(fitted, length) * (length / len(pcm)), -32768, 32767).astype(np.int16)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of speech, in seconds from the start of the recording."""

    start_s: float
    end_s: float


def find_speech(pcm: Sound, rate: int, *, quiet_db: float = -45.0, pause_s: float = 0.5) -> list[Span]:
    """Stretches louder than `quiet_db` of full scale; pauses shorter than `pause_s` do not end one."""
    hop = rate // 50
    frames = pcm[: len(pcm) // hop * hop].astype(np.float64).reshape(-1, hop)
    loud = np.flatnonzero(10 * np.log10((frames**2).mean(axis=1) / 32768.0**2 + 1e-12) > quiet_db)
    if not len(loud):
        return []
    groups = np.split(loud, np.flatnonzero(np.diff(loud) > pause_s * 50) + 1)
    return [Span(float(group[0]) / 50, float(group[-1] + 1) / 50) for group in groups if len(group) >= 10]


def cut(pcm: Sound, rate: int, span: Span, margin_s: float = 0.2) -> Sound:
    return pcm[max(0, int((span.start_s - margin_s) * rate)) : int((span.end_s + margin_s) * rate)]


def words(sentence: str) -> str:
    """The words of a sentence as the recogniser spells them."""
    return " ".join("".join(c for c in word if c.isalpha() or c == "'") for word in sentence.lower().split())


WIDE_BEAMS = {"beam": 1e-100, "pbeam": 1e-100, "wbeam": 1e-80}
"""So that the right sentence is not given up for a blurred word at its start; pocketsphinx' own are 1e-48 and 7e-29."""


class SentenceRecogniser:
    """Tells which one of a closed set of sentences was said, by pocketsphinx with a JSGF grammar."""

    def __init__(self, sentences: list[str], folder: Path) -> None:
        self._sentences = {words(sentence): sentence for sentence in sentences}
        grammar = folder / "sentences.gram"
        grammar.write_text(f"#JSGF V1.0;\ngrammar sentences;\npublic <one> = {' | '.join(self._sentences)};\n")
        self._decoder = Decoder(lm=None, jsgf=str(grammar), samprate=RECOGNISER_RATE, loglevel="FATAL", **WIDE_BEAMS)

    def hear(self, pcm: Sound, rate: int) -> str | None:
        """The sentence, as it is written; None for none of them. A beginning that only one of them has is enough."""
        self._decoder.start_utt()
        self._decoder.process_raw(resample(pcm, rate, RECOGNISER_RATE).tobytes(), full_utt=True)
        self._decoder.end_utt()
        heard = self._decoder.hyp()
        if heard is None or not heard.hypstr:
            return None
        matching = [sentence for key, sentence in self._sentences.items() if key.startswith(heard.hypstr)]
        return matching[0] if len(matching) == 1 else None


def likeness(sent: Sound, heard: Sound) -> tuple[float, int]:
    """The largest correlation coefficient of two sounds of one rate over all delays, and that delay in samples."""
    a, b = (sound.astype(np.float64) - sound.mean() for sound in (sent, heard))
    size = 1 << (len(a) + len(b)).bit_length()
    products = np.fft.irfft(np.fft.rfft(b, size) * np.conj(np.fft.rfft(a, size)), size)
    delay = int(np.argmax(products[: len(b)]))
    both = b[delay : delay + len(a)]
    norm = np.linalg.norm(a[: len(both)]) * np.linalg.norm(both)
    return float(products[delay] / norm) if norm > 0 else 0.0, delay
