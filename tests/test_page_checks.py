"""The page before two strict readers: axe-core, for people who cannot see or point, and TypeScript, for its types."""

import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

from tests import npm
from tests.browser import Browser, Page, open_browser
from tests.conftest import ROOT
from tests.paper_server import KEY, PaperServer
from tests.test_page import DESKTOP, PHONE

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

TYPESCRIPT = (
    *("--noEmit", "--allowJs", "--checkJs", "--strict", "--noUnusedLocals"),
    *("--target", "es2023", "--module", "esnext", "--moduleResolution", "bundler", "--lib", "es2023,dom,dom.iterable"),
)


@pytest.fixture(scope="module")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npm.install(tmp_path_factory.mktemp("npm"), "axe-core@4", "typescript@5")


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


async def serious_faults(page: Page, node_modules: Path) -> list[str]:
    """What axe-core finds serious or critical, one line each."""
    await page.evaluate((node_modules / "axe-core" / "axe.min.js").read_text() + "; undefined")
    found = await page.evaluate("axe.run().then((report) => report.violations)")
    return [
        f"{fault['id']}: {fault['help']}: {json.dumps([node['html'][:120] for node in fault['nodes']])}"
        for fault in found
        if fault["impact"] in {"serious", "critical"}
    ]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_axe_finds_no_serious_fault(
    browser: Browser, paper: PaperServer, node_modules: Path, size: tuple[int, int], dark: bool
) -> None:
    page = await browser.open(paper.url)
    await page.look(*size, dark=dark, calm=True)
    await page.wait_for("document.getElementById('model').textContent === 'paper'")
    await page.evaluate("document.querySelector('details').open = true")
    assert await serious_faults(page, node_modules) == []
    await page.click("#call")
    await page.wait_for("document.body.dataset.phase === 'refused'")
    assert await serious_faults(page, node_modules) == []
    await page.evaluate(f"sessionStorage.setItem('operator-key', '{KEY}')")
    await page.navigate(f"{paper.url}ops")
    await page.wait_for("document.getElementById('board').checkVisibility()")
    assert await serious_faults(page, node_modules) == []
    await page.close()


@pytest.mark.slow
async def test_the_types_in_the_pages_comments_are_true(node_modules: Path) -> None:
    compiler = node_modules / "typescript" / "bin" / "tsc"
    modules = sorted((ROOT / "static").glob("*.js"))
    checked = subprocess.run(["node", str(compiler), *TYPESCRIPT, *map(str, modules)], capture_output=True, text=True)
    assert checked.stdout == ""
    assert checked.returncode == 0
