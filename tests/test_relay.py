"""The bad network itself: first as pure numbers, then between two real peers."""

import asyncio
from random import Random

import numpy as np
import pytest
from aiortc import RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import AudioStreamTrack

from tests.relay import NETWORKS, Link, Network, Relay


def carried(network: Network, packets: int = 5000, size: int = 100, every_s: float = 0.02) -> list[list[float]]:
    link = Link(network, Random(1))
    return [link.carry(size, n * every_s, n * every_s) for n in range(packets)]


def runs(lost: list[bool]) -> list[int]:
    """Lengths of the runs of lost packets."""
    edges = np.flatnonzero(np.diff([0, *lost, 0]))
    return list(np.diff(edges)[::2])


def test_a_clean_network_passes_everything_at_once() -> None:
    assert carried(Network()) == [[n * 0.02] for n in range(5000)]


def test_the_same_seed_loses_the_same_packets() -> None:
    assert carried(NETWORKS["mobile"]) == carried(NETWORKS["mobile"])


def test_random_loss_loses_its_share() -> None:
    assert np.mean([not arrivals for arrivals in carried(Network(loss=0.05))]) == pytest.approx(0.05, abs=0.01)


def test_gilberts_loss_comes_in_bursts() -> None:
    lost = [not arrivals for arrivals in carried(Network(burst_begins=0.02, burst_ends=0.25), 20_000)]
    assert np.mean(lost) == pytest.approx(0.02 / 0.27, abs=0.015)
    assert np.mean(runs(lost)) == pytest.approx(4, abs=0.6)


def test_jitter_delays_and_keeps_the_order() -> None:
    arrivals = np.concatenate(carried(Network(delay_s=0.02, jitter_s=0.1)))
    late = arrivals - 0.02 * np.arange(len(arrivals))
    assert late.min() >= 0.02 and late.max() > 0.1
    assert np.all(np.diff(arrivals) >= 0)


def test_reordered_packets_are_overtaken() -> None:
    arrivals = np.concatenate(carried(Network(reordered=0.1)))
    assert np.mean(np.diff(arrivals) < 0) == pytest.approx(0.1, abs=0.02)


def test_duplicates_come_twice() -> None:
    assert np.mean([len(arrivals) == 2 for arrivals in carried(Network(duplicated=0.1))]) == pytest.approx(
        0.1, abs=0.02
    )


def test_a_bottleneck_queues_and_then_loses() -> None:
    arrivals = carried(Network(rate_bps=20_000), 500)  # half of what is sent
    delays = [times[0] - n * 0.02 for n, times in enumerate(arrivals) if times]
    assert max(delays) <= 1.0 and np.mean([not times for times in arrivals[100:]]) == pytest.approx(0.5, abs=0.05)


def test_nothing_passes_a_blackout_and_a_stall_lets_all_go_at_its_end() -> None:
    assert [bool(times) for times in carried(Network(blackout=(1, 2)), 200)] == [not 50 <= n < 150 for n in range(200)]
    stalled = np.concatenate(carried(Network(stall=(1, 2)), 200))
    assert np.all(stalled[50:150] == pytest.approx(3.0)) and len(stalled) == 200


async def test_real_peers_meet_only_by_way_of_the_relay() -> None:
    caller, server = RTCPeerConnection(), RTCPeerConnection()
    caller.addTrack(AudioStreamTrack())
    server.addTrack(AudioStreamTrack())
    async with Relay(Network(loss=0.3), seed=2) as relay:
        await caller.setLocalDescription(await caller.createOffer())
        offer = relay.without_candidates(caller.localDescription.sdp)
        await server.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        await server.setLocalDescription(await server.createAnswer())
        answer = await relay.through_here(server.localDescription.sdp)
        await caller.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        async with asyncio.timeout(60):
            while relay.up.came < 60 or relay.down.came < 60:
                await asyncio.sleep(0.1)
        assert 0.4 < relay.up.left / relay.up.came < 0.95
        await caller.close()
        await server.close()
