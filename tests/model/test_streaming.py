"""Rings, windows, and the walk over state."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from webrtc_duplex.model.streaming import (
    SPAN_STEP,
    ChunkWindow,
    Ring,
    Rings,
    RowImage,
    StepWindow,
    attend,
    expanded,
    quantised,
    rope_frequencies,
    rotate,
    rotation,
    tensors,
    zero_row,
)

CPU = torch.device("cpu")
HEADS, WIDTH = 2, 8
FREQUENCIES = rope_frequencies(WIDTH, 10_000.0, CPU)


def rings(rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> Rings:
    return Rings.allocate(2, rows, HEADS, capacity, WIDTH, CPU, dtype)


def ring(rows: int, capacity: int) -> Ring:
    return rings(rows, capacity).layers[1]


def projections(length: int, seed: int) -> Tensor:
    """q, k and v of one row's positions: [length, 3, H, d]."""
    return torch.randn(length, 3, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed))


def attend_at_once(qkv: Tensor, window: int) -> Tensor:
    """What each position should see: itself and the window - 1 before it. [T, 3, H, d] -> [T, H * d]"""
    turned = qkv.clone()
    rotate(turned[:, :2], rotation(torch.arange(len(qkv)), FREQUENCIES)[:, None, None])
    query, keys, values = turned.unbind(1)  # [T, H, d]
    age = torch.arange(len(qkv))[:, None] - torch.arange(len(qkv))
    logits = torch.einsum("thd,shd->hts", query, keys) / WIDTH**0.5
    logits = logits.masked_fill((age < 0) | (age >= window), -torch.inf)
    return torch.einsum("hts,shd->thd", logits.softmax(-1), values).flatten(1)


def attend_stepwise(
    qkv: Tensor, capacity: int, count: int, rows: int, row: int, used: bool = False, lanes: int | None = None
) -> Tensor:
    """The same, `count` positions a step, in one row of some, beside the scratch row: [T, H * d]."""
    state, position = ring(rows, capacity), torch.zeros(rows + 1, dtype=torch.int64)
    listed = torch.tensor([row, rows, rows, rows])
    seen = []
    for start in range(0, len(qkv), count):
        window = StepWindow.open(position, listed, count, state, FREQUENCIES, start + count if used else None, lanes)
        seen.append(window.attend(qkv[None, start : start + count].repeat(4, 1, 1, 1, 1), state)[0])
        position.index_add_(0, listed, torch.full_like(listed, count))
    return torch.cat(seen)


def test_one_position_a_step_sees_as_many_keys_as_the_ring_has_slots() -> None:
    qkv = projections(30, seed=1)
    torch.testing.assert_close(attend_stepwise(qkv, 7, 1, rows=3, row=2), attend_at_once(qkv, 7))


def test_of_two_positions_a_step_the_earlier_sees_one_key_fewer_once_the_ring_is_full() -> None:
    qkv = projections(30, seed=1)
    ours = attend_stepwise(qkv, 7, 2, rows=3, row=1)
    torch.testing.assert_close(ours[1::2], attend_at_once(qkv, 7)[1::2])
    torch.testing.assert_close(ours[::2], attend_at_once(qkv, 6)[::2])


@pytest.mark.parametrize("count", [1, 2])
def test_attention_in_place_over_copies_and_without_padding_is_the_same_bit_for_bit(count: int) -> None:
    qkv = projections(90, seed=2)
    for capacity in (7, 70):
        in_place = attend_stepwise(qkv, capacity, count, rows=3, row=1)
        assert torch.equal(attend_stepwise(qkv, capacity, count, rows=40, row=1), in_place)
        assert torch.equal(attend_stepwise(qkv, capacity, count, rows=40, row=1, lanes=1), in_place)
        assert torch.equal(attend_stepwise(qkv, capacity, count, rows=2, row=1, lanes=1), in_place)


@pytest.mark.parametrize("capacity", [70, 200])
def test_slots_that_cannot_be_in_use_are_not_read_and_no_bit_differs(capacity: int) -> None:
    qkv = projections(capacity + 20, seed=3)
    whole, spared = (attend_stepwise(qkv, capacity, 1, 3, 1, used) for used in (False, True))
    assert torch.equal(whole, spared)
    assert capacity > SPAN_STEP


@pytest.mark.parametrize("capacity", [5, 12, 40])
@pytest.mark.parametrize("chunk", [1, 4, 30])
def test_chunks_of_a_prompt_equal_its_positions_one_by_one_however_small_the_ring(capacity: int, chunk: int) -> None:
    qkv = projections(30, seed=4)
    state = ring(2, capacity)
    seen = []
    for start in range(0, 30, chunk):
        part = qkv[None, start : start + chunk].clone()
        seen.append(ChunkWindow.open(1, start, part.shape[1], state, FREQUENCIES).attend(part, state)[0])
    torch.testing.assert_close(torch.cat(seen), attend_at_once(qkv, capacity))


# ---- keys and values of a byte


def test_a_vector_of_bytes_errs_by_half_a_step_of_its_own_scale() -> None:
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 50)[:, None]
    vectors, scales = quantised(x)
    assert vectors.abs().amax(-1).eq(127).all(), "nothing of the range is left over"
    assert ((expanded(vectors, scales) - x).abs() <= 0.501 * scales[:, None]).all()
    assert not expanded(*quantised(torch.zeros(3, WIDTH))).any()
    assert expanded(*quantised(torch.full((1, WIDTH), torch.nan))).isnan().all(), "a fault stays seen"


