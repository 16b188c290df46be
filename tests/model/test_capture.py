"""The step can be captured as one graph: no host sync, no data-dependent shape, no global chance, no growing work."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.small_model import CODEC_KEYS, KEYS, begin, small_runner, speech
from webrtc_duplex.messages import Prompt
from webrtc_duplex.model.config import LMConfig, MimiConfig
from webrtc_duplex.model.mimi import Mimi
from webrtc_duplex.model.personaplex import LM, ModelState, PersonaPlex
from webrtc_duplex.model.streaming import Hints, tensors

META = torch.device("meta")

SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2", "bincount"}
"""Operators that wait for the device, or whose result's shape depends on numbers."""

CHANCE = ("rand", "normal", "bernoulli", "multinomial", "exponential", "uniform", "dropout", "cauchy", "geometric")
"""Beginnings of the names of operators that draw from a generator's state."""

MOST_OPERATORS = 2611
"""Of a whole step at released sizes, plain torch, views not counted: lower it when it falls, do not raise it."""

VIEWS = {
    "view", "_unsafe_view", "reshape", "expand", "slice", "select", "transpose", "permute", "t", "unsqueeze", "squeeze",
    "split", "chunk", "unbind", "as_strided", "view_as_complex", "view_as_real", "detach", "alias", "unfold", "narrow",
    "split_with_sizes", "mT", "flatten",
}  # fmt: skip


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a graph cannot hold, and counts the operators that do work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = func.overloadpacket.__name__
        given = dict(kwargs or {})
        if name in SYNCS or name.startswith(CHANCE):
            raise AssertionError(f"{func} cannot be captured")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [index for index in args[1] or () if isinstance(index, Tensor)]  # type: ignore[attr-defined]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                raise AssertionError(f"{func} with a mask: its shape depends on numbers")
        if name == "_to_copy" and str(given.get("device", "meta")) not in ("meta", "None"):
            raise AssertionError(f"{func} copies to {given['device']}")
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **given)


def on_meta(lm: LMConfig, mimi: MimiConfig) -> PersonaPlex:
    return PersonaPlex(LM(lm, META, torch.bfloat16), Mimi(mimi, META))


@torch.inference_mode()
def count_step(model: PersonaPlex, lanes: int, state: ModelState) -> Counter[str]:
    pcm = torch.empty(lanes, 1920, dtype=torch.int16, device=META)
    rows = torch.empty(lanes, dtype=torch.int64, device=META)
    with Guard() as guard:
        said = model.step(pcm, rows, state, Hints(every_token=False))
    assert said.pcm.shape == (lanes, 1920) and said.pcm.dtype == torch.int16
    assert said.text.shape == said.sound.shape == (lanes,)
    assert said.codes.shape == (lanes, 8)
    counts: Counter[str] = guard.counts
    return counts


def test_whole_step_at_released_sizes_runs_on_meta_without_sync_mask_or_chance() -> None:
    model = on_meta(LMConfig(), MimiConfig())
    counts = count_step(model, 64, model.allocate(64))
    assert counts.total() <= MOST_OPERATORS, counts.most_common(12)


def test_operators_do_not_grow_with_lanes() -> None:
    model = on_meta(LMConfig(layers=2, depformer_layers=2), MimiConfig(layers=2))
    state = model.allocate(128)
    assert count_step(model, 128, state) == count_step(model, 96, state)


@pytest.mark.parametrize(
    "offence",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: torch.rand(3, device=META),
        lambda x: x.cpu(),
        lambda x: torch.multinomial(x, 1),
        lambda x: x.nonzero(),
    ],
)
def test_guard_notices(offence: Callable[[Tensor], object]) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), Guard():
        offence(torch.empty(4, device=META))


def test_a_call_of_ten_windows_costs_the_same_at_every_step_and_holds_no_more_memory() -> None:
    runner = small_runner(lanes=[4])
    begin(runner, 0, Prompt(seed=1))
    heard = speech(1, seed=1)
    longest = max(KEYS, CODEC_KEYS)
    before = {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in tensors(runner.state)}
    counted = []
    for step in range(10 * longest):
        with Guard() as guard:
            _, _, sound = runner.step(np.array([0]), heard)
        assert sound.all(), step
        counted.append(guard.counts)
    assert all(counts == counted[0] for counts in counted)
    assert {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in tensors(runner.state)} == before
