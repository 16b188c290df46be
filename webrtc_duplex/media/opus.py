"""Opus by ctypes: decoded straight to 24 kHz mono with in-band FEC and concealment, encoded from it.

PyAV's wrapper decodes at 48 kHz only and hides FEC and concealment; libopus itself lies inside the PyAV wheel. With it
no resampler is needed in either direction.

The codec's state is memory of ours (`opus_*_init` on a buffer), so it goes when the object goes; nothing to close.
"""

import ctypes
import ctypes.util
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np

from webrtc_duplex.audio import CHUNK_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.errors import EngineError

RTP_CLOCK = 48_000
"""Opus counts RTP time at 48 kHz, whatever it carries (RFC 7587)."""

_MAX_PACKET_SAMPLES = SAMPLE_RATE * 120 // 1000  # a packet holds at most 120 ms
_MAX_PACKET_BYTES = 1275
_DTX_BYTES = 2  # a packet of no more than this carries no sound: the sender rests (RFC 6716, 2.1.9)

# opus_defines.h
_OK = 0
_APPLICATION_AUDIO = 2049
_AUTO = -1000
_SIGNAL_VOICE = 3001
_SET_BITRATE = 4002
_SET_COMPLEXITY = 4010
_SET_INBAND_FEC = 4012
_SET_PACKET_LOSS_PERC = 4014
_SET_SIGNAL = 4024
_RESET_STATE = 4028


class Decoder:
    """The sound of one Opus stream; fed in order, each packet once or not at all."""

    rtp_clock = RTP_CLOCK

    def __init__(self) -> None:
        self._opus = _libopus()
        self._state = ctypes.create_string_buffer(self._opus.opus_decoder_get_size(1))
        _check(self._opus.opus_decoder_init(self._state, SAMPLE_RATE, 1), "decoder")
        self._buffer = (ctypes.c_int16 * _MAX_PACKET_SAMPLES)()
        self._pcm: Pcm = np.ctypeslib.as_array(self._buffer)
        self.resting = False
        """The last packet said that nothing follows for a while (DTX): what `conceal` makes is comfort noise."""

    def decode(self, payload: bytes) -> Pcm | None:
        """The packet's sound; None if the payload is no Opus."""
        self.resting = len(payload) <= _DTX_BYTES
        return self._decode(payload, _MAX_PACKET_SAMPLES, fec=False)

    def recover(self, next_payload: bytes, samples: int) -> Pcm | None:
        """The sound [samples] of the lost packet before `next_payload`, from its in-band FEC; None if it has none."""
        if not carries_fec(next_payload):
            return None
        return self._decode(next_payload, samples, fec=True)

    def conceal(self, samples: int) -> Pcm:
        """A guess of what comes next [samples], in whole steps of 2.5 ms and at most 120 ms."""
        pcm = self._decode(None, samples, fec=False)
        return np.zeros(samples, np.int16) if pcm is None else pcm

    def reset(self) -> None:
        """Begin a new stream."""
        _check(self._opus.opus_decoder_ctl(self._state, _RESET_STATE), "reset")
        self.resting = False

    def _decode(self, payload: bytes | None, samples: int, *, fec: bool) -> Pcm | None:
        size = 0 if payload is None else len(payload)
        if payload is not None and size == 0:
            return None  # libopus would take it for a lost packet
        count = self._opus.opus_decode(self._state, payload, size, self._buffer, samples, fec)
        return self._pcm[:count].copy() if count > 0 else None


