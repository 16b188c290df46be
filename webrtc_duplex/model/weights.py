"""How the released tensors become our parameters: each module lists pieces, the loader streams them in.

A module stacks and folds what it will read together (steps of the depformer, both input projections of the quantizer),
so one parameter may be made of several tensors of the file, and one tensor may fill a slice of a parameter. How a
matrix lies in memory is known here alone: `matrix` makes it, `write` fills it, `product` multiplies by it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from webrtc_duplex.model.pages import zeros

M = TypeVar("M", bound=nn.Module)

Shape = tuple[int, ...]
Place = int | slice

BLOCKS = range(256, 16, -16)
"""Outputs in a block of a matrix on the CPU: the first of these that divides their number, or all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`module.get_parameter_or_buffer(target)[into] = make(*tensors named by sources)`.

    `sources` are (key in the file, its exact shape); all are required. `make` gets them in that order, in the dtype of
    the file, and returns what fits the place; the loader converts to the target's dtype.
    """

    target: str
    into: tuple[Place, ...]
    sources: tuple[tuple[str, Shape], ...]
    make: Callable[..., Tensor]


def as_is(tensor: Tensor) -> Tensor:
    return tensor


def one(
    target: str, key: str, shape: Shape, make: Callable[[Tensor], Tensor] = as_is, into: Place | None = None
) -> Piece:
    """A piece made of one tensor; it fills the whole target, or its entry `into`."""
    return Piece(target, () if into is None else (into,), ((key, shape),), make)


def matrix(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """A weight [..., out, in] for `product`, to be filled.

    On the CPU it lies in blocks of b outputs, [..., out / b, in, b]. A product of few rows costs there what reading the
    weight costs, and MKL reads 1 to 34 MB of them, in turn, at 7.0 GB/s for 8 rows and 5.9 for 16; of [in, out] 5.4 and
    4.6, of [out, in] 4.5 and 4.6 (Sapphire Rapids, one thread, f32, 2026-12-01).
    """
    if device.type != "cpu":
        return vector(*shape, device=device, dtype=dtype)
    *lead, rows, columns = shape
    block = next((size for size in BLOCKS if rows % size == 0), rows)
    blocks = zeros(*lead, rows // block, columns, block, device=device, dtype=dtype)
    return nn.Parameter(blocks, requires_grad=False)


def turned_matrix(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """A weight [out, in] that is to be filled and, on the CPU, lies [in, out]: for products of many rows, whose parts
    along the inputs are wanted."""
    if device.type != "cpu":
        return vector(rows, columns, device=device, dtype=dtype)
    return nn.Parameter(torch.empty(columns, rows, device=device, dtype=dtype).mT, requires_grad=False)


def vector(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised weight that is no matrix (a bias, a norm), or a table to look up in."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


def write(target: Tensor, made: Tensor) -> None:
    """Copy into a parameter, or a part of it, what belongs there; [..., out, in] also where that lies in blocks."""
    if target.dim() > made.dim():
        *lead, blocks, columns, block = target.shape
        made = made.reshape(*lead, blocks, block, columns).mT
    target.copy_(made)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, shape: Shape = (-1,)) -> Tensor:
    """x [..., in] weight^T + bias -> [..., *shape], shape that of the outputs, for a weight of either kind.

    Where the blocks are the first axis of the shape, no number is moved for it, and the result is not contiguous.
    """
    if is_whole(weight):
        return functional.linear(x, _whole(weight), bias).view(*x.shape[:-1], *shape)
    return blocks(x, weight, bias).transpose(0, 1).reshape(*x.shape[:-1], *shape)


def blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product with a weight that lies in blocks, as it is made: [out / b, n, b] of the n rows of x [..., in]."""
    count, width, block = weight.shape
    rows = x.reshape(-1, width).expand(count, -1, -1)
    return torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.view(count, 1, block), rows, weight)


def rows_for(made: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for what is made of blocks [out / b, n, b]: as rows [n, out], and as blocks for an operator's `out`."""
    count, rows, block = made.shape
    room = made.new_empty(rows, count, block)
    return room.flatten(1), room.transpose(0, 1)


def add_product(x: Tensor, a: Tensor, weight: Tensor) -> None:
    """x [..., D] += a [..., n] weight^T, in place: the end of a residual branch."""
    if is_whole(weight):
        x.view(-1, x.shape[-1]).addmm_(a.reshape(-1, a.shape[-1]), _whole(weight).mT)  # in one product
    else:
        made = blocks(a, weight)
        x.view(made.shape[1], made.shape[0], -1).add_(made.transpose(0, 1))


def rows_of(weight: Tensor, index: Tensor) -> Tensor:
    """Rows of a weight [out, in] of either kind: index int64 [...] -> [..., in]."""
    if weight.dim() == 2:
        return functional.embedding(index, weight)
    block = weight.shape[-1]
    return weight[index // block, :, index % block]


def is_whole(weight: Tensor) -> bool:
    """Whether it lies in no blocks, or in one."""
    return weight.dim() == 2 or weight.shape[0] == 1


def _whole(weight: Tensor) -> Tensor:
    """[out, in]"""
    return weight if weight.dim() == 2 else weight[0].mT


@cache
def scalar(value: float, device: torch.device) -> Tensor:
    """A number for operators that want a tensor; made once."""
    return torch.tensor(value, device=device)


def under(module: str, pieces: list[Piece]) -> list[Piece]:
    """The same pieces with their targets inside the submodule `module`."""
    return [replace(piece, target=f"{module}.{piece.target}") for piece in pieces]


class Stack(nn.ModuleList, Generic[M]):
    """Modules of one kind, one after another."""

    def __iter__(self) -> Iterator[M]:
        return cast(Iterator[M], super().__iter__())
