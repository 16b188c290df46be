"""How the released tensors become our parameters: each module lists pieces, the loader streams them in.

A module stacks and folds what it will read together (steps of the depformer, both input projections of the quantizer),
so one parameter may be made of several tensors of the file, and one tensor may fill a slice of a parameter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

Shape = tuple[int, ...]
Place = int | slice


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
    """An uninitialised weight [..., out, in].

    On the CPU its memory lies [..., in, out]: a product with a few rows is a quarter faster (8 x 512 x 2048, MKL).
    """
    if device.type != "cpu":
        return vector(*shape, device=device, dtype=dtype)
    *lead, rows, columns = shape
    return nn.Parameter(torch.empty(*lead, columns, rows, device=device, dtype=dtype).mT, requires_grad=False)


def vector(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised weight that is no matrix (a bias, a norm), or a table to look up in."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


def add_product(x: Tensor, a: Tensor, weight: Tensor) -> None:
    """x [..., D] += a [..., n] weight^T, in place: the end of a residual branch in one product."""
    x.view(-1, x.shape[-1]).addmm_(a.reshape(-1, a.shape[-1]), weight.mT)


def under(module: str, pieces: list[Piece]) -> list[Piece]:
    """The same pieces with their targets inside the submodule `module`."""
    return [replace(piece, target=f"{module}.{piece.target}") for piece in pieces]


class Stack(nn.ModuleList, Generic[M]):
    """Modules of one kind, one after another."""

    def __iter__(self) -> Iterator[M]:
        return cast(Iterator[M], super().__iter__())
