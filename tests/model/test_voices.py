"""Voices: read from what is trusted, refused with a sentence where they do not fit."""

import gzip
import io
import os
import pickle
import random
import tarfile
import wave
from pathlib import Path

import numpy as np
import pyloudnorm
import pytest
import safetensors.torch
import torch
from torch import Tensor

from webrtc_duplex.audio import FRAME_SAMPLES, SAMPLE_RATE
from webrtc_duplex.errors import CheckpointError, DuplexError, RequestError
from webrtc_duplex.model.config import CODEBOOKS, LMConfig
from webrtc_duplex.model.prompts import VoiceCodes, VoiceEmbeddings
from webrtc_duplex.model.voices import (
    VoiceModel,
    archive_voices,
    decode_voice,
    encode_recording,
    read_voice,
    read_voices,
    save_voice,
)

CONFIG = LMConfig(width=12, heads=3, text_card=60, keys=200)
INITIAL = torch.linspace(-1, 1, 12)


def encode(pcm: Tensor) -> Tensor:
    """A codec that only counts: the codes of frame n are all n."""
    return torch.arange(-(-len(pcm) // FRAME_SAMPLES)).expand(CODEBOOKS, -1).clone()


MODEL = VoiceModel(CONFIG, INITIAL, encode)


def tensors(**changes: Tensor) -> dict[str, Tensor]:
    """What a good `.pt` voice of 8 embeddings holds."""
    embeddings = torch.randn(8, 1, 1, 12, generator=torch.Generator().manual_seed(0))
    embeddings[0, 0, 0] = INITIAL
    cache = torch.arange(17 * 4).reshape(1, 17, 4)
    cache[0, 0] = 3
    return {"embeddings": embeddings, "cache": cache} | changes


def pickled(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def tone_wav(path: Path, seconds: float, level: float = 0.1) -> Path:
    samples = level * np.sin(2 * np.pi * 500 * np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes(np.rint(samples * 32767).astype("<i2").tobytes())
    return path


def test_a_pickled_voice_is_read() -> None:
    voice = decode_voice("NATF0.pt", pickled(tensors()), MODEL)
    assert isinstance(voice, VoiceEmbeddings)
    assert torch.equal(voice.embeddings, tensors()["embeddings"][:, 0, 0])
    assert torch.equal(voice.cache, tensors()["cache"][0])


def test_a_voice_in_bfloat16_is_read() -> None:
    content = tensors()
    content["embeddings"] = content["embeddings"].bfloat16()
    voice = decode_voice("NATF0.pt", pickled(content), MODEL)
    assert isinstance(voice, VoiceEmbeddings) and voice.embeddings.dtype == torch.bfloat16


@pytest.mark.parametrize("file", ["NATF0.pt", "own.safetensors"])
def test_what_was_saved_in_our_format_is_read_back(file: str, tmp_path: Path) -> None:
    voice = decode_voice("NATF0.pt", pickled(tensors()), MODEL)
    save_voice(voice, tmp_path / "own.safetensors")
    again = read_voice(tmp_path / "own.safetensors", MODEL)
    assert isinstance(voice, VoiceEmbeddings) and isinstance(again, VoiceEmbeddings)
    assert torch.equal(again.embeddings, voice.embeddings) and torch.equal(again.cache, voice.cache)


def test_spoken_codes_are_saved_and_read_back(tmp_path: Path) -> None:
    save_voice(VoiceCodes(torch.arange(16).reshape(8, 2)), tmp_path / "own.safetensors")
    again = read_voice(tmp_path / "own.safetensors", MODEL)
    assert isinstance(again, VoiceCodes) and torch.equal(again.codes, torch.arange(16).reshape(8, 2))


def test_a_recording_is_cut_into_frames_and_encoded_once(tmp_path: Path) -> None:
    voice = read_voice(tone_wav(tmp_path / "me.wav", 10.5 * FRAME_SAMPLES / SAMPLE_RATE), MODEL)
    assert isinstance(voice, VoiceCodes)
    assert voice.codes[0].tolist() == list(range(11))


@pytest.mark.parametrize("level", [0.005, 0.9])
def test_a_recording_is_brought_to_minus_24_lufs(level: float, tmp_path: Path) -> None:
    heard: list[Tensor] = []

    def listen(pcm: Tensor) -> Tensor:
        heard.append(pcm)
        return encode(pcm)

    read_voice(tone_wav(tmp_path / "me.wav", 2.0, level), VoiceModel(CONFIG, INITIAL, listen))
    loudness = pyloudnorm.Meter(SAMPLE_RATE).integrated_loudness(heard[0].double().numpy())
    assert loudness == pytest.approx(-24, abs=0.1)


def test_voices_come_from_the_archive_and_from_the_folder_which_wins(tmp_path: Path) -> None:
    archive(tmp_path / "voices.tgz", {"voices/B.pt": pickled(tensors()), "voices/A.pt": pickled(tensors())})
    (tmp_path / "voices").mkdir()
    save_voice(VoiceCodes(torch.zeros(8, 2, dtype=torch.int64)), tmp_path / "voices" / "B.safetensors")
    (tmp_path / "voices" / "README.txt").write_text("not a voice")
    shelf = read_voices(tmp_path, MODEL)
    assert list(shelf.voices) == ["A", "B"]
    assert isinstance(shelf.get("B"), VoiceCodes)


def test_a_directory_without_voices_has_none(tmp_path: Path) -> None:
    assert read_voices(tmp_path, MODEL).voices == {}


def test_an_unknown_voice_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    archive(tmp_path / "voices.tgz", {"voices/A.pt": pickled(tensors())})
    with pytest.raises(RequestError, match=r"no voice 'Z' \(A\)"):
        read_voices(tmp_path, MODEL).get("Z")


def test_one_bad_voice_leaves_the_others_and_is_refused_as_the_callers_fault(tmp_path: Path) -> None:
    bad = pickled(tensors(embeddings=torch.full((8, 1, 1, 12), float("nan"))))
    archive(tmp_path / "voices.tgz", {"voices/A.pt": pickled(tensors()), "voices/bad.pt": bad})
    shelf = read_voices(tmp_path, MODEL)
    assert list(shelf.voices) == ["A"]
    with pytest.raises(CheckpointError, match="not finite") as raised:
        shelf.get("bad")
    assert raised.value.status == 400


def test_only_the_columns_that_are_used_of_the_cache_need_be_in_range() -> None:
    cache = tensors()["cache"].clone()
    cache[..., 2:] = -2  # T is 8: columns 8 and 9 are at places 0 and 1
    decode_voice("A.pt", pickled(tensors(cache=cache)), MODEL)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([1, 2], "holds a list, not a dict of tensors"),
        ({"embeddings": 3}, "not a dict of tensors"),
        ({"embeddings": torch.zeros(8, 1, 1, 12)}, "must hold cache and embeddings, but holds embeddings"),
        (tensors(extra=torch.zeros(1)), "but holds cache, embeddings, extra"),
        (tensors(embeddings=torch.zeros(8, 12)), r"embeddings must be \[T, 1, 1, D\], not \[8, 12\]"),
        (tensors(embeddings=torch.zeros(0, 1, 1, 12)), "embeddings must be floats, one row a column"),
        (tensors(embeddings=torch.zeros(8, 1, 1, 12, dtype=torch.int64)), "embeddings must be floats"),
        (tensors(embeddings=torch.zeros(8, 1, 1, 16)), "another model: its embeddings are 16 wide, this model is 12"),
        (tensors(embeddings=torch.randn(8, 1, 1, 12)), "another model: its first embedding differs"),
        (tensors(embeddings=torch.full((8, 1, 1, 12), float("inf"))), "not finite"),
        (tensors(embeddings=INITIAL.expand(101, 1, 1, 12)), "102 frames long, a voice at most 100"),
        (tensors(cache=torch.zeros(17, 4, dtype=torch.int64)), r"cache must be \[1, 17, 4\], not \[17, 4\]"),
        (
            tensors(cache=torch.zeros(1, 17, 3, dtype=torch.int64)),
            r"cache must be int64 \[17, 4\], not int64 \[17, 3\]",
        ),
        (tensors(cache=torch.zeros(1, 17, 4, dtype=torch.int32)), r"not int32 \[17, 4\]"),
        (tensors(cache=torch.full((1, 17, 4), -1)), r"must lie in 0\.\.60, but reaches from -1"),
        (tensors(cache=torch.full((1, 17, 4), 61)), r"text row of its cache must lie in 0\.\.60"),
        (tensors(cache=torch.full((1, 17, 4), 3) + 2046 * (torch.arange(17) > 0)[None, :, None]), r"0\.\.2048"),
    ],
)
def test_a_pickle_of_something_else_is_refused_with_a_sentence(content: object, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        decode_voice("A.pt", pickled(content), MODEL)


class Trap:
    """Pickles as a call of os.mkdir."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_code_in_it_is_refused_and_the_code_not_run(tmp_path: Path) -> None:
    raw = pickled({"embeddings": Trap(tmp_path / "trap")})
    with pytest.raises(CheckpointError, match="asks for code to be run, which is never done"):
        decode_voice("A.pt", raw, MODEL)
    assert not (tmp_path / "trap").exists()


def test_a_bare_pickle_is_not_even_looked_into(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no file of torch\.save"):
        decode_voice("A.pt", pickle.dumps(Trap(tmp_path / "trap")), MODEL)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_voice_is_refused_with_a_sentence_or_still_fits(seed: int) -> None:
    raw = bytearray(pickled(tensors()))
    chance = random.Random(seed)
    for _ in range(20):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    cut = bytes(raw[: chance.randrange(1, len(raw))] if seed % 2 else raw)
    try:
        decode_voice("A.pt", cut, MODEL)
    except DuplexError as error:
        assert "A.pt" in error.message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"codes": torch.zeros(8, 0, dtype=torch.int64)}, r"codes must be int64 \[8, frames\]"),
        ({"codes": torch.zeros(7, 3, dtype=torch.int64)}, r"not int64 \[7, 3\]"),
        ({"codes": torch.zeros(8, 3)}, r"not float32 \[8, 3\]"),
        ({"codes": torch.full((8, 3), 2048)}, r"codes must lie in 0\.\.2047"),
        ({"codes": torch.zeros(8, 101, dtype=torch.int64)}, "101 frames long"),
        ({"codes": torch.zeros(8, 3), "cache": torch.zeros(17, 4)}, "must hold codes, but holds cache, codes"),
        ({"embeddings": torch.zeros(3, 12)}, "must hold cache and embeddings"),
    ],
)
def test_a_safetensors_of_something_else_is_refused_with_a_sentence(content: dict[str, Tensor], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        decode_voice("A.safetensors", safetensors.torch.save(content), MODEL)


def test_a_truncated_safetensors_is_refused_with_a_sentence() -> None:
    raw = safetensors.torch.save({"codes": torch.zeros(8, 3, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match="A.safetensors is damaged or no safetensors file"):
        decode_voice("A.safetensors", raw[:-5], MODEL)


@pytest.mark.parametrize("name", ["../A.pt", "voices/../../A.pt", "/etc/A.pt"])
def test_an_archive_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    archive(tmp_path / "voices.tgz", {name: pickled(tensors())})
    with pytest.raises(CheckpointError, match="leads out of it"):
        read_voices(tmp_path, MODEL)


def test_links_in_an_archive_are_passed_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "voices.tgz", "w:gz") as tar:
        link = tarfile.TarInfo("voices/A.pt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert list(archive_voices(tmp_path / "voices.tgz")) == []


def test_a_member_too_large_for_a_voice_is_refused_before_it_is_read(tmp_path: Path) -> None:
    member = tarfile.TarInfo("voices/A.pt")
    member.size = 1 << 40
    (tmp_path / "voices.tgz").write_bytes(gzip.compress(member.tobuf()))
    with pytest.raises(CheckpointError, match="1099511627776 bytes, a voice at most"):
        read_voices(tmp_path, MODEL)


@pytest.mark.parametrize(
    "raw", [b"", b"no archive", gzip.compress(b"no tar at all" * 100)], ids=["empty", "text", "gzip"]
)
def test_a_broken_archive_is_refused_with_a_sentence(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "voices.tgz").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"voices\.tgz cannot be read as a tar archive of voices"):
        read_voices(tmp_path, MODEL)


def test_a_truncated_archive_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = archive(tmp_path / "voices.tgz", {f"voices/{n}.pt": random.Random(n).randbytes(9000) for n in range(3)})
    path.write_bytes(path.read_bytes()[:12_000])
    with pytest.raises(CheckpointError, match="cannot be read as a tar archive of voices"):
        read_voices(tmp_path, MODEL)


def test_a_silent_recording_is_no_voice(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="silent"):
        read_voice(tone_wav(tmp_path / "me.wav", 1.0, 0.0), MODEL)


def test_a_recording_too_short_to_have_a_loudness_is_no_voice(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"0\.30 s long: a voice needs at least 0\.4 s"):
        read_voice(tone_wav(tmp_path / "me.wav", 0.3), MODEL)


def test_a_recording_longer_than_half_the_window_is_refused_before_it_is_encoded() -> None:
    def never(pcm: Tensor) -> Tensor:
        raise AssertionError("encoded")

    sound = np.random.default_rng(0).normal(0, 0.1, 101 * FRAME_SAMPLES).astype(np.float32)
    with pytest.raises(CheckpointError, match="101 frames long, a voice at most 100"):
        encode_recording("me.wav", sound, VoiceModel(CONFIG, INITIAL, never))


@pytest.mark.parametrize("name", ["A.mp3", "A"])
def test_a_file_of_another_kind_is_no_voice(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"must end in \.pt, \.safetensors, \.wav"):
        read_voice(tmp_path / name, MODEL)


def test_a_missing_voice_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*A\.pt: No such file"):
        read_voice(tmp_path / "A.pt", MODEL)
