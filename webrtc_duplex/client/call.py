"""A caller in Python: `async with connect(url) as call`, then say things and iterate over what is heard.

    async with connect("http://localhost:8080", voice="NATF0") as call:
        await call.send(pcm)                    # int16 at 24 kHz, any number of samples
        async for sound in call.sound():
            play(sound.pcm)

Sound is taken off RTP as it comes, each packet with the time of its arrival: there is no jitter buffer in between, so
what is measured here is what the server did.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import aiohttp
from aioice import Candidate, Connection
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCRtpTransceiver, RTCSessionDescription
from aiortc.rtp import RtpPacket
from aiortc.stats import RTCRemoteInboundRtpStreamStats

from webrtc_duplex.audio import Pcm
from webrtc_duplex.client.microphone import Microphone
from webrtc_duplex.errors import AuthError, CallNotFoundError, CapacityError, DuplexError, EngineError, RequestError
from webrtc_duplex.media.opus import Decoder

JITTER_BUFFER: Final = "_RTCRtpReceiver__jitter_buffer"
DECODER_QUEUE: Final = "_RTCRtpReceiver__decoder_queue"
GATHER: Final = "get_component_candidates"

SECRET_HEADER = "X-Call-Secret"
CHANNEL = "oai-events"
PACKETS = 512
"""Packets kept for a slow reader, ten seconds; then the oldest goes, and is counted."""
EVENTS = 1024

Json = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReceivedPacket:
    """One packet of the agent's: Opus, its place in RTP time (48 kHz), and when it came."""

    sequence: int
    timestamp: int
    payload: bytes
    at: float


@dataclass(frozen=True, slots=True)
class ReceivedSound:
    """The sound of one packet: mono int16 at 24 kHz."""

    pcm: Pcm
    timestamp: int
    at: float


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """One event of the data channel."""

    type: str
    body: Json
    at: float


class _Mailbox(Generic[T]):
    """A bounded queue that drops its oldest and counts it; ends quietly when closed."""

    def __init__(self, bound: int) -> None:
        self.dropped = 0
        self._queue: asyncio.Queue[T | None] = asyncio.Queue(bound + 1)
        self._bound = bound

    def put(self, item: T) -> None:
        if self._queue.qsize() >= self._bound:
            self._queue.get_nowait()
            self.dropped += 1
        self._queue.put_nowait(item)

    def close(self) -> None:
        if not self._queue.full():
            self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[T]:
        while (item := await self._queue.get()) is not None:
            yield item
        self.close()  # for the next reader


class Call:
    """A call that is up. Made by `connect`, which also ends it.

    `join_s` is the time from the offer to the connection. `id` is the server's name for it, `secret` the proof that it
    is ours.
    """

    def __init__(self, pc: RTCPeerConnection, microphone: Microphone, channel: RTCDataChannel) -> None:
        self.id = ""
        self.secret = ""
        self.join_s = 0.0
        self.over = asyncio.Event()
        self._pc = pc
        self._microphone = microphone
        self._channel = channel
        self._packets = _Mailbox[ReceivedPacket](PACKETS)
        self._events = _Mailbox[ReceivedEvent](EVENTS)
        self._connected = asyncio.Event()
        pc.on("connectionstatechange", self._follow_state)
        channel.on("message", self._take_event)

    async def send(self, pcm: Pcm) -> None:
        """Say samples; returns once at most a second of them waits to be sent."""
        await self._microphone.say(pcm)

    async def send_packet(self, payload: bytes) -> None:
        """Say 20 ms that are Opus already."""
        await self._microphone.say_packet(payload)

    def send_event(self, event: Json) -> None:
        """Send a command over the data channel, which must be open: after the first event of the server's."""
        self._channel.send(json.dumps(event))

    def packets(self) -> AsyncIterator[ReceivedPacket]:
        """The agent's packets as they come; ends with the call."""
        return aiter(self._packets)

    async def sound(self) -> AsyncIterator[ReceivedSound]:
        """The agent's sound as it comes, a packet at a time; ends with the call. Instead of `packets`."""
        decoder = Decoder()
        async for packet in self._packets:
            pcm = decoder.decode(packet.payload)
            if pcm is not None:
                yield ReceivedSound(pcm, packet.timestamp, packet.at)

    def events(self) -> AsyncIterator[ReceivedEvent]:
        """The server's events as they come; ends with the call."""
        return aiter(self._events)

    @property
    def sent_at(self) -> float | None:
        """When the last packet that held something said was due to leave."""
        return self._microphone.sent_at

    @property
    def dropped(self) -> int:
        """Packets and events that went unread, as the reader was slow."""
        return self._packets.dropped + self._events.dropped

    async def rtt_s(self) -> float | None:
        """The network's round trip, as RTCP has last measured it; None before that."""
        reports = (await self._pc.getStats()).values()
        trips = [report.roundTripTime for report in reports if isinstance(report, RTCRemoteInboundRtpStreamStats)]
        return next(iter(trips), None)

    async def wait_connected(self) -> None:
        """Wait until DTLS is up. Raises EngineError if it fails."""
        await self._connected.wait()
        if self.over.is_set():
            raise EngineError("the peer connection failed", code="connect_failed")

    def take(self, packet: RtpPacket) -> None:
        self._packets.put(ReceivedPacket(packet.sequence_number, packet.timestamp, packet.payload, time.monotonic()))

    def _take_event(self, message: str | bytes) -> None:
        body = json.loads(message)
        self._events.put(ReceivedEvent(str(body.get("type")), body, time.monotonic()))

    def _follow_state(self) -> None:
        match self._pc.connectionState:
            case "connected":
                self._connected.set()
            case "failed" | "closed":
                self._connected.set()
                self.end()

    def end(self) -> None:
        """Let every reader come to its end."""
        self.over.set()
        self._packets.close()
        self._events.close()


