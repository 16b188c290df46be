"""The README is true where a test can tell."""

import re

import pytest

from tests.conftest import ROOT
from webrtc_duplex import settings
from webrtc_duplex.__main__ import main
from webrtc_duplex.server import openapi

README = (ROOT / "README.md").read_text()


def test_the_table_of_settings_is_that_of_the_code() -> None:
    shown = README.split("by `webrtc-duplex settings` -->\n")[1].split("\n<!-- /settings")[0]
    assert shown == settings.table(), "run `webrtc-duplex settings` and put its table into the README"


@pytest.mark.parametrize("command", sorted(set(re.findall(r"webrtc-duplex ([a-z]+)", README))))
def test_every_command_that_is_named_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0


def test_every_path_that_is_named_is_in_the_openapi_document() -> None:
    paths = openapi.document()["paths"]
    assert isinstance(paths, dict)
    table = README.split("## HTTP")[1].split("## Settings")[0]
    named = {path for path in re.findall(r"[` ](/[a-z0-9/{}._-]+)`", table) if "..." not in path}
    assert named - {"/metrics", "/ops", "/openapi.json"} <= set(paths)


def test_every_file_that_is_linked_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert all((ROOT / link).exists() for link in links), links
