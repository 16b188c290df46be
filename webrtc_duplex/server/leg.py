"""A leg of a call: one peer connection, with what is heard and what is said on it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from webrtc_duplex.audio import Pcm
from webrtc_duplex.media.drift import ClockDrift
from webrtc_duplex.media.jitter import JitterBuffer, Packet
from webrtc_duplex.media.playout import Playout
from webrtc_duplex.media.telephone import Keys
from webrtc_duplex.server.metrics import LegTally, Metrics
from webrtc_duplex.server.tracks import AgentAudioTrack, Ticker, decoders, encoder
from webrtc_duplex.server.transport import Transport

FIRST_PACKET_S = 0.3
"""A caller whose sound does not come so soon after DTLS is muted: the call is live all the same."""
CHANNEL_OPEN_S = 5.0
"""A data channel that was offered but does not open is not waited for any longer."""
SETTLE_S = 0.3
"""So long after the data channel opened its client may still choose voice and instructions."""


class Leg:
    """One peer connection of a call with its sound both ways. A call has one, and one more each time it is resumed.

    `transport` has received its offer, or the answer to ours. Owned by the `Session`, who closes it.
    """

    def __init__(
        self,
        transport: Transport,
        ticker: Ticker,
        metrics: Metrics,
        clock: Callable[[], float],
        on_key: Callable[[str], None],
    ) -> None:
        codecs = transport.codecs
        self._payload_type, codec = next(iter(codecs.items()))
        self.transport = transport
        self.over = transport.over
        self.first_packet = asyncio.Event()
        self.jitter = JitterBuffer(decoders(codecs))
        self.encoder = encoder(codec)
        self.drift = ClockDrift(self.encoder.rtp_clock)
        """Of callers who send the codec that they are sent."""
        self.playout = Playout(continuous=codec != "opus")
        self.track = AgentAudioTrack(self.encoder, self.playout, ticker, clock, transport.send)
        self._keys = {number: Keys() for number, name in codecs.items() if name == "telephone-event"}
        self._tally = LegTally(metrics, self.jitter.counters, self.playout.counters)
        self._frames = 0
        self._clock = clock
        self._on_key = on_key

    async def answer(self) -> str:
        """Raises RequestError for an offer that cannot be answered."""
        return await self.transport.answer(self._take)

    def begin(self) -> None:
        """Take sound from now on, where the offer was ours and has been answered."""
        self.transport.deliver_to(self._take)

    async def media_up(self) -> None:
        """Return once sound can go both ways, and the client has had its time to say what it wants."""
        await self.transport.connected.wait()
        self.track.start()
        await wait(self.first_packet, FIRST_PACKET_S)
        if self.transport.has_channel and await wait(self.transport.channel_open, CHANNEL_OPEN_S):
            await asyncio.sleep(SETTLE_S)

    def cut_frame(self, due: float) -> Pcm:
        """What the caller has said in the 80 ms before `due` [1920]."""
        self._frames += 1
        return self.jitter.pop_frame(due).pcm

    def count(self) -> None:
        """Let the metrics know what has been counted here since last time."""
        self._tally.tell(self._frames)

    async def close(self) -> None:
        """Close the connection; a no-op the second time."""
        self.track.stop()
        await self.transport.close()

    def _take(self, packet: Packet) -> None:
        now = self._clock()
        self.first_packet.set()
        self.jitter.add(packet, now)
        if packet.payload_type == self._payload_type:
            self.drift.note(packet, now)
        keys = self._keys.get(packet.payload_type)
        if keys is not None and (key := keys.hear(packet)):
            self._on_key(key)


async def wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event came in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