class Encoder:
    """One caller's Opus: 20 ms packets of 24 kHz mono, in the mode for a clean path or for a lossy one.

    On a clean path application audio at 40 kbps and complexity 5 codes CELT, at a third of the voice mode's CPU time.
    CELT has no in-band FEC, so while the peer reports loss the signal is declared voice, which codes SILK or hybrid
    with FEC; a low-delay encoder could never do that. Both have 6.5 ms of look-ahead.
    """

    rtp_clock = RTP_CLOCK

    BITRATE = 40_000
    COMPLEXITY = 5

    _LOSS_EASES = 0.8
    _LOSS_OVER = 0.005

    def __init__(self) -> None:
        self._opus = _libopus()
        self._state = ctypes.create_string_buffer(self._opus.opus_encoder_get_size(1))
        _check(self._opus.opus_encoder_init(self._state, SAMPLE_RATE, 1, _APPLICATION_AUDIO), "encoder")
        self._chunk = (ctypes.c_int16 * CHUNK_SAMPLES)()
        self._pcm: Pcm = np.ctypeslib.as_array(self._chunk)
        self._packet = ctypes.create_string_buffer(_MAX_PACKET_BYTES)
        self._set(_SET_BITRATE, self.BITRATE)
        self._set(_SET_COMPLEXITY, self.COMPLEXITY)
        self._loss = 0.0

    def encode(self, chunk: Pcm) -> bytes:
        """The packet of a chunk [480]."""
        self._pcm[:] = chunk
        size = self._opus.opus_encode(self._state, self._chunk, CHUNK_SAMPLES, self._packet, _MAX_PACKET_BYTES)
        _check(min(size, 0), "packet")
        return ctypes.string_at(self._packet, size)

    @property
    def guarded(self) -> bool:
        """Whether packets carry FEC at present."""
        return self._loss > 0

    def set_loss(self, fraction: float) -> None:
        """Follow the peer's reports of lost packets (0..1), one call a report; it is quick to believe in loss."""
        loss = max(fraction, self._loss * self._LOSS_EASES)
        self._loss = loss if loss >= self._LOSS_OVER else 0.0
        self._set(_SET_SIGNAL, _SIGNAL_VOICE if self.guarded else _AUTO)
        self._set(_SET_INBAND_FEC, int(self.guarded))
        self._set(_SET_PACKET_LOSS_PERC, min(100, round(100 * self._loss + 0.5)) if self.guarded else 0)

    def _set(self, request: int, value: int) -> None:
        _check(self._opus.opus_encoder_ctl(self._state, request, ctypes.c_int32(value)), f"setting {request}")


def carries_fec(payload: bytes) -> bool:
    """Whether a packet holds a copy (LBRR) of the packet before it.

    CELT has none. A SILK frame opens with one bit of voice activity for each 20 ms and then the LBRR flag, in stereo
    once more for the side channel; both are coded with even odds, so they are plain bits (RFC 6716, 4.2.3 and 4.2.4).
    """
    first = _first_frame(payload)
    config = payload[0] >> 3 if payload else 31
    if not first or config >= 16:
        return False
    pieces = (1, 1, 2, 3)[config & 3] if config < 12 else 1
    flags = 1 << (7 - pieces)
    if payload[0] & 4:
        flags |= 1 << (7 - (2 * pieces + 1))
    return bool(first[0] & flags)


def _first_frame(payload: bytes) -> bytes:
    """The first of the frames that a packet holds; empty if it is malformed."""
    frames = (ctypes.c_void_p * 48)()
    sizes = (ctypes.c_int16 * 48)()
    held = ctypes.create_string_buffer(payload, len(payload))
    count = _libopus().opus_packet_parse(held, len(payload), None, frames, sizes, None)
    if count < 1 or frames[0] is None:
        return b""
    return ctypes.string_at(frames[0], sizes[0])


@cache
def _libopus() -> ctypes.CDLL:
    """The library inside the PyAV wheel, or the system's. Raises EngineError if there is neither."""
    for path in [*_in_wheel(), ctypes.util.find_library("opus")]:
        if path is not None:
            return _declare(ctypes.CDLL(str(path)))
    raise EngineError(
        "libopus was not found: neither in the PyAV wheel (av.libs/libopus-*.so) nor on the system (package libopus0)",
        code="opus_missing",
    )


def _in_wheel() -> list[Path]:
    spec = importlib.util.find_spec("av")
    if spec is None or spec.origin is None:
        return []
    package = Path(spec.origin).parent
    return [*package.parent.glob("av.libs/libopus-*.so*"), *package.glob(".dylibs/libopus*.dylib")]


def _declare(opus: ctypes.CDLL) -> ctypes.CDLL:
    void_p, int32 = ctypes.c_void_p, ctypes.c_int32
    opus.opus_decoder_get_size.argtypes = [ctypes.c_int]
    opus.opus_decoder_init.argtypes = [void_p, int32, ctypes.c_int]
    opus.opus_decode.argtypes = [void_p, ctypes.c_char_p, int32, void_p, ctypes.c_int, ctypes.c_int]
    opus.opus_decoder_ctl.argtypes = [void_p, ctypes.c_int]
    opus.opus_encoder_get_size.argtypes = [ctypes.c_int]
    opus.opus_encoder_init.argtypes = [void_p, int32, ctypes.c_int, ctypes.c_int]
    opus.opus_encode.argtypes = [void_p, void_p, ctypes.c_int, void_p, int32]
    opus.opus_encoder_ctl.argtypes = [void_p, ctypes.c_int]  # the rest is variadic
    opus.opus_packet_parse.argtypes = [void_p, int32, void_p, void_p, void_p, void_p]
    return opus


def _check(status: int, what: str) -> None:
    if status != _OK:
        raise EngineError(f"libopus refused the {what}: error {status}", code="opus_failed")
