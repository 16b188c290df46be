"""The HTTP API of calls, spoken to over HTTP, with an echo engine behind it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request
from aiortc import RTCSessionDescription
from aiortc.mediastreams import AudioStreamTrack
from hypothesis import given
from hypothesis import strategies as st

from tests.server.served import (
    CALLS,
    OFFER,
    SDP,
    Http,
    error_of,
    offer_file,
    offer_of,
    open_call,
    peer,
    serving,
    serving_without_engine,
)
from webrtc_duplex.errors import RequestError
from webrtc_duplex.server import reading
from webrtc_duplex.server.reading import JSON_BYTES, SDP_BYTES, parse_form, parse_json, read_body, read_query


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Http]:
    async with serving(tmp_path) as http:
        yield http


# ---- ways in


async def test_an_offer_as_sdp_is_answered_201_with_its_location(http: Http) -> None:
    answer = await http.post(CALLS, data=OFFER, headers=SDP)
    assert answer.status == 201
    assert answer.content_type == "application/sdp"
    assert answer.headers["Location"].startswith(f"{CALLS}/rtc_")
    assert answer.headers["ETag"].startswith('"')
    assert "useinbandfec=1" in await answer.text()


async def test_an_offer_as_json_is_answered_in_json(http: Http) -> None:
    answer = await http.post(CALLS, json={"type": "offer", "sdp": OFFER})
    body = await answer.json()
    assert answer.status == 201
    assert body["type"] == "answer"
    assert body["sdp"].startswith("v=0")
    assert answer.headers["Location"].endswith(body["call_id"])
    assert body["pc_id"] == f"{body['call_id']}.{body['client_secret']['value']}"
    assert answer.headers["X-Call-Secret"] == body["client_secret"]["value"]


async def test_who_cannot_offer_gets_an_offer_and_answers_it(http: Http) -> None:
    opened = await http.post(CALLS, json={"type": "request-offer"})
    ours = await opened.json()
    assert (opened.status, ours["type"]) == (201, "offer")
    assert {"opus/48000/2", "G722/8000", "PCMU/8000", "PCMA/8000", "telephone-event/8000"} <= codecs_of(ours["sdp"])
    place, proof = opened.headers["Location"], {"Authorization": f"Bearer {ours['client_secret']['value']}"}
    async with peer() as caller:
        caller.addTrack(AudioStreamTrack())
        await caller.setRemoteDescription(RTCSessionDescription(ours["sdp"], "offer"))
        await caller.setLocalDescription()
        answer = {"type": "answer", "sdp": caller.localDescription.sdp}
        assert (await http.post(place, json={**answer, "type": "offer"}, headers=proof)).status == 400
        answered = await http.post(place, json=answer, headers=proof)
        assert (answered.status, (await answered.json())["id"]) == (200, ours["call_id"])
        while (await (await http.get(place, headers=proof)).json())["state"] != "live":
            await asyncio.sleep(0.05)
        assert (await http.post(place, json=answer, headers=proof)).status == 400  # it has been answered


async def test_an_answer_without_sound_is_refused_and_the_call_can_be_ended(http: Http) -> None:
    opened = await http.post(CALLS, json={"type": "request-offer"})
    proof = {"Authorization": f"Bearer {opened.headers['X-Call-Secret']}"}
    answered = await http.post(opened.headers["Location"], json={"type": "answer", "sdp": "v=0"}, headers=proof)
    assert await error_of(answered) == (422, "no_audio", "sdp")
    assert (await http.delete(opened.headers["Location"], headers=proof)).status == 200


def codecs_of(description: str) -> set[str]:
    return {line.split(" ", 1)[1] for line in description.splitlines() if line.startswith("a=rtpmap:")}


async def test_an_offer_as_a_form_is_answered_as_sdp(http: Http) -> None:
    form = aiohttp.FormData()
    form.add_field("sdp", OFFER, content_type="application/sdp")
    session = {"type": "realtime", "model": "gpt-realtime", "audio": {"output": {"voice": "bob"}}}
    form.add_field("session", json.dumps(session), content_type="application/json")
    answer = await http.post(CALLS, data=form)
    assert (answer.status, answer.content_type) == (201, "application/sdp")
    assert await voice_of(http, answer) == "bob"


async def voice_of(http: Http, answer: aiohttp.ClientResponse) -> str:
    owner = {"Authorization": f"Bearer {answer.headers['X-Call-Secret']}"}
    return str((await (await http.get(answer.headers["Location"], headers=owner)).json())["voice"])


async def test_the_plain_offer_path_answers_200(http: Http) -> None:
    answer = await http.post("/offer", json={"type": "offer", "sdp": OFFER})
    assert answer.status == 200
    assert (await answer.json())["type"] == "answer"


async def test_wishes_come_by_query_too(http: Http) -> None:
    query = {"voice": "bob", "text_prompt": "Be kind.", "seed": "7", "model": "double"}
    answer = await http.post(CALLS, params=query, data=OFFER, headers=SDP)
    assert await voice_of(http, answer) == "bob"


def test_a_query_stands_for_a_session_object() -> None:
    query = {"voice": "bob", "text_prompt": "old", "instructions": "new", "seed": "7", "text_temperature": "0.5"}
    assert read_query(query) == {"voice": "bob", "instructions": "new", "seed": 7, "text_temperature": 0.5}


async def test_a_real_peer_connects(http: Http) -> None:
    async with peer() as pc:
        connected = asyncio.Event()
        pc.on("connectionstatechange", lambda: connected.set() if pc.connectionState == "connected" else None)
        answer = await http.post(CALLS, data=await offer_of(pc), headers=SDP)
        await pc.setRemoteDescription(RTCSessionDescription(await answer.text(), "answer"))
        await asyncio.wait_for(connected.wait(), 10)


# ---- the life of a call


async def test_a_call_is_shown_until_it_is_ended_and_for_a_minute_after(http: Http) -> None:
    call = await open_call(http)
    shown = await http.get(call.place, headers=call.headers)
    assert shown.headers["ETag"] == call.etag
    body = await shown.json()
    assert (body["id"], body["object"], body["state"]) == (call.id, "realtime.call", "connecting")

    ended = await http.delete(call.place, headers=call.headers)
    assert (ended.status, (await ended.json())["state"]) == (200, "ended")
    assert (await http.delete(call.place, headers=call.headers)).status == 200
    assert (await http.post(f"{call.place}/hangup", headers=call.headers)).status == 200
    assert (await (await http.get(call.place, headers=call.headers)).json())["ended_because"] == "hangup"


async def test_an_unknown_call_is_not_found(http: Http) -> None:
    for answer in (await http.get(f"{CALLS}/rtc_no"), await http.delete(f"{CALLS}/rtc_no")):
        assert await error_of(answer) == (404, "call_not_found", None)


async def test_a_call_is_nobodys_but_its_owners(http: Http) -> None:
    mine, other = await open_call(http), await open_call(http)
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/hangup"),
        ("PATCH", ""),
        ("POST", ""),
        ("GET", "/events"),
    ):
        assert await error_of(await http.request(method, mine.place + path)) == (401, "invalid_api_key", None)
        others = await http.request(method, mine.place + path, headers=other.headers)
        assert await error_of(others) == (403, "forbidden", None)
    assert (await http.get(mine.place, headers=mine.headers)).status == 200


async def test_a_full_house_is_an_honest_503_and_a_free_row_is_taken_again(http: Http) -> None:
    calls = [await open_call(http) for _ in range(2)]
    full = await http.post(CALLS, data=OFFER, headers=SDP)
    assert await error_of(full) == (503, "at_capacity", None)
    assert int(full.headers["Retry-After"]) >= 1
    assert full.headers["X-Capacity-Limit"] == "2"

    await http.delete(calls[0].place, headers=calls[0].headers)
    await open_call(http)


# ---- refusals


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("invalid_sdp.garbage", 400, "invalid_sdp"),
        ("no_audio.data_channel_only", 422, "no_audio"),
        ("no_common_codec.only_g729", 422, "no_common_codec"),
        ("ice_required.plain_sip_phone", 422, "ice_required"),
        ("dtls_required.no_fingerprint", 422, "dtls_required"),
        ("rtcp_mux_required.no_mux", 422, "rtcp_mux_required"),
    ],
)
async def test_an_unusable_offer_is_refused(http: Http, name: str, status: int, code: str) -> None:
    answer = await http.post(CALLS, data=offer_file(f"refused/{name}"), headers=SDP)
    assert await error_of(answer) == (status, code, "sdp")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("not json", (400, "invalid_json", None)),
        ("[]", (400, "invalid_json", None)),
        ('{"type": NaN}', (400, "invalid_json", None)),
        ("[" * 100_000, (400, "invalid_json", None)),
        ({"type": "answer", "sdp": OFFER}, (400, "invalid_sdp_type", "type")),
        ({"sdp": OFFER}, (400, "invalid_sdp_type", "type")),
        ({"type": "offer"}, (400, "invalid_sdp", "sdp")),
        ({"type": "offer", "sdp": 7}, (400, "invalid_sdp", "sdp")),
        ({"type": "offer", "sdp": "\ud800"}, (400, "invalid_sdp", "sdp")),
        ({"type": "offer", "sdp": OFFER, "session": []}, (400, "invalid_json", "session")),
        (
            {"type": "offer", "sdp": OFFER, "session": {"voice": "eve"}},
            (400, "unknown_voice", "session.audio.output.voice"),
        ),
        (
            {"type": "offer", "sdp": OFFER, "session": {"instructions": "x" * 101}},
            (400, "string_above_max_length", "session.instructions"),
        ),
        ({"type": "offer", "sdp": OFFER, "session": {"seed": -1}}, (400, "invalid_value", "session.seed")),
        ({"type": "offer", "sdp": OFFER, "session": {"model": "other"}}, (404, "model_not_found", "model")),
    ],
)
async def test_an_unusable_body_is_refused(http: Http, body: object, expected: tuple[int, str, str | None]) -> None:
    data = body if isinstance(body, str) else json.dumps(body)
    answer = await http.post(CALLS, data=data, headers={"Content-Type": "application/json"})
    assert await error_of(answer) == expected


@pytest.mark.parametrize("query", [{"seed": "x"}, {"seed": "1e3"}, {"text_temperature": "warm"}])
async def test_a_query_that_is_no_number_is_refused(http: Http, query: dict[str, str]) -> None:
    answer = await http.post(CALLS, params=query, data=OFFER, headers=SDP)
    assert await error_of(answer) == (400, "invalid_value", next(iter(query)))


async def test_another_content_type_is_told_which_ones_are_taken(http: Http) -> None:
    answer = await http.post(CALLS, data="x", headers={"Content-Type": "text/plain"})
    assert await error_of(answer) == (415, "unsupported_media_type", None)
    assert answer.headers["Accept-Post"] == "application/sdp"
    assert await error_of(await http.post("/offer", data=OFFER, headers=SDP)) == (415, "unsupported_media_type", None)


@pytest.mark.parametrize(("kind", "limit"), [("application/sdp", SDP_BYTES), ("application/json", JSON_BYTES)])
async def test_too_large_a_body_is_refused_whether_it_says_its_length_or_not(http: Http, kind: str, limit: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(limit // 1024 + 1):
            yield b"x" * 1024

    for data in (b"x" * (limit + 1), pieces()):
        answer = await http.post(CALLS, data=data, headers={"Content-Type": kind})
        assert await error_of(answer) == (413, "payload_too_large", None)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"no boundary"),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data; name=session\r\n\r\n{}\r\n--b--"),
        ("multipart/form-data; boundary=b", b"--b\r\nbroken header\r\n\r\n"),
        ("multipart/form-data; boundary=b", b"--b\r\nno empty line\r\n--b--"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name=""\r\n\r\n' * 17 + b"--b--"),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data; name=sdp\r\n\r\nv=0"),
    ],
)
async def test_a_broken_form_is_refused(http: Http, kind: str, body: bytes) -> None:
    answer = await http.post(CALLS, data=body, headers={"Content-Type": kind})
    status, code, _ = await error_of(answer)
    assert (status, code) in ((400, "invalid_multipart"), (400, "invalid_sdp"))


def test_a_form_in_a_form_is_not_opened() -> None:
    inner = "".join(f"--c{n}\r\nContent-Type: multipart/mixed; boundary=c{n + 1}\r\n\r\n" for n in range(2000))
    body = f'--b\r\nContent-Disposition: form-data; name="sdp"\r\n\r\n{inner}\r\n--b--\r\n'
    assert parse_form('multipart/form-data; charset=x; Boundary="b"', body.encode()) == {"sdp": inner.encode()}


async def test_who_leaves_in_the_middle_of_a_body_is_no_fault_of_ours() -> None:
    body = aiohttp.StreamReader(BaseProtocol(asyncio.get_running_loop()), limit=SDP_BYTES)
    body.set_exception(ConnectionResetError("Connection lost"))
    with pytest.raises(RequestError, match="cannot be read"):
        await read_body(make_mocked_request("POST", CALLS, payload=body), SDP_BYTES)


async def test_a_body_that_does_not_come_is_not_waited_for(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BODY_S", 0)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"v=0"
        await asyncio.Event().wait()

    async with http.post(CALLS, data=pieces(), headers=SDP) as answer:
        assert await error_of(answer) == (408, "request_timeout", None)


async def test_too_large_a_form_is_refused(http: Http) -> None:
    form = aiohttp.FormData()
    for i in range(5):
        form.add_field(f"part{i}", "x" * 60_000, content_type="text/plain")
    assert await error_of(await http.post(CALLS, data=form)) == (413, "payload_too_large", None)


async def test_without_an_engine_a_call_is_refused_before_its_body_is_looked_at() -> None:
    async with serving_without_engine() as http:
        answer = await http.post(CALLS, data="garbage", headers=SDP)
        assert await error_of(answer) == (503, "not_ready", None)
        assert answer.headers["Connection"] == "close"
        assert int(answer.headers["Retry-After"]) >= 1


async def test_a_refused_offer_leaves_every_row_free(http: Http) -> None:
    for name in ("invalid_sdp.garbage", "no_audio.inactive", "dtls_required.no_fingerprint") * 3:
        assert (await http.post(CALLS, data=offer_file(f"refused/{name}"), headers=SDP)).status in (400, 422)
    for _ in range(2):
        assert (await http.post(CALLS, data=OFFER, headers=SDP)).status == 201


@given(st.binary(max_size=200), st.text(max_size=40))
def test_any_bytes_are_a_form_or_refused(body: bytes, boundary: str) -> None:
    for start in (b"", f"--{boundary}\r\nContent-Disposition: form-data; name=".encode(errors="replace")):
        try:
            parse_form(f"multipart/form-data; boundary={boundary}", start + body)
        except RequestError as refusal:
            assert refusal.code == "invalid_multipart"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_json_object_or_refused(body: bytes) -> None:
    try:
        assert isinstance(parse_json(body), dict)
    except RequestError as refusal:
        assert refusal.code == "invalid_json"


# ---- the model


async def test_models_and_voices_are_listed(http: Http) -> None:
    models = await (await http.get("/v1/models")).json()
    assert models["data"][0] == {
        "id": "double",
        "object": "model",
        "created": 0,
        "owned_by": "webrtc-duplex",
        "takes_text": True,
        "max_text_chars": 100,
        "recording": False,
    }
    voices = await (await http.get("/v1/voices")).json()
    assert [voice["id"] for voice in voices["data"]] == ["ann", "bob"]
    assert voices["default"] == "ann"
