"""The clock of media, the codecs of a call, and the track that carries what the agent says."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol

import numpy as np

from webrtc_duplex.audio import SAMPLE_RATE, Pcm
from webrtc_duplex.media import opus, telephone
from webrtc_duplex.media.jitter import Decoder
from webrtc_duplex.media.playout import Playout
from webrtc_duplex.server.alarm import Alarm, alarm

TOGETHER_S = 0.001
"""Beats this close to each other are done in one wake-up."""

HEARD_CODECS = frozenset({"opus", "pcmu", "pcma", "g722", "cn"})

Beat = Callable[[float], None]


class Ticker:
    """The one clock of media in a process: whatever is due at a moment is done in one wake-up.

    Beats are due on the absolute monotonic clock, so a late wake-up delays one beat and none of those after it. Owned
    by `Calls`, who stops it.
    """

    def __init__(self, clock: Callable[[], float], on_wake: Callable[[float], None]) -> None:
        """`on_wake` is told how late each wake-up is."""
        self._clock = clock
        self._on_wake = on_wake
        self._beats: list[tuple[float, int, Beat]] = []
        self._order = itertools.count()
        self._alarm: Alarm | None = None  # made with the first beat, as it wants a loop that runs
        self._alarm_at = inf

    def at(self, due: float, beat: Beat) -> None:
        """Call `beat(due)` once, at `due`."""
        heapq.heappush(self._beats, (due, next(self._order), beat))
        if due < self._alarm_at:
            self._set_alarm(due)

    async def until(self, due: float) -> None:
        """Wait for `due`."""
        reached = asyncio.Event()
        self.at(due, lambda _: reached.set())
        await reached.wait()

    def stop(self) -> None:
        """Drop every beat that has not come; none comes any more."""
        self._beats.clear()
        self._alarm_at = -inf
        if self._alarm is not None:
            self._alarm.close()

    def _set_alarm(self, due: float) -> None:
        if self._alarm is None:
            self._alarm = alarm(self._wake)
        self._alarm_at = due
        self._alarm.set(due - self._clock())

    def _wake(self) -> None:
        now = self._clock()
        end = now + TOGETHER_S
        self._on_wake(max(0.0, now - self._alarm_at))
        self._alarm_at = -inf  # none is set meanwhile
        try:
            while self._beats and self._beats[0][0] <= end:
                due, _, beat = heapq.heappop(self._beats)
                beat(due)
        finally:
            self._alarm_at = inf
            if self._beats:
                self._set_alarm(self._beats[0][0])


class Encoder(Protocol):
    """One codec of 20 ms packets of 24 kHz mono."""

    rtp_clock: int

    def encode(self, chunk: Pcm) -> bytes: ...
    def set_loss(self, fraction: float) -> None: ...


def decoders(codecs: Mapping[int, str]) -> dict[int, Decoder]:
    """One for each payload type of sound; `codecs` names them all, in lower case."""
    return {number: _decoder(name) for number, name in codecs.items() if name in HEARD_CODECS}


def encoder(codec: str) -> Encoder:
    return opus.Encoder() if codec == "opus" else telephone.TelephoneEncoder(codec)


def _decoder(name: str) -> Decoder:
    return opus.Decoder() if name == "opus" else telephone.decoder(name, np.random.default_rng())


class AgentAudioTrack:
    """What the agent says, packet by packet: each is encoded once and given to `send` when its slot has come.

    `send` takes a payload, its time in the codec's RTP clock, and RTP's marker. Time is counted here, so silence that
    is not sent is a gap and never a jump.
    """

    def __init__(
        self,
        encoder: Encoder,
        playout: Playout,
        ticker: Ticker,
        clock: Callable[[], float],
        send: Callable[[bytes, int, bool], None],
    ) -> None:
        self._encoder = encoder
        self._playout = playout
        self._ticker = ticker
        self._clock = clock
        self._send = send
        self._cues: deque[tuple[int, Callable[[], None]]] = deque()  # of the frames that playout holds, no more
        self._next_beat = inf
        self._stopped = False

    def start(self) -> None:
        """Begin with silence, before the agent says anything."""
        self._playout.start(self._clock())
        self._send_what_is_due(self._clock())

    def speak(self, frame: Pcm, position: int, steady_at: float, on_air: Callable[[], None]) -> None:
        """Send a frame [1920], not much before `steady_at`, when it would be there at the latest (`Playout.push`).

        `on_air` is called when its first packet leaves, or would if it were no silence.
        """
        if self._stopped:
            return
        now = self._clock()
        self._cues.append((position, on_air))
        self._playout.push(frame, position, now, steady_at)
        self._send_what_is_due(now)

    def flush(self) -> None:
        """Be silent as soon as can be without a click: what is not yet sent is dropped, and its cues are called."""
        self._playout.flush()
        self._call_cues(inf)

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped = True
        self._call_cues(inf)

    def _beat(self, due: float) -> None:
        if due == self._next_beat:  # else the schedule has moved, and another beat is on its way
            self._next_beat = inf
            self._send_what_is_due(max(due, self._clock()))

    def _send_what_is_due(self, now: float) -> None:
        if self._stopped:
            return
        while self._playout.next_due <= now:
            slot = self._playout.pop(now)
            if slot is not None:
                timestamp = slot.timestamp * self._encoder.rtp_clock // SAMPLE_RATE
                self._send(self._encoder.encode(slot.pcm), timestamp, slot.marker)
            if self._playout.playing is not None:
                self._call_cues(self._playout.playing)
        if self._playout.next_due != self._next_beat:
            self._next_beat = self._playout.next_due
            self._ticker.at(self._next_beat, self._beat)

    def _call_cues(self, playing: float) -> None:
        while self._cues and self._cues[0][0] <= playing:
            _, on_air = self._cues.popleft()
            on_air()
