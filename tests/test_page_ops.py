"""The operator's page, in Chromium, before a server of paper that wants a key."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

from tests.browser import Browser, Page, open_browser
from tests.paper_server import KEY, PaperServer

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    async with TestServer(PaperServer().app()) as listening:
        page = await browser.open(str(listening.make_url("/ops")))
        await page.look(1280, 900)
        yield page
        await page.close()


async def text(page: Page, selector: str) -> str:
    return str(await page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


async def enter_key(page: Page, key: str) -> None:
    await page.wait_for("!document.getElementById('key-form').hidden")
    await page.evaluate(f"document.getElementById('key').value = {json.dumps(key)}")
    await page.click("#key-form button")


async def test_nothing_is_shown_without_the_key(page: Page) -> None:
    await enter_key(page, "guess")
    await page.wait_for("document.getElementById('key-fault').textContent !== ''")
    assert not await page.evaluate("document.getElementById('board').checkVisibility()")


async def test_rows_callers_and_the_time_of_a_step_are_shown_live(page: Page) -> None:
    await enter_key(page, KEY)
    await page.wait_for("document.getElementById('step-now').innerText === '30.0'", timeout_s=5)
    assert await text(page, "#rows-title") == "Rows\n3 of 8"
    assert await page.evaluate("document.querySelectorAll('.taken').length") == 3
    assert "Requests refused\n5" in await text(page, "#counts")
    caller = (await text(page, "#callers")).split("\t")
    assert caller == ["ef012345", "live", "ada", "1:23", "12.3 ms", "15 ms", "3", "60 ms"]


async def test_the_key_is_not_kept_longer_than_the_tab(page: Page) -> None:
    await enter_key(page, KEY)
    await page.wait_for("document.getElementById('board').checkVisibility()")
    assert await page.evaluate("localStorage.length") == 0
