"""A person's call, whole: the page in headless Chromium, with a WAV as its microphone, and a real server."""

import asyncio
import csv
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from tests import npm
from tests.browser import NO_ECHO_CANCELLER, Browser, Page, open_browser
from tests.conftest import ROOT, missing
from tests.listening import (
    RECOGNISER_RATE,
    SentenceRecogniser,
    Sound,
    cut,
    find_speech,
    likeness,
    resample,
    words,
)
from tests.serving import serving
from tests.speaking import RATE, caller
from tests.test_page_checks import serious_faults

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

TINY = ROOT / "webrtc_duplex" / "model" / "tiny"
SCREENSHOTS = os.environ.get("WEBRTC_DUPLEX_SCREENSHOTS")
"""A folder in which the calls of these tests leave pictures, if somebody wants to look."""

WATCH = """
window.peers = [];
window.RTCPeerConnection = class extends RTCPeerConnection {
  constructor(...settings) { super(...settings); window.peers.push(this); }
};
const ask = window.fetch;
window.fetch = async (path, options) => {
  const response = await ask(path, options);
  if (options?.method === "POST" && response.ok) window.answer = await response.clone().json();
  return response;
};
"""
"""Keeps the page's peer connections and the last answer where a test can see them."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A browser with its microphone, what that says, and the server it will call."""

    browser: Browser
    turn: Sound
    url: str


async def call(page: Page) -> None:
    """Press the button, and wait until the agent can hear."""
    await page.wait_for("document.body.dataset.phase !== 'loading'", timeout_s=30)
    await page.click("#call")
    await page.wait_for("document.body.dataset.phase === 'live'", timeout_s=20)


async def picture(page: Page, name: str) -> None:
    if SCREENSHOTS:
        await page.screenshot(Path(SCREENSHOTS) / f"{name}.png")


