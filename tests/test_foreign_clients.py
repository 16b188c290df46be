"""Clients that others wrote, against a real server: in headless Chromium on a page of another origin, in Node, aiortc.

They come from npm by name, and are changed in nothing but the server's address: what they need of us is what they send
and expect by themselves. The scripts that use them lie in `foreign/`.
"""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import aiohttp
import av
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiortc import AudioStreamTrack, MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from tests import npm
from tests.browser import NO_ECHO_CANCELLER, Page, open_browser
from tests.conftest import ROOT, missing
from tests.listening import words
from tests.serving import serving
from tests.speaking import caller
from tests.test_browser_call import sentences

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

FOREIGN = ROOT / "tests" / "foreign"
PACKAGES = (
    "@openai/agents-realtime@0.20",
    "zod@4",
    "@binbat/whip-whep@1.1.1-sdp-trickle-throw",
    "@pipecat-ai/client-js@1.13",
    "@pipecat-ai/small-webrtc-transport@1.10",
    "@roamhq/wrtc@0",
    "werift@0",
    "esbuild@0",
)
KEY = "a-key-of-ours"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the clients in it, and the scripts that use them."""
    folder = tmp_path_factory.mktemp("clients")
    npm.install(folder, *PACKAGES)
    return Path(shutil.copytree(FOREIGN, folder, dirs_exist_ok=True))


@pytest.fixture(scope="module")
def bundle(packages: Path) -> Path:
    """Those of browsers as one script, which makes `clients`."""
    esbuild = packages / "node_modules" / ".bin" / "esbuild"
    options = ("--bundle", "--format=iife", "--global-name=clients", "--outfile=bundle.js", "--log-level=error")
    subprocess.run([str(esbuild), "browser.js", *options], cwd=packages, check=True)
    return packages / "bundle.js"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elsewhere(bundle: Path) -> AsyncIterator[str]:
    """The page of another origin."""

    async def page(_: web.Request) -> web.Response:
        html = "<link rel='icon' href='data:,'><audio id='agent' autoplay></audio><script src='bundle.js'></script>"
        return web.Response(text=html, content_type="text/html")

    async def script(_: web.Request) -> web.FileResponse:
        return web.FileResponse(bundle)

    app = web.Application()
    app.add_routes([web.get("/", page), web.get("/bundle.js", script)])
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


@asynccontextmanager
async def meeting(model: str, elsewhere: str, folder: Path, *options: str) -> AsyncIterator[tuple[str, Page]]:
    """A server with one row, and a page of another origin that may call it."""
    # Who is talked to by the agent lets it finish its greeting.
    microphone, _ = caller(folder, silence_s=5.0 if model == "tiny" else 1.0)
    async with (
        serving(model, "--allowed-origins", elsewhere, *options, rows=1, log=folder / "log") as url,
        open_browser(microphone) as browser,
    ):
        yield url, await browser.open(elsewhere, before=NO_ECHO_CANCELLER)


async def client_secret(url: str) -> str:
    """What a server of the page's own would have fetched for it."""
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        response = await http.post("/v1/realtime/client_secrets", json={"session": {"type": "realtime"}})
        assert response.status == 200, await response.text()
        return str((await response.json())["value"])


async def calls_now(url: str) -> int:
    async with aiohttp.ClientSession(url) as http:
        return int((await (await http.get("/readyz")).json())["calls"])


async def no_call_left(url: str) -> None:
    """Wait until all have ended."""
    async with asyncio.timeout(5):
        while await calls_now(url):
            await asyncio.sleep(0.1)


async def loudness(page: Page, for_s: float) -> float:
    """The loudest sample that the page plays in this time."""
    await page.start_capture("#agent")
    await asyncio.sleep(for_s)
    heard = await page.end_capture()
    return float(np.abs(heard.pcm.astype(np.int32)).max(initial=0))


# ---- in a browser


@pytest.mark.browser
async def test_the_agents_sdk_of_openai_talks_with_us(elsewhere: str, tmp_path: Path) -> None:
    async with meeting("tiny", elsewhere, tmp_path, "--api-keys", KEY) as (url, page):
        took_ms = await page.evaluate(f"clients.openai({url!r}, {await client_secret(url)!r})")
        assert took_ms < 5_000, "connect() waited in vain for session.updated"

        await page.wait_for("heard.types.includes('response.done')", timeout_s=20)
        first = words(await page.evaluate("heard.deltas"))
        assert first in {words(sentence) for sentence in sentences()}
        written = await page.evaluate("JSON.stringify(heard.history)")
        assert words(json.loads(written)[-1]["content"][0]["transcript"]) == first

        await page.evaluate("heard.types.length = 0; undefined")
        await page.wait_for("heard.types.includes('response.output_audio_transcript.delta')", timeout_s=20)
        assert await loudness(page, 0.5) > 1_000
        await page.evaluate("session.interrupt()")
        await page.wait_for("heard.types.includes('output_audio_buffer.cleared')", timeout_s=2)
        await asyncio.sleep(0.3)
        assert await loudness(page, 0.5) < 300

        await page.evaluate("session.close()")
        await no_call_left(url)
        assert await page.evaluate("heard.errors") == []


