"""Alarms, on the loop's own time: the kernel's where there are such, and the loop's."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from webrtc_duplex.server.alarm import Alarm, FileAlarm, LoopAlarm, alarm

ALARMS = [LoopAlarm, FileAlarm] if hasattr(os, "eventfd") else [LoopAlarm]  # both are Linux's


@pytest.fixture(params=ALARMS)
def kind(request: pytest.FixtureRequest) -> Callable[[Callable[[], None]], Alarm]:
    found: Callable[[Callable[[], None]], Alarm] = request.param
    return found


async def test_an_alarm_rings_once_and_not_before_its_time(kind: Callable[[Callable[[], None]], Alarm]) -> None:
    loop, rung = asyncio.get_running_loop(), list[float]()
    alarm = kind(lambda: rung.append(loop.time()))
    due = loop.time() + 0.02
    alarm.set(0.02)
    await asyncio.sleep(0.06)
    alarm.close()
    assert len(rung) == 1 and rung[0] >= due - 0.001


async def test_an_alarm_that_is_set_anew_forgets_the_time_before(kind: Callable[[Callable[[], None]], Alarm]) -> None:
    rung = asyncio.Event()
    alarm = kind(rung.set)
    alarm.set(60)
    alarm.set(0.0)
    async with asyncio.timeout(10):
        await rung.wait()
    alarm.close()


async def test_a_closed_alarm_does_not_ring_and_holds_no_file(kind: Callable[[Callable[[], None]], Alarm]) -> None:
    before, rung = open_files(), list[bool]()
    alarm = kind(lambda: rung.append(True))
    alarm.set(0.01)
    alarm.close()
    await asyncio.sleep(0.03)
    assert not rung and open_files() == before


async def test_linux_gives_the_kernels() -> None:
    found = alarm(lambda: None)
    assert isinstance(found, ALARMS[-1])
    found.close()


def open_files() -> int:
    descriptors = Path("/proc/self/fd")
    return len(list(descriptors.iterdir())) if descriptors.exists() else 0
