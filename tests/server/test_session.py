"""The story of a call, with real peers in this process and an engine that echoes."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import uvloop
from aiortc.rtp import RtpPacket

from tests.server.peer import House, Peer, call, house, in_state, with_codec
from webrtc_duplex.audio import SAMPLE_RATE, Pcm
from webrtc_duplex.errors import CallNotFoundError, CapacityError, DuplexError, RequestError
from webrtc_duplex.messages import Live, Prompt
from webrtc_duplex.server import sdp
from webrtc_duplex.server.engine_client import DuplexStream
from webrtc_duplex.server.metrics import Metrics
from webrtc_duplex.server.session import CallRequest, Calls, SessionState
from webrtc_duplex.server.transport import Transport
from webrtc_duplex.settings import EngineSettings, ServerSettings, Settings


@pytest.fixture
async def two_rows(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path, rows=2) as it:
        yield it


def chirp(first_hz: float = 300.0) -> Pcm:
    """A sweep over 800 Hz in 0.2 s."""
    t = np.arange(SAMPLE_RATE // 5) / SAMPLE_RATE
    return (8000 * np.sin(2 * np.pi * (first_hz * t + 2000 * t * t))).astype(np.int16)


async def comes_back(peer: Peer, sound: Pcm) -> Pcm:
    """Say a sound until it is heard whole, as a busy machine may spoil the first; returns all that was heard."""
    heard = await peer.heard(0)
    while likeness(heard, sound) < 0.9:
        await peer.microphone.say(np.tile(sound, 3))
        heard = await peer.heard(len(heard) / SAMPLE_RATE)
    return heard


def likeness(heard: Pcm, said: Pcm) -> float:
    """Correlation, -1..1, of what was said with the place in what was heard that is most like it."""
    wave = said.astype(np.float64)
    size = 1 << (len(heard) + len(wave)).bit_length()
    match = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(wave, size)), size)
    start = int(np.argmax(match[: max(1, len(heard) - len(wave))]))
    piece = np.resize(heard[start : start + len(wave)], len(wave)).astype(np.float64)
    return float(piece @ wave / (np.linalg.norm(piece) * np.linalg.norm(wave) + 1e-9))


async def test_what_a_caller_says_comes_back(two_rows: House) -> None:
    async with call(two_rows) as (peer, _):
        await comes_back(peer, chirp())


async def test_what_a_caller_says_comes_back_under_uvloop(tmp_path: Path) -> None:
    async def whole_way() -> None:
        async with house(tmp_path, rows=1) as full, call(full, channel="oai-events") as (peer, session):
            await comes_back(peer, chirp())
            await peer.close()
            await in_state(session, SessionState.ENDED)

    await asyncio.to_thread(uvloop.run, whole_way())


async def test_a_lost_packet_leaves_the_delay_as_it_was(two_rows: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async with call(two_rows) as (peer, session):
        await in_state(session, SessionState.LIVE)
        await two_rows.frames_heard(13)
        assert session._leg is not None
        jitter = session._leg.jitter
        before_s = jitter.delay_s
        lose_a_packet(peer, monkeypatch)
        while not jitter.counters.lost:
            await asyncio.sleep(0.02)
        await two_rows.frames_heard(int(two_rows.runner.heard[0]) + 25)
        assert jitter.delay_s < before_s + 0.06, "the stock buffer would be 0.2 s later for ever"


def lose_a_packet(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next packet of sound that the peer sends does not arrive."""
    dtls = peer.pc.getSenders()[0].transport
    send = dtls._send_rtp

    async def lossy(data: bytes) -> None:
        if 192 <= data[1] <= 223:
            await send(data)
        else:
            monkeypatch.setattr(dtls, "_send_rtp", send)

    monkeypatch.setattr(dtls, "_send_rtp", lossy)


