"""The whole server in this process, with an echo engine in a thread, for tests that speak HTTP to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from aiortc import RTCConfiguration, RTCPeerConnection

from tests.engine_doubles import EchoDouble, engine_thread
from webrtc_duplex.server.app import make_app
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.settings import Settings

Http: TypeAlias = TestClient[web.Request, web.Application]

CALLS = "/v1/realtime/calls"
SDP = {"Content-Type": "application/sdp"}
CORPUS = Path(__file__).parent.parent / "sdp"


@asynccontextmanager
async def serving(folder: Path, rows: int = 2, settings: Settings | None = None) -> AsyncIterator[Http]:
    """An HTTP client of a server whose engine is ready."""
    with engine_thread(folder, EchoDouble(rows)) as socket:
        async with EngineClient(socket) as engine:
            await engine.wait_ready(30)
            async with TestClient(TestServer(make_app(settings or Settings(), engine))) as http:
                yield http


@asynccontextmanager
async def serving_without_engine(settings: Settings | None = None) -> AsyncIterator[Http]:
    app = make_app(settings or Settings(), EngineClient(Path("no-engine.sock")))
    async with TestClient(TestServer(app)) as http:
        yield http


def offer_file(name: str) -> str:
    """An offer of the corpus."""
    return (CORPUS / f"{name}.sdp").read_bytes().decode()


OFFER = offer_file("good/chromium_openai_sdk")


@dataclass(frozen=True, slots=True)
class Opened:
    """A call that was opened, and what proves that it is ours."""

    place: str
    etag: str
    headers: dict[str, str]

    @property
    def id(self) -> str:
        return self.place.rpartition("/")[2]


async def open_call(http: Http, key: str | None = None, **query: str) -> Opened:
    """Open a call with an offer that never connects."""
    headers = {**SDP, **({"Authorization": f"Bearer {key}"} if key else {})}
    answer = await http.post(CALLS, params=query, data=OFFER, headers=headers)
    assert answer.status == 201, await answer.text()
    owner = {"Authorization": f"Bearer {answer.headers['X-Call-Secret']}"}
    return Opened(answer.headers["Location"], answer.headers["ETag"], owner)


async def error_of(answer: ClientResponse) -> tuple[int, str, str | None]:
    """Status, code and param of a refusal, whose body is as promised."""
    error = (await answer.json())["error"]
    assert set(error) == {"type", "code", "message", "param"}
    return answer.status, error["code"], error["param"]


async def offer_of(pc: RTCPeerConnection) -> str:
    """An offer of a real peer, all candidates in it."""
    pc.addTransceiver("audio")
    await pc.setLocalDescription(await pc.createOffer())
    return pc.localDescription.sdp


@asynccontextmanager
async def peer() -> AsyncIterator[RTCPeerConnection]:
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    try:
        yield pc
    finally:
        await pc.close()
