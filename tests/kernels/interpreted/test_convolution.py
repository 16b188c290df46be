"""Convolutions as window products, beside plain torch: short and long, shallow and so deep that the depth is shared."""

import pytest
import torch
from torch import Tensor

from webrtc_duplex.model.kernels import convolution
from webrtc_duplex.model.mimi import windows

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "SHARE", 64)
    monkeypatch.setattr(convolution, "TILE", (16, 16, 32))


@pytest.mark.parametrize("kernel, stride, count", [(16, 8, 2), (7, 1, 2), (3, 1, 40), (1, 1, 3)])
@pytest.mark.parametrize("activate, residual", [(False, False), (True, False), (False, True)])
def test_product_equals_the_windows_times_the_weight(
    kernel: int, stride: int, count: int, activate: bool, residual: bool
) -> None:
    lanes, narrow, wide = 3, 20, 24
    padded = numbers(lanes, kernel - stride + count * stride, narrow)
    weight, bias = numbers(wide, kernel * narrow, seed=2), numbers(wide, seed=3)
    added = numbers(lanes, count, wide, seed=4) if residual else None
    plain = (windows(padded, kernel, stride, count) @ weight.T + bias).view(lanes, count, wide)
    plain = torch.nn.functional.elu(plain) if activate else plain
    plain = plain if added is None else plain + added
    fast = convolution.product(padded, weight, bias, stride, count, activate, added)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-4)


def test_a_lane_alone_equals_it_in_company_also_where_the_depth_is_shared() -> None:
    padded, weight, bias = numbers(5, 16, 20), numbers(24, 16 * 20, seed=2), numbers(24, seed=3)
    assert convolution.shares_of(16 * 20, 1) == 5
    together = convolution.product(padded, weight, bias, 1, 1)
    alone = convolution.product(padded[3:4].contiguous(), weight, bias, 1, 1)
    assert torch.equal(together[3:4], alone)


@pytest.mark.parametrize("columns, length", [(6, 2), (2, 6), (3, 3), (0, 4)])
@pytest.mark.parametrize("activate", [False, True])
def test_padding_remembers_the_last_columns_whether_they_are_new_or_old(
    columns: int, length: int, activate: bool
) -> None:
    remembered = numbers(2, 30)  # of which the convolution's columns are a part
    taps = remembered[:, 5 : 5 + 4 * columns].view(2, columns, 4)
    x, before = numbers(2, length, 4, seed=2), remembered.clone()
    wanted = torch.cat([taps, torch.nn.functional.elu(x) if activate else x], dim=1)
    padded = convolution.pad(x, taps, activate)
    torch.testing.assert_close(padded, wanted)
    torch.testing.assert_close(taps, wanted[:, length:])
    outside = [n for n in range(30) if not 5 <= n < 5 + 4 * columns]
    assert torch.equal(remembered[:, outside], before[:, outside])
