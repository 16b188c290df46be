"""Packets in, frames out: what the model hears of a caller, whatever the network did to the packets.

Packets that come in order are decoded as they come, into a queue of samples. Once in 80 ms, a little before the tick,
the next frame is cut from its head. That cut is the only deadline:

- A hole in the sequence is left open until a cut needs it. A packet that comes late or out of order until then does no
  harm. At the cut the hole is closed: with the FEC in the packet behind it, else by concealment.
- Where the queue itself ends too early, concealment stands in, fades within 100 ms and becomes silence. If the packet
  was merely late, it is played when it comes: no word is lost, and sound is later by what stood in for it.
- At every cut the buffer asks how long before it the frame's last packet would have come if it had been as late as
  packets have been of late. Too short: the frame edge is moved a packet back by stretching; longer than a packet: a
  packet forward by leaving out silence, or a pitch period a frame. So the delay drains after a spike, follows the
  network's jitter, and a caller whose clock is off drifts no further than one packet.

The frame edge lies on a packet's edge, as anything between would only add delay. All positions are samples at 24 kHz on
the stream's own timeline; `now` is the server's clock in seconds.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from webrtc_duplex.audio import CHUNK_SAMPLES, FRAME_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.media import splice

CUT_BEFORE_TICK_S = 0.004
"""Frames are cut so long before their tick: time to put them into the ring. See `CutLead`."""

CONCEAL_SAMPLES = SAMPLE_RATE // 10
"""A gap is concealed for 100 ms; by then it has faded to silence."""

_FADE_FROM = SAMPLE_RATE // 50  # the first 20 ms of concealment are heard in full
_CONCEAL_STEP = SAMPLE_RATE // 400  # decoders conceal in steps of 2.5 ms
_COMFORT_SAMPLES = SAMPLE_RATE  # comfort noise goes on for 1 s after the last that was heard of the sender
_QUEUE_SAMPLES = SAMPLE_RATE  # more than 1 s of sound is not kept: the oldest is dropped
_HELD_PACKETS = 64
_RESTART_PACKETS = 1000  # a sequence number so far off is a new stream, if the next one agrees (RFC 3550, A.1)
_TOO_FAR_SAMPLES = SAMPLE_RATE // 2  # where timestamp and clock disagree by more, the timestamp has jumped
_LEFT_STREAM_S = 1.0  # so long after a change of stream, packets of the old one are late ones

_MARGIN_S = 0.001  # between the latest usual arrival of a frame's last packet and the cut
_START_MARGIN_S = 0.003
_ENOUGH_S = 0.0001  # a packet's worth and this is taken out even where packets come like clockwork
_CATCH_UP_SAMPLES = SAMPLE_RATE * 16 // 100  # more delay than can be won back within 2 s is dropped at once
_LIKE = 0.85  # how alike two places must be to be spliced, where there is no hurry ...
_LIKE_LESS = 0.05  # ... but less so from cut to cut that did not find any


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
    """One codec's sound as 24 kHz mono; fed in order."""

    rtp_clock: int
    resting: bool
    """The sender has said that it is silent (DTX, comfort noise): what `conceal` makes now is its background."""

    def decode(self, payload: bytes) -> Pcm | None:
        """The packet's sound; None if the payload is not of this codec."""

    def recover(self, next_payload: bytes, samples: int) -> Pcm | None:
        """The sound of the lost packet before this one; None if the payload does not carry it."""

    def conceal(self, samples: int) -> Pcm:
        """A guess of what comes next; whole steps of 2.5 ms, at most 120 ms."""

    def reset(self) -> None:
        """A new stream begins."""


@dataclass(frozen=True, slots=True)
class Frame:
    """80 ms for the model, and how much of it was made up."""

    pcm: Pcm
    """[1920]"""
    concealed: int
    """Samples that a decoder guessed."""
    silent: int
    """Samples of silence or comfort noise because nothing came: muted, on hold, before the first packet."""


