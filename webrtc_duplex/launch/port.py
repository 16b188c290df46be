"""The port that a server is to listen on, and what is said where nobody can."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from webrtc_duplex.errors import EngineError


def require_port(host: str, port: int) -> None:
    """Raises EngineError if nobody can listen there now: better said before a model is loaded than after."""
    with naming_port(host, port):
        for family, _, _, _, address in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM):
            with socket.create_server(address[:2], family=family):
                pass


@contextmanager
def naming_port(host: str, port: int) -> Iterator[None]:
    """Whatever the system says in this block against listening there becomes an EngineError."""
    try:
        yield
    except OSError as error:
        raise EngineError(f"cannot listen on {host}:{port}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    """What the system says; asyncio puts more before it, but a name that is not found has a number of its own kind."""
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    return os.strerror(error.errno or 0)
