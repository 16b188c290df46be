"""Clients that others wrote, in headless Chromium on a page of another origin, against a real server.

They come from npm by name, are bundled by esbuild in a temporary folder, and are changed in nothing but the server's
address: what they need of us is what they send and expect by themselves.
"""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests import npm
from tests.browser import Page, open_browser
from tests.listening import words
from tests.serving import serving
from tests.speaking import caller
from tests.test_browser_call import sentences

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(180),
]

PACKAGES = (
    "@openai/agents-realtime@0.20",
    "zod@4",
    "@binbat/whip-whep@1.1.1-sdp-trickle-throw",
    "@pipecat-ai/client-js@1.13",
    "@pipecat-ai/small-webrtc-transport@1.10",
    "esbuild@0",
)

ENTRY = """
export { OpenAIRealtimeWebRTC, RealtimeAgent, RealtimeSession } from "@openai/agents-realtime";
export { WHIPClient } from "@binbat/whip-whep/whip.js";
export { PipecatClient } from "@pipecat-ai/client-js";
export { SmallWebRTCTransport } from "@pipecat-ai/small-webrtc-transport";
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three clients as one script, which makes `clients`."""
    folder = tmp_path_factory.mktemp("clients")
    modules = npm.install(folder, *PACKAGES)
    (folder / "entry.js").write_text(ENTRY)
    esbuild = [str(modules / ".bin" / "esbuild"), "entry.js", "--bundle", "--format=iife", "--global-name=clients"]
    subprocess.run([*esbuild, "--outfile=bundle.js", "--log-level=error"], cwd=folder, check=True)
    return folder / "bundle.js"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elsewhere(bundle: Path) -> AsyncIterator[str]:
    """The page of another origin."""

    async def page(_: web.Request) -> web.Response:
        html = "<link rel='icon' href='data:,'><script src='bundle.js'></script><audio id='agent' autoplay></audio>"
        return web.Response(text=html, content_type="text/html")

    async def script(_: web.Request) -> web.FileResponse:
        return web.FileResponse(bundle)

    app = web.Application()
    app.add_routes([web.get("/", page), web.get("/bundle.js", script)])
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


@asynccontextmanager
async def meeting(model: str, elsewhere: str, folder: Path) -> AsyncIterator[tuple[str, Page]]:
    """A server with one row, and a page of another origin that may call it."""
    microphone, _ = caller(folder, silence_s=1.0)
    async with (
        serving(model, "--allowed-origins", elsewhere, rows=1, log=folder / "log") as url,
        open_browser(microphone) as browser,
    ):
        page = await browser.open(elsewhere)
        await page.evaluate(f"window.server = {json.dumps(url)}; undefined")
        yield url, page


async def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession(url) as http:
        response = await http.post(path, json=body)
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def all_rows_free(url: str) -> None:
    """Wait until no call is left."""
    async with aiohttp.ClientSession(url) as http, asyncio.timeout(5):
        while (await (await http.get("/v1/realtime/calls")).json())["data"]:
            await asyncio.sleep(0.1)


async def loudness(page: Page, for_s: float) -> float:
    """The loudest sample that the page plays in this time."""
    await page.start_capture("#agent")
    await asyncio.sleep(for_s)
    heard = await page.end_capture()
    return float(np.abs(heard.pcm.astype(np.int32)).max(initial=0))


OPENAI = """
(async (key) => {
  const transport = new clients.OpenAIRealtimeWebRTC({
    baseUrl: `${server}/v1/realtime/calls`,
    audioElement: document.getElementById("agent"),
  });
  window.session = new clients.RealtimeSession(new clients.RealtimeAgent({ name: "agent" }), { transport });
  window.heard = { types: [], deltas: "", history: [], errors: [] };
  transport.on("*", (event) => heard.types.push(event.type));
  transport.on("audio_transcript_delta", (event) => (heard.deltas += event.delta));
  session.on("history_updated", (history) => (heard.history = history));
  session.on("error", ({ error }) => heard.errors.push(JSON.stringify(error)));
  const began = performance.now();
  await session.connect({ apiKey: key });
  return performance.now() - began;
})
"""


