"""What every test may ask for."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""

SHARED = Path(os.environ.get("WEBRTC_DUPLEX_SHARED", ROOT.parent / "shared"))
"""Where data lies that is not in the repository, such as recorded speech."""


def missing(what: str) -> NoReturn:
    """Say why a test cannot run: a skip on a developer's machine, a failure where everything must be there (CI)."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)
