"""A bad network on one machine: a UDP relay between any client and the server, with seeded faults.

No privileges are needed. The client's candidates are taken out of its offer and the server's in the answer replaced by
the relay's own, so that neither knows a way round it:

    async with Relay(NETWORKS["mobile"], seed=1) as relay:
        answer = await post(relay.without_candidates(offer))
        await client.setRemoteDescription(await relay.through_here(answer))

The server takes the relay for a peer-reflexive candidate, the client for a host candidate. A client that trickles its
candidates must not send them on.
"""

import asyncio
import re
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Self

Address = tuple[str, int]

_LONGEST_QUEUE_S = 1.0
_CANDIDATE = re.compile(r"a=candidate:(\S+) (\d) (?i:udp) (\d+) (\S+) (\d+) typ (\S+).*")


@dataclass(frozen=True, slots=True)
class Network:
    """What happens to packets one way; probabilities are of each packet."""

    loss: float = 0.0
    burst_begins: float = 0.0
    """Gilbert's model: the chance that a good stretch ends; in a bad stretch everything is lost."""
    burst_ends: float = 1.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Each packet takes up to so much longer, evenly spread; order is kept all the same."""
    reordered: float = 0.0
    reordered_by_s: float = 0.04
    """A packet that is reordered comes so much later, and others overtake it."""
    duplicated: float = 0.0
    rate_bps: float | None = None
    """What the bottleneck carries; its queue holds a second, and more is lost."""
    blackout: tuple[float, float] | None = None
    """Nothing passes from so many seconds after the first media packet, for so many seconds."""
    stall: tuple[float, float] | None = None
    """The same, but what came meanwhile is held and let go at once at its end."""


NETWORKS = {
    "clean": Network(),
    "loss1": Network(loss=0.01),
    "loss5": Network(loss=0.05),
    "lossy": Network(loss=0.03, burst_begins=0.005, burst_ends=0.5, delay_s=0.02, jitter_s=0.005),
    "bursty": Network(burst_begins=0.01, burst_ends=0.33, delay_s=0.02, jitter_s=0.005),
    "jitter": Network(delay_s=0.02, jitter_s=0.03),
    "mobile": Network(
        burst_begins=0.005, burst_ends=0.5, delay_s=0.04, jitter_s=0.03, reordered=0.005, duplicated=0.002, rate_bps=1e6
    ),
    "reordering": Network(reordered=0.05, duplicated=0.02),
    "stall": Network(stall=(5.0, 0.2)),
    "blackout": Network(blackout=(5.0, 3.0)),
}


class Link:
    """One direction. Pure: packet and time in, times of arrival out."""

    def __init__(self, network: Network, random: Random) -> None:
        self._network = network
        self._random = random
        self._bad = False
        self._free_at = 0.0  # when the bottleneck has sent all it was given
        self._last_arrival = 0.0  # of those that keep their order

    def carry(self, size: int, now: float, media_s: float) -> list[float]:
        """When a packet of `size` bytes arrives: never, once or twice. `media_s`: time since the first media packet."""
        network = self._network
        if self._is_lost() or _within(network.blackout, media_s):
            return []
        leaves = self._through_bottleneck(size, now)
        if leaves is None:
            return []
        arrival = leaves + network.delay_s + network.jitter_s * self._random.random()
        if network.stall is not None and _within(network.stall, media_s):
            arrival = max(arrival, now + sum(network.stall) - media_s)
        if self._random.random() < network.reordered:
            arrival += network.reordered_by_s
        else:
            arrival = self._last_arrival = max(arrival, self._last_arrival)
        return [arrival] * (2 if self._random.random() < network.duplicated else 1)

    def _is_lost(self) -> bool:
        turns = self._network.burst_ends if self._bad else self._network.burst_begins
        if self._random.random() < turns:
            self._bad = not self._bad
        return self._bad or self._random.random() < self._network.loss

    def _through_bottleneck(self, size: int, now: float) -> float | None:
        if self._network.rate_bps is None:
            return now
        leaves = max(now, self._free_at) + 8 * size / self._network.rate_bps
        if leaves > now + _LONGEST_QUEUE_S:
            return None
        self._free_at = leaves
        return leaves


@dataclass(slots=True)
class Passed:
    """Media packets of one direction that came to the relay, and that left it."""

    came: int = 0
    left: int = 0


class Relay:
    """The relay of one call. Closed at the end of its block.

    `up` is the network towards the server, `down` (the same by default) towards the client. With `media_only`, STUN and
    DTLS pass unharmed, so that a call is set up quickly and what is measured is sound.
    """

    def __init__(
        self,
        up: Network,
        down: Network | None = None,
        *,
        seed: int = 0,
        media_only: bool = True,
        host: str = "127.0.0.1",
    ) -> None:
        self.up, self.down = Passed(), Passed()
        self._links = Link(up, Random(f"{seed} up")), Link(up if down is None else down, Random(f"{seed} down"))
        self._media_only = media_only
        self._host = host
        self._fronts: list[asyncio.DatagramTransport] = []
        self._backs: list[asyncio.DatagramTransport] = []
        self._first_media_at: float | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for socket in (*self._fronts, *self._backs):
            socket.close()

    @staticmethod
    def without_candidates(offer: str) -> str:
        """The client's offer as the server may see it."""
        hidden = ("a=candidate:", "a=end-of-candidates")
        return "".join(line for line in offer.splitlines(keepends=True) if not line.startswith(hidden))

    async def through_here(self, answer: str) -> str:
        """The server's answer as the client may see it: the relay in place of each IPv4 address on the same machine."""
        lines = []
        for line in answer.splitlines():
            candidate = _CANDIDATE.fullmatch(line)
            if candidate is None:
                lines.append(line)
            elif ":" not in candidate[4] and candidate[6] == "host":
                front = await self._open_front((candidate[4], int(candidate[5])))
                lines.append(
                    f"a=candidate:{candidate[1]} {candidate[2]} udp {candidate[3]} {self._host} {front} typ host"
                )
        return "\r\n".join(lines) + "\r\n"

    async def _open_front(self, server: Address) -> int:
        front, _ = await self._loop.create_datagram_endpoint(lambda: _Front(self, server), local_addr=(self._host, 0))
        self._fronts.append(front)
        port: int = front.get_extra_info("sockname")[1]
        return port

    async def open_back(self, server: Address, protocol: "_Back") -> asyncio.DatagramTransport:
        """A socket for one client address, by which the server knows it."""
        back, _ = await self._loop.create_datagram_endpoint(lambda: protocol, remote_addr=server)
        self._backs.append(back)
        return back

    def carry(self, upwards: bool, data: bytes, to: asyncio.DatagramTransport, address: Address | None = None) -> None:
        """Send a packet on when, and if, the network lets it."""
        now = self._loop.time()
        passed = self.up if upwards else self.down
        if not _is_media(data):
            arrivals = [now] if self._media_only else self._links[not upwards].carry(len(data), now, -1.0)
            passed = Passed()
        else:
            if self._first_media_at is None:
                self._first_media_at = now
            arrivals = self._links[not upwards].carry(len(data), now, now - self._first_media_at)
        passed.came += 1
        for arrival in arrivals:
            passed.left += 1
            if arrival <= now:
                _send(to, data, address)
            else:
                self._loop.call_at(arrival, _send, to, data, address)


