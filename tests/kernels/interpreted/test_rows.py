"""A row's memory moved by a kernel, beside plain torch: byte for byte, and no neighbour's."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from webrtc_duplex.model.kernels import ops
from webrtc_duplex.model.streaming import Rings, RowImage, tensors

ROWS, CPU = 3, torch.device("cpu")

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@dataclass(frozen=True)
class Memory:
    rings: Rings
    position: Tensor


def memory(dtype: torch.dtype) -> Memory:
    rings = Rings.allocate(2, ROWS, heads=3, capacity=9, width=8, device=CPU, dtype=dtype)
    chance = torch.Generator().manual_seed(1)
    for _, tensor in tensors(rings):
        tensor.copy_(100 * torch.randn(tensor.shape, generator=chance))
    return Memory(rings, torch.arange(ROWS + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("used", [1, 5, 9])
def test_a_prefix_is_copied_to_another_row_as_in_plain_torch(
    dtype: torch.dtype, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fast = memory(dtype), memory(dtype)
    image = RowImage.take(plain, row=2, used=used)
    image.put(plain, row=0, used=used)
    monkeypatch.setattr(ops, "usable", lambda x: True)
    image.put(fast, row=0, used=used)
    for (name, wanted), (_, got) in zip(tensors(plain), tensors(fast), strict=True):
        assert torch.equal(wanted, got), name