async def test_keys_of_a_telephone_are_told(two_rows: House) -> None:
    peer = Peer("oai-events")
    offer = with_codec(await peer.offer(), 126, "telephone-event/8000")
    session = await two_rows.calls.answer(CallRequest("rtc_1", sdp.safe_offer(offer)))
    await peer.accept(session.answer)
    await peer.opened.wait()
    sender = peer.pc.getSenders()[0]
    for number, ended in enumerate((0, 0, 0x80, 0x80, 0x80)):
        payload = bytes((5, ended | 10)) + (160 * (number + 1)).to_bytes(2)
        packet = RtpPacket(126, int(number == 0), 7000 + number, 9000, sender._ssrc ^ 1, payload)
        await sender.transport._send_rtp(packet.serialize())
    told = await peer.event("input_audio_buffer.dtmf_event_received")
    await asyncio.sleep(0.1)
    assert told["event"] == "5" and abs(told["received_at"] - time.time()) < 10
    assert [event["type"] for event in peer.events].count("input_audio_buffer.dtmf_event_received") == 1
    await peer.close()


async def test_two_callers_hear_each_their_own(two_rows: House) -> None:
    low, high = chirp(300), chirp(2000)
    async with call(two_rows) as (one, _), call(two_rows) as (other, _):
        one_heard, other_heard = await asyncio.gather(comes_back(one, low), comes_back(other, high))
        assert likeness(one_heard, high) < 0.3 and likeness(other_heard, low) < 0.3


async def test_a_full_house_refuses_and_takes_the_next_after_a_hang_up(two_rows: House) -> None:
    async with call(two_rows) as (first, _), call(two_rows):
        with pytest.raises(CapacityError) as refused:
            async with call(two_rows):
                pass
        assert refused.value.retry_after_s is not None
        await first.close()
        await two_rows.rows_free(1)
        async with call(two_rows) as (_, session):
            await in_state(session, SessionState.LIVE)


async def test_a_caller_who_hangs_up_frees_the_row(two_rows: House) -> None:
    async with call(two_rows) as (peer, session):
        await in_state(session, SessionState.LIVE)
        await peer.close()
        await in_state(session, SessionState.ENDED)
        await two_rows.rows_free(2)
    assert session.ended_because == "hangup" and len(two_rows.calls) == 0


async def test_of_a_call_that_is_over_only_what_can_be_asked_is_kept(two_rows: House) -> None:
    async with call(two_rows) as (peer, session):
        await in_state(session, SessionState.LIVE)
        connections = count_of(Transport)
        await peer.close()
        await in_state(session, SessionState.ENDED)
        assert two_rows.calls.find(session.id).stats()["underruns"] is not None
        async with asyncio.timeout(5):
            while count_of(Transport) == connections:
                await asyncio.sleep(0.05)


def count_of(kind: type) -> int:
    """Objects of this kind that anybody still needs."""
    gc.collect()
    return sum(isinstance(thing, kind) for thing in gc.get_objects())


async def test_a_call_that_we_end_says_why_and_is_closed_on_both_sides(two_rows: House) -> None:
    async with call(two_rows, channel="oai-events") as (peer, session):
        await peer.event("session.created")
        await session.hang_up("max_duration")
        closing = await peer.event("ext.session.closing")
        await peer.closed.wait()
        await two_rows.rows_free(2)
    assert closing["reason"] == session.ended_because == "max_duration"


async def test_a_muted_callers_agent_goes_on(two_rows: House) -> None:
    async with call(two_rows) as (peer, session):
        peer.pc.getSenders()[0].replaceTrack(None)
        await in_state(session, SessionState.LIVE)
        before = int(two_rows.runner.heard[0])
        await two_rows.frames_heard(before + 10)


async def test_a_caller_who_never_connects_is_put_out_by_the_engines_deadline(tmp_path: Path) -> None:
    async with house(tmp_path, rows=1, engine=EngineSettings(connect_deadline_s=0.5)) as full:
        peer = Peer()
        session = await full.calls.answer(CallRequest("rtc_1", await peer.offer()))
        await full.rows_free(0)
        await in_state(session, SessionState.ENDED)
        await full.rows_free(1)
        assert session.ended_because == "connect_timeout"
        await peer.close()


