"""Telephone calls end to end, with a real gateway and real phones. Run by scripts/test_sip.sh."""

import asyncio
import os
import re
import sys
import wave
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import ROOT, missing
from tests.phones import Janus, Phone, end, running_janus, running_phone, until_answered
from tests.sip_answerer import Answer, answering
from tests.sip_caller import offerless_caller
from webrtc_duplex.audio import SAMPLE_RATE

pytestmark = [pytest.mark.sip, pytest.mark.timeout(150)]

PORT = 8080
METRICS_PORT = 9108
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
"*" = "recording"
[metrics]
port = {metrics_port}
"""

LOG_LINES = 60
"""So many of the last lines of each log are shown of a test that fails."""

SETTLE_S = 2
"""How a call begins and ends is not judged by its tone."""

SWITCHED = ["not recorded", "recorded", "not recorded"]

Samples = NDArray[np.float64]


@pytest.fixture(autouse=True)
def logs(tmp_path: Path) -> Iterator[None]:
    """What server, bridge, gateway and phones said, under the report of a test that fails."""
    yield
    for log in sorted(tmp_path.rglob("*.log")):
        print(f"---- {log.relative_to(tmp_path)}", *log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n")


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
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "webrtc_duplex", *arguments, cwd=ROOT, stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            await end(process)


@asynccontextmanager
async def running_server(
    folder: Path, model: str = "echo", rows: int = 8, *more: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    options = ("--port", str(PORT), "--model", model, "--rows", str(rows), *more)
    async with running(folder, "server", "serve", *options) as process:
        await until_ready()
        yield process


async def until_ready(limit_s: float = 30.0) -> None:
    url = f"http://127.0.0.1:{PORT}/readyz"
    await until_answered(url, limit_s)
    async with asyncio.timeout(limit_s), aiohttp.ClientSession() as http:
        while True:
            async with http.get(url) as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def running_exchange(folder: Path, address: str) -> AsyncIterator[Janus]:
    """Janus and the bridge, registered."""
    async with running_janus(folder / "janus", address) as janus, running_bridge(folder, address, janus):
        yield janus


@asynccontextmanager
async def running_bridge(folder: Path, address: str, janus: Janus) -> AsyncIterator[None]:
    table = folder / "bridge.toml"
    table.write_text(TABLE.format(janus=janus.url, port=PORT, address=address, metrics_port=METRICS_PORT))
    async with running(folder, "bridge", "bridge", "janus", "--table", str(table)):
        async with asyncio.timeout(15):
            while "registered" not in (folder / "bridge.log").read_text():
                await asyncio.sleep(0.1)
        yield


async def bridge_metrics() -> set[str]:
    """The lines that Prometheus is told."""
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{METRICS_PORT}/metrics") as answer:
        return set((await answer.text()).splitlines())


async def packets_received() -> float:
    """Of all callers so far, as the server counts them."""
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{PORT}/metrics") as answer:
        found = re.search(r'(?m)^webrtc_duplex_packets_total\{fate="received"\} (\S+)', await answer.text())
    return float(found[1]) if found else 0.0


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


def in_the_middle(sound: Samples, rate: int, hz: float) -> list[float]:
    """How clean the tone is in each half second of the call, but for how it begins and ends."""
    ratios = tone_snr_db(sound[SETTLE_S * rate : -SETTLE_S * rate], rate, hz)
    assert ratios, f"the phone heard only {len(sound) / rate:.1f} s"
    return ratios


def assert_clean_tone(sound: Samples, rate: int, hz: float = 440, least_db: float = 30.0) -> None:
    """The way of the sound is clean. Judged by the median: a frame that a busy machine loses is a gap, and no noise."""
    ratios = in_the_middle(sound, rate, hz)
    assert np.median(ratios) > least_db, ratios


async def dialled(phone: Phone, janus: Janus, address: str, number: str = "1001") -> None:
    await phone.dial(f"sip:{number}@{address}:{janus.sip_port()}")


@pytest.mark.parametrize("codec", ["pcmu", "pcma", "g722", "opus"])
async def test_a_phone_behind_janus_hears_its_own_tone_from_the_echo_engine(
    codec: str, tmp_path: Path, address: str
) -> None:
    async with running_server(tmp_path), running_exchange(tmp_path, address) as janus:
        async with running_phone(tmp_path / "phone", address, "ausine,440", codec) as phone:
            await dialled(phone, janus, address)
            await asyncio.sleep(7)
            await phone.hang_up()
            await until_free(8, 2)
        assert_clean_tone(*read_wav(phone.heard()))


@pytest.mark.parametrize("packet_s", [0.02, 0.03])
async def test_a_phone_that_makes_no_offer_gets_the_servers(packet_s: float, tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path), running_exchange(tmp_path, address) as janus:
        async with offerless_caller(address, (address, janus.sip_port())) as caller:
            await asyncio.wait_for(caller.dial(), 10)
            assert "PCMU/8000" in caller.offer
            heard = await caller.talk(440, 7.2, packet_s)
            caller.hang_up()
            await until_free(8, 2)
    assert_clean_tone(heard / 32768, SAMPLE_RATE)


async def test_a_minute_long_call_has_no_gap(tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path), running_exchange(tmp_path, address) as janus:
        async with running_phone(tmp_path / "phone", address, "ausine,440", "pcmu") as phone:
            await dialled(phone, janus, address)
            await asyncio.sleep(60)
            await phone.hang_up()
        sound, rate = read_wav(phone.heard())
    # A gap of 60 ms in half a second leaves the tone no more than 9 dB above the rest.
    ratios = in_the_middle(sound, rate, 440)
    assert len(ratios) > 100
    assert min(ratios) > 9, ratios


async def test_a_phone_hears_the_tiny_agent_speak(tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path, "tiny", rows=1), running_exchange(tmp_path, address) as janus:
        async with running_phone(tmp_path / "phone", address, f"aufile,{silence(tmp_path)}", "pcmu") as phone:
            await dialled(phone, janus, address)
            await asyncio.sleep(12)
            await phone.hang_up()
        sound, rate = read_wav(phone.heard())
    loudest = max(np.sqrt(np.mean(sound[start : start + rate] ** 2)) for start in range(0, len(sound) - rate, rate))
    assert loudest > 0.01


def silence(folder: Path) -> Path:
    path = folder / "silence.wav"
    with wave.open(str(path), "wb") as wav:
        wav.setnchannels(2)
        wav.setsampwidth(2)
        wav.setframerate(48000)
        wav.writeframes(bytes(48000 * 4 * 30))
    return path


async def test_each_key_arrives_once_and_the_chosen_one_hangs_up(tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path), running_exchange(tmp_path, address) as janus:
        async with running_phone(tmp_path / "phone", address, "ausine,440", "pcmu") as phone:
            await dialled(phone, janus, address)
            await asyncio.sleep(1.5)
            await phone.press("0123456789*")
            await phone.press("#")
            await asyncio.wait_for(phone.event("CALL_CLOSED"), 5)
            await until_free(8, 2)
    keys = re.findall(r"key (\S)", (tmp_path / "bridge.log").read_text())
    assert "".join(keys) == "0123456789*#"


async def test_a_key_switches_the_recording_on_and_off(tmp_path: Path, address: str) -> None:
    shelf = tmp_path / "recordings"
    async with (
        running_server(tmp_path, "echo", 8, "--recordings", str(shelf)),
        running_exchange(tmp_path, address) as janus,
        running_phone(tmp_path / "phone", address, "ausine,440", "pcmu") as phone,
    ):
        await dialled(phone, janus, address)
        await asyncio.sleep(1.5)
        await phone.press("*")
        await asyncio.sleep(3)
        await phone.press("*")
        async with asyncio.timeout(3):
            while re.findall("it is (not recorded|recorded)", (tmp_path / "bridge.log").read_text()) != SWITCHED:
                await asyncio.sleep(0.1)
        (recording,) = shelf.glob("*.wav")
        sound, rate = read_wav(recording)
        assert 2 < len(sound) / rate < 5
        assert np.abs(sound).max() > 0.1
        await phone.hang_up()


async def test_when_the_agent_side_ends_the_phone_is_told(tmp_path: Path, address: str) -> None:
    async with (
        running_server(tmp_path, "echo", 8, "--max-duration-s", "3"),
        running_exchange(tmp_path, address) as janus,
    ):
        async with running_phone(tmp_path / "phone", address, "ausine,440", "pcmu") as phone:
            await dialled(phone, janus, address)
            await asyncio.wait_for(phone.event("CALL_CLOSED"), 3 + 2)


async def test_a_full_house_is_503_with_retry_after_and_the_next_try_gets_in(tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path, rows=1), running_exchange(tmp_path, address) as janus:
        first = running_phone(tmp_path / "first", address, "ausine,440", "pcmu", control_port=4444)
        second = running_phone(tmp_path / "second", address, "ausine,440", "pcmu", control_port=4445)
        async with first as caller, second as other:
            await dialled(caller, janus, address)
            await other.command("dial", f"sip:1001@{address}:{janus.sip_port()}")
            refused = await other.event("CALL_ESTABLISHED", "CALL_CLOSED")
            assert refused["param"] == "503 Service Unavailable"
            assert re.search(r"(?im)^retry-after: *[0-9]+", other.trace())
            await caller.hang_up()
            await until_free(1, 2)
            await dialled(other, janus, address)


async def test_eight_phones_talk_at_once(tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path), running_exchange(tmp_path, address) as janus, AsyncExitStack() as stack:
        phones: list[Phone] = []
        for index in range(8):
            folder, port = tmp_path / f"phone{index}", 4450 + index
            starting = running_phone(folder, address, f"ausine,{300 + 100 * index}", "pcmu", control_port=port)
            phones.append(await stack.enter_async_context(starting))
        for phone in phones:
            await dialled(phone, janus, address)
        await asyncio.sleep(8)
        for phone in phones:
            await phone.hang_up()
        await until_free(8, 2)
        for index, phone in enumerate(phones):  # each hears its own tone, so nobody hears another
            assert_clean_tone(*read_wav(phone.heard()), hz=300 + 100 * index)


async def test_a_call_survives_a_hold_of_a_quarter_minute(tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path), running_exchange(tmp_path, address) as janus:
        async with running_phone(tmp_path / "phone", address, "ausine,440", "pcmu") as phone:
            await dialled(phone, janus, address)
            await asyncio.sleep(2)
            await phone.command("hold")
            await asyncio.sleep(16)
            assert await free_rows() == 7
            await phone.command("resume")
            before = await packets_received()  # baresip 1.0 plays nothing after a hold, so the server's ear is asked
            async with asyncio.timeout(5):
                while await packets_received() < before + 50:
                    await asyncio.sleep(0.5)
            await phone.hang_up()
            await until_free(8, 2)


async def test_the_bridge_registers_again_when_janus_comes_back(tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path):
        async with running_exchange(tmp_path, address) as janus:
            async with running_phone(tmp_path / "phone", address, "ausine,440", "pcmu") as phone:
                await dialled(phone, janus, address)
                janus.process.kill()
                await until_free(8, 5)
                async with running_janus(tmp_path / "janus", address):
                    async with asyncio.timeout(15):
                        while (tmp_path / "bridge.log").read_text().count("registered sip:") < 2:
                            await asyncio.sleep(0.1)


async def test_when_the_server_dies_the_phone_is_told_and_its_successor_serves_the_next_call(
    tmp_path: Path, address: str
) -> None:
    async with running_server(tmp_path) as server, running_exchange(tmp_path, address) as janus:
        async with running_phone(tmp_path / "phone", address, "ausine,440", "pcmu") as phone:
            await dialled(phone, janus, address)
            server.kill()
            await asyncio.wait_for(phone.event("CALL_CLOSED"), 5)
            await phone.command("dial", f"sip:1001@{address}:{janus.sip_port()}")
            refused = await phone.event("CALL_ESTABLISHED", "CALL_CLOSED")
            assert refused["param"] == "503 Service Unavailable"
            async with running_server(tmp_path / "again"):
                await dialled(phone, janus, address)
                await until_free(7, 2)


async def test_when_the_bridge_is_stopped_its_calls_are_ended_on_both_sides(tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path), running_janus(tmp_path / "janus", address) as janus:
        async with running_phone(tmp_path / "phone", address, "ausine,440", "pcmu") as phone:
            async with running_bridge(tmp_path, address, janus):
                await dialled(phone, janus, address)
            await asyncio.wait_for(phone.event("CALL_CLOSED"), 5)
            await until_free(8, 2)


async def test_prometheus_is_told_of_lines_and_calls(tmp_path: Path, address: str) -> None:
    async with running_server(tmp_path), running_exchange(tmp_path, address) as janus:
        async with running_phone(tmp_path / "phone", address, "ausine,440", "pcmu") as phone:
            await dialled(phone, janus, address)
            assert {"webrtc_duplex_bridge_lines 9.0", "webrtc_duplex_bridge_lines_busy 1.0"} <= await bridge_metrics()
            await phone.hang_up()
            async with asyncio.timeout(2):
                while 'webrtc_duplex_bridge_calls_ended_total{end="phone"} 1.0' not in await bridge_metrics():
                    await asyncio.sleep(0.1)


SECURE = ";mediaenc=dtls_srtp;medianat=ice"


async def post_offer(offer: str) -> str:
    """The server's answer."""
    async with aiohttp.ClientSession() as http:
        url, headers = f"http://127.0.0.1:{PORT}/v1/realtime/calls", {"Content-Type": "application/sdp"}
        async with http.post(url, data=offer, headers=headers) as response:
            text = await response.text()
            assert response.status == 201, text
            return text


