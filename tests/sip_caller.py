"""The least SIP that calls without an offer: for phones that let the other side offer, and answer with their ACK.

Plain RTP and PCMU, one call, no retransmission: it never leaves the machine.
"""

import asyncio
import re
import secrets
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import numpy as np

from webrtc_duplex.audio import CHUNK_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.media import telephone

Address = tuple[str, int]

PCMU = 0
RTP_RATE = 8_000


class Inbox(asyncio.DatagramProtocol):
    """A UDP socket whose datagrams wait in `datagrams`."""

    def __init__(self) -> None:
        self.datagrams: asyncio.Queue[bytes] = asyncio.Queue(1000)
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: Address) -> None:
        self.datagrams.put_nowait(data)

    def send(self, data: bytes, to: Address) -> None:
        assert self.transport is not None
        self.transport.sendto(data, to)

    @property
    def port(self) -> int:
        assert self.transport is not None
        port: int = self.transport.get_extra_info("sockname")[1]
        return port


class OfferlessCaller:
    """One call; its microphone is a tone, `heard` is what came."""

    def __init__(self, address: str, callee: Address, sip: Inbox, rtp: Inbox) -> None:
        self._address = address
        self._callee = callee
        self._sip = sip
        self._rtp = rtp
        self._call_id, self._tag = secrets.token_hex(8), secrets.token_hex(4)
        self._to = f"<sip:1001@{callee[0]}:{callee[1]}>"
        self.offer = ""
        """What the other side has offered."""

    async def dial(self) -> None:
        """INVITE without SDP, then ACK with an answer to the offer that comes with the 200."""
        self._request("INVITE", 1)
        head, self.offer = await self._final_response()
        assert head.startswith("SIP/2.0 200"), head
        (to,) = re.findall(r"(?im)^to: *(.*?)\r?$", head)
        self._to = to
        self._request("ACK", 1, self._answer())

    def hang_up(self) -> None:
        self._request("BYE", 2)

    async def talk(self, frequency_hz: float, seconds: float, packet_s: float) -> Pcm:
        """Say a tone for so long, in packets of that length; returns what was heard meanwhile, packet after packet."""
        sender = telephone.TelephoneEncoder("pcmu")
        (port,) = re.findall(r"(?m)^m=audio (\d+)", self.offer)
        time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
        tone = (8000 * np.sin(2 * np.pi * frequency_hz * time)).astype(np.int16)
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        sound = b"".join(sender.encode(chunk) for chunk in tone.reshape(-1, CHUNK_SAMPLES))
        size = round(packet_s * RTP_RATE)  # a byte a sample
        for n, start in enumerate(range(0, len(sound), size)):
            header = struct.pack("!BBHLL", 0x80, PCMU, n, start, 7)
            self._rtp.send(header + sound[start : start + size], (self._callee[0], int(port)))
            await asyncio.sleep(max(0.0, began_at + packet_s * (n + 1) - loop.time()))
        return self._heard()

    def _heard(self) -> Pcm:
        decoder = telephone.decoder("pcmu", np.random.default_rng(0))
        pieces = []
        while not self._rtp.datagrams.empty():
            datagram = self._rtp.datagrams.get_nowait()
            if datagram[1] & 0x7F == PCMU and (pcm := decoder.decode(datagram[12:])) is not None:
                pieces.append(pcm)
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int16)

    def _answer(self) -> str:
        lines = ["v=0", f"o=- 1 1 IN IP4 {self._address}", "s=-", f"c=IN IP4 {self._address}", "t=0 0"]
        lines += [f"m=audio {self._rtp.port} RTP/AVP {PCMU}", "a=rtpmap:0 PCMU/8000", "a=ptime:20", "a=sendrecv", ""]
        return "\r\n".join(lines)

    async def _final_response(self) -> tuple[str, str]:
        while True:
            head, _, body = (await self._sip.datagrams.get()).decode().partition("\r\n\r\n")
            if not head.startswith("SIP/2.0 1"):
                return head, body

    def _request(self, method: str, number: int, sdp: str = "") -> None:
        host, port = self._callee
        lines = [
            f"{method} sip:1001@{host}:{port} SIP/2.0",
            f"Via: SIP/2.0/UDP {self._address}:{self._sip.port};branch=z9hG4bK{secrets.token_hex(6)};rport",
            "Max-Forwards: 70",
            f"From: <sip:old@{self._address}>;tag={self._tag}",
            f"To: {self._to}",
            f"Call-ID: {self._call_id}",
            f"CSeq: {number} {method}",
            f"Contact: <sip:old@{self._address}:{self._sip.port}>",
        ]
        lines += ["Content-Type: application/sdp"] if sdp else []
        self._sip.send("\r\n".join([*lines, f"Content-Length: {len(sdp)}", "", sdp]).encode(), self._callee)


@asynccontextmanager
async def offerless_caller(address: str, callee: Address) -> AsyncIterator[OfferlessCaller]:
    loop = asyncio.get_running_loop()
    sip_transport, sip = await loop.create_datagram_endpoint(Inbox, local_addr=(address, 0))
    rtp_transport, rtp = await loop.create_datagram_endpoint(Inbox, local_addr=(address, 0))
    try:
        yield OfferlessCaller(address, callee, sip, rtp)
    finally:
        rtp_transport.close()
        sip_transport.close()
