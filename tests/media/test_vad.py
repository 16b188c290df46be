"""The voice detector."""

import numpy as np

from tests.media import wire
from webrtc_duplex.audio import FRAME_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.media.vad import SpeechStarted, SpeechStopped, VoiceDetector


def noise(seconds: float, level: float) -> Pcm:
    return np.asarray(np.random.default_rng(0).normal(0, level, round(seconds * SAMPLE_RATE)), np.int16)


def talk(seconds: float) -> Pcm:
    return np.asarray(wire.sine(seconds, 300, 6000) + noise(seconds, 300), np.int16)


def test_speech_is_found_where_it_starts_and_stops() -> None:
    pcm = np.concatenate([noise(1, 10), talk(1.5), noise(2, 10)])
    started, stopped = VoiceDetector().hear(pcm)
    assert isinstance(started, SpeechStarted) and abs(started.sample - SAMPLE_RATE) < 0.03 * SAMPLE_RATE
    assert isinstance(stopped, SpeechStopped) and abs(stopped.sample - 2.5 * SAMPLE_RATE) < 0.03 * SAMPLE_RATE


def test_pieces_of_any_length_give_the_same_events() -> None:
    pcm = np.concatenate([noise(1, 10), talk(1), noise(1, 10)])
    at_once = VoiceDetector().hear(pcm)
    detector = VoiceDetector()
    frames = [pcm[begin : begin + FRAME_SAMPLES] for begin in range(0, len(pcm), FRAME_SAMPLES)]
    assert [event for frame in frames for event in detector.hear(frame)] == at_once
    odd = VoiceDetector()
    pieces = np.split(pcm, range(77, len(pcm), 777))
    assert len([event for piece in pieces for event in odd.hear(piece)]) == len(at_once)


def test_a_click_is_no_speech() -> None:
    pcm = noise(2, 10)
    pcm[SAMPLE_RATE : SAMPLE_RATE + 200] = 20_000
    assert VoiceDetector().hear(pcm) == []


def test_a_short_pause_does_not_end_speech() -> None:
    pcm = np.concatenate([noise(0.5, 10), talk(0.6), noise(0.25, 10), talk(0.6), noise(1, 10)])
    assert len(VoiceDetector().hear(pcm)) == 2


def test_a_steady_fan_is_no_speech() -> None:
    assert VoiceDetector().hear(noise(5, 300)) == []


def test_speech_above_a_fan_is_found() -> None:
    pcm = noise(6, 200)
    pcm[2 * SAMPLE_RATE : 3 * SAMPLE_RATE] += talk(1)
    started, stopped = VoiceDetector().hear(pcm)
    assert abs(started.sample - 2 * SAMPLE_RATE) < 0.05 * SAMPLE_RATE
    assert abs(stopped.sample - 3 * SAMPLE_RATE) < 0.05 * SAMPLE_RATE


def test_digital_silence_is_no_speech() -> None:
    detector = VoiceDetector()
    assert detector.hear(np.zeros(SAMPLE_RATE, np.int16)) == [] and not detector.speaking