async def test_a_caller_who_vanishes_is_held_and_then_put_out(tmp_path: Path) -> None:
    engine, server = EngineSettings(resume_grace_s=0.5), ServerSettings(media_timeout_s=0.5)
    async with house(tmp_path, engine=engine, server=server) as full, call(full) as (peer, session):
        await in_state(session, SessionState.LIVE)
        peer.vanish()
        await in_state(session, SessionState.HELD)
        await full.rows_free(1)
        await in_state(session, SessionState.ENDED)
        await full.rows_free(2)
        assert session.ended_because == "media_timeout"


async def test_a_caller_who_comes_back_goes_on_with_the_same_model_state(tmp_path: Path) -> None:
    server = ServerSettings(media_timeout_s=2.0)
    async with house(tmp_path, rows=1, server=server) as full, call(full) as (peer, session):
        await in_state(session, SessionState.LIVE)
        await full.frames_heard(5)
        peer.vanish()
        await in_state(session, SessionState.HELD)
        stopped_at = int(full.runner.heard[0])
        successor = Peer("oai-events")
        resumed = await full.calls.resume(session.id, await successor.offer())
        await successor.accept(resumed.answer)
        created = await successor.event("session.created")
        await in_state(session, SessionState.LIVE)
        await comes_back(successor, chirp())
        assert resumed is session and created["session"]["id"] == session.session()["id"]
        assert full.runner.heard[0] > stopped_at >= 5 and len(full.runner.began) == 1
        await successor.close()


async def test_a_caller_may_come_back_before_the_loss_is_noticed(two_rows: House) -> None:
    async with call(two_rows) as (_, session):
        await in_state(session, SessionState.LIVE)
        successor = Peer()
        await successor.accept((await two_rows.calls.resume(session.id, await successor.offer())).answer)
        await comes_back(successor, chirp())
        await successor.close()
        await in_state(session, SessionState.ENDED)
    assert session.ended_because == "hangup"


async def test_who_comes_back_while_another_is_being_answered_is_answered_next(two_rows: House) -> None:
    async with call(two_rows) as (_, session):
        await in_state(session, SessionState.LIVE)
        one, two = Peer(), Peer()
        offers = [await one.offer(), await two.offer()]

        async def come_back(offer: str) -> str:
            while True:
                try:
                    return await session.resume(offer)
                except RequestError as refusal:
                    assert refusal.code == "call_conflict"
                    await asyncio.sleep(0)

        async with asyncio.timeout(5):
            _, answer = await asyncio.gather(*map(come_back, offers))
        await two.accept(answer)
        await comes_back(two, chirp())
        await one.close()
        await two.close()


async def test_a_connection_is_closed_whole_though_who_closes_it_is_called_off(
    two_rows: House, caplog: pytest.LogCaptureFixture
) -> None:
    async with call(two_rows) as (_, session):
        await in_state(session, SessionState.LIVE)
        transport = session._current.transport
        closing = asyncio.create_task(transport.close())
        await asyncio.sleep(0)
        closing.cancel()
        await session.hang_up()
    assert transport._pc.iceConnectionState == "closed"
    assert "did not close" not in caplog.text


