"""The picture of who may import whom, kept true by walking the imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "webrtc_duplex"
LEAVES = {"audio", "errors", "logs", "messages", "settings"}

# Room -> the rooms that it may import besides itself and the leaves.
MAY_IMPORT = {
    "server": {"media"},
    "media": set[str](),
    "engine": set[str](),
    "model": set[str](),
    "client": {"media"},
    "bridge": {"client"},
    "cluster": {"server", "launch"},
}

# Library -> the rooms that may name it.
HOMES = {
    "aiohttp": {"server", "client", "bridge", "cluster", "launch"},
    "aioice": {"server", "client"},
    "aiortc": {"server", "client"},
    "asyncio": {"server", "client", "bridge", "cluster", "launch", "commands"},
    "ray": {"cluster"},
    "torch": {"model"},
    "uvloop": {"server", "client", "bridge", "cluster", "launch", "commands"},
}

# Rooms and files whose time comes in as an argument.
CLOCKLESS = ("media/", "engine/rows.py", "engine/scheduler.py")
CLOCKS = {"asyncio", "select", "selectors", "socket", "threading", "time"}


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file names in an import, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module)):
                yield module


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The room of a file, or its own name if it stands in none."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(path)
    for module in imports_of(path):
        top, _, rest = module.partition(".")
        if top == "webrtc_duplex" and room in MAY_IMPORT and rest:
            target = rest.split(".")[0]
            assert target in LEAVES | MAY_IMPORT[room] | {room}, f"{room} must not import {module}"
        if top == "webrtc_duplex" and room in LEAVES and rest:
            assert rest.split(".")[0] in LEAVES, f"a leaf must not import {module}"
        if top in HOMES:
            assert room in HOMES[top], f"{top} has no home in {room}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_time_is_an_argument_where_the_house_says_so(path: Path) -> None:
    if str(path.relative_to(PACKAGE)).startswith(CLOCKLESS):
        assert not CLOCKS & {module.split(".")[0] for module in imports_of(path)}
