"""One draw of every lane in one kernel: no sort, no random state, nothing on the host.

What it computes is `sampling.Draw.sample` of the noise `sampling.race_noise`, word for word the same Philox.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from webrtc_duplex.model.kernels.launch import launch

_CHUNK = 2048
_TO_UNIT = tl.constexpr(4.6566127342e-10)
_LEAST = tl.constexpr(2.0**-24)


@triton.jit
def _ordered(x):
    """uint32 that order as the f32 numbers do; both zeros are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit(do_not_specialize=["draw"])
def _sample(
    logits, rows, frames, seeds, temperatures, top_ks, tokens, bests, draw,
    V: tl.constexpr, VP: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """One program a lane. The k-th greatest logit is found bit by bit: the greatest key that k logits reach."""
    lane = tl.program_id(0)
    row = tl.load(rows + lane)
    i = tl.arange(0, VP)
    x = tl.load(logits + lane.to(tl.int64) * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
    unsound = tl.max((x != x).to(tl.int32), 0)
    tl.store(bests + lane, tl.where(unsound == 1, float("nan"), tl.max(x, 0)))
    key = tl.where((i < V) & (x == x), _ordered(x), 0)
    top_k = tl.load(top_ks + row)
    threshold = tl.zeros((), tl.uint32)
    for bit in tl.static_range(BITS):
        higher = threshold | (0x80000000 >> bit)
        reached = tl.sum((key >= higher).to(tl.int32), 0)
        threshold = tl.where((top_k > 0) & (reached >= top_k), higher, threshold)
    temperature = tl.load(temperatures + row)
    hot = temperature > 0
    inverse = tl.where(hot, tl.math.div_rn(1.0, tl.where(hot, temperature, 1.0)), 1.0)
    frame = tl.load(frames + lane)
    seed = (tl.load(seeds + row) << 32) | ((frame * 16 + draw) & 0xFFFFFFFF)
    quarter: tl.constexpr = (V + 3) // 4  # of the tokens: each has one of the four words of its counter
    best = -float("inf")
    token = 0
    for start in range(0, VP, CHUNK):  # in pieces: all of it at once would not fit the registers
        j = start + tl.arange(0, CHUNK)
        y = tl.load(logits + lane.to(tl.int64) * V + j, mask=j < V, other=-float("inf")).to(tl.float32)
        zero = tl.zeros((CHUNK,), tl.uint32)
        word0, word1, word2, word3 = tl.philox(seed.to(tl.uint64), (j % quarter).to(tl.uint32), zero, zero, zero)
        word = tl.where(j < 2 * quarter, tl.where(j < quarter, word0, word1), tl.where(j < 3 * quarter, word2, word3))
        folded = tl.minimum(word, word ^ 0xFFFFFFFF).to(tl.int32).to(tl.float32)
        noise = -tl.log(-tl.log(tl.maximum(folded * _TO_UNIT, _LEAST)))
        race = tl.where(hot, noise, 0.0) + y * inverse
        race = tl.where((j < V) & (y == y) & (_ordered(y) >= threshold), race, -float("inf"))
        first = tl.max(race, 0)
        token = tl.where(first > best, start + tl.argmax(race, 0), token)
        best = tl.maximum(best, first)
    tl.store(tokens + lane, token)


def sample(
    logits: Tensor, rows: Tensor, frames: Tensor, seeds: Tensor, temperatures: Tensor, top_ks: Tensor, draw: int
) -> tuple[Tensor, Tensor]:
    """Logits [B, V] of the lanes that serve `rows` int64 [B] -> token int64 [B], greatest logit f32 [B].

    frames int64 [B]; seeds (of 32 bits) and top_ks int64, temperatures f32: a place for each row.
    """
    lanes, count = logits.shape
    tokens = rows.new_empty(lanes)
    bests = logits.new_empty(lanes, dtype=torch.float32)
    places = triton.next_power_of_2(count)
    sizes = (draw, count, places, 8 * logits.element_size(), min(places, _CHUNK))
    warps = 8 if places <= 4096 else 16
    state = (rows, frames, seeds, temperatures, top_ks)
    launch(_sample, (lanes,), logits, *state, tokens, bests, *sizes, num_warps=warps)
    return tokens, bests
