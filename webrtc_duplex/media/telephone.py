"""The codecs of telephones, as 24 kHz mono: PCMU, PCMA, G.722, comfort noise; and the keys that callers press.

Resampling keeps its state from packet to packet, so that there is no edge in the sound every 20 ms.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.error import FFmpegError
from numpy.typing import NDArray

from webrtc_duplex.audio import CHUNK_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.errors import RequestError
from webrtc_duplex.media import splice
from webrtc_duplex.media.jitter import Decoder, Packet, signed

RTP_CLOCK = 8000
"""All of them count RTP time at 8 kHz; G.722, which samples at 16 kHz, by an old mistake (RFC 3551, 4.5.2)."""

_MOST_BYTES = 8000  # a packet of more than a second is none of theirs


@dataclass(frozen=True, slots=True)
class _Codec:
    av_name: str
    sample_rate: int


_CODECS = {"pcmu": _Codec("pcm_mulaw", 8000), "pcma": _Codec("pcm_alaw", 8000), "g722": _Codec("g722", 16_000)}


def decoder(name: str, noise: np.random.Generator) -> Decoder:
    """The decoder of "pcmu", "pcma", "g722" or "cn"; `noise` is what comfort noise is made of.

    Raises RequestError for any other name.
    """
    return ComfortNoise(noise) if name == "cn" else TelephoneDecoder(name)


class TelephoneDecoder:
    """PCMU, PCMA or G.722 to 24 kHz. None of them conceals, so the last pitch period is said again."""

    rtp_clock = RTP_CLOCK
    resting = False

    def __init__(self, name: str) -> None:
        self._codec = _codec(name)
        self.reset()

    def reset(self) -> None:
        """Begin a new stream."""
        self._context = _context(self._codec, "r")
        self._resample = Resampler(self._codec.sample_rate, SAMPLE_RATE)
        self._continuation = _Continuation()

    def decode(self, payload: bytes) -> Pcm | None:
        """The packet's sound; None if it cannot be."""
        if not 0 < len(payload) <= _MOST_BYTES:
            return None
        try:
            frames = self._context.decode(av.Packet(payload))
        except FFmpegError:
            return None
        pcm = self._resample(np.concatenate([frame.to_ndarray()[0] for frame in frames]))
        return self._continuation.join(pcm)

    def recover(self, next_payload: bytes, samples: int) -> Pcm | None:
        """None: these codecs carry nothing of the packet before."""
        return None

    def conceal(self, samples: int) -> Pcm:
        """What might come next [samples]."""
        return self._continuation.go_on(samples)


class ComfortNoise:
    """The background of a caller who does not speak, as loud as RFC 3389 says; its spectrum is not followed."""

    rtp_clock = RTP_CLOCK
    resting = True

    def __init__(self, noise: np.random.Generator) -> None:
        self._noise = noise
        self._level = 0.0

    def reset(self) -> None:
        """Nothing is kept from stream to stream that the next packet does not set."""

    def decode(self, payload: bytes) -> Pcm | None:
        """20 ms of noise; the first byte is its level in -dB of full scale."""
        if not payload:
            return None
        self._level = 32768 * 10 ** (-(payload[0] & 0x7F) / 20)
        return self.conceal(CHUNK_SAMPLES)

    def recover(self, next_payload: bytes, samples: int) -> Pcm | None:
        """None: noise cannot be lost."""
        return None

    def conceal(self, samples: int) -> Pcm:
        """More of the same."""
        return _to_pcm(self._level * self._noise.standard_normal(samples, np.float32))


class TelephoneEncoder:
    """24 kHz to PCMU, PCMA or G.722, a chunk at a time."""

    rtp_clock = RTP_CLOCK

    def __init__(self, name: str) -> None:
        self._codec = _codec(name)
        self._context = _context(self._codec, "w")
        self._resample = Resampler(SAMPLE_RATE, self._codec.sample_rate)

    def encode(self, chunk: Pcm) -> bytes:
        """The packet of a chunk [480]: 160 bytes."""
        frame = av.AudioFrame.from_ndarray(self._resample(chunk)[None], format="s16", layout="mono")
        frame.sample_rate = self._codec.sample_rate
        return b"".join(bytes(packet) for packet in self._context.encode(frame))

    def set_loss(self, fraction: float) -> None:
        """These codecs cannot guard against loss."""


