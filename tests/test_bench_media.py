"""The bench of the media plane: that it finds what it looks for, and reads its own figures right."""

import numpy as np

from scripts import bench_media
from scripts.bench_media import Round
from webrtc_duplex.audio import SAMPLE_RATE
from webrtc_duplex.media.opus import Decoder


def test_a_chirp_is_found_to_the_sample_in_noise_and_through_opus() -> None:
    decoder = Decoder()
    sounds = [decoder.decode(payload) for payload in bench_media.speech()]
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
    assert bench_media.memory_per_caller(rounds, "ours") == 0.4
    assert bench_media.memory_per_caller(rounds, "plain") is None


def test_a_quick_run_has_each_kind_of_fault_and_a_full_one_every_number_of_callers() -> None:
    assert {fault for faults in bench_media.plan(True, None) for fault in faults} <= set(bench_media.FAULTS)
    assert [len(faults) for faults in bench_media.plan(False, None)][:4] == [1, 16, 32, 64]
    assert bench_media.plan(False, [2, 3]) == [["clean"] * 2, ["clean"] * 3]
