"""The language model with keys and values of a byte: rows stay apart, and it says nearly what it says without."""

import torch
from torch import Tensor

from tests.small_model import KEYS, assert_same, begin, row_state, small_runner, speech, talk
from webrtc_duplex.messages import Prompt
from webrtc_duplex.model.checkpoint import load_lm, load_mimi, open_checkpoint
from webrtc_duplex.model.hub import TINY
from webrtc_duplex.model.personaplex import LM
from webrtc_duplex.model.runner import PersonaPlexRunner, load_runner

PROMPT = Prompt(voice="low", text="3 14 15 9", seed=5)
CPU = torch.device("cpu")


def runner_of_bytes() -> PersonaPlexRunner:
    return small_runner(system=True, lanes=[4], kv_dtype=torch.int8)


def test_a_reset_row_equals_a_fresh_one_scales_too() -> None:
    used, fresh = runner_of_bytes(), runner_of_bytes()
    begin(used, 2, PROMPT)
    talk(used, 2, speech(2 * KEYS, seed=1))
    used.reset(2)
    assert_same(row_state(used, 2), row_state(fresh, 2))


def test_a_call_is_the_same_alone_and_in_company_and_leaves_other_rows_as_they_are() -> None:
    alone, full = runner_of_bytes(), runner_of_bytes()
    begin(alone, 0, PROMPT)
    for row in range(4):
        begin(full, row, Prompt(voice="high", text="1 2", seed=row) if row != 3 else PROMPT)
    untouched = row_state(full, 1)
    heard = speech(2 * KEYS, seed=3)
    assert talk(full, 3, heard, others=[0, 2]).equals(talk(alone, 0, heard))
    assert_same(untouched, row_state(full, 1))


def test_a_cached_prompt_joins_as_the_same_call_as_a_cold_one_in_pieces() -> None:
    cold, cached = runner_of_bytes(), runner_of_bytes()
    begin(cached, 1, PROMPT)
    assert cached.begin(2, PROMPT) == 0
    begin(cold, 2, PROMPT, columns=3)
    heard = speech(2 * KEYS, seed=4)
    assert talk(cached, 2, heard).equals(talk(cold, 2, heard))


def test_the_shipped_model_is_loaded_with_bytes_where_they_are_asked_for() -> None:
    runner = load_runner("tiny", rows=1, device="cpu", kv_dtype="int8")
    assert isinstance(runner, PersonaPlexRunner)
    assert runner.state.lm.temporal.rings.whole.dtype == torch.int8
    begin(runner, 0, Prompt(seed=1))
    talk(runner, 0, speech(2, seed=1))


@torch.inference_mode()
def text_chances(lm: LM, columns: Tensor, kv_dtype: torch.dtype | None) -> Tensor:
    """Logarithms of the text's chances after each of these columns [T, 17], heard one by one: [T, text card]."""
    state, row = lm.allocate(1, kv_dtype), torch.tensor([0])
    hidden = [lm.temporal.step(column[None], state.temporal, row) for column in columns]
    return torch.log_softmax(lm.temporal.text_logits(torch.cat(hidden)), dim=-1)


@torch.inference_mode()
def test_the_shipped_model_is_as_sure_of_its_words_as_without() -> None:
    """Teacher-forced, past the window: how far the chances of the next text token are from those with f32 keys."""
    checkpoint = open_checkpoint(TINY)
    lm, mimi = load_lm(checkpoint, CPU, torch.float32), load_mimi(checkpoint, CPU)
    frames = lm.config.keys + 40
    state, codec, row = lm.allocate(1), mimi.allocate(1), torch.tensor([0])
    columns = []
    for frame in torch.from_numpy(speech(frames, seed=5)) / 32768:
        columns.append(lm.complete(mimi.encode(frame[None], codec, row), row, state))
        lm.answer(columns[-1], row, state)
    exact, small = (text_chances(lm, torch.cat(columns), kv_dtype) for kv_dtype in (None, torch.int8))
    divergence = (exact.exp() * (exact - small)).sum(-1)
    assert divergence.mean() < 1e-5 and divergence.max() < 1e-3, (divergence.mean(), divergence.max())