class Resampler:
    """Sound from one rate to another, piece by piece as if at once; 2 ms later, which is half the filter."""

    _SPAN_S = 0.004
    _CUTOFF = 0.91  # of the slower rate's Nyquist frequency
    _KAISER_BETA = 6.0  # 60 dB down in the stop band

    def __init__(self, from_rate: int, to_rate: int) -> None:
        ratio = Fraction(to_rate, from_rate)
        self._up, self._down = ratio.numerator, ratio.denominator
        self._bank = self._design(from_rate, to_rate)  # [up, taps]
        self._past = np.zeros(self._bank.shape[1] - 1, np.float32)
        self._skip = 0  # samples at the common rate before the next one that is kept

    def __call__(self, pcm: Pcm) -> Pcm:
        """The next piece at the new rate."""
        sound = np.concatenate([self._past, pcm])
        self._past = sound[len(pcm) :]
        phases = np.stack([np.convolve(sound, taps, "valid") for taps in self._bank])  # [up, n]
        common = phases.T.reshape(-1)
        kept = common[self._skip :: self._down]
        self._skip = (self._skip - len(common)) % self._down
        return _to_pcm(kept)

    def _design(self, from_rate: int, to_rate: int) -> NDArray[np.float32]:
        """A windowed sinc at the common rate, cut into the taps of each of `up` phases."""
        common_rate = from_rate * self._up
        taps = round(self._SPAN_S * common_rate / self._up)
        place = np.arange(taps * self._up) - (taps * self._up - 1) / 2
        cutoff = self._CUTOFF * min(from_rate, to_rate) / common_rate
        response = np.sinc(cutoff * place) * np.kaiser(len(place), self._KAISER_BETA)
        response *= self._up / response.sum()
        return np.ascontiguousarray(response.reshape(taps, self._up).T, np.float32)


class _Continuation:
    """What is heard of a codec that has no concealment of its own: the last pitch period again, and a soft way back."""

    _REMEMBERED = SAMPLE_RATE * 40 // 1000

    def __init__(self) -> None:
        self._past: Pcm = np.zeros(self._REMEMBERED, np.int16)
        self._period: Pcm | None = None  # what is being said again
        self._said = 0

    def join(self, pcm: Pcm) -> Pcm:
        """The sound of a packet, and what came before it passes into it."""
        if self._period is not None:
            fades = self._said > CHUNK_SAMPLES or len(pcm) < splice.OVERLAP  # whoever asks for more lets it fade
            pcm = splice.faded_in(pcm) if fades else splice.crossed(self.go_on(splice.OVERLAP), pcm)
            self._period = None
        self._past = np.concatenate([self._past, pcm])[-self._REMEMBERED :]
        return pcm

    def go_on(self, samples: int) -> Pcm:
        """[samples] more of the last period."""
        if self._period is None:
            self._period, self._said = self._last_period(), 0
        place = (self._said + np.arange(samples)) % len(self._period)
        self._said += samples
        return self._period[place]

    def _last_period(self) -> Pcm:
        backwards = self._past[::-1]
        tail = splice.find_alike(
            backwards[: splice.OVERLAP + splice.LONGEST_LAG], splice.SHORTEST_LAG, splice.LONGEST_LAG
        )
        return self._past[-tail.lag :] if tail is not None else self._past


@dataclass(frozen=True, slots=True)
class _Event:
    """The payload of a telephone-event packet (RFC 4733, 2.3)."""

    number: int
    ended: bool
    duration: int
    """In RTP clock units, from the packet's timestamp on."""


class Keys:
    """The keys a caller presses, from telephone-event packets (RFC 4733).

    A key is sent many times: every 20 or 50 ms while it is down, its end three times. All of these carry the timestamp
    of its beginning, so each timestamp is one key, reported when first heard of, even if only its end arrives. A key
    held for longer than the duration field can say goes on under a new timestamp, where the one before ended.
    """

    NAMES = "0123456789*#ABCD"

    def __init__(self) -> None:
        self._timestamp: int | None = None
        self._event = _Event(-1, True, 0)

    def hear(self, packet: Packet) -> str | None:
        """The key that was pressed, if this packet is the first to tell of it."""
        event = _parse_event(packet.payload)
        if event is None:
            return None
        since = self._since_last(packet.timestamp)
        if since is not None and since < 0:
            return None  # out of order: of an earlier key
        goes_on = since is not None and self._goes_on(event, since)
        self._timestamp, self._event = packet.timestamp, event
        return None if goes_on or event.number >= len(self.NAMES) else self.NAMES[event.number]

    def _since_last(self, timestamp: int) -> int | None:
        if self._timestamp is None:
            return None
        return signed(timestamp - self._timestamp, 32)

    def _goes_on(self, event: _Event, since: int) -> bool:
        """The same key: of the same beginning, or from where one that had not ended reached its limit."""
        last = self._event
        return since == 0 or (event.number == last.number and not last.ended and last.duration == since >= 0xFFFF)


def _parse_event(payload: bytes) -> _Event | None:
    if len(payload) < 4:
        return None
    return _Event(payload[0], bool(payload[1] & 0x80), int.from_bytes(payload[2:4], "big"))


def _codec(name: str) -> _Codec:
    if name not in _CODECS:
        raise RequestError(f"a telephone codec is one of {', '.join(_CODECS)}, not {name!r}", code="unsupported_codec")
    return _CODECS[name]


def _context(codec: _Codec, mode: Literal["r", "w"]) -> AudioCodecContext:
    context = AudioCodecContext.create(codec.av_name, mode)
    assert isinstance(context, AudioCodecContext)
    context.sample_rate = codec.sample_rate
    context.layout = "mono"
    context.format = "s16"
    return context


def _to_pcm(sound: NDArray[np.float32]) -> Pcm:
    return np.clip(np.rint(sound), -32768, 32767).astype(np.int16)
