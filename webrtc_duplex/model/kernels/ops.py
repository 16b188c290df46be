"""Which tensors have kernels, and the kernels by the names that the model calls them by.

The model asks `usable(x)` at the few places where a plain-torch function has a fast twin. On the CPU it is false, so
there the plain functions run, which specify the kernels; on a GPU without Triton they do too.
"""

from importlib.util import find_spec

from torch import Tensor

TRITON = find_spec("triton") is not None

if TRITON:
    from webrtc_duplex.model.kernels import attention, chunk, convolution, pointwise, rows, sampler

__all__ = ["TRITON", "attention", "chunk", "convolution", "pointwise", "rows", "sampler", "usable"]


def usable(x: Tensor) -> bool:
    """Whether kernels are to be used for x and what is computed from it."""
    return TRITON and x.is_cuda
