"""Offers as clients really write them, as files in tests/sdp; those in `refused` begin with the code of the refusal."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.sdp import SessionDescription
from hypothesis import given, settings
from hypothesis import strategies as st

from webrtc_duplex.errors import RequestError
from webrtc_duplex.server.sdp import (
    MAX_CANDIDATE_LINES,
    MAX_CANDIDATES,
    Candidate,
    Description,
    finish_answer,
    safe_offer,
)

CORPUS = Path(__file__).parent.parent / "sdp"
GOOD = sorted((CORPUS / "good").glob("*.sdp"))
REFUSED = sorted((CORPUS / "refused").glob("*.sdp"))
STATUS = {"invalid_sdp": 400}


def text(path: Path) -> str:
    return path.read_bytes().decode()


def good(name: str) -> str:
    return text(CORPUS / "good" / f"{name}.sdp")


@pytest.fixture
async def peer() -> AsyncIterator[RTCPeerConnection]:
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    pc.addTransceiver("audio")
    yield pc
    await pc.close()


async def answer(pc: RTCPeerConnection, offer: str) -> str:
    """What aiortc answers, made to fit the offer."""
    await pc.setRemoteDescription(RTCSessionDescription(safe_offer(offer), "offer"))
    await pc.setLocalDescription(await pc.createAnswer())
    return finish_answer(pc.localDescription.sdp, offer)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
async def test_a_real_offer_is_taken_and_its_answer_has_its_shape(path: Path, peer: RTCPeerConnection) -> None:
    offer = text(path)

    answered = Description.parse(await answer(peer, offer))

    offered = Description.parse(offer)
    assert [(m.kind, m.profile, m.value("mid")) for m in answered.media] == [
        (m.kind, m.profile, m.value("mid")) for m in offered.media
    ]
    assert sum(m.kind == "audio" and m.port != 0 and not m.has("inactive") for m in answered.media) == 1
    assert all(m.port == 0 or m.has("inactive") for m in answered.media if m.kind == "video")
    for theirs, ours in zip(offered.media, answered.media, strict=True):
        assert set(ours.formats) <= set(theirs.formats)
        assert not (theirs.rejected and ours.port)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
async def test_a_live_section_of_an_answer_names_ice_one_fingerprint_and_a_dtls_role(
    path: Path, peer: RTCPeerConnection
) -> None:
    for media in Description.parse(await answer(peer, text(path))).media:
        if media.port:
            assert media.value("ice-ufrag") and media.value("ice-pwd")
            assert [value.split()[0] for value in media.values("fingerprint")] == ["sha-256"]
            assert media.value("setup") == ("active" if "setup_passive" in path.stem else "passive")


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
async def test_a_finished_answer_finished_again_is_the_same(path: Path, peer: RTCPeerConnection) -> None:
    once = await answer(peer, text(path))
    assert finish_answer(once, text(path)) == once


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_safe_offer_made_safe_again_is_the_same(path: Path) -> None:
    once = safe_offer(text(path))
    assert safe_offer(once) == once


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_an_offer_that_cannot_be_answered_is_refused_with_its_code(path: Path) -> None:
    code = path.name.partition(".")[0]

    with pytest.raises(RequestError) as refusal:
        safe_offer(text(path))

    assert (refusal.value.code, refusal.value.status) == (code, STATUS.get(code, 422))
    assert refusal.value.param == "sdp"


async def test_the_answer_asks_for_error_correction_in_opus(peer: RTCPeerConnection) -> None:
    audio = Description.parse(await answer(peer, good("chromium_openai_sdk"))).media[0]
    assert "111 minptime=10;useinbandfec=1;stereo=0;maxplaybackrate=24000" in audio.values("fmtp")


def test_telephone_event_is_kept_and_says_which_events() -> None:
    offer = good("janus_sip_gateway")
    audio = Description.parse(finish_answer(safe_offer(offer), offer)).media[0]
    assert "101 telephone-event/8000" in audio.values("rtpmap")
    assert audio.value("fmtp") == "101 0-15"


@pytest.mark.parametrize(("formats", "kept"), [("0 13 101", ("0", "13", "101")), ("111 0 13", ("111", "0"))])
def test_comfort_noise_is_taken_from_telephones_and_not_beside_opus(formats: str, kept: tuple[str, ...]) -> None:
    offer = good("row_rtpmaps_that_the_media_line_does_not_list").replace("SAVPF 0", f"SAVPF {formats}")
    digits = "a=rtpmap:101 telephone-event/8000\r\na=rtcp-mux"
    audio = Description.parse(safe_offer(offer.replace("a=rtcp-mux", digits, 1))).media[0]
    assert audio.formats == kept


def test_voice_comes_before_digits_whatever_the_offer_says() -> None:
    assert Description.parse(safe_offer(good("row_digits_before_the_voice"))).media[0].formats == ("111", "101")


def test_payload_types_that_the_media_line_does_not_list_are_dropped() -> None:
    audio = Description.parse(safe_offer(good("row_rtpmaps_that_the_media_line_does_not_list"))).media[0]
    assert (audio.formats, audio.values("rtpmap")) == (("0",), ("0 PCMU/8000",))


@pytest.mark.parametrize(
    "name",
    [
        "row_mdns_candidate",
        "row_names_and_tcp_candidates",
        "row_broken_candidate",
        "row_metadata_and_link_local_candidates",
    ],
)
def test_only_candidates_that_can_be_called_are_passed_on(name: str) -> None:
    candidates = Description.parse(safe_offer(good(name))).media[0].values("candidate")
    assert all("192.0.2.10 50000" in candidate for candidate in candidates)
    assert len(candidates) == (0 if "mdns" in name else 1)


def test_candidates_are_capped() -> None:
    line = "a=candidate:1 1 udp 2122260223 192.0.2.10 50000 typ host\r\n"
    many = "".join(line.replace("50000", str(50_000 + i)) for i in range(1000))
    offer = good("row_no_setup").replace(line, many)
    assert len(Description.parse(safe_offer(offer)).media[0].values("candidate")) == MAX_CANDIDATES


def test_an_end_of_candidates_is_not_passed_on_as_it_would_end_the_wait_for_the_peers_own_checks() -> None:
    assert "end-of-candidates" not in safe_offer(good("baresip_direct"))


async def test_an_unbundled_video_is_rejected_as_it_has_no_transport(peer: RTCPeerConnection) -> None:
    video = Description.parse(await answer(peer, good("row_video_only_h265_not_bundled"))).media[1]
    assert video.port == 0


async def test_a_bundled_video_is_inactive_on_the_transport_of_the_audio(peer: RTCPeerConnection) -> None:
    answered = Description.parse(await answer(peer, good("chromium_video_first")))
    video, audio = answered.media
    assert video.has("inactive") and video.port == 9
    assert video.value("ice-ufrag") == audio.value("ice-ufrag")
    assert answered.value("group") == "BUNDLE 1 0"


async def test_an_answer_claims_no_bundle_that_was_not_offered(peer: RTCPeerConnection) -> None:
    answered = await answer(peer, good("baresip_direct"))
    assert "a=group" not in answered
    assert "a=mid" not in answered


async def test_a_caller_who_only_sends_is_answered_recvonly(peer: RTCPeerConnection) -> None:
    assert Description.parse(await answer(peer, good("chromium_whip_sendonly"))).media[0].has("recvonly")


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError):
        safe_offer(good("aiortc").replace("s=-", "s=\ud800"))


def test_a_candidate_that_trickles_in_is_read_with_or_without_its_prefix() -> None:
    line = "candidate:1 1 UDP 2122260223 192.0.2.10 50000 typ host generation 0 ufrag abcd"
    assert str(Candidate.parse(line)) == "1 1 udp 2122260223 192.0.2.10 50000 typ host"
    assert Candidate.parse(line) == Candidate.parse(line.removeprefix("candidate:"))


@st.composite
def mutated_offers(draw: st.DrawFn) -> str:
    """A real offer with lines dropped, doubled, swapped, cut, and characters changed."""
    offer = draw(st.sampled_from(GOOD)).read_bytes().decode()
    lines = offer.splitlines()
    chance = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(1, 8))):
        place = chance.randrange(len(lines))
        other = chance.randrange(len(lines))
        match draw(st.sampled_from(["drop", "double", "swap", "cut", "poke", "splice"])):
            case "drop" if len(lines) > 1:
                del lines[place]
            case "double":
                lines.insert(other, lines[place])
            case "swap":
                lines[place], lines[other] = lines[other], lines[place]
            case "cut":
                lines[place] = lines[place][: chance.randrange(len(lines[place]) + 1)]
            case "poke":
                at = chance.randrange(len(lines[place]) + 1)
                lines[place] = lines[place][:at] + draw(st.text(max_size=3)) + lines[place][at + 1 :]
            case "splice":
                lines[place] = lines[place][: chance.randrange(8)] + lines[other][chance.randrange(8) :]
    return "\r\n".join(lines)


@given(mutated_offers())
@settings(max_examples=300, deadline=None)
def test_a_mutated_offer_is_made_safe_or_refused(offer: str) -> None:
    try:
        safe = safe_offer(offer)
    except RequestError as refusal:
        assert refusal.status in (400, 422)
        return
    assert safe_offer(safe) == safe
    parsed = SessionDescription.parse(safe)
    assert [m.kind for m in parsed.media].count("audio") == 1
    finished = finish_answer(safe, offer)
    assert len(Description.parse(finished).media) == len(Description.parse(offer).media)


@given(st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_text_is_refused(offer: str) -> None:
    with pytest.raises(RequestError):
        safe_offer(offer)


def test_an_offer_of_thousands_of_lines_is_refused() -> None:
    with pytest.raises(RequestError, match="2000 lines"):
        safe_offer(good("chromium_audio_and_channel") + "a=x\r\n" * 2000)


def test_of_thousands_of_candidates_only_the_first_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[str]()
    monkeypatch.setattr(Candidate, "parse", looked_at.append)
    offer = safe_offer(good("chromium_audio_and_channel") + "a=candidate:1 1 tcp 1 10.0.0.1 5 typ host\r\n" * 1500)
    assert len(looked_at) <= 4 * MAX_CANDIDATE_LINES
    assert Description.parse(offer).media and looked_at
