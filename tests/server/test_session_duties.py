"""What a call does beside carrying sound: waiting in line, recording, limits of time, keys, interruption, counts."""

import asyncio
import gc
import json
import os
import re
import threading
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine_doubles import tone
from tests.server.peer import House, Peer, call, house, in_state
from webrtc_duplex.audio import FRAME_SAMPLES
from webrtc_duplex.errors import CapacityError, RequestError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.server import realtime
from webrtc_duplex.server.events import ChannelListener
from webrtc_duplex.server.session import CallRequest, Session, SessionState
from webrtc_duplex.settings import EngineSettings, ServerSettings


@pytest.fixture
async def one_row(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path, rows=1) as it:
        yield it


async def in_line(full: House, name: str, wait_s: float = 30.0) -> tuple[Peer, str]:
    """A caller who waits for a row."""
    peer = Peer("oai-events")
    session = await full.calls.answer(CallRequest(name, await peer.offer(), queue_s=wait_s))
    await peer.accept(session.answer)
    await peer.event("ext.queue")
    assert session.state is SessionState.QUEUED
    return peer, session.id


async def test_callers_in_line_get_the_row_in_the_order_they_came(one_row: House) -> None:
    async with call(one_row) as (talking, _):
        first, first_id = await in_line(one_row, "rtc_first")
        second, second_id = await in_line(one_row, "rtc_second")
        assert (await second.event("ext.queue"))["position"] == 2
        with pytest.raises(CapacityError):
            async with call(one_row):
                pass
        await talking.close()
        await in_state(one_row.calls.find(first_id), SessionState.LIVE)
        assert one_row.calls.find(second_id).state is SessionState.QUEUED
        await first.close()
        await in_state(one_row.calls.find(second_id), SessionState.LIVE)
        await second.close()


async def test_a_caller_in_line_who_hangs_up_leaves_it(one_row: House) -> None:
    async with call(one_row):
        waiting, name = await in_line(one_row, "rtc_1")
        await waiting.close()
        await in_state(one_row.calls.find(name), SessionState.ENDED)
        assert one_row.calls.find(name).ended_because == "hangup"
        next_one, _ = await in_line(one_row, "rtc_2")
        assert (await next_one.event("ext.queue"))["position"] == 1
        await next_one.close()


async def test_a_caller_in_line_may_come_on_another_connection_and_keeps_the_place(one_row: House) -> None:
    async with call(one_row) as (talking, _):
        waiting, name = await in_line(one_row, "rtc_1")
        successor = Peer("oai-events")
        await successor.accept((await one_row.calls.resume(name, await successor.offer())).answer)
        assert (await successor.event("ext.queue"))["position"] == 1
        await talking.close()
        await in_state(one_row.calls.find(name), SessionState.LIVE)
        await successor.close()
        await waiting.close()


async def test_who_has_waited_long_enough_is_told_that_the_house_is_full(one_row: House) -> None:
    async with call(one_row):
        waiting, name = await in_line(one_row, "rtc_1", wait_s=0.8)
        assert (await waiting.event("ext.session.closing"))["reason"] == "at_capacity"
        await in_state(one_row.calls.find(name), SessionState.ENDED)
        await waiting.close()


async def test_a_free_row_is_had_at_once_by_who_would_wait(one_row: House) -> None:
    peer = Peer()
    session = await one_row.calls.answer(CallRequest("rtc_1", await peer.offer(), queue_s=30))
    assert session.state is SessionState.CONNECTING
    await peer.close()


async def test_a_call_is_recorded_where_its_caller_asks_for_it(tmp_path: Path) -> None:
    server = ServerSettings(recordings=tmp_path / "recordings")
    async with house(tmp_path, server=server) as full:
        peer = Peer()
        session = await full.calls.answer(CallRequest("rtc_1", await peer.offer(), record=True))
        await peer.accept(session.answer)
        await peer.microphone.say(np.tile(tone(), 30))
        await full.frames_heard(20)
        await session.hang_up()
        await peer.close()
    with wave.open(str(tmp_path / "recordings/rtc_1.wav")) as sound:
        stereo = np.frombuffer(sound.readframes(sound.getnframes()), np.int16).reshape(-1, 2)
    assert stereo.shape[0] >= 20 * 1920 and np.abs(stereo).max(axis=0).min() > 1000
    kinds = [json.loads(line)["type"] for line in (tmp_path / "recordings/rtc_1.jsonl").read_text().splitlines()]
    assert kinds[0] == "session.created" and session.session()["recording"] is True


