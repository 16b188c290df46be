"""Telephone calls end to end, with a real gateway and real phones. Run by scripts/test_sip.sh."""

import asyncio
import os
import sys
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import ROOT, missing
from tests.phones import Janus, end, running_janus, running_phone, until_answered

pytestmark = [pytest.mark.sip, pytest.mark.timeout(150)]

PORT = 8080
TABLE = """
[janus]
url = "{janus}"
[server]
url = "http://127.0.0.1:{port}"
[sip]
address = "sip:agent@{address}"
lines = 9
[keys]
"#" = "hang_up"
"""

Samples = NDArray[np.float64]


@pytest.fixture
def address() -> str:
    found = os.environ.get("WEBRTC_DUPLEX_SIP_ADDRESS")
    if found is None:
        missing("telephones need a network namespace: run scripts/test_sip.sh")
    assert found is not None
    return found


@asynccontextmanager
async def running(folder: Path, name: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`webrtc-duplex` with these arguments, its output in a log file, for as long as the block runs."""
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "webrtc_duplex", *arguments, cwd=ROOT, stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            await end(process)


@asynccontextmanager
async def running_server(folder: Path, model: str = "echo", rows: int = 8) -> AsyncIterator[None]:
    async with running(folder, "server", "serve", "--port", str(PORT), "--model", model, "--rows", str(rows)):
        await until_ready()
        yield


async def until_ready(limit_s: float = 30.0) -> None:
    url = f"http://127.0.0.1:{PORT}/readyz"
    await until_answered(url, limit_s)
    async with asyncio.timeout(limit_s), aiohttp.ClientSession() as http:
        while (await http.get(url)).status != 200:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def running_exchange(folder: Path, address: str) -> AsyncIterator[Janus]:
    """Janus and the bridge, registered."""
    async with running_janus(folder / "janus", address) as janus:
        table = folder / "bridge.toml"
        table.write_text(TABLE.format(janus=janus.url, port=PORT, address=address))
        async with running(folder, "bridge", "bridge", "janus", "--table", str(table)):
            async with asyncio.timeout(15):
                while "registered" not in (folder / "bridge.log").read_text():
                    await asyncio.sleep(0.1)
            yield janus


async def free_rows() -> int:
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{PORT}/readyz") as answer:
        return int((await answer.json())["free_rows"])


async def until_free(rows: int, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while await free_rows() != rows:
            await asyncio.sleep(0.1)


def read_wav(path: Path) -> tuple[Samples, int]:
    with wave.open(str(path)) as wav:
        samples = np.frombuffer(wav.readframes(wav.getnframes()), np.int16).reshape(-1, wav.getnchannels())
        return samples[:, 0] / 32768, wav.getframerate()


def tone_snr_db(sound: Samples, rate: int, hz: float, seconds: float = 0.5) -> list[float]:
    """For each piece of `seconds`, how far the tone of `hz` stands above everything else: least squares of its wave."""
    length = int(rate * seconds)
    time = np.arange(length) / rate
    waves = np.stack([np.sin(2 * np.pi * hz * time), np.cos(2 * np.pi * hz * time), np.ones(length)], axis=1)
    ratios = []
    for start in range(0, len(sound) - length + 1, length):
        piece = sound[start : start + length]
        fit = waves @ np.linalg.lstsq(waves, piece, rcond=None)[0]
        ratios.append(10 * np.log10(np.sum(fit**2) / max(np.sum((piece - fit) ** 2), 1e-12)))
    return ratios


@pytest.mark.parametrize("codec", ["pcmu", "pcma", "g722", "opus"])
async def test_a_phone_behind_janus_hears_its_own_tone_from_the_echo_engine(
    codec: str, tmp_path: Path, address: str
) -> None:
    async with running_server(tmp_path), running_exchange(tmp_path, address) as janus:
        async with running_phone(tmp_path / "phone", address, "ausine,440", codec) as phone:
            await phone.dial(f"sip:1001@{address}:{janus.sip_port()}")
            await asyncio.sleep(6)
            await phone.hang_up()
            await until_free(8, 2)
        sound, rate = read_wav(phone.heard())
    middle = tone_snr_db(sound[2 * rate : -rate], rate, 440)
    assert min(middle) > 30, middle
