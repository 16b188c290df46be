"""libopus by ctypes, with the real library."""

from pathlib import Path

import av
import numpy as np
import pytest

from tests.media import wire
from webrtc_duplex.audio import CHUNK_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.errors import EngineError
from webrtc_duplex.media import opus
from webrtc_duplex.media.jitter import JitterBuffer, Packet

LOOK_AHEAD = 156
"""Samples by which the encoder is behind: 6.5 ms."""

CELT = range(16, 32)
HYBRID_OR_SILK = range(0, 16)


def chunks(pcm: Pcm) -> list[Pcm]:
    return list(pcm[: len(pcm) // CHUNK_SAMPLES * CHUNK_SAMPLES].reshape(-1, CHUNK_SAMPLES))


def encoded(pcm: Pcm, *, loss: float = 0.0) -> list[bytes]:
    encoder = opus.Encoder()
    encoder.set_loss(loss)
    return [encoder.encode(chunk) for chunk in chunks(pcm)]


def likeness(a: Pcm, b: Pcm) -> float:
    return float(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1])


def modes(packets: list[bytes]) -> set[int]:
    return {packet[0] >> 3 for packet in packets}


def voiced(seconds: float) -> Pcm:
    """Words and pauses; the encoder guards only what it takes for speech."""
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    phase = 2 * np.pi * np.cumsum(130 + 30 * np.sin(2 * np.pi * 0.7 * time)) / SAMPLE_RATE
    voice = np.sum([np.sin(k * phase) / k for k in range(1, 20)], axis=0)
    words = (time * 1.25) % 1 < 0.7
    return np.asarray(np.rint(4000 * voice * words * (1 + 0.5 * np.sin(2 * np.pi * 3 * time))), np.int16)


def test_a_voice_comes_through_at_24_khz() -> None:
    pcm = voiced(2)
    decoder = opus.Decoder()
    sounds = [decoder.decode(packet) for packet in encoded(pcm)]
    heard = np.concatenate([sound for sound in sounds if sound is not None])
    assert len(heard) == len(pcm)
    assert likeness(heard[LOOK_AHEAD:], pcm[:-LOOK_AHEAD]) > 0.95


def test_a_clean_path_is_coded_in_celt_at_about_40_kbps() -> None:
    packets = encoded(voiced(2))
    assert modes(packets) <= set(CELT)
    assert 30_000 < np.mean([len(packet) for packet in packets]) * 8 * 50 < 45_000
    assert not any(opus.carries_fec(packet) for packet in packets)


def test_while_the_peer_reports_loss_packets_carry_fec_and_then_no_more() -> None:
    encoder = opus.Encoder()
    encoder.set_loss(0.05)
    guarded = [encoder.encode(chunk) for chunk in chunks(voiced(2))]
    assert modes(guarded) <= set(HYBRID_OR_SILK)
    words = np.array([bool(chunk.any()) for chunk in chunks(voiced(2))])
    assert np.mean([opus.carries_fec(packet) for packet in guarded[1:]], where=words[:-1]) > 0.9
    while encoder.guarded:
        encoder.set_loss(0.0)
    assert modes([encoder.encode(chunk) for chunk in chunks(voiced(2))][5:]) <= set(CELT)


def test_loss_is_believed_at_once_and_its_end_slowly() -> None:
    encoder = opus.Encoder()
    encoder.set_loss(0.1)
    encoder.set_loss(0.0)
    assert encoder.guarded
    for _ in range(20):
        encoder.set_loss(0.0)
    assert not encoder.guarded


def test_the_flag_is_read_as_libopus_reads_it() -> None:
    has_lbrr = opus._libopus().opus_packet_has_lbrr
    for pcm in (voiced(1), wire.speechlike(2)):
        for packet in encoded(pcm, loss=0.1):
            assert opus.carries_fec(packet) == bool(has_lbrr(packet, len(packet)))


def test_a_lost_packet_is_recovered_far_better_than_concealed() -> None:
    packets = encoded(voiced(4), loss=0.1)
    reference = opus.Decoder()
    truth = [reference.decode(packet) for packet in packets]
    recovered: list[float] = []
    concealed: list[float] = []
    for with_fec, into in ((True, recovered), (False, concealed)):
        decoder = opus.Decoder()
        for n, packet in enumerate(packets):
            if n % 10 == 5:
                continue
            if n % 10 == 6 and opus.carries_fec(packet):
                guess = decoder.recover(packet, CHUNK_SAMPLES) if with_fec else decoder.conceal(CHUNK_SAMPLES)
                lost = truth[n - 1]
                assert guess is not None and lost is not None
                into.append(likeness(guess, lost))
            decoder.decode(packet)
    assert len(recovered) >= 12
    assert np.median(recovered) > 0.9
    assert np.median(recovered) > np.median(concealed)


def test_a_packet_without_fec_recovers_nothing() -> None:
    packets = encoded(voiced(0.2))
    decoder = opus.Decoder()
    decoder.decode(packets[0])
    assert decoder.recover(packets[2], CHUNK_SAMPLES) is None


@pytest.mark.parametrize("payload", [b"", b"\xff" * 3, bytes([0x03, 0x3F]) + b"\x00", b"\xfb" + b"\xff" * 40])
def test_what_is_no_opus_is_no_sound(payload: bytes) -> None:
    decoder = opus.Decoder()
    decoder.decode(encoded(voiced(0.1))[0])
    assert decoder.decode(payload) is None
    assert not opus.carries_fec(payload)


def test_a_packet_of_two_bytes_says_that_the_sender_rests() -> None:
    decoder = opus.Decoder()
    rested = []
    for payload in (encoded(voiced(0.1))[0], bytes([13 << 3, 0])):
        decoder.decode(payload)
        rested.append(decoder.resting)
    decoder.reset()
    assert [*rested, decoder.resting] == [False, True, False]


def test_stereo_packets_are_heard_in_mono() -> None:
    encoder = av.AudioCodecContext.create("libopus", "w")
    encoder.sample_rate, encoder.layout, encoder.format = 48_000, "stereo", "s16"
    frame = av.AudioFrame.from_ndarray(np.repeat(wire.sine(1)[:960], 2)[None], format="s16", layout="stereo")
    frame.sample_rate = 48_000
    packets = [bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)]]
    pcm = opus.Decoder().decode(packets[0])
    assert pcm is not None and len(pcm) == CHUNK_SAMPLES


