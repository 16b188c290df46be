"""The page by itself, in Chromium, before a server of paper: what it shows, and that everybody can use it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

from tests.browser import Browser, Page, open_browser
from tests.paper_server import KEY, PaperServer

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

DESKTOP = (1280, 800)
PHONE = (390, 844)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def paper() -> AsyncIterator[PaperServer]:
    server = PaperServer()
    async with TestServer(server.app()) as listening:
        server.url = str(listening.make_url("/"))
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, paper: PaperServer) -> AsyncIterator[Page]:
    page = await browser.open(paper.url)
    await page.look(*DESKTOP)
    await page.wait_for("document.getElementById('model').textContent === 'paper'")
    yield page
    await page.close()


async def text(page: Page, selector: str) -> str:
    return str(await page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


async def module(page: Page, script: str) -> Any:
    """The value of a function body that may import the page's modules."""
    return await page.evaluate(f"(async () => {{ {script} }})()")


async def test_the_page_says_that_the_voice_is_artificial(page: Page) -> None:
    assert "The voice you will hear is artificial" in await text(page, "main")


async def test_the_page_loads_nothing_from_another_origin_and_logs_no_error(page: Page, paper: PaperServer) -> None:
    loaded = await page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded and all(name.startswith(paper.url) for name in loaded)
    assert page.errors == []


async def test_voices_and_instructions_are_offered_where_the_model_has_them(page: Page) -> None:
    assert await page.evaluate("[...document.getElementById('voice').options].map((o) => o.value)") == ["ada", "bob"]
    assert await page.evaluate("document.getElementById('voice').value") == "bob"
    assert await page.evaluate("document.getElementById('instructions').checkVisibility()")


async def test_a_model_with_one_voice_and_no_prompt_offers_neither(browser: Browser, paper: PaperServer) -> None:
    paper.takes_text, paper.voices = False, []
    page = await browser.open(paper.url)
    await page.wait_for("document.getElementById('model').textContent === 'paper'")
    assert not await page.evaluate("document.getElementById('voice').checkVisibility()")
    assert not await page.evaluate("document.getElementById('instructions').checkVisibility()")
    await page.close()


@pytest.mark.parametrize("records", [True, False])
async def test_a_recording_is_offered_where_the_server_keeps_any(
    browser: Browser, paper: PaperServer, records: bool
) -> None:
    paper.records = records
    page = await browser.open(paper.url)
    await page.wait_for("document.getElementById('model').textContent === 'paper'")
    await page.evaluate("document.querySelector('details').open = true")
    assert await page.evaluate("document.getElementById('record').checkVisibility()") is records
    await page.close()


async def test_the_end_of_a_call_is_told_before_it_comes(page: Page) -> None:
    await module(page, """(await import("/static/view.js")).showComingEnd("max_duration", 29_400);""")
    assert await text(page, "#hint") == "The call reaches its longest duration: it ends in about 30 s."


async def test_the_page_waits_for_a_model_that_is_loading(browser: Browser, paper: PaperServer) -> None:
    paper.loading = 1
    page = await browser.open(paper.url)
    await page.wait_for("document.body.dataset.phase === 'loading'")
    await page.click("#call")
    await page.wait_for("document.body.dataset.phase === 'idle'")
    assert paper.offers == []
    await page.close()


async def test_a_server_that_wants_a_key_is_given_one(browser: Browser, paper: PaperServer) -> None:
    paper.locked = True
    page = await browser.open(paper.url)
    await page.wait_for("document.body.dataset.phase === 'locked'")
    await page.evaluate(f"document.getElementById('key').value = '{KEY}'")
    await page.click("#key-form button")
    await page.wait_for("document.body.dataset.phase === 'idle'")
    assert await text(page, "#model") == "paper"
    await page.close()


async def test_what_the_caller_wishes_is_in_the_offer(page: Page, paper: PaperServer) -> None:
    await page.evaluate("document.getElementById('voice').value = 'ada'")
    await page.click("#examples button")
    await page.evaluate("document.querySelector('details').open = true")
    for name, value in {"seed": 7, "text-temperature": 0.5, "audio-temperature": 0}.items():
        await page.evaluate(f"document.getElementById('{name}').value = {value}")
    await page.click("#call")
    await page.wait_for("document.body.dataset.phase === 'refused'")
    offer = paper.offers[0]
    session = offer["session"]
    assert offer["type"] == "offer" and "m=audio" in offer["sdp"] and "m=application" in offer["sdp"]
    assert session["audio"] == {"output": {"voice": "ada"}}
    assert session["instructions"].startswith("You are a patient assistant.")
    assert (session["seed"], session["text_temperature"], session["audio_temperature"]) == (7, 0.5, 0)


async def test_without_a_seed_each_call_draws_one_and_shows_it(page: Page, paper: PaperServer) -> None:
    await page.click("#call")
    await page.wait_for("document.body.dataset.phase === 'refused'")
    seed = paper.offers[0]["session"]["seed"]
    assert str(seed) in await page.evaluate("document.getElementById('seed').placeholder")