async def test_recording_is_switched_on_and_off_and_on_in_the_middle_of_a_call(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    async with (
        house(tmp_path, server=ServerSettings(recordings=folder)) as full,
        call(full, channel="oai-events") as (
            peer,
            session,
        ),
    ):
        await full.frames_heard(10)
        for number, wanted in enumerate((True, False, True), start=1):
            peer.tell({"type": "session.update", "session": {"recording": wanted}})
            while len(updates := [e for e in peer.events if e["type"] == "session.updated"]) < number:
                await asyncio.sleep(0.01)
            assert updates[-1]["session"]["recording"] is wanted
            await full.frames_heard(10 + 10 * number)
        await session.hang_up()
        assert {path.name for path in folder.iterdir()} == {
            f"{session.id}{second}.{kind}" for second in ("", "-2") for kind in ("wav", "jsonl")
        }
        with wave.open(str(folder / f"{session.id}.wav")) as first:
            assert 8 <= first.getnframes() / FRAME_SAMPLES <= 14  # it begins where it was asked for


async def test_a_recording_that_is_neither_on_nor_off_is_an_error(tmp_path: Path) -> None:
    async with house(tmp_path) as full, call(full, channel="oai-events") as (peer, _):
        await full.frames_heard(2)
        for wanted, code in (("yes", "invalid_value"), (True, "recording_disabled")):
            before = len(peer.events)
            peer.tell({"type": "session.update", "session": {"recording": wanted}})
            assert (await peer.event("error", before))["error"]["code"] == code


async def test_a_server_without_a_place_for_recordings_says_so(one_row: House) -> None:
    peer = Peer()
    with pytest.raises(RequestError) as refused:
        await one_row.calls.answer(CallRequest("rtc_1", await peer.offer(), record=True))
    assert refused.value.code == "recording_disabled" and len(one_row.calls) == 0
    await peer.close()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(ServerSettings(max_duration_s=1), "max_duration"), (ServerSettings(idle_timeout_s=0.5), "idle_timeout")],
)
async def test_a_call_is_ended_when_its_time_is_up(tmp_path: Path, limits: ServerSettings, reason: str) -> None:
    async with house(tmp_path, server=limits) as full, call(full, channel="oai-events") as (peer, session):
        assert (await peer.event("ext.session.closing"))["reason"] == reason
        await in_state(session, SessionState.ENDED)


async def test_a_call_bound_to_its_voice_keeps_it(one_row: House) -> None:
    peer = Peer("oai-events")
    request = CallRequest("rtc_1", await peer.offer(), Prompt(voice="ann"), voice_locked=True)
    session = await one_row.calls.answer(request)
    await peer.accept(session.answer)
    await peer.opened.wait()
    peer.tell({"type": "session.update", "session": {"voice": "bob"}})
    assert (await peer.event("error"))["error"]["code"] == "forbidden"
    peer.tell({"type": "session.update", "session": {"instructions": "be brief"}})
    await peer.event("session.updated")
    assert session.prompt == Prompt(voice="ann", text="be brief")
    await peer.close()


async def test_an_interrupted_agent_is_not_heard_until_it_pauses_and_the_model_goes_on(one_row: House) -> None:
    async with call(one_row, channel="oai-events") as (peer, _):
        await peer.microphone.say(np.tile(tone(), 12))
        await peer.event("output_audio_buffer.started")
        peer.tell({"type": "response.cancel"})
        peer.tell({"type": "output_audio_buffer.clear"})
        done = await peer.event("response.done")
        frames = int(one_row.runner.heard[0])
        await one_row.frames_heard(frames + 3)
    assert done["response"]["status"] == "cancelled"
    assert "output_audio_buffer.cleared" in [event["type"] for event in peer.events]


async def test_who_listens_by_another_way_gets_the_same_events_to_the_end(one_row: House) -> None:
    async with call(one_row) as (_, session):
        with session.listen() as listener:
            session.tell('{"type": "response.create"}')
            await asyncio.sleep(0)
            kinds = [(await anext(listener))["type"] for _ in range(2)]
            await session.hang_up()
            kinds += [event["type"] async for event in listener]
    assert kinds[0] == "session.created" and kinds[-1] == "ext.session.closing"
    assert "response.created" in kinds and "response.done" in kinds


async def test_more_messages_than_allowed_are_refused_and_end_nothing(one_row: House) -> None:
    async with call(one_row) as (_, session):
        with session.listen() as listener:
            for _ in range(80):
                session.tell('{"type": "input_audio_buffer.clear"}')
            while (event := await anext(listener))["type"] != "error":
                pass
            assert "rate_limit_exceeded" in json.dumps(event)
        await in_state(session, SessionState.LIVE)


