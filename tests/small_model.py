"""A duplex model of a few thousand random weights, whose windows wrap within a second: for rules, not for numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from webrtc_duplex.audio import FRAME_SAMPLES, Pcm
from webrtc_duplex.errors import RequestError
from webrtc_duplex.messages import ModelCard, Prompt
from webrtc_duplex.model.config import LMConfig, MimiConfig, SamplingConfig
from webrtc_duplex.model.mimi import Mimi
from webrtc_duplex.model.personaplex import LM, PersonaPlex
from webrtc_duplex.model.prompter import Wish
from webrtc_duplex.model.prompts import PromptColumns, VoiceCodes, bare_start, system_prompt
from webrtc_duplex.model.runner import PersonaPlexRunner
from webrtc_duplex.model.streaming import tensors
from webrtc_duplex.model.weights import write

KEYS = 10
"""Columns that the LM's window holds."""
CODEC_KEYS = 7
"""Positions that the codec's windows hold: three and a half frames."""

LM_CONFIG = LMConfig(
    width=32,
    heads=4,
    layers=2,
    hidden=48,
    keys=KEYS,
    text_card=40,
    card=64,
    depformer_width=16,
    depformer_heads=2,
    depformer_layers=2,
    depformer_hidden=24,
    silence_codes=(5, 6, 7, 8, 9, 10, 11, 12),
    sine_codes=(21, 22, 23, 24, 25, 26, 27, 28),
    sampling=SamplingConfig(text_temperature=0.9, text_top_k=10, audio_temperature=0.9, audio_top_k=20),
)
MIMI_CONFIG = MimiConfig(
    filters=4,
    width=32,
    heads=4,
    layers=2,
    hidden=48,
    keys=CODEC_KEYS,
    codebook_width=16,
    codebook_size=64,
    file_codebooks=8,
)


def small_model(seed: int = 0) -> PersonaPlex:
    cpu = torch.device("cpu")
    model = PersonaPlex(LM(LM_CONFIG, cpu, torch.float32), Mimi(MIMI_CONFIG, cpu))
    chance = torch.Generator().manual_seed(seed)
    for module in (model.lm, model.mimi):
        randomise(module, chance)
    return model


def randomise(module: LM | Mimi, chance: torch.Generator) -> None:
    """Weights that keep numbers near 1, so that codes and tokens differ from frame to frame."""
    meta = torch.device("meta")
    outline = LM(module.config, meta, torch.float32) if isinstance(module, LM) else Mimi(module.config, meta)
    for (name, weight), shape in zip(module.named_parameters(), map(Tensor.size, outline.parameters()), strict=True):
        if "norm" in name and "bias" not in name:
            weight.fill_(1.0)
        elif "table" in name or "centroids" in name:
            weight.normal_(generator=chance)
        else:
            write(weight, torch.empty(shape).normal_(std=1.5 * shape[-1] ** -0.5, generator=chance))


@dataclass(frozen=True)
class SmallPrompts:
    """Voices `low` and `high`, text of numbers ("3 14 15"), or no system prompt at all."""

    system: bool = True
    card_name: str = "small"

    def card(self) -> ModelCard:
        return ModelCard(self.card_name, ("high", "low"), "high", self.system, 100, ("",) * LM_CONFIG.text_card)

    def wish(self, prompt: Prompt) -> Wish:
        if prompt.voice not in (None, "high", "low"):
            raise RequestError(f"the model has no voice {prompt.voice!r}", param="voice")
        return Wish(prompt.voice or "high", prompt.text or "")

    def columns(self, wish: Wish) -> PromptColumns:
        if not self.system:
            return bare_start(LM_CONFIG)
        base = 30 if wish.voice == "high" else 40
        codes = (torch.arange(8)[:, None] * 3 + torch.arange(5) + base) % LM_CONFIG.card
        return system_prompt(LM_CONFIG, VoiceCodes(codes), [int(word) for word in wish.text.split()])


def small_runner(
    rows: int = 4,
    system: bool = False,
    lanes: Sequence[int] | None = None,
    cache_bytes: int = 1 << 24,
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> PersonaPlexRunner:
    return PersonaPlexRunner(small_model(seed), SmallPrompts(system), rows, cache_bytes, lanes, kv_dtype)


def begin(runner: PersonaPlexRunner, row: int, prompt: Prompt, columns: int = 1000) -> None:
    """Open a row, its prompt prefilled in chunks of so many columns."""
    left = runner.begin(row, prompt)
    while left:
        left = runner.prefill(row, columns)


def row_state(runner: PersonaPlexRunner, row: int) -> dict[str, Tensor]:
    """All that the model remembers of a row."""
    return {name: tensor[row].clone() for name, tensor in tensors(runner.state)}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


def speech(frames: int, seed: int) -> Pcm:
    """Something to hear: noise whose loudness wanders, int16 [frames, 1920]."""
    chance = np.random.default_rng(seed)
    loud = 3000 * (1.2 + np.sin(np.arange(frames) * 0.7 + seed))[:, None]
    pcm: Pcm = (loud * chance.standard_normal((frames, FRAME_SAMPLES))).astype(np.int16)
    return pcm


@dataclass(frozen=True)
class Call:
    """What one row said: pcm [n, 1920], text [n], codes [n, 8]."""

    pcm: Pcm
    text: NDArray[np.int64]
    codes: NDArray[np.int64]

    def equals(self, other: "Call") -> bool:
        return all(
            np.array_equal(a, b) for a, b in ((self.pcm, other.pcm), (self.text, other.text), (self.codes, other.codes))
        )


def talk(runner: PersonaPlexRunner, row: int, heard: Pcm, others: Sequence[int] = ()) -> Call:
    """Step the row through what it hears, beside other rows that hear noise."""
    rows = np.array([*others, row])
    said = []
    for index, frame in enumerate(heard):
        noise = speech(len(others), seed=1000 + index)
        pcm, text, sound = runner.step(rows, np.concatenate([noise, frame[None]]))
        assert sound.all()
        said.append((pcm[-1], text[-1], runner.codes[-1]))
    pcm_said, text_said, codes_said = (np.stack(part) for part in zip(*said, strict=True))
    return Call(pcm_said, text_said, codes_said)
