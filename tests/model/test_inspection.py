"""What is looked at first in a checkpoint, on one whose answers are known."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import MIMI_NAME, moshi_directory, personaplex_directory
from webrtc_duplex.model.checkpoint import initial_embedding, load_mimi, open_checkpoint
from webrtc_duplex.model.inspection import Finding, inspect


def findings(directory: Path) -> list[Finding]:
    return list(inspect(open_checkpoint(directory)))


def one(found: list[Finding], start: str) -> Finding:
    (finding,) = (finding for finding in found if finding.text.startswith(start))
    return finding


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return personaplex_directory(tmp_path / "personaplex")


def test_steps_voices_codec_and_memory_are_reported(directory: Path) -> None:
    found = findings(directory)
    assert "[384, 8]: 16 depformer steps, 8 of them are run" in one(found, "depformer.layers.0").text
    assert "8 embeddings in float32, the first 0.0000 of its length" in one(found, "voice NATF0").text
    assert one(found, "voice NATM0").good
    assert "weights of" in one(found, "memory on a GPU, bfloat16:").text
    assert "weights of" in one(found, "memory on a GPU, bfloat16 with keys of int8:").text


def test_a_codec_that_says_other_codes_for_silence_than_the_model_was_taught_is_found(directory: Path) -> None:
    assert not one(findings(directory), "silence").good


def test_a_codec_that_says_silence_and_tone_as_taught_is_good(directory: Path) -> None:
    mimi = load_mimi(open_checkpoint(directory), torch.device("cpu"))
    moments = torch.arange(40 * 1920) / 24_000
    silence, tone = torch.zeros(len(moments)), 0.5 * torch.sin(2 * torch.pi * 440 * moments)
    taught = {name: mimi.encode_stream(sound)[:, 34].tolist() for name, sound in (("silence", silence), ("sine", tone))}
    config = json.loads((directory / "config.json").read_text())
    config |= {"silence_codes": taught["silence"], "sine_codes": taught["sine"]}
    (directory / "config.json").write_text(json.dumps(config))
    found = findings(directory)
    assert "has 8 of 8 codes" in one(found, "silence").text
    assert one(found, "a tone of 440 Hz").good


def test_a_voice_that_ends_on_other_text_than_padding_is_found(directory: Path) -> None:
    (directory / "voices").mkdir()
    embeddings = initial_embedding(open_checkpoint(directory))[None]
    save_file({"embeddings": embeddings, "cache": torch.full((17, 4), 7)}, directory / "voices" / "odd.safetensors")
    odd = one(findings(directory), "voice odd")
    assert not odd.good and "text token 7 in its last column, wanted 3" in odd.text


def test_a_voice_of_another_model_is_found(directory: Path) -> None:
    (directory / "voices").mkdir()
    save_file(
        {"embeddings": torch.ones(1, 12), "cache": torch.zeros(17, 4, dtype=torch.int64)},
        directory / "voices" / "odd.safetensors",
    )
    odd = one(findings(directory), "voice odd")
    assert not odd.good and "is a voice of another model" in odd.text


def test_weights_that_do_not_fit_are_found_and_nothing_is_run(directory: Path) -> None:
    tensors = load_file(directory / MIMI_NAME)
    del tensors["encoder.model.0.conv.conv.bias"]
    save_file(tensors, directory / MIMI_NAME)
    found = findings(directory)
    (bad,) = (finding for finding in found if not finding.good)
    assert "lacks 'encoder.model.0.conv.conv.bias'" in bad.text
    assert not any(finding.text.startswith("silence") for finding in found)


def test_a_model_without_prompts_has_nothing_to_compare_silence_with(tmp_path: Path) -> None:
    assert all(finding.good for finding in findings(moshi_directory(tmp_path)))
