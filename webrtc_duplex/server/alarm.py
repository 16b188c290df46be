"""An alarm that is right to a fraction of a millisecond.

Event loops count in milliseconds, which alone puts half of one between packets that are to leave 20 ms apart. Linux has
timers that are files, for any loop to watch (timerfd_create(2)); Python names them from 3.13 on, so they are called in
libc. Elsewhere the loop's own timers must do.
"""

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable
from functools import cache
from time import CLOCK_MONOTONIC
from typing import Protocol

_ITIMERSPEC = struct.Struct("@llll")  # interval, then value, each in seconds and nanoseconds
_SOONEST_S = 1e-9  # nothing would mean never


class Alarm(Protocol):
    """Rings once, a while after it was set; set anew, it forgets the time before. Closed by whoever made it."""

    def set(self, delay_s: float) -> None: ...
    def close(self) -> None: ...


def alarm(ring: Callable[[], None]) -> Alarm:
    """The best alarm that this system has, on the loop that runs."""
    return FileAlarm(ring) if hasattr(_libc(), "timerfd_create") else LoopAlarm(ring)


class FileAlarm:
    """A timer of the kernel's. Raises OSError where no file is left."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._file = _checked(_libc().timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._expire)

    def set(self, delay_s: float) -> None:
        seconds, rest_s = divmod(max(delay_s, _SOONEST_S), 1)
        value = _ITIMERSPEC.pack(0, 0, int(seconds), int(rest_s * 1e9))
        _checked(_libc().timerfd_settime(self._file, 0, value, None))

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _expire(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # it was set anew just now
            return
        self._ring()


class LoopAlarm:
    """A timer of the event loop's."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        self.close()
        self._handle = self._loop.call_later(max(0.0, delay_s), self._ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
