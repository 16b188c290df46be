"""What the caller says, on its way out: a track that never stops, as a microphone does not."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import Packet
from av.stream import Stream

from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES, Pcm
from webrtc_duplex.media.opus import RTP_CLOCK, Encoder

TICKS = round(CHUNK_S * RTP_CLOCK)
TIME_BASE = Fraction(1, RTP_CLOCK)
WAITING = 50
"""Chunks that may wait to be sent: a second. Who sends more waits."""


class Microphone(MediaStreamTrack):
    """20 ms packets on an absolute schedule; silence while nothing was said.

    `sent_at` is when the last packet that held something said was due.
    """

    kind = "audio"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.sent_at: float | None = None
        self._clock = clock
        self._encoder = Encoder()
        self._silence = np.zeros(CHUNK_SAMPLES, np.int16)
        self._rest = np.zeros(0, np.int16)
        self._said: deque[bytes] = deque()
        self._room = asyncio.Event()
        self._began: float | None = None
        self._count = 0

    async def say(self, pcm: Pcm) -> None:
        """Say samples of any number; returns once at most a second of them waits to be sent."""
        sound = np.concatenate([self._rest, pcm])
        whole = len(sound) // CHUNK_SAMPLES * CHUNK_SAMPLES
        self._rest = sound[whole:]
        for chunk in sound[:whole].reshape(-1, CHUNK_SAMPLES):
            await self.say_packet(self._encoder.encode(chunk))

    async def say_packet(self, payload: bytes) -> None:
        """Say 20 ms that are Opus already."""
        while len(self._said) >= WAITING:
            self._room.clear()
            await self._room.wait()
        self._said.append(payload)

    async def recv(self) -> "Packet[Stream]":
        """The next packet, at its time; a late wake-up makes one packet late and none after it."""
        if self.readyState != "live":
            raise MediaStreamError
        if self._began is None:
            self._began = self._clock()
        due = self._began + self._count * CHUNK_S
        await asyncio.sleep(due - self._clock())
        packet: Packet[Stream] = Packet(self._next_payload(due))
        packet.pts, packet.time_base = self._count * TICKS, TIME_BASE
        self._count += 1
        return packet

    def _next_payload(self, due: float) -> bytes:
        if not self._said:
            return self._encoder.encode(self._silence)
        self.sent_at = due
        self._room.set()
        return self._said.popleft()