async def test_calls_are_counted(one_row: House) -> None:
    async with call(one_row) as (peer, session):
        await peer.microphone.say(tone())
        await in_state(session, SessionState.LIVE)
        await one_row.frames_heard(5)
        assert 'webrtc_duplex_calls{state="live"} 1.0' in one_row.metrics.exposition().decode()
        await peer.close()
        await in_state(session, SessionState.ENDED)
    told = one_row.metrics.exposition().decode()
    assert 'webrtc_duplex_calls{state="live"} 0.0' in told
    assert 'webrtc_duplex_calls_ended_total{reason="hangup"} 1.0' in told
    assert "webrtc_duplex_join_seconds_count 1.0" in told
    assert 'webrtc_duplex_heard_samples_total{origin="received"} 0.0' not in told


@pytest.mark.parametrize("calls", [12, pytest.param(100, marks=pytest.mark.slow)])
async def test_calls_that_come_and_go_leave_nothing_behind(tmp_path: Path, calls: int) -> None:
    engine, server = EngineSettings(resume_grace_s=0.1), ServerSettings(media_timeout_s=0.3)
    async with house(tmp_path, rows=2, engine=engine, server=server) as full:
        await come_and_go(full, vanishes=False)
        before = await what_is_held()
        for number in range(calls):
            await come_and_go(full, vanishes=number % 5 == 0)
        assert await what_is_held() == before


async def come_and_go(full: House, vanishes: bool) -> None:
    async with call(full, channel="oai-events") as (peer, session):
        await in_state(session, SessionState.LIVE)
        if vanishes:
            peer.vanish()
        else:
            await peer.close()
        await in_state(session, SessionState.ENDED)
        await full.rows_free(2)


async def what_is_held() -> tuple[int, int, int]:
    """Descriptors, threads and tasks of this process, once those that are ending have ended."""
    for _ in range(50):
        await asyncio.sleep(0.02)
        if not [task for task in asyncio.all_tasks() if "rtc" in repr(task.get_coro()).lower()]:
            break
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())


async def test_a_caller_who_went_away_in_line_never_takes_a_row_and_stands_in_nobodys_way(one_row: House) -> None:
    async with call(one_row) as (talking, first):
        await in_state(first, SessionState.LIVE)
        gone, gone_id = await in_line(one_row, "rtc_gone")
        waiting, waiting_id = await in_line(one_row, "rtc_waiting")
        gone.vanish()
        while (await waiting.event("ext.queue", after=len(waiting.events)))["position"] > 1:
            pass
        began = len(one_row.runner.began)
        await talking.close()
        await in_state(one_row.calls.find(waiting_id), SessionState.LIVE)
        assert one_row.calls.find(gone_id).state is SessionState.QUEUED
        assert len(one_row.runner.began) == began + 1
        await waiting.close()
        await gone.close()


async def test_who_stands_in_line_without_a_connection_gets_no_row(one_row: House) -> None:
    async with call(one_row) as (talking, first):
        await in_state(first, SessionState.LIVE)
        never = Peer("oai-events")
        session = await one_row.calls.answer(CallRequest("rtc_never", await never.offer(), queue_s=30))
        await talking.close()
        await one_row.rows_free(1)
        async with call(one_row) as (_, next_one):
            await in_state(next_one, SessionState.LIVE)
            assert session.state is SessionState.QUEUED
        await session.hang_up()
        await never.close()


async def test_a_refusal_says_how_long_the_wait_will_be_behind_all_who_stand_in_line(one_row: House) -> None:
    async with call(one_row):
        first, _ = await in_line(one_row, "rtc_first")
        eta_s = (await first.event("ext.queue"))["eta_s"]
        with pytest.raises(CapacityError) as refused:
            async with call(one_row):
                pass
        assert refused.value.retry_after_s == pytest.approx(2 * eta_s, rel=0.2)
        await first.close()


async def test_who_opens_a_channel_after_the_end_was_announced_is_told_of_it(one_row: House) -> None:
    peer = Peer("oai-events")
    session = await one_row.calls.answer(CallRequest("rtc_1", await peer.offer()))
    session.announce_end("drained", 20)
    await peer.accept(session.answer)
    closing = await peer.event("ext.session.closing")
    assert closing["reason"] == "drained" and 0 < closing["in_ms"] <= 20_000
    await peer.close()