@dataclass(slots=True)
class JitterCounters:
    """Everything that happened to a caller's sound: packets, then samples at 24 kHz."""

    received: int = 0
    late: int = 0
    """Came after their place had been filled; dropped."""
    duplicate: int = 0
    lost: int = 0
    """Never came."""
    recovered: int = 0
    """Of those lost or late, restored from in-band FEC."""
    unreadable: int = 0
    """Payloads that are not what their type says."""
    resyncs: int = 0
    """New streams and jumps of the timestamp."""
    concealed_samples: int = 0
    silent_samples: int = 0
    compressed_samples: int = 0
    """Taken out, unheard, to win back delay."""
    stretched_samples: int = 0
    """Put in because sound came later than it used to."""
    skipped_samples: int = 0
    """Dropped, oldest first: more came at once than can be won back."""


class JitterBuffer:
    """What to play now, given what has arrived. One per call.

    `decoders` maps payload types to codecs. A payload type that is not there is no sound (telephone events): it only
    takes a sequence number.
    """

    def __init__(self, decoders: Mapping[int, Decoder]) -> None:
        self.counters = JitterCounters()
        self.delay_s = 0.0
        """How long sound waits at present for its frame to be cut, beside the frame's own 80 ms."""
        self._decoders = decoders
        self._decoder: Decoder | None = None
        self._held: dict[int, Packet] = {}  # by sequence number, at most _HELD_PACKETS; then the hole is closed
        self._played: deque[int] = deque(maxlen=_HELD_PACKETS)  # sequence numbers
        self._given_up: deque[int] = deque(maxlen=_HELD_PACKETS)  # of holes that were closed
        self._queue = _SampleQueue(_QUEUE_SAMPLES)
        self._arrivals = _Arrivals()
        self._spares: deque[float] = deque(maxlen=1)  # what the last cuts had to spare, over one cycle of edges

        self._ssrc: int | None = None
        self._left_ssrc: int | None = None
        self._left_at = -math.inf
        self._next_sequence = 0
        self._stray_sequence: int | None = None
        self._next_timestamp = 0
        self._head = 0  # position of the end of the queue
        self._packet_samples = CHUNK_SAMPLES

        self._idle = True  # silence is being played: the next packet may start anywhere in its frame
        self._stood_in = 0  # samples played in place of packets that had not come
        self._made_up = 0  # samples made up since the last real one
        self._pushed_at = -math.inf
        self._cut_before = False
        self._cuts_waited = 0  # for a place to splice

    # ---- packets in

    def add(self, packet: Packet, now: float) -> None:
        """Take a packet that has just come; duplicates, late and foreign ones are harmless."""
        if not self._is_of_this_stream(packet, now):
            return
        if signed(packet.sequence - self._next_sequence, 16) < 0 or packet.sequence in self._held:
            self._count_useless(packet.sequence)
            return
        self.counters.received += 1
        self._held[packet.sequence] = packet
        self._note_arrival(packet, now)
        self._play_in_order(now)
        if len(self._held) > _HELD_PACKETS:
            self._close_hole(now)

    def _is_of_this_stream(self, packet: Packet, now: float) -> bool:
        """Whether to take the packet. A stream that begins, or begins again with other numbers, becomes this one."""
        if packet.ssrc != self._ssrc:
            if packet.ssrc == self._left_ssrc and now < self._left_at + _LEFT_STREAM_S:
                self.counters.late += 1
                return False
            self._begin_stream(packet, now)
        elif abs(signed(packet.sequence - self._next_sequence, 16)) > _RESTART_PACKETS:
            if packet.sequence != self._stray_sequence:
                self._stray_sequence = (packet.sequence + 1) & 0xFFFF
                return False
            self._begin_stream(packet, now)
        self._stray_sequence = None
        return True

    def _begin_stream(self, packet: Packet, now: float) -> None:
        if self._ssrc is not None:
            self.counters.resyncs += 1
        if self._ssrc != packet.ssrc:
            self._left_ssrc, self._left_at = self._ssrc, now
        self._ssrc = packet.ssrc
        self._held.clear()
        self._played.clear()
        self._given_up.clear()
        self._next_sequence = packet.sequence
        self._begin_timeline(packet)
        if self._decoder is not None:
            self._decoder.reset()

    def _begin_timeline(self, packet: Packet) -> None:
        """What comes next is this packet, whatever its timestamp says."""
        self._next_timestamp = packet.timestamp
        self._stood_in = 0
        self._arrivals.forget()
        self._spares.clear()

    def _count_useless(self, sequence: int) -> None:
        if sequence in self._held or sequence in self._played:
            self.counters.duplicate += 1
            return
        self.counters.received += 1
        self.counters.late += 1
        if sequence in self._given_up:
            self._given_up.remove(sequence)
            self.counters.lost -= 1

    def _note_arrival(self, packet: Packet, now: float) -> None:
        decoder = self._decoders.get(packet.payload_type)
        if decoder is not None and decoder is self._decoder:
            position = self._head + self._ahead(packet, decoder)
            self._arrivals.note(position / SAMPLE_RATE, now, self._packet_samples / SAMPLE_RATE)

    def _ahead(self, packet: Packet, decoder: Decoder) -> int:
        """Samples between the end of the queue and this packet, by its timestamp."""
        return signed(packet.timestamp - self._next_timestamp, 32) * SAMPLE_RATE // decoder.rtp_clock

    # ---- holes and sound

    def _play_in_order(self, now: float) -> None:
        while (packet := self._held.pop(self._next_sequence, None)) is not None:
            self._play(packet, now, lost=0)

    def _close_hole(self, now: float) -> None:
        """Give up the packets before the first that is held, and go on from there."""
        lost = min((sequence - self._next_sequence) & 0xFFFF for sequence in self._held)
        self._given_up.extend((self._next_sequence + skipped) & 0xFFFF for skipped in range(lost))
        self.counters.lost += lost
        self._next_sequence = (self._next_sequence + lost) & 0xFFFF
        self._play(self._held.pop(self._next_sequence), now, lost)
        self._play_in_order(now)

    def _play(self, packet: Packet, now: float, lost: int) -> None:
        """Put the sound of the next packet into the queue, and before it whatever fills the gap up to it."""
        self._next_sequence = (packet.sequence + 1) & 0xFFFF
        self._played.append(packet.sequence)
        decoder = self._decoders.get(packet.payload_type)
        if decoder is None or not packet.payload:
            return
        if decoder is not self._decoder:
            self._change_decoder(decoder, packet)
        self._fill_gap(packet, decoder, lost)
        pcm = decoder.decode(packet.payload)
        if pcm is None:
            self.counters.unreadable += 1
            pcm = self._conceal(self._packet_samples)
        else:
            if self._idle and self._made_up:
                pcm = splice.faded_in(pcm)
            self._made_up = 0
            self._packet_samples = len(pcm)
        self._push(pcm)
        self._pushed_at = now
        self._head += len(pcm)
        self._next_timestamp = (packet.timestamp + len(pcm) * decoder.rtp_clock // SAMPLE_RATE) & 0xFFFFFFFF

    def _change_decoder(self, decoder: Decoder, packet: Packet) -> None:
        if self._decoder is not None and self._decoder.rtp_clock != decoder.rtp_clock:
            self._begin_timeline(packet)
        decoder.reset()
        self._decoder = decoder

    def _fill_gap(self, packet: Packet, decoder: Decoder, lost: int) -> None:
        """Fill what lies between the end of the queue and this packet, less what was played in its place already."""
        gap = self._ahead(packet, decoder)
        missing = gap - self._stood_in
        if gap < 0 or abs(missing) > _TOO_FAR_SAMPLES:
            if not self._idle or gap < 0:
                self.counters.resyncs += 1
            self._begin_timeline(packet)
            return
        if self._idle:
            pass  # after silence sound begins as soon as it can
        elif missing > 0:
            self._push(self._patch(packet, decoder, missing, lost))
        else:
            self.counters.stretched_samples -= missing
        self._stood_in = 0
        self._head += gap

    def _patch(self, packet: Packet, decoder: Decoder, missing: int, lost: int) -> Pcm:
        """[missing] samples before this packet: its FEC for the last packet lost, concealment for the rest."""
        span = min(self._packet_samples, missing)
        if not lost:
            return self._conceal(missing)
        rest = self._conceal(missing - span)
        recovered = decoder.recover(packet.payload, self._packet_samples)
        if recovered is None:
            return np.concatenate([rest, self._conceal(span)])
        self.counters.recovered += 1
        self._arrivals.note_recovery()
        self._made_up = 0
        return np.concatenate([rest, recovered[-span:]])

    def _conceal(self, samples: int) -> Pcm:
        """[samples] that stand in for sound: the decoder's guess, which fades, then silence; or the sender's noise."""
        pcm = np.zeros(samples, np.int16)
        begun = self._made_up
        self._made_up += samples
        resting = self._decoder is not None and self._decoder.resting
        limit = _COMFORT_SAMPLES if resting else CONCEAL_SAMPLES
        guessed = max(0, min(samples, limit - begun))
        if self._decoder is not None and guessed:
            pcm[:guessed] = self._guess(self._decoder, guessed)
            if not resting:
                place = np.arange(begun, begun + guessed, dtype=np.float32)
                gain = np.clip((CONCEAL_SAMPLES - place) / (CONCEAL_SAMPLES - _FADE_FROM), 0, 1)
                pcm[:guessed] = pcm[:guessed] * gain
                self.counters.concealed_samples += guessed
        self.counters.silent_samples += samples if resting else samples - guessed
        return pcm

    def _guess(self, decoder: Decoder, samples: int) -> Pcm:
        parts = []
        left = -(-samples // _CONCEAL_STEP) * _CONCEAL_STEP
        while left > 0:
            parts.append(decoder.conceal(min(left, CONCEAL_SAMPLES)))
            left -= CONCEAL_SAMPLES
        return np.concatenate(parts)[:samples]

    def _push(self, pcm: Pcm) -> None:
        self.counters.skipped_samples += self._queue.push(pcm)

    # ---- frames out

    def pop_frame(self, now: float) -> Frame:
        """Cut the next frame; call it once for every position, at `tick_at - CUT_BEFORE_TICK_S`."""
        concealed, silent = self.counters.concealed_samples, self.counters.silent_samples
        while len(self._queue) < FRAME_SAMPLES and self._held:
            self._close_hole(now)
        if not self._cut_before:
            self._drop_what_came_before_the_call(now)
        pcm = self._cut(now) if len(self._queue) >= FRAME_SAMPLES else self._cut_short(now)
        concealed, silent = self.counters.concealed_samples - concealed, self.counters.silent_samples - silent
        return Frame(pcm, concealed, silent)

    def _drop_what_came_before_the_call(self, now: float) -> None:
        self._cut_before = True
        surplus = len(self._queue) - FRAME_SAMPLES - self._too_fresh(now)
        if surplus > 0:
            self._queue.pop(surplus)
            self.counters.skipped_samples += surplus

    def _too_fresh(self, now: float) -> int:
        """Samples of a packet that came so shortly before the cut that the next such one may miss it."""
        return self._packet_samples if now - self._pushed_at < _START_MARGIN_S else 0

    def _cut_short(self, now: float) -> Pcm:
        """The frame when less than a frame is there."""
        if self._idle:
            return self._start_late_in_frame(now)
        missing = -(-(FRAME_SAMPLES - len(self._queue)) // _CONCEAL_STEP) * _CONCEAL_STEP
        self._push(self._conceal(missing))
        self._stood_in += missing
        resting = self._decoder is not None and self._decoder.resting
        self._idle = self._made_up >= (_COMFORT_SAMPLES if resting else CONCEAL_SAMPLES)
        self._spares.clear()
        return self._queue.pop(FRAME_SAMPLES)

    def _start_late_in_frame(self, now: float) -> Pcm:
        """Silence, and at the frame's end what has come of a sound that begins: so its packets end where frames do."""
        taken = max(0, len(self._queue) - self._too_fresh(now))
        silence = FRAME_SAMPLES - taken
        self.counters.silent_samples += silence
        if not len(self._queue):
            self._stood_in += FRAME_SAMPLES
        if taken:
            self._idle = False
        return np.concatenate([np.zeros(silence, np.int16), self._queue.pop(taken)])

    def _cut(self, now: float) -> Pcm:
        self._idle = False
        surplus = self._surplus(now)
        if surplus > _CATCH_UP_SAMPLES:
            surplus -= self._drop_oldest(surplus - _CATCH_UP_SAMPLES)
        if surplus >= splice.SHORTEST_LAG:
            return self._cut_shortened(surplus)
        if surplus < 0:
            return self._cut_lengthened(-surplus)
        return self._queue.pop(FRAME_SAMPLES)

    def _surplus(self, now: float) -> int:
        """Samples in the queue that delay sound for nothing; negative: that should be there and are not.

        The frame's last packet decides. It has `spare` to the cut if it is as late as packets may be; what more than
        that is there only waits.
        """
        left = len(self._queue) - FRAME_SAMPLES
        edge = self._head - left  # where this frame ends
        last_packet = self._head - self._packet_samples * (left // self._packet_samples + 1)
        usual, latest = self._arrivals.usual_and_latest()
        self.delay_s = max(0.0, now - usual - (edge - self._packet_samples) / SAMPLE_RATE)
        if self._stood_in or math.isnan(latest):
            return 0
        step = math.gcd(self._packet_samples, FRAME_SAMPLES)  # by how much an edge moves from packet to packet
        self._note_spare(now - latest - last_packet / SAMPLE_RATE, self._packet_samples // step)
        if len(self._spares) < (self._spares.maxlen or 1):
            return 0
        spare = min(self._spares) - _MARGIN_S
        if spare < 0:
            return left % step - step
        enough = _ENOUGH_S + (latest - usual) / 3  # or what is taken now would have to be put back soon
        steps = max(0, int((spare - enough) * SAMPLE_RATE / step))
        return min(steps * step + left % step, left)

    def _note_spare(self, spare: float, cycle: int) -> None:
        if self._spares.maxlen != cycle:
            self._spares = deque(maxlen=cycle)
        self._spares.append(spare)

    def _drop_oldest(self, samples: int) -> int:
        """Leave out sound at the head of the queue, at once."""
        here = self._queue.peek(samples + splice.OVERLAP)
        self._queue.pop(samples)
        self._queue.amend(splice.shorten(here, splice.Splice(0, samples, 0.0)))
        self.counters.skipped_samples += samples
        self._spares.clear()
        return samples

    def _cut_shortened(self, surplus: int) -> Pcm:
        skip = min(surplus, FRAME_SAMPLES // 2)
        found = splice.find_quiet(self._queue.peek(FRAME_SAMPLES + skip), skip)
        if found is None:
            longest = min(surplus, splice.LONGEST_LAG)
            found = splice.find_alike(self._queue.peek(FRAME_SAMPLES + longest), splice.SHORTEST_LAG, longest)
        if found is None or not self._is_good_enough(found, surplus):
            return self._queue.pop(FRAME_SAMPLES)
        self.counters.compressed_samples += found.lag
        return splice.shorten(self._queue.pop(FRAME_SAMPLES + found.lag), found)

    def _cut_lengthened(self, lack: int) -> Pcm:
        found = splice.find_quiet(self._queue.peek(FRAME_SAMPLES - lack), lack)
        if found is None:
            longest = max(splice.SHORTEST_LAG, min(lack, splice.LONGEST_LAG))
            found = splice.find_alike(self._queue.peek(FRAME_SAMPLES - longest), splice.SHORTEST_LAG, longest)
        if found is None or not self._is_good_enough(found, lack):
            return self._queue.pop(FRAME_SAMPLES)
        self.counters.stretched_samples += found.lag
        return splice.lengthen(self._queue.pop(FRAME_SAMPLES - found.lag), found)

    def _is_good_enough(self, found: splice.Splice, surplus: int) -> bool:
        """Whether to splice here, or to wait for a better place; with more than a packet to win back, do not wait."""
        wanted = _LIKE - _LIKE_LESS * self._cuts_waited
        if found.likeness < wanted and surplus <= self._packet_samples:
            self._cuts_waited += 1
            return False
        self._cuts_waited = 0
        self._spares.clear()
        return True


class CutLead:
    """How long before its tick a frame is to be cut: longer where this process wakes late.

    A frame that is cut after its tick is lost to the model, all 80 ms of it; one that is cut early is only heard so
    much later. `JitterBuffer` follows the cut, whenever it comes.
    """

    LONGEST_S = 0.025
    _REMEMBERED = 128  # cuts: 10 s
    _TAKES_S = 0.002  # from the cut until the frame is in the ring

    def __init__(self) -> None:
        self.lead_s = CUT_BEFORE_TICK_S
        self._late_s: deque[float] = deque(maxlen=self._REMEMBERED)

    def note(self, late_s: float) -> None:
        """A frame was cut so long after it should have been."""
        self._late_s.append(late_s)
        self.lead_s = min(max(CUT_BEFORE_TICK_S, max(self._late_s) + self._TAKES_S), self.LONGEST_S)


class _Arrivals:
    """How late packets come: transit is arrival less position, on two clocks, so only its changes mean anything."""

    _REMEMBERED = 100  # packets: what was 2 s ago does not delay sound any more
    _LOSSY = 1500  # packets, 30 s: where three of so many came by another's FEC, frames are cut late enough for it
    _FEWEST = 8
    _OUTLIERS = 60  # one packet in so many, and one more, may be later than `latest`

    def __init__(self) -> None:
        self._transits: deque[float] = deque(maxlen=self._REMEMBERED)
        self._last_at = -math.inf
        self._last_transit = 0.0
        self._packet_s = 0.0
        self._noted = 0
        self._recovered: deque[int] = deque([-self._LOSSY] * 3, maxlen=3)  # after so many packets

    def forget(self) -> None:
        """A new timeline begins."""
        self._transits.clear()

    def note(self, position_s: float, now: float, packet_s: float) -> None:
        """A packet came. One on the heels of another that was later tells of the same delay, and does not count."""
        self._noted, self._packet_s = self._noted + 1, packet_s
        transit = now - position_s
        on_the_heels = now - self._last_at < packet_s / 4 and transit < self._last_transit
        self._last_at, self._last_transit = now, transit
        if not on_the_heels:
            self._transits.append(transit)

    def note_recovery(self) -> None:
        """A lost packet came with the one after it."""
        self._recovered.append(self._noted)

    def usual_and_latest(self) -> tuple[float, float]:
        """The median transit, and the one that hardly any packet exceeds; not a number before a few have come."""
        if len(self._transits) < self._FEWEST:
            return math.nan, math.nan
        transits = sorted(self._transits)
        outliers = len(transits) // self._OUTLIERS + 1
        usual, latest = transits[len(transits) // 2], transits[-1 - outliers]
        if self._noted - self._recovered[0] < self._LOSSY:
            latest = max(latest, usual + self._packet_s)
        return usual, latest


class _SampleQueue:
    """Samples in order; pushed at the end, popped at the head. Keeps `capacity` samples at most: the oldest go."""

    def __init__(self, capacity: int) -> None:
        self._samples: Pcm = np.zeros(2 * capacity, np.int16)
        self._capacity = capacity
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def push(self, pcm: Pcm) -> int:
        """Append; returns how many of the oldest samples were dropped for it."""
        pcm = pcm[-self._capacity :]
        dropped = max(0, len(self) + len(pcm) - self._capacity)
        self._start += dropped
        if self._end + len(pcm) > len(self._samples):
            kept = self.peek(len(self))
            self._start, self._end = 0, len(kept)
            self._samples[: self._end] = kept
        self._samples[self._end : self._end + len(pcm)] = pcm
        self._end += len(pcm)
        return dropped

    def peek(self, count: int) -> Pcm:
        """A copy of the first `count` samples, or of all if there are fewer."""
        return self._samples[self._start : min(self._start + count, self._end)].copy()

    def pop(self, count: int) -> Pcm:
        """Take out the first `count` samples, or all if there are fewer."""
        taken = self.peek(count)
        self._start += len(taken)
        return taken

    def amend(self, pcm: Pcm) -> None:
        """Put other samples in place of the first ones."""
        self._samples[self._start : self._start + len(pcm)] = pcm


def signed(difference: int, bits: int) -> int:
    """The shorter way round between two numbers of so many bits, which wrap: of sequences, of timestamps."""
    half = 1 << (bits - 1)
    return (difference + half) % (2 * half) - half
