"""What every test may ask for."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""


def missing(what: str) -> None:
    """Say why a test cannot run: a skip on a developer's machine, a failure where everything must be there (CI)."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data beside the repository; where there is none, a test that asks for it is skipped and says so."""
    folder = Path(os.environ.get("WEBRTC_DUPLEX_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"needs the shared data folder, and {folder} is none (set WEBRTC_DUPLEX_SHARED)")
    return folder
