"""What the agent says, cut into 20 ms slots on an absolute schedule.

A frame's first chunk leaves when the frame is there and its others 20, 40 and 60 ms later. Each slot is due 20 ms after
the one before, however late either was sent, so nothing drifts and RTP time never jumps.

Steps of the model do not all take the same time, so "is there" is when nearly every frame would be (`Pace`): a quick
one waits for that, lest a slow one break the sound. A frame slower still is waited for a little, and then there is
silence. The schedule nears that time at once while nobody would hear it, else by a few milliseconds a frame; where it
is far behind, two chunks pass over into each other now and then.
"""

import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES, Pcm
from webrtc_duplex.media import splice

PATIENCE_S = 0.020
"""How long a slot waits for a frame that is late before it becomes silence. Any receiver takes that for jitter."""

LOOK_S = 0.005
"""A server that was itself held up for longer than this looks for so long whether the frame lies there unread."""

REST_AFTER_CHUNKS = 10
"""So much silence is sent in full; then the peer, who fills in comfort noise, hears of us every `REST_EVERY_CHUNKS`."""

REST_EVERY_CHUNKS = 20

_QUIET_RMS = 33.0  # -60 dB of full scale
_QUEUE_CHUNKS = 8  # two frames; more is dropped, oldest first
_BEHIND_S = 0.1  # a server that was held up longer does not send what it missed
_MOST_LEAD_S = 0.060  # a quick frame waits no longer than this for the slow ones
_MOVE_S = 0.003  # in a voice the schedule moves no faster than this a frame: 75 ms in 2 s
_MERGE_FROM_S = 0.060  # a voice that is this much behind is hurried; less, the schedule makes up for by itself
_MERGE_EVERY_CHUNKS = 50  # and not by more than 20 ms a second
_ON_TIME_S = 0.0005
_RISE = np.linspace(0, 1, CHUNK_SAMPLES, dtype=np.float32)


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
    """Slots of a voice that became silence because no frame had come."""
    waits: int = 0
    """Slots that waited a little, and then the late frame came."""
    merged: int = 0
    """Chunks that passed over into the next one, to catch up."""
    dropped: int = 0
    """Chunks thrown away: overrun, flush, a server held up."""