async def test_a_call_is_told_of_its_end_before_its_longest_duration_is_over(tmp_path: Path) -> None:
    limits = ServerSettings(max_duration_s=4)
    async with house(tmp_path, server=limits) as full, call(full, channel="oai-events") as (peer, session):
        assert 0 < (await peer.event("ext.session.closing"))["in_ms"] <= 2_000
        await in_state(session, SessionState.ENDED)
        assert session.ended_because == "max_duration"
        told = [event["in_ms"] for event in peer.events if event["type"] == "ext.session.closing"]
    assert len(told) == 2 and told[1] == 0


async def test_a_client_that_asks_for_it_is_told_that_nobody_speaks(
    one_row: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realtime, "IDLE_MS", (500, 30_000))
    async with call(one_row, channel="oai-events") as (peer, _):
        await peer.opened.wait()
        wanted = {"audio": {"input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 800}}}}
        peer.tell({"type": "session.update", "session": wanted})
        detection = (await peer.event("session.updated"))["session"]["audio"]["input"]["turn_detection"]
        told = await peer.event("input_audio_buffer.timeout_triggered")
    assert detection == {"type": "server_vad", "idle_timeout_ms": 800}
    assert told["audio_end_ms"] - told["audio_start_ms"] == 800 and told["item_id"]


async def test_an_agent_that_hears_itself_is_warned_of(one_row: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async with call(one_row, channel="oai-events") as (peer, session):
        await in_state(session, SessionState.LIVE)
        monkeypatch.setattr(session._echo, "look", lambda: True)
        assert (await peer.event("ext.warning"))["code"] == "echo_suspected"


async def test_a_client_that_does_not_take_its_events_is_put_out(
    one_row: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChannelListener, "STUCK_BYTES", -1)
    async with call(one_row, channel="oai-events") as (_, session):
        await in_state(session, SessionState.ENDED)
    assert session.ended_because == "evicted_slow"


async def test_a_caller_whose_certificate_is_another_than_it_said_is_put_out(one_row: House) -> None:
    peer = Peer()
    offer = await peer.offer()
    fingerprint = re.search(r"a=fingerprint:sha-256 (\S+)", offer)
    assert fingerprint is not None
    another = ":".join(["00"] * 32)
    session = await one_row.calls.answer(CallRequest("rtc_1", offer.replace(fingerprint[1], another)))
    await peer.accept(session.answer)
    await in_state(session, SessionState.ENDED)
    assert session.ended_because == "dtls_failed"
    await one_row.rows_free(1)
    await peer.close()


async def test_a_wait_in_line_does_not_count_as_silence(tmp_path: Path) -> None:
    async with house(tmp_path, rows=1) as full, call(full) as (talking, first):
        await in_state(first, SessionState.LIVE)
        waiting, name = await in_line(full, "rtc_1")
        session = full.calls.find(name)
        assert isinstance(session, Session)
        session._settings = ServerSettings(idle_timeout_s=1.5, max_duration_s=1.5)
        while session.age_s < 1.6:
            await waiting.event("ext.queue", after=len(waiting.events))
        await talking.close()
        await in_state(session, SessionState.LIVE)
        await waiting.event("ext.stats")
        await asyncio.sleep(0)
        assert session.state is SessionState.LIVE
        await waiting.close()


async def test_an_update_that_is_wrong_in_one_field_changes_none(one_row: House) -> None:
    async with call(one_row, channel="oai-events") as (peer, session):
        await peer.opened.wait()
        wanted = {"instructions": "be brief", "audio": {"input": {"turn_detection": {"idle_timeout_ms": 1}}}}
        peer.tell({"type": "session.update", "session": wanted})
        assert (await peer.event("error"))["error"]["code"] == "invalid_value"
        assert session.prompt == Prompt() and session.turns.idle_timeout_ms is None


async def test_an_offer_in_line_that_cannot_be_answered_stops_nobody(one_row: House) -> None:
    async with call(one_row) as (talking, _):
        clumsy, clumsy_id = await in_line(one_row, "rtc_clumsy")
        waiting, waiting_id = await in_line(one_row, "rtc_waiting")
        with pytest.raises(RequestError, match="cannot be answered"):
            await one_row.calls.resume(clumsy_id, "v=0\r\n")
        await talking.close()
        await in_state(one_row.calls.find(waiting_id), SessionState.LIVE)
        await waiting.close()
        await one_row.calls.find(clumsy_id).hang_up()
        await clumsy.close()