async def post_bare_offer(offer: str) -> str:
    """As from a phone that says nothing of payload types which need no word (RFC 3551, 6)."""
    assert "a=rtpmap:0 PCMU/8000" in offer
    return await post_offer("".join(line for line in offer.splitlines(True) if not line.startswith("a=rtpmap:0 ")))


@pytest.mark.parametrize(
    ("codec", "account", "answer"),
    [("pcmu", "", post_offer), ("opus", "", post_offer), ("pcmu", ";ptime=30", post_bare_offer)],
    ids=["pcmu", "opus", "pcmu without rtpmap, wishing for 30 ms"],
)
async def test_a_phone_that_does_ice_and_dtls_itself_needs_no_gateway(
    codec: str, account: str, answer: Answer, tmp_path: Path, address: str
) -> None:
    """baresip's certificate is RSA, its ICE and fingerprint stand at session level, it knows no mid and no BUNDLE."""
    async with running_server(tmp_path), answering(address, answer) as answerer:
        async with running_phone(tmp_path / "phone", address, "ausine,440", codec, SECURE + account) as phone:
            await phone.dial(f"sip:1001@{address}:{answerer.port}")
            await asyncio.sleep(8)
            await phone.hang_up()
        assert_clean_tone(*read_wav(phone.heard()))
