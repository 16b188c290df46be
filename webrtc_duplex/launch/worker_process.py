"""A media worker's process, from its first message to the front's end.

Its standard input is its end of the pipe, and so its lifeline: it ends when that closes, that is with its parent.
"""

import os
import socket
import sys

import uvloop

from webrtc_duplex import logs
from webrtc_duplex.launch.process import keep_what_is_loaded, leave_ending_to_the_parent
from webrtc_duplex.server.engines import join
from webrtc_duplex.server.pipe import Begin, Pipe
from webrtc_duplex.server.worker import work


def worker_process() -> int:
    """Be a media worker until the front process is gone; returns the exit code."""
    leave_ending_to_the_parent()
    return uvloop.run(_carry_calls(socket.socket(fileno=os.dup(sys.stdin.fileno()))))


async def _carry_calls(end: socket.socket) -> int:
    pipe = await Pipe.over(end)
    begin = await pipe.receive()
    assert isinstance(begin, Begin)
    logs.configure(begin.log_level, begin.settings.server.log_format, process=f"worker {begin.name}")
    keep_what_is_loaded()
    async with join(begin.engine_sockets) as (engine, _):
        await work(pipe, engine, begin.settings)
    return 0