class Route(Protocol):
    """Something that packets are to go through, such as a bad network made for a test."""

    def without_candidates(self, offer: str) -> str:
        """The offer as the server may see it."""

    async def through_here(self, answer: str) -> str:
        """The answer as we may see it."""


@asynccontextmanager
async def connect(
    url: str,
    *,
    voice: str | None = None,
    instructions: str | None = None,
    seed: int | None = None,
    key: str | None = None,
    timeout_s: float = 15.0,
    route: Route | None = None,
    microphone: Microphone | None = None,
) -> AsyncIterator[Call]:
    """Call the server at `url`; the call is hung up at the end of the block. `microphone`: one of the caller's own.

    Raises what the server refuses with: AuthError, RequestError, CapacityError, EngineError; TimeoutError if no
    connection comes about in `timeout_s`.
    """
    wishes = {"voice": voice, "instructions": instructions, "seed": None if seed is None else str(seed)}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as http, _peer(microphone or Microphone()) as call:
        began = time.monotonic()
        asked = {name: wish for name, wish in wishes.items() if wish is not None}
        place = await _offer(http, url.rstrip("/"), call, asked, route)
        try:
            await asyncio.wait_for(call.wait_connected(), timeout_s)
            call.join_s = time.monotonic() - began
            yield call
        finally:
            await _hang_up(http, place, call.secret)


@asynccontextmanager
async def _peer(microphone: Microphone) -> AsyncIterator[Call]:
    """A peer connection with a microphone and a channel, whose packets come to us undecoded."""
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    transceiver = pc.addTransceiver(microphone)
    channel = pc.createDataChannel(CHANNEL)
    call = Call(pc, microphone, channel)
    _seize(transceiver, call)
    for dtls in (transceiver.receiver.transport, channel.transport.transport):
        _add_loopback(dtls.transport._connection)
    try:
        yield call
    finally:
        call.end()
        await pc.close()


async def _offer(
    http: aiohttp.ClientSession, url: str, call: Call, wishes: Mapping[str, str], route: Route | None
) -> str:
    """Send the offer and take the answer; returns the URL of the call."""
    pc = call._pc
    await pc.setLocalDescription(await pc.createOffer())
    offer = pc.localDescription.sdp if route is None else route.without_candidates(pc.localDescription.sdp)
    headers = {"Content-Type": "application/sdp"}
    request = http.post(f"{url}/v1/realtime/calls", params=wishes, data=offer.encode(), headers=headers)
    async with request as response:
        await _check(response)
        place = url + response.headers["Location"]
        call.id = place.rpartition("/")[2]
        call.secret = response.headers.get(SECRET_HEADER, "")
        answer = await response.text() if route is None else await route.through_here(await response.text())
        await pc.setRemoteDescription(RTCSessionDescription(answer, "answer"))
    return place


async def _hang_up(http: aiohttp.ClientSession, place: str, secret: str) -> None:
    """End the call at the server; one that has ended by itself, or whose server is gone, is as well."""
    try:
        async with http.delete(place, headers={"Authorization": f"Bearer {secret}"}):
            pass
    except aiohttp.ClientError:
        pass


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 300:
        return
    body = await response.json()
    error = body["error"]
    retry_after = response.headers.get("Retry-After")
    raise _class_of(response.status, error["code"])(
        error["message"],
        code=error["code"],
        status=response.status,
        param=error.get("param"),
        retry_after_s=float(retry_after) if retry_after else None,
    )


def _class_of(status: int, code: str) -> type[DuplexError]:
    match status, code:
        case 401 | 403, _:
            return AuthError
        case _, "call_not_found" | "call_lost":
            return CallNotFoundError
        case 503, "at_capacity":
            return CapacityError
        case _ if status >= 500:
            return EngineError
    return RequestError


class _Tap:
    """Stands where aiortc keeps its jitter buffer."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def add(self, packet: RtpPacket) -> tuple[bool, None]:
        """No key frame is wanted, and no frame is for aiortc to decode."""
        self._call.take(packet)
        return False, None


def _seize(transceiver: RTCRtpTransceiver, call: Call) -> None:
    """Take the receiver's packets, and let its decoder thread end before it begins."""
    setattr(transceiver.receiver, JITTER_BUFFER, _Tap(call))
    getattr(transceiver.receiver, DECODER_QUEUE).put(None)


def _add_loopback(connection: Connection) -> None:
    """Let a machine without any network call itself: aioice leaves 127.0.0.1 out."""
    setattr(connection, GATHER, partial(_gather_with_loopback, getattr(connection, GATHER)))


async def _gather_with_loopback(gather: Any, component: int, addresses: list[str], timeout: int = 5) -> list[Candidate]:
    candidates: list[Candidate] = await gather(component, [*addresses, "127.0.0.1"], timeout)
    return candidates
