"""The temporal transformer: one column of 17 tokens a frame in, a hidden vector and the text's logits out."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from webrtc_duplex.model.config import CODEBOOKS, LMConfig
from webrtc_duplex.model.kernels import ops
from webrtc_duplex.model.streaming import (
    NO_HINTS,
    ChunkWindow,
    Hints,
    KernelChunk,
    Ring,
    Rings,
    Window,
    open_window,
    rope_frequencies,
)
from webrtc_duplex.model.weights import (
    Piece,
    Stack,
    add_product,
    blocks,
    is_whole,
    matrix,
    one,
    product,
    rows_for,
    scalar,
    under,
    vector,
)

NORM_EPSILON = 1e-8

AUDIO_TABLES = 2 * CODEBOOKS
"""Embedding tables of codes: the agent's 8, then the caller's 8."""


@dataclass(frozen=True, slots=True)
class TemporalState:
    """What the temporal transformer remembers.

    | field    | shape   | dtype              | meaning                                           |
    |----------|---------|--------------------|---------------------------------------------------|
    | rings    | Rings   | as weights or int8 | keys and values of the last C columns             |
    | position | [R + 1] | int64              | columns so far: the position of the next one      |
    """

    rings: Rings
    position: Tensor

    @classmethod
    def allocate(cls, config: LMConfig, rows: int, device: torch.device, dtype: torch.dtype) -> Self:
        shape = (config.layers, rows, config.heads, config.keys, config.head_width)
        return cls(
            rings=Rings.allocate(*shape, device, dtype),
            position=torch.zeros(rows + 1, dtype=torch.int64, device=device),
        )


def rms_norm(x: Tensor, alpha: Tensor) -> Tensor:
    """x * alpha / rms(x), in f32 and back in the dtype of x."""
    if ops.usable(x):
        return ops.pointwise.rms_norm(x, alpha, NORM_EPSILON)
    if x.device.type == "cpu" and x.dtype == torch.float32:
        # less than functional.rms_norm, whose operators all work on whole vectors: 9 us of 14 for 8 x 256
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        square = torch.addcmul(scalar(NORM_EPSILON, x.device), length, length, value=1 / x.shape[-1])
        return square.rsqrt_().mul(x).mul_(alpha)
    return functional.rms_norm(x.float(), alpha.shape, alpha.float(), NORM_EPSILON).to(x.dtype)


def gated(u: Tensor) -> Tensor:
    """silu(gate) * value of u [..., gate | value]."""
    if ops.usable(u):
        return ops.pointwise.gated(u)
    gate, value = u.chunk(2, dim=-1)
    return functional.silu(gate).mul_(value)


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * value of x weight^T: x [..., in] -> [..., hidden], for a weight made as [2, hidden, in] (`halves`)
    and given without that axis, so that none of its blocks is both."""
    if is_whole(weight):
        return gated(product(x, weight))
    gate, value = blocks(x, weight).chunk(2)
    rows, made = rows_for(gate)
    torch.mul(functional.silu(gate, inplace=True), value, out=made)
    return rows.view(*x.shape[:-1], -1)


def halves(weight: Tensor) -> Tensor:
    """[gate | value, in] -> [2, hidden, in]"""
    return weight.view(2, -1, weight.shape[1])