def test_without_libopus_the_error_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opus, "_in_wheel", lambda: list[Path]())
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(EngineError, match="PyAV wheel"):
        opus._libopus.__wrapped__()


def test_the_systems_library_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = str(opus._in_wheel()[0])
    monkeypatch.setattr(opus, "_in_wheel", lambda: list[Path]())
    monkeypatch.setattr("ctypes.util.find_library", lambda name: bundled)
    assert opus._libopus.__wrapped__().opus_decoder_get_size(1) > 0


@pytest.mark.parametrize(("loss", "concealed"), [(0.01, 0.003), (0.05, 0.02)])
def test_a_lossy_call_in_real_opus_conceals_hardly_any_speech(loss: float, concealed: float) -> None:
    pcm = voiced(60)
    payloads = encoded(pcm, loss=0.05)
    lost = np.random.default_rng(4).random(len(payloads)) < loss
    buffer = JitterBuffer({wire.OPUS: opus.Decoder()})
    sent = [
        wire.Sent(Packet(n, 960 * n, payload, wire.OPUS, 1), 0.02 * n, 0.03 + 0.02 * n)
        for n, payload in enumerate(payloads)
        if not lost[n]
    ]
    wire.play(buffer, sent, 59.9)
    pauses = sum(gone and not opus.carries_fec(after) for gone, after in zip(lost, payloads[1:], strict=False))
    counters = buffer.counters
    assert counters.concealed_samples - pauses * CHUNK_SAMPLES <= concealed * len(pcm)
    assert counters.recovered > 0.3 * lost.sum()
    assert counters.skipped_samples == counters.compressed_samples == 0
