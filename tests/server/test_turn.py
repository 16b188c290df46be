"""Through a real TURN server: callers who can be reached by no other way, and a server that shows no other."""

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection
from aiortc.rtcconfiguration import RTCIceTransportPolicy

from tests.conftest import missing
from tests.server.peer import Peer
from webrtc_duplex.server.ice import IceServers
from webrtc_duplex.server.transport import Transport
from webrtc_duplex.settings import IceSettings

SECRET = "a secret of the test"


@dataclass(frozen=True, slots=True)
class Turn:
    """A TURN server on loopback."""

    url: str

    def settings(self, gather: bool = False, relay_only: bool = False) -> IceSettings:
        return IceSettings(turn_urls=(self.url,), turn_secret=SECRET, gather=gather, relay_only=relay_only)


@pytest.fixture
async def turn(tmp_path: Path) -> AsyncIterator[Turn]:
    if shutil.which("turnserver") is None:
        missing("needs a TURN server: apt-get install coturn")
    port = free_port()
    options = (
        f"--listening-ip=127.0.0.1 --relay-ip=127.0.0.1 --listening-port={port} --realm=test --no-cli --no-tls"
        f" --no-dtls --allow-loopback-peers --pidfile={tmp_path}/pid --log-file={tmp_path}/log --no-stdout-log"
    )
    arguments = [*options.split(), "-n", "--use-auth-secret", f"--static-auth-secret={SECRET}"]
    process = await asyncio.create_subprocess_exec(
        "turnserver", *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await listening(port)
        yield Turn(f"turn:127.0.0.1:{port}?transport=udp")
    finally:
        process.terminate()
        await process.wait()


def free_port() -> int:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def listening(port: int) -> None:
    """Wait until the server takes TCP connections, on the same port as UDP."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return


@asynccontextmanager
async def connected(ours: Transport, peer: Peer) -> AsyncIterator[str]:
    """Both ends up; gives our answer."""
    try:
        await ours.receive(await peer.offer())
        answer = await ours.answer(lambda packet: None)
        await peer.accept(answer)
        await ours.connected.wait()
        yield answer
    finally:
        await ours.close()
        await peer.close()


async def test_a_caller_who_can_only_be_reached_through_turn_connects_with_credentials_that_expire(turn: Turn) -> None:
    (server,) = IceServers(turn.settings()).as_json("whose", time.time())
    servers = [RTCIceServer(**cast(dict[str, Any], server))]
    peer = Peer(configuration=RTCConfiguration(servers, RTCIceTransportPolicy.RELAY))
    ours = Transport("rtc_1", IceSettings(), lambda channel: None, asyncio.get_running_loop().time)
    async with connected(ours, peer):
        assert [c.type for c in candidates(peer.pc)] == ["relay"]
        ours.send(b"sound", 0, False)
        await peer.heard_packets(1)


async def test_a_server_told_to_shows_callers_its_relayed_address_only(turn: Turn) -> None:
    ice = turn.settings(gather=True, relay_only=True)
    ours = Transport("rtc_1", ice, lambda channel: None, asyncio.get_running_loop().time)
    peer = Peer()
    async with connected(ours, peer) as answer:
        shown = [line for line in answer.splitlines() if line.startswith("a=candidate")]
        assert shown and all(" typ relay " in line for line in shown)
        ours.send(b"sound", 0, False)
        await peer.heard_packets(1)


async def test_credentials_that_have_expired_open_no_relay(turn: Turn) -> None:
    (server,) = IceServers(turn.settings()).as_json("whose", time.time() - 100_000)
    servers = [RTCIceServer(**cast(dict[str, Any], server))]
    peer = Peer(configuration=RTCConfiguration(servers, RTCIceTransportPolicy.RELAY))
    await peer.offer()
    assert candidates(peer.pc) == []
    await peer.close()


def candidates(pc: RTCPeerConnection) -> list[Any]:
    return pc.getSenders()[0].transport.transport.iceGatherer.getLocalCandidates()
