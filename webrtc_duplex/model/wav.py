"""WAV files in and out, and resampling of whole recordings: for voices and for offline runs."""

import math
import struct
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import SAMPLE_RATE, Pcm
from webrtc_duplex.errors import RequestError

Samples = NDArray[np.float32]
"""Mono sound [n], full scale at 1."""

_FORMAT_EXTENSIBLE = 0xFFFE  # the real format (1: PCM, 3: float) stands further on
_TAPS_PER_SIDE = 32
"""Zero crossings of the resampler's kernel on each side; with the Kaiser window below it is flat to 0.9 of the band."""
_KAISER_BETA = 9.0


def read_wav(path: Path, rate: int = SAMPLE_RATE) -> Samples:
    """Read a RIFF WAVE file, its channels averaged, resampled to `rate`.

    Takes PCM of 8, 16, 24 and 32 bits and float of 32 and 64. A file cut off in its data is read as far as it goes.
    Raises RequestError, naming the file, if it is none of these, empty or not finite.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}", param=str(path)) from error
    return decode_wav(raw, str(path), rate)


def decode_wav(raw: bytes, name: str, rate: int = SAMPLE_RATE) -> Samples:
    """`read_wav` of bytes; `name` stands for them in errors."""
    try:
        samples, file_rate = _parse(raw)
    except (struct.error, ValueError) as error:
        raise RequestError(f"{name} is not a WAV file that can be read: {error}", param=name) from error
    if not samples.size:
        raise RequestError(f"{name} holds no sound: its data is empty", param=name)
    if not np.isfinite(samples).all():
        raise RequestError(f"{name} holds samples that are not finite", param=name)
    return resample(samples, file_rate, rate)


def write_wav(path: Path, pcm: Pcm) -> None:
    """Write mono int16 at 24 kHz. Raises OSError where the file cannot be opened, which `wave` would stumble over."""
    with path.open("wb") as opened, wave.open(opened, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(pcm.astype("<i2").tobytes())


def to_pcm(samples: Samples) -> Pcm:
    """Round to int16, clipping what is louder than full scale."""
    pcm: Pcm = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype(np.int16)
    return pcm


def resample(samples: Samples, rate: int, wanted: int) -> Samples:
    """Resample a whole recording [n] to [ceil(n * wanted / rate)], by a windowed sinc of every phase of the ratio.

    The kernel is centred, so nothing is delayed; the band is cut a little below the lower of the two Nyquist rates.
    """
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    cutoff = 0.95 * min(1.0, wanted / rate)  # in units of the input's Nyquist rate
    reach = math.ceil(_TAPS_PER_SIDE / cutoff)
    padded = np.pad(samples, (reach, reach + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    out = np.empty(-(-len(samples) * up // down), np.float32)
    for phase in range(min(up, len(out))):
        start, fraction = divmod(phase * down, up)
        share = out[phase::up]
        share[:] = windows[start + 1 :: down][: len(share)] @ _kernel(fraction / up, reach, cutoff)
    return out


def _kernel(fraction: float, reach: int, cutoff: float) -> Samples:
    """Weights [2 * reach] of the inputs around a point that lies `fraction` of a sample after the reach-th of them."""
    offsets = np.arange(1 - reach, reach + 1) - fraction
    window = np.i0(_KAISER_BETA * np.sqrt(np.maximum(0.0, 1.0 - (offsets / reach) ** 2))) / np.i0(_KAISER_BETA)
    weights = np.sinc(cutoff * offsets) * window
    kernel: Samples = (weights / weights.sum()).astype(np.float32)
    return kernel


@dataclass(frozen=True, slots=True)
class _Format:
    kind: int
    channels: int
    rate: int
    bits: int


def _parse(raw: bytes) -> tuple[Samples, int]:
    """Samples (mono) and rate of a RIFF WAVE file; ValueError says what is wrong with it."""
    if len(raw) < 12 or raw[:4] != b"RIFF" or raw[8:12] != b"WAVE":
        raise ValueError("it does not begin with RIFF and WAVE")
    sound: _Format | None = None
    at = 12
    while at + 8 <= len(raw):
        tag, size = struct.unpack_from("<4sI", raw, at)
        chunk = raw[at + 8 : at + 8 + size]
        if tag == b"fmt ":
            sound = _parse_format(chunk)
        if tag == b"data":
            if sound is None:
                raise ValueError("its data stand before their format")
            return _decode_samples(chunk, sound), sound.rate
        at += 8 + size + size % 2  # chunks begin at even places
    raise ValueError("it has no data")


def _parse_format(chunk: bytes) -> _Format:
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == _FORMAT_EXTENSIBLE:
        (kind,) = struct.unpack_from("<H", chunk, 24)
    if not channels or not 1000 <= rate <= 384_000:
        raise ValueError(f"{channels} channels at {rate} Hz make no sense")
    return _Format(kind, channels, rate, bits)


def _decode_samples(data: bytes, sound: _Format) -> Samples:
    """Interleaved samples of any encoding, as mono."""
    width = sound.bits // 8
    data = data[: len(data) - len(data) % (max(width, 1) * sound.channels)]
    match sound.kind, sound.bits:
        case (1, 8):
            flat = (np.frombuffer(data, np.uint8).astype(np.float32) - 128.0) / 128.0
        case (1, 16):
            flat = np.frombuffer(data, "<i2").astype(np.float32) / 32768.0
        case (1, 24):
            high_bytes = np.zeros((len(data) // 3, 4), np.uint8)
            high_bytes[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
            flat = high_bytes.view("<i4")[:, 0].astype(np.float32) / 2.0**31
        case (1, 32):
            flat = np.frombuffer(data, "<i4").astype(np.float32) / 2.0**31
        case (3, 32):
            flat = np.frombuffer(data, "<f4").astype(np.float32)
        case (3, 64):
            flat = np.frombuffer(data, "<f8").astype(np.float32)
        case _:
            raise ValueError(f"format {sound.kind} with {sound.bits} bits is neither PCM nor float")
    mono: Samples = flat.reshape(-1, sound.channels).mean(axis=1, dtype=np.float32)
    return mono
