"""Prompts as columns: against the recorded inputs of the reference, in every variant."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from webrtc_duplex.model.config import LMConfig
from webrtc_duplex.model.prompts import (
    PromptColumns,
    Voice,
    VoiceCodes,
    VoiceEmbeddings,
    bare_start,
    initial_column,
    system_prompt,
)

LOOP = Path(__file__).resolve().parent.parent / "reference" / "personaplex_loop"
PACK = json.loads((LOOP / "config.json").read_text())
VARIANTS: Mapping[str, Mapping[str, object]] = PACK["variants"]
CONFIG = LMConfig.from_json(PACK["lm"])
INPUTS = load_file(LOOP / "inputs.safetensors")


def voice_embeddings() -> VoiceEmbeddings:
    voice = torch.load(LOOP / "voice.pt", weights_only=True)
    return VoiceEmbeddings(voice["embeddings"][:, 0, 0], voice["cache"][0])


def columns_of(variant: Mapping[str, object], voice: Voice) -> PromptColumns:
    if not variant["system_prompts_run"]:
        return bare_start(CONFIG)
    text = INPUTS["text_prompt_tokens"].tolist() if variant["text_prompt"] else []
    return system_prompt(CONFIG, voice if variant["voice_prompt"] else None, text)


def recorded(variant: Mapping[str, object]) -> Tensor:
    """Columns [P - 1 + F, 17] that the reference consumed."""
    return load_file(LOOP / str(variant["file"]))["input_columns"].long()


@pytest.mark.parametrize("name", VARIANTS)
def test_columns_of_spoken_codes_are_those_of_the_reference(name: str) -> None:
    columns = columns_of(VARIANTS[name], VoiceCodes(INPUTS["voice_codes"])).tokens
    assert len(columns) == max(1, int(str(VARIANTS[name]["prompt_frames_P"])))
    assert torch.equal(columns, recorded(VARIANTS[name])[: len(columns)])


@pytest.mark.parametrize("name", [name for name in VARIANTS if VARIANTS[name]["voice_prompt"]])
def test_columns_of_a_voice_file_are_those_of_the_reference_after_its_embeddings(name: str) -> None:
    columns = columns_of(VARIANTS[name], voice_embeddings())
    assert columns.embeddings is not None
    start = len(columns.embeddings)
    assert torch.equal(columns.tokens[start:], recorded(VARIANTS[name])[start : len(columns)])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_tails_are_the_delayed_rows_of_the_column_after_the_prompt(name: str) -> None:
    prompt = columns_of(VARIANTS[name], VoiceCodes(INPUTS["voice_codes"]))
    after = recorded(VARIANTS[name])[len(prompt)]
    assert torch.equal(prompt.tail_agent[1:], after[2:9])
    assert torch.equal(prompt.tail_user[1:], after[10:17])


def test_tokens_under_a_voices_embeddings_are_valid_ones() -> None:
    tokens = system_prompt(CONFIG, voice_embeddings(), []).tokens
    assert torch.equal(tokens[:8], initial_column(CONFIG).expand(8, -1))


def test_the_first_embedding_of_a_voice_file_is_the_initial_column() -> None:
    weights = load_file(LOOP / "model.safetensors")
    tables = [weights["text_emb.weight"], *(weights[f"emb.{k}.weight"] for k in range(16))]
    ours = sum(table[token].float() for table, token in zip(tables, initial_column(CONFIG), strict=True))
    torch.testing.assert_close(ours, voice_embeddings().embeddings[0], rtol=1e-5, atol=1e-5)


def test_a_voice_of_one_column_is_a_prompt_too() -> None:
    voice = voice_embeddings()
    short = VoiceEmbeddings(voice.embeddings[:1], voice.cache)
    tokens = system_prompt(CONFIG, short, []).tokens
    assert len(tokens) == 2 + 12
    assert torch.equal(tokens[1], voice.cache[:, 1])
