"""The codec's convolutions: `pad` lays a convolution's input behind what it remembers, `product` is the convolution.

With channels last a window of K columns is K * C numbers that lie together, so the matrix of windows is the padded
buffer itself, read with overlapping rows; nothing is laid out. Computes what `mimi.Taps.pad` and `mimi.CausalConv.run`
do.
"""

import triton
import triton.language as tl
from torch import Tensor

from webrtc_duplex.model.kernels.launch import launch

PRECISION = "ieee"
"""How f32 products are computed; in TF32 about one frame in ninety would get another code."""

BLOCK = 1024
"""Numbers that one program of `_pad` and `_keep` moves"""
TILE = (64, 64, 32)
"""Lines, columns and depth that one program works on at once"""
SHARE, FEW = 1024, 16
"""Numbers that one program sums for an output, about, where a lane has at most so few outputs"""


@triton.jit
def _elu(x):
    return tl.where(x > 0, x, tl.exp(tl.minimum(x, 0.0)) - 1.0)


@triton.jit
def _pad(x, taps, out, lane_stride, length, past, ACTIVATE: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """One program a block of a lane's padded buffer: `past` numbers remembered, then `length` new ones.

    KEEP: the last `past` of them, which are all new ones then, are remembered next, each by who read its place.
    """
    lane = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    old, new = at < past, (at >= past) & (at < past + length)
    remembered = tl.load(taps + lane * lane_stride + at, mask=old, other=0.0)
    fresh = tl.load(x + lane * length + at - past, mask=new, other=0.0)
    if ACTIVATE:
        fresh = _elu(fresh)
    tl.store(out + lane * (past + length) + at, tl.where(old, remembered, fresh), mask=old | new)
    if KEEP:
        last = tl.load(x + lane * length + length - past + at, mask=old, other=0.0)
        if ACTIVATE:
            last = _elu(last)
        tl.debug_barrier()  # all of the block is read before any of it is written
        tl.store(taps + lane * lane_stride + at, last, mask=old)


@triton.jit
def _keep(padded, taps, lane_stride, length, past, BLOCK: tl.constexpr):
    """The last `past` numbers of a lane's buffer, of which some were remembered, are what it remembers next."""
    lane = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(padded + lane * (past + length) + length + at, mask=at < past, other=0.0)
    tl.store(taps + lane * lane_stride + at, last, mask=at < past)


@triton.jit
def _finish(total, at, n, width, bias, residual, out, inside, ACTIVATE: tl.constexpr, RESIDUAL: tl.constexpr):
    """Bias; then ELU, and then `residual` added, where asked."""
    total += tl.load(bias + n, mask=n < width, other=0.0)[None, :]
    if ACTIVATE:
        total = _elu(total)
    if RESIDUAL:
        total += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)


@triton.jit
def _product(
    x, weight, bias, residual, out, lines, count, depth, width, lane_stride, line_stride,
    ACTIVATE: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, SHARES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """A tile of [B * count, width] = windows [B * count, depth] times weight [width, depth], finished; or one of SHARES
    of its depth, into out [SHARES, B * count, width]."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    window = x + ((m // count).to(tl.int64) * lane_stride + (m % count) * line_stride)[:, None]
    share = tl.cdiv(tl.cdiv(depth, SHARES), BK) * BK
    first = tl.program_id(2) * share
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(first, tl.minimum(first + share, depth), BK):
        within = start + k < depth
        a = tl.load(window + (start + k)[None, :], mask=(m < lines)[:, None] & within[None, :], other=0.0)
        b = tl.load(
            weight + n[None, :] * depth + (start + k)[:, None], mask=(n < width)[None, :] & within[:, None], other=0.0
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = m.to(tl.int64)[:, None] * width + n[None, :]
    inside = (m < lines)[:, None] & (n < width)[None, :]
    if SHARES == 1:
        _finish(total, at, n, width, bias, residual, out, inside, ACTIVATE, RESIDUAL)
    else:
        tl.store(out + tl.program_id(2).to(tl.int64) * lines * width + at, total, mask=inside)


@triton.jit
def _add_shares(
    shares, bias, residual, out, lines, width,
    ACTIVATE: tl.constexpr, RESIDUAL: tl.constexpr, SHARES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """A tile of the sum of shares [SHARES, lines, width], in order, finished."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    at = m.to(tl.int64)[:, None] * width + n[None, :]
    inside = (m < lines)[:, None] & (n < width)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for share in tl.static_range(SHARES):
        total += tl.load(shares + at + share * lines * width, mask=inside, other=0.0)
    _finish(total, at, n, width, bias, residual, out, inside, ACTIVATE, RESIDUAL)


def pad(x: Tensor, taps: Tensor, activate: bool) -> Tensor:
    """x [B, T, C], contiguous, through ELU or not, after taps [B, columns, C], whose place its last columns take:
    [B, columns + T, C]."""
    lanes, length, channels = x.shape
    past = taps.shape[1] * channels
    out = x.new_empty(lanes, taps.shape[1] + length, channels)
    sizes = (taps.stride(0), length * channels, past)
    grid = (lanes, triton.cdiv(past + length * channels, BLOCK))
    keep = length >= taps.shape[1]
    launch(_pad, grid, x, taps, out, *sizes, activate, keep, BLOCK, num_warps=4)
    if not keep:
        launch(_keep, (lanes, triton.cdiv(past, BLOCK)), out, taps, *sizes, BLOCK, num_warps=4)
    return out


def product(
    padded: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    count: int,
    activate: bool = False,
    residual: Tensor | None = None,
    precision: str = PRECISION,
) -> Tensor:
    """The windows of padded [B, n, C] that begin every `stride` columns, times weight [C', K * C]: [B, count, C'].

    `activate`: ELU of the result; `residual` [B, count, C']: added to it, after that.
    """
    lanes, length, channels = padded.shape
    width, depth = weight.shape
    out = padded.new_empty(lanes, count, width)
    lines, shares = lanes * count, shares_of(depth, count)
    rows, columns, deep = TILE
    columns = min(columns, max(16, triton.next_power_of_2(width)))
    end = (activate, residual is not None)
    added = bias if residual is None else residual
    into = out if shares == 1 else out.new_empty(shares, lines, width)
    sizes = (lines, count, depth, width, length * channels, stride * channels)
    grid = (triton.cdiv(lines, rows), triton.cdiv(width, columns), shares)
    cut = (*end, precision, shares, rows, columns, deep)
    launch(_product, grid, padded, weight, bias, added, into, *sizes, *cut, num_warps=8)
    if shares > 1:
        launch(_add_shares, grid[:2], into, bias, added, out, lines, width, *end, shares, rows, columns, num_warps=8)
    return out


def shares_of(depth: int, count: int) -> int:
    """Into how many parts a product's depth is cut, each a program's: where few outputs are made of very many numbers a
    card of 132 multiprocessors would have 8 or 16 programs to run, of up to 140 us each by their multiply-adds.

    Lanes do not count, so that a row's sums are in the same order in any company.
    """
    return max(1, min(8, depth // SHARE)) if count <= FEW else 1
