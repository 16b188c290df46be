"""What the agent says, cut into 20 ms slots on an absolute schedule.

A frame's first chunk leaves when the frame arrives and its others 20, 40 and 60 ms later. Each slot is due 20 ms after the
one before, however late either was sent, so nothing drifts and RTP time never jumps. Steps of the model do not all take
the same time: a slot whose chunk is not there yet waits a few milliseconds, and the schedule then stays that much later.
This lead over the slowest step is given back slowly once it is not needed.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES, SAMPLE_RATE, Pcm

PATIENCE_S = 0.012
"""How long a slot waits for a frame that is late before it becomes silence."""

REST_AFTER_CHUNKS = 10
"""So much silence is sent in full; then the peer, who fills in comfort noise, hears of us every `REST_EVERY_CHUNKS`."""

REST_EVERY_CHUNKS = 20

_QUIET_RMS = 33.0  # -60 dB of full scale
_QUEUE_CHUNKS = 8  # two frames; more is dropped, oldest first
_BEHIND_S = 0.1  # a server that was held up longer does not send what it missed
_LEAD_FRAMES = 64  # the lead is what the slowest of so many steps (5 s) needs
_LEAD_SPARE_S = 0.001
_LEAD_STEP_S = 0.001  # the schedule moves no faster: once a frame
_FADE = np.linspace(0, 1, SAMPLE_RATE * 5 // 2000, dtype=np.float32)  # 2.5 ms, against clicks


@dataclass(frozen=True, slots=True)
class Slot:
    """20 ms to be encoded and sent now."""

    pcm: Pcm
    """[480]"""
    timestamp: int
    """Samples since the first slot, at 24 kHz."""
    marker: bool
    """RTP's marker bit: sound begins after a rest."""
    position: int | None
    """The frame that this is of; None for silence of our own."""


@dataclass(slots=True)
class PlayoutCounters:
    """What became of the agent's chunks."""

    sent: int = 0
    rested: int = 0
    """Slots of silence that were not sent."""
    underruns: int = 0
    """Slots that became silence because no frame had come."""
    waits: int = 0
    """Slots that a late frame still met."""
    dropped: int = 0
    """Chunks thrown away: overrun, flush, a server held up."""


class Playout:
    """The agent's way out. One per call; pulled by whoever paces packets: `pop` when `next_due` has come.

    `continuous` is for telephones, which take a pause in the stream for the end of the call: their silence is sent too.
    """

    def __init__(self, *, continuous: bool = False) -> None:
        self.next_due = math.inf
        """When to call `pop` next; infinite before the first frame."""
        self.counters = PlayoutCounters()
        self._continuous = continuous
        self._queue: deque[tuple[int, Pcm]] = deque()  # at most _QUEUE_CHUNKS (position, chunk); the oldest is dropped
        self._spare: deque[float] = deque(maxlen=_LEAD_FRAMES)  # how long each frame waited for its first slot
        self._slots = 0
        self._grid = math.inf  # when the next slot is due by the schedule; `next_due` may be later, for a late frame
        self._last: Pcm = np.zeros(CHUNK_SAMPLES, np.int16)
        self._broken = True  # the next chunk does not continue the last one
        self._quiet = 0  # slots of silence in a row

    @property
    def lead_s(self) -> float:
        """How much later sound leaves than it could if every step took the same time."""
        return max(0.0, min(self._spare, default=0.0))

    @property
    def resting(self) -> bool:
        """Whether silence is not sent at present."""
        return not self._continuous and self._quiet > REST_AFTER_CHUNKS

    def start(self, now: float) -> None:
        """Begin the schedule before the first frame, with silence (a telephone wants to hear something)."""
        if math.isinf(self._grid):
            self._grid = self.next_due = now

    def push(self, frame: Pcm, position: int, now: float) -> None:
        """Take the frame [1920] of this position; its first chunk is due at once if nothing is before it."""
        self.start(now)
        if not self._queue and (self.resting or self._grid < now):
            self._grid = self.next_due = now
        self._note_lead(now)
        self._queue.extend((position, chunk) for chunk in frame.reshape(-1, CHUNK_SAMPLES))
        while len(self._queue) > _QUEUE_CHUNKS:
            self._drop()

    def pop(self, now: float) -> Slot | None:
        """What goes out in the slot that is due: None if it rests, or waits a little for a late frame."""
        self._skip_what_was_missed(now)
        if self._queue:
            self._grid += CHUNK_S
            self.next_due = self._grid
            return self._speak()
        if not self._broken and now < self._grid + PATIENCE_S:
            self.next_due = self._grid + PATIENCE_S
            return None
        self._grid += CHUNK_S
        self.next_due = self._grid
        return self._stay_silent()

    def flush(self) -> int:
        """Drop what is not sent yet (the agent was interrupted); what is heard fades out. Returns the chunks dropped."""
        dropped = len(self._queue)
        if dropped:
            position, chunk = self._queue[0]
            self._queue.clear()
            self._queue.append((position, _scaled(chunk, np.linspace(1, 0, CHUNK_SAMPLES, dtype=np.float32))))
            self.counters.dropped += dropped - 1
        return dropped

    def _speak(self) -> Slot | None:
        position, chunk = self._queue.popleft()
        if _is_quiet(chunk):
            if self._has_spare_chunk():
                self._drop_spare(position, chunk)
                position, chunk = self._queue.popleft()
        if self._broken:
            chunk = _faded_in(chunk)
        return self._slot(chunk, position)

    def _stay_silent(self) -> Slot | None:
        self.counters.underruns += not self._broken
        pcm = np.zeros(CHUNK_SAMPLES, np.int16)
        if not self._broken:
            pcm = _fading_echo(self._last)
        return self._slot(pcm, None)

    def _slot(self, pcm: Pcm, position: int | None) -> Slot | None:
        was_resting = self.resting
        self._quiet = self._quiet + 1 if _is_quiet(pcm) else 0
        timestamp = self._slots * CHUNK_SAMPLES
        self._slots += 1
        self._last = pcm
        self._broken = position is None
        if self.resting and (self._quiet - REST_AFTER_CHUNKS) % REST_EVERY_CHUNKS:
            self.counters.rested += 1
            return None
        self.counters.sent += 1
        return Slot(pcm, timestamp, was_resting and not self.resting, position)

    def _note_lead(self, now: float) -> None:
        """Remember how early this frame came, and move the schedule earlier if all of late did."""
        self._spare.append(self._grid + CHUNK_S * len(self._queue) - now)

    def _has_spare_chunk(self) -> bool:
        return False

    def _drop_spare(self, position: int, chunk: Pcm) -> None: ...

    def _skip_what_was_missed(self, now: float) -> None: ...

    def _drop(self) -> None:
        self._queue.popleft()
        self.counters.dropped += 1


def _is_quiet(pcm: Pcm) -> bool:
    sound = pcm.astype(np.float32)
    return float(sound @ sound) <= _QUIET_RMS**2 * len(pcm)


def _scaled(pcm: Pcm, gain: np.ndarray) -> Pcm:
    return (pcm * gain).astype(np.int16)


def _faded_in(chunk: Pcm) -> Pcm:
    return np.concatenate([_scaled(chunk[: len(_FADE)], _FADE), chunk[len(_FADE) :]])


def _fading_echo(last: Pcm) -> Pcm:
    """The last chunk backwards and fading: goes on from its last sample without a step."""
    return _scaled(last[::-1], np.linspace(1, 0, CHUNK_SAMPLES, dtype=np.float32))
