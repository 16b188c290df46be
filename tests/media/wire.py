"""A caller's wire for tests: packets with arrival times, played against a clock of ticks without any clock."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import CHUNK_SAMPLES, FRAME_S, SAMPLE_RATE, Pcm
from webrtc_duplex.media.jitter import Frame, JitterBuffer, Packet

CONCEALED = 1
"""The sample that `PcmDecoder` guesses."""

OPUS, OTHER = 111, 8


class PcmDecoder:
    """A codec whose payload is the sound itself; `with_fec` its payload opens with a copy of the packet before."""

    def __init__(self, rtp_clock: int = 48_000, with_fec: bool = False) -> None:
        self.rtp_clock = rtp_clock
        self.resting = False
        self.resets = 0
        self._with_fec = with_fec

    def decode(self, payload: bytes) -> Pcm | None:
        if len(payload) % 2:
            return None
        pcm = np.frombuffer(payload, np.int16)
        return pcm[len(pcm) // 2 :] if self._with_fec else pcm

    def recover(self, next_payload: bytes, samples: int) -> Pcm | None:
        if not self._with_fec:
            return None
        pcm = np.frombuffer(next_payload, np.int16)
        return pcm[: len(pcm) // 2]

    def conceal(self, samples: int) -> Pcm:
        assert samples % 60 == 0 and 0 < samples <= 2880
        return np.full(samples, CONCEALED, np.int16)

    def reset(self) -> None:
        self.resets += 1


@dataclass(frozen=True, slots=True)
class Sent:
    """A packet, when it left and when it comes (a lost one never comes)."""

    packet: Packet
    sent_at: float
    comes_at: float


def sine(seconds: float, hz: float = 440.0, amplitude: float = 8000.0) -> Pcm:
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return _to_pcm(amplitude * np.sin(2 * np.pi * hz * time))


def speechlike(seconds: float, seed: int = 0) -> Pcm:
    """Voiced bursts of gliding pitch, hisses and pauses, as loud as speech."""
    rng = np.random.default_rng(seed)
    count = round(seconds * SAMPLE_RATE)
    pitch = 120 + 40 * np.sin(2 * np.pi * 0.7 * np.arange(count) / SAMPLE_RATE)
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    voice = np.sum([np.sin(k * phase) / k for k in range(1, 12)], axis=0)
    block = SAMPLE_RATE // 5
    kinds = np.repeat(rng.choice(3, count // block + 1, p=[0.6, 0.15, 0.25]), block)[:count]
    hiss = rng.normal(0, 0.2, count)
    sound = np.select([kinds == 0, kinds == 1], [voice, hiss], 0.0)
    smooth = np.convolve(sound, np.ones(8) / 8, "same")
    return _to_pcm(4000 * smooth)


def _to_pcm(sound: NDArray[np.float64]) -> Pcm:
    return np.rint(sound).astype(np.int16)


def packets(
    pcm: Pcm,
    *,
    size: int = CHUNK_SAMPLES,
    delay: float | NDArray[np.float64] = 0.01,
    start: float = 0.0,
    clock_ppm: float = 0.0,
    first_sequence: int = 0,
    first_timestamp: int = 0,
    fec: bool = False,
    rtp_clock: int = 48_000,
    payload_type: int = OPUS,
    ssrc: int = 1,
) -> list[Sent]:
    """`pcm` as packets; each leaves when its last sample was recorded and takes `delay` to come."""
    count = len(pcm) // size
    chunks = pcm[: count * size].reshape(count, size)
    delays = np.broadcast_to(delay, count)
    period = size / SAMPLE_RATE / (1 + clock_ppm * 1e-6)
    wire = []
    for n in range(count):
        before = chunks[n - 1] if n else np.zeros(size, np.int16)
        payload = (before.tobytes() if fec else b"") + chunks[n].tobytes()
        timestamp = (first_timestamp + n * size * rtp_clock // SAMPLE_RATE) & 0xFFFFFFFF
        packet = Packet((first_sequence + n) & 0xFFFF, timestamp, payload, payload_type, ssrc)
        sent_at = start + (n + 1) * period
        wire.append(Sent(packet, sent_at, sent_at + float(delays[n])))
    return wire


def without(wire: list[Sent], *lost: int) -> list[Sent]:
    return [sent for n, sent in enumerate(wire) if n not in lost]


def delayed(wire: list[Sent], by: float, *which: int) -> list[Sent]:
    return [replace(sent, comes_at=sent.comes_at + by) if n in which else sent for n, sent in enumerate(wire)]


def stalled(wire: list[Sent], begin: float, end: float) -> list[Sent]:
    """Whatever would come in a stretch of time comes at its end."""
    return [replace(sent, comes_at=end) if begin <= sent.comes_at < end else sent for sent in wire]


@dataclass(frozen=True, slots=True)
class Heard:
    """What the model heard: frames, when each was cut, and the delay the buffer reported; and what came after that."""

    frames: list[Frame]
    cuts: NDArray[np.float64]
    delays: NDArray[np.float64]
    left: list[Sent]

    @property
    def pcm(self) -> Pcm:
        return np.concatenate([frame.pcm for frame in self.frames])


def play(buffer: JitterBuffer, wire: Iterable[Sent], seconds: float, first_cut: float = 0.083) -> Heard:
    """Feed the packets as they come and cut a frame every 80 ms."""
    coming = sorted(wire, key=lambda sent: sent.comes_at)[::-1]
    frames, delays = [], []
    cuts = first_cut + FRAME_S * np.arange(round(seconds / FRAME_S), dtype=np.float64)
    for cut in cuts.tolist():
        while coming and coming[-1].comes_at <= cut:
            sent = coming.pop()
            buffer.add(sent.packet, sent.comes_at)
        frames.append(buffer.pop_frame(cut))
        delays.append(buffer.delay_s)
    return Heard(frames, cuts, np.array(delays), coming)