async def test_a_full_house_counts_down_and_then_lets_the_caller_call_again(page: Page, paper: PaperServer) -> None:
    await page.click("#call")
    await page.wait_for("document.body.dataset.phase === 'refused'")
    assert "Every seat is taken" in await text(page, "#notice")
    assert await text(page, "#call") in {"Call in 3 s", "Call in 2 s"}
    await page.click("#call")
    assert len(paper.offers) == 1
    await page.wait_for("document.getElementById('call').innerText === 'Call again'", timeout_s=6)
    await page.click("#call")
    await page.wait_for("document.getElementById('call').innerText.startsWith('Call in')")
    assert len(paper.offers) == 2


async def test_any_other_refusal_is_told_in_the_servers_words(page: Page, paper: PaperServer) -> None:
    paper.refusal, paper.code = 400, "unknown_voice"
    await page.click("#call")
    await page.wait_for("document.body.dataset.phase === 'failed'")
    assert "The house is made of paper." in await text(page, "#notice")


async def test_a_microphone_that_is_not_allowed_is_explained(page: Page, paper: PaperServer) -> None:
    await page.evaluate(
        "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'NotAllowedError') }"
    )
    await page.click("#call")
    await page.wait_for("document.body.dataset.phase === 'failed'")
    assert "Allow the microphone" in await text(page, "#notice")
    assert paper.offers == []


async def test_a_call_can_be_made_with_the_keyboard_alone(page: Page, paper: PaperServer) -> None:
    for _ in range(20):
        await page.press("Tab")
        if await page.evaluate("document.activeElement.id") == "call":
            break
    await page.press("Enter", text="\r")
    await page.wait_for("document.body.dataset.phase === 'refused'")
    assert await page.evaluate("document.activeElement.id") == "call"
    assert "Every seat is taken" in await text(page, "#announcer")


async def test_nothing_is_wider_than_a_phone(page: Page) -> None:
    await page.look(*PHONE)
    assert await page.evaluate("document.documentElement.scrollWidth") == PHONE[0]


async def test_a_person_who_wants_less_motion_gets_none(page: Page) -> None:
    await page.look(*DESKTOP, calm=True)
    await page.click("#call")
    await page.wait_for("document.body.dataset.phase === 'refused'")
    assert await page.evaluate("document.getAnimations().length") == 0


async def test_words_of_the_agent_become_turns_and_an_interrupted_one_is_marked(page: Page) -> None:
    turns = await module(
        page,
        """
        const { Conversation } = await import("/static/conversation.js");
        const conversation = new Conversation();
        const ids = { response_id: "r1", item_id: "i1" };
        conversation.hear({ type: "response.output_audio_transcript.delta", ...ids, delta: "Hello" }, 100);
        conversation.hear({ type: "input_audio_buffer.speech_started", item_id: "u1" }, 300);
        conversation.hear({ type: "response.output_audio_transcript.delta", ...ids, delta: " there" }, 200);
        conversation.hear({ type: "response.done", response: { id: "r1", status: "cancelled" } }, 500);
        conversation.hear({ type: "input_audio_buffer.speech_stopped", item_id: "u1" }, 900);
        return conversation.turns;
        """,
    )
    agent = {"id": "i1", "who": "agent", "startedMs": 100, "endedMs": 500, "text": "Hello there", "interrupted": True}
    you = {"id": "u1", "who": "you", "startedMs": 300, "endedMs": 900, "text": "", "interrupted": False}
    assert turns == [agent, you]


async def test_the_history_tells_overlap_interruptions_and_how_fast_the_answer_came(page: Page) -> None:
    talk = await module(
        page,
        """
        const { History } = await import("/static/timeline.js");
        const history = new History();
        const spoken = (at, ...spans) => (spans.some(([from, to]) => at >= from && at < to) ? -20 : -60);
        for (let at = 0; at < 10000; at += 50) {
          history.add(spoken(at, [0, 2000], [5000, 7000]), spoken(at, [2700, 5500]), at);
        }
        return history.talk;
        """,
    )
    assert talk["youMs"] == pytest.approx(4_400, abs=100)
    assert talk["agentMs"] == pytest.approx(3_000, abs=100)
    assert talk["bothMs"] == pytest.approx(750, abs=100)
    assert talk["interruptions"] == 1
    assert talk["answerMs"] == pytest.approx(700, abs=60)


async def test_the_delay_counts_what_is_known_and_marks_what_is_assumed(page: Page) -> None:
    stages = await module(
        page,
        """
        const { soundWay } = await import("/static/latency.js");
        const network = { rttMs: 40, jitterMs: 1, bufferMs: 30, lostIn: 0, lostOut: 0 };
        return soundWay({ jb_ms: 10, frame_wait_ms: 45, step_ms: 25, model_delay_ms: 80 }, network, null);
        """,
    )
    measured = {stage["name"]: stage["ms"] for stage in stages if not stage["assumed"]}
    assert measured == {
        "Network, there": 20,
        "Jitter buffer": 10,
        "Frame and tick": 45,
        "Model step": 25,
        "Model’s own delay": 80,
        "Network, back": 20,
        "Browser’s buffer": 30,
    }
    assert {stage["name"] for stage in stages if stage["assumed"]} == {
        "Microphone, Opus",
        "Opus, loudspeaker",
    }