class TemporalLayer(nn.Module):
    """Attention and a gated feed-forward, each behind an RMS norm, each added to the stream."""

    def __init__(self, config: LMConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.hidden = config.heads, config.hidden
        width, hidden = config.width, config.hidden
        self.norm1 = vector(width, device=device, dtype=dtype)
        self.norm2 = vector(width, device=device, dtype=dtype)
        self.qkv = matrix(3 * width, width, device=device, dtype=dtype)
        self.out = matrix(width, width, device=device, dtype=dtype)
        self.gate = matrix(2, hidden, width, device=device, dtype=dtype)
        self.down = matrix(width, hidden, device=device, dtype=dtype)

    def run(self, x: Tensor, window: Window, ring: Ring) -> None:
        """Add the layer's two branches to x [B, T, D] in place."""
        qkv = product(rms_norm(x, self.norm1), self.qkv, shape=(3, self.heads, -1))
        add_product(x, window.attend(qkv, ring), self.out)
        add_product(x, gated_product(rms_norm(x, self.norm2), self.gate.flatten(0, 1)), self.down)

    def pieces(self, key: str) -> list[Piece]:
        width, hidden = self.norm1.shape[0], self.hidden
        return [
            one("norm1", f"{key}.norm1.alpha", (1, 1, width), torch.flatten),
            one("norm2", f"{key}.norm2.alpha", (1, 1, width), torch.flatten),
            one("qkv", f"{key}.self_attn.in_proj_weight", (3 * width, width)),
            one("out", f"{key}.self_attn.out_proj.weight", (width, width)),
            one("gate", f"{key}.gating.linear_in.weight", (2 * hidden, width), halves),
            one("down", f"{key}.gating.linear_out.weight", (width, hidden)),
        ]


class Temporal(nn.Module):
    """All 17 embedding tables as one (16 of codes, then the text's), the layers, the last norm and the text head."""

    frequencies: Tensor
    offsets: Tensor

    def __init__(self, config: LMConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        codes = config.card + 1
        self.table = vector(AUDIO_TABLES * codes + config.text_card + 1, config.width, device=device, dtype=dtype)
        self.layers: Stack[TemporalLayer] = Stack(TemporalLayer(config, device, dtype) for _ in range(config.layers))
        self.norm = vector(config.width, device=device, dtype=dtype)
        self.text_head = matrix(config.text_card, config.width, device=device, dtype=dtype)
        frequencies = rope_frequencies(config.head_width, config.max_period, device)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("offsets", (torch.arange(AUDIO_TABLES + 1) * codes).to(device), persistent=False)

    def embed(self, columns: Tensor) -> Tensor:
        """Columns int64 [..., 17] (text, agent, caller) -> [..., D], added codes first and text last."""
        if ops.usable(columns):
            return ops.pointwise.embed(columns, self.offsets, self.table)
        indices = torch.cat([columns[..., 1:], columns[..., :1]], dim=-1) + self.offsets
        embeddings = functional.embedding(indices, self.table)
        if embeddings.dtype == torch.float32:
            return embeddings.sum(-2)
        total = embeddings[..., 0, :]
        for table in range(1, AUDIO_TABLES + 1):  # one rounding an addition, as the references do
            total = total + embeddings[..., table, :]
        return total

    def step(self, columns: Tensor, state: TemporalState, rows: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        """The next column [B, 17] of each listed row -> hidden [B, D]."""
        x = self.embed(columns)[:, None]
        ring = state.rings.layers[0]
        window = open_window(state.position, rows, 1, ring, self.frequencies, hints.columns, hints.lanes)
        hidden = self._run(x, window, state)
        state.position.index_add_(0, rows, torch.ones_like(rows))
        return hidden[:, 0]

    def prefill(self, x: Tensor, state: TemporalState, row: int, start: int) -> Tensor:
        """T embedded columns [T, D] of one row, from position `start` on, at once -> hidden of the last [D]."""
        window = ChunkWindow.open(row, start, len(x), state.rings.layers[0], self.frequencies)
        hidden = self._run(x[None].clone(), window, state)
        state.position[row] = start + len(x)
        return hidden[0, -1]

    def prefill_piece(self, x: Tensor, state: TemporalState, row: Tensor, count: Tensor) -> Tensor:
        """`prefill` through kernels, with nothing left to the host: the first `count` of x [T, D] go on where `row` is.

        row and count int64 [1]; x is overwritten; T is a multiple of 64, and the piece must not pass the ring's end.
        Returns the last one's hidden vector [1, D].
        """
        ring = state.rings.layers[0]
        window = KernelChunk.open(state.position, row, count, len(x), ring, self.frequencies)
        hidden = self._run(x[None], window, state)
        state.position.index_add_(0, row, count)
        return hidden[0].index_select(0, count - 1)

    def _run(self, x: Tensor, window: Window, state: TemporalState) -> Tensor:
        for layer, ring in zip(self.layers, state.rings.layers, strict=True):
            layer.run(x, window, ring)
        return rms_norm(x, self.norm)

    def text_logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, D] -> [B, text card]"""
        return product(hidden, self.text_head)

    def pieces(self) -> list[Piece]:
        """How the released tensors fill the parameters."""
        config, codes = self.config, self.config.card + 1
        pieces = [
            one("table", f"emb.{k}.weight", (codes, config.width), into=slice(k * codes, (k + 1) * codes))
            for k in range(AUDIO_TABLES)
        ]
        text = slice(AUDIO_TABLES * codes, None)
        pieces.append(one("table", "text_emb.weight", (config.text_card + 1, config.width), into=text))
        for index, layer in enumerate(self.layers):
            pieces += under(f"layers.{index}", layer.pieces(f"transformer.layers.{index}"))
        pieces.append(one("norm", "out_norm.alpha", (1, 1, config.width), torch.flatten))
        pieces.append(one("text_head", "text_linear.weight", (config.text_card, config.width)))
        return pieces
