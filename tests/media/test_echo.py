"""The agent's own voice in a caller's microphone, told from another person's speech."""

import numpy as np
import pytest
from numpy.typing import NDArray

from webrtc_duplex.audio import CHUNK_SAMPLES, FRAME_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.media.echo import EchoDetector

SECONDS = 12


def speech(seed: int, seconds: float = SECONDS) -> Pcm:
    """As loud, as varied and as uneven as speech: noise whose bands come and go as syllables do."""
    chance = np.random.default_rng(seed)
    chunks = round(seconds * SAMPLE_RATE) // CHUNK_SAMPLES
    sound: NDArray[np.float64] = np.zeros(chunks * CHUNK_SAMPLES)
    noise = np.fft.rfft(chance.normal(0, 1, len(sound)))
    hz = np.fft.rfftfreq(len(sound), 1 / SAMPLE_RATE)
    for low, high in ((100, 500), (500, 1200), (1200, 2500), (2500, 5000)):
        band = np.fft.irfft(np.where((hz >= low) & (hz < high), noise, 0), len(sound))
        syllables = np.convolve(chance.normal(0, 1, chunks), np.hanning(9), "same")
        sound += band / band.std() * np.repeat(np.exp(syllables), CHUNK_SAMPLES)
    loud: NDArray[np.float64] = np.clip(2000 * sound / sound.std(), -32768, 32767)
    return loud.astype(np.int16)


def echo_of(said: Pcm, delay_s: float, gain: float) -> Pcm:
    """What a microphone hears of it in a room: later, quieter, blurred, with some noise."""
    chance = np.random.default_rng(7)
    delay = round(delay_s * SAMPLE_RATE)
    room = np.exp(-np.arange(2400) / 600) * chance.normal(0, 0.1, 2400)
    room[0] = 1
    blurred = np.convolve(said.astype(np.float64), room)[: len(said) - delay] * gain
    return np.concatenate([np.zeros(delay), blurred + chance.normal(0, 15, len(blurred))]).astype(np.int16)


def suspected(said: Pcm, heard: Pcm) -> bool:
    """Whether an echo is suspected in a call of these two voices, asked about once a second."""
    detector, found = EchoDetector(), False
    for position in range(len(said) // FRAME_SAMPLES):
        frame = slice(position * FRAME_SAMPLES, (position + 1) * FRAME_SAMPLES)
        detector.hear(position, heard[frame])
        detector.say(position, said[frame])
        if position % 12 == 0:
            found = detector.look() or found
    return found


@pytest.mark.parametrize("delay_s", [0.15, 0.4, 0.9])
@pytest.mark.parametrize("gain", [1.0, 0.1])
def test_an_echo_is_suspected_at_any_delay_and_loudness(delay_s: float, gain: float) -> None:
    said = speech(1)
    assert suspected(said, echo_of(said, delay_s, gain))


def test_another_person_who_speaks_at_the_same_time_is_no_echo() -> None:
    assert not suspected(speech(1), speech(2))


def test_silence_is_no_echo() -> None:
    silence = np.zeros(SECONDS * SAMPLE_RATE, np.int16)
    assert not suspected(speech(1), silence)
    assert not suspected(silence, speech(1))


def test_an_agent_that_repeats_its_caller_is_not_the_callers_echo() -> None:
    heard = speech(1)
    assert not suspected(heard, heard)


def test_an_echo_is_found_again_after_a_part_of_the_call_that_was_not_heard() -> None:
    said = speech(1)
    heard, detector = echo_of(said, 0.3, 0.3), EchoDetector()
    for position in [*range(60), *range(100, 150)]:
        frame = slice(position * FRAME_SAMPLES, (position + 1) * FRAME_SAMPLES)
        detector.hear(position, heard[frame])
        detector.say(position, said[frame])
    assert not detector.look()
    assert detector.look()
