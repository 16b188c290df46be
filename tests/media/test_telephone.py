"""Telephone codecs, with the real ones of FFmpeg, and keys."""

import numpy as np
import pytest

from tests.media import wire
from webrtc_duplex.audio import CHUNK_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.errors import RequestError
from webrtc_duplex.media import telephone
from webrtc_duplex.media.jitter import JitterBuffer, Packet

NAMES = ["pcmu", "pcma", "g722"]


def through(name: str, pcm: Pcm) -> Pcm:
    encoder, decoder = telephone.TelephoneEncoder(name), telephone.TelephoneDecoder(name)
    sounds = [decoder.decode(encoder.encode(chunk)) for chunk in pcm.reshape(-1, CHUNK_SAMPLES)]
    return np.concatenate([sound for sound in sounds if sound is not None])


def snr_db(pcm: Pcm, hz: float) -> float:
    """How far a sine of `hz`, whatever its size and phase, stands above all else."""
    sound = pcm.astype(np.float64)
    angle = 2 * np.pi * hz * np.arange(len(sound)) / SAMPLE_RATE
    basis = np.stack([np.sin(angle), np.cos(angle)], axis=1)
    tone = basis @ np.linalg.lstsq(basis, sound, rcond=None)[0]
    return float(10 * np.log10(np.sum(tone**2) / np.sum((sound - tone) ** 2)))


@pytest.mark.parametrize("hz", [200, 440, 1000, 3000])
@pytest.mark.parametrize("name", NAMES)
def test_a_sine_goes_there_and_back_without_edges(name: str, hz: float) -> None:
    heard = through(name, wire.sine(1, hz))
    assert snr_db(heard[4800:], hz) > 30


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_is_160_bytes(name: str) -> None:
    encoder = telephone.TelephoneEncoder(name)
    assert [len(encoder.encode(np.zeros(CHUNK_SAMPLES, np.int16))) for _ in range(3)] == [160] * 3
    assert encoder.rtp_clock == 8000


@pytest.mark.parametrize("rates", [(8000, 24_000), (24_000, 8000), (16_000, 24_000), (24_000, 16_000)])
def test_resampling_in_pieces_equals_resampling_at_once(rates: tuple[int, int]) -> None:
    pcm = wire.speechlike(0.5)
    at_once = telephone.Resampler(*rates)(pcm)
    stream, random = telephone.Resampler(*rates), np.random.default_rng(1)
    edges = np.sort(random.integers(0, len(pcm), 30))
    pieces = np.concatenate([stream(piece) for piece in np.split(pcm, edges)])
    assert np.abs(pieces.astype(int) - at_once).max() <= 1


def test_what_the_slow_side_cannot_carry_is_filtered_out() -> None:
    heard = telephone.Resampler(24_000, 8000)(wire.sine(0.5, 6000))
    assert np.abs(heard[100:]).max() < 20


def test_a_lost_packet_is_the_last_period_again() -> None:
    pcm = wire.sine(1, 200)
    encoder, decoder = telephone.TelephoneEncoder("pcmu"), telephone.TelephoneDecoder("pcmu")
    heard = []
    for n, chunk in enumerate(pcm.reshape(-1, CHUNK_SAMPLES)):
        payload = encoder.encode(chunk)
        heard.append(decoder.conceal(CHUNK_SAMPLES) if n == 25 else decoder.decode(payload))
    sound = np.concatenate([piece for piece in heard if piece is not None])
    assert snr_db(sound[4800:], 200) > 20


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_or_endless_payload_is_no_sound(name: str) -> None:
    decoder = telephone.TelephoneDecoder(name)
    assert decoder.decode(b"") is None
    assert decoder.decode(bytes(10_000)) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 30])
def test_a_packet_of_hardly_any_sound_ends_a_concealment(name: str, size: int) -> None:
    decoder = telephone.TelephoneDecoder(name)
    decoder.conceal(CHUNK_SAMPLES)
    pcm = decoder.decode(bytes(size))
    assert pcm is not None and 0 < len(pcm) < CHUNK_SAMPLES


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'gsm'"):
        telephone.decoder("gsm", np.random.default_rng(0))


