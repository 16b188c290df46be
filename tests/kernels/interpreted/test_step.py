"""The step through the kernels, beside the same in plain torch: lanes are permuted, the last has no row."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.small_model import CODEC_KEYS, KEYS, small_model, speech
from webrtc_duplex.model.kernels import convolution, ops
from webrtc_duplex.model.personaplex import Answer, ModelState, PersonaPlex, Said
from webrtc_duplex.model.streaming import tensors

ROWS = 4

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy says overflow where a GPU says inf, rightly
]


def row_major_model() -> PersonaPlex:
    """The small model, its weights lying as they do on a GPU."""
    model = small_model()
    for module in (model.lm, model.mimi):
        for weight in module.parameters():
            weight.data = weight.data.contiguous()
    return model


def state_of_all_ages(model: PersonaPlex) -> ModelState:
    """Rows that are fresh, about to wrap, long past it, and young; greedy and sampled; with something remembered."""
    state, chance = model.allocate(ROWS), torch.Generator().manual_seed(3)
    for _, tensor in tensors(state):
        if tensor.dim() == 4:
            tensor[:ROWS].normal_(generator=chance)
    state.lm.temporal.position[:ROWS] = torch.tensor([0, KEYS - 2, 5 * KEYS, 3])
    for codec in (state.mimi.encoder, state.mimi.decoder):
        codec.position[:ROWS] = torch.tensor([0, CODEC_KEYS - 3, 8 * CODEC_KEYS, 2])
    sampler = state.lm.sampler
    sampler.seed[:ROWS] = torch.arange(7, 7 + ROWS)
    sampler.text_temperature[:ROWS] = torch.tensor([0.0, 0.7, 0.9, 0.0])
    sampler.audio_temperature[:ROWS] = torch.tensor([0.8, 0.0, 0.9, 0.0])
    sampler.text_top_k[:ROWS] = torch.tensor([0, 5, 10, 1])
    sampler.audio_top_k[:ROWS] = torch.tensor([20, 0, 250, 3])
    return state


def copy_of_rows(state: ModelState) -> dict[str, Tensor]:
    return {name: tensor[:ROWS].clone() for name, tensor in tensors(state)}


@torch.inference_mode()
def step(model: PersonaPlex, state: ModelState, listed: Sequence[Sequence[int]]) -> list[Said]:
    said = []
    for index, rows in enumerate(listed):
        pcm = torch.from_numpy(speech(len(rows) + 1, seed=index))
        said.append(model.step(pcm, torch.tensor([*rows, ROWS]), state))
    return said


@torch.inference_mode()
def answer(model: PersonaPlex, state: ModelState, listed: Sequence[Sequence[int]]) -> list[Answer]:
    chance, answers = torch.Generator().manual_seed(8), []
    for rows in listed:
        heard = torch.randint(64, (len(rows) + 1, 8), generator=chance)
        lanes = torch.tensor([*rows, ROWS])
        answers.append(model.lm.answer(model.lm.complete(heard, lanes, state.lm), lanes, state.lm))
    return answers


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Undone, the model computes in plain torch again."""
    monkeypatch.setattr(ops, "usable", lambda x: True)
    monkeypatch.setattr(convolution, "BLOCK", 1 << 15)
    monkeypatch.setattr(convolution, "TILE", (4096, 16, 64))  # the interpreter's time goes by programs, not by numbers
    return monkeypatch


def assert_states_equal(one: ModelState, other: ModelState) -> None:
    wanted = copy_of_rows(other)
    for name, tensor in copy_of_rows(one).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


def test_language_model_through_the_kernels_chooses_what_plain_torch_chooses(kernels: pytest.MonkeyPatch) -> None:
    model = row_major_model()
    listed = [[2, 0], [1, 3, 2], [3, 1], [1, 2]]
    state = state_of_all_ages(model)
    fast = answer(model, state, listed)
    kernels.undo()
    plain_state = state_of_all_ages(model)
    for rows, one, other in zip(listed, fast, answer(model, plain_state, listed), strict=True):
        lanes = slice(len(rows))
        assert torch.equal(one.codes[lanes], other.codes[lanes])
        torch.testing.assert_close(one.best[lanes], other.best[lanes], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.hidden[lanes], other.hidden[lanes], rtol=1e-4, atol=1e-4)
    assert_states_equal(state, plain_state)


def test_whole_step_through_the_kernels_says_what_plain_torch_says(kernels: pytest.MonkeyPatch) -> None:
    model = row_major_model()
    model.mimi.decoder.last.weight.mul_(0.01)  # else most of a random codec's sound is clipped
    listed = [[2, 0], [1, 2]]
    state = state_of_all_ages(model)
    before = copy_of_rows(state)
    fast = step(model, state, listed)
    after = copy_of_rows(state)
    assert all(before[name][3].equal(after[name][3]) for name in before), "row 3 was never listed"
    kernels.undo()
    plain_state = state_of_all_ages(model)
    for one, other in zip(fast, step(model, plain_state, listed), strict=True):
        assert torch.equal(one.text[:2], other.text[:2])
        assert torch.equal(one.codes[:2], other.codes[:2])
        assert (one.pcm[:2].int() - other.pcm[:2].int()).abs().max() <= 1
        assert one.sound[:2].all()
    assert_states_equal(state, plain_state)
