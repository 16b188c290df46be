"""The rest of the HTTP API: WHIP, trickle, client secrets, ICE servers, other origins, the operator."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiortc import RTCSessionDescription

from tests.server.served import (
    CALLS,
    OFFER,
    SDP,
    Http,
    Opened,
    error_of,
    offer_file,
    offer_of,
    open_call,
    peer,
    serving,
)
from webrtc_duplex.server.app import DESK
from webrtc_duplex.settings import AccessSettings, IceSettings, ServerSettings, Settings

FRAGMENT = {"Content-Type": "application/trickle-ice-sdpfrag"}
CANDIDATE = "a=mid:0\r\na=candidate:1 1 udp 2122260223 192.0.2.10 50000 typ host\r\n"
KEYED = Settings(access=AccessSettings(api_keys=("alpha", "beta"), operator_key="omega"))


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Http]:
    async with serving(tmp_path) as http:
        yield http


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Http]:
    async with serving(tmp_path, settings=KEYED) as http:
        yield http


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# ---- WHIP


async def test_a_whip_client_gets_the_address_of_its_session_and_ends_it_there(http: Http) -> None:
    answer = await http.post("/whip", data=offer_file("good/chromium_whip_sendonly"), headers=SDP)
    assert (answer.status, answer.content_type) == (201, "application/sdp")
    assert "a=recvonly" in await answer.text()
    assert "not hear" in answer.headers["Warning"]
    place = answer.headers["Location"]
    assert place.startswith("/whip/rtc_")
    trickled = await http.patch(place, data=CANDIDATE, headers={**FRAGMENT, "If-Match": answer.headers["ETag"]})
    assert trickled.status == 204
    assert (await http.delete(place)).status == 200
    assert (await http.delete(place.partition("?")[0])).status == 401


async def test_whip_says_what_it_takes(http: Http) -> None:
    described = await http.options("/whip")
    assert (described.status, described.headers["Accept-Post"]) == (200, "application/sdp")
    for method in ("GET", "PUT"):
        answer = await http.request(method, "/whip")
        assert await error_of(answer) == (405, "method_not_allowed", None)
        assert answer.headers["Allow"] == "OPTIONS, POST"
    answer = await http.post("/whip", json={"type": "offer", "sdp": OFFER})
    assert await error_of(answer) == (415, "unsupported_media_type", None)


async def test_who_only_listens_is_refused(http: Http) -> None:
    answer = await http.post("/whip", data=offer_file("refused/no_audio.whep_recvonly"), headers=SDP)
    assert await error_of(answer) == (422, "no_audio", "sdp")


# ---- trickle


async def test_candidates_trickle_in_under_the_etag_of_their_ice_session(http: Http) -> None:
    call = await open_call(http)
    answer = await http.patch(call.place, data=CANDIDATE, headers={**FRAGMENT, **call.headers, "If-Match": call.etag})
    assert (answer.status, answer.headers["ETag"]) == (204, call.etag)


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, CANDIDATE, (428, "precondition_required", None)),
        ({"If-Match": '"stale"'}, CANDIDATE, (412, "precondition_failed", None)),
        ({"If-Match": "*"}, "a=ice-ufrag:another\r\n" + CANDIDATE, (422, "ice_restart_unsupported", None)),
        ({"If-Match": "*"}, "nonsense", (400, "invalid_sdp", "sdp")),
        ({"If-Match": "*"}, "", (400, "invalid_sdp", "sdp")),
        ({"If-Match": "*", "Content-Type": "text/plain"}, CANDIDATE, (415, "unsupported_media_type", None)),
        ({"If-Match": "*"}, "a=x\r\n" * 20_000, (413, "payload_too_large", None)),
    ],
)
async def test_a_fragment_that_does_not_fit_is_refused(
    http: Http, headers: dict[str, str], body: str, expected: tuple[int, str, str | None]
) -> None:
    call = await open_call(http)
    answer = await http.patch(call.place, data=body, headers={**FRAGMENT, **call.headers, **headers})
    assert await error_of(answer) == expected
    if expected[0] in (412, 428):
        assert answer.headers["ETag"] == call.etag


async def test_a_call_connects_by_trickled_candidates_alone(http: Http) -> None:
    async with peer() as pc:
        connected = asyncio.Event()
        pc.on("connectionstatechange", lambda: connected.set() if pc.connectionState == "connected" else None)
        offer = await offer_of(pc)
        bare = "".join(line for line in offer.splitlines(keepends=True) if "candidate" not in line)
        answer = await http.post(CALLS, data=bare, headers=SDP)
        remote = "".join(line for line in (await answer.text()).splitlines(keepends=True) if "candidate" not in line)
        await pc.setRemoteDescription(RTCSessionDescription(remote, "answer"))
        lines = [line for line in offer.splitlines() if line.startswith("a=candidate")]
        headers = {**FRAGMENT, **bearer(answer.headers["X-Call-Secret"]), "If-Match": answer.headers["ETag"]}
        fragment = "\r\n".join(["m=audio 9 UDP/TLS/RTP/SAVPF 0", "a=mid:0", *lines, "a=end-of-candidates", ""])
        assert (await http.patch(answer.headers["Location"], data=fragment, headers=headers)).status == 204
        await asyncio.wait_for(connected.wait(), 10)


# ---- resuming


async def test_a_call_goes_on_with_a_new_offer_of_its_owner(http: Http) -> None:
    call = await open_call(http)
    again = await http.post(call.place, data=OFFER, headers={**SDP, **call.headers})
    assert (again.status, again.content_type) == (200, "application/sdp")
    assert again.headers["ETag"] != call.etag
    body = {"type": "offer", "sdp": OFFER, "pc_id": call.id, "restart_pc": True}
    once_more = await http.post(CALLS, json=body, headers=call.headers)
    assert (once_more.status, (await once_more.json())["call_id"]) == (201, call.id)


async def test_a_call_is_not_resumed_by_others(http: Http) -> None:
    mine, other = await open_call(http), await open_call(http)
    body = {"type": "offer", "sdp": OFFER, "pc_id": mine.id, "restart_pc": True}
    assert await error_of(await http.post(CALLS, json=body)) == (401, "invalid_api_key", None)
    assert await error_of(await http.post(CALLS, json=body, headers=other.headers)) == (403, "forbidden", None)
    await http.delete(mine.place, headers=mine.headers)
    assert await error_of(await http.post(CALLS, json=body, headers=mine.headers)) == (404, "call_not_found", None)


# ---- waiting in line, recording


async def state_of(http: Http, call: Opened) -> str:
    return str((await (await http.get(call.place, headers=call.headers)).json())["state"])


async def test_who_waits_in_line_gets_the_next_free_row(http: Http) -> None:
    calls = [await open_call(http) for _ in range(2)]
    async with peer() as pc:
        answer = await http.post(CALLS, params={"queue": "30"}, data=await offer_of(pc), headers=SDP)
        await pc.setRemoteDescription(RTCSessionDescription(await answer.text(), "answer"))
        waiting = Opened(answer.headers["Location"], "", bearer(answer.headers["X-Call-Secret"]))
        assert await state_of(http, waiting) == "queued"
        await http.delete(calls[0].place, headers=calls[0].headers)
        while await state_of(http, waiting) == "queued":
            await asyncio.sleep(0.02)
        assert await state_of(http, waiting) in ("connecting", "live")


@pytest.mark.parametrize("seconds", ["-1", "1e9", "nan", "soon"])
async def test_nobody_waits_for_ever(http: Http, seconds: str) -> None:
    answer = await http.post(CALLS, params={"queue": seconds}, data=OFFER, headers=SDP)
    assert await error_of(answer) == (400, "invalid_value", "queue")


async def test_the_model_says_whether_calls_are_recorded_on_request(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=Settings(server=ServerSettings(recordings=tmp_path / "kept"))) as http:
        assert (await (await http.get("/v1/models")).json())["data"][0]["recording"] is True


async def test_a_recording_is_refused_where_there_is_no_place_for_it(http: Http) -> None:
    answer = await http.post(CALLS, params={"record": "true"}, data=OFFER, headers=SDP)
    status, code, _ = await error_of(answer)
    assert (400 <= status < 500, code) == (True, "recording_disabled")


# ---- keys and secrets


async def test_with_keys_only_their_holders_call(keyed: Http) -> None:
    assert await error_of(await keyed.post(CALLS, data="garbage", headers=SDP)) == (401, "invalid_api_key", None)
    wrong = await keyed.post(CALLS, data=OFFER, headers={**SDP, **bearer("gamma")})
    assert (wrong.status, wrong.headers["WWW-Authenticate"]) == (401, "Bearer")
    await open_call(keyed, "alpha")


async def test_the_key_that_opened_a_call_owns_it_and_another_does_not(keyed: Http) -> None:
    call = await open_call(keyed, "alpha")
    assert (await keyed.get(call.place, headers=bearer("alpha"))).status == 200
    assert await error_of(await keyed.get(call.place, headers=bearer("beta"))) == (403, "forbidden", None)
    assert (await keyed.delete(call.place, headers=call.headers)).status == 200


async def secret_of(http: Http, key: str, session: dict[str, object]) -> str:
    answer = await http.post("/v1/realtime/client_secrets", json={"session": session}, headers=bearer(key))
    assert answer.status == 200, await answer.text()
    return str((await answer.json())["value"])


async def test_a_client_secret_opens_calls_with_its_session(keyed: Http) -> None:
    session = {"type": "realtime", "model": "gpt-realtime", "audio": {"output": {"voice": "bob"}}}
    answer = await keyed.post("/v1/realtime/client_secrets", json={"session": session}, headers=bearer("alpha"))
    body = await answer.json()
    assert body["value"].startswith("ek_")
    assert body["session"]["audio"]["output"]["voice"] == "bob"
    call = await open_call(keyed, body["value"])
    shown = await (await keyed.get(call.place, headers=bearer(body["value"]))).json()
    assert shown["voice"] == "bob"


async def test_a_secret_of_one_voice_opens_no_other(keyed: Http) -> None:
    secret = await secret_of(keyed, "alpha", {"voice": "bob"})
    headers = {**SDP, **bearer(secret)}
    other = await keyed.post(CALLS, params={"voice": "ann"}, data=OFFER, headers=headers)
    assert await error_of(other) == (403, "forbidden", "session.audio.output.voice")
    assert (await keyed.post(CALLS, params={"voice": "bob"}, data=OFFER, headers=headers)).status == 201


async def test_a_secret_issues_no_secret(keyed: Http) -> None:
    secret = await secret_of(keyed, "alpha", {})
    answer = await keyed.post("/v1/realtime/client_secrets", json={}, headers=bearer(secret))
    assert await error_of(answer) == (403, "forbidden", None)


async def test_an_unknown_secret_has_expired(keyed: Http) -> None:
    answer = await keyed.post(CALLS, data=OFFER, headers={**SDP, **bearer("ek_nothing")})
    assert await error_of(answer) == (401, "expired_client_secret", None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"session": {"voice": "eve"}}, (400, "unknown_voice", "session.audio.output.voice")),
        ({"session": []}, (400, "invalid_json", "session")),
        ({"expires_after": {"seconds": 5}}, (400, "invalid_value", "expires_after.seconds")),
        ({"expires_after": {"seconds": True}}, (400, "invalid_value", "expires_after.seconds")),
        ({"expires_after": 7}, (400, "invalid_json", "expires_after")),
    ],
)
async def test_a_secret_that_could_open_nothing_is_not_issued(
    keyed: Http, body: dict[str, object], expected: tuple[int, str, str | None]
) -> None:
    answer = await keyed.post("/v1/realtime/client_secrets", json=body, headers=bearer("alpha"))
    assert await error_of(answer) == expected


async def test_the_older_form_of_a_session_holds_a_secret_too(http: Http) -> None:
    answer = await http.post("/v1/realtime/sessions", json={"model": "gpt-4o-realtime-preview", "voice": "bob"})
    body = await answer.json()
    assert body["client_secret"]["value"].startswith("ek_")
    assert body["model"] == "double"
    beta = await http.post("/v1/realtime", params={"model": "gpt-4o-realtime-preview"}, data=OFFER, headers=SDP)
    assert beta.status == 201


async def test_who_has_as_many_calls_as_one_may_have_is_told_so(tmp_path: Path) -> None:
    access = replace(KEYED.access, max_calls_per_key=1)
    async with serving(tmp_path, settings=Settings(access=access)) as http:
        call = await open_call(http, "alpha")
        second = await http.post(CALLS, data=OFFER, headers={**SDP, **bearer("alpha")})
        assert await error_of(second) == (429, "rate_limit_exceeded", None)
        assert int(second.headers["Retry-After"]) >= 1
        await open_call(http, "beta")
        await http.delete(call.place, headers=call.headers)
        await open_call(http, "alpha")


async def test_a_stranger_cannot_fill_the_house_with_offers(tmp_path: Path) -> None:
    access = AccessSettings(insecure=True, trust_proxy=True, max_connecting_per_address=1)
    async with serving(tmp_path, rows=3, settings=Settings(access=access)) as http:
        stranger, local = {"X-Forwarded-For": "192.0.2.1"}, {"X-Forwarded-For": "127.0.0.1"}
        assert (await http.post(CALLS, data=OFFER, headers={**SDP, **stranger})).status == 201
        second = await http.post(CALLS, data=OFFER, headers={**SDP, **stranger})
        assert await error_of(second) == (429, "rate_limit_exceeded", None)
        for _ in range(2):
            assert (await http.post(CALLS, data=OFFER, headers={**SDP, **local})).status == 201


# ---- ICE servers


async def test_without_ice_servers_the_list_is_empty(http: Http) -> None:
    assert (await (await http.get("/v1/realtime/ice-servers")).json())["iceServers"] == []


async def test_turn_credentials_expire_and_are_what_coturn_checks(tmp_path: Path) -> None:
    ice = IceSettings(
        stun_urls=("stun:stun.example:3478",), turn_urls=("turn:turn.example:3478",), turn_secret="shared secret"
    )
    async with serving(tmp_path, settings=replace(KEYED, ice=ice)) as http:
        assert (await http.get("/v1/realtime/ice-servers")).status == 401
        stun, turn = (await (await http.get("/v1/realtime/ice-servers", headers=bearer("alpha"))).json())["iceServers"]
        assert stun == {"urls": ["stun:stun.example:3478"]}
        expected = hmac.digest(b"shared secret", turn["username"].encode(), hashlib.sha1)
        assert turn["credential"] == base64.b64encode(expected).decode()
        answer = await http.post(CALLS, data=OFFER, headers={**SDP, **bearer("alpha")})
        links = answer.headers.getall("Link")
        assert links[0] == '<stun:stun.example:3478>; rel="ice-server"'
        assert 'credential-type="password"' in links[1]


# ---- pages of other origins


async def test_a_page_of_this_machine_may_call_and_read_the_headers(http: Http) -> None:
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization, content-type, x-openai-agents-sdk"
    preflight = await http.options(CALLS, headers=headers)
    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"
    assert "x-openai-agents-sdk" in preflight.headers["Access-Control-Allow-Headers"]

    answer = await http.post(CALLS, data=OFFER, headers={**SDP, "Origin": "http://localhost:3000"})
    exposed = answer.headers["Access-Control-Expose-Headers"]
    assert all(name in exposed for name in ("Location", "ETag", "Link", "Retry-After"))


async def test_a_page_of_elsewhere_may_not(http: Http) -> None:
    evil = {"Origin": "https://evil.example"}
    preflight = await http.options(CALLS, headers={**evil, "Access-Control-Request-Method": "POST"})
    assert await error_of(preflight) == (403, "forbidden", None)
    answer = await http.post(CALLS, data=OFFER, headers={**SDP, **evil})
    assert await error_of(answer) == (403, "forbidden", None)
    assert "Access-Control-Allow-Origin" not in answer.headers


async def test_refusals_are_shared_with_other_origins_too(http: Http) -> None:
    answer = await http.post(CALLS, data="x", headers={**SDP, "Origin": "http://localhost:3000"})
    assert answer.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"


# ---- the operator


async def test_the_operator_sees_all_calls_and_counts(keyed: Http) -> None:
    call = await open_call(keyed, "alpha")
    await keyed.post(CALLS, data="x", headers={**SDP, **bearer("alpha")})
    listed = await (await keyed.get(CALLS, headers=bearer("omega"))).json()
    assert [shown["id"] for shown in listed["data"]] == [call.id]
    counted = await (await keyed.get("/metrics", headers=bearer("omega"))).text()
    assert 'webrtc_duplex_refusals_total{code="invalid_sdp"} 1.0' in counted
    for path in (CALLS, "/metrics"):
        assert (await keyed.get(path, headers=bearer("alpha"))).status == 401


async def test_prompts_stay_out_of_the_log(http: Http, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="webrtc_duplex"):
        call = await open_call(http, instructions="Never tell anybody.")
        await http.delete(call.place, headers=call.headers)
    assert "Never tell" not in caplog.text
    assert json.dumps("Never tell") not in caplog.text


async def test_a_server_that_drains_takes_no_more_calls(http: Http) -> None:
    desk = http.app[DESK]
    call = await open_call(http)
    draining = asyncio.create_task(desk.drain(30))
    await asyncio.sleep(0)
    answer = await http.post(CALLS, data=OFFER, headers=SDP)
    assert await error_of(answer) == (503, "draining", None)
    assert 25 <= int(answer.headers["Retry-After"]) <= 30
    assert (await (await http.get("/readyz")).json())["reason"] == "the server is draining"
    assert not draining.done()
    await http.delete(call.place, headers=call.headers)
    await draining
