"""The engine's door: a unix socket at which any number of server processes join, and the lifeline of its parent."""

import logging
import os
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from webrtc_duplex.engine.scheduler import Joined, Left
from webrtc_duplex.messages import Event, Request, Unpacker, load, pack

logger = logging.getLogger(__name__)

Received = tuple[int, Request | Joined | Left]
"""What came, and from which connection."""

UNSENT_LIMIT = 1 << 20
"""Bytes that wait for a server process which does not read (20 s of 64 callers). Beyond that it is taken for gone."""


class SocketInbox:
    """Accepts, frames and sends without ever blocking but in `poll`.

    `lifeline` is the read end of a pipe of which the parent holds the other: when that closes, `closed` is set. The
    directory of the socket must be private to this user, as who connects may lease rows.
    """

    def __init__(self, path: Path, lifeline: int) -> None:
        self.closed = False
        self._path = path
        self._lifeline = lifeline
        self._selector = selectors.SelectSelector()  # whose timeouts, unlike those of epoll, are not rounded up to 1 ms
        self._connections: dict[int, _Connection] = {}
        self._arrivals = 0
        self._broken: list[int] = []  # connections dropped since the last poll, which tells of them

    def __enter__(self) -> Self:
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._lifeline, selectors.EVENT_READ)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        self._listener.close()
        self._selector.close()
        self._path.unlink(missing_ok=True)

    def poll(self, timeout_s: float) -> list[Received]:
        """Wait at most so long for something; returns all that has come, in the order of each connection."""
        received: list[Received] = []
        for key, events in self._selector.select(0 if self._broken else timeout_s):
            if key.fileobj is self._listener:
                received.append(self._accept())
            elif key.fd == self._lifeline:
                self.closed = self.closed or not os.read(self._lifeline, 4096)
            else:
                received += self._serve(self._connections[key.data], events)
        received += [(number, Left()) for number in self._broken]
        self._broken.clear()
        return received

    def send(self, connection: int, event: Event) -> None:
        """Send, or keep what the socket does not take; nothing happens if the connection has just gone."""
        place = self._connections.get(connection)
        if place is not None:
            place.unsent += pack(event)
            self._flush(place)

    def _accept(self) -> Received:
        peer, _ = self._listener.accept()
        peer.setblocking(False)
        self._arrivals += 1
        self._connections[self._arrivals] = _Connection(self._arrivals, peer)
        self._selector.register(peer, selectors.EVENT_READ, self._arrivals)
        return self._arrivals, Joined()

    def _serve(self, connection: "_Connection", events: int) -> Iterator[Received]:
        if events & selectors.EVENT_WRITE:
            self._flush(connection)
        if events & selectors.EVENT_READ and connection.number in self._connections:
            for request in self._read(connection):
                yield connection.number, request

    def _read(self, connection: "_Connection") -> Iterator[Request]:
        try:
            received = connection.socket.recv(1 << 16)
            if not received:
                self._drop(connection, "it has closed")
            for message in connection.unpacker.feed(received):
                if not isinstance(message, Request):
                    raise ValueError(f"{type(message).__name__} is no request")
                yield message
        except (OSError, ValueError) as error:
            self._drop(connection, str(error))

    def _flush(self, connection: "_Connection") -> None:
        """Send what the socket takes, and ask to be woken for the rest."""
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            return self._drop(connection, str(error))
        del connection.unsent[:sent]
        if len(connection.unsent) > UNSENT_LIMIT:
            return self._drop(connection, "it does not read")
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if connection.wanted != wanted:
            connection.wanted = wanted
            self._selector.modify(connection.socket, wanted, connection.number)

    def _drop(self, connection: "_Connection", why: str) -> None:
        if self._connections.pop(connection.number, None) is not None:
            logger.info("server process %d is gone: %s", connection.number, why)
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._broken.append(connection.number)


class _Connection:
    """One server process."""

    def __init__(self, number: int, peer: socket.socket) -> None:
        self.number = number
        self.socket = peer
        self.unpacker = Unpacker(load)
        self.unsent = bytearray()
        self.wanted = selectors.EVENT_READ
