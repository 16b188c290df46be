"""One frame of the duplex model: delays, prompts, and what is given rather than chosen."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.small_model import LM_CONFIG, SmallPrompts, small_model
from webrtc_duplex.messages import Prompt
from webrtc_duplex.model.config import SamplingConfig
from webrtc_duplex.model.personaplex import AGENT, CALLER, DELAYS, LM, LMState, to_int16
from webrtc_duplex.model.prompts import PromptColumns, bare_start
from webrtc_duplex.model.streaming import Hints, tensors

MODEL = small_model()
PROMPTS = SmallPrompts()
COLUMNS = PROMPTS.columns(PROMPTS.wish(Prompt(voice="low", text="3 14 15")))
ROWS = torch.tensor([1, 2, 2, 2])
"""Row 1 of two, beside the scratch row."""


@pytest.fixture(autouse=True)
def without_gradient() -> Iterator[None]:
    with torch.inference_mode():
        yield


def opened(lm: LM, columns: PromptColumns, chunks: list[int] | None = None) -> LMState:
    """A state whose row 1 has heard the prompt, in chunks of these lengths, and chosen its first tokens."""
    state = lm.allocate(2)
    state.sampler.set_row(1, 11, SamplingConfig())
    start = 0
    for count in chunks or [len(columns)]:
        hidden = lm.prefill(columns, 1, start, count, state)
        start += count
    assert start == len(columns)
    lm.open(columns, lm.consider(hidden), 1, state)
    return state


def caller_codes(frames: int, seed: int = 0) -> Tensor:
    return torch.randint(0, LM_CONFIG.card, (frames, 8), generator=torch.Generator().manual_seed(seed))


def converse(lm: LM, state: LMState, heard: Tensor) -> tuple[Tensor, Tensor]:
    """Caller's codes [n, 8] -> columns [n, 17] and frames said [n, 8]."""
    columns, said = [], []
    for frame in heard:
        column = lm.complete(frame.expand(4, -1), ROWS, state)
        said.append(lm.answer(column, ROWS, state).codes[0])
        columns.append(column[0])
    return torch.stack(columns), torch.stack(said)


def test_delays_are_those_of_the_family() -> None:
    assert DELAYS == (0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1)


def test_a_callers_frame_stands_in_its_column_with_the_acoustic_codes_of_the_one_before() -> None:
    heard = caller_codes(6)
    columns, _ = converse(MODEL.lm, opened(MODEL.lm, COLUMNS), heard)
    assert torch.equal(columns[:, CALLER][:, 0], heard[:, 0])
    assert torch.equal(columns[1:, CALLER][:, 1:], heard[:-1, 1:])


def test_a_frame_is_said_of_codebook_0_of_its_column_and_the_others_of_the_next() -> None:
    columns, said = converse(MODEL.lm, opened(MODEL.lm, COLUMNS), caller_codes(8))
    assert torch.equal(said[:, 0], columns[:, AGENT][:, 0])
    assert torch.equal(said[:-1, 1:], columns[1:, AGENT][:, 1:])


def test_first_live_column_has_the_agents_last_silence_and_the_callers_last_tone_in_its_late_rows() -> None:
    columns, _ = converse(MODEL.lm, opened(MODEL.lm, COLUMNS), caller_codes(2))
    assert columns[0, AGENT][1:].tolist() == list(LM_CONFIG.silence_codes[1:])
    assert columns[0, CALLER][1:].tolist() == list(LM_CONFIG.sine_codes[1:])
    assert columns[1, AGENT][1:].tolist() != list(LM_CONFIG.silence_codes[1:]), "the second column is the agent's own"


def test_first_live_text_and_codebook_0_are_chosen() -> None:
    starts = set()
    for seed in range(12):
        state = MODEL.lm.allocate(2)
        state.sampler.set_row(1, seed, SamplingConfig(4.0, 0, 4.0, 0))
        hidden = MODEL.lm.prefill(COLUMNS, 1, 0, len(COLUMNS), state)
        MODEL.lm.open(COLUMNS, MODEL.lm.consider(hidden), 1, state)
        starts.add(tuple(state.own[1, :2].tolist()))
    assert len(starts) > 6


