"""The sampling kernel beside `sampling.Draw`: the same noise, the same top-k, the same ties."""

import pytest
import torch
from torch import Tensor

from webrtc_duplex.model.config import LMConfig, SamplingConfig
from webrtc_duplex.model.kernels import ops
from webrtc_duplex.model.sampling import SamplerState, draws

CONFIG = LMConfig(text_card=300, card=70)
ROWS = 4

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def state() -> SamplerState:
    state = SamplerState.allocate(ROWS, torch.device("cpu"))
    for row, (temperature, top_k) in enumerate([(0.0, 5), (0.8, 0), (0.7, 25), (1.5, 256)]):
        state.set_row(row, seed=0xFFFF_FFF0 + row, sampling=SamplingConfig(temperature, top_k, temperature, top_k))
    return state


def choose(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Draw `number` of frames far in a call, with lanes permuted."""
    rows, frames = torch.tensor([2, 0, 3, 1]), torch.tensor([45_000, 0, 7, 1 << 30])
    text, codes = draws(state(), rows, frames, 8, CONFIG)
    return [text, *codes][number].sample(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 1, 8])
def test_kernel_draws_the_token_that_plain_torch_draws(
    dtype: torch.dtype, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = CONFIG.text_card if number == 0 else CONFIG.card
    logits = (3 * torch.randn(ROWS, cards, generator=torch.Generator().manual_seed(number))).to(dtype)
    plain, plain_best = choose(logits, number)
    monkeypatch.setattr(ops, "usable", lambda x: True)
    fast, fast_best = choose(logits, number)
    assert torch.equal(fast, plain)
    assert torch.equal(fast_best, plain_best)


def test_a_logit_that_is_no_number_is_reported_and_harms_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(ROWS, CONFIG.card, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(ops, "usable", lambda x: True)
    sound, _ = choose(logits, 1)
    logits[1, 3] = float("nan")
    tokens, best = choose(logits, 1)
    assert best.isnan().tolist() == [False, True, False, False]
    assert tokens[[0, 2, 3]].equal(sound[[0, 2, 3]])
    assert 0 <= int(tokens[1]) < CONFIG.card
