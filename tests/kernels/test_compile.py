"""Each kernel that a step at released sizes launches: compiled for sm_90, no GPU, and its machine code looked at."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.offline import Build, Compiled, Recorder, compile_for
from tests.model.test_capture import META, Guard, on_meta
from webrtc_duplex.model.config import LMConfig, MimiConfig
from webrtc_duplex.model.kernels import attention, convolution, ops, pointwise, sampler
from webrtc_duplex.model.personaplex import PersonaPlex

H200_MULTIPROCESSORS = 132
pytestmark = pytest.mark.timeout(900)  # half a minute on a free core, the first time; Triton keeps what it compiled

REGISTERS, THREADS_A_WARP, SHARED_BYTES = 65536, 32, 227 << 10

MOST_NODES = 1036
"""Nodes of the step's graph, copies in and out not counted: lower it when it falls, do not raise it."""


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    """Kernels are used for every tensor; a launch is only written down."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "usable", lambda x: True)
        patch.setattr(attention, "programs_for", lambda device, split: split.resident * H200_MULTIPROCESSORS)
        for module in (attention, convolution, pointwise, sampler):
            patch.setattr(module, "launch", recorder)
        yield recorder


@torch.inference_mode()
def step(model: PersonaPlex, lanes: int) -> Counter[str]:
    """A step on the meta device; returns the operators of torch that it runs."""
    pcm = torch.empty(lanes, 1920, dtype=torch.int16, device=META)
    rows = torch.empty(lanes, dtype=torch.int64, device=META)
    state = model.allocate(lanes)
    with Guard() as guard:
        model.step(pcm, rows, state)
    counts: Counter[str] = guard.counts
    return counts


@pytest.fixture(scope="module")
def operators(recorder: Recorder) -> Counter[str]:
    counts = step(on_meta(LMConfig(), MimiConfig()), 64)
    recorder.whole_step = recorder.launches.copy()
    for lanes in (1, 12, 128):  # what depends on their number is in every layer
        step(on_meta(LMConfig(layers=1, depformer_layers=1), MimiConfig(layers=1)), lanes)
    return counts


@pytest.fixture(scope="module")
def compiled(recorder: Recorder, operators: Counter[str]) -> dict[Build, Compiled]:
    return {build: compile_for(build) for build in recorder.launches}


def test_the_graph_has_no_more_nodes_than_before(recorder: Recorder, operators: Counter[str]) -> None:
    allocations = sum(number for name, number in operators.items() if name.startswith(("empty", "new_empty")))
    nodes = recorder.whole_step.total() + operators.total() - allocations
    kernels = Counter({build.name: number for build, number in recorder.whole_step.items()})
    assert nodes <= MOST_NODES, (nodes, kernels.most_common(20), operators.most_common(20))


def test_the_most_hot_kernels_are_launched_once_a_layer(recorder: Recorder, operators: Counter[str]) -> None:
    by_name = Counter[str]()
    for build, number in recorder.whole_step.items():
        by_name[build.name] += number
    assert by_name["_split"] == 32 + 8 + 8
    assert by_name["_plan"] == 3, "one work list for all layers of a transformer"
    assert by_name["_sample"] == 9


def test_nothing_is_spilled(compiled: dict[Build, Compiled]) -> None:
    spilled = {build.label: code.spilled for build, code in compiled.items() if code.spilled}
    angles = {label: size for label, size in spilled.items() if label.startswith("_turns") and size <= 32}
    assert spilled == angles, "only cos and sin of large angles may use the stack, once a step"


def test_as_many_programs_of_attention_are_resident_as_are_started(compiled: dict[Build, Compiled]) -> None:
    splits = [(build, code) for build, code in compiled.items() if build.name == "_split"]
    assert len(splits) == 2
    for build, code in splits:
        resident = dict(build.constants)["PROGRAMS"] // H200_MULTIPROCESSORS  # type: ignore[operator]
        assert code.registers * THREADS_A_WARP * build.warps * resident <= REGISTERS, build.label
        assert code.shared * resident <= SHARED_BYTES, build.label


def test_what_streams_memory_loads_16_bytes_at_once(compiled: dict[Build, Compiled]) -> None:
    for build, code in compiled.items():
        wide = sum(number for name, number in code.instructions.items() if name.startswith("LDG") and ".128" in name)
        if build.name in ("_split", "_rms_norm", "_gated", "_embed"):
            assert wide, build.label
        if build.name == "_split" and "*bf16" in build.label:
            copies = [name for name in code.instructions if name.startswith("LDGSTS")]
            assert copies and all(name.endswith(".128") for name in copies), "keys and values only so"
            assert code.count("HMMA"), build.label


def test_step_launches_the_same_for_any_number_of_lanes(recorder: Recorder, operators: Counter[str]) -> None:
    model = on_meta(LMConfig(layers=2, depformer_layers=2), MimiConfig(layers=2))
    before = recorder.launches.copy()
    first = step(model, 12)
    middle = recorder.launches.copy()
    assert step(model, 128) == first
    assert (recorder.launches - middle).total() == (middle - before).total()