class Playout:
    """The agent's way out. One per call; pulled by whoever paces packets: `pop` when `next_due` has come.

    `continuous` is for telephones, which take a pause in the stream for the end of the call: their silence is sent too.
    """

    def __init__(self, *, continuous: bool = False) -> None:
        self.next_due = math.inf
        """When to call `pop` next; infinite before the first frame. `push` may make it earlier."""
        self.playing: int | None = None
        """The frame that the last slot was of, whether it was sent or rested; None while nothing has come."""
        self.lead_s = 0.0
        """How long the last frame waits before its first chunk leaves."""
        self.counters = PlayoutCounters()
        self._continuous = continuous
        self._queue: deque[_Chunk] = deque()  # at most _QUEUE_CHUNKS: the oldest is dropped
        self._slots = 0
        self._grid = math.inf  # when the next slot is due by the schedule; `next_due` is later while it waits
        self._behind = 0.0  # how much later than need be the last frame's chunks leave
        self._last: Pcm = np.zeros(CHUNK_SAMPLES, np.int16)
        self._merge_from = _MERGE_EVERY_CHUNKS
        self._looked = False  # the slot that is due has waited for a server that was held up
        self._broken = True  # the slot before was silence of our own
        self._cut_off = False  # and that silence broke off a voice
        self._quiet = 0  # slots of silence in a row

    @property
    def resting(self) -> bool:
        """Whether silence is not sent at present."""
        return not self._continuous and self._quiet > REST_AFTER_CHUNKS

    def start(self, now: float) -> None:
        """Begin the schedule before the first frame, with silence (a telephone wants to hear something)."""
        if math.isinf(self._grid):
            self._grid = self.next_due = now

    def push(self, frame: Pcm, position: int, now: float, steady_at: float = -math.inf) -> None:
        """Take the frame [1920] of this position; its first chunk is due at once if nothing is before it.

        `steady_at` is when nearly every frame in its place would have come: it waits until then, and one that comes
        later still moves nothing, as the next ones will not. If it is not known, the schedule follows each late frame.
        """
        self.start(now)
        self._skip_what_was_missed(now)
        wanted = now if math.isinf(steady_at) else min(steady_at, now + _MOST_LEAD_S)
        if not self._queue and self._grid < now:
            self.counters.waits += not self._broken and now - self._grid > _ON_TIME_S
            self._grid = now if self._broken else max(self._grid, min(now, wanted))
        self._draw_near(wanted, now)
        self.lead_s = max(0.0, self._end - now)
        self.next_due = self._grid
        self._queue.extend(_cut(frame, position))
        self._drop_oldest(len(self._queue) - _QUEUE_CHUNKS)

    def pop(self, now: float) -> Slot | None:
        """What goes out in the slot that is due: None if it rests, or waits a little for a late frame."""
        self._skip_what_was_missed(now)
        if not self._queue and not self._broken and (until := self._waits_until(now)) > now:
            self.next_due = until
            return None
        self._looked = False
        self._grid += CHUNK_S
        self.next_due = self._grid
        return self._speak() if self._queue else self._stay_silent()

    def flush(self) -> int:
        """Drop what has not left yet, as the agent was interrupted; fades out. Returns how many chunks were dropped."""
        if not self._queue:
            return 0
        dropped = len(self._queue)
        first = self._queue[0]
        self._drop_oldest(dropped)
        self._queue.append(replace(first, pcm=_scaled(first.pcm, 1 - _RISE), quiet=True))
        return dropped

    def _waits_until(self, now: float) -> float:
        """How long a slot waits for its frame. A late wake-up tells nothing of it: it may be here, unread."""
        patience_ends = self._grid + PATIENCE_S
        if now < patience_ends:
            return patience_ends
        if now - self.next_due > LOOK_S and not self._looked:
            self._looked = True
            return now + LOOK_S
        return now

    def _speak(self) -> Slot | None:
        chunk = self._queue.popleft()
        self.playing = chunk.position
        if self._queue and self._is_to_hurry(chunk):
            chunk = self._merged_with_next(chunk)
        if self._broken:
            chunk = replace(chunk, pcm=splice.faded_in(chunk.pcm))
        self._broken = False
        return self._slot(chunk)

    def _is_to_hurry(self, chunk: "_Chunk") -> bool:
        if chunk.quiet:
            return self._behind >= CHUNK_S
        return self._behind >= _MERGE_FROM_S and self._slots >= self._merge_from

    def _stay_silent(self) -> Slot | None:
        if not self._broken:
            self._cut_off = self._quiet == 0
            self._merge_from = self._slots + _MERGE_EVERY_CHUNKS
        self.counters.underruns += self._cut_off
        pcm = np.zeros(CHUNK_SAMPLES, np.int16) if self._broken else _fading_echo(self._last)
        quiet = self._broken or self._quiet > 0
        self._broken = True
        return self._slot(_Chunk(None, pcm, quiet))

    def _slot(self, chunk: "_Chunk") -> Slot | None:
        was_resting = self.resting
        self._quiet = self._quiet + 1 if chunk.quiet else 0
        pcm = self._eased_into_rest(chunk.pcm, was_resting)
        timestamp = self._slots * CHUNK_SAMPLES
        self._slots += 1
        self._last = pcm
        if self.resting and (self._quiet - REST_AFTER_CHUNKS) % REST_EVERY_CHUNKS:
            self.counters.rested += 1
            return None
        self.counters.sent += 1
        return Slot(pcm, timestamp, was_resting and not self.resting, chunk.position)

    def _eased_into_rest(self, pcm: Pcm, was_resting: bool) -> Pcm:
        """Near-silence fades before the first slot that is not sent, and rises after the last one."""
        if self._continuous:
            return pcm
        if self.resting:
            return np.zeros(CHUNK_SAMPLES, np.int16)
        if was_resting:
            return splice.faded_in(pcm)
        return _scaled(pcm, 1 - _RISE) if self._quiet == REST_AFTER_CHUNKS else pcm

    def _draw_near(self, steady_at: float, now: float) -> None:
        """Move the schedule so that the next frame's first chunk leaves at `steady_at`, or nearer to it."""
        self._behind = self._end - steady_at
        most = math.inf if self._unheard else _MOVE_S
        self._grid -= max(-most, min(most, self._behind, max(0.0, self._grid - now)))

    @property
    def _end(self) -> float:
        """When all that waits will have left."""
        return self._grid + CHUNK_S * len(self._queue)

    @property
    def _unheard(self) -> bool:
        """Whether the schedule can move without anybody hearing it."""
        return not self._queue and (self.resting or self._broken)

    def _merged_with_next(self, chunk: "_Chunk") -> "_Chunk":
        """Catch up by a whole chunk: this one passes over into the next within 20 ms."""
        following = self._queue.popleft()
        self._behind -= CHUNK_S
        self._merge_from = self._slots + _MERGE_EVERY_CHUNKS
        self.counters.merged += 1
        return replace(following, pcm=_scaled(chunk.pcm, 1 - _RISE) + _scaled(following.pcm, _RISE))

    def _skip_what_was_missed(self, now: float) -> None:
        """Where the server was held up for long, let time pass rather than send everything in one burst."""
        if now - self._grid < _BEHIND_S:
            return
        missed = int((now - self._grid) / CHUNK_S)
        self._grid += missed * CHUNK_S
        self._slots += missed
        self._drop_oldest(missed)

    def _drop_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self._queue))):
            self._queue.popleft()
            self.counters.dropped += 1


@dataclass(frozen=True, slots=True)
class _Chunk:
    """20 ms that wait to be sent."""

    position: int | None
    pcm: Pcm
    quiet: bool


def _cut(frame: Pcm, position: int) -> list[_Chunk]:
    chunks = frame.reshape(-1, CHUNK_SAMPLES)
    sound = chunks.astype(np.float32)
    quiet = np.einsum("ij,ij->i", sound, sound) <= _QUIET_RMS**2 * CHUNK_SAMPLES
    return [_Chunk(position, chunk, is_quiet) for chunk, is_quiet in zip(chunks, quiet.tolist(), strict=True)]


def _scaled(pcm: Pcm, gain: NDArray[np.float32]) -> Pcm:
    return (pcm * gain).astype(np.int16)


def _fading_echo(last: Pcm) -> Pcm:
    """The last chunk backwards and fading: goes on from its last sample without a step."""
    return _scaled(last[::-1], 1 - _RISE)
