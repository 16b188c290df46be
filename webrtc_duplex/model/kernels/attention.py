"""Attention over the rings for the rows listed: reads the keys that a row has, no masks, no padding, any mix of ages.

What it computes is `streaming.StepWindow.attend`. Once a step `plan` lists the work of all layers: a unit is 512 slots
of one lane's ring, for each head. A fixed number of programs, as many as the GPU holds at once, walk that list
(`_split`) and leave a partial result of each unit; `_combine` puts a lane's together. Borders of units depend on the
row's own length only, so its result does not depend on the batch, the lane or the number of programs, bit for bit.

The scratch row (the last one) counts as empty: a lane without a row costs nothing and reads nothing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from webrtc_duplex.model.kernels.launch import launch

if TYPE_CHECKING:
    from webrtc_duplex.model.streaming import Ring

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Split:
    """How `_split` runs; chosen offline by registers and loop length, to be confirmed on a card."""

    dot: bool
    """Tensor cores, the query repeated to 16 rows; else multiply-adds with a running maximum for each slot of a tile.
    Bytes as operands of tensor cores must be taken apart first, which costs more than multiply-adds do."""
    block: int
    """Slots of a tile"""
    warps: int
    stages: int
    resident: int
    """Programs that one multiprocessor holds at once"""
    chunk: int = 512
    """Slots of a unit"""


HALF = Split(dot=True, block=64, warps=4, stages=3, resident=3)
BYTES = Split(dot=False, block=32, warps=4, stages=2, resident=4)
SINGLE = Split(dot=False, block=32, warps=4, stages=3, resident=2, chunk=256)


def split_for(dtype: torch.dtype) -> Split:
    """For rings of this dtype."""
    return {torch.int8: BYTES, torch.float32: SINGLE}.get(dtype, HALF)


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step, for every layer of one transformer."""

    rows: Tensor
    """int64 [B]"""
    slots: Tensor
    """Where the new positions go, int64 [B, T]"""
    turns: Tensor
    """cos and sin of the new positions' angles, f32 [B, T, 2, d / 2]"""
    lengths: Tensor
    """Slots in use once the new positions are in, int32 [B]; 0 for the scratch row"""
    items: Tensor
    """Units as lane * units + unit, int32 [B * units]"""
    count: Tensor
    """How many there are, int32 [1]"""
    capacity: int
    chunk: int
    """Slots of a unit"""
    units: int
    """At most so many a lane"""
    split: Split
    programs: int


