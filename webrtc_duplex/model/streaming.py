"""What a row remembers between frames: a typed tree of dataclasses of tensors, row first, and the rings of attention.

All state is allocated once for `rows` rows and one more, the scratch row at index `rows` that padding lanes work on.
A step lists the rows it serves (int64 [B], a tensor) and writes them in place; a row that is not listed is neither
written nor, where that would cost anything, read. Nothing here is ever rebound, so a step can be captured as one graph.

    ring of one layer, C slots a row           position p lies in slot p mod C

        slot     0   1   2   3                 C is the number of keys that a query sees once the ring is full,
        holds    8   9   6   7                 so a full ring needs no mask at all

A ring may hold bytes, each key and each value with a scale of its own. What is attended to is always what the ring will
hold, in a prefill too, so that the size of its pieces makes no difference.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from webrtc_duplex.model.kernels import ops
from webrtc_duplex.model.pages import zeros

_LEAST_PEAK = 1e-8
"""A vector's greatest number counts as at least so much, or one of zeros would have no scale."""

SPAN_STEP = 64
"""Slots that attention on the CPU reads in one piece: as many of these as may be in use."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What the host knows of a step's lanes, so that the CPU can do less; no hint changes a bit of what is said."""

    lanes: int | None = None
    """Only the first so many serve a row; the others are padding."""
    greedy: bool = False
    """All of their rows are greedy: no noise is made."""
    every_token: bool = True
    """Some of their rows may draw among every token of the text, not its top k: noise is made for all."""
    columns: int | None = None
    """None of their rows has heard more columns than that, with this step's; prompt included."""
    frames: int | None = None
    """None of their rows has heard or said more frames than that, with this step's."""


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Store:
    """The keys, or the values, of one ring: vectors [rows + 1, H, C, d], and of bytes a scale for each vector."""

    vectors: Tensor
    scales: Tensor | None
    """f32 [rows + 1, H, C]: what a vector's bytes are to be multiplied by; None where they are no bytes"""

    def read(self, rows: Tensor | slice, span: int) -> Tensor:
        """The first `span` slots of these rows, as numbers: [N, H, span, d]."""
        vectors = _pick(self.vectors[:, :, :span], rows)
        return vectors if self.scales is None else expanded(vectors, _pick(self.scales[:, :, :span], rows))

    def extend(self, row: int, earlier: Tensor, written: Tensor, new: Tensor) -> Tensor:
        """Write the last of `new` [H, T, d] to the slots `written` [m] of a row; returns what was in its slots
        `earlier` [n], and then all of `new`: numbers [H, n + T, d]."""
        if self.scales is None:
            return _extend(self.vectors[row], earlier, written, new)
        vectors, scales = quantised(new)
        seen = _extend(self.scales[row], earlier, written, scales)
        return expanded(_extend(self.vectors[row], earlier, written, vectors), seen)


def _pick(x: Tensor, rows: Tensor | slice) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _extend(kept: Tensor, earlier: Tensor, written: Tensor, new: Tensor) -> Tensor:
    """`Store.extend` of one tensor of one row, [H, C, ...]."""
    seen = torch.cat([kept.index_select(1, earlier), new], dim=1)
    kept.index_copy_(1, written, new[:, -len(written) :])
    return seen


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., d] as int8, the greatest of each as 127, and their scales f32 [...]."""
    scales = x.abs().amax(-1).float().clamp_min(_LEAST_PEAK) / 127.0
    return (x / scales[..., None] + 0.5).floor_().to(torch.int8), scales


def expanded(vectors: Tensor, scales: Tensor) -> Tensor:
    """The numbers, f32 [..., d], that int8 vectors and their scales [...] stand for."""
    return vectors * scales[..., None]


@dataclass(frozen=True, slots=True)
class Ring:
    """What one attention layer remembers; keys are already rotated."""

    both: Store
    """Keys, then values: [rows + 1, 2, H, C, ...]"""
    keys: Store
    values: Store
    """Views of it"""

    @classmethod
    def of(cls, whole: Tensor, scales: Tensor | None) -> Self:
        """One layer's part of `Rings`: [rows + 1, 2, ...]."""
        keys, values = whole.unbind(1)
        of_keys, of_values = (None, None) if scales is None else scales.unbind(1)
        return cls(Store(whole, scales), Store(keys, of_keys), Store(values, of_values))

    def append(self, rows: Tensor, slots: Tensor, new: Tensor) -> None:
        """Write keys and values, `new` [B, T, 2, H, d], to `slots` [B, T] of `rows` [B]."""
        if self.both.scales is not None:
            new, self.both.scales[rows[:, None], :, :, slots] = quantised(new)
        self.both.vectors[rows[:, None], :, :, slots] = new

    @property
    def capacity(self) -> int:
        return self.keys.vectors.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that attention computes with."""
        return self.keys.vectors.dtype if self.keys.scales is None else self.keys.scales.dtype


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings of all layers of one transformer: what a row remembers lies in one piece, and is moved as one."""

    whole: Tensor
    """Keys, then values: [rows + 1, layers, 2, H, C, d]"""
    scales: Tensor | None
    """f32 [rows + 1, layers, 2, H, C] of int8"""
    layers: tuple[Ring, ...]
    """Views of these"""

    @classmethod
    def allocate(
        cls, layers: int, rows: int, heads: int, capacity: int, width: int, device: torch.device, dtype: torch.dtype
    ) -> Self:
        shape = (rows + 1, layers, 2, heads, capacity)
        whole = zeros(*shape, width, device=device, dtype=dtype)
        scales = torch.zeros(shape, device=device) if dtype == torch.int8 else None
        parts = [None] * layers if scales is None else scales.unbind(1)
        return cls(whole, scales, tuple(map(Ring.of, whole.unbind(1), parts)))

    @property
    def capacity(self) -> int:
        return self.layers[0].capacity


