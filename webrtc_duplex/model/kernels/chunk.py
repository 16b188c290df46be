"""Attention of a piece of a prompt: T new positions of one row, each of which sees the row's ring up to itself.

What it computes is `streaming.ChunkWindow.attend` for pieces whose slots follow one another (that do not pass the end
of the ring). Of T columns only the first `count` are the prompt's; the others fill up the graph's size: their keys go
to the scratch row, and what they attend to is of no use to anybody.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from webrtc_duplex.model.kernels import attention
from webrtc_duplex.model.kernels.attention import LOG2_E, tile
from webrtc_duplex.model.kernels.launch import launch

if TYPE_CHECKING:
    from webrtc_duplex.model.streaming import Ring

QUERIES = 64
"""New positions that one program works on"""
BLOCK = 64
"""Slots of a tile"""
STAGES = 2


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Where the new positions go, for every layer of the transformer."""

    rows: Tensor
    """The row, and the scratch row of columns that are too many: int64 [T]"""
    slots: Tensor
    """int64 [T, 1]"""
    turns: Tensor
    """cos and sin of the positions' angles, f32 [T, 1, 2, d / 2]"""


@triton.jit
def _attend_chunk(
    query, keys, values, key_scales, value_scales, out, rows, slots, row_stride, scale,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BYTES: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """One program QUERIES new positions and a head. The first one's slot is its position: the ring has not turned."""
    head, column = tl.program_id(1), tl.arange(0, D)
    t = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    first = tl.load(slots).to(tl.int32)
    last = tl.minimum(first + (tl.program_id(0) + 1) * QUERIES, C)
    of_head = tl.load(rows) * row_stride + head * C * D
    asked = tl.load(query + (t[:, None] * H + head) * D + column[None, :])  # [QUERIES, D]
    greatest = tl.full((QUERIES,), -1e30, tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, D), tl.float32)
    for start in tl.range(0, last, BLOCK, num_stages=STAGES):
        x = start + tl.arange(0, BLOCK)
        key, key_scale = tile(keys + of_head, key_scales + of_head // D, x, x < last, D, BYTES)
        logit = tl.dot(asked, tl.trans(key.to(asked.dtype)), input_precision="ieee")
        seen = (x[None, :] <= first + t[:, None]) & (x < last)[None, :]
        logit = tl.where(seen, logit * (key_scale * scale)[None, :], -float("inf"))
        higher = tl.maximum(greatest, tl.max(logit, 1))
        shrink, share = tl.exp2(greatest - higher), tl.exp2(logit - higher[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        greatest = higher
        value, value_scale = tile(values + of_head, value_scales + of_head // D, x, x < last, D, BYTES)
        part = (share * value_scale[None, :]).to(asked.dtype)
        total = tl.dot(part, value.to(asked.dtype), total * shrink[:, None], input_precision="ieee")
    to = out + (t[:, None] * H + head) * D + column[None, :]
    tl.store(to, (total / weight[:, None]).to(out.dtype.element_ty))


def plan(
    start: Tensor, row: Tensor, count: Tensor, columns: int, scratch: int, ring: "Ring", frequencies: Tensor
) -> ChunkPlan:
    """The first `count` of so many columns are the positions of `row` from `start` on; all three int64 [1]."""
    column = torch.arange(columns, device=row.device)
    slots = row.new_empty(columns, 1)
    turns = frequencies.new_empty(columns, 1, 2, len(frequencies))
    attention.turn(start + column, column, frequencies, turns, slots, ring.capacity)
    return ChunkPlan(torch.where(column < count, row, scratch), slots, turns)


def attend(plan: ChunkPlan, qkv: Tensor, ring: "Ring") -> Tensor:
    """Rotate, append, attend. qkv [1, T, 3, H, d], contiguous, T a multiple of QUERIES -> [1, T, H * d]."""
    _, columns, _, heads, width = qkv.shape
    query, out = (qkv.new_empty(columns, heads, width) for _ in range(2))
    attention.append(qkv, query, plan.rows, plan.slots, plan.turns, ring)
    scale = (ring.keys.vectors.stride(0), width**-0.5 * LOG2_E)
    sizes = (heads, width, ring.capacity, ring.keys.scales is not None, QUERIES, BLOCK, STAGES)
    grid = (columns // QUERIES, heads)
    given = (*attention.stores(ring), out, plan.rows, plan.slots)
    launch(_attend_chunk, grid, query, *given, *scale, *sizes, num_warps=4, num_stages=STAGES)
    return out.view(1, columns, heads * width)
