"""Tools from npm that tests need, installed by name into a temporary folder."""

import shutil
import subprocess
from pathlib import Path

from tests.conftest import missing


def install(folder: Path, *packages: str) -> Path:
    """The `node_modules` with these packages; a test that cannot have them is skipped with the reason."""
    npm = shutil.which("npm")
    if npm is None:
        missing("needs npm (Debian: apt-get install npm)")
    quiet = ("--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    command = [npm, "install", *quiet, "--prefix", str(folder), *packages]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if installed.returncode != 0:
        missing(f"npm could not install {', '.join(packages)}: {installed.stderr.strip()[-300:]}")
    return folder / "node_modules"
