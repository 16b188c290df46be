"""One frame of the duplex model for the rows listed: PersonaPlex, Moshi, and our tiny one.

A row's call is a matrix of 17 token rows: the agent's text, its 8 codes, the caller's 8 codes; one column a frame,
where codebooks 1..7 stand one column late (`DELAYS`). Column p is what the temporal transformer hears at position p;
what it then predicts are the text and the agent's codes of column p + 1.

    column        p             p + 1
    text          text p        text p+1
    agent 0       a0 of p       a0 of p+1
    agent 1..7    of p - 1      of p           so frame p is said when column p + 1 is predicted
    caller 0      u0 of p
    caller 1..7   of p - 1

The caller's frame completes column p, is heard at once, and is answered by the agent's frame p in the same step.
NVIDIA's reference is one call later and says the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from webrtc_duplex.model.config import CODEBOOKS, LMConfig
from webrtc_duplex.model.depformer import Depformer
from webrtc_duplex.model.mimi import Mimi, MimiState
from webrtc_duplex.model.prompts import PromptColumns
from webrtc_duplex.model.sampling import Choice, Greedy, SamplerState, draws
from webrtc_duplex.model.streaming import NO_HINTS, Hints
from webrtc_duplex.model.temporal import Temporal, TemporalState
from webrtc_duplex.model.weights import Piece, under

DELAYS = (0, *(0, 1, 1, 1, 1, 1, 1, 1), *(0, 1, 1, 1, 1, 1, 1, 1))
"""Columns by which each token row is late: text, the agent's codebooks, the caller's codebooks."""

AGENT = slice(1, 1 + CODEBOOKS)
CALLER = slice(1 + CODEBOOKS, 1 + 2 * CODEBOOKS)

PCM_SCALE = 32_768.0


@dataclass(frozen=True, slots=True)
class LMState:
    """What the language model remembers of each row.

    | field    | shape         | dtype | meaning                                                        |
    |----------|---------------|-------|----------------------------------------------------------------|
    | temporal | TemporalState |       | of the temporal transformer                                    |
    | own      | [R + 1, 9]    | int64 | text and agent tokens of the next column, which awaits a frame |
    | heard    | [R + 1, 8]    | int64 | codes of the caller's last frame                               |
    | sampler  | SamplerState  |       | seed, temperatures, top-k of the call                          |
    """

    temporal: TemporalState
    own: Tensor
    heard: Tensor
    sampler: SamplerState


@dataclass(frozen=True, slots=True)
class Answer:
    """What the language model makes of one column."""

    codes: Tensor
    """The agent's frame that is complete now, int64 [B, 8]"""
    hidden: Tensor
    """[B, D]"""
    best: Tensor
    """The greatest logit of each of the 9 draws, f32 [B, 9]; not a number where any logit was not"""


@dataclass(frozen=True, slots=True)
class Thought:
    """What the next tokens are chosen from. The text's logits are kept beside it: their head is as large as a layer."""

    hidden: Tensor
    """[B, D]"""
    text_logits: Tensor
    """[B, text card]"""


