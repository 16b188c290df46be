"""Clients that others wrote, as they come from npm, against `webrtc-duplex serve`: each calls, hears and hangs up.

Their pages come from another origin than the server, as they would.
"""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from tests import npm
from tests.browser import Page, open_browser
from tests.conftest import missing
from tests.serving import serving
from tests.speaking import caller

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

FOREIGN = Path(__file__).parent / "foreign"
PACKAGES = (
    "esbuild@0",
    "@openai/agents-realtime@0.20",
    "@binbat/whip-whep@1.1.1-sdp-trickle-throw",
    "@pipecat-ai/client-js@1",
    "@pipecat-ai/small-webrtc-transport@1",
    "@roamhq/wrtc@0",
    "werift@0",
)
KEY = "a-key-of-ours"

NO_ECHO_CANCELLER = """
const take = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
navigator.mediaDevices.getUserMedia = ({ audio }) => take({ audio: { echoCancellation: false } });
"""
"""What an echo model sends back is just what an echo canceller is there to remove."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the clients in it, and the scripts that use them."""
    folder = tmp_path_factory.mktemp("npm")
    npm.install(folder, *PACKAGES)
    for script in FOREIGN.iterdir():
        shutil.copy(script, folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    async with serving("echo", "--api-keys", KEY, "--allowed-origins", "*", rows=2, log=log) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """One that asks for no key."""
    log = tmp_path_factory.mktemp("open-server") / "log"
    async with serving("echo", rows=2, log=log) as url:
        yield url


@asynccontextmanager
async def page_with(packages: Path, script: str, folder: Path) -> AsyncIterator[Page]:
    """A page of another origin that has loaded the script and all it imports; its microphone is a person who speaks."""
    esbuild = packages / "node_modules" / "esbuild" / "bin" / "esbuild"
    site = folder / "site"
    command = [
        str(esbuild),
        script,
        "--bundle",
        "--format=iife",
        f"--outfile={site / 'bundle.js'}",
        "--log-level=error",
    ]
    subprocess.run(["node", *command], cwd=packages, check=True)
    (site / "index.html").write_text("<!doctype html><audio autoplay></audio><script src=bundle.js></script>")
    app = web.Application()
    app.router.add_static("/", site)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    microphone, _ = caller(folder, silence_s=2.0, then_silence_s=1.0)
    try:
        async with open_browser(microphone) as browser:
            url = f"http://localhost:{runner.addresses[0][1]}/index.html"
            yield await browser.open(url, before=NO_ECHO_CANCELLER)
    finally:
        await runner.cleanup()


async def loudest_heard(page: Page, seconds: float) -> int:
    await page.start_capture("audio")
    await asyncio.sleep(seconds)
    return int(np.abs((await page.end_capture()).pcm.astype(int)).max(initial=0))


async def rows_free(url: str, rows: int, timeout_s: float = 20.0) -> None:
    """Wait until so many rows are free."""
    async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
        while (await (await http.get(f"{url}/readyz")).json())["free_rows"] != rows:
            await asyncio.sleep(0.1)


async def client_secret(url: str) -> str:
    async with aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {KEY}"}
        session = {"session": {"type": "realtime", "model": "gpt-realtime"}}
        async with http.post(f"{url}/v1/realtime/client_secrets", json=session, headers=headers) as answer:
            return str((await answer.json())["value"])


@pytest.mark.browser
async def test_openais_sdk_calls_with_only_its_base_url_changed(packages: Path, server: str, tmp_path: Path) -> None:
    secret = await client_secret(server)
    async with page_with(packages, "openai.js", tmp_path) as page:
        call_id = await page.evaluate(f"window.begin({server!r}, {secret!r})")
        assert call_id.startswith("rtc_")
        assert await loudest_heard(page, 5.0) > 1000
        assert "session.updated" in await page.evaluate("window.events")
        assert not [event for event in await page.evaluate("window.events") if event.startswith("failed")]
        await page.evaluate("window.session.interrupt()")
        await page.evaluate("window.session.close()")
        await rows_free(server, 2)


@pytest.mark.browser
async def test_a_whip_client_publishes_and_ends(packages: Path, open_server: str, tmp_path: Path) -> None:
    async with page_with(packages, "whip.js", tmp_path) as page:
        place = await page.evaluate(f"window.begin({open_server!r})")
        assert "/whip/rtc_" in place
        await page.wait_for("window.pc.connectionState === 'connected'")
        await page.evaluate("window.whip.stop()")
        await rows_free(open_server, 2)


@pytest.mark.browser
async def test_pipecats_client_connects_trickles_hears_and_resumes(
    packages: Path, open_server: str, tmp_path: Path
) -> None:
    async with page_with(packages, "pipecat.js", tmp_path) as page:
        await page.evaluate(f"window.begin({open_server!r})")
        await page.wait_for("document.querySelector('audio').srcObject !== null", timeout_s=20)
        assert await loudest_heard(page, 5.0) > 1000
        assert not [message for message in await page.evaluate("window.messages") if message.startswith("failed")]

        first = await page.evaluate("window.transport.pc_id")
        await page.evaluate("window.transport.attemptReconnection(true)")
        await page.wait_for("window.transport.pc.connectionState === 'connected'", timeout_s=20)
        assert await page.evaluate("window.transport.pc_id") == first
        await page.evaluate("window.client.disconnect()")
        await rows_free(open_server, 2)


@pytest.mark.parametrize(("script", "heard"), [("wrtc.mjs", "loudest"), ("werift.mjs", "packets")])
async def test_callers_in_node_connect_and_hear(packages: Path, open_server: str, script: str, heard: str) -> None:
    node = shutil.which("node")
    if node is None:
        missing("needs Node (Debian: apt-get install nodejs)")
    process = await asyncio.create_subprocess_exec(
        str(node), script, open_server, cwd=packages, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert json.loads(out.splitlines()[-1])[heard] > 0
    await rows_free(open_server, 2)
