"""Checkpoint directories of a few megabytes in the released layouts, made of the golden packs' random weights.

Whole-system tests serve `personaplex_directory(path)` by `--model`: two voices, text prompts, nonsense for speech.
"""

import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceTrainer
from torch import Tensor

REFERENCE = Path(__file__).resolve().parent / "reference"
LOOP = REFERENCE / "personaplex_loop"
LOOP_PACK = json.loads((LOOP / "config.json").read_text())

VOICES = ("NATF0", "NATM0")
MIMI_NAME = "tokenizer-e351c8d8-checkpoint125.safetensors"
TOKENIZER_NAME = "tokenizer_spm_32k_3.model"

_WORDS = "you are a wise and friendly teacher answer questions or provide advice in a clear and engaging way"


def personaplex_directory(directory: Path, **entries: object) -> Path:
    """Write a PersonaPlex directory; `entries` are added to its config.json."""
    _directory(directory, LOOP, LOOP_PACK["lm"] | {"default_text": ""} | entries)
    write_voices(directory / "voices.tgz")
    return directory


def moshi_directory(directory: Path) -> Path:
    """Write a moshiko directory: 8 depformer steps, no voices."""
    return _directory(directory, REFERENCE / "lm8", json.loads((REFERENCE / "lm8" / "config.json").read_text()))


def _directory(directory: Path, source: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", directory)
    write_mimi(directory / MIMI_NAME, directory / "mimi_config.json", bins=config["card"])
    write_tokenizer(directory / TOKENIZER_NAME, config["text_card"])
    return directory


def write_mimi(path: Path, config_path: Path, bins: int) -> None:
    """The golden codec with random codebooks of `bins` entries in place of its own of 64."""
    config = json.loads((REFERENCE / "mimi" / "config.json").read_text())
    config["quantizer"]["bins"] = bins
    config_path.write_text(json.dumps(config))
    chance = torch.Generator().manual_seed(1)
    tensors = load_file(REFERENCE / "mimi" / "model.safetensors")
    for key in tensors:
        if key.endswith("embedding_sum"):
            tensors[key] = torch.randn(bins, tensors[key].shape[1], generator=chance)
        if key.endswith("cluster_usage"):
            tensors[key] = torch.rand(bins, generator=chance) + 0.5
    save_file(tensors, path)


def write_tokenizer(path: Path, pieces: int) -> None:
    """A tokenizer with so many pieces and the family's ids: 0 unknown, 1 begin, 2 end, 3 padding."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([_WORDS, "<system> hello there <system>", "abcdefghijklmnopqrstuvwxyz. ,'"] * 20),
        model_writer=model,
        vocab_size=pieces,
        model_type="bpe",
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


def write_voices(path: Path) -> None:
    """An archive as released: the pack's own voice, and a second one that says something else."""
    first = torch.load(LOOP / "voice.pt", weights_only=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, voice in zip(VOICES, (first, other_voice(first)), strict=True):
            content = io.BytesIO()
            torch.save(voice, content)
            member = tarfile.TarInfo(f"voices/{name}.pt")
            member.size = content.tell()
            tar.addfile(member, io.BytesIO(content.getvalue()))


def other_voice(voice: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A voice whose columns after the initial one come in another order."""
    embeddings = voice["embeddings"].clone()
    embeddings[1:] = embeddings[1:].flip(0)
    return {"embeddings": embeddings, "cache": voice["cache"].clone()}
