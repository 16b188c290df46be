"""The server as a replica: one streaming request of Serve's is one call, and one row."""

import asyncio
import ctypes
import ipaddress
import json
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from webrtc_duplex.errors import EngineError
from webrtc_duplex.server.signaling import CALLS_PATH, SECRET_HEADER
from webrtc_duplex.settings import ENVIRONMENT_PREFIX

SERVER_CODE = (
    "from webrtc_duplex.cluster.replica import die_with_parent; die_with_parent();"
    "from webrtc_duplex.__main__ import main; raise SystemExit(main(['serve']))"
)
START_S = 600.0
"""A large model takes minutes to load."""
LOOK_AGAIN_S = 0.5
PORT_TRIES = 20

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server has answered to a request."""

    status: int
    headers: Headers
    body: bytes


class Replica:
    """Starts `webrtc-duplex serve` as a process beside it, and holds one request open for each of its calls.

    So Serve's count of ongoing requests is the count of calls; capacity, placement, drain and scaling are Serve's.
    """

    def __init__(self, settings: Mapping[str, str], address: str, control_ports: str) -> None:
        self._settings = settings
        self._address = address
        self._control_ports = control_ports
        self._process: asyncio.subprocess.Process | None = None
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Start the server and wait until it takes calls. Raises EngineError if it ends instead."""
        port = free_port(self._address, self._control_ports)
        own = {"host": self._address, "port": str(port), "place": place_of(self._address, port)}
        own["drain_timeout_s"] = "0"  # it is Serve that drains: when it stops the server, time is up
        variables = {f"{ENVIRONMENT_PREFIX}{name.upper()}": value for name, value in {**self._settings, **own}.items()}
        environment = {**os.environ, **variables}  # not flags, which process lists show: there are keys among them
        self._process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER_CODE, env=environment)
        self._http = aiohttp.ClientSession(f"http://{self._address}:{port}")
        async with asyncio.timeout(START_S):
            while not await self._takes_calls():
                if self._process.returncode is not None:
                    raise EngineError(f"the server ended with {self._process.returncode}; its log says why")
                await asyncio.sleep(LOOK_AGAIN_S)

    async def stop(self) -> None:
        """End the server, and its calls, if any are left."""
        if self._http is not None:
            await self._http.close()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 10.0)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def is_healthy(self) -> bool:
        """Whether the server answers and has an engine.

        One that admits nobody now, as its steps are late, is healthy: to be replaced would cut its calls off.
        """
        _, rows = await self._readiness()
        return rows > 0

    async def _takes_calls(self) -> bool:
        ready, _ = await self._readiness()
        return ready

    async def _readiness(self) -> tuple[bool, int]:
        """Whether it takes calls, and how many rows its engine has; 0 where there is no engine, or no server."""
        assert self._http is not None
        try:
            async with self._http.get("/readyz") as answer:
                return answer.status == 200, int((await answer.json())["rows"])
        except aiohttp.ClientError:
            return False, 0

    async def call(self, method: str, path: str, headers: Headers, body: bytes) -> AsyncIterator[Answer]:
        """Yield the server's answer; if that is of a new call, end only with the call."""
        assert self._http is not None
        async with self._http.request(method, path, headers=headers, data=body) as response:
            answer = Answer(response.status, list(response.headers.items()), await response.read())
        yield answer
        if (opened := call_of(answer)) is not None:
            await self._until_over(*opened)

    async def _until_over(self, call_id: str, secret: str) -> None:
        """The call's events end when it does; whatever cuts them off, the call itself is looked at."""
        assert self._http is not None
        headers = {"Authorization": f"Bearer {secret}"}
        place = f"{CALLS_PATH}/{call_id}"
        while True:
            try:
                async with self._http.get(f"{place}/events", headers=headers, timeout=_FOR_EVER) as events:
                    async for _ in events.content.iter_any():
                        pass
                async with self._http.get(place, headers=headers) as shown:
                    if shown.status != 200 or (await shown.json())["state"] == "ended":
                        return
            except aiohttp.ClientError:
                if not await self.is_healthy():
                    return
            await asyncio.sleep(LOOK_AGAIN_S)


_FOR_EVER = aiohttp.ClientTimeout(total=None)


def call_of(answer: Answer) -> tuple[str, str] | None:
    """Id and secret of the call that an answer has opened; None for any other answer."""
    headers = {name.lower(): value for name, value in answer.headers}
    if answer.status not in (200, 201):
        return None
    if headers.get("content-type", "").startswith("application/json"):
        told = json.loads(answer.body)
        if isinstance(told, dict) and {"call_id", "client_secret"} <= told.keys():
            return str(told["call_id"]), str(told["client_secret"]["value"])
    elif "location" in headers and SECRET_HEADER.lower() in headers:
        return urlsplit(headers["location"]).path.rpartition("/")[2], headers[SECRET_HEADER.lower()]
    return None


def place_of(address: str, port: int) -> str:
    """The name of a server in the ids of its calls: where it is, so that nobody has to keep it."""
    return f"{int(ipaddress.IPv4Address(address)):08x}{port:04x}"


def url_of(place: str) -> str:
    """Where the server of this name is."""
    return f"http://{ipaddress.IPv4Address(int(place[:8], 16))}:{int(place[8:], 16)}"


def free_port(address: str, ports: str) -> int:
    """A port of the range `first-last` that nobody listens on. Raises EngineError."""
    first, _, last = ports.partition("-")
    for _ in range(PORT_TRIES):
        port = random.randint(int(first), int(last))
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise EngineError(f"no port of {ports} is free on {address}")


def die_with_parent() -> None:
    """End when the replica is killed: nobody else would end the server then."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        raise SystemExit(1)