def test_without_a_prompt_the_callers_first_frame_is_column_1_behind_initial_tokens() -> None:
    heard = caller_codes(2)
    columns, said = converse(MODEL.lm, opened(MODEL.lm, bare_start(LM_CONFIG)), heard)
    assert columns[0, CALLER].tolist() == [int(heard[0, 0])] + [LM_CONFIG.card] * 7
    assert columns[0, AGENT][1:].tolist() == [LM_CONFIG.card] * 7
    assert (said < LM_CONFIG.card).all(), "whatever is said can be decoded"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_prompt_in_any_chunks_leaves_the_same_numbers(lengths: list[int]) -> None:
    chunks: list[int] = []
    for length in lengths * len(COLUMNS):
        chunks.append(min(length, len(COLUMNS) - sum(chunks)))
        if sum(chunks) == len(COLUMNS):
            break
    with torch.inference_mode():
        whole, pieces = opened(MODEL.lm, COLUMNS), opened(MODEL.lm, COLUMNS, chunks)
        for (name, a), (_, b) in zip(tensors(whole), tensors(pieces), strict=True):
            assert torch.allclose(a[1].double(), b[1].double(), atol=1e-5), name


def test_a_prompt_at_once_says_what_the_same_columns_one_by_one_do() -> None:
    stepwise = MODEL.lm.allocate(2)
    stepwise.sampler.set_row(1, 11, SamplingConfig())
    for column in COLUMNS.tokens:
        hidden = MODEL.lm.temporal.step(column.expand(4, -1), stepwise.temporal, ROWS)
    MODEL.lm.open(COLUMNS, MODEL.lm.consider(hidden[:1]), 1, stepwise)
    heard = caller_codes(12)
    at_once = converse(MODEL.lm, opened(MODEL.lm, COLUMNS), heard)
    for a, b in zip(converse(MODEL.lm, stepwise, heard), at_once, strict=True):
        assert torch.equal(a, b)


def test_hints_change_no_bit() -> None:
    heard = caller_codes(90)
    said = []
    for hinted in (False, True):
        state = opened(MODEL.lm, COLUMNS)
        state.sampler.set_row(1, 0, SamplingConfig(0.0, 0, 0.0, 0))
        rows = []
        for index, frame in enumerate(heard):
            hints = Hints(lanes=1, greedy=True, columns=len(COLUMNS) + index + 1) if hinted else Hints()
            answer = MODEL.lm.answer(MODEL.lm.complete(frame.expand(4, -1), ROWS, state), ROWS, state, hints)
            rows.append(torch.cat([answer.codes[0].float(), answer.hidden[0], answer.best[0]]))
        said.append(torch.stack(rows))
    assert torch.equal(said[0], said[1])


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_prefix_of_the_depformer_equals_the_same_steps_of_the_whole(steps: int) -> None:
    hidden, text = torch.randn(4, LM_CONFIG.width), torch.tensor([1, 2, 3, 4])
    forced = caller_codes(4).T

    def run(count: int, forcing: bool) -> list[Tensor]:
        seen = []

        def choose(step: int, logits: Tensor) -> Tensor:
            seen.append(logits)
            return forced[step] if forcing else logits.argmax(1)

        MODEL.lm.depformer.run(hidden, text, choose, count)
        return seen

    for forcing in (False, True):
        for part, whole in zip(run(steps, forcing), run(8, forcing), strict=False):
            assert torch.equal(part, whole)


def test_the_prompts_last_frame_is_decoded_unheard_but_a_bare_start_has_none() -> None:
    state = MODEL.allocate(2)
    MODEL.say_last(bare_start(LM_CONFIG), 1, state)
    assert not state.mimi.decoder.position[1]
    MODEL.say_last(COLUMNS, 1, state)
    assert state.mimi.decoder.position[:2].tolist() == [0, 2]


def test_sound_is_rounded_and_clipped() -> None:
    assert to_int16(torch.tensor([0.0, 0.5, -2.0, 2.0, 0.6 / 32768])).tolist() == [0, 16384, -32768, 32767, 1]