async def look_up(url: str, answer: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body of GET on a call, as its owner."""
    secret = answer.get("client_secret", {}).get("value", "")
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {secret}"}) as http:
        response = await http.get(f"/v1/realtime/calls/{answer['call_id']}")
        return response.status, await response.json()


async def over(url: str, answer: dict[str, Any]) -> bool:
    status, body = await look_up(url, answer)
    return status == 404 or body["state"] == "ended"


# ---- with an echo


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def echo_caller(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Caller]:
    folder = tmp_path_factory.mktemp("echo")
    microphone, turn = caller(folder, silence_s=2.0)
    async with serving("echo", rows=1, log=folder / "log") as url, open_browser(microphone) as browser:
        yield Caller(browser, turn, url)


@pytest_asyncio.fixture(loop_scope="module")
async def echo_page(echo_caller: Caller) -> AsyncIterator[Page]:
    page = await echo_caller.browser.open(echo_caller.url, before=WATCH + NO_ECHO_CANCELLER)
    await page.look(1280, 800)
    yield page
    await page.close()


async def test_what_comes_back_from_an_echo_is_what_was_sent(echo_caller: Caller, echo_page: Page) -> None:
    await echo_page.evaluate("document.querySelector('details').open = true")
    for processing in ("noise-suppression", "gain-control"):
        await echo_page.click(f"#{processing}")
    await call(echo_page)
    await echo_page.start_capture("#agent")
    await asyncio.sleep(2.0 + len(echo_caller.turn) / RATE + 1.0)
    heard = await echo_page.end_capture()
    sound = resample(heard.pcm, heard.rate, RATE)
    pieces = np.array_split(echo_caller.turn, len(echo_caller.turn) // (RATE // 2))
    assert np.median([likeness(piece, sound)[0] for piece in pieces]) > 0.8


async def test_chromium_sends_with_forward_error_correction(echo_page: Page) -> None:
    await call(echo_page)
    sending = await echo_page.wait_for(
        """(async () => {
          const stats = [...(await window.peers.at(-1).getStats()).values()];
          const sent = stats.find((entry) => entry.type === "outbound-rtp");
          return stats.find((entry) => entry.id === sent?.codecId) ?? null;
        })()"""
    )
    assert sending["mimeType"] == "audio/opus"
    assert "useinbandfec=1" in sending["sdpFmtpLine"].split(";")


async def test_hanging_up_frees_the_row_for_the_next_caller(echo_caller: Caller, echo_page: Page) -> None:
    await call(echo_page)
    answer = await echo_page.evaluate("window.answer")
    assert (await look_up(echo_caller.url, answer))[1]["state"] != "ended"
    await echo_page.click("#call")
    await echo_page.wait_for("document.body.dataset.phase === 'ended'")
    async with asyncio.timeout(5):
        while not await over(echo_caller.url, answer):
            await asyncio.sleep(0.05)
    await call(echo_page)


async def test_closing_the_tab_frees_the_row(echo_caller: Caller) -> None:
    page = await echo_caller.browser.open(echo_caller.url, before=WATCH)
    await call(page)
    answer = await page.evaluate("window.answer")
    await page.navigate("about:blank")
    async with asyncio.timeout(3):
        while not await over(echo_caller.url, answer):
            await asyncio.sleep(0.05)
    await page.close()


async def test_the_second_caller_is_told_that_the_house_is_full(echo_caller: Caller, echo_page: Page) -> None:
    await call(echo_page)
    second = await echo_caller.browser.open(echo_caller.url)
    await second.wait_for("document.body.dataset.phase === 'idle'")
    await second.click("#call")
    await second.wait_for("document.body.dataset.phase === 'refused'")
    assert (await second.evaluate("document.getElementById('call').innerText")).startswith("Call in")
    await second.close()


async def test_who_waits_in_line_is_let_in_when_the_row_becomes_free(echo_caller: Caller, echo_page: Page) -> None:
    await call(echo_page)
    second = await echo_caller.browser.open(echo_caller.url)
    await second.wait_for("document.body.dataset.phase === 'idle'")
    await second.click("#call")
    await second.wait_for("document.body.dataset.phase === 'refused'")
    await second.click("#queue")
    await second.wait_for("document.getElementById('state').textContent.startsWith('Number 1 in line')", timeout_s=15)
    await echo_page.click("#call")
    await second.wait_for("document.body.dataset.phase === 'live'")
    await second.close()


async def test_a_muted_caller_is_silence_to_the_agent(echo_page: Page) -> None:
    await call(echo_page)
    await echo_page.click("#mute")
    await echo_page.start_capture("#agent")
    await asyncio.sleep(4.0)
    heard = await echo_page.end_capture()
    assert len(heard.pcm) > 3.5 * heard.rate
    assert np.abs(heard.pcm[heard.rate :]).max(initial=0) < 100


async def test_axe_finds_no_serious_fault_in_a_call(echo_page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    node_modules = npm.install(tmp_path_factory.mktemp("npm"), "axe-core@4")
    await call(echo_page)
    await echo_page.wait_for("document.getElementById('quality').textContent === 'Good'")
    for dark in (False, True):
        await echo_page.look(1280, 800, dark=dark, calm=True)
        assert await serious_faults(echo_page, node_modules) == []


async def test_a_call_is_recorded_on_request_and_the_page_says_so(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    microphone, _ = caller(tmp_path, silence_s=0.0)
    async with (
        serving("echo", "--recordings", str(shelf), rows=1, log=tmp_path / "log") as url,
        open_browser(microphone) as browser,
    ):
        page = await browser.open(url)
        await page.wait_for("document.body.dataset.phase === 'idle'", timeout_s=30)
        await page.evaluate("document.querySelector('details').open = true")
        await page.click("#record")
        await call(page)
        assert await page.evaluate("document.getElementById('recorded').checkVisibility()")
        await asyncio.sleep(1.0)
        await page.click("#call")
    assert [path.suffix for path in sorted(shelf.rglob("*.*"))].count(".wav") == 1


# ---- with the embedded model


def sentences(*kinds: str) -> list[str]:
    """What the embedded agent can say."""
    with (TINY / "sentences.tsv").open() as file:
        return [row["text"] for row in csv.DictReader(file, delimiter="\t") if not kinds or row["kind"] in kinds]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a call with the agent came to."""

    heard: Sound
    """At RECOGNISER_RATE."""
    turns: list[tuple[str, str]]
    """Who, and the words on the page."""
    slow_steps: int
    """Steps of the model that took longer than their 80 ms."""


async def converse(folder: Path, microphone: Path) -> Conversation:
    """Call, let the agent greet into the silence, say the caller's turn, hear its answer, hang up."""
    async with serving("tiny", rows=1, log=folder / "log") as url, open_browser(microphone) as browser:
        page = await browser.open(url, before=WATCH)
        await page.look(1280, 800)
        await page.evaluate("document.getElementById('seed').value = 3")
        await call(page)
        await page.start_capture("#agent")
        await page.wait_for(ANSWERED, timeout_s=30)
        await asyncio.sleep(1.0)
        await picture(page, "call")
        heard = await page.end_capture()
        turns = [(who, text) for who, text in await page.evaluate(TURNS)]
        await page.click("#call")
        await page.wait_for("document.body.dataset.phase === 'ended'")
        assert page.errors == []
        return Conversation(resample(heard.pcm, heard.rate, RECOGNISER_RATE), turns, await count_slow_steps(url))


async def count_slow_steps(url: str) -> int:
    async with aiohttp.ClientSession(url) as http:
        metrics = await (await http.get("/metrics")).text()
    counts = dict(re.findall(r'^webrtc_duplex_step_seconds_bucket{le="(.*)"} (.*)$', metrics, re.MULTILINE))
    return int(float(counts["+Inf"]) - float(counts["0.08"]))


async def converse_in_real_time(folder: Path, microphone: Path) -> Conversation:
    """A conversation in which every step was in time. Late sound is torn, and no ear is asked about it."""
    for _ in range(3):
        conversation = await converse(folder, microphone)
        if not conversation.slow_steps:
            return conversation
    missing(f"needs a machine with time for a step in 80 ms; {conversation.slow_steps} of this call's took longer")


async def test_a_person_talks_with_the_embedded_agent(tmp_path: Path) -> None:
    """It greets into the silence, and answers the caller's turn; what is heard is what is written, whole sentences."""
    microphone, turn = caller(tmp_path, silence_s=6.0)
    conversation = await converse_in_real_time(tmp_path, microphone)

    who = [who for who, _ in conversation.turns]
    said = [words(text) for who, text in conversation.turns if who == "agent"]
    assert who[0] == who[-1] == "agent" and set(who[1:-1]) == {"you"}
    assert said[0] in {words(sentence) for sentence in sentences("greet")}
    assert said[1] in {words(sentence) for sentence in sentences("answer")}

    recogniser = SentenceRecogniser(sentences(), tmp_path)
    spans = find_speech(conversation.heard, RECOGNISER_RATE)
    pieces = [cut(conversation.heard, RECOGNISER_RATE, span) for span in spans]
    assert [words(recogniser.hear(piece, RECOGNISER_RATE) or "") for piece in pieces] == said
    assert spans[1].start_s > spans[0].end_s + len(turn) / RATE


TURNS = """
[...document.querySelectorAll(".turn")].map((turn) => [
  turn.classList.contains("you") ? "you" : "agent",
  turn.querySelector(".words").textContent,
])
"""

ANSWERED = """
(() => {
  const turns = [...document.querySelectorAll(".turn")];
  const spoken = turns.findIndex((turn) => turn.matches(".you:not(.open)"));
  return spoken >= 0 && turns.slice(spoken).some((turn) => turn.matches(".agent:not(.open)"));
})()
"""


# ---- with no network at all


@pytest.fixture
def lonely_network() -> Iterator[str]:
    """A network namespace in which there is nothing but a loopback interface."""
    name = f"duplex-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        missing("needs the right to make a network namespace (ip netns add)")
    try:
        set_loopback(name, "up")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest_asyncio.fixture(loop_scope="module")
async def lonely_page(lonely_network: str, tmp_path: Path) -> AsyncIterator[Page]:
    inside = ("ip", "netns", "exec", lonely_network)
    async with (
        serving("echo", rows=1, log=tmp_path / "log", within=inside) as url,
        open_browser(flags=("--allow-loopback-in-peer-connection",), namespace=lonely_network) as browser,
    ):
        yield await browser.open(url, before=WATCH)


async def test_a_browser_connects_when_loopback_is_its_only_network_and_resumes_when_that_breaks(
    lonely_network: str, lonely_page: Page
) -> None:
    await call(lonely_page)
    first = await lonely_page.evaluate("window.answer")
    set_loopback(lonely_network, "down")
    await lonely_page.wait_for("document.body.dataset.phase === 'resuming'", timeout_s=20)
    set_loopback(lonely_network, "up")
    await lonely_page.wait_for("document.body.dataset.phase === 'live'", timeout_s=10)
    assert (await lonely_page.evaluate("window.answer"))["call_id"] == first["call_id"]
    assert await lonely_page.evaluate("window.peers.length") >= 2


def set_loopback(network: str, state: str) -> None:
    subprocess.run(["ip", "-n", network, "link", "set", "lo", state], check=True)
