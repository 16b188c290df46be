"""One peer connection as a call uses it, and all that reaches into aiortc and aioice.

aiortc does ICE, DTLS, SDP, data channels and RTCP. RTP goes past it, in and out, as its own way costs a call twice what
the codec does: two tasks, a thread and a queue each way. Nothing outside this file touches a private name of theirs;
those that are touched here are constants or subclasses below, and `tests/server/test_transport.py` names each and fails
when one is gone. What is changed, always on one instance and never for the whole process:

- The first packet of a stream goes through aiortc, which so learns of it and reports on it; ours stands where its
  jitter buffer was, and its decoder thread finds its end in its queue before it begins. Later packets are taken at the
  socket and counted in aiortc's own statistics.
- Our packets are sent past aiortc's sender, whose counts are kept up for its reports.
- Host candidates are gathered by us: 127.0.0.1 too, from a range of ports if one is set, nothing for over a second.
- Each socket notes when it last heard anything, which is how a caller who vanished is found; one who is merely silent
  is asked every second and a half, and answers.
- What a client sends by a data channel that is not even text reaches us as if it were; it would end the call.
- Its connecting is a task that it keeps no hold of; we do, and closing ends it first.
- The cipher list takes peers whose certificate is RSA, also where the peer is the DTLS server.
"""

import asyncio
import logging
import random
import struct
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from ipaddress import ip_address
from typing import Any, Final, cast

import pylibsrtp
from aioice import Candidate, Connection
from aioice.candidate import candidate_foundation, candidate_priority
from aioice.ice import StunProtocol, relayed_candidate, server_reflexive_candidate
from aioice.stun import TransactionError
from aiortc import (
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpTransceiver,
    RTCSessionDescription,
)
from aiortc.exceptions import InternalError, InvalidAccessError, InvalidStateError, OperationError
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtcconfiguration import RTCIceTransportPolicy
from aiortc.rtcdtlstransport import RTCCertificate, RTCDtlsTransport, SRTPProtectionProfile
from aiortc.rtcicetransport import RTCIceCandidate
from aiortc.rtcrtpparameters import RTCRtpCodecParameters
from aiortc.rtcrtpreceiver import StreamStatistics
from aiortc.rtcsctptransport import WEBRTC_STRING
from aiortc.rtp import RtpPacket, is_rtcp
from aiortc.sdp import SessionDescription
from aiortc.stats import RTCInboundRtpStreamStats, RTCRemoteInboundRtpStreamStats
from av.frame import Frame
from OpenSSL import SSL

from webrtc_duplex.errors import CapacityError, RequestError
from webrtc_duplex.media.jitter import Packet
from webrtc_duplex.server import sdp
from webrtc_duplex.server.ice import IceServers
from webrtc_duplex.settings import IceSettings

log = logging.getLogger(__name__)

JITTER_BUFFER: Final = "_RTCRtpReceiver__jitter_buffer"
DECODER_QUEUE: Final = "_RTCRtpReceiver__decoder_queue"
STREAMS: Final = "_RTCRtpReceiver__remote_streams"
EXTENSIONS: Final = "_RTCRtpSender__rtp_header_extensions_map"
NTP_TIME: Final = "_RTCRtpSender__ntp_timestamp"
RTP_TIME: Final = "_RTCRtpSender__rtp_timestamp"
PACKETS_SENT: Final = "_RTCRtpSender__packet_count"
OCTETS_SENT: Final = "_RTCRtpSender__octet_count"
CERTIFICATES: Final = "_RTCPeerConnection__certificates"
CONNECT: Final = "_RTCPeerConnection__connect"
CHANNEL_RECEIVE: Final = "_data_channel_receive"
GATHER: Final = "get_component_candidates"
CONSENT: Final = "query_consent"