@pytest.mark.parametrize(("sharpness", "limit"), [(0.0, 0.02), (1.0, 0.012), (4.0, 0.02)])
def test_attention_to_bytes_errs_by_one_to_two_percent_of_that_to_numbers(sharpness: float, limit: float) -> None:
    """At released sizes: 3 000 keys of 128, softmax flat to peaked."""
    width, keys, chance = 128, 3000, torch.Generator().manual_seed(2)
    exact, small = (
        Rings.allocate(1, 1, HEADS, keys, width, CPU, dtype).layers[0] for dtype in (torch.float32, torch.int8)
    )
    new = torch.randn(1, keys, 2, HEADS, width, generator=chance)
    for ring in (exact, small):
        ring.append(torch.tensor([0]), torch.arange(keys)[None], new)
    query = sharpness * torch.randn(1, 1, HEADS, width, generator=chance)
    mask = torch.zeros(1, 1, 1, keys)
    wanted, got = (
        attend(query, ring.keys.read(slice(1), keys), ring.values.read(slice(1), keys), mask) for ring in (exact, small)
    )
    assert (got - wanted).norm() / wanted.norm() < limit


@pytest.mark.parametrize("chunk", [1, 4, 30])
def test_pieces_of_a_prompt_see_the_bytes_that_steps_see(chunk: int) -> None:
    qkv, capacity = projections(30, seed=7), 12
    stepped, prefilled = (rings(2, capacity, torch.int8).layers[0] for _ in range(2))
    position, listed = torch.tensor([0, 0, 0]), torch.tensor([1])
    seen, wanted = [], []
    for start in range(30):
        window = StepWindow.open(position, listed, 1, stepped, FREQUENCIES, None, None)
        wanted.append(window.attend(qkv[None, start : start + 1].clone(), stepped)[0])
        position[1] += 1
    for start in range(0, 30, chunk):
        part = qkv[None, start : start + chunk].clone()
        seen.append(ChunkWindow.open(1, start, part.shape[1], prefilled, FREQUENCIES).attend(part, prefilled)[0])
    torch.testing.assert_close(torch.cat(seen), torch.cat(wanted))
    for (name, one), (_, other) in zip(tensors(stepped), tensors(prefilled), strict=True):
        assert torch.equal(one, other), name


# ---- steps, chunks, the walk


def test_a_step_goes_on_where_a_chunk_ended() -> None:
    qkv, capacity = projections(30, seed=5), 12
    state, position = ring(2, capacity), torch.tensor([0, 29, 0])
    chunk = qkv[None, :29].clone()
    ChunkWindow.open(1, 0, 29, state, FREQUENCIES).attend(chunk, state)
    lanes = torch.tensor([1, 2])
    window = StepWindow.open(position, lanes, 1, state, FREQUENCIES, None, None)
    last = window.attend(qkv[None, 29:].repeat(2, 1, 1, 1, 1), state)[0]
    torch.testing.assert_close(last, attend_at_once(qkv, capacity)[29:])


def test_rotation_in_low_precision_is_rounded_once() -> None:
    pairs, by = torch.randn(3, 2, WIDTH), rotation(torch.tensor([5, 500, 45_000]), FREQUENCIES)[:, None]
    exact, rounded = pairs.clone(), pairs.bfloat16()
    rotate(exact, by)
    rotate(rounded, by)
    torch.testing.assert_close(rounded.float(), exact, atol=0.03, rtol=0.02)


@dataclass(frozen=True)
class Tree:
    rings: Rings
    position: Tensor


def tree(dtype: torch.dtype = torch.float32) -> Tree:
    return Tree(rings(3, 6, dtype), torch.arange(4))


def test_walk_finds_every_tensor_once_by_name() -> None:
    names = [name for name, _ in tensors(tree())]
    vectors = [f"rings.{layer}.{half}.vectors" for layer in (0, 1) for half in ("keys", "values")]
    assert names == [*vectors, "position"]
    assert len({name for name, _ in tensors(tree(torch.int8))}) == 9, "each has scales then"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_zeroing_a_row_forgets_also_what_is_not_finite_and_touches_no_other(dtype: torch.dtype) -> None:
    state = tree(dtype)
    for _, tensor in tensors(state):
        tensor.fill_(7)
    broken = state.rings.layers[1].values
    (broken.vectors if broken.scales is None else broken.scales)[2, 0, 0] = torch.nan
    zero_row(state, 2)
    for _, tensor in tensors(state):
        assert not tensor[2].any()
        assert (tensor[[0, 1, 3]] == 7).all()


def test_an_image_of_a_row_makes_a_fresh_row_the_same() -> None:
    state = tree()
    state.rings.layers[0].keys.vectors[1, :, :4] = torch.randn(HEADS, 4, WIDTH)
    image = RowImage.take(state, row=1, used=4)
    image.put(state, row=3, used=4)
    for _, tensor in tensors(state):
        assert torch.equal(tensor[3], tensor[1])
    assert image.bytes == 4 * (HEADS * 4 * WIDTH * 4) + 8
