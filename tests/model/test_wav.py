"""WAV files and resampling."""

import struct
from pathlib import Path

import numpy as np
import pytest

from webrtc_duplex.errors import RequestError
from webrtc_duplex.model.wav import Samples, decode_wav, read_wav, resample, to_pcm, write_wav


def tone(rate: int, frequency: float, seconds: float = 0.5) -> Samples:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def wav_bytes(data: bytes, kind: int, channels: int, bits: int, rate: int = 24_000) -> bytes:
    frame = channels * bits // 8
    header = struct.pack("<4sIHHIIHH", b"fmt ", 16, kind, channels, rate, rate * frame, frame, bits)
    return b"RIFF\0\0\0\0WAVE" + header + struct.pack("<4sI", b"data", len(data)) + data


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    pcm = to_pcm(tone(24_000, 440))
    write_wav(tmp_path / "a.wav", pcm)
    np.testing.assert_array_equal(to_pcm(read_wav(tmp_path / "a.wav")), pcm)


@pytest.mark.parametrize(
    ("kind", "bits", "encode"),
    [
        (1, 8, lambda x: np.rint(x * 127 + 128).astype(np.uint8).tobytes()),
        (1, 16, lambda x: np.rint(x * 32767).astype("<i2").tobytes()),
        (1, 24, lambda x: b"".join(int(v).to_bytes(3, "little", signed=True) for v in np.rint(x * (2**23 - 1)))),
        (1, 32, lambda x: np.rint(x.astype(np.float64) * (2**31 - 1)).astype("<i4").tobytes()),
        (3, 32, lambda x: x.astype("<f4").tobytes()),
        (3, 64, lambda x: x.astype("<f8").tobytes()),
    ],
)
def test_every_usual_encoding_is_read(kind: int, bits: int, encode: object) -> None:
    wanted = tone(24_000, 440, 0.01)
    assert callable(encode)
    heard = decode_wav(wav_bytes(encode(wanted), kind, 1, bits), "a.wav")
    np.testing.assert_allclose(heard, wanted, atol=1 / 120 if bits == 8 else 1e-4)


def test_channels_are_averaged() -> None:
    stereo = np.array([[1000, 3000], [-500, 500]], "<i2").tobytes()
    np.testing.assert_allclose(decode_wav(wav_bytes(stereo, 1, 2, 16), "a.wav") * 32768, [2000, 0], atol=1e-3)


def test_other_chunks_are_passed_over() -> None:
    plain = wav_bytes(np.array([1, 2, 3], "<i2").tobytes(), 1, 1, 16)
    with_list = plain[:12] + struct.pack("<4sI", b"LIST", 3) + b"abc\0" + plain[12:]
    np.testing.assert_array_equal(decode_wav(with_list, "a.wav"), decode_wav(plain, "a.wav"))


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
def test_a_tone_keeps_its_pitch_phase_and_level_when_resampled(rate: int) -> None:
    heard = resample(tone(rate, 1000), rate, 24_000)
    wanted = tone(24_000, 1000)
    assert abs(len(heard) - len(wanted)) <= 1
    np.testing.assert_allclose(heard[600:-600], wanted[600 : len(heard) - 600], atol=2e-3)


def test_what_is_above_the_new_band_is_removed() -> None:
    assert np.abs(resample(tone(48_000, 15_000), 48_000, 24_000)[600:-600]).max() < 1e-3


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"ID3 this is music", "does not begin with RIFF"),
        (wav_bytes(b"", 1, 1, 16), "holds no sound"),
        (wav_bytes(b"\0" * 8, 85, 1, 16), "neither PCM nor float"),
        (wav_bytes(np.array([np.nan], "<f4").tobytes(), 3, 1, 32), "not finite"),
        (wav_bytes(b"", 1, 1, 16)[:30], "cannot be read|can be read"),
    ],
)
def test_what_is_no_sound_is_refused_with_a_sentence(raw: bytes, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        decode_wav(raw, "a.wav")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.wav"):
        read_wav(tmp_path / "nowhere.wav")