UNFIT = (
    AssertionError,
    AttributeError,
    InternalError,
    InvalidAccessError,
    InvalidStateError,
    LookupError,
    OperationError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What aiortc raises at an offer that it cannot use."""

RTP_HEADER = struct.Struct("!BBHLL")
"""Version and flags, marker and payload type, sequence number, timestamp, SSRC (RFC 3550, 5.1)."""

SHORTEST_DATAGRAM = RTP_HEADER.size
"""STUN, DTLS and SRTCP have longer ones still."""

NTP_EPOCH_S = 2_208_988_800
"""1900, from where NTP counts, lies so long before 1970."""

LOOPBACK = "127.0.0.1"
GATHER_S = 1.0
"""An answer waits no longer for a STUN or TURN server; host candidates take no time."""
CONSENT_EVERY_S = 1.5
"""aioice asks every 5 s, too seldom for a caller on hold, who sends nothing else, to be told from one who is gone."""
CONSENT_EXPIRES_S = 30.0
"""RFC 7675, 5.1: then no more may be sent."""
CLOSE_S = 5.0
MOST_CANDIDATES = 64
"""Candidates of one caller beyond this many are ignored."""

CIPHERS = ":".join(
    f"ECDHE-{signed}-{cipher}"
    for cipher in ("AES128-GCM-SHA256", "CHACHA20-POLY1305", "AES128-SHA", "AES256-SHA")
    for signed in ("ECDSA", "RSA")
)


@dataclass(frozen=True, slots=True)
class TransportStats:
    """What RTCP says of a call; None where nothing was reported yet."""

    rtt_s: float | None
    jitter_in_s: float | None
    """Interarrival jitter of what the caller sends (RFC 3550)."""
    lost_in: int
    """Packets of the caller's that never came."""
    lost_out: float
    """Share of our packets that the caller last reported lost, 0..1."""


class Transport:
    """One peer connection. First `receive` the offer, then `answer` it - or `offer`, `accept` the answer, and say
    whom to `deliver_to`. Then sound comes by `take` and goes by `send`.

    Owned by whoever made it, who awaits `close`. `connected` is set once DTLS is up, `over` once the connection has
    failed or was closed by either side.
    """

    def __init__(
        self, call: str, ice: IceSettings, on_channel: Callable[[RTCDataChannel], None], clock: Callable[[], float]
    ) -> None:
        self.connected = asyncio.Event()
        self.over = asyncio.Event()
        self.channel_open = asyncio.Event()
        """The caller has opened a data channel."""
        self.heard_at = clock()
        """When anything last came from the caller: RTP, RTCP, STUN or DTLS, and not from just anybody."""
        self._clock = clock
        self._ice = ice
        self._candidates = 0
        self._closing: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()  # aiortc begins one with each description
        self._outlet: Outlet | None = None
        self._take: Callable[[Packet], None] | None = None
        self._pc = RTCPeerConnection(_configuration(call, ice))
        setattr(self._pc, CERTIFICATES, [_Certificate.generateCertificate()])
        setattr(self._pc, CONNECT, partial(self._connect, getattr(self._pc, CONNECT)))
        self._pc.on("connectionstatechange", self._follow_state)
        self._pc.on("datachannel", self._open_channel)
        self._on_channel = on_channel

    async def receive(self, offer: str) -> None:
        """Take a safe offer; `codecs` and `has_channel` are known then.

        Raises RequestError for an offer that aiortc cannot use.
        """
        with _unfit_is_the_callers_fault():
            await self._pc.setRemoteDescription(RTCSessionDescription(offer, "offer"))
            self._audio._codecs = [*self._audio._codecs, *_beside_the_voice(offer)]

    async def offer(self) -> str:
        """Return an offer of our own, with every codec we speak and all candidates; `accept` takes its answer."""
        self._pc.addTrack(SilentTrack())
        self._seize(self._deliver)
        await self._pc.setLocalDescription(_with_telephone_events(await self._pc.createOffer()))
        return self._pc.localDescription.sdp

    async def accept(self, answer: str) -> None:
        """Take the caller's answer, made safe as an offer is; `codecs` are known then.

        Raises RequestError for an answer that aiortc cannot use.
        """
        with _unfit_is_the_callers_fault("this answer cannot be used"):
            await self._pc.setRemoteDescription(RTCSessionDescription(answer, "answer"))
            self._audio._codecs = [*self._audio._codecs, *_beside_the_voice(answer)]
        self._outlet = Outlet(self._audio)

    def deliver_to(self, take: Callable[[Packet], None]) -> None:
        """After `accept`: give every packet that comes to `take`."""
        self._take = take

    async def answer(self, take: Callable[[Packet], None]) -> str:
        """Return the answer, all candidates in it; every packet that comes is given to `take`.

        Raises RequestError as `receive`.
        """
        with _unfit_is_the_callers_fault():
            self._seize(take)
            self._pc.addTrack(SilentTrack())
            await self._pc.setLocalDescription()
        self._outlet = Outlet(self._audio)
        return self._pc.localDescription.sdp

    def send(self, payload: bytes, timestamp: int, marker: bool) -> None:
        """Send a packet; `timestamp` counts in the codec's RTP clock. Dropped while the caller is not connected."""
        if self._outlet is not None and self.connected.is_set():
            self._outlet.send(payload, timestamp, marker)

    @property
    def has_channel(self) -> bool:
        """Whether the caller offered data channels."""
        return self._pc.sctp is not None

    @property
    def codecs(self) -> dict[int, str]:
        """Payload type -> lower-case name of every codec agreed on; the first is the one that we send."""
        return {codec.payloadType or 0: codec.name.lower() for codec in self._audio._codecs}

    @property
    def failure(self) -> str | None:
        """Why there is no connection, for `Session.ended_because`; None if it was closed in good order."""
        if self._pc.connectionState != "failed":
            return None
        if self._pc.iceConnectionState == "failed":
            return "ice_failed"
        return "dtls_failed"

    @property
    def obstacle(self) -> str | None:
        """What a caller who has not connected is waiting for, as a sentence for the log; None for one who has."""
        if self.connected.is_set():
            return None
        ice = self._audio.receiver.transport.transport
        if ice.state == "completed":
            return "ICE is done, DTLS is not"
        theirs = [f"{candidate.ip}:{candidate.port}" for candidate in ice.getRemoteCandidates()]
        if not theirs:
            return "the caller has shown no candidate, and no check of its own has come"
        return f"no check between us and {', '.join(theirs)} has succeeded"

    async def add_candidate(self, line: str, mid: str | None) -> None:
        """Add a candidate that came after the offer; one that is not to be called (`sdp.Candidate`) is passed over."""
        self._candidates += 1
        found = sdp.Candidate.parse(line)
        if found is None or self._candidates > MOST_CANDIDATES:
            return
        address = str(found.address)
        candidate = RTCIceCandidate(1, found.foundation, address, found.port, found.priority, "udp", found.kind)
        candidate.sdpMid = mid or self._audio.mid
        await self._pc.addIceCandidate(candidate)

    async def stats(self) -> TransportStats:
        """What the two ends have reported so far."""
        reports = (await self._pc.getStats()).values()
        ours = next((report for report in reports if isinstance(report, RTCRemoteInboundRtpStreamStats)), None)
        theirs = next((report for report in reports if isinstance(report, RTCInboundRtpStreamStats)), None)
        clock_rate = self._audio._codecs[0].clockRate
        return TransportStats(
            rtt_s=ours.roundTripTime if ours else None,
            jitter_in_s=theirs.jitter / clock_rate if theirs else None,
            lost_in=theirs.packetsLost if theirs else 0,
            lost_out=ours.fractionLost / 256 if ours else 0.0,
        )

    async def close(self) -> None:
        """Close everything; says so in the log if aiortc does not come to an end.

        It is done once and whole, also where who waits for it is called off: aiortc can be closed a second time, but
        waits for ever if the first time was cut short.
        """
        self._closing = self._closing or asyncio.create_task(self._close(), name="close a peer connection")
        closed, _ = await asyncio.wait([self._closing], timeout=CLOSE_S)
        if not closed:
            self._closing.cancel()
            log.error("a peer connection did not close within %s s", CLOSE_S)

    def _connect(self, connect: Callable[[], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        """Begin to connect, as aiortc does with what this returns."""
        connecting = asyncio.create_task(connect(), name="connect a peer connection")
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)
        return connecting

    async def _close(self) -> None:
        """Closed beneath it, aiortc's connecting would go on and stumble, or ask for consent that nobody needs."""
        for connecting in (begun := self._connecting.copy()):
            connecting.cancel()
        if begun:
            await asyncio.wait(begun)
        await self._pc.close()

    @property
    def _audio(self) -> RTCRtpTransceiver:
        audio = [transceiver for transceiver in self._pc.getTransceivers() if transceiver.kind == "audio"]
        return audio[0]

    def _follow_state(self) -> None:
        match self._pc.connectionState:
            case "connected":
                self.connected.set()
            case "failed" | "closed":
                self.over.set()

    def _seize(self, take: Callable[[Packet], None]) -> None:
        """Put our parts where aiortc keeps its own, after it has read the offer and before it acts on it."""
        receiver = self._audio.receiver
        setattr(receiver, JITTER_BUFFER, _Tap(take))
        getattr(receiver, DECODER_QUEUE).put(None)
        inlet = Inlet(self._audio, take, self._note_heard)
        for dtls in self._transports():
            connection = dtls.transport._connection
            new_socket = partial(_Socket, connection, self._note_heard, inlet if dtls is receiver.transport else None)
            setattr(connection, GATHER, _Gatherer(connection, self._ice, new_socket))
            setattr(connection, CONSENT, partial(_query_consent, connection, self._clock))
        if self._pc.sctp is not None:
            receive = getattr(self._pc.sctp, CHANNEL_RECEIVE)
            setattr(self._pc.sctp, CHANNEL_RECEIVE, partial(_receive_whatever, receive))

    def _transports(self) -> Iterator[RTCDtlsTransport]:
        yield self._audio.receiver.transport
        if self._pc.sctp is not None and self._pc.sctp.transport is not self._audio.receiver.transport:
            yield self._pc.sctp.transport

    def _open_channel(self, channel: RTCDataChannel) -> None:
        self.channel_open.set()
        self._on_channel(channel)

    def _deliver(self, packet: Packet) -> None:
        if self._take is not None:
            self._take(packet)

    def _note_heard(self) -> None:
        self.heard_at = self._clock()


@contextmanager
def _unfit_is_the_callers_fault(verdict: str = "this offer cannot be answered") -> Iterator[None]:
    try:
        yield
    except UNFIT as exc:
        reason = str(exc) or type(exc).__name__
        raise RequestError(f"{verdict}: {reason}", code="invalid_sdp", param="sdp") from exc


class _Tap:
    """Stands where aiortc keeps its jitter buffer, for the packets that still come through aiortc."""

    def __init__(self, take: Callable[[Packet], None]) -> None:
        self._take = take

    def add(self, rtp: RtpPacket) -> tuple[bool, None]:
        """Take a packet that aiortc has counted: no key frame is wanted, no frame is complete."""
        packet = Packet(rtp.sequence_number, rtp.timestamp, rtp.payload, rtp.payload_type, rtp.ssrc, bool(rtp.marker))
        self._take(packet)
        return False, None


class SilentTrack(MediaStreamTrack):
    """What aiortc's sender waits for while we send: it is there for its reports."""

    kind = "audio"

    async def recv(self) -> Frame:
        """Never comes; the sender's end cancels it."""
        await asyncio.Event().wait()
        raise MediaStreamError


@dataclass(slots=True)
class _Counted:
    """As much of a packet as aiortc's statistics look at."""

    sequence_number: int = 0
    timestamp: int = 0


class Inlet:
    """The short way in: RTP of streams that aiortc has seen, from the socket to us."""

    def __init__(
        self, audio: RTCRtpTransceiver, take: Callable[[Packet], None], note_heard: Callable[[], None]
    ) -> None:
        self._dtls = audio.receiver.transport
        self._streams: dict[int, StreamStatistics] = getattr(audio.receiver, STREAMS)
        self._audio = audio
        self._counted = _Counted()
        self._take = take
        self._note_heard = note_heard

    @cached_property
    def _payload_types(self) -> set[int | None]:
        """Of the codecs agreed on; asked for only once sound comes."""
        return {codec.payloadType for codec in self._audio._codecs}

    def take(self, data: bytes) -> bool:
        """Whether this datagram was such RTP, and so is dealt with."""
        if not 128 <= data[0] < 192 or is_rtcp(data):
            return False
        flags, kind, sequence, timestamp, ssrc = RTP_HEADER.unpack_from(data)
        stream = self._streams.get(ssrc)
        if stream is None or kind & 0x7F not in self._payload_types:
            return False
        try:
            payload = rtp_payload(self._dtls._rx_srtp.unprotect(data))
        except (pylibsrtp.Error, ValueError) as exc:
            log.debug("a packet that is not the caller's, or broken: %s", exc)
            return True
        self._note_heard()
        self._counted.sequence_number, self._counted.timestamp = sequence, timestamp
        stream.add(cast(RtpPacket, self._counted))
        self._take(Packet(sequence, timestamp, payload, kind & 0x7F, ssrc, kind > 0x7F))
        return True


class Outlet:
    """The short way out: RTP header, SRTP, socket; aiortc's sender goes on to report on it."""

    def __init__(self, audio: RTCRtpTransceiver) -> None:
        self._audio = audio
        self._dtls = audio.sender.transport
        self._connection = audio.sender.transport.transport._connection
        self._payload_type = audio._codecs[0].payloadType or 0
        self._sequence = random.randrange(1 << 15)  # the lower half, so that SRTP sees no early wrap
        self._origin = random.randrange(1 << 32)
        self._packets = self._octets = 0

    def send(self, payload: bytes, timestamp: int, marker: bool) -> None:
        """Send a packet, if the caller wants to hear anything."""
        pair = self._connection._nominated.get(1)
        if pair is None or self._audio.currentDirection not in ("sendrecv", "sendonly"):
            return
        timestamp = (self._origin + timestamp) & 0xFFFFFFFF
        flags = 0x90 if self._extensions else 0x80
        kind = self._payload_type | (0x80 if marker else 0)
        header = RTP_HEADER.pack(flags, kind, self._sequence, timestamp, self._audio.sender._ssrc)
        packet = self._dtls._tx_srtp.protect(header + self._extensions + payload)
        pair.protocol.transport.sendto(packet, pair.remote_addr)
        self._sequence = (self._sequence + 1) & 0xFFFF
        self._account(timestamp, len(payload))

    @cached_property
    def _extensions(self) -> bytes:
        """The header extension that names the media section, where one was agreed on: the same in every packet."""
        packet = RtpPacket()
        packet.extensions.mid = self._audio.mid
        return packet.serialize(getattr(self._audio.sender, EXTENSIONS))[RTP_HEADER.size :]

    def _account(self, timestamp: int, octets: int) -> None:
        """What sender reports say (RFC 3550, 6.4.1)."""
        self._packets += 1
        self._octets += octets
        sender = self._audio.sender
        setattr(sender, NTP_TIME, int((time.time() + NTP_EPOCH_S) * (1 << 32)))
        setattr(sender, RTP_TIME, timestamp)
        setattr(sender, PACKETS_SENT, self._packets)
        setattr(sender, OCTETS_SENT, self._octets)


def rtp_payload(packet: bytes) -> bytes:
    """What a packet carries: without header, sources, extension and padding. Raises ValueError for a broken one."""
    start = RTP_HEADER.size + 4 * (packet[0] & 0x0F)
    if packet[0] & 0x10:
        if len(packet) < start + 4:
            raise ValueError("an RTP header extension is cut off")
        start += 4 + 4 * int.from_bytes(packet[start + 2 : start + 4])
    end = len(packet) - (packet[-1] if packet[0] & 0x20 else 0)
    if not start <= end:
        raise ValueError("an RTP packet is shorter than it says")
    return packet[start:end]


class _Certificate(RTCCertificate):
    """A certificate of ours, which is ECDSA, that meets peers of either kind."""

    def _create_ssl_context(self, srtp_profiles: list[SRTPProtectionProfile]) -> SSL.Context:
        context = super()._create_ssl_context(srtp_profiles)
        context.set_cipher_list(CIPHERS.encode())
        return context


class _Socket(StunProtocol):
    """A socket of a peer connection that says when its peer is heard, and lets RTP go the short way."""

    def __init__(self, connection: Connection, note_heard: Callable[[], None], inlet: Inlet | None) -> None:
        super().__init__(connection)
        self._note_heard = note_heard
        self._inlet = inlet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.receiver._protocols.append(self)  # who closes it, also where who opened it is called off before it has it

    def datagram_received(self, data: bytes | str, addr: tuple[object, ...]) -> None:
        if len(data) < SHORTEST_DATAGRAM:  # aiortc looks at the first bytes unasked: an empty one would end the call
            return
        if self._inlet is not None and self._inlet.take(cast(bytes, data)):
            return
        if self._is_peers(addr):
            self._note_heard()
        super().datagram_received(data, addr)

    def _is_peers(self, addr: tuple[object, ...]) -> bool:
        """Whether it is the peer's address, once there is one: a stranger's datagrams do not keep a call."""
        pair = self.receiver._nominated.get(1)
        return pair is None or addr[:2] == pair.remote_addr


def _configuration(call: str, ice: IceSettings) -> RTCConfiguration:
    """Without servers unless the settings name some: aiortc's own default is a public one."""
    if not ice.gather:
        return RTCConfiguration(iceServers=[])
    named = IceServers(ice).as_json(call, time.time())
    policy = RTCIceTransportPolicy.RELAY if ice.relay_only else RTCIceTransportPolicy.ALL
    return RTCConfiguration([RTCIceServer(**cast(dict[str, Any], server)) for server in named], policy)


class _Gatherer:
    """Finds our candidates in place of `Connection.get_component_candidates`."""

    def __init__(self, connection: Connection, ice: IceSettings, new_socket: Callable[[], _Socket]) -> None:
        self._connection = connection
        self._ice = ice
        self._new_socket = new_socket

    async def __call__(self, component: int, addresses: list[str], timeout: int = 5) -> list[Candidate]:
        """Bind a socket on each address and on 127.0.0.1; ask STUN and TURN, but not for longer than `GATHER_S`.

        Raises CapacityError if no port is left.
        """
        local = [] if self._ice.relay_only else [*addresses, LOOPBACK]
        sockets = [socket for address in local if (socket := await self._bind(component, address))]
        if local and not sockets:
            raise CapacityError(f"no UDP port is left of {self._ice.udp_ports or 'this machine'}", code="no_ports")
        hosts = [socket.local_candidate for socket in sockets]
        public = [shown for host in hosts if (shown := _public_candidate(host, self._ice.public_ip))]
        return hosts + public + await self._ask_servers(component, sockets)

    async def _bind(self, component: int, address: str) -> _Socket | None:
        """A socket on this address, of the range of ports if there is one; None if none can be had."""
        loop = asyncio.get_running_loop()
        for port in self._ports():
            try:
                transport, socket = await loop.create_datagram_endpoint(self._new_socket, local_addr=(address, port))
            except OSError as exc:
                log.debug("no candidate on %s port %d: %s", address, port, exc)
                continue
            host, port = transport.get_extra_info("sockname")[:2]
            socket.local_candidate = _host_candidate(component, host, port)
            return socket
        return None

    def _ports(self) -> Sequence[int]:
        """The range from a random place round, as its lower end is the most used; 0 lets the system choose."""
        ports = self._ice.ports or (0,)
        start = random.randrange(len(ports))
        return [*ports[start:], *ports[:start]]

    async def _ask_servers(self, component: int, sockets: list[_Socket]) -> list[Candidate]:
        """Candidates by STUN and TURN that come in time; who is late is not waited for."""
        questions = [asyncio.create_task(question) for question in self._questions(component, sockets)]
        if not questions:
            return []
        answered, late = await asyncio.wait(questions, timeout=GATHER_S)
        for question in late:
            question.cancel()
        found = [question.result() for question in answered if question.exception() is None]
        return [candidate for candidate, _ in found]

    def _questions(
        self, component: int, sockets: list[_Socket]
    ) -> Iterator[Coroutine[None, None, tuple[Candidate, StunProtocol | None]]]:
        connection = self._connection
        if connection.stun_server is not None:
            for socket in sockets:
                if ip_address(socket.local_candidate.host).version == 4:
                    yield server_reflexive_candidate(socket, connection.stun_server)
        if connection.turn_server is not None:
            yield relayed_candidate(
                component=component,
                hide_related_address=self._ice.relay_only,
                protocol_factory=self._new_socket,
                turn_server=connection.turn_server,
                turn_username=connection.turn_username,
                turn_password=connection.turn_password,
                turn_ssl=connection.turn_ssl,
                turn_transport=connection.turn_transport,
            )


def _host_candidate(component: int, host: str, port: int) -> Candidate:
    foundation = candidate_foundation("host", "udp", host)
    return Candidate(foundation, component, "udp", candidate_priority(component, "host"), host, port, "host")


def _public_candidate(host: Candidate, public_ip: str | None) -> Candidate | None:
    """The same socket as those see it who are beyond the NAT; None if there is no such view of it."""
    if public_ip is None:
        return None
    local, public = ip_address(host.host), ip_address(public_ip)
    if local.is_loopback or local == public or local.version != public.version:
        return None
    foundation = candidate_foundation("srflx", "udp", host.host)
    priority = candidate_priority(host.component, "srflx")
    return Candidate(foundation, host.component, "udp", priority, public_ip, host.port, "srflx", host.host, host.port)


async def _receive_whatever(
    receive: Callable[[int, int, bytes], Coroutine[None, None, None]], stream: int, protocol: int, data: bytes
) -> None:
    """Let aiortc take a message of a data channel; one that it stumbles over is dropped, and ends nothing."""
    if protocol == WEBRTC_STRING:
        data = data.decode(errors="replace").encode()
    try:
        await receive(stream, protocol, data)
    except UNFIT as exc:
        log.info("a message of a data channel cannot be read: %s", exc)


async def _query_consent(connection: Connection, clock: Callable[[], float]) -> None:
    """Ask over and over whether the caller still wants our packets (RFC 7675), in place of aioice's own asking."""
    given_at = clock()
    while clock() - given_at < CONSENT_EXPIRES_S:
        await asyncio.sleep(CONSENT_EVERY_S * random.uniform(0.8, 1.2))
        for pair in list(connection._nominated.values()):
            request = connection.build_request(pair, nominate=False)
            key = (connection.remote_password or "").encode()
            try:
                await pair.protocol.request(request, pair.remote_addr, integrity_key=key, retransmissions=0)
                given_at = clock()
            except TransactionError:
                log.debug("no consent from %s", pair.remote_addr)
    connection._query_consent_task = None
    await connection.close()


TELEPHONE_EVENTS = (
    RTCRtpCodecParameters("audio/telephone-event", 8_000, payloadType=101),
    RTCRtpCodecParameters("audio/telephone-event", 48_000, payloadType=110),
)


def _with_telephone_events(offer: RTCSessionDescription) -> RTCSessionDescription:
    """An offer of digits too, at the RTP clocks of telephones and of Opus."""
    description = SessionDescription.parse(offer.sdp)
    for media in description.media:
        media.rtp.codecs += TELEPHONE_EVENTS
        media.fmt += [codec.payloadType for codec in TELEPHONE_EVENTS]
    return RTCSessionDescription(str(description), offer.type)


def _beside_the_voice(offer: str) -> list[RTCRtpCodecParameters]:
    """A safe offer's digits (RFC 4733) and comfort noise (RFC 3389), which aiortc would not let in by itself."""
    audio = next(media for media in SessionDescription.parse(offer).media if media.kind == "audio")
    return [codec for codec in audio.rtp.codecs if (codec.name.lower(), codec.clockRate) not in sdp.VOICE_CODECS]
