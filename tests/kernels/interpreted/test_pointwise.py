"""Norms and GELU of the codec's transformers beside plain torch."""

import pytest
import torch
from torch import Tensor

from webrtc_duplex.model import mimi
from webrtc_duplex.model.kernels import ops
from webrtc_duplex.model.mimi import Norm

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("width", [24, 512])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_layer_norm_also_of_numbers_far_from_0(width: int, offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = Norm(width, torch.device("cpu"))
    norm.weight.copy_(numbers(width))
    norm.bias.copy_(numbers(width))
    x = 5 * numbers(3, 2, width) + offset
    plain = norm.run(x)
    monkeypatch.setattr(ops, "usable", lambda x: True)
    torch.testing.assert_close(norm.run(x), plain, rtol=1e-5, atol=1e-4 if offset else 1e-5)


def test_gelu_from_far_below_0_to_far_above(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([torch.linspace(-9, 9, 1025), torch.tensor([-1e4, 0.0, 1e4])])
    plain = mimi.gelu(x.clone())
    monkeypatch.setattr(ops, "usable", lambda x: True)
    torch.testing.assert_close(mimi.gelu(x.clone()), plain, rtol=1e-6, atol=1e-6)
