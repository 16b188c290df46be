"""What a line does to a voice: rooms, telephones, levels, noise; and lines with nobody on them."""

import numpy as np
import parselmouth
from numpy.typing import NDArray

from scripts.train_tiny.voices import LOUDNESS, RATE, Sound, level, shift

Rng = np.random.Generator


def decibels(value: float) -> float:
    """dB to a factor of amplitude."""
    return float(10 ** (value / 20))


def reverb(sound: Sound, rng: Rng) -> Sound:
    """A small room: direct sound and an exponential tail of 0.1 to 0.4 s, 8 to 20 dB below."""
    decay = rng.uniform(0.1, 0.4)
    tail = rng.standard_normal(int(decay * RATE)) * np.exp(-6.9 * np.arange(int(decay * RATE)) / (decay * RATE))
    tail *= decibels(-rng.uniform(8, 20)) / np.sqrt((tail**2).sum())
    tail[0] = 1.0
    return _convolve(sound, tail)


def _convolve(sound: Sound, response: NDArray[np.float64]) -> Sound:
    size = 1 << (len(sound) + len(response)).bit_length()
    spectrum = np.fft.rfft(sound, size) * np.fft.rfft(response, size)
    return np.asarray(np.fft.irfft(spectrum, size)[: len(sound)], np.float32)


def band_pass(sound: Sound, low: float, high: float) -> Sound:
    """Zero-phase band with soft edges, as a telephone or a cheap microphone has."""
    size = 1 << len(sound).bit_length()
    hertz = np.fft.rfftfreq(size, 1 / RATE)
    gain = 1 / (1 + (low / np.maximum(hertz, 1)) ** 6) / (1 + (hertz / high) ** 8)
    return np.asarray(np.fft.irfft(np.fft.rfft(sound, size) * gain, size)[: len(sound)], np.float32)


def noise(samples: int, rng: Rng, dbfs: float) -> Sound:
    """Coloured noise of this RMS: white to brown, sometimes with mains hum."""
    size = 1 << samples.bit_length()
    hertz = np.maximum(np.fft.rfftfreq(size, 1 / RATE), 20.0)
    spectrum = np.fft.rfft(rng.standard_normal(size)) / hertz ** rng.uniform(0, 1)
    sound = np.fft.irfft(spectrum, size)[:samples]
    sound /= np.sqrt((sound**2).mean())
    if rng.random() < 0.2:
        base = rng.choice((50, 60))
        seconds = np.arange(samples) / RATE
        sound += sum(rng.uniform(0, 1) * np.sin(2 * np.pi * base * k * seconds) for k in (1, 2, 3, 5))
    return np.asarray(sound * decibels(dbfs), np.float32)


def tones(samples: int, rng: Rng, dbfs: float) -> Sound:
    """Something like music: notes of a few partials, a new chord every 0.2 to 0.8 s."""
    sound = np.zeros(samples)
    at = 0
    while at < samples:
        length = min(int(rng.uniform(0.2, 0.8) * RATE), samples - at)
        seconds = np.arange(length) / RATE
        envelope = np.exp(-seconds * rng.uniform(0.5, 4)) * np.minimum(1, seconds / 0.01)
        for _ in range(rng.integers(1, 4)):
            pitch = 110 * 2 ** (rng.integers(0, 37) / 12)
            for partial in range(1, 5):
                sound[at : at + length] += envelope * np.sin(2 * np.pi * pitch * partial * seconds) / partial
        at += length
    return np.asarray(sound / np.sqrt((sound**2).mean() + 1e-9) * decibels(dbfs), np.float32)


def clicks(samples: int, rng: Rng, count: int) -> Sound:
    """Knocks and key clicks: decaying bursts of 5 to 40 ms."""
    sound = np.zeros(samples)
    for _ in range(count):
        length = int(rng.uniform(0.005, 0.04) * RATE)
        at = int(rng.integers(0, max(1, samples - length)))
        burst = rng.standard_normal(length) * np.exp(-np.arange(length) / (0.2 * length))
        sound[at : at + length] += burst * decibels(rng.uniform(-40, -14))
    return np.asarray(sound, np.float32)


def background(samples: int, rng: Rng) -> Sound:
    """What is on a line besides the caller: noise nearly always, sometimes music-like tones, clicks."""
    sound = np.zeros(samples, np.float32)
    if rng.random() < 0.85:
        sound += noise(samples, rng, rng.uniform(-90, -46))
    if rng.random() < 0.12:
        sound += tones(samples, rng, rng.uniform(-55, -36))
    if rng.random() < 0.4:
        sound += clicks(samples, rng, int(rng.integers(1, 1 + samples // RATE)))
    return sound


def line(voice: Sound, rng: Rng) -> Sound:
    """The caller's voice as it arrives: room, band and level; the same shape for a whole call."""
    if rng.random() < 0.5:
        voice = reverb(voice, rng)
    if rng.random() < 0.7:
        voice = colour(voice, rng)
    if rng.random() < 0.5:
        low, high = rng.choice([(300, 3400), (150, 7000), (80, 6000), (20, 11000)])
        voice = band_pass(voice, low, high)
    return np.asarray(voice * decibels(rng.uniform(-14, 6)), np.float32)


def another_speaker(clip: Sound, rng: Rng) -> Sound:
    """The clip by somebody else: resonances, pitch and liveliness changed by Praat, words and their times kept.

    A dozen synthesisers' voices are learnt by heart; the encoder must know what is said by voices it never met.
    """
    resonances = float(np.exp(rng.uniform(-0.22, 0.22)))
    pitch = float(np.exp(rng.uniform(np.log(80), np.log(260))))
    changed = parselmouth.praat.call(
        parselmouth.Sound(clip.astype(np.float64), RATE),
        "Change gender", 70, 500, resonances, pitch, float(rng.uniform(0.5, 1.3)), 1.0,
    )  # fmt: skip
    return level(np.asarray(changed.values[0][: len(clip)], np.float32))


def somebody(clip: Sound, rng: Rng) -> tuple[Sound, float]:
    """The clip by a somewhat larger or smaller speaker, mostly one who does not exist; and how much faster it is."""
    scale = float(np.exp(rng.uniform(-0.14, 0.14)))
    clip = shift(clip, scale)
    return another_speaker(clip, rng) if rng.random() < 0.75 else clip, scale


def colour(sound: Sound, rng: Rng) -> Sound:
    """Tone as microphones have it: up to 8 dB up and down, changing slowly over the octaves; as loud as before."""
    size = 1 << len(sound).bit_length()
    octaves = np.log2(np.maximum(np.fft.rfftfreq(size, 1 / RATE), 60.0))
    gain = np.interp(octaves, np.linspace(np.log2(60), np.log2(12_000), 7), rng.uniform(-8, 8, 7))
    coloured = np.fft.irfft(np.fft.rfft(sound, size) * 10 ** (gain / 20), size)[: len(sound)]
    return np.asarray(coloured * np.sqrt((sound**2).mean() / ((coloured**2).mean() + 1e-12)), np.float32)


def voiced_frames(voice: Sound, quiet: float = 0.15 * LOUDNESS) -> NDArray[np.bool_]:
    """Which frames of 80 ms hold speech, from the clean voice at the common loudness."""
    frames = voice[: len(voice) // 1920 * 1920].reshape(-1, 1920)
    return np.asarray(np.sqrt((frames**2).mean(1)) > quiet)
