"""The bench of the media plane: that it finds what it looks for, and reads its own figures right."""

import numpy as np

from scripts import bench_media
from scripts.bench_media import Round
from webrtc_duplex.audio import SAMPLE_RATE
from webrtc_duplex.media.opus import Decoder, carries_fec


def test_a_chirp_is_found_to_the_sample_in_noise_and_through_opus() -> None:
    decoder = Decoder()
    sounds = [decoder.decode(payload) for payload in bench_media.speech(fec=True)]
    heard = np.concatenate([sound for sound in sounds if sound is not None])
    likeness = bench_media.find_chirps(heard)
    assert likeness.max() > 0.8
    assert abs(int(np.argmax(likeness)) - (SAMPLE_RATE // 2 + 156)) <= 12  # the encoder's look-ahead is 156 samples


def test_noise_holds_no_chirp() -> None:
    noise = np.random.default_rng(1).normal(0, 3000, SAMPLE_RATE).astype(np.int16)
    assert bench_media.find_chirps(noise).max() < 0.3


def test_servers_are_compared_round_by_round_beside_the_probe() -> None:
    plain = Round("plain", 16, cpu_ms=40.0, probe=1.0, delay_ms={"clean": 280.0})
    ours = Round("ours", 16, cpu_ms=16.0, probe=1.25, delay_ms={"clean": 114.0})
    first, second = bench_media.ratios([plain, ours])
    assert "CPU 0.40 of plain (probe 1.25 and 1.00)" in first
    assert "114 ms against 280" in second


def test_memory_per_caller_is_read_between_the_smallest_and_the_largest_clean_round() -> None:
    rounds = [
        Round("ours", peers, memory_mb=memory, delay_ms={"clean": 1.0}) for peers, memory in ((1, 100), (61, 124))
    ]
    rounds.append(Round("ours", 64, processes=2, memory_mb=200, delay_ms={"clean": 1.0}))
    assert bench_media.memory_per_caller(rounds, "ours") == 0.4
    assert bench_media.memory_per_caller(rounds, "plain") is None


def test_a_quick_run_mixes_faults_and_a_full_one_has_each_of_them_before_the_rounds_that_fill_the_machine() -> None:
    assert {fault for faults in bench_media.plan(True, None, None) for fault in faults} <= set(bench_media.FAULTS)
    full = bench_media.plan(False, None, None)
    assert [len(faults) for faults in full] == [1, 16, 8, 8, 8, 8, 8, 32, 64]
    assert {faults[0] for faults in full} == set(bench_media.FAULTS)
    assert bench_media.plan(False, [2, 3], None) == [["clean"] * 2, ["clean"] * 3]
    assert bench_media.plan(False, None, ["loss5"]) == [["loss5"] * 8]


def test_what_a_browser_says_carries_fec_and_is_sound_throughout() -> None:
    payloads, decoder = bench_media.speech(fec=True), Decoder()
    assert sum(map(carries_fec, payloads)) > 40 and not any(map(carries_fec, bench_media.speech(fec=False)))
    sounds = [decoder.decode(payload) for payload in payloads]
    heard = np.concatenate([sound for sound in sounds if sound is not None])
    assert bench_media.share_of_sound(heard, 1.0) == 1.0
    assert bench_media.share_of_sound(np.zeros_like(heard), 1.0) == 0.0


def test_a_server_that_loses_sound_is_not_cheap_for_it() -> None:
    assert Round("plain", 32, cpu_ms=30.0, back=0.5).cost_ms == 60.0


def test_what_was_made_up_is_counted_between_two_looks() -> None:
    before = {"received": 1000.0, "concealed": 50.0}
    after = {"received": 1970.0, "concealed": 80.0, "silent": 0.0}
    assert bench_media.concealed(before, after) == 0.03
    assert bench_media.concealed({}, {}) is None