def test_comfort_noise_is_as_loud_as_it_says_and_no_concealment() -> None:
    noise = telephone.decoder("cn", np.random.default_rng(0))
    assert noise.resting
    noise.decode(bytes([50, 1, 2, 3]))
    heard = noise.conceal(SAMPLE_RATE // 10)
    assert 20 * np.log10(np.std(heard.astype(np.float64)) / 32768) == pytest.approx(-50, abs=1)


def test_comfort_noise_fills_a_pause_of_a_telephone_call() -> None:
    encoder = telephone.TelephoneEncoder("pcmu")
    talk = [encoder.encode(chunk) for chunk in wire.sine(1).reshape(-1, CHUNK_SAMPLES)]
    packets = [(0.03 + 0.02 * n, Packet(n, 160 * n, payload, 0, 1)) for n, payload in enumerate(talk)]
    packets.append((1.03, Packet(50, 8000, bytes([45]), 13, 1)))
    buffer = JitterBuffer({0: telephone.TelephoneDecoder("pcmu"), 13: telephone.ComfortNoise(np.random.default_rng(0))})
    heard = wire.play(buffer, [wire.Sent(packet, 0, at) for at, packet in packets], 1.9)
    pause = heard.pcm[round(1.2 * SAMPLE_RATE) : round(1.8 * SAMPLE_RATE)].astype(np.float64)
    assert 20 * np.log10(np.std(pause) / 32768) == pytest.approx(-45, abs=2)
    assert buffer.counters.concealed_samples == buffer.counters.lost == 0


# ---- keys


def key_packets(number: int, timestamp: int, step: int, *, packets: int = 4, sequence: int = 0) -> list[Packet]:
    """A key as phones send it: while it is down, and its end three times."""
    durations = [*(step * (n + 1) for n in range(packets)), *[step * (packets + 1)] * 3]
    ends = [False] * packets + [True] * 3
    return [
        Packet(sequence + n, timestamp, bytes([number, 0x80 * end | 10]) + duration.to_bytes(2, "big"), 101, 1)
        for n, (duration, end) in enumerate(zip(durations, ends, strict=True))
    ]


def pressed(packets: list[Packet]) -> list[str]:
    keys = telephone.Keys()
    return [key for packet in packets if (key := keys.hear(packet)) is not None]


@pytest.mark.parametrize("step", [160, 960])
def test_a_key_is_reported_once_however_often_it_is_sent(step: int) -> None:
    packets = [packet for n in range(16) for packet in key_packets(n, 20_000 * n, step)]
    assert pressed(packets) == list("0123456789*#ABCD")


def test_the_same_key_twice_is_two_keys() -> None:
    assert pressed([*key_packets(5, 1000, 160), *key_packets(5, 9000, 160)]) == ["5", "5"]


def test_a_key_of_which_only_the_end_arrives_is_a_key() -> None:
    assert pressed(key_packets(7, 1000, 160)[-1:]) == ["7"]


def test_packets_out_of_order_make_no_new_key() -> None:
    first, second = key_packets(1, 1000, 160), key_packets(2, 9000, 160)
    assert pressed([*first[:-1], *second[:2], first[-1], *second[2:]]) == ["1", "2"]


def test_a_key_held_beyond_the_duration_field_is_one_key() -> None:
    held = Packet(0, 1000, bytes([9, 10]) + (0xFFFF).to_bytes(2, "big"), 101, 1)
    assert pressed([held, *key_packets(9, 1000 + 0xFFFF, 160)]) == ["9"]


def test_the_timestamp_of_keys_may_wrap() -> None:
    assert pressed([*key_packets(3, 0xFFFFFF00, 160), *key_packets(4, 500, 160)]) == ["3", "4"]


@pytest.mark.parametrize("payload", [b"", b"\x01", bytes([16, 0, 0, 0]), bytes([200, 0x80, 0, 1])])
def test_what_is_no_key_is_ignored(payload: bytes) -> None:
    assert telephone.Keys().hear(Packet(0, 0, payload, 101, 1)) is None
