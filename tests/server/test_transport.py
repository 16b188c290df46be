"""One peer connection, and every private name of aiortc and aioice that ours hangs on."""

import asyncio
import datetime
import gc
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import uvloop
from aioice import Candidate, Connection
from aioice.ice import get_host_addresses
from aiortc import RTCConfiguration, RTCPeerConnection
from aiortc.rtcdtlstransport import RTCCertificate, RTCDtlsParameters, RTCDtlsTransport
from aiortc.rtp import RtpPacket
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from OpenSSL import SSL

from tests.server.peer import Peer, with_codec
from tests.server.served import OFFER
from webrtc_duplex.errors import CapacityError
from webrtc_duplex.media.jitter import Packet
from webrtc_duplex.server import sdp, transport
from webrtc_duplex.server.transport import Transport
from webrtc_duplex.settings import IceSettings

MOST_TURNS = 40
"""Of the event loop, until an answer is ready and connecting has begun."""


class Ours:
    """The server's end: a transport that keeps the packets that come."""

    def __init__(self, ice: IceSettings | None = None) -> None:
        self.packets: list[Packet] = []
        self.came = asyncio.Event()
        self.transport = Transport("rtc_1", ice or IceSettings(), lambda channel: None, time.monotonic)

    async def answer(self, peer: Peer) -> str:
        return await self.answer_to(await peer.offer())

    async def answer_to(self, offer: str) -> str:
        await self.transport.receive(offer)
        return await self.transport.answer(self._take)

    async def heard(self, packets: int) -> None:
        while len(self.packets) < packets:
            self.came.clear()
            await self.came.wait()

    def _take(self, packet: Packet) -> None:
        self.packets.append(packet)
        self.came.set()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Peer, Ours]]:
    peer, ours = Peer(), Ours()
    yield peer, ours
    await ours.transport.close()
    await peer.close()


async def connect(peer: Peer, ours: Ours) -> None:
    await peer.accept(await ours.answer(peer))
    await ours.transport.connected.wait()


async def test_every_private_name_that_we_touch_is_there() -> None:
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    pc.createDataChannel("one")
    audio = pc.addTransceiver("audio")
    connection = audio.receiver.transport.transport._connection
    assert isinstance(getattr(pc, transport.CERTIFICATES)[0], RTCCertificate)
    assert callable(getattr(pc, transport.CONNECT))
    assert callable(getattr(audio.receiver, transport.JITTER_BUFFER).add)
    assert callable(getattr(audio.receiver, transport.DECODER_QUEUE).put)
    assert callable(getattr(connection, transport.GATHER)) and callable(getattr(connection, transport.CONSENT))
    for thing, names in (
        (audio, ["_codecs"]),
        (audio.receiver, [transport.STREAMS]),
        (audio.sender, [transport.EXTENSIONS, transport.NTP_TIME, transport.RTP_TIME]),
        (audio.sender, [transport.PACKETS_SENT, transport.OCTETS_SENT, "_ssrc"]),
        (audio.sender.transport, ["_rx_srtp", "_tx_srtp"]),
        (pc.sctp, [transport.CHANNEL_RECEIVE]),
        (audio.receiver.transport.transport, ["_connection"]),
        (connection, ["_nominated", "_protocols", "_query_consent_task", "build_request", "remote_password"]),
        (RTCCertificate.generateCertificate(), ["_create_ssl_context"]),
    ):
        for name in names:
            assert hasattr(thing, name), f"{type(thing).__name__} has no {name} any more"
    assert isinstance(audio.receiver.transport, RTCDtlsTransport)
    await pc.close()