@pytest.mark.browser
async def test_the_whip_client_publishes_and_its_delete_ends_the_call(elsewhere: str, tmp_path: Path) -> None:
    async with meeting("echo", elsewhere, tmp_path, "--api-keys", KEY) as (url, page):
        place = await page.evaluate(f"clients.whip({url!r}, {await client_secret(url)!r})")
        assert place.startswith("/whip/rtc_")
        await page.wait_for("peer.connectionState === 'connected'", timeout_s=15)
        assert page.errors == []
        await page.evaluate("client.stop()")
        await no_call_left(url)


STATUSES = """
performance.getEntriesByType("resource")
  .filter((entry) => entry.name.endsWith("/api/offer"))
  .map((entry) => entry.responseStatus)
"""
"""Of each request to /api/offer: offers and trickled candidates."""

CONNECTED = "transport.pc?.iceConnectionState === 'connected' && transport.dc?.readyState === 'open'"


@pytest.mark.browser
async def test_the_transport_of_pipecat_connects_trickles_and_resumes(elsewhere: str, tmp_path: Path) -> None:
    async with meeting("echo", elsewhere, tmp_path) as (url, page):
        await page.evaluate(f"clients.pipecat({url!r})")
        await page.wait_for(CONNECTED, timeout_s=15)
        await page.wait_for("heard.states.includes('connected')")
        first = await page.evaluate("transport.pc_id")
        assert await loudness(page, 6.0) > 1_000

        await page.evaluate("window.before = transport.pc; transport.attemptReconnection(true); undefined")
        await page.wait_for(f"transport.pc !== before && {CONNECTED}", timeout_s=15)
        assert await page.evaluate("transport.pc_id") == first
        assert await calls_now(url) == 1

        statuses = await page.evaluate(STATUSES)
        assert len(statuses) > 2, "two offers, and no trickled candidate"
        assert set(statuses) == {200}
        assert await page.evaluate("heard.errors") == []
        await page.evaluate("client.disconnect()")
        await no_call_left(url)


# ---- in Node


@pytest.mark.parametrize(("script", "heard"), [("wrtc.mjs", "loudest"), ("werift.mjs", "packets")])
async def test_callers_in_node_connect_hear_and_hang_up(
    packages: Path, tmp_path: Path, script: str, heard: str
) -> None:
    node = shutil.which("node") or missing("needs Node (Debian: apt-get install nodejs)")
    async with serving("echo", rows=1, log=tmp_path / "log") as url:
        process = await asyncio.create_subprocess_exec(
            node, script, url, cwd=packages, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()
        assert json.loads(out.splitlines()[-1])[heard] > 0
        await no_call_left(url)


# ---- in Python


async def test_a_client_in_the_manner_of_aiortcs_examples_connects_and_hears_itself(tmp_path: Path) -> None:
    """Plain aiortc as its examples use it: `{sdp, type}` posted to /offer, a channel called chat, no trickle."""
    async with serving("echo", rows=1, log=tmp_path / "log") as url:
        pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        tracks, messages = asyncio.Queue[MediaStreamTrack](), asyncio.Queue[str]()
        pc.on("track", tracks.put_nowait)
        pc.createDataChannel("chat").on("message", messages.put_nowait)
        pc.addTrack(Tone())
        await pc.setLocalDescription(await pc.createOffer())
        offer = {"sdp": pc.localDescription.sdp, "type": pc.localDescription.type, "video_transform": "none"}
        async with aiohttp.ClientSession(url) as http, http.post("/offer", json=offer) as response:
            answer = await response.json()
        await pc.setRemoteDescription(RTCSessionDescription(answer["sdp"], answer["type"]))
        async with asyncio.timeout(20):
            assert json.loads(await messages.get())["type"] == "session.created"
            track = await tracks.get()
            while loudest(await track.recv()) < 1_000:
                pass
        await pc.close()
        await no_call_left(url)


class Tone(AudioStreamTrack):
    """440 Hz in frames of 20 ms, paced as aiortc's silence is."""

    async def recv(self) -> av.AudioFrame:
        frame = cast(av.AudioFrame, await super().recv())
        times = ((frame.pts or 0) + np.arange(frame.samples)) / frame.sample_rate
        frame.planes[0].update((8_000 * np.sin(2 * np.pi * 440 * times)).astype(np.int16).tobytes())
        return frame


def loudest(frame: object) -> int:
    assert isinstance(frame, av.AudioFrame)
    return int(np.abs(frame.to_ndarray().astype(np.int32)).max())
