"""Packets in, frames out: what the model hears of a caller, whatever the network did to it.

(First, simple version: in-order pass-through and concealment; the interface is what stays.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from webrtc_duplex.audio import FRAME_SAMPLES, Pcm

CUT_BEFORE_TICK_S = 0.005
"""Frames are cut so long before their tick: time to put them into the ring."""


@dataclass(frozen=True, slots=True)
class Packet:
    """One RTP packet of sound; `timestamp` in the codec's RTP clock."""

    sequence: int
    timestamp: int
    payload: bytes
    payload_type: int
    ssrc: int
    marker: bool = False


class Decoder(Protocol):
    """One codec's sound as 24 kHz mono."""

    rtp_clock: int
    resting: bool

    def decode(self, payload: bytes) -> Pcm | None: ...
    def recover(self, next_payload: bytes, samples: int) -> Pcm | None: ...
    def conceal(self, samples: int) -> Pcm: ...


@dataclass(frozen=True, slots=True)
class Frame:
    """80 ms for the model, and how much of it was made up."""

    pcm: Pcm
    """[1920]"""
    concealed: int
    """Samples that a decoder guessed."""
    silent: int
    """Samples of silence because nothing came: muted, on hold, before the first packet."""


@dataclass(slots=True)
class JitterCounters:
    """Everything that happened to a caller's sound; packets, then samples at 24 kHz."""

    received: int = 0
    late: int = 0
    """Came after their place had been filled; dropped."""
    duplicate: int = 0
    lost: int = 0
    """Never came in time."""
    recovered: int = 0
    """Of those lost, restored from in-band FEC."""
    unreadable: int = 0
    """Payloads that are not what their type says."""
    concealed_samples: int = 0
    silent_samples: int = 0
    compressed_samples: int = 0
    """Taken out to win back delay."""
    stretched_samples: int = 0
    """Put in because sound came later than it used to."""
    skipped_samples: int = 0
    """Dropped, oldest first: more came at once than can be caught up with."""
    resyncs: int = 0
    """New streams and jumps of the timestamp."""


class JitterBuffer:
    """What to play now, given what has arrived. One per call.

    `decoders` maps payload types to codecs. A payload type that is not there is no sound (telephone events): it only takes
    a sequence number.
    """

    def __init__(self, decoders: Mapping[int, Decoder]) -> None:
        self.counters = JitterCounters()
        self._decoders = decoders
        self._fifo: Pcm = np.zeros(0, np.int16)
        self._decoder: Decoder | None = None

    @property
    def delay_s(self) -> float:
        """How long sound waits at present for its frame to be cut, beside the frame's own 80 ms."""
        return 0.0

    def add(self, packet: Packet, now: float) -> None:
        """Take a packet that has just come; duplicates, late and foreign ones are harmless."""
        self.counters.received += 1
        decoder = self._decoders.get(packet.payload_type)
        if decoder is not None and (pcm := decoder.decode(packet.payload)) is not None:
            self._decoder = decoder
            self._fifo = np.concatenate([self._fifo, pcm])[-4 * FRAME_SAMPLES :]

    def pop_frame(self, now: float) -> Frame:
        """Cut the next frame; call it once for every position, at `tick_at - CUT_BEFORE_TICK_S`."""
        frame = np.zeros(FRAME_SAMPLES, np.int16)
        taken = min(FRAME_SAMPLES, len(self._fifo))
        frame[:taken] = self._fifo[:taken]
        self._fifo = self._fifo[taken:]
        return Frame(frame, 0, FRAME_SAMPLES - taken)
