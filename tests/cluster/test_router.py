"""The router against Serve's own future and context: needs Ray, but no cluster."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs Ray: scripts/test_cluster.sh")

from ray.serve.exceptions import BackPressureError  # noqa: E402

from webrtc_duplex.cluster.router import RowRouter  # noqa: E402


def asked(future: "asyncio.Future[None]") -> Any:
    return SimpleNamespace(routing_context=SimpleNamespace(should_backoff=False), future=future)


async def choose(request: Any) -> None:
    replicas: Any = ["one", "other"]
    router: Any = object.__new__(RowRouter)
    ranks = await router.choose_replicas(replicas, request)
    assert ranks == [replicas]  # never none: the task must look at its future


async def test_a_call_is_offered_to_all_replicas_once() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await choose(asked(future))
    assert not future.done()


async def test_being_asked_again_for_the_same_call_means_that_all_are_full() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    request = asked(future)
    await choose(request)
    await choose(request)
    with pytest.raises(BackPressureError):
        await future
    await choose(request)  # and a third time, whose future is done, changes nothing


async def test_a_retry_after_a_race_has_another_pass() -> None:
    loop = asyncio.get_running_loop()
    request = asked(loop.create_future())
    await choose(request)
    request.future = loop.create_future()
    await choose(request)
    assert not request.future.done()


async def test_serve_may_ask_without_a_call() -> None:
    await choose(None)
