"""How the released tensors become our parameters: each module lists pieces, the loader streams them in.

A module stacks and folds what it will read together (steps of the depformer, both input projections of the quantizer),
so one parameter may be made of several tensors of the file, and one tensor may fill a slice of a parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

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
