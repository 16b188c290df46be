"""Lines of the log: whose call each is, and that JSON is JSON."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from webrtc_duplex import logs


@contextmanager
def logging_as(kind: str, level: str | int = "info", process: str | None = None) -> Iterator[None]:
    """The log as a process of ours has it, while the block lasts."""
    root = logging.getLogger()
    handlers, before = list(root.handlers), root.level
    root.handlers.clear()
    try:
        logs.configure(level, kind, process)
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(before)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


async def test_every_line_of_a_call_has_its_id_also_in_tasks_begun_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def somewhere_below() -> None:
        logging.getLogger("aiortc.deep").warning("trouble with %d", 7)

    with logging_as("json"):
        with logs.of_call("rtc_1"):
            task = asyncio.create_task(somewhere_below())
        await task
        logging.getLogger("webrtc_duplex").info("of nobody")
    of_call, of_nobody = lines(capsys)
    assert (of_call["call"], of_call["message"], of_call["level"]) == ("rtc_1", "trouble with 7", "warning")
    assert of_call["logger"] == "aiortc.deep" and of_call["time"].endswith("+00:00")
    assert "call" not in of_nobody


def test_an_exception_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_as("json", logging.INFO, "engine"):
        try:
            raise ValueError("bad\nnews")
        except ValueError:
            logging.getLogger("x").exception("it broke")
    (line,) = lines(capsys)
    assert "ValueError: bad\nnews" in line["error"] and line["process"] == "engine"


def test_text_names_the_call_before_what_is_said_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_as("text"), logs.of_call("rtc_1"):
        logging.getLogger("room").info("live")
    assert capsys.readouterr().err.endswith(" INFO room: rtc_1: live\n")


def test_what_is_below_the_level_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_as("json", "warning"):
        logging.getLogger("room").info("nothing of note")
    with logging_as("json"):
        logging.getLogger("aioice").info("a pair")
    assert lines(capsys) == []


def test_a_log_that_others_have_set_up_stays_as_it_is() -> None:
    before = list(logging.getLogger().handlers)
    logs.configure("debug", "json")
    assert logging.getLogger().handlers == before != []
