"""The jitter buffer, against tables of packets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.media import wire
from tests.media.wire import CONCEALED, OTHER, PcmDecoder, Sent
from webrtc_duplex.audio import CHUNK_SAMPLES, FRAME_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.media.jitter import CONCEAL_SAMPLES, CUT_BEFORE_TICK_S, CutLead, JitterBuffer, Packet

MS = SAMPLE_RATE // 1000


def a_buffer(*, fec: bool = False) -> JitterBuffer:
    return JitterBuffer({wire.OPUS: PcmDecoder(with_fec=fec)})


def sound_of(pcm: Pcm) -> Pcm:
    """Without the silence around it."""
    loud = np.flatnonzero(pcm)
    return pcm[loud[0] : loud[-1] + 1] if loud.size else pcm[:0]


def ramp(samples: int) -> Pcm:
    """Every sample tells its place, and none is silent or like a concealed one."""
    return (np.arange(samples) % 30_000 + 2).astype(np.int16)


def bend(pcm: Pcm) -> int:
    """The sharpest bend from sample to sample; a click has one."""
    return int(np.abs(np.diff(pcm.astype(np.int32), 2)).max())


def delays_ms(heard: wire.Heard) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return heard.delays * 1000


# ---- in order


def test_what_was_sent_is_heard_sample_by_sample() -> None:
    pcm = ramp(2 * SAMPLE_RATE)
    heard = wire.play(a_buffer(), wire.packets(pcm), 3)
    assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], pcm)


@pytest.mark.parametrize("milliseconds", [10, 20, 30, 40, 60])
def test_any_packet_time_is_heard_sample_by_sample(milliseconds: int) -> None:
    pcm = ramp(milliseconds * MS * 40)
    heard = wire.play(a_buffer(), wire.packets(pcm, size=milliseconds * MS), 4)
    settled = len(pcm) // 4  # an edge that lies badly at first is moved
    found = int(np.flatnonzero(heard.pcm == pcm[settled])[0])
    assert np.array_equal(heard.pcm[found : found + len(pcm) - settled], pcm[settled:])


@pytest.mark.parametrize("phase_ms", range(0, 20, 2))
def test_a_frame_is_complete_at_most_one_packet_before_it_is_cut(phase_ms: int) -> None:
    heard = wire.play(a_buffer(), wire.packets(wire.speechlike(3)), 3, first_cut=0.0812 + phase_ms / 1000)
    settled = delays_ms(heard)[5:30]
    assert np.all(settled >= 1) and np.all(settled <= 22)


def test_before_the_first_packet_there_is_silence() -> None:
    frame = a_buffer().pop_frame(1.0)
    assert not frame.pcm.any() and frame.silent == FRAME_SAMPLES and frame.concealed == 0


def test_what_came_before_the_call_was_live_is_not_played_late() -> None:
    buffer = a_buffer()
    pcm = ramp(SAMPLE_RATE // 2)
    for sent in wire.packets(pcm):
        buffer.add(sent.packet, sent.comes_at)
    assert np.array_equal(buffer.pop_frame(0.55).pcm, pcm[-FRAME_SAMPLES:])


# ---- loss


def test_one_lost_packet_leaves_the_delay_what_it_was() -> None:
    lossy = wire.without(wire.packets(wire.speechlike(8)), 201)
    buffer = a_buffer()
    heard = wire.play(buffer, lossy, 7.9)
    assert buffer.counters.lost == 1
    assert np.ptp(delays_ms(heard)[10:]) < 1


def test_a_lost_packet_is_concealed_in_its_place() -> None:
    pcm = ramp(SAMPLE_RATE)
    for lost in range(8, 12):  # in each place of a frame
        heard = wire.play(a_buffer(), wire.without(wire.packets(pcm), lost), 1.2)
        expected = pcm.copy()
        expected[lost * CHUNK_SAMPLES : (lost + 1) * CHUNK_SAMPLES] = CONCEALED
        assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], expected)


def test_fec_restores_a_lost_packet_when_the_next_is_there() -> None:
    pcm = ramp(SAMPLE_RATE)
    restored = 0
    for lost in range(8, 12):
        buffer = a_buffer(fec=True)
        heard = wire.play(buffer, wire.without(wire.packets(pcm, fec=True), lost), 1.2)
        restored += buffer.counters.recovered
        if buffer.counters.recovered:
            assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], pcm)
    assert restored == 3  # the last packet of a frame is missed before the next can come


def test_fec_restores_only_the_last_packet_of_a_burst() -> None:
    pcm = ramp(SAMPLE_RATE)
    buffer = a_buffer(fec=True)
    heard = wire.play(buffer, wire.without(wire.packets(pcm, fec=True), 11, 12, 13), 1.2)
    found = sound_of(heard.pcm)
    assert buffer.counters.lost == 3 and buffer.counters.recovered == 1
    assert np.array_equal(found[13 * CHUNK_SAMPLES : 20 * CHUNK_SAMPLES], pcm[13 * CHUNK_SAMPLES : 20 * CHUNK_SAMPLES])


def test_concealment_fades_to_silence_within_100_ms() -> None:
    class Loud(PcmDecoder):
        def conceal(self, samples: int) -> Pcm:
            return np.full(samples, 10_000, np.int16)

    pcm = ramp(SAMPLE_RATE)
    buffer = JitterBuffer({wire.OPUS: Loud()})
    heard = wire.play(buffer, wire.packets(pcm)[:20], 1.5)
    guessed = sound_of(heard.pcm)[20 * CHUNK_SAMPLES :]
    assert guessed[0] == 10_000 and CONCEAL_SAMPLES - 80 < len(guessed) <= CONCEAL_SAMPLES
    assert np.all(np.diff(guessed.astype(int)) <= 0) and guessed[-1] < 100


@pytest.mark.parametrize(
    ("loss", "fec", "concealed"),
    [(0.01, True, 0.001), (0.05, True, 0.005), (0.01, False, 0.015), (0.05, False, 0.055)],
)
def test_random_loss_is_concealed_no_more_than_it_must_be(loss: float, fec: bool, concealed: float) -> None:
    pcm = wire.speechlike(200)
    buffer = a_buffer(fec=fec)
    lost = np.random.default_rng(5).random(len(pcm) // CHUNK_SAMPLES) < loss
    heard = wire.play(buffer, wire.without(wire.packets(pcm, fec=fec), *np.flatnonzero(lost)), 199.9)
    counters = buffer.counters
    assert counters.concealed_samples / len(pcm) <= concealed
    assert counters.late == counters.duplicate == counters.skipped_samples == 0
    assert counters.lost == pytest.approx(lost.sum(), abs=5)
    assert delays_ms(heard)[-1] == pytest.approx(delays_ms(heard)[10], abs=20)


def test_where_fec_makes_good_what_is_lost_frames_wait_for_it_while_packets_are_lost() -> None:
    sent = wire.packets(wire.speechlike(65), fec=True)
    buffer = a_buffer(fec=True)
    lost = range(101, 1200, 33)  # in each place of a frame in turn

    heard = wire.play(buffer, wire.without(sent, *lost), 64.9)

    assert buffer.counters.recovered >= len(lost) - 2
    assert buffer.counters.concealed_samples <= 2 * CHUNK_SAMPLES
    delays = delays_ms(heard)
    assert 10 < np.median(delays[150:280]) - np.median(delays[5:20]) < 25
    assert np.median(delays[-20:]) == pytest.approx(np.median(delays[5:20]), abs=3)


# ---- order


def test_packets_out_of_order_within_a_frame_are_heard_in_order() -> None:
    pcm = ramp(SAMPLE_RATE)
    buffer = a_buffer()
    heard = wire.play(buffer, wire.delayed(wire.packets(pcm, delay=0.002), 0.05, 16), 1.2, first_cut=0.1)
    assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], pcm)
    assert buffer.counters.lost == buffer.counters.late == 0


def test_duplicates_are_harmless() -> None:
    pcm = ramp(SAMPLE_RATE)
    once = wire.packets(pcm)
    buffer = a_buffer()
    again = [replace(sent, comes_at=sent.comes_at + 0.013 * (n % 4)) for n, sent in enumerate(once)]
    heard = wire.play(buffer, [*once, *again], 1.3)
    assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], pcm)
    assert buffer.counters.duplicate == len(once) and buffer.counters.received == len(once)


def test_a_packet_whose_place_was_filled_is_dropped_and_counted_late() -> None:
    pcm = ramp(SAMPLE_RATE)
    buffer = a_buffer()
    heard = wire.play(buffer, wire.delayed(wire.packets(pcm), 0.2, 20), 1.2)
    assert buffer.counters.late == 1 and buffer.counters.lost == 0
    assert np.count_nonzero(heard.pcm == CONCEALED) >= CHUNK_SAMPLES
    assert len(sound_of(heard.pcm)) >= len(pcm)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), sequence=st.integers(0, 0xFFFF), spread=st.floats(0, 0.1))
def test_whatever_the_network_does_frames_are_whole_and_packets_counted_once(
    seed: int, sequence: int, spread: float
) -> None:
    random = np.random.default_rng(seed)
    count = 100
    kinds = random.choice(["sent", "lost", "twice", "late"], count, p=random.dirichlet(np.ones(4)))
    delay = random.uniform(0, spread, count)
    coming: list[Sent] = []
    for kind, sent in zip(kinds, wire.packets(wire.sine(2), delay=delay, first_sequence=sequence), strict=True):
        if kind != "lost":
            coming.append(replace(sent, comes_at=sent.comes_at + 0.3 * (kind == "late")))
        if kind == "twice":
            coming.append(replace(sent, comes_at=sent.comes_at + 0.04))
    buffer = a_buffer()
    heard = wire.play(buffer, coming, 3)
    counters = buffer.counters
    assert all(frame.pcm.shape == (FRAME_SAMPLES,) and frame.pcm.dtype == np.int16 for frame in heard.frames)
    assert counters.received + counters.duplicate == len(coming)
    assert counters.late <= counters.received and counters.lost <= count
    assert np.all(delays_ms(heard) < 500)


# ---- jitter, spikes, drift


def test_jitter_is_taken_up_with_hardly_any_concealment() -> None:
    pcm = wire.speechlike(60)
    delay = 0.01 + np.random.default_rng(2).uniform(0, 0.03, len(pcm) // CHUNK_SAMPLES)
    buffer = a_buffer()
    heard = wire.play(buffer, wire.packets(pcm, delay=delay), 59.9)
    assert buffer.counters.concealed_samples < 0.002 * len(pcm)
    assert buffer.counters.lost == buffer.counters.late == 0
    assert delays_ms(heard).max() < 45


@pytest.mark.parametrize("kind", ["speech", "vowel", "hiss"])
@pytest.mark.parametrize("stall_ms", [60, 150, 250])
def test_delay_drains_within_two_seconds_of_a_spike(kind: str, stall_ms: int) -> None:
    noise = np.random.default_rng(0).normal(0, 2000, 16 * SAMPLE_RATE)
    pcm = {"speech": wire.speechlike(16), "vowel": wire.sine(16, 130), "hiss": noise.astype(np.int16)}[kind]
    end = 8 + stall_ms / 1000
    buffer = a_buffer()
    heard = wire.play(buffer, wire.stalled(wire.packets(pcm), 8, end), 15.9)
    before, after = delays_ms(heard)[heard.cuts < 8][-1], delays_ms(heard)[heard.cuts > end + 2]
    assert after.max() <= before + 21
    assert buffer.counters.lost == buffer.counters.late == 0


def test_no_word_is_lost_in_a_spike() -> None:
    buffer = a_buffer()
    wire.play(buffer, wire.stalled(wire.packets(wire.sine(10)), 5, 5.15), 9.9)
    counters = buffer.counters
    assert counters.skipped_samples == 0
    assert counters.compressed_samples == pytest.approx(counters.concealed_samples, abs=30 * MS)


def test_after_an_outage_only_what_can_be_caught_up_with_is_played() -> None:
    buffer = a_buffer()
    heard = wire.play(buffer, wire.stalled(wire.packets(wire.speechlike(12)), 5, 7), 11.9)
    assert buffer.counters.skipped_samples > SAMPLE_RATE // 2
    assert delays_ms(heard)[heard.cuts > 9].max() < 45


@pytest.mark.parametrize("clock_ppm", [200, -200])
def test_an_hour_of_drift_leaves_the_delay_flat_and_makes_no_click(clock_ppm: float) -> None:
    pcm = np.tile(wire.sine(1, 200), 60)

    def minute(n: int) -> list[Sent]:
        numbers = 3000 * n & 0xFFFF, 60 * 48_000 * n
        start = 60 * n / (1 + clock_ppm * 1e-6)
        return wire.packets(
            pcm, start=start, clock_ppm=clock_ppm, first_sequence=numbers[0], first_timestamp=numbers[1]
        )

    buffer = a_buffer()
    delays: list[float] = []
    coming = minute(0)
    sharpest = 0
    for n in range(60):
        heard = wire.play(buffer, [*coming, *minute(n + 1)], 60, first_cut=0.083 + 60 * n)
        coming = heard.left
        delays += delays_ms(heard).tolist()
        sharpest = max(sharpest, bend(sound_of(heard.pcm)))
    counters = buffer.counters
    assert np.ptp(delays[20:]) <= 20.0  # a packet: it is there as a whole or not at all
    assert counters.concealed_samples == counters.lost == counters.late == 0
    drifted = counters.compressed_samples if clock_ppm > 0 else counters.stretched_samples
    assert drifted == pytest.approx(3600 * 200e-6 * SAMPLE_RATE, abs=25 * MS)
    assert sharpest <= bend(pcm[:SAMPLE_RATE]) + 12


def test_drift_is_taken_up_in_silence_where_there_is_any() -> None:
    speech = wire.speechlike(2)
    pauses = np.zeros(SAMPLE_RATE, np.int16)
    pcm = np.tile(np.concatenate([speech, pauses]), 100)
    buffer = a_buffer()
    heard = wire.play(buffer, wire.packets(pcm, clock_ppm=200), 299)
    assert buffer.counters.compressed_samples >= 2 * 20 * MS
    assert np.ptp(delays_ms(heard)[20:]) <= 22


# ---- streams


def test_the_sequence_and_the_timestamp_may_wrap() -> None:
    pcm = ramp(SAMPLE_RATE)
    wrapping = wire.packets(pcm, first_sequence=0xFFFA, first_timestamp=0xFFFFFFFF - 6000)
    buffer = a_buffer()
    heard = wire.play(buffer, wire.without(wrapping, 9), 1.2)
    assert buffer.counters.lost == 1 and buffer.counters.resyncs == 0
    assert np.array_equal(sound_of(heard.pcm)[10 * CHUNK_SAMPLES : len(pcm)], pcm[10 * CHUNK_SAMPLES :])


def test_a_new_stream_is_heard_from_its_first_packet() -> None:
    pcm = ramp(SAMPLE_RATE)
    old = wire.packets(pcm[: SAMPLE_RATE // 2])
    new = wire.packets(pcm[SAMPLE_RATE // 2 :], start=0.5, ssrc=2, first_sequence=9000, first_timestamp=77)
    buffer = a_buffer()
    heard = wire.play(buffer, [*old, *new], 1.2)
    assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], pcm)
    assert buffer.counters.resyncs == 1 and buffer.counters.lost == 0


def test_a_straggler_of_the_old_stream_does_not_bring_it_back() -> None:
    pcm = ramp(SAMPLE_RATE)
    old = wire.delayed(wire.packets(pcm[: SAMPLE_RATE // 2]), 0.3, 22)
    new = wire.packets(pcm[SAMPLE_RATE // 2 :], start=0.5, ssrc=2, first_sequence=9000)
    buffer = a_buffer()
    wire.play(buffer, [*old, *new], 1.2)
    assert buffer.counters.resyncs == 1


def test_a_sender_that_starts_again_with_other_numbers_is_followed() -> None:
    pcm = ramp(2 * SAMPLE_RATE)
    old = wire.packets(pcm[:SAMPLE_RATE])
    new = wire.packets(pcm[SAMPLE_RATE:], start=1.0, first_sequence=30_000, first_timestamp=5)
    buffer = a_buffer()
    heard = wire.play(buffer, [*old, *new], 2.2)
    assert buffer.counters.resyncs == 1
    assert np.isin(pcm[-SAMPLE_RATE // 2 :], heard.pcm).all()


def test_one_packet_with_a_wild_number_is_ignored() -> None:
    pcm = ramp(SAMPLE_RATE)
    clean = wire.packets(pcm)
    wild = Sent(replace(clean[20].packet, sequence=40_000), 0, clean[20].comes_at + 0.001)
    buffer = a_buffer()
    heard = wire.play(buffer, [*clean, wild], 1.2)
    assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], pcm)


@pytest.mark.parametrize("jump", [480 * 2 * 50_000, -480 * 2 * 50_000, -960, 3 * 48_000])
def test_a_jump_of_the_timestamp_neither_stalls_nor_delays(jump: int) -> None:
    pcm = ramp(2 * SAMPLE_RATE)
    steady = wire.packets(pcm)
    jumped = [
        replace(sent, packet=replace(sent.packet, timestamp=(sent.packet.timestamp + jump * (n >= 40)) & 0xFFFFFFFF))
        for n, sent in enumerate(steady)
    ]
    buffer = a_buffer()
    heard = wire.play(buffer, jumped, 2.2)
    assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], pcm)


def test_a_muted_caller_is_silence_and_no_loss() -> None:
    pcm = wire.sine(1)
    before, after = wire.packets(pcm), wire.packets(pcm, start=6.0, first_sequence=50, first_timestamp=6 * 48_000)
    buffer = a_buffer()
    heard = wire.play(buffer, [*before, *after], 7.5)
    counters = buffer.counters
    assert counters.lost == 0 and counters.concealed_samples <= 2 * CONCEAL_SAMPLES
    assert counters.silent_samples > 4.8 * SAMPLE_RATE
    assert delays_ms(heard)[-8] < 25


@pytest.mark.parametrize("pause", [0, 48_000 * 30])
def test_a_pause_is_over_at_once_whether_or_not_the_timestamp_knows_of_it(pause: int) -> None:
    pcm = ramp(SAMPLE_RATE)
    before = wire.packets(pcm)
    after = wire.packets(pcm, start=31.0, first_sequence=50, first_timestamp=48_000 + pause)
    heard = wire.play(a_buffer(), [*before, *after], 33)
    second = heard.pcm[round(30.9 * SAMPLE_RATE) :]
    assert np.flatnonzero(second)[0] < 0.25 * SAMPLE_RATE
    settled = int(np.flatnonzero(second == pcm[100])[0])
    assert np.array_equal(second[settled : settled + len(pcm) - 100], pcm[100:])


def test_a_sender_that_rests_is_background_noise_and_no_concealment() -> None:
    class Resting(PcmDecoder):
        def decode(self, payload: bytes) -> Pcm | None:
            self.resting = len(payload) <= 2
            return np.full(CHUNK_SAMPLES, 3, np.int16) if self.resting else super().decode(payload)

        def conceal(self, samples: int) -> Pcm:
            return np.full(samples, 3, np.int16)

    talk = wire.packets(wire.sine(1))
    rests = [Sent(Packet(50 + n, 48_000 + 19_200 * n, b"\x00", wire.OPUS, 1), 0, 1.03 + 0.4 * n) for n in range(5)]
    again = wire.packets(wire.sine(1), start=2.9, first_sequence=55, first_timestamp=round(2.9 * 48_000))
    buffer = JitterBuffer({wire.OPUS: Resting()})
    heard = wire.play(buffer, [*talk, *rests, *again], 3.8)
    pause = heard.pcm[round(1.3 * SAMPLE_RATE) : round(2.7 * SAMPLE_RATE)]
    assert np.all(pause == 3)
    assert buffer.counters.lost == buffer.counters.concealed_samples == 0


def test_the_payload_type_may_change_in_mid_call() -> None:
    pcm = ramp(SAMPLE_RATE)
    half = SAMPLE_RATE // 2
    first = wire.packets(pcm[:half])
    second = wire.packets(
        pcm[half:], start=0.5, first_sequence=25, first_timestamp=123, rtp_clock=8000, payload_type=OTHER
    )
    buffer = JitterBuffer({wire.OPUS: PcmDecoder(), OTHER: PcmDecoder(rtp_clock=8000)})
    heard = wire.play(buffer, [*first, *second], 1.2)
    assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], pcm)
    assert buffer.counters.lost == 0


def test_packets_that_are_no_sound_take_a_number_and_no_time() -> None:
    pcm = ramp(SAMPLE_RATE)
    sound = wire.packets(pcm)
    shifted = [replace(sent, packet=replace(sent.packet, sequence=n + 3 * (n >= 20))) for n, sent in enumerate(sound)]
    keys = [Sent(Packet(20 + k, 19_200, b"\x05\x0a\x00\xa0", 101, 1), 0, sound[20].comes_at - 1e-4) for k in range(3)]
    buffer = a_buffer()
    heard = wire.play(buffer, [*shifted, *keys], 1.2)
    assert np.array_equal(sound_of(heard.pcm)[: len(pcm)], pcm)
    assert buffer.counters.lost == 0


def test_a_payload_that_cannot_be_read_is_concealed() -> None:
    pcm = ramp(SAMPLE_RATE)
    sent = wire.packets(pcm)
    sent[10] = replace(sent[10], packet=replace(sent[10].packet, payload=b"odd"))
    buffer = a_buffer()
    heard = wire.play(buffer, sent, 1.2)
    found = sound_of(heard.pcm)[: len(pcm)]
    assert buffer.counters.unreadable == 1
    assert np.all(found[10 * CHUNK_SAMPLES : 11 * CHUNK_SAMPLES] == CONCEALED)
    assert np.array_equal(found[11 * CHUNK_SAMPLES :], pcm[11 * CHUNK_SAMPLES :])


def test_what_is_kept_is_bounded_while_nobody_cuts() -> None:
    buffer = a_buffer()
    for sent in wire.packets(ramp(10 * SAMPLE_RATE)):
        buffer.add(sent.packet, sent.comes_at)
    for sequence in range(600, 1400):
        buffer.add(Packet(sequence, sequence * 960, bytes(960), wire.OPUS, 1), 10.0)
    assert len(buffer._queue) <= SAMPLE_RATE and len(buffer._held) <= 64


# ---- when to cut


def test_a_process_that_wakes_in_time_cuts_shortly_before_the_tick() -> None:
    lead = CutLead()
    for _ in range(100):
        lead.note(0.001)
    assert lead.lead_s == CUT_BEFORE_TICK_S


def test_a_process_that_wakes_late_cuts_earlier_until_it_is_better() -> None:
    lead = CutLead()
    lead.note(0.009)
    assert lead.lead_s == pytest.approx(0.011)
    lead.note(0.5)
    assert lead.lead_s == CutLead.LONGEST_S
    for _ in range(128):
        lead.note(0.0)
    assert lead.lead_s == CUT_BEFORE_TICK_S


def test_the_buffer_follows_cuts_that_come_earlier_or_later() -> None:
    buffer = a_buffer()
    coming = wire.packets(wire.sine(60), delay=0.011)
    for n in range(740):
        cut = 0.083 + 0.08 * n - (0.016 if n // 100 % 2 else 0.0)
        while coming and coming[0].comes_at <= cut:
            sent = coming.pop(0)
            buffer.add(sent.packet, sent.comes_at)
        buffer.pop_frame(cut)
    assert buffer.counters.concealed_samples <= 8 * CHUNK_SAMPLES
    assert buffer.counters.lost == buffer.counters.late == 0