async def test_the_agents_sdk_of_openai_talks_with_us(elsewhere: str, tmp_path: Path) -> None:
    async with meeting("tiny", elsewhere, tmp_path) as (url, page):
        secret = await post(url, "/v1/realtime/client_secrets", {"session": {"type": "realtime"}})
        took_ms = await page.evaluate(f"{OPENAI}({json.dumps(secret['value'])})")
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
        await all_rows_free(url)
        assert await page.evaluate("heard.errors") == []


WHIP = """
(async (token) => {
  const microphone = await navigator.mediaDevices.getUserMedia({ audio: true });
  window.peer = new RTCPeerConnection();
  peer.addTransceiver(microphone.getAudioTracks()[0], { direction: "sendonly" });
  window.client = new clients.WHIPClient();
  await client.publish(peer, `${server}/whip`, token);
  return client.resourceURL.pathname;
})
"""


async def test_the_whip_client_publishes_and_its_delete_ends_the_call(elsewhere: str, tmp_path: Path) -> None:
    async with meeting("echo", elsewhere, tmp_path) as (url, page):
        secret = await post(url, "/v1/realtime/client_secrets", {"session": {"type": "realtime"}})
        place = await page.evaluate(f"{WHIP}({json.dumps(secret['value'])})")
        assert place.startswith("/whip/rtc_")
        await page.wait_for("peer.connectionState === 'connected'", timeout_s=15)
        assert page.errors == []
        await page.evaluate("client.stop()")
        await all_rows_free(url)


PIPECAT = """
(async () => {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const microphone = {
    isMicEnabled: true, isCamEnabled: false, isSharingScreen: false, supportsScreenShare: false,
    selectedMic: {}, selectedCam: {}, selectedSpeaker: {},
    setClientOptions() {}, enableMic() {}, enableCam() {},
    initialize: async () => {}, connect: async () => {}, disconnect: async () => {},
    tracks: () => ({ local: { audio: stream.getAudioTracks()[0] } }),
  };
  window.transport = new clients.SmallWebRTCTransport({ mediaManager: microphone });
  window.heard = { states: [], messages: 0, errors: [] };
  window.client = new clients.PipecatClient({
    transport,
    enableMic: true,
    callbacks: {
      onTransportStateChanged: (state) => heard.states.push(state),
      onTrackStarted: (track) => (document.getElementById("agent").srcObject = new MediaStream([track])),
    },
  });
  // It resolves when the other side speaks Pipecat's RTVI protocol, which is not asked of us.
  const request = { webrtcRequestParams: { endpoint: `${server}/api/offer` } };
  client.connect(request).catch((error) => heard.errors.push(`${error}`));
})()
"""

STATUSES = """
performance.getEntriesByType("resource")
  .filter((entry) => entry.name.endsWith("/api/offer"))
  .map((entry) => entry.responseStatus)
"""
"""Of each request to /api/offer: offers and trickled candidates."""

CONNECTED = "transport.pc?.iceConnectionState === 'connected' && transport.dc?.readyState === 'open'"


async def test_the_transport_of_pipecat_connects_trickles_and_resumes(elsewhere: str, tmp_path: Path) -> None:
    async with meeting("echo", elsewhere, tmp_path) as (url, page):
        await page.evaluate(PIPECAT)
        await page.wait_for(CONNECTED, timeout_s=15)
        await page.wait_for("heard.states.includes('connected')")
        first = await page.evaluate("transport.pc_id")
        assert await loudness(page, 6.0) > 1_000

        await page.evaluate("window.before = transport.pc; transport.attemptReconnection(true); undefined")
        await page.wait_for(f"transport.pc !== before && {CONNECTED}", timeout_s=15)
        assert await page.evaluate("transport.pc_id") == first
        async with aiohttp.ClientSession(url) as http:
            assert len((await (await http.get("/v1/realtime/calls")).json())["data"]) == 1

        statuses = await page.evaluate(STATUSES)
        assert len(statuses) > 2, "two offers, and no trickled candidate"
        assert set(statuses) == {200}
        assert await page.evaluate("heard.errors") == []
        await page.evaluate("client.disconnect()")
        await all_rows_free(url)
