"""The caller against a real peer: aiortc answering, which plays a tone and greets over the data channel."""

import json
from collections.abc import AsyncIterator

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCRtpReceiver, RTCSessionDescription

from webrtc_duplex.client import call as caller
from webrtc_duplex.client.call import ReceivedSound, connect
from webrtc_duplex.client.microphone import Microphone
from webrtc_duplex.errors import AuthError, CapacityError, EngineError, RequestError


class Answerer:
    """Answers every offer with a tone; keeps what it was asked."""

    def __init__(self) -> None:
        self.wishes: dict[str, str] = {}
        self.deleted: list[str] = []
        self.refusal: web.Response | None = None
        self.peers: list[RTCPeerConnection] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/realtime/calls", self.answer)
        app.router.add_delete("/v1/realtime/calls/{id}", self.delete)
        return app

    async def answer(self, request: web.Request) -> web.Response:
        self.wishes = dict(request.query)
        if self.refusal is not None:
            return self.refusal
        pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.peers.append(pc)
        pc.on("datachannel", self.greet)
        microphone = Microphone()
        await microphone.say((8000 * np.sin(np.arange(24_000) * 0.1)).astype(np.int16))
        pc.addTrack(microphone)
        await pc.setRemoteDescription(RTCSessionDescription(await request.text(), "offer"))
        await pc.setLocalDescription(await pc.createAnswer())
        headers = {"Location": "/v1/realtime/calls/rtc_1", "X-Call-Secret": "cs_1"}
        return web.Response(status=201, text=pc.localDescription.sdp, headers=headers)

    def greet(self, channel: RTCDataChannel) -> None:
        channel.send(json.dumps({"type": "session.created"}))

    async def delete(self, request: web.Request) -> web.Response:
        self.deleted.append(f"{request.match_info['id']} by {request.headers['Authorization']}")
        return web.Response()

    async def close(self) -> None:
        for pc in self.peers:
            await pc.close()


@pytest.fixture
async def answerer() -> AsyncIterator[Answerer]:
    answerer = Answerer()
    yield answerer
    await answerer.close()


@pytest.fixture
async def url(answerer: Answerer) -> AsyncIterator[str]:
    async with TestServer(answerer.app()) as server:
        yield str(server.make_url(""))


async def test_a_caller_hears_the_agent_and_its_events(answerer: Answerer, url: str) -> None:
    async with connect(url, voice="NATF0", instructions="Be kind.", seed=7) as call:
        loud = [sound async for sound in _first(call.sound(), 20)]
        event = await anext(call.events())

    assert max(int(np.abs(sound.pcm).max()) for sound in loud) > 4000
    assert loud[1].timestamp - loud[0].timestamp == 960
    assert loud[1].at >= loud[0].at
    assert event.type == "session.created"
    assert call.join_s > 0
    assert answerer.wishes == {"voice": "NATF0", "instructions": "Be kind.", "seed": "7"}
    assert (call.id, answerer.deleted) == ("rtc_1", ["rtc_1 by Bearer cs_1"])


async def test_iteration_ends_with_the_call(answerer: Answerer, url: str) -> None:
    async with connect(url) as call:
        first = await anext(call.packets())
        await answerer.close()
        assert all([packet.sequence > first.sequence async for packet in call.packets()])
        assert [event.type async for event in call.events()] == ["session.created"]
        assert call.over.is_set()


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "unknown_voice", RequestError),
        (401, "invalid_api_key", AuthError),
        (503, "at_capacity", CapacityError),
        (503, "not_ready", EngineError),
    ],
)
async def test_a_refusal_is_raised_as_what_it_is(
    answerer: Answerer, url: str, status: int, code: str, error: type[Exception]
) -> None:
    body = {"error": {"type": "x", "code": code, "message": "No.", "param": "voice"}}
    answerer.refusal = web.json_response(body, status=status, headers={"Retry-After": "3"})

    with pytest.raises(error) as refusal:
        async with connect(url):
            pass

    assert refusal.type is error
    assert (refusal.value.args, getattr(refusal.value, "retry_after_s", None)) == (("No.",), 3.0)


async def test_the_private_names_of_aiortc_are_where_the_client_expects_them() -> None:
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    receiver: RTCRtpReceiver = pc.addTransceiver("audio").receiver
    assert hasattr(receiver, caller.JITTER_BUFFER)
    assert hasattr(receiver, caller.DECODER_QUEUE)
    assert hasattr(receiver.transport.transport._connection, caller.GATHER)


async def _first(items: AsyncIterator[ReceivedSound], count: int) -> AsyncIterator[ReceivedSound]:
    for _ in range(count):
        yield await anext(items)
