"""A call is opened over and over, and each time the next of its awaits fails: nothing of it may be left.

There is no list of the places: a coroutine is looked into where it is suspended, and what it waits for raises instead
of coming. So a new await is found by itself.
"""

import asyncio
import gc
import os
import types
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.server.served import OFFER, Http, serving
from webrtc_duplex.errors import DuplexError
from webrtc_duplex.server.app import DESK
from webrtc_duplex.server.auth import Caller
from webrtc_duplex.server.failures import ENGINE
from webrtc_duplex.server.reading import Wish
from webrtc_duplex.server.session import Session

ROWS = 2
MOST_AWAITS = 50
ERRORS = [OSError("injected"), asyncio.CancelledError()]


class Saboteur:
    """Fails the n-th await that it sees, and none after it."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.struck = False
        self._left: float = at
        self._error = error

    def strikes(self) -> bool:
        self._left -= 1
        self.struck = self.struck or self._left == 0
        return self._left == 0

    def disarm(self) -> None:
        self._left = float("inf")

    @types.coroutine
    def look_into(self, victim: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The coroutine, run to its end; unless it is struck."""
        resume = partial(victim.send, None)
        while True:
            try:
                awaited = resume()
            except StopIteration as done:
                return done.value
            if self.strikes():
                give_up(awaited)
                resume = partial(victim.throw, self._error)
                continue
            try:
                resume = partial(victim.send, (yield awaited))
            except BaseException as thrown:
                resume = partial(victim.throw, thrown)


def give_up(awaited: "asyncio.Future[Any] | None") -> None:
    """Nobody waits for this any more; None is what a coroutine waits for that only lets others run."""
    if awaited is not None:
        awaited._asyncio_future_blocking = False
        awaited.cancel()


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Http]:
    async with serving(tmp_path, rows=ROWS) as http:
        yield http


async def open_and_end(http: Http, saboteur: Saboteur, in_request: bool) -> None:
    """Open a call as a request does, and hang up if it could be opened."""
    desk = http.app[DESK]
    opening: Coroutine[Any, Any, Any] = desk.answer(Caller("nobody", "127.0.0.1"), Wish(OFFER, {}))
    with suppress(DuplexError, OSError, asyncio.CancelledError):
        answered = await (saboteur.look_into(opening) if in_request else opening)
        await asyncio.sleep(0.02)
        saboteur.disarm()
        await answered.session.hang_up()
    saboteur.disarm()


async def nothing_left(http: Http, before: tuple[int, int]) -> None:
    """Wait until every row is free, no call is known, and there are no more descriptors and tasks than before."""
    engine = http.app[ENGINE]
    async with asyncio.timeout(5):
        while True:
            rows_free = engine.last_step is not None and engine.last_step.free_rows == ROWS
            none_more = all(now <= then for now, then in zip(held(), before, strict=True))
            if rows_free and none_more and not len(http.app[DESK].calls):
                return
            await asyncio.sleep(0.02)


def held() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


@pytest.mark.parametrize("error", ERRORS, ids=["error", "cancelled"])
@pytest.mark.parametrize("in_request", [True, False], ids=["request", "call"])
async def test_whichever_await_of_opening_a_call_fails_nothing_is_left(
    http: Http, monkeypatch: pytest.MonkeyPatch, in_request: bool, error: BaseException
) -> None:
    saboteur = Saboteur(0, error)
    run = Session.run

    async def watched_run(session: Session, first: Any) -> None:
        await saboteur.look_into(run(session, first))

    if not in_request:
        monkeypatch.setattr(Session, "run", watched_run)
    await open_and_end(http, saboteur, in_request)  # what is made once, such as a first connection, is made now
    await asyncio.sleep(0.1)
    before = held()
    for number in range(1, MOST_AWAITS):
        saboteur = Saboteur(number, error)
        opening = asyncio.create_task(open_and_end(http, saboteur, in_request))
        assert (await asyncio.wait([opening], timeout=5))[0], "whoever asked waits for ever"
        await nothing_left(http, before)
        if not saboteur.struck:
            break
    assert not saboteur.struck, "the awaits have no end"
    assert number > (1 if in_request else 3), "the saboteur sees nothing"
