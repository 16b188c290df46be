"""The one place where kernels are launched."""

from typing import Any, Protocol

Scalar = int | float | bool


class Kernel(Protocol):
    """What `triton.jit` makes of a function."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any: ...


def launch(kernel: Kernel, grid: tuple[int, ...], *arguments: object, **options: int) -> None:
    """Run `grid` programs of the kernel; options are Triton's `num_warps` and `num_stages`."""
    kernel[grid](*arguments, **options)
