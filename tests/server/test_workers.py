"""The front's view of its media workers, which speak here through real pipes."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from webrtc_duplex.errors import CallNotFoundError, CapacityError, EngineError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.server.metrics import Metrics
from webrtc_duplex.server.pipe import Answer, Answered, Ask, Over, Pipe, Prompted, Reply, Report, Seen
from webrtc_duplex.server.session import CallRequest, SessionState
from webrtc_duplex.server.workers import RemoteCall, Workers

OFFER, ANSWER = "v=0 (the offer)", "v=0 (the answer)"


def seen(call: str, state: SessionState = SessionState.LIVE, ended_because: str | None = None) -> Seen:
    return Seen(call, state, ended_because, {"underruns": 1})


@asynccontextmanager
async def joined(workers: Workers, name: str) -> AsyncIterator[Pipe]:
    """A worker that has said that it is ready; gives its end of the pipe."""
    ours, theirs = socket.socketpair()
    pipe, end = await Pipe.over(ours), await Pipe.over(theirs)
    carried = asyncio.create_task(workers.carry(name, pipe))
    end.send(Report(()))
    await until(lambda: name in workers._workers)
    try:
        yield end
    finally:
        end.close()
        await carried


async def until(told: Callable[[], bool]) -> None:
    """Wait until the front has taken what it was sent."""
    async with asyncio.timeout(5):
        while not told():
            await asyncio.sleep(0.001)


async def opened(workers: Workers, end: Pipe, call: str = "rtc_a") -> RemoteCall:
    """A call that this worker has answered."""
    asked = asyncio.create_task(workers.answer(CallRequest(call, OFFER, Prompt(text="be brief"))))
    message = await end.receive()
    assert isinstance(message, Ask) and isinstance(message.question, Answer)
    end.send(Reply(message.number, Answered(ANSWER, seen(call))))
    return await asked


@pytest.fixture
def workers() -> Workers:
    return Workers(Metrics(None))


async def test_the_server_is_ready_with_the_last_of_its_workers_and_then_as_long_as_it_has_one(
    workers: Workers,
) -> None:
    told = [workers.unready_because]
    workers.want(2)
    async with AsyncExitStack() as first:
        await first.enter_async_context(joined(workers, "0"))
        told.append(workers.unready_because)
        async with joined(workers, "1"):
            told.append(workers.unready_because)
            await first.aclose()
            told.append(workers.unready_because)
    told.append(workers.unready_because)
    starting = ["the media workers are being started", "1 of 2 media workers are ready"]
    assert told == [*starting, None, None, "0 of 2 media workers are ready"]


async def test_a_call_is_known_as_its_worker_has_last_told(workers: Workers) -> None:
    async with joined(workers, "0") as end:
        call = await opened(workers, end)
        assert (call.answer, call.state, call.prompt.text) == (ANSWER, SessionState.LIVE, "be brief")
        end.send(Prompted(call.id, Prompt(text="be long")))
        end.send(Report((seen(call.id, SessionState.HELD),)))
        await until(lambda: call.state is SessionState.HELD)
        assert (call.answer, call.state, call.prompt.text) == (ANSWER, SessionState.HELD, "be long")
        end.send(Over(seen(call.id, SessionState.ENDED, "hangup")))
        await until(lambda: len(workers) == 0)
        assert workers.find(call.id).ended_because == "hangup"


async def test_a_call_is_lost_with_its_worker_and_is_said_to_be(workers: Workers) -> None:
    async with joined(workers, "0") as end:
        call = await opened(workers, end)
        with call.listen() as listener:
            end.close()
            events = [event["type"] async for event in listener]
    assert events == ["ext.session.closing"]
    assert call.ended_because == "worker_lost"
    with pytest.raises(CallNotFoundError) as lost:
        workers.find(call.id)
    assert (lost.value.status, lost.value.code) == (410, "call_lost")


async def test_what_a_worker_refuses_is_refused_in_its_words(workers: Workers) -> None:
    async with joined(workers, "0") as end:
        asked = asyncio.create_task(workers.answer(CallRequest("rtc_a", OFFER)))
        message = await end.receive()
        assert isinstance(message, Ask)
        end.send(Reply(message.number, CapacityError("all rows are leased", retry_after_s=3.0)))
        with pytest.raises(CapacityError, match="all rows are leased") as refused:
            await asked
        assert refused.value.retry_after_s == 3.0
        assert len(workers) == 0


async def test_an_offer_that_its_worker_does_not_survive_is_an_error_at_once(workers: Workers) -> None:
    async with joined(workers, "0") as end:
        asked = asyncio.create_task(workers.answer(CallRequest("rtc_a", OFFER)))
        await end.receive()
        end.close()
        with pytest.raises(EngineError) as lost:
            await asked
    assert lost.value.code == "worker_lost"


async def test_a_worker_that_talks_nonsense_is_given_up(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.send(b"\x04\0\0\0nope")
        async with asyncio.timeout(1):
            await workers.carry("0", await Pipe.over(ours))
    assert "media worker 0 says what cannot be taken" in caplog.text
