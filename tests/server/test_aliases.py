"""The API by the names that clients of Pipecat and FastRTC know."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.served import OFFER, Http, error_of, serving
from webrtc_duplex.settings import AccessSettings, Settings

CANDIDATE = "candidate:1 1 udp 2122260223 192.0.2.10 50000 typ host"


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Http]:
    async with serving(tmp_path) as http:
        yield http


# ---- Pipecat


async def pipecat_offer(http: Http, path: str = "/api/offer", **more: object) -> dict[str, str]:
    answer = await http.post(path, json={"sdp": OFFER, "type": "offer", **more})
    assert answer.status == 200, await answer.text()
    return dict(await answer.json())


async def test_pipecats_client_offers_trickles_and_resumes_by_its_pc_id(http: Http) -> None:
    first = await pipecat_offer(http)
    assert first["type"] == "answer"
    candidates = [{"candidate": CANDIDATE, "sdp_mid": "0", "sdp_mline_index": 0}, {"candidate": "", "sdp_mid": "0"}]
    trickled = await http.patch("/api/offer", json={"pc_id": first["pc_id"], "candidates": candidates})
    assert await trickled.json() == {"status": "success"}
    second = await pipecat_offer(http, pc_id=first["pc_id"], restart_pc=True)
    assert second["pc_id"] == first["pc_id"]
    assert second["sdp"] != first["sdp"]


async def test_the_id_of_a_call_without_its_secret_resumes_nothing(http: Http) -> None:
    first = await pipecat_offer(http)
    call_id = first["call_id"]
    again = await http.post("/api/offer", json={"sdp": OFFER, "type": "offer", "pc_id": call_id, "restart_pc": True})
    assert (await error_of(again))[0] == 401
    trickled = await http.patch("/api/offer", json={"pc_id": call_id, "candidates": []})
    assert (await error_of(trickled))[0] == 401


async def test_wishes_come_as_request_data(http: Http) -> None:
    answer = await pipecat_offer(http, requestData={"voice": "bob"})
    owner = {"Authorization": f"Bearer {answer['client_secret']['value']}"}  # type: ignore[index]
    shown = await (await http.get(f"/v1/realtime/calls/{answer['call_id']}", headers=owner)).json()
    assert shown["voice"] == "bob"


async def test_a_session_is_started_and_then_offered_to(http: Http) -> None:
    started = await (await http.post("/start", json={"body": {"voice": "bob"}})).json()
    assert started["iceConfig"] == {"iceServers": []}
    path = f"/sessions/{started['sessionId']}/api/offer"
    first = await pipecat_offer(http, path)
    assert (await http.patch(path, json={"pc_id": first["pc_id"], "candidates": []})).status == 200
    unknown = await http.post("/sessions/ek_unknown/api/offer", json={"sdp": OFFER, "type": "offer"})
    assert await error_of(unknown) == (404, "session_not_found", None)


async def test_starting_a_session_needs_a_key_where_calls_do(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=Settings(access=AccessSettings(api_keys=("alpha",)))) as http:
        assert (await http.post("/start", json={})).status == 401
        started = await (await http.post("/start", headers={"Authorization": "Bearer alpha"})).json()
        await pipecat_offer(http, f"/sessions/{started['sessionId']}/api/offer")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (400, "invalid_value", "pc_id")),
        ({"pc_id": 7}, (400, "invalid_value", "pc_id")),
        ({"pc_id": "nothing", "candidates": []}, (404, "call_not_found", None)),
    ],
)
async def test_candidates_for_no_call_are_refused(
    http: Http, body: dict[str, object], expected: tuple[int, str, str | None]
) -> None:
    assert await error_of(await http.patch("/api/offer", json=body)) == expected


async def test_candidates_are_a_list(http: Http) -> None:
    first = await pipecat_offer(http)
    answer = await http.patch("/api/offer", json={"pc_id": first["pc_id"], "candidates": "x"})
    assert await error_of(answer) == (400, "invalid_value", "candidates")


# ---- FastRTC


async def test_fastrtcs_client_offers_and_trickles_by_an_id_of_its_own(http: Http) -> None:
    offer = {"sdp": OFFER, "type": "offer", "webrtc_id": "abc"}
    answer = await http.post("/webrtc/offer", json=offer)
    assert (answer.status, (await answer.json())["type"]) == (200, "answer")
    candidate = {"candidate": {"candidate": CANDIDATE, "sdpMid": "0"}, "type": "ice-candidate", "webrtc_id": "abc"}
    assert await (await http.post("/webrtc/offer", json=candidate)).json() == {"status": "success"}
    assert await error_of(await http.post("/webrtc/offer", json=offer)) == (409, "call_conflict", "webrtc_id")
    unknown = await http.post("/webrtc/offer", json={**candidate, "webrtc_id": "other"})
    assert await error_of(unknown) == (404, "call_not_found", None)


async def test_a_webrtc_id_counts_only_from_where_it_came(tmp_path: Path) -> None:
    settings = Settings(access=AccessSettings(trust_proxy=True, insecure=True))
    async with serving(tmp_path, settings=settings) as http:
        mine, elsewhere = {"X-Forwarded-For": "192.0.2.1"}, {"X-Forwarded-For": "192.0.2.2"}
        offer = {"sdp": OFFER, "type": "offer", "webrtc_id": "abc"}
        assert (await http.post("/webrtc/offer", json=offer, headers=mine)).status == 200
        candidate = {"candidate": {"candidate": CANDIDATE}, "type": "ice-candidate", "webrtc_id": "abc"}
        assert (await http.post("/webrtc/offer", json=candidate, headers=elsewhere)).status == 404


async def test_a_webrtc_id_is_a_text(http: Http) -> None:
    for name in ("", 7, "x" * 300, None):
        answer = await http.post("/webrtc/offer", json={"sdp": OFFER, "type": "offer", "webrtc_id": name})
        assert await error_of(answer) == (400, "invalid_value", "webrtc_id")
