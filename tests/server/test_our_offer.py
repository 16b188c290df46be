"""Calls whose offer is ours: the caller answers it, and then they are calls like all others."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine_doubles import tone
from tests.server.peer import House, Peer, house, in_state
from webrtc_duplex.errors import CallNotFoundError, RequestError
from webrtc_duplex.server.session import CallRequest, SessionState


@pytest.fixture
async def one_row(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path, rows=1) as it:
        yield it


async def test_who_answers_our_offer_hears_the_agent(one_row: House) -> None:
    session = await one_row.calls.answer(CallRequest("rtc_1", None))
    caller = Peer(None)
    await one_row.calls.resume("rtc_1", await caller.answer(session.answer))
    await caller.microphone.say(np.tile(tone(), 12))
    await in_state(session, SessionState.LIVE)
    heard = await caller.heard(1.5)
    assert abs(heard).max() > 1000
    await caller.close()
    await one_row.rows_free(1)


async def test_an_answer_that_cannot_be_used_ends_the_call(one_row: House) -> None:
    session = await one_row.calls.answer(CallRequest("rtc_1", None))
    with pytest.raises(RequestError, match="this answer cannot be used"):
        await one_row.calls.resume("rtc_1", "v=0\r\no=- 0 0 IN IP4 0.0.0.0\r\ns=-\r\nt=0 0\r\n")
    await session.wait_over()
    await one_row.rows_free(1)


async def test_a_call_that_is_hung_up_before_our_offer_is_answered_frees_its_row(one_row: House) -> None:
    session = await one_row.calls.answer(CallRequest("rtc_1", None))
    await session.hang_up()
    assert session.ended_because == "hangup"
    await one_row.rows_free(1)
    with pytest.raises(CallNotFoundError):
        await one_row.calls.resume("rtc_1", "")
