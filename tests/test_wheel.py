"""The installed package is whole: the page and the embedded model travel inside the wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_page_and_the_embedded_model(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    page = {f"webrtc_duplex/static/{path.name}" for path in (ROOT / "static").iterdir()}
    model = {f"webrtc_duplex/model/tiny/{name}" for name in ("model.safetensors", "mimi.safetensors", "config.json")}
    assert page | model <= names


def test_an_installed_wheel_serves_the_page_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-warn-conflicts", "--target", str(installed), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    served = subprocess.run(
        [sys.executable, "-c", SERVE_THE_PAGE],
        cwd=elsewhere,
        env={"PYTHONPATH": str(installed), "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    package, page = served.stdout.split("\n", 1)
    assert Path(package).is_relative_to(installed)
    assert "<!doctype html>" in page.lower()


SERVE_THE_PAGE = """
import asyncio
from aiohttp.test_utils import TestClient, TestServer
import webrtc_duplex
from webrtc_duplex.server.app import make_app
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.settings import Settings
from pathlib import Path

async def main():
    app = make_app(Settings(), EngineClient(Path("no-engine.sock")))
    async with TestClient(TestServer(app)) as client:
        answer = await client.get("/")
        print(webrtc_duplex.__file__)
        print(await answer.text())

asyncio.run(main())
"""