async def test_a_schedule_that_begins_anew_is_followed(two_rows: House, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[DuplexStream]()
    take = DuplexStream._go_live

    def go_live(stream: DuplexStream, live: Live) -> None:
        """A Live of before, as if it had been on its way when the call was held, and then the right one."""
        opened.append(stream)
        take(stream, replace(live, tick_at=live.tick_at + 0.04))
        asyncio.get_running_loop().call_later(0.05, take, stream, live)

    monkeypatch.setattr(DuplexStream, "_go_live", go_live)
    async with call(two_rows) as (peer, _):
        await comes_back(peer, chirp())
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RequestError("back", code="position_went_back"), "position_went_back"), (OSError("disk"), "server_error")],
)
async def test_a_fault_in_mid_call_ends_this_call_only(
    two_rows: House, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    async with call(two_rows, channel="oai-events") as (peer, faulty), call(two_rows) as (_, other):
        await in_state(faulty, SessionState.LIVE)
        await in_state(other, SessionState.LIVE)
        hear = DuplexStream.hear

        def fail(stream: DuplexStream, position: int, frame: Pcm) -> None:
            if stream._call == faulty.id:
                raise error
            hear(stream, position, frame)

        monkeypatch.setattr(DuplexStream, "hear", fail)
        assert (await peer.event("ext.session.closing"))["reason"] == reason
        await in_state(faulty, SessionState.ENDED)
        await two_rows.rows_free(1)
        assert other.state is SessionState.LIVE


async def test_a_call_that_is_over_cannot_be_resumed(two_rows: House) -> None:
    async with call(two_rows) as (_, session):
        await session.hang_up()
    late = Peer()
    with pytest.raises(CallNotFoundError, match="has ended"):
        await two_rows.calls.resume(session.id, await late.offer())
    with pytest.raises(CallNotFoundError, match="no call"):
        await two_rows.calls.resume("rtc_other", await late.offer())
    await late.close()


async def test_an_offer_to_resume_that_cannot_be_answered_leaves_the_call_held(two_rows: House) -> None:
    async with call(two_rows) as (_, session):
        await in_state(session, SessionState.LIVE)
        with pytest.raises(RequestError, match="cannot be answered"):
            await session.resume("v=0\r\n")
        successor = Peer()
        await successor.accept(await session.resume(await successor.offer()))
        await in_state(session, SessionState.LIVE)
        await successor.close()


async def test_the_engines_death_ends_the_call_with_a_reason(two_rows: House) -> None:
    async with call(two_rows, channel="oai-events") as (peer, session):
        await peer.event("session.created")
        await in_state(session, SessionState.LIVE)
        assert two_rows.engine._engine is not None
        two_rows.engine._engine._ended.set()
        closing = await peer.event("ext.session.closing")
        await peer.closed.wait()
        await in_state(session, SessionState.ENDED)
    assert closing["reason"] == session.ended_because == "engine_lost"


async def test_the_agents_words_come_in_step_with_its_sound(two_rows: House) -> None:
    async with call(two_rows, channel="oai-events") as (peer, _):
        await peer.microphone.say(np.tile(chirp(), 3))
        await peer.event("response.done")
    kinds = [event["type"] for event in peer.events if event["type"] != "ext.stats"]
    deltas = [event["delta"] for event in peer.events if event["type"] == "response.output_audio_transcript.delta"]
    assert deltas == ["yes", " no"]
    assert kinds[0] == "session.created"
    assert kinds.index("response.created") < kinds.index("output_audio_buffer.started") < kinds.index("response.done")


async def test_the_client_chooses_voice_and_instructions_before_the_first_step(two_rows: House) -> None:
    async with call(two_rows, Prompt(voice="ann"), channel="oai-events") as (peer, session):
        await peer.opened.wait()
        peer.tell({"type": "session.update", "session": {"instructions": "be brief", "voice": "bob"}})
        updated = await peer.event("session.updated")
        await in_state(session, SessionState.LIVE)
        peer.tell({"type": "session.update", "session": {"tracing": "auto"}})
        peer.tell({"type": "session.update", "event_id": "mine", "session": {"voice": "ann"}})
        error = await peer.event("error")
        assert sum(event["type"] == "session.updated" for event in peer.events) == 2
    assert updated["session"]["audio"]["output"]["voice"] == "bob" and updated["session"]["instructions"] == "be brief"
    assert two_rows.runner.began[-1][1] == session.prompt == Prompt(voice="bob", text="be brief")
    assert (error["error"]["code"], error["error"]["event_id"]) == ("cannot_update_voice", "mine")


async def test_a_message_that_makes_no_sense_is_answered_and_ends_nothing(two_rows: House) -> None:
    async with call(two_rows, channel="chat") as (peer, session):
        await peer.opened.wait()
        for nonsense, code in (("{", "invalid_json"), ("[]", "invalid_json"), ('{"type": "dance"}', "unknown_event")):
            known = len(peer.events)
            peer.tell(nonsense)
            assert (await peer.event("error", after=known))["error"]["code"] == code
        await in_state(session, SessionState.LIVE)


@pytest.mark.parametrize(
    ("protocol", "data"), [(51, b"\xff\xfe"), (53, b"\xff"), (50, b"\x03"), (50, bytes([3] + [9] * 40))]
)
async def test_a_message_that_is_not_even_text_ends_nothing(two_rows: House, protocol: int, data: bytes) -> None:
    async with call(two_rows, channel="oai-events") as (peer, session):
        await in_state(session, SessionState.LIVE)
        assert peer.pc.sctp is not None and peer.channel is not None and peer.channel.id is not None
        await peer.pc.sctp._send(peer.channel.id, protocol, data)
        known = len(peer.events)
        peer.tell({"type": "dance"})
        await peer.event("error", after=known)
        assert session.state is SessionState.LIVE


async def test_statistics_come_every_second(two_rows: House) -> None:
    async with call(two_rows, channel="oai-events") as (peer, _):
        stats = await peer.event("ext.stats")
    assert {"rtt_ms", "jitter_ms", "loss_in", "concealed_ms", "jb_ms", "step_ms", "out_buffer_ms"} <= set(stats)


async def test_an_offer_that_cannot_be_answered_leases_nothing(two_rows: House) -> None:
    with pytest.raises(RequestError) as refused:
        await two_rows.calls.answer(CallRequest("rtc_1", "v=0\r\n"))
    assert refused.value.code == "invalid_sdp" and len(two_rows.calls) == 0
    await two_rows.rows_free(2)


@pytest.mark.parametrize("where", ["receive", "answer"])
@pytest.mark.parametrize("error", [RequestError("injected"), OSError("injected")])
async def test_a_fault_while_a_call_is_opened_leaves_nothing(
    two_rows: House, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    async def fail(*_: object) -> str:
        await asyncio.sleep(0)
        raise error

    monkeypatch.setattr(Transport, where, fail)
    peer = Peer()
    with pytest.raises(DuplexError) as failed:
        await two_rows.calls.answer(CallRequest("rtc_1", await peer.offer()))
    assert failed.value.status == (400 if isinstance(error, RequestError) else 500)
    await two_rows.rows_free(2)
    assert len(two_rows.calls) == 0
    await peer.close()


@pytest.mark.parametrize("where", ["receive", "answer"])
async def test_a_request_that_is_cancelled_while_a_call_is_opened_leaves_nothing(
    two_rows: House, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    reached = asyncio.Event()

    async def hang(*_: object) -> str:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Transport, where, hang)
    peer = Peer()
    request = asyncio.create_task(two_rows.calls.answer(CallRequest("rtc_1", await peer.offer())))
    await reached.wait()
    request.cancel()
    await asyncio.wait([request])
    assert request.cancelled()
    while len(two_rows.calls):
        await asyncio.sleep(0.01)
    await two_rows.rows_free(2)
    await peer.close()


async def test_leaving_the_block_of_calls_ends_them_all(two_rows: House) -> None:
    async with Calls(two_rows.engine, Settings(), Metrics(two_rows.engine)) as calls:
        peer = Peer()
        session = await calls.answer(CallRequest("rtc_1", await peer.offer()))
    assert session.state is SessionState.ENDED and session.ended_because == "drained"
    await two_rows.rows_free(2)
    await peer.close()
