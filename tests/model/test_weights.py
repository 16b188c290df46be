"""How a matrix lies in memory is nobody's business: written, multiplied by and looked up it is one and the same."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from webrtc_duplex.model.pages import HUGE, zeros
from webrtc_duplex.model.temporal import gated_product, halves
from webrtc_duplex.model.weights import add_product, matrix, product, rows_of, turned_matrix, write

CPU, META = torch.device("cpu"), torch.device("meta")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def filled(numbers: Tensor, turned: bool) -> Tensor:
    outputs, inputs = numbers.shape
    if turned:
        weight = turned_matrix(outputs, inputs, CPU, torch.float32)
    else:
        weight = matrix(outputs, inputs, device=CPU, dtype=torch.float32)
    write(weight, numbers)
    return weight


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("outputs", [7, 96, 256, 1408])
def test_a_product_is_that_of_the_numbers_written(outputs: int, turned: bool) -> None:
    given, x, bias = numbers(outputs, 24), numbers(2, 3, 24), numbers(outputs)
    weight = filled(given, turned)
    torch.testing.assert_close(product(x, weight), functional.linear(x, given), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(x, weight, bias), functional.linear(x, given, bias), rtol=1e-5, atol=1e-5)
    total = numbers(2, 3, outputs)
    wanted = total + functional.linear(x, given)
    add_product(total, x, weight)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [2, 3])
def test_outputs_come_in_the_shape_that_is_asked_for(heads: int) -> None:
    given, x = numbers(3 * heads * 128, 24), numbers(2, 3, 24)
    made = product(x, filled(given, turned=False), shape=(3, heads, -1))
    torch.testing.assert_close(made, functional.linear(x, given).view(2, 3, 3, heads, 128), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", [CPU, META])
def test_gate_and_value_are_the_halves_of_a_weight(device: torch.device) -> None:
    given, x = numbers(2 * 704, 24), numbers(2, 3, 24)
    weight = matrix(2, 704, 24, device=device, dtype=torch.float32)
    write(weight, halves(given))
    made = gated_product(x.to(device), weight.flatten(0, 1))
    gate, value = functional.linear(x, given).chunk(2, dim=-1)
    wanted = functional.silu(gate) * value
    assert made.shape == wanted.shape and made.is_contiguous()
    if device == CPU:
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs", [7, 1408])
def test_rows_are_found_again(outputs: int) -> None:
    given, index = numbers(outputs, 5), torch.tensor([[0, outputs - 1], [6, outputs // 2]])
    for turned in (False, True):
        assert torch.equal(rows_of(filled(given, turned), index), given[index])


def test_weights_of_several_steps_are_written_one_by_one_or_together() -> None:
    given = numbers(2, 3, 64, 5)
    together, one_by_one = (matrix(2, 3, 64, 5, device=CPU, dtype=torch.float32) for _ in range(2))
    write(together, given)
    for layer in range(3):
        write(one_by_one[:, layer], given[:, layer])
    assert torch.equal(together, one_by_one)
    x = numbers(4, 5)
    torch.testing.assert_close(product(x, together[1, 2]), functional.linear(x, given[1, 2]))


def test_off_the_cpu_a_matrix_lies_as_it_is() -> None:
    assert matrix(3, 512, 24, device=META, dtype=torch.bfloat16).shape == (3, 512, 24)
    assert turned_matrix(512, 24, META, torch.float32).is_contiguous()


@pytest.mark.parametrize("count", [8, HUGE])
def test_memory_is_zero_and_can_be_written(count: int) -> None:
    memory = zeros(2, count, device=CPU, dtype=torch.float32)
    assert memory.shape == (2, count) and not memory.any()
    memory[1].fill_(3.0)
    assert not memory[0].any() and (memory[1] == 3.0).all()
