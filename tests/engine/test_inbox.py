"""The engine's door: real sockets, one process."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from webrtc_duplex.engine.inbox import UNSENT_LIMIT, Received, SocketInbox
from webrtc_duplex.engine.scheduler import Joined, Left
from webrtc_duplex.messages import Close, Event, Lease, Leased, Open, Prompt, Ready, Request, Unpacker, load, pack


class Door:
    """An inbox and what a test needs to come in."""

    def __init__(self, inbox: SocketInbox, path: Path, parent: int) -> None:
        self.inbox = inbox
        self.parent = parent
        self._path = path

    def join(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.connect(str(self._path))
        return peer

    def received(self, count: int) -> list[Received]:
        """What comes, polling until there is so much of it."""
        received: list[Received] = []
        while len(received) < count:
            came = self.inbox.poll(5.0)
            assert came, "nothing came in 5 s"
            received += came
        return received


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    lifeline, parent = os.pipe()
    with SocketInbox(tmp_path / "engine.sock", lifeline) as inbox:
        yield Door(inbox, tmp_path / "engine.sock", parent)
    os.close(lifeline)


def test_requests_of_several_servers_come_with_their_connection(door: Door) -> None:
    with door.join() as one, door.join() as other:
        assert door.received(2) == [(1, Joined()), (2, Joined())]
        other.sendall(pack(Open("b", Prompt())))
        one.sendall(pack(Open("a", Prompt(text="hello"))))
        assert sorted(door.received(2)) == [(1, Open("a", Prompt(text="hello"))), (2, Open("b", Prompt()))]


def test_a_message_in_pieces_is_one_message_and_several_at_once_are_several(door: Door) -> None:
    with door.join() as peer:
        door.received(1)
        requests: list[Request] = [Open("a", Prompt(text="x" * 5000)), Close(Lease(0, 1))]
        stream = b"".join(map(pack, requests))
        peer.sendall(stream[:1000])
        assert door.inbox.poll(1.0) == []
        peer.sendall(stream[1000:])
        assert door.received(2) == [(1, request) for request in requests]


def test_a_server_that_closes_has_left(door: Door) -> None:
    with door.join():
        door.received(1)
    assert door.received(1) == [(1, Left())]


def test_what_was_said_before_leaving_is_still_received(door: Door) -> None:
    with door.join() as peer:
        peer.sendall(pack(Close(Lease(0, 1))))
    assert door.received(3) == [(1, Joined()), (1, Close(Lease(0, 1))), (1, Left())]


@pytest.mark.parametrize(
    "nonsense", [b"\xff\xff\xff\xff", b"\x05\x00\x00\x00hello", pack(Ready(Lease(0, 1), 0.1)), b"\x00\x00\x00\x00"]
)
def test_nonsense_ends_that_connection_and_no_other(door: Door, nonsense: bytes) -> None:
    with door.join() as bad, door.join() as good:
        door.received(2)
        bad.sendall(nonsense)
        assert door.received(1) == [(1, Left())]
        good.sendall(pack(Close(Lease(0, 1))))
        assert door.received(1) == [(2, Close(Lease(0, 1)))]


def test_events_reach_the_connection_they_are_for(door: Door) -> None:
    with door.join() as one, door.join() as other:
        door.received(2)
        events: list[Event] = [Leased("a", Lease(0, 1)), Ready(Lease(0, 1), 0.1)]
        for event in events:
            door.inbox.send(2, event)
        assert Unpacker(load).feed(other.recv(1 << 16)) == events
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)


def test_events_that_the_socket_does_not_take_at_once_are_sent_when_it_does(door: Door) -> None:
    with door.join() as peer:
        door.received(1)
        events: list[Event] = [Leased("x" * 1000, Lease(0, epoch)) for epoch in range(600)]
        for event in events:
            door.inbox.send(1, event)
        unpacker, got = Unpacker(load), list[Request | Event]()
        while len(got) < len(events):
            got += unpacker.feed(peer.recv(1 << 16))
            assert door.inbox.poll(0.0) == []
        assert got == events


def test_a_server_that_does_not_read_is_dropped_and_the_engine_never_blocks(door: Door) -> None:
    with door.join():
        door.received(1)
        for _ in range(2 * UNSENT_LIMIT // 10_000):
            door.inbox.send(1, Leased("x" * 10_000, Lease(0, 1)))
        assert door.received(1) == [(1, Left())]


def test_sending_to_a_server_that_has_just_gone_is_nothing(door: Door) -> None:
    with door.join():
        door.received(1)
    door.inbox.send(1, Ready(Lease(0, 1), 0.1))
    door.inbox.send(1, Ready(Lease(0, 1), 0.1))
    assert door.received(1) == [(1, Left())]


def test_the_inbox_is_closed_when_the_lifeline_is_cut(door: Door) -> None:
    assert not door.inbox.closed
    os.close(door.parent)
    door.inbox.poll(5.0)
    assert door.inbox.closed