@triton.jit
def _turns(positions, rows, frequencies, turns, slots, T: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """One program a new position: its angles and its slot."""
    lane = tl.program_id(0) // T
    position = tl.load(positions + tl.load(rows + lane)) + tl.program_id(0) % T
    pair = tl.arange(0, D // 2)
    angle = position.to(tl.float32) * tl.load(frequencies + pair)
    out = turns + tl.program_id(0) * D
    tl.store(out + pair, tl.cos(angle))
    tl.store(out + D // 2 + pair, tl.sin(angle))
    tl.store(slots + tl.program_id(0), position % C)


@triton.jit
def _plan(
    positions, rows, lengths, items, count, scratch, lanes,
    BP: tl.constexpr, T: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """One program: every lane's units, one after another. Where one is the most, empty lanes have it too."""
    lane = tl.arange(0, BP)
    there = lane < lanes
    row = tl.load(rows + lane, mask=there, other=0)
    position = tl.load(positions + row, mask=there, other=0)
    length = tl.where(row == scratch, 0, tl.minimum(position + T, C)).to(tl.int32)
    tl.store(lengths + lane, length, mask=there)
    units = (length + CHUNK - 1) // CHUNK
    if UNITS == 1:
        units = tl.full((BP,), 1, tl.int32)
    units = tl.where(there, units, 0)
    end = tl.cumsum(units, 0)
    tl.store(count, tl.sum(units, 0))
    for unit in range(UNITS):
        tl.store(items + end - units + unit, lane * UNITS + unit, mask=unit < units)


@triton.jit
def _turned(at, cos, sin, D: tl.constexpr):
    """Adjacent pairs of a head [D] turned by their angles, f32."""
    even, odd = tl.split(tl.reshape(tl.load(at + tl.arange(0, D)).to(tl.float32), (D // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (D,))


@triton.jit
def _byte(x, at, vectors, scales):
    """Leave a vector's scale; returns what its bytes in `vectors` are to be."""
    whole: tl.constexpr = vectors.dtype.element_ty == tl.int8  # else e4m3, whose greatest number is 448
    scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-8), 127.0 if whole else 448.0)
    tl.store(scales + at, scale)
    x = tl.math.div_rn(x, scale + tl.zeros_like(x))
    return tl.floor(x + 0.5) if whole else x


@triton.jit
def _append(
    qkv, keys, values, key_scales, value_scales, query, rows, slots, turns, row_stride,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, T: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """One program a new position and head: turn query and key, write key and value into the ring."""
    new, head = tl.program_id(0), tl.program_id(1)
    pair, column = tl.arange(0, D // 2), tl.arange(0, D)
    cos, sin = tl.load(turns + new * D + pair), tl.load(turns + new * D + D // 2 + pair)
    source = qkv + new.to(tl.int64) * 3 * H * D + head * D
    tl.store(query + (new * H + head) * D + column, _turned(source, cos, sin, D).to(query.dtype.element_ty))
    key = _turned(source + H * D, cos, sin, D).to(qkv.dtype.element_ty).to(tl.float32)
    value = tl.load(source + 2 * H * D + column).to(tl.float32)
    row, slot = tl.load(rows + new // T), tl.load(slots + new)
    to = row * row_stride + (head * C + slot) * D  # of a vector; scales lie in the same order
    if BYTES:
        key, value = _byte(key, to // D, keys, key_scales), _byte(value, to // D, values, value_scales)
    tl.store(keys + to + column, key.to(keys.dtype.element_ty))
    tl.store(values + to + column, value.to(values.dtype.element_ty))


@triton.jit
def tile(cache, scales, x, seen, D: tl.constexpr, BYTES: tl.constexpr):
    """Slots x of one head: [BLOCK, D] and their scales [BLOCK] (1 where there are none)."""
    tile = tl.load(cache + x[:, None] * D + tl.arange(0, D)[None, :], mask=seen[:, None], other=0.0)
    scale = tl.full(x.shape, 1.0, tl.float32)
    if BYTES:
        scale = tl.load(scales + x, mask=seen, other=0.0)
    return tile, scale


@triton.jit
def _weigh(asked, key, value, key_scale, value_scale, seen, peaks, weights, totals):
    """Take a tile [BLOCK, D] into the running sums, of which each of its slots has its own: nothing crosses threads
    but one sum over a key."""
    logit = tl.where(seen, tl.sum(key * asked[None, :], 1) * key_scale, -1e30)
    higher = tl.maximum(peaks, logit)
    shrink, share = tl.exp2(peaks - higher), tl.where(seen, tl.exp2(logit - higher), 0.0)
    return higher, weights * shrink + share, totals * shrink[:, None] + (share * value_scale)[:, None] * value


@triton.jit
def _gather(peaks, weights, totals):
    """The sums of all slots of a tile as one."""
    peak = tl.max(peaks, 0)
    level = tl.exp2(peaks - peak)
    return peak, tl.sum(weights * level, 0), tl.sum(totals * level[:, None], 0)


@triton.jit
def _leave(parts, sums, out, peak, weight, total, column, D: tl.constexpr, UNITS: tl.constexpr):
    """A unit's unnormalised sum [D] with its greatest logit and weight; of a lane's only unit the result itself."""
    if UNITS == 1:
        total = total / tl.where(weight > 0, weight, 1.0)
    else:
        tl.store(sums + out * 2, peak)
        tl.store(sums + out * 2 + 1, weight)
    tl.store(parts + out * D + column, total.to(parts.dtype.element_ty))


@triton.jit
def _split(
    query, keys, values, key_scales, value_scales, parts, sums, rows, slots, lengths, items, count, row_stride, scale,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr, UNITS: tl.constexpr,
    PROGRAMS: tl.constexpr, DOT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Walk the work list; a unit leaves its sum, or where it is its lane's only one the result, in `parts`."""
    column = tl.arange(0, D)
    for work in range(tl.program_id(0), tl.load(count) * H, PROGRAMS):
        item, head = tl.load(items + work // H), work % H
        lane, unit = item // UNITS, item % UNITS
        row = tl.load(rows + lane)
        first = unit * CHUNK
        last = tl.minimum(first + CHUNK, tl.load(lengths + lane))
        newest = tl.load(slots + lane * T + T - 1)
        of_head = row * row_stride + head * C * D
        head_keys, head_values = keys + of_head, values + of_head
        head_key_scales, head_value_scales = key_scales + of_head // D, value_scales + of_head // D
        out = (lane * T * H + head) * UNITS + unit
        if DOT:
            tl.static_assert(T == 1)
            asked16 = tl.broadcast_to(tl.load(query + (lane * H + head) * D + column)[None, :], (16, D))
            greatest = -float("inf")
            weight = 0.0
            total16 = tl.zeros((16, D), tl.float32)
            for start in tl.range(first, last, BLOCK, num_stages=STAGES):
                x = start + tl.arange(0, BLOCK)
                seen = x < last
                key, key_scale = tile(head_keys, head_key_scales, x, seen, D, BYTES)
                logit = tl.max(tl.dot(asked16, tl.trans(key.to(asked16.dtype)), out_dtype=tl.float32), 0)  # equal rows
                logit = tl.where(seen, logit * key_scale * scale, -float("inf"))
                higher = tl.maximum(greatest, tl.max(logit, 0))
                shrink, share = tl.exp2(greatest - higher), tl.exp2(logit - higher)
                weight = weight * shrink + tl.sum(share, 0)
                greatest = higher
                value, value_scale = tile(head_values, head_value_scales, x, seen, D, BYTES)
                share16 = tl.broadcast_to((share * value_scale)[None, :], (16, BLOCK)).to(asked16.dtype)
                total16 = tl.dot(share16, value.to(asked16.dtype), total16 * shrink)
            _leave(parts, sums, out, greatest, weight, tl.max(total16, 0), column, D, UNITS)
        else:
            tl.static_assert(T <= 2)
            asked = tl.load(query + (lane * T * H + head) * D + column).to(tl.float32)
            later = tl.load(query + ((lane * T + T - 1) * H + head) * D + column).to(tl.float32)
            peaks, later_peaks = tl.full((BLOCK,), -1e30, tl.float32), tl.full((BLOCK,), -1e30, tl.float32)
            weights, later_weights = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
            totals, later_totals = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK, D), tl.float32)
            for start in tl.range(first, last, BLOCK, num_stages=STAGES):
                x = start + tl.arange(0, BLOCK)
                seen = x < last
                key, key_scale = tile(head_keys, head_key_scales, x, seen, D, BYTES)
                value, value_scale = tile(head_values, head_value_scales, x, seen, D, BYTES)
                key, value, key_scale = key.to(tl.float32), value.to(tl.float32), key_scale * scale
                before = seen if T == 1 else seen & (x != newest)
                peaks, weights, totals = _weigh(
                    asked, key, value, key_scale, value_scale, before, peaks, weights, totals
                )
                if T == 2:
                    later_peaks, later_weights, later_totals = _weigh(
                        later, key, value, key_scale, value_scale, seen, later_peaks, later_weights, later_totals
                    )
            peak, weight, total = _gather(peaks, weights, totals)
            _leave(parts, sums, out, peak, weight, total, column, D, UNITS)
            if T == 2:
                peak, weight, total = _gather(later_peaks, later_weights, later_totals)
                _leave(parts, sums, out + H * UNITS, peak, weight, total, column, D, UNITS)


@triton.jit
def _combine(
    parts, sums, out, lengths,
    H: tl.constexpr, D: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """One program a query and head: its units' partial results, in order. An empty lane's result is 0."""
    new, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, D)
    units = (tl.load(lengths + new // T) + CHUNK - 1) // CHUNK
    base = (new * H + head) * UNITS
    greatest = -1e30
    weight = 0.0
    total = tl.zeros((D,), tl.float32)
    for unit in range(units):
        peak = tl.load(sums + (base + unit) * 2)
        higher = tl.maximum(greatest, peak)
        old, new_part = tl.exp2(greatest - higher), tl.exp2(peak - higher)
        total = total * old + new_part * tl.load(parts + (base + unit) * D + column)
        weight = weight * old + new_part * tl.load(sums + (base + unit) * 2 + 1)
        greatest = higher
    total = total / tl.where(weight > 0, weight, 1.0)
    tl.store(out + (new * H + head) * D + column, total.to(out.dtype.element_ty))


def plan(
    positions: Tensor, rows: Tensor, count: int, capacity: int, frequencies: Tensor, split: Split, programs: int
) -> Plan:
    """The step in which each of `rows` [B] gets `count` new positions, from positions[row] on, in rings of `capacity`.

    positions int64 [rows + 1], the last of them the scratch row's; frequencies f32 [d / 2].
    """
    lanes, width = len(rows), 2 * len(frequencies)
    chunk = min(split.chunk, triton.next_power_of_2(capacity))
    units = -(-capacity // chunk)
    made = Plan(
        rows=rows,
        slots=rows.new_empty(lanes, count),
        turns=frequencies.new_empty(lanes, count, 2, width // 2),
        lengths=rows.new_empty(lanes, dtype=torch.int32),
        items=rows.new_empty(lanes * units, dtype=torch.int32),
        count=rows.new_empty(1, dtype=torch.int32),
        capacity=capacity,
        chunk=chunk,
        units=units,
        split=split,
        programs=programs,
    )
    turn(positions, rows, frequencies, made.turns, made.slots, capacity)
    places = triton.next_power_of_2(lanes)
    list_in = (made.lengths, made.items, made.count, len(positions) - 1)
    launch(_plan, (1,), positions, rows, *list_in, lanes, places, count, capacity, chunk, units)
    return made


def attend(plan: Plan, qkv: Tensor, ring: "Ring") -> Tensor:
    """Rotate, append, attend. qkv [B, T, 3, H, d], contiguous -> [B, T, H * d] in its dtype."""
    lanes, count, _, heads, width = qkv.shape
    split = plan.split
    query, out = (qkv.new_empty(lanes, count, heads, width) for _ in range(2))
    append(qkv, query, plan.rows, plan.slots, plan.turns, ring)
    whole = plan.units == 1
    parts = out if whole else plan.turns.new_empty(lanes, count, heads, plan.units, width)
    sums = plan.turns if whole else plan.turns.new_empty(lanes, count, heads, plan.units, 2)
    work = (plan.rows, plan.slots, plan.lengths, plan.items, plan.count)
    scale = (ring.keys.vectors.stride(0), width**-0.5 * LOG2_E)
    sizes = (heads, width, plan.capacity, count, plan.chunk, plan.units, plan.programs)
    how = (split.dot, split.block, split.stages, ring.keys.scales is not None)
    options = {"num_warps": split.warps, "num_stages": split.stages}
    launch(_split, (plan.programs,), query, *stores(ring), parts, sums, *work, *scale, *sizes, *how, **options)
    if not whole:
        grid = (lanes * count, heads)
        launch(_combine, grid, parts, sums, out, plan.lengths, heads, width, count, plan.chunk, plan.units, num_warps=1)
    return out.flatten(2)


def turn(positions: Tensor, rows: Tensor, frequencies: Tensor, turns: Tensor, slots: Tensor, capacity: int) -> None:
    """Fill slots [B, T] and turns [B, T, 2, d / 2] of the T positions from positions[row] on, for each of rows [B]."""
    grid = (slots.numel(),)
    launch(_turns, grid, positions, rows, frequencies, turns, slots, slots.shape[1], capacity, 2 * len(frequencies))


def append(qkv: Tensor, query: Tensor, rows: Tensor, slots: Tensor, turns: Tensor, ring: "Ring") -> None:
    """Turn the queries of qkv [B, T, 3, H, d] into `query`, its keys too, and write keys and values to `slots` [B, T]
    of `rows` [B]."""
    heads, width = qkv.shape[3:]
    sizes = (heads, width, ring.capacity, slots.shape[1], ring.keys.scales is not None)
    stride = ring.keys.vectors.stride(0)
    grid = (slots.numel(), heads)
    launch(_append, grid, qkv, *stores(ring), query, rows, slots, turns, stride, *sizes, num_warps=1)


def stores(ring: "Ring") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, and their scales; where they are no bytes something that is neither read nor written."""
    keys, values = ring.keys, ring.values
    if keys.scales is None or values.scales is None:
        return keys.vectors, values.vectors, keys.vectors, values.vectors
    return keys.vectors, values.vectors, keys.scales, values.scales


def programs_for(device: torch.device, split: Split) -> int:
    """As many as the GPU holds at once, so that none waits for another to end; under the interpreter a few."""
    if device.type != "cuda":
        return 3
    return split.resident * torch.cuda.get_device_properties(device).multi_processor_count
