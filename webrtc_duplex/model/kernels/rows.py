"""A row's memory moved in one launch: what a cached prompt has left goes into the row that joins.

What it computes is the `copy_` of `streaming.put`, whose lines (a layer's keys or values of one head) lie far apart.
"""

import triton
import triton.language as tl
from torch import Tensor

from webrtc_duplex.model.kernels.launch import launch

_BLOCK = 4096


@triton.jit
def _put(source, target, length, stride, BLOCK: tl.constexpr):
    """One program a block of a line: `length` numbers that begin every `length` in source, every `stride` in target."""
    line = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    copied = tl.load(source + line * length + x, mask=x < length)
    tl.store(target + line * stride + x, copied, mask=x < length)


def put(target: Tensor, source: Tensor) -> None:
    """target [layers, 2, H, P, ...], the first slots of a row's rings, becomes source, which is contiguous."""
    lines = source.shape[0] * source.shape[1] * source.shape[2]
    length = source.numel() // lines
    launch(_put, (lines, triton.cdiv(length, _BLOCK)), source, target, length, target.stride(2), _BLOCK, num_warps=8)
