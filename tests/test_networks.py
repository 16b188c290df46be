"""Whole calls over bad networks: our server with the echo, real peers, the relay between them."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.relay import NETWORKS, Relay
from tests.serving import serving
from webrtc_duplex.audio import CHUNK_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.client.call import Call, ReceivedPacket, connect
from webrtc_duplex.media.opus import Decoder, Encoder

SAID_S = 12
LOUD = 300.0


def voice() -> Pcm:
    """A voice that hardly pauses."""
    t = np.arange(SAID_S * SAMPLE_RATE) / SAMPLE_RATE
    phase = 2 * np.pi * np.cumsum(130 + 30 * np.sin(2 * np.pi * 0.7 * t)) / SAMPLE_RATE
    sound = np.sum([np.sin(k * phase) / k for k in range(1, 12)], axis=0) * (1 + 0.5 * np.sin(2 * np.pi * 3 * t))
    return np.asarray(4000 * sound, np.int16)


def as_a_browser_sends(pcm: Pcm) -> list[bytes]:
    encoder = Encoder()
    encoder.set_loss(0.05)
    return [encoder.encode(chunk) for chunk in pcm.reshape(-1, CHUNK_SAMPLES)]


async def converse(url: str, network: str, payloads: list[bytes]) -> tuple[list[ReceivedPacket], dict[str, Any]]:
    """Say it all; what came while the last seconds were said, and the server's last word on the call."""
    came: list[ReceivedPacket] = []
    stats: dict[str, Any] = {}

    async def listen(call: Call) -> None:
        async for packet in call.packets():
            came.append(packet)

    async def follow(call: Call) -> None:
        async for event in call.events():
            if event.type == "ext.stats":
                stats.update(event.body)

    async with Relay(NETWORKS[network], seed=3) as relay, connect(url, route=relay) as call:
        readers = [asyncio.create_task(listen(call)), asyncio.create_task(follow(call))]
        began = time.monotonic()
        for payload in payloads:
            await call.send_packet(payload)
        await asyncio.sleep(1.5)  # a second of it waits at most; and the server speaks once a second
        assert not call.over.is_set()
        for reader in readers:
            reader.cancel()
    late = [packet for packet in came if began + SAID_S - 2.5 < packet.at < began + SAID_S - 0.5]
    return sorted(late, key=lambda packet: packet.sequence), stats


def share_heard(packets: list[ReceivedPacket]) -> float:
    decoder = Decoder()
    sounds = [decoder.decode(packet.payload) for packet in packets]
    loud = [sound is not None and float(np.std(sound.astype(np.float64))) > LOUD for sound in sounds]
    return float(np.mean(loud))


@pytest.mark.timeout(120)
async def test_calls_survive_loss_bursts_disorder_stalls_and_a_blackout(tmp_path: Path) -> None:
    networks = ["loss5", "mobile", "reordering", "stall", "blackout"]
    payloads = as_a_browser_sends(voice())
    async with serving("echo", rows=len(networks), log=tmp_path / "log") as url:
        calls = await asyncio.gather(*(converse(url, network, payloads) for network in networks))
    for network, (packets, stats) in zip(networks, calls, strict=True):
        assert share_heard(packets) > 0.4, network  # all of it on a machine that has the time
        assert stats["jb_ms"] < 250, network
    by_network = {network: stats for network, (_, stats) in zip(networks, calls, strict=True)}
    assert by_network["loss5"]["recovered"] > 5
    mobile = by_network["mobile"]
    assert mobile["recovered"] + mobile["concealed_ms"] > 0, "a burst of two is concealed"
    # Of 600 packets; one that its successor overtakes right before a cut is made good from that one.
    assert by_network["reordering"]["recovered"] <= 12 and by_network["reordering"]["late"] <= 40