async def test_packets_come_to_us_the_first_through_aiortc_and_its_decoder_does_not_run(
    ends: tuple[Peer, Ours], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, ours = ends
    through_aiortc, add = list[int](), transport._Tap.add

    def counted(tap: transport._Tap, packet: RtpPacket) -> tuple[bool, None]:
        through_aiortc.append(packet.sequence_number)
        return add(tap, packet)

    monkeypatch.setattr(transport._Tap, "add", counted)
    await connect(peer, ours)
    await ours.heard(10)
    assert through_aiortc == [ours.packets[0].sequence]
    sequences = [packet.sequence for packet in ours.packets]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    assert not [thread for thread in threading.enumerate() if thread.name == "audio-decoder"]


async def test_what_rtcp_reports_stays_right(ends: tuple[Peer, Ours], monkeypatch: pytest.MonkeyPatch) -> None:
    peer, ours = ends
    await connect(peer, ours)
    await ours.heard(5)
    lose_packets(peer, 3, monkeypatch)
    sent = 0
    while (stats := await ours.transport.stats()).lost_in < 3 or stats.rtt_s is None:
        ours.transport.send(b"sound", 960 * sent, False)
        sent += 1
        await asyncio.sleep(0.02)
    assert stats.lost_in == 3 and stats.lost_out == 0
    assert stats.jitter_in_s is not None and stats.jitter_in_s < 0.2 and stats.rtt_s < 1
    theirs = {report.type: report for report in (await peer.pc.getStats()).values()}
    assert theirs["remote-inbound-rtp"].packetsLost == 3
    assert 0 < theirs["remote-outbound-rtp"].packetsSent <= sent
    assert theirs["remote-outbound-rtp"].bytesSent == 5 * theirs["remote-outbound-rtp"].packetsSent
    assert theirs["inbound-rtp"].packetsLost == 0 and theirs["inbound-rtp"].packetsReceived >= sent - 1


async def test_packets_go_out_whole_with_their_time_marker_and_section(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    ours.transport.send(b"too early", 0, False)
    await connect(peer, ours)
    for number in range(3):
        ours.transport.send(b"sound", 960 * number, number == 1)
    await peer.heard_packets(3)
    first = peer.packets[0]
    assert [packet.payload for packet in peer.packets] == [b"sound"] * 3
    assert [(packet.timestamp - first.timestamp) & 0xFFFFFFFF for packet in peer.packets] == [0, 960, 1920]
    assert [packet.sequence_number - first.sequence_number for packet in peer.packets] == [0, 1, 2]
    assert [packet.marker for packet in peer.packets] == [0, 1, 0]
    assert {packet.extensions.mid for packet in peer.packets} == {peer.pc.getTransceivers()[0].mid}


async def test_nothing_is_sent_to_who_only_sends(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    peer.pc.getTransceivers()[0].direction = "sendonly"
    await connect(peer, ours)
    await ours.heard(1)
    for number in range(5):
        ours.transport.send(b"sound", 960 * number, False)
    await ours.heard(10)
    assert peer.packets == []


@pytest.mark.parametrize(
    ("packet", "payload"),
    [
        (bytes([0x80]) + bytes(11) + b"abc", b"abc"),
        (bytes([0x82]) + bytes(11 + 8) + b"abc", b"abc"),
        (bytes([0x90]) + bytes(11) + b"\xbe\xde\x00\x01" + bytes(4) + b"abc", b"abc"),
        (bytes([0xA0]) + bytes(11) + b"abc" + b"\x00\x00\x03", b"abc"),
        (bytes([0x80]) + bytes(11), b""),
    ],
)
def test_a_payload_is_found_behind_sources_extensions_and_before_padding(packet: bytes, payload: bytes) -> None:
    assert transport.rtp_payload(packet) == payload


@pytest.mark.parametrize(
    "packet",
    [
        bytes([0x8F]) + bytes(11),
        bytes([0x90]) + bytes(12),
        bytes([0x90]) + bytes(11) + b"\xbe\xde\x00\x09" + bytes(4),
        bytes([0xA0]) + bytes(11) + b"ab\x09",
    ],
)
def test_a_packet_that_is_shorter_than_it_says_is_refused(packet: bytes) -> None:
    with pytest.raises(ValueError):
        transport.rtp_payload(packet)


def lose_packets(peer: Peer, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next packets of sound that the peer sends do not arrive."""
    dtls = peer.pc.getSenders()[0].transport
    send, left = dtls._send_rtp, [count]

    async def lossy(data: bytes) -> None:
        if left[0] and not transport_is_rtcp(data):
            left[0] -= 1
        else:
            await send(data)

    monkeypatch.setattr(dtls, "_send_rtp", lossy)


def transport_is_rtcp(data: bytes) -> bool:
    return 192 <= data[1] <= 223


async def test_the_answer_is_passive_and_has_a_loopback_candidate(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    answer = await ours.answer(peer)
    assert "a=setup:passive" in answer
    assert " 127.0.0.1 " in answer


@pytest.mark.parametrize("bits", [2048, 4096])
@pytest.mark.parametrize("setup", ["actpass", "passive"])
async def test_a_peer_with_an_rsa_certificate_connects(
    ends: tuple[Peer, Ours], monkeypatch: pytest.MonkeyPatch, bits: int, setup: str
) -> None:
    peer, ours = ends
    setattr(peer.pc, transport.CERTIFICATES, [rsa_certificate(bits)])
    offer = peer.offer

    async def offer_with_role() -> str:
        return (await offer()).replace("a=setup:active", "a=setup:passive" if setup == "passive" else "a=setup:active")

    monkeypatch.setattr(peer, "offer", offer_with_role)
    for dtls in peer_transports(peer):
        monkeypatch.setattr(dtls, "_RTCDtlsTransport__local_certificate", getattr(peer.pc, transport.CERTIFICATES)[0])
        monkeypatch.setattr(dtls, "_write_ssl", partial(write_whole_flight, dtls))
    await connect(peer, ours)
    await ours.heard(3)


def peer_transports(peer: Peer) -> list[RTCDtlsTransport]:
    assert peer.pc.sctp is not None
    return [peer.pc.getSenders()[0].transport, peer.pc.sctp.transport]


async def write_whole_flight(dtls: RTCDtlsTransport) -> None:
    """aiortc sends 1500 bytes of what OpenSSL has to say, which a large certificate exceeds; other stacks send all."""
    assert dtls._ssl is not None
    try:
        flight = dtls._ssl.bio_read(65_536)
    except SSL.Error:
        return
    while flight:
        record = 13 + int.from_bytes(flight[11:13])
        await dtls.transport._send(flight[:record])
        flight = flight[record:]


class RsaCertificate(RTCCertificate):
    """As GStreamer and FreeSWITCH have it; takes what a usual server takes."""

    def _create_ssl_context(self, srtp_profiles):  # type: ignore[no-untyped-def]
        context = super()._create_ssl_context(srtp_profiles)
        context.set_cipher_list(b"DEFAULT")
        return context


def rsa_certificate(bits: int) -> RTCCertificate:
    key = rsa.generate_private_key(65537, bits)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "peer")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    return RsaCertificate(key, certificate)  # type: ignore[arg-type]


async def test_a_peer_that_sends_no_media_is_still_heard_of(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    await connect(peer, ours)
    await peer.pc.getSenders()[0].stop()
    for receiver in peer.pc.getReceivers():
        await receiver.stop()
    for _ in range(2):
        before = ours.transport.heard_at
        while ours.transport.heard_at == before:
            await asyncio.sleep(0.05)


async def test_a_strangers_datagrams_neither_keep_nor_end_a_call(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    await connect(peer, ours)
    await ours.heard(1)
    connection = ours.transport._audio.receiver.transport.transport._connection
    before, noise = ours.transport.heard_at, random.Random(1)
    for first in range(256):
        for size in (0, 1, 12, 13, 20, 60):
            datagram = bytes([first])[:size] + noise.randbytes(max(0, size - 1))
            connection._nominated[1].protocol.datagram_received(datagram, ("198.51.100.1", 4000))
    assert ours.transport.heard_at == before
    await ours.heard(len(ours.packets) + 10)
    assert not ours.transport.over.is_set()


async def test_a_connection_without_consent_is_closed() -> None:
    connection = Connection(ice_controlling=False)
    times = iter([0.0, transport.CONSENT_EXPIRES_S])
    await transport._query_consent(connection, lambda: next(times))
    assert connection._closed


async def test_an_address_that_cannot_be_bound_is_left_out() -> None:
    connection = Connection(ice_controlling=False)
    candidates = await transport._Gatherer(connection, IceSettings(), partial(a_socket, connection))(1, ["203.0.113.1"])
    assert [candidate.host for candidate in candidates] == ["127.0.0.1"]
    await connection.close()


async def test_sockets_are_from_the_range_of_ports_and_none_is_found_when_it_is_used_up() -> None:
    ports = free_ports(2)
    gather = partial(gather_on_loopback, IceSettings(udp_ports=f"{ports[0]}-{ports[-1]}"))
    async with gather() as first, gather() as second:
        assert {first[0].port, second[0].port} == set(ports)
        with pytest.raises(CapacityError, match=f"{ports[0]}-{ports[-1]}"):
            async with gather():
                pass
    async with gather() as again:
        assert again[0].port in ports


async def test_a_public_address_is_shown_beside_our_own() -> None:
    connection = Connection(ice_controlling=False)
    gatherer = transport._Gatherer(connection, IceSettings(public_ip="203.0.113.9"), partial(a_socket, connection))
    here = next(address for address in get_host_addresses(True, False))
    candidates = await gatherer(1, [here])
    shown = {candidate.host: candidate for candidate in candidates}
    assert set(shown) == {here, "127.0.0.1", "203.0.113.9"}
    assert shown["203.0.113.9"].port == shown[here].port and shown["203.0.113.9"].type == "srflx"
    await connection.close()


async def test_a_turn_server_that_does_not_answer_delays_nothing_for_over_a_second() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{deaf.getsockname()[1]}"
        ice = IceSettings(stun_urls=(f"stun:{server}",), turn_urls=(f"turn:{server}",), turn_secret="s", gather=True)
        peer, ours = Peer(), Ours(ice)
        began = time.monotonic()
        answer = await ours.answer(peer)
        assert time.monotonic() - began < transport.GATHER_S + 0.9
        assert " 127.0.0.1 " in answer and "typ relay" not in answer
        await ours.transport.close()
        await peer.close()


def a_socket(connection: Connection) -> transport._Socket:
    return transport._Socket(connection, lambda: None, None)


@asynccontextmanager
async def gather_on_loopback(ice: IceSettings) -> AsyncIterator[list[Candidate]]:
    connection = Connection(ice_controlling=False)
    try:
        yield await transport._Gatherer(connection, ice, partial(a_socket, connection))(1, [])
    finally:
        await connection.close()


def free_ports(count: int) -> range:
    """UDP ports in a row that nobody uses."""
    for first in range(41_000, 60_000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).bind(("127.0.0.1", port))
            except OSError:
                continue
            return range(first, first + count)
    raise AssertionError("all ports are in use")


async def test_digits_are_agreed_on_as_they_were_offered(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    await ours.transport.receive(with_codec(await peer.offer(), 126, "telephone-event/8000"))
    assert ours.transport.codecs[126] == "telephone-event"


async def test_comfort_noise_is_let_in_as_it_was_offered(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    await ours.transport.receive(with_codec(await peer.offer(), 13, "CN/8000"))
    assert ours.transport.codecs[13] == "cn"


async def test_what_keeps_a_caller_from_connecting_has_a_sentence(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    bare = "".join(line for line in (await peer.offer()).splitlines(True) if not line.startswith("a=candidate"))
    await ours.transport.receive(bare)
    await ours.transport.answer(lambda packet: None)
    assert "no candidate" in (ours.transport.obstacle or "")
    await ours.transport.add_candidate("candidate:1 1 udp 1 198.51.100.7 4000 typ host", None)
    assert "198.51.100.7:4000" in (ours.transport.obstacle or "")


async def test_a_candidate_that_comes_later_is_added_and_a_strange_one_passed_over(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    await ours.answer(peer)
    for line in ("candidate:1 1 udp 1 198.51.100.7 4000 typ host", "candidate:2 1 udp 1 x.local 4000 typ host", "!"):
        await ours.transport.add_candidate(line, None)
    ice = ours.transport._audio.receiver.transport.transport
    assert "198.51.100.7" in [candidate.ip for candidate in ice.getRemoteCandidates()]
    assert "x.local" not in [candidate.ip for candidate in ice.getRemoteCandidates()]


async def test_a_peer_that_closes_ends_the_transport_without_a_failure(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    await connect(peer, ours)
    await ours.heard(1)
    await peer.close()
    await ours.transport.over.wait()
    assert ours.transport.failure is None


async def test_a_call_that_is_closed_while_it_connects_leaves_no_task_and_no_complaint(
    ends: tuple[Peer, Ours], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, ours = ends
    before = asyncio.all_tasks()
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    answer = await ours.answer(peer)
    dtls = ours.transport._audio.receiver.transport

    async def shake_hands_until_closed(_: RTCDtlsParameters) -> None:
        while dtls.transport.state != "closed":
            await asyncio.sleep(0)

    monkeypatch.setattr(dtls, "start", shake_hands_until_closed)
    await peer.accept(answer)
    while ours.transport.obstacle != "ICE is done, DTLS is not":
        await asyncio.sleep(0.01)
    await ours.transport.close()
    await peer.close()
    async with asyncio.timeout(5):
        while asyncio.all_tasks() - before:
            await asyncio.sleep(0.01)
    gc.collect()
    assert not complaints


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_whenever_opening_is_called_off_no_socket_stays_open(
    run: Callable[[Coroutine[None, None, None]], None],
) -> None:
    async def open_and_close(turns: int) -> None:
        ours = Ours()
        opening = asyncio.create_task(ours.answer_to(sdp.safe_offer(OFFER)))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        await ours.transport.close()

    async def over_and_over() -> None:
        await open_and_close(MOST_TURNS)  # what is made once is made now
        before = sockets_held()
        for turns in range(MOST_TURNS):
            await open_and_close(turns)
            async with asyncio.timeout(5):
                while sockets_held() > before:
                    await asyncio.sleep(0.01)

    run(over_and_over())


def sockets_held() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_closing_twice_is_harmless(ends: tuple[Peer, Ours]) -> None:
    peer, ours = ends
    await connect(peer, ours)
    await ours.transport.close()
    await ours.transport.close()
    assert ours.transport.over.is_set()


@pytest.mark.parametrize(
    ("connection", "ice", "failure"),
    [("failed", "failed", "ice_failed"), ("failed", "completed", "dtls_failed"), ("closed", "closed", None)],
)
async def test_why_there_is_no_connection_has_a_name(
    ends: tuple[Peer, Ours], monkeypatch: pytest.MonkeyPatch, connection: str, ice: str, failure: str | None
) -> None:
    _, ours = ends
    monkeypatch.setattr(RTCPeerConnection, "connectionState", connection)
    monkeypatch.setattr(RTCPeerConnection, "iceConnectionState", ice)
    assert ours.transport.failure == failure
    monkeypatch.undo()