class LM(nn.Module):
    """The language model; its weights are uninitialised until the pieces are loaded."""

    late: Tensor

    def __init__(self, config: LMConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.temporal = Temporal(config, device, dtype)
        self.depformer = Depformer(config, device, dtype)
        self.register_buffer("late", (torch.tensor(DELAYS) > 0).to(device), persistent=False)

    def pieces(self) -> list[Piece]:
        """How the released tensors fill the parameters."""
        return under("temporal", self.temporal.pieces()) + under("depformer", self.depformer.pieces())

    def allocate(self, rows: int, kv_dtype: torch.dtype | None = None) -> LMState:
        """State of `rows` fresh rows and the scratch row, where the weights are; keys as the weights, or int8."""
        device, dtype = self.late.device, kv_dtype or self.temporal.table.dtype
        return LMState(
            temporal=TemporalState.allocate(self.config, rows, device, dtype),
            own=torch.zeros(rows + 1, 1 + CODEBOOKS, dtype=torch.int64, device=device),
            heard=torch.zeros(rows + 1, CODEBOOKS, dtype=torch.int64, device=device),
            sampler=SamplerState.allocate(rows, device),
        )

    def complete(self, heard: Tensor, rows: Tensor, state: LMState) -> Tensor:
        """The next column [B, 17]: what the agent already chose, and the caller's codes [B, 8] as they are delayed."""
        own, before = state.own.index_select(0, rows), state.heard.index_select(0, rows)
        state.heard.index_copy_(0, rows, heard)
        return torch.cat([own, torch.where(self.late[CALLER], before, heard)], dim=1)

    def answer(self, column: Tensor, rows: Tensor, state: LMState, hints: Hints = NO_HINTS) -> Answer:
        """Hear a column [B, 17], choose the next one's own tokens, and with them complete a frame."""
        hidden = self.temporal.step(column, state.temporal, rows, hints)
        own, best = self._choose(self.consider(hidden), rows, state, CODEBOOKS, hints)
        state.own.index_copy_(0, rows, own)
        return Answer(torch.where(self.late[AGENT], own[:, AGENT], column[:, AGENT]), hidden, best)

    def prefill(self, prompt: PromptColumns, row: int, start: int, count: int, state: LMState) -> Tensor:
        """Hear `count` columns of the prompt from `start` on, all at once -> the last one's hidden vector [1, D].

        Equals hearing them one by one; the columns are given whole, so nothing is chosen on the way.
        """
        return self.temporal.prefill(self.embed(prompt, start, start + count), state.temporal, row, start)[None]

    def embed(self, prompt: PromptColumns, start: int, end: int) -> Tensor:
        """Temporal inputs [T, D] of the prompt's columns start .. end - 1."""
        x = self.temporal.embed(prompt.tokens[start:end].to(self.late.device))
        if prompt.embeddings is not None:
            given = prompt.embeddings[start:end].to(x.device, x.dtype)
            x[: len(given)] = given
        return x

    def consider(self, hidden: Tensor) -> Thought:
        """hidden [B, D] with what it says of the text."""
        return Thought(hidden, self.temporal.text_logits(hidden))

    def open(self, prompt: PromptColumns, thought: Thought, row: int, state: LMState) -> None:
        """End the prompt of a row."""
        device = self.late.device
        self.choose_first(thought, prompt.tail.to(device), torch.tensor([row], device=device), state)

    def choose_first(self, thought: Thought, tail: Tensor, rows: Tensor, state: LMState) -> None:
        """Choose text and codebook 0 of the first live column of a row, int64 [1].

        Its codebooks 1..7 belong to the prompt's last frame, so they are given; tail int64 [2, 8]: agent, caller.
        """
        agent, user = tail[:1], tail[1:]
        chosen, _ = self._choose(thought, rows, state, steps=1, hints=NO_HINTS)
        own = torch.cat([chosen[:, :1], torch.where(self.late[AGENT], agent, chosen[:, 1:])], dim=1)
        state.own.index_copy_(0, rows, own)
        state.heard.index_copy_(0, rows, user)

    def _choose(
        self, thought: Thought, rows: Tensor, state: LMState, steps: int, hints: Hints
    ) -> tuple[Tensor, Tensor]:
        """Text and the first `steps` agent codes of the next column [B, 1 + steps], and each draw's greatest logit."""
        text_draw: Choice = Greedy()
        code_draws: Sequence[Choice] = [Greedy()] * steps
        if not hints.greedy:
            frames = state.temporal.position.index_select(0, rows)
            text_draw, code_draws = draws(state.sampler, rows, frames, steps, self.config, hints.every_token)
        text, text_best = text_draw.sample(thought.text_logits)
        best = [text_best]

        def choose_code(step: int, logits: Tensor) -> Tensor:
            code, code_best = code_draws[step].sample(logits)
            best.append(code_best)
            return code

        codes = self.depformer.run(thought.hidden, text, choose_code, steps)
        return torch.stack([text, *codes], dim=1), torch.stack(best, dim=1)


@dataclass(frozen=True, slots=True)
class ModelState:
    """All memory of all rows."""

    mimi: MimiState
    lm: LMState


@dataclass(frozen=True, slots=True)
class Said:
    """What the listed rows said in one step."""

    pcm: Tensor
    """int16 [B, 1920]"""
    text: Tensor
    """int64 [B]"""
    codes: Tensor
    """int64 [B, 8]"""
    sound: Tensor
    """bool [B]: whether every number on the way was finite"""


@dataclass(frozen=True, slots=True)
class PersonaPlex:
    """The codec and the language model as one duplex step."""

    lm: LM
    mimi: Mimi

    def allocate(self, rows: int, kv_dtype: torch.dtype | None = None) -> ModelState:
        """State of `rows` fresh rows and the scratch row; the language model's keys as its weights, or int8."""
        return ModelState(self.mimi.allocate(rows), self.lm.allocate(rows, kv_dtype))

    def say_last(self, prompt: PromptColumns, row: int, state: ModelState) -> None:
        """Decode the prompt's last frame, unheard, so that the first live one follows on it as in the reference.

        A bare start has no frame: its tail is initial tokens, which no codebook knows.
        """
        if bool((prompt.tail_agent < self.lm.config.card).all()):
            rows = torch.tensor([row], device=self.lm.late.device)
            self.mimi.decode(prompt.tail_agent.to(rows.device)[None], state.mimi, rows)

    def step(self, pcm: Tensor, rows: Tensor, state: ModelState, hints: Hints = NO_HINTS) -> Said:
        """One frame of each listed row: pcm int16 [B, 1920], rows int64 [B]. Their prompts must have been opened."""
        latent = self.mimi.encoder.run(pcm / PCM_SCALE, state.mimi.encoder, rows, hints)
        column = self.lm.complete(self.mimi.quantizer.encode(latent), rows, state.lm)
        answer = self.lm.answer(column, rows, state.lm, hints)
        sound = self.mimi.decode(answer.codes, state.mimi, rows, hints)
        finite = torch.cat([latent, answer.hidden.float(), answer.best, sound], dim=1).sum(1).isfinite()
        return Said(to_int16(sound), text=column[:, 0], codes=answer.codes, sound=finite)


def to_int16(sound: Tensor) -> Tensor:
    """Samples in -1 .. 1 to int16, clipped."""
    return (sound * PCM_SCALE).round_().clamp_(-PCM_SCALE, PCM_SCALE - 1).to(torch.int16)
