"""Our model and moshi 0.2.13, live, on the same fresh random weights: four rows with absences and resets."""

import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import beside_moshi
from tests.conftest import missing
from webrtc_duplex.model.personaplex import PersonaPlex
from webrtc_duplex.model.prompts import bare_start
from webrtc_duplex.model.streaming import zero_row

ROWS = 4
STEPS = 44
LM = beside_moshi.lm_entry(32, 4, 2, context=10, depformer_dim=16, depformer_heads=2)
MIMI = beside_moshi.mimi_entry(4, 32, 4, 2, context=12, bins=64, hidden=48)


@dataclass
class Heard:
    """What one side made of the schedule: for each executed (step, row) codes heard, tokens and sound said."""

    codes: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    tokens: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    pcm: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[beside_moshi.Pair]:
    if importlib.util.find_spec("moshi") is None:
        missing("needs moshi==0.2.13, installed without its own pins (pip install --no-deps moshi==0.2.13)")
    with torch.inference_mode():
        yield beside_moshi.make_pair(tmp_path_factory.mktemp("pair"), LM, MIMI, seed=7)


def schedule(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """pcm [step, row, 1920], executed [step, row], reset before the step [step, row]: one row never rests."""
    chance = torch.Generator().manual_seed(seed)
    pcm = 0.3 * torch.randn(STEPS, ROWS, 1920, generator=chance)
    executed = torch.rand(STEPS, ROWS, generator=chance) < 0.7
    executed[:, 0] = True
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[25, 1] = resets[31, 2] = resets[32, 2] = resets[37, 0] = True  # all after the windows of 10 and 6 frames
    return pcm, executed, resets


def run_moshi(pair: beside_moshi.Pair, pcm: Tensor, executed: Tensor, resets: Tensor) -> Heard:
    from moshi.models.lm import LMGen

    encoder, decoder = copy.deepcopy(pair.reference_mimi), copy.deepcopy(pair.reference_mimi)
    talker: Any = LMGen(pair.reference_lm, use_sampling=False, support_out_of_sync=True)
    heard = Heard()
    with encoder.streaming(ROWS), decoder.streaming(ROWS), talker.streaming(ROWS):
        for step, (frames, active, reset) in enumerate(zip(pcm, executed, resets, strict=True)):
            for module in (encoder, decoder, talker):
                if reset.any():
                    module.reset_streaming(reset_mask=reset)
            encoder.set_exec_mask(active)
            talker.set_exec_mask(active)
            codes = encoder.encode(frames[:, None])
            tokens = talker.step(codes)
            spoken = active & (tokens is not None) & (tokens[:, 1, 0] >= 0 if tokens is not None else active)
            for row in active.nonzero().flatten().tolist():
                heard.codes[step, row] = codes[row, :, 0].clone()
            if spoken.any():
                decoder.set_exec_mask(spoken)
                sound = decoder.decode(tokens[:, 1:].clamp_min(0))
                for row in spoken.nonzero().flatten().tolist():
                    heard.tokens[step, row] = tokens[row, :, 0].clone()
                    heard.pcm[step, row] = sound[row, 0].clone()
    return heard


def run_ours(pair: beside_moshi.Pair, pcm: Tensor, executed: Tensor, resets: Tensor) -> Heard:
    """moshi drops what a fresh row hears first, but its codec has heard it; so that frame goes to our codec alone."""
    model = PersonaPlex(pair.lm, pair.mimi)
    state, start = model.allocate(ROWS), bare_start(pair.lm.config)
    fresh = torch.ones(ROWS, dtype=torch.bool)
    heard = Heard()
    for step, (frames, active, reset) in enumerate(zip(pcm, executed, resets, strict=True)):
        for row in reset.nonzero().flatten().tolist():
            zero_row(state, row)
        fresh |= reset
        rows = active.nonzero().flatten()
        codes = pair.mimi.encode(frames[rows], state.mimi, rows)
        for row, of_row in zip(rows.tolist(), codes, strict=True):
            heard.codes[step, row] = of_row
        for row in (active & fresh).nonzero().flatten().tolist():
            hidden = pair.lm.prefill(start, row, 0, len(start), state.lm)
            pair.lm.open(start, pair.lm.consider(hidden), row, state.lm)
        talking = ~fresh[rows]
        fresh &= ~active
        if talking.any():
            speak(pair, heard, step, codes[talking], rows[talking], state)
    return heard


def speak(pair: beside_moshi.Pair, heard: Heard, step: int, codes: Tensor, rows: Tensor, state: Any) -> None:
    column = pair.lm.complete(codes, rows, state.lm)
    answer = pair.lm.answer(column, rows, state.lm)
    sound = pair.mimi.decode(answer.codes, state.mimi, rows)
    for lane, row in enumerate(rows.tolist()):
        heard.tokens[step, row] = torch.cat([column[lane, :1], answer.codes[lane]])
        heard.pcm[step, row] = sound[lane]


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_with_absences_and_resets_equal_moshi_past_the_wrap(pair: beside_moshi.Pair, seed: int) -> None:
    theirs, ours = run_moshi(pair, *schedule(seed)), run_ours(pair, *schedule(seed))
    assert ours.codes.keys() == theirs.codes.keys()
    assert ours.tokens.keys() == theirs.tokens.keys()
    assert max(step for step, _ in theirs.tokens) > 37, "the schedule goes on after the last reset"
    for at in theirs.codes:
        assert torch.equal(ours.codes[at], theirs.codes[at]), f"codes heard at (step, row) {at}"
    for at in theirs.tokens:
        assert torch.equal(ours.tokens[at], theirs.tokens[at]), f"tokens said at (step, row) {at}"
        loud = max(1.0, float(theirs.pcm[at].abs().max()))  # random weights are louder than speech
        torch.testing.assert_close(ours.pcm[at], theirs.pcm[at], rtol=1e-5, atol=1e-5 * loud)


def test_random_weights_say_different_things(pair: beside_moshi.Pair) -> None:
    tokens = torch.stack(list(run_ours(pair, *schedule(1)).tokens.values()))
    assert all(len(stream.unique()) > 4 for stream in tokens.T)
