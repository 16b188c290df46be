"""The story of a call, with real peers in this process and an engine that echoes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.server.peer import House, Peer, call, house
from webrtc_duplex.server.session import SessionState


@pytest.fixture
async def two_rows(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path, rows=2) as it:
        yield it


def chirp(seconds: float = 1.0) -> np.ndarray:
    t = np.arange(int(24_000 * seconds)) / 24_000
    return (8000 * np.sin(2 * np.pi * (300 * t + 400 * t * t))).astype(np.int16)


async def test_what_a_caller_says_comes_back(two_rows: House) -> None:
    async with call(two_rows) as (peer, session):
        await peer.microphone.say(chirp())
        heard = await peer.heard(120)
    wave = chirp().astype(float)
    match = np.correlate(heard.astype(float), wave, "valid")
    start = int(np.argmax(match))
    piece = heard[start : start + len(wave)].astype(float)
    assert float(piece @ wave) / np.linalg.norm(piece) / np.linalg.norm(wave) > 0.9