class Window(Protocol):
    """New positions of some rows as every layer of one transformer sees them: where they go, what they attend to."""

    def attend(self, qkv: Tensor, ring: Ring) -> Tensor:
        """Rotate, append to the ring, attend. qkv [B, T, 3, H, d] (overwritten) -> [B, T, H * d]."""
        ...


@dataclass(frozen=True, slots=True)
class StepWindow:
    """T new positions for each listed row, all appended before attention; made once a step, used by every layer.

    Where at least half of all rows are served, attention runs over all rows in place and the served ones are picked
    from its result: for 8 rows of 300 keys, copying the served rows' keys costs twice what attention itself does.
    """

    rows: Tensor
    """int64 [B]"""
    slots: Tensor
    """int64 [B, T]"""
    rotation: Tensor
    """complex64 [B, T, 1, 1, d / 2]"""
    mask: Tensor
    """0 or -inf, [served lanes or rows, 1, T, span]"""
    served: int
    """Lanes that attend; the rest is padding and gets 0"""
    in_place: bool
    seated: Tensor
    """Where attention is in place: the lane whose query each of all rows gets, lane 0's if it is not served; int64"""

    @classmethod
    def open(
        cls,
        positions: Tensor,
        rows: Tensor,
        count: int,
        ring: Ring,
        frequencies: Tensor,
        used: int | None,
        lanes: int | None,
    ) -> Self:
        """`count` new positions from each listed row's `positions` [rows + 1] on, for rings like `ring`.

        What the host knows (`Hints`): only the first `lanes` lanes serve a row, so that the scratch row is not read;
        none of their rows will have more than `used` positions behind it, so that slots beyond are not read. Spans are
        multiples of 64, among which an attention's bits do not depend on it.
        """
        steps = torch.arange(count, device=positions.device)
        listed = positions.index_select(0, rows)[:, None] + steps  # [B, T]
        served, seats = (len(rows), positions) if lanes is None else (lanes, positions[:-1])
        in_place = 2 * served >= len(seats)
        queries = seats[:, None] + steps if in_place else listed[:served]
        span = ring.capacity if used is None else min(ring.capacity, -(-used // SPAN_STEP) * SPAN_STEP)
        return cls(
            rows=rows,
            slots=listed.remainder(ring.capacity),
            rotation=rotation(listed, frequencies)[:, :, None, None],
            mask=ring_mask(queries, ring.capacity, span, ring.dtype),
            served=served,
            in_place=in_place,
            seated=rows.new_zeros(len(seats)).index_copy_(0, rows[:served], torch.arange(served, device=rows.device)),
        )

    def attend(self, qkv: Tensor, ring: Ring) -> Tensor:
        rotate(qkv[:, :, :2], self.rotation)
        ring.append(self.rows, self.slots, qkv[:, :, 1:])
        query = qkv[:, :, 0]  # [B, T, H, d]
        if not self.served:
            return torch.zeros_like(query).flatten(2)
        attend_to = self._in_place if self.in_place else self._copied
        attended = attend_to(query[: self.served], ring)
        if self.served < len(query):
            attended = torch.cat([attended, torch.zeros_like(query[self.served :])])
        return attended.flatten(2)

    def _in_place(self, query: Tensor, ring: Ring) -> Tensor:
        seats, span = slice(len(self.mask)), self.mask.shape[-1]
        queries = query.index_select(0, self.seated)
        attended = attend(queries, ring.keys.read(seats, span), ring.values.read(seats, span), self.mask)
        return attended.index_select(0, self.rows[: self.served])

    def _copied(self, query: Tensor, ring: Ring) -> Tensor:
        rows, span = self.rows[: self.served], self.mask.shape[-1]
        return attend(query, ring.keys.read(rows, span), ring.values.read(rows, span), self.mask)


@dataclass(frozen=True, slots=True)
class KernelWindow:
    """What `StepWindow` does, on the GPU: a row's keys are read as far as it has any, padding lanes read none."""

    plan: "ops.attention.Plan"

    @classmethod
    def open(cls, positions: Tensor, rows: Tensor, count: int, ring: Ring, frequencies: Tensor) -> Self:
        """As `StepWindow.open`."""
        split = ops.attention.split_for(ring.keys.vectors.dtype)
        programs = ops.attention.programs_for(rows.device, split)
        return cls(ops.attention.plan(positions, rows, count, ring.capacity, frequencies, split, programs))

    def attend(self, qkv: Tensor, ring: Ring) -> Tensor:
        return ops.attention.attend(self.plan, qkv, ring)


def open_window(
    positions: Tensor,
    rows: Tensor,
    count: int,
    ring: Ring,
    frequencies: Tensor,
    used: int | None = None,
    lanes: int | None = None,
) -> Window:
    """The window of a step, `StepWindow.open`, or its fast twin."""
    if ops.usable(rows):
        return KernelWindow.open(positions, rows, count, ring, frequencies)
    return StepWindow.open(positions, rows, count, ring, frequencies, used, lanes)


@dataclass(frozen=True, slots=True)
class ChunkWindow:
    """T new positions of one row at once (prefill). Each query has its own window, however small the ring is.

    The ring alone would not do: by the time the chunk is in it, the first queries' oldest keys are overwritten.
    """

    row: int
    earlier: Tensor
    """int64 [n]: slots of the n positions before the chunk that its queries may see, in order"""
    written: Tensor
    """int64 [m]: slots that the chunk's last m positions go to"""
    rotation: Tensor
    """complex64 [1, T, 1, 1, d / 2]"""
    mask: Tensor
    """0 or -inf, [1, 1, T, n + T]"""

    @classmethod
    def open(cls, row: int, start: int, count: int, ring: Ring, frequencies: Tensor) -> Self:
        """`count` new positions of `row` from position `start` on, for rings like `ring`."""
        capacity, device = ring.capacity, frequencies.device
        first = start - min(start, capacity - 1)
        keys = torch.arange(first, start + count, device=device)
        queries = keys[start - first :]
        age = queries[:, None] - keys  # [T, n + T]
        seen = (age >= 0) & (age < capacity)
        return cls(
            row=row,
            earlier=keys[: start - first].remainder(capacity),
            written=queries[-capacity:].remainder(capacity),
            rotation=rotation(queries[None], frequencies)[:, :, None, None],
            mask=additive(seen, ring.dtype)[None, None],
        )

    def attend(self, qkv: Tensor, ring: Ring) -> Tensor:
        rotate(qkv[:, :, :2], self.rotation)
        query, keys, values = qkv.transpose(1, 3).unbind(2)  # [1, H, T, d] each
        seen_keys, seen_values = (
            store.extend(self.row, self.earlier, self.written, new[0])[None]  # [1, H, n + T, d]
            for store, new in ((ring.keys, keys), (ring.values, values))
        )
        return attend(query.transpose(1, 2), seen_keys, seen_values, self.mask).flatten(2)


@dataclass(frozen=True, slots=True)
class KernelChunk:
    """What `ChunkWindow` does, on the GPU and with nothing left to the host, of pieces that do not pass the ring's end.

    Of its T columns the first `count` are the prompt's.
    """

    plan: "ops.chunk.ChunkPlan"

    @classmethod
    def open(cls, positions: Tensor, row: Tensor, count: Tensor, columns: int, ring: Ring, frequencies: Tensor) -> Self:
        """`count` new positions of `row`, both int64 [1], from its place in `positions` [rows + 1] on."""
        scratch = len(positions) - 1
        start = positions.index_select(0, row)
        return cls(ops.chunk.plan(start, row, count, columns, scratch, ring, frequencies))

    def attend(self, qkv: Tensor, ring: Ring) -> Tensor:
        return ops.chunk.attend(self.plan, qkv, ring)


def rope_frequencies(width: int, max_period: float, device: torch.device) -> Tensor:
    """Radians a position for each adjacent pair of a head: f32 [d / 2], computed in f64."""
    pairs = torch.arange(0, width, 2, dtype=torch.float64)
    return torch.exp(-math.log(max_period) * pairs / width).float().to(device)


def rotation(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Unit complex numbers of these positions: [..., d / 2]."""
    angles = positions[..., None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(pairs: Tensor, by: Tensor) -> None:
    """Turn adjacent pairs of the last axis in place, in f32."""
    as_complex = torch.view_as_complex(pairs.float().view(*pairs.shape[:-1], -1, 2))
    if pairs.dtype == torch.float32:
        as_complex.mul_(by)
    else:
        pairs.copy_(torch.view_as_real(as_complex * by).flatten(-2))


def ring_mask(queries: Tensor, capacity: int, span: int, dtype: torch.dtype) -> Tensor:
    """What T consecutive positions [N, T] see in `span` slots once all T are written: 0 or -inf, [N, 1, T, span].

    The last of them sees all that is there; an earlier one not the later ones, nor the keys that those overwrote.
    """
    last = queries[:, -1:]
    slots = torch.arange(span, device=queries.device)
    holds = last - (last - slots).remainder(capacity)  # [N, span]: position in slot
    holds = holds[:, None]
    seen = (holds >= 0) & (holds <= queries[:, :, None])
    return additive(seen, dtype)[:, None]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention. query [N, T, H, d], keys and values [N, H, C, d] -> [N, T, H, d]."""
    if query.dtype != keys.dtype:  # what were bytes is f32
        return attend(query.to(keys.dtype), keys, values, mask).to(query.dtype)
    attended = functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, mask)
    return attended.transpose(1, 2)


def tensors(state: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree of dataclasses and tuples, with its dotted name; rings layer by layer."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, Rings):
        yield from tensors(state.layers, name)
    elif isinstance(state, Ring):
        yield from tensors(state.keys, f"{name}.keys")
        yield from tensors(state.values, f"{name}.values")
    elif isinstance(state, tuple):
        for index, item in enumerate(state):
            yield from tensors(item, f"{name}.{index}")
    elif is_dataclass(state):
        for field in fields(state):
            yield from tensors(getattr(state, field.name), f"{name}.{field.name}" if name else field.name)


def zero_row(state: object, row: int, used: int | None = None) -> None:
    """Make a row as it was allocated; of its rings at most `used` slots were ever written, or all.

    Old keys go too: were one not finite, even its masked product would not be.
    """
    for tensor in _row(state, row, used):
        tensor.zero_()


@dataclass(frozen=True, slots=True)
class RowImage:
    """A copy of one row's state: of rings the first slots that are in use, of all else everything."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def take(cls, state: object, row: int, used: int) -> Self:
        """Copy the row, of whose rings `used` slots (or all, if they have fewer) were ever written."""
        return cls(tuple(tensor.clone() for tensor in _row(state, row, used)))

    def put(self, state: object, row: int, used: int) -> None:
        """Make a fresh row what the copied one was."""
        for tensor, copy in zip(_row(state, row, used), self.tensors, strict=True):
            put(tensor, copy)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def put(tensor: Tensor, copy: Tensor) -> None:
    """Make a part of a row's state what the copy is; of rings, a few slots of each of many lines."""
    if ops.usable(tensor) and not tensor.is_contiguous():
        ops.rows.put(tensor, copy)
    else:
        tensor.copy_(copy)


def _row(state: object, row: int, used: int | None) -> Iterator[Tensor]:
    """Views of a row's tensors; of its rings [layers, 2, H, C, ...] the first `used` slots, or all."""
    if isinstance(state, Rings):
        yield state.whole[row, :, :, :, :used]
        if state.scales is not None:
            yield state.scales[row, :, :, :, :used]
    elif isinstance(state, Tensor):
        yield state[row]
    elif isinstance(state, tuple):
        for item in state:
            yield from _row(item, row, used)
    elif is_dataclass(state):
        for field in fields(state):
            yield from _row(getattr(state, field.name), row, used)
