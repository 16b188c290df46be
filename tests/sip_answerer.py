"""The least SIP that answers a call: for phones that do ICE and DTLS-SRTP themselves and need nobody but the server.

One UDP socket; INVITE, ACK, BYE, CANCEL and OPTIONS; no retransmission of its own, as it never leaves the machine.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = Callable[[str], Awaitable[str]]
"""An SDP offer in, its answer out."""

Address = tuple[str, int]

ECHOED = ("via", "from", "to", "call-id", "cseq")


@dataclass
class SipAnswerer(asyncio.DatagramProtocol):
    """Answers one call's INVITE with what `answer` makes of its offer."""

    address: str
    answer: Answer
    port: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the phone has said BYE."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _transport: asyncio.DatagramTransport | None = None
    _answered: str = ""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def datagram_received(self, data: bytes, address: Address) -> None:
        head, _, body = data.decode(errors="replace").partition("\r\n\r\n")
        method = head.split(" ", 1)[0]
        if method == "INVITE":
            task = asyncio.create_task(self._take(head, body, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif method in ("BYE", "CANCEL", "OPTIONS"):
            self._reply(head, "200 OK", address)
            if method == "BYE":
                self.ended.set()

    async def _take(self, head: str, offer: str, address: Address) -> None:
        """Answer; an INVITE within the call (baresip sends one when its ICE is done) hears the same answer again."""
        self._reply(head, "100 Trying", address)
        async with self._one_at_a_time:
            if not self._answered:
                self._answered = await self.answer(offer)
        self._reply(head, "200 OK", address, self._answered)

    def _reply(self, head: str, status: str, address: Address, sdp: str = "") -> None:
        lines = [f"SIP/2.0 {status}"]
        for line in head.split("\r\n")[1:]:
            name = line.partition(":")[0].strip().lower()
            if name in ECHOED:
                lines.append(line + ";tag=answerer" if name == "to" and not re.search(r";\s*tag=", line) else line)
        lines.append(f"Contact: <sip:agent@{self.address}:{self.port}>")
        if sdp:
            lines.append("Content-Type: application/sdp")
        lines += [f"Content-Length: {len(sdp.encode())}", "", sdp]
        assert self._transport is not None
        self._transport.sendto("\r\n".join(lines).encode(), address)


@asynccontextmanager
async def answering(address: str, answer: Answer) -> AsyncIterator[SipAnswerer]:
    """A SipAnswerer on a port of its own, for as long as the block runs."""
    loop = asyncio.get_running_loop()
    transport, answerer = await loop.create_datagram_endpoint(
        lambda: SipAnswerer(address, answer), local_addr=(address, 0)
    )
    answerer._transport = transport
    answerer.port = transport.get_extra_info("sockname")[1]
    try:
        yield answerer
    finally:
        transport.close()
        await asyncio.gather(*answerer._tasks, return_exceptions=True)