class _Front(asyncio.DatagramProtocol):
    """What the client takes for the server."""

    def __init__(self, relay: Relay, server: Address) -> None:
        self._relay = relay
        self._server = server
        self._backs: dict[Address, asyncio.Task[asyncio.DatagramTransport]] = {}

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Address) -> None:
        back = self._backs.get(addr)
        if back is None:
            protocol = _Back(self._relay, self._transport, addr)
            back = self._backs[addr] = asyncio.ensure_future(self._relay.open_back(self._server, protocol))
        if back.done():
            self._relay.carry(True, data, back.result())
        else:
            back.add_done_callback(lambda opened: self._relay.carry(True, data, opened.result()))


class _Back(asyncio.DatagramProtocol):
    """What the server takes for the client."""

    def __init__(self, relay: Relay, front: asyncio.DatagramTransport, client: Address) -> None:
        self._relay = relay
        self._front = front
        self._client = client

    def datagram_received(self, data: bytes, addr: Address) -> None:
        self._relay.carry(False, data, self._front, self._client)

    def error_received(self, exc: Exception) -> None:
        """The server has closed its socket: its packets are lost, as on any network."""


def _send(to: asyncio.DatagramTransport, data: bytes, address: Address | None) -> None:
    if not to.is_closing():
        to.sendto(data, address)


def _is_media(data: bytes) -> bool:
    """RTP and RTCP, by their first byte (RFC 7983)."""
    return bool(data) and 128 <= data[0] <= 191


def _within(stretch: tuple[float, float] | None, media_s: float) -> bool:
    return stretch is not None and stretch[0] <= media_s < stretch[0] + stretch[1]
