"""Sampling: noise by key, exact top-k, greedy, and what a call may ask for."""

import math

import pytest
import torch
from torch import Tensor

from webrtc_duplex.errors import RequestError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.model.config import LMConfig, SamplingConfig
from webrtc_duplex.model.sampling import (
    MAX_TOP_K,
    SHORTLISTED,
    Draw,
    Greedy,
    SamplerState,
    Shortlist,
    asked,
    draws,
    philox,
    race_noise,
    to_noise,
)

CONFIG = LMConfig(text_card=40, card=300)


def draw(noise: Tensor, temperature: float, top_k: int) -> Draw:
    """One kind of sampling for all lanes of noise [B, V]."""
    lanes, tokens = noise.shape
    state = SamplerState.allocate(lanes, torch.device("cpu"))
    for row in range(lanes):
        state.set_row(row, row, SamplingConfig(temperature, top_k, temperature, top_k))
    config = LMConfig(text_card=tokens, card=tokens)
    made, _ = draws(state, torch.arange(lanes), torch.zeros(lanes, dtype=torch.int64), 1, config)
    assert isinstance(made, Draw)
    return Draw(noise if temperature else made.noise, made.inverse_temperature, made.rank, made.slack)


def test_philox_gives_the_published_words() -> None:
    """The known answer of Random123 for a counter and a key of zeros."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [word.item() for word in philox(zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("tokens", [1, 6, 8, 2048])
def test_each_quarter_of_the_tokens_has_one_of_the_four_words(tokens: int) -> None:
    quarter = -(-tokens // 4)
    key = torch.tensor([[7 * 16 + 2]]), torch.tensor([[3]])
    words = torch.cat(philox(torch.arange(quarter), *key), dim=1)[:, :tokens]
    assert torch.equal(race_noise(torch.tensor([3]), torch.tensor([7]), 2, 1, tokens)[0], to_noise(words))


def test_noise_depends_on_seed_frame_and_draw_and_on_nothing_else() -> None:
    seeds, frames = torch.tensor([3, 3, 4, 3]), torch.tensor([7, 8, 7, 7])
    noise = race_noise(seeds, frames, 0, 9, 50)
    assert torch.equal(noise[0], noise[3])
    for other in (1, 2):
        assert not torch.isclose(noise[0], noise[other]).all(-1).any()
    assert len({tuple(row.tolist()) for row in noise[0]}) == 9
    alone = race_noise(seeds[2:3], frames[2:3], 4, 1, 50)
    assert torch.equal(alone[0, 0], noise[2, 4])


def test_noise_of_a_few_lanes_is_that_of_many_however_it_is_cut_for_the_cache() -> None:
    seeds, frames = torch.arange(64), torch.arange(64) * 11
    many = race_noise(seeds, frames, 1, 8, 300)
    few = race_noise(seeds[5:6], frames[5:6], 1, 8, 300)
    assert torch.equal(many[5], few[0])


def test_noise_is_finite_and_distributed_as_a_race_needs_it() -> None:
    noise = race_noise(torch.arange(50), torch.arange(50), 0, 1, 4000).flatten()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)  # Gumbel's mean is Euler's constant
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def test_tokens_come_as_often_as_their_probabilities_among_the_top_k_say() -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5])
    lanes, temperature, top_k = 20_000, 0.8, 4
    noise = race_noise(torch.arange(lanes), torch.zeros(lanes, dtype=torch.int64), 0, 1, 6)[:, 0]
    token, _ = draw(noise, temperature, top_k).sample(logits.expand(lanes, -1))
    counted = torch.bincount(token, minlength=6) / lanes
    wanted = torch.cat([torch.softmax(logits[:top_k] / temperature, 0), torch.zeros(2)])
    assert torch.allclose(counted, wanted, atol=0.012)


def test_tokens_that_tie_with_the_kth_best_are_all_kept() -> None:
    logits = torch.full((3000, 6), 1.0)
    logits[:, 0] = 2.0
    noise = race_noise(torch.arange(3000), torch.zeros(3000, dtype=torch.int64), 0, 1, 6)[:, 0]
    token, _ = draw(noise, 1.0, 2).sample(logits)
    assert sorted(set(token.tolist())) == [0, 1, 2, 3, 4, 5]


def test_top_k_of_zero_keeps_every_token_also_beyond_the_largest_top_k() -> None:
    logits = torch.zeros(400, 2 * MAX_TOP_K)
    logits[:, :MAX_TOP_K] = 0.1
    noise = race_noise(torch.arange(400), torch.zeros(400, dtype=torch.int64), 0, 1, 2 * MAX_TOP_K)[:, 0]
    assert (draw(noise, 1.0, 0).sample(logits)[0] >= MAX_TOP_K).any()
    assert (draw(noise, 1.0, MAX_TOP_K).sample(logits)[0] < MAX_TOP_K).all()


def test_temperature_zero_takes_the_greatest_whatever_the_noise() -> None:
    logits = torch.randn(6, 30)
    token, best = draw(torch.zeros(6, 30), 0.0, 5).sample(logits)
    assert torch.equal(token, logits.argmax(1))
    assert torch.equal(best, logits.max(1).values)


def test_greedy_equals_a_race_of_greedy_lanes() -> None:
    logits = torch.randn(6, 30)
    for ours, theirs in zip(Greedy().sample(logits), draw(torch.zeros(6, 30), 0.0, 5).sample(logits), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_shows_in_the_greatest(poison: float) -> None:
    logits = torch.randn(2, 30)
    logits[1, 7] = poison
    for kind in (Greedy(), draw(torch.zeros(2, 30), 1.0, 5)):
        _, best = kind.sample(logits)
        assert best.isfinite().tolist() == [True, False]


def test_rows_sample_each_in_their_own_way() -> None:
    state = SamplerState.allocate(3, torch.device("cpu"))
    state.set_row(0, 1, SamplingConfig(0.0, 5, 0.7, 20))
    state.set_row(2, 2**40 + 5, SamplingConfig(0.5, 0, 0.0, 1))
    rows = torch.tensor([2, 0])
    text, codes = draws(state, rows, torch.tensor([9, 9]), 8, CONFIG)
    assert len(codes) == 8
    assert isinstance(text, Draw) and isinstance(codes[0], Draw) and isinstance(codes[3], Draw)
    assert text.inverse_temperature.flatten().tolist() == [2.0, 1.0]
    assert text.slack.flatten().tolist() == [-math.inf, 0.0]
    assert codes[0].rank.flatten().tolist() == [0, 19]
    assert not text.noise[1].any() and text.noise[0].all(), "no noise where it is greedy"
    assert not codes[3].noise[0].any() and codes[3].noise[1].all()
    assert state.seed[2] == 5, "32 bits of a seed count"


def test_a_shortlist_takes_the_token_that_a_draw_of_all_takes() -> None:
    lanes, tokens = 300, SHORTLISTED + 3
    state, rows = SamplerState.allocate(lanes, torch.device("cpu")), torch.arange(lanes)
    for row in range(lanes):
        state.set_row(row, row, SamplingConfig(0.4 * (row % 3), (25, 256, 0, 1)[row % 4], 0.0, 1))
    frames = 5 * rows
    chosen, _ = draws(state, rows, frames, 1, LMConfig(text_card=tokens, card=40))
    assert isinstance(chosen, Shortlist) and chosen.rest is not None
    logits = torch.randn(lanes, tokens, generator=torch.Generator().manual_seed(1))
    logits[:, 700] = logits[:, 100] = logits.amax(1)  # the greatest three times
    for ours, theirs in zip(chosen.sample(logits), chosen.rest.sample(logits), strict=True):
        assert torch.equal(ours, theirs)
    few = rows % 4 != 2
    told, _ = draws(state, rows[few], frames[few], 1, LMConfig(text_card=tokens, card=40), every_token=False)
    assert isinstance(told, Shortlist) and told.rest is None
    assert torch.equal(told.sample(logits[few])[0], chosen.sample(logits)[0][few])


def test_a_call_that_asks_for_nothing_gets_the_models_defaults() -> None:
    default = SamplingConfig(0.5, 25, 0.1, 250)
    assert asked(Prompt(), default) == default
    assert asked(Prompt(text_temperature=0.0, audio_top_k=9), default) == SamplingConfig(0.0, 25, 0.1, 9)


@pytest.mark.parametrize("wanted", [math.nan, math.inf, -1.0, 4.5])
def test_a_temperature_that_cannot_be_gets_a_sentence(wanted: float) -> None:
    with pytest.raises(RequestError, match=r"text_temperature must be 0 \(greedy\) to 4, not"):
        asked(Prompt(text_temperature=wanted), SamplingConfig())


def test_a_top_k_that_cannot_be_gets_a_sentence() -> None:
    with pytest.raises(RequestError, match=r"audio_top_k must be 0 \(every token\) to 256, not 1000"):
        asked(Prompt(audio_top_k=1000), SamplingConfig())
