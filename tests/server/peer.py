"""A caller made of aiortc, in this process, and the server's calls with an engine in a thread: no HTTP between them."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCSessionDescription
from aiortc.rtp import RtpPacket

from tests.engine_doubles import EchoDouble, engine_thread
from webrtc_duplex.audio import SAMPLE_RATE, Pcm
from webrtc_duplex.client.microphone import Microphone
from webrtc_duplex.media.opus import RTP_CLOCK, Decoder
from webrtc_duplex.messages import Prompt
from webrtc_duplex.server import sdp
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.metrics import Metrics
from webrtc_duplex.server.session import CallRequest, Calls, Session, SessionState
from webrtc_duplex.server.transport import DECODER_QUEUE, JITTER_BUFFER
from webrtc_duplex.settings import EngineSettings, ServerSettings, Settings

CALL_NUMBERS = itertools.count(1)


@dataclass
class House:
    """The server's side of a test."""

    runner: EchoDouble
    engine: EngineClient
    calls: Calls
    metrics: Metrics

    async def rows_free(self, rows: int) -> None:
        """Wait until so many rows are free."""
        while self.engine.last_step is None or self.engine.last_step.free_rows != rows:
            await asyncio.sleep(0.01)

    async def frames_heard(self, frames: int, row: int = 0) -> None:
        """Wait until the model has stepped a row so often."""
        while self.runner.heard[row] < frames:
            await asyncio.sleep(0.01)


async def in_state(session: Session, state: SessionState) -> None:
    """Wait for it."""
    while session.state is not state:
        await asyncio.sleep(0.01)


@asynccontextmanager
async def house(
    directory: Path,
    rows: int = 2,
    engine: EngineSettings | None = None,
    server: ServerSettings | None = None,
) -> AsyncIterator[House]:
    """Calls with an engine that echoes, until the block is left."""
    runner = EchoDouble(rows)
    with engine_thread(directory, runner, engine) as socket_path:
        async with EngineClient(socket_path) as client:
            await client.wait_ready(5)
            metrics = Metrics(client)
            async with Calls(client, Settings(server=server or ServerSettings()), metrics) as calls:
                yield House(runner, client, calls, metrics)


class Peer:
    """A caller. `say` what it says; `packets` are those that came, `heard` is their sound."""

    def __init__(self, channel: str | None = "oai-events", configuration: RTCConfiguration | None = None) -> None:
        self.microphone = Microphone()
        self.packets: list[RtpPacket] = []
        self.events: list[dict[str, Any]] = []
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.pc = RTCPeerConnection(configuration or RTCConfiguration(iceServers=[]))
        self.pc.addTrack(self.microphone)
        self.channel: RTCDataChannel | None = None
        self._came = asyncio.Event()
        if channel is not None:
            self.channel = self.pc.createDataChannel(channel)
            self.channel.on("message", self._take_event)
            self.channel.on("open", self.opened.set)
        self.pc.on("connectionstatechange", self._follow_state)

    async def offer(self) -> str:
        await self.pc.setLocalDescription(await self.pc.createOffer())
        return sdp.safe_offer(self.pc.localDescription.sdp)

    async def answer(self, offer: str) -> str:
        """The answer to an offer of the server's, made safe."""
        await self.pc.setRemoteDescription(RTCSessionDescription(sdp.finish_offer(offer), "offer"))
        self._take_packets()
        await self.pc.setLocalDescription()
        return sdp.safe_offer(self.pc.localDescription.sdp)

    async def accept(self, answer: str) -> None:
        self._take_packets()
        finished = sdp.finish_answer(answer, self.pc.localDescription.sdp)
        await self.pc.setRemoteDescription(RTCSessionDescription(finished, "answer"))

    def _take_packets(self) -> None:
        receiver = self.pc.getReceivers()[0]
        setattr(receiver, JITTER_BUFFER, self)
        getattr(receiver, DECODER_QUEUE).put(None)

    def add(self, packet: RtpPacket) -> tuple[bool, None]:
        """aiortc's jitter buffer."""
        self.packets.append(packet)
        self._came.set()
        return False, None

    async def heard(self, seconds: float) -> Pcm:
        """Wait for so much of RTP time; returns the sound of it, silence where nothing was sent."""
        while not self.packets or self._place(self.packets[-1]) < seconds * SAMPLE_RATE:
            self._came.clear()
            await self._came.wait()
        decoder = Decoder()
        timeline = np.zeros(self._place(self.packets[-1]) + SAMPLE_RATE, np.int16)
        for packet in self.packets:
            pcm = decoder.decode(packet.payload)
            assert pcm is not None
            timeline[self._place(packet) : self._place(packet) + len(pcm)] = pcm
        return timeline

    async def heard_packets(self, count: int) -> None:
        """Wait for so many in all."""
        while len(self.packets) < count:
            self._came.clear()
            await self._came.wait()

    def _place(self, packet: RtpPacket) -> int:
        return ((packet.timestamp - self.packets[0].timestamp) & 0xFFFFFFFF) * SAMPLE_RATE // RTP_CLOCK

    async def event(self, kind: str, after: int = 0) -> dict[str, Any]:
        """Wait for the first event of a kind."""
        while True:
            for event in self.events[after:]:
                if event["type"] == kind:
                    return event
            self._came.clear()
            await self._came.wait()

    def tell(self, message: dict[str, Any] | str) -> None:
        assert self.channel is not None
        self.channel.send(message if isinstance(message, str) else json.dumps(message))

    def vanish(self) -> None:
        """Be gone without a word: nothing leaves any more, nothing is heard."""
        for transceiver in self.pc.getTransceivers():
            for protocol in transceiver.receiver.transport.transport._connection._protocols:
                protocol.transport.close()

    async def close(self) -> None:
        """Hang up as a browser does."""
        await self.pc.close()

    def _take_event(self, text: str) -> None:
        self.events.append(json.loads(text))
        self._came.set()

    def _follow_state(self) -> None:
        if self.pc.connectionState in ("closed", "failed"):
            self.closed.set()


def with_codec(offer: str, payload_type: int, codec: str) -> str:
    """The offer with one more codec of sound, the last."""
    before, mark, audio = offer.partition("m=audio ")
    line, _, rest = audio.partition("\r\n")
    return f"{before}{mark}{line} {payload_type}\r\na=rtpmap:{payload_type} {codec}\r\n{rest}"


@asynccontextmanager
async def call(
    house: House, prompt: Prompt | None = None, channel: str | None = None
) -> AsyncIterator[tuple[Peer, Session]]:
    """A caller whose offer was answered."""
    peer = Peer(channel)
    try:
        request = CallRequest(f"rtc_test_{next(CALL_NUMBERS)}", await peer.offer(), prompt or Prompt())
        session = await house.calls.answer(request)
        await peer.accept(session.answer)
        yield peer, session
    finally:
        await peer.close()
