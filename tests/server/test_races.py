"""Many requests at once for one call, of its owner and of others: each is answered, and nothing of the call is left."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.server.served import CALLS, OFFER, SDP, Http, Opened, open_call, serving
from webrtc_duplex.server.failures import ENGINE

ROWS = 2
AT_ONCE = 40
FRAGMENT = {"Content-Type": "application/trickle-ice-sdpfrag"}
CANDIDATE = "a=ice-ufrag:abcd\r\na=mid:0\r\na=candidate:1 1 udp 1 127.0.0.1 9 typ host\r\n"


async def ask(http: Http, calls: list[Opened], dice: random.Random) -> int:
    """One request about one of the calls, by its owner, the other's, or nobody; returns the status."""
    call, other = dice.choice(calls), dice.choice(calls)
    headers = dice.choice([call.headers, call.headers, other.headers, {"Authorization": "Bearer cs_forged"}])
    place = dice.choice([call.place, call.place, call.place, call.place[:-1] + "a", f"{CALLS}/rtc_0_forged"])
    match dice.choice(["resume", "resume", "resume", "trickle", "show", "end"]):
        case "resume":
            answer = await http.post(place, data=OFFER, headers={**SDP, **headers})
        case "trickle":
            trickle = {**FRAGMENT, **headers, "If-Match": dice.choice([call.etag, other.etag, "*"])}
            answer = await http.patch(place, data=CANDIDATE, headers=trickle)
        case "show":
            answer = await http.get(place, headers=headers)
        case _:
            answer = await http.delete(place, headers=headers) if dice.random() < 0.1 else await http.get(place)
    await answer.read()
    return answer.status


@pytest.mark.parametrize("seed", range(2))
async def test_requests_that_race_for_a_call_are_each_answered_and_leave_nothing(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    async with serving(tmp_path, rows=ROWS) as http:
        calls = [await open_call(http) for _ in range(ROWS)]
        async with asyncio.timeout(60):
            told = await asyncio.gather(*(ask(http, calls, dice) for _ in range(AT_ONCE)))
            ended = await asyncio.gather(*(http.delete(call.place, headers=call.headers) for call in 2 * calls))
        assert set(told) <= {200, 201, 204, 400, 401, 403, 404, 409, 412, 415, 422}, sorted(set(told))
        assert {answer.status for answer in ended} == {200}
        engine = http.app[ENGINE]
        async with asyncio.timeout(10):
            while engine.last_step is None or engine.last_step.free_rows < ROWS:
                await asyncio.sleep(0.02)
        await open_call(http)
