"""What stands between the transformers' matrix products: embedding sums, norms, gates, the depformer's attention.

Each computes what the function of the same name in `temporal.py`, `depformer.py` and `mimi.py` does, with the same
roundings.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from webrtc_duplex.model.kernels.launch import launch

_BLOCK = 1024


@triton.jit
def _embed(columns, offsets, table, out, TABLES: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """One program a column and block of its vector: codes added first and text last, rounded after each addition."""
    lane = tl.program_id(0)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = x < W
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TABLES):
        token = tl.load(columns + lane * TABLES + (place + 1) % TABLES)
        line = (token + tl.load(offsets + place)) * W
        total += tl.load(table + line + x, mask=within, other=0.0).to(tl.float32)
        total = total.to(table.dtype.element_ty).to(tl.float32)
    tl.store(out + lane * W + x, total.to(out.dtype.element_ty), mask=within)


@triton.jit
def _rms_norm(x, alpha, out, epsilon, W: tl.constexpr, WP: tl.constexpr):
    """One program a vector."""
    at = tl.program_id(0).to(tl.int64) * W + tl.arange(0, WP)
    within = tl.arange(0, WP) < W
    value = tl.load(x + at, mask=within, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / W + epsilon)
    weight = tl.load(alpha + tl.arange(0, WP), mask=within, other=0.0).to(tl.float32)
    tl.store(out + at, (value * scale * weight).to(out.dtype.element_ty), mask=within)


@triton.jit
def _layer_norm(x, weight, bias, out, epsilon, W: tl.constexpr, WP: tl.constexpr):
    """One program a vector; its mean first, then the mean square of what is left: in one pass numbers would cancel."""
    at = tl.program_id(0).to(tl.int64) * W + tl.arange(0, WP)
    within = tl.arange(0, WP) < W
    value = tl.load(x + at, mask=within, other=0.0)
    centred = tl.where(within, value - tl.sum(value, 0) / W, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / W + epsilon)
    gain = tl.load(weight + tl.arange(0, WP), mask=within, other=0.0)
    offset = tl.load(bias + tl.arange(0, WP), mask=within, other=0.0)
    tl.store(out + at, centred * scale * gain + offset, mask=within)


@triton.jit
def _gelu(x, count, BLOCK: tl.constexpr):
    """One program a block; x is overwritten."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0)
    tl.store(x + at, 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476)), mask=at < count)


@triton.jit
def _gated(u, out, W: tl.constexpr, BLOCK: tl.constexpr):
    """One program a block of a vector of W gates, then W values."""
    line = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = x < W
    gate = tl.load(u + line * 2 * W + x, mask=within, other=0.0).to(tl.float32)
    value = tl.load(u + line * 2 * W + W + x, mask=within, other=0.0).to(tl.float32)
    opened = (gate * tl.sigmoid(gate)).to(u.dtype.element_ty).to(tl.float32)
    tl.store(out + line * W + x, (opened * value).to(out.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["step"])
def _attend_steps(
    qkv, remembered, out, step, scale, side,
    H: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """One program a lane and head: keep this step's key and value, attend to the steps up to it, all in registers."""
    lane, head = tl.program_id(0), tl.program_id(1)
    column, s = tl.arange(0, D), tl.arange(0, STEPS)
    source = qkv + lane * 3 * H * D + head * D + column
    query = tl.load(source).to(tl.float32)
    key, value = tl.load(source + H * D), tl.load(source + 2 * H * D)
    own = remembered + (lane * H + head) * STEPS * D
    tl.store(own + step * D + column, key)
    tl.store(own + side + step * D + column, value)
    earlier = own + s[:, None] * D + column[None, :]
    before, now = (s < step)[:, None], (s == step)[:, None]
    keys = tl.where(now, key[None, :], tl.load(earlier, mask=before, other=0.0)).to(tl.float32)
    values = tl.where(now, value[None, :], tl.load(earlier + side, mask=before, other=0.0)).to(tl.float32)
    logits = tl.where(s <= step, tl.sum(keys * query[None, :], 1) * scale, -float("inf"))
    share = tl.exp(logits - tl.max(logits, 0))
    attended = tl.sum(values * (share / tl.sum(share, 0))[:, None], 0)
    tl.store(out + (lane * H + head) * D + column, attended.to(out.dtype.element_ty))


def embed(columns: Tensor, offsets: Tensor, table: Tensor) -> Tensor:
    """Columns int64 [..., 17] (text, agent, caller) -> [..., D]; offsets [17] of the tables in `table`, text last."""
    *lead, tables = columns.shape
    width = table.shape[1]
    out = table.new_empty(*lead, width)
    grid = (columns.numel() // tables, triton.cdiv(width, _BLOCK))
    launch(_embed, grid, columns.contiguous(), offsets, table, out, tables, width, _BLOCK, num_warps=4)
    return out


def rms_norm(x: Tensor, alpha: Tensor, epsilon: float) -> Tensor:
    width = x.shape[-1]
    out = torch.empty_like(x)
    places = triton.next_power_of_2(width)
    launch(
        _rms_norm, (x.numel() // width,), x, alpha, out, epsilon, width, places, num_warps=max(1, min(8, places // 256))
    )
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """x f32 [..., D], contiguous"""
    width = x.shape[-1]
    out = torch.empty_like(x)
    sizes = (epsilon, width, triton.next_power_of_2(width))
    launch(_layer_norm, (x.numel() // width,), x, weight, bias, out, *sizes, num_warps=4)
    return out


def gelu(x: Tensor) -> Tensor:
    """x f32, contiguous, overwritten and returned"""
    launch(_gelu, (triton.cdiv(x.numel(), _BLOCK),), x, x.numel(), _BLOCK, num_warps=4)
    return x


def gated(u: Tensor) -> Tensor:
    """[..., gate | value] -> [..., half]"""
    *lead, both = u.shape
    width = both // 2
    out = u.new_empty(*lead, width)
    grid = (u.numel() // both, triton.cdiv(width, _BLOCK))
    launch(_gated, grid, u, out, width, _BLOCK, num_warps=4)
    return out


def attend_steps(qkv: Tensor, remembered: Tensor, step: int) -> Tensor:
    """qkv [B, 3 * H * d], remembered [2, B, H, 8, d] -> [B, H * d]"""
    _, lanes, heads, steps, width = remembered.shape
    out = qkv.new_empty(lanes, heads * width)
    sizes = (step, width**-0.5, remembered.stride(0), heads, width, steps)
    launch(_attend_steps, (lanes, heads), qkv, remembered, out, *sizes, num_warps=1)
    return out
