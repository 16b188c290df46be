"""What is said to the model before the call: voice and persona as columns of its token matrix.

A prompt is a sequence of frames: the voice speaks, a gap, the persona's text while the agent is
silent, a gap; on the caller's side a steady tone all the while. The delay rule of 3.2 turns frames into columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from webrtc_duplex.model.config import CODEBOOKS, LMConfig

GAP_FRAMES = 6
"""Frames of silence after the voice and after the text: half a second, rounded down."""

ROWS = 1 + 2 * CODEBOOKS
"""Rows of a column: text, the agent's codebooks 0..7, the caller's codebooks 0..7."""

CACHE_COLUMNS = 4
"""Columns that a voice file's `cache` holds; the one of position q is at q mod 4."""


@dataclass(frozen=True, slots=True)
class VoiceCodes:
    """A voice as what it says: Mimi codes int64 [8, V], V frames."""

    codes: Tensor

    @property
    def frames(self) -> int:
        """V"""
        return self.codes.shape[1]


@dataclass(frozen=True, slots=True)
class VoiceEmbeddings:
    """A voice as the temporal transformer's inputs, which only the model that made them understands.

    `embeddings` [T, D] stand for columns 0..T-1; `cache` int64 [17, 4] holds column T whole and the delayed rows of
    column T + 1. Such a voice is V = T + 1 frames long.
    """

    embeddings: Tensor
    cache: Tensor

    @property
    def frames(self) -> int:
        """V"""
        return self.embeddings.shape[0] + 1


Voice = VoiceCodes | VoiceEmbeddings


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """A prompt ready for prefill.

    | field      | shape         | meaning                                                                          |
    |------------|---------------|----------------------------------------------------------------------------------|
    | tokens     | int64 [P, 17] | columns 0..P-1; where `embeddings` stand in, initial tokens that nobody looks at |
    | embeddings | [T, D] / None | temporal inputs in place of those of columns 0..T-1                              |
    | tail_agent | int64 [8]     | the agent's last frame; its codebooks 1..7 are forced in column P                |
    | tail_user  | int64 [8]     | the caller's last frame; its codebooks 1..7 stand in column P                    |
    """

    tokens: Tensor
    embeddings: Tensor | None
    tail_agent: Tensor
    tail_user: Tensor

    def __len__(self) -> int:
        """P, the number of columns to prefill."""
        return self.tokens.shape[0]

    @property
    def tail(self) -> Tensor:
        """Both last frames, agent and caller: int64 [2, 8]"""
        return torch.stack([self.tail_agent, self.tail_user])


def bare_start(config: LMConfig) -> PromptColumns:
    """No prompt, as moshi and the tiny agent have it: the initial column; the caller's first frame is column 1."""
    column = initial_column(config)
    return PromptColumns(column[None], None, column[1 : 1 + CODEBOOKS].clone(), column[1 + CODEBOOKS :].clone())


def system_prompt(config: LMConfig, voice: Voice | None, text: Sequence[int]) -> PromptColumns:
    """Columns of a system prompt: `voice` (or none), then the text tokens, each followed by a gap.

    Source: the prompt phase of NVIDIA's PersonaPlex, voice files included. An empty text leaves two gaps in a row, as
    in the reference.
    """
    codes = _codes_spoken(voice)  # [V, 8]
    spoken = codes.shape[0]
    padding = [config.text_padding] * GAP_FRAMES
    text_row = torch.tensor([config.text_padding] * spoken + padding + list(text) + padding)  # [P]
    silence = torch.tensor(config.silence_codes).expand(len(text_row) - spoken, CODEBOOKS)
    agent = torch.cat([codes, silence])  # [P, 8]
    user = torch.tensor(config.sine_codes).expand(len(text_row), CODEBOOKS)  # [P, 8]
    tokens = _delayed(config, text_row, agent, user)
    embeddings = None
    if isinstance(voice, VoiceEmbeddings):
        embeddings = voice.embeddings
        _take_cached_columns(config, tokens, voice)
    return PromptColumns(tokens, embeddings, agent[-1].clone(), user[-1].clone())


def initial_column(config: LMConfig) -> Tensor:
    """Column 0 of every stream, int64 [17]: the token after the last one of each vocabulary."""
    column = torch.full((ROWS,), config.card)
    column[0] = config.text_card
    return column


def _codes_spoken(voice: Voice | None) -> Tensor:
    """The voice's frames int64 [V, 8]; zeros where only embeddings know what was said."""
    match voice:
        case None:
            return torch.zeros(0, CODEBOOKS, dtype=torch.int64)
        case VoiceCodes(codes):
            return codes.T
        case VoiceEmbeddings(embeddings):
            return torch.zeros(embeddings.shape[0] + 1, CODEBOOKS, dtype=torch.int64)


def _delayed(config: LMConfig, text: Tensor, agent: Tensor, user: Tensor) -> Tensor:
    """Frames text [P], agent [P, 8], user [P, 8] laid into columns [P, 17].

    Column p holds text and codebooks 0 of frame p, codebooks 1..7 of frame p - 1. Frame 0 never arrives: column 0 is
    all initial, and column 1 is in its delayed rows.
    """
    columns = initial_column(config).repeat(len(text), 1)
    columns[1:, 0] = text[1:]
    columns[1:, 1] = agent[1:, 0]
    columns[1:, 9] = user[1:, 0]
    columns[2:, 2:9] = agent[1:-1, 1:]
    columns[2:, 10:17] = user[1:-1, 1:]
    return columns


def _take_cached_columns(config: LMConfig, tokens: Tensor, voice: VoiceEmbeddings) -> None:
    """Write what `voice.cache` knows into columns T and T + 1 of `tokens` [P, 17], and initial tokens before them."""
    end = voice.embeddings.shape[0]
    tokens[:end] = initial_column(config)
    tokens[end] = voice.cache[:, end % CACHE_COLUMNS]
    after = voice.cache[:, (end + 1) % CACHE_COLUMNS]
    tokens[end + 1, 2:9] = after[2:9]
    tokens[end + 1, 10:17] = after[10:17]
