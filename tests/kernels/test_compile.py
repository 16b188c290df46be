"""Each kernel that a step at released sizes launches: compiled for sm_90, no GPU, and its machine code looked at."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.offline import Build, Compiled, Recorder, compile_for
from tests.model.test_capture import META, Guard, on_meta
from webrtc_duplex.model.config import LMConfig, MimiConfig
from webrtc_duplex.model.graphs import CUDA_LANE_COUNTS, CUDA_PIECES
from webrtc_duplex.model.kernels import attention, chunk, convolution, ops, pointwise, rows, sampler
from webrtc_duplex.model.personaplex import PersonaPlex, Thought
from webrtc_duplex.model.streaming import RowImage

H200_MULTIPROCESSORS = 132
pytestmark = pytest.mark.timeout(900)  # half a minute on a free core, the first time; Triton keeps what it compiled

REGISTERS, THREADS_A_WARP, SHARED_BYTES = 65536, 32, 227 << 10

MOST_NODES = 1021
"""Nodes of the step's graph, copies in and out not counted: lower it when it falls, do not raise it."""

MOST_JOIN_NODES = 957
"""The same of all graphs of a prompt together: the pieces of three sizes, and the opening."""

STREAMING = ("_split", "_attend_chunk", "_rms_norm", "_layer_norm", "_gelu", "_gated", "_embed", "_put")
"""Kernels whose time is that of the memory they read."""


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    """Kernels are used for every tensor; a launch is only written down."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "usable", lambda x: True)
        patch.setattr(attention, "programs_for", lambda device, split: split.resident * H200_MULTIPROCESSORS)
        for module in (attention, chunk, convolution, pointwise, rows, sampler):
            patch.setattr(module, "launch", recorder)
        yield recorder


@torch.inference_mode()
def step(model: PersonaPlex, lanes: int, kv_dtype: torch.dtype | None = None) -> Counter[str]:
    """A step on the meta device; returns the operators of torch that it runs."""
    pcm = torch.empty(lanes, 1920, dtype=torch.int16, device=META)
    rows = torch.empty(lanes, dtype=torch.int64, device=META)
    state = model.allocate(lanes, kv_dtype)
    with Guard() as guard:
        model.step(pcm, rows, state)
    counts: Counter[str] = guard.counts
    return counts


@pytest.fixture(scope="module")
def operators(recorder: Recorder) -> Counter[str]:
    counts = step(on_meta(LMConfig(), MimiConfig()), 64)
    recorder.whole_step = recorder.launches.copy()
    shallow = on_meta(LMConfig(layers=1, depformer_layers=1), MimiConfig(layers=1))
    for lanes in CUDA_LANE_COUNTS:  # what depends on their number is in every layer
        step(shallow, lanes)
        step(shallow, lanes, torch.int8)
    return counts


@torch.inference_mode()
def join(model: PersonaPlex, kv_dtype: torch.dtype | None = None) -> tuple[list[Counter[str]], Counter[str]]:
    """What is captured of a prompt: pieces of every size, and the opening; then a cached prefix is put into a row.

    Returns the operators of torch of each piece's graph and of the opening's.
    """
    lm, state = model.lm, model.allocate(2, kv_dtype)
    row, count, tail = (torch.empty(shape, dtype=torch.int64, device=META) for shape in (1, 1, (2, 8)))
    counts = []
    for columns in CUDA_PIECES:
        x = lm.temporal.table.new_empty(columns, lm.config.width)
        with Guard() as guard:
            hidden = lm.temporal.prefill_piece(x, state.lm.temporal, row, count)
        counts.append(guard.counts)
    thought = Thought(hidden, lm.temporal.text_logits(hidden))
    with Guard() as guard:
        lm.choose_first(thought, tail, row, state.lm)
    RowImage.take(state.lm.temporal, 0, 150).put(state.lm.temporal, 1, 150)
    RowImage.take(state.mimi.decoder, 0, 2).put(state.mimi.decoder, 1, 2)
    return counts, guard.counts


@pytest.fixture(scope="module")
def join_operators(recorder: Recorder, operators: Counter[str]) -> tuple[list[Counter[str]], Counter[str]]:
    """Of a join at released sizes."""
    before = recorder.launches.copy()
    counts = join(on_meta(LMConfig(), MimiConfig()))
    recorder.whole_join = recorder.launches - before
    join(on_meta(LMConfig(layers=1, depformer_layers=1), MimiConfig(layers=1)), torch.int8)
    return counts


@pytest.fixture(scope="module")
def compiled(recorder: Recorder, join_operators: tuple[list[Counter[str]], Counter[str]]) -> dict[Build, Compiled]:
    """Everything that is shipped: steps of every number of lanes and joins, with keys of bf16 and of int8."""
    return {build: compile_for(build) for build in recorder.launches}


def that_work(operators: Counter[str]) -> int:
    """Operators that become nodes: all but those that only allocate."""
    return sum(number for name, number in operators.items() if not name.startswith(("empty", "new_empty")))


def test_the_graph_has_no_more_nodes_than_before(recorder: Recorder, operators: Counter[str]) -> None:
    nodes = recorder.whole_step.total() + that_work(operators)
    kernels = Counter({build.name: number for build, number in recorder.whole_step.items()})
    assert nodes <= MOST_NODES, (nodes, kernels.most_common(20), operators.most_common(20))


def test_a_prompts_graphs_have_no_more_nodes_than_before(
    recorder: Recorder, join_operators: tuple[list[Counter[str]], Counter[str]]
) -> None:
    """And none of them waits for the device: the guard stood by."""
    pieces, opening = join_operators
    assert len({tuple(sorted(piece.items())) for piece in pieces}) == 1, "of any size the same"
    by_name = Counter[str]()
    for build, number in recorder.whole_join.items():
        by_name[build.name] += number
    assert by_name["_attend_chunk"] == 32 * len(CUDA_PIECES)
    assert by_name["_put"] == 2, "a whole prefix in one launch, and the codec's"
    assert by_name["_sample"] == 2
    operators = sum(map(that_work, pieces)) + that_work(opening)
    assert recorder.whole_join.total() + operators <= MOST_JOIN_NODES, (by_name, pieces[0], opening)


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
    assert len(splits) == 3, "keys of bf16, of int8, and the codec's of f32"
    for build, code in splits:
        resident = dict(build.constants)["PROGRAMS"] // H200_MULTIPROCESSORS  # type: ignore[operator]
        assert code.registers * THREADS_A_WARP * build.warps * resident <= REGISTERS, build.label
        assert code.shared * resident <= SHARED_BYTES, build.label


def test_attention_leaves_a_multiprocessor_time_to_wait_for_memory(compiled: dict[Build, Compiled]) -> None:
    """Time that the instructions of a tile take to issue, as a share of the time in which the tile arrives.

    An H200's share a multiprocessor: 4.3 TB/s / 132 at 1.9 GHz; it issues four instructions a cycle. Above 0.7 loss is
    to be expected.
    """
    arriving = 4.3e12 / H200_MULTIPROCESSORS / 1.9e9
    limits = {"*bf16": 0.25, "*i8": 0.7, "*fp32": 0.5}
    for build, code in compiled.items():
        if build.name == "_split":
            sizes, kind = dict(build.constants), dict(build.signature)["keys"]
            number = {"*bf16": 2, "*i8": 1, "*fp32": 4}[kind]
            tile = 2 * sizes["BLOCK"] * (sizes["D"] * number + 4 * sizes["BYTES"])  # type: ignore[operator]
            share = code.loop * build.warps / 4 / (tile / arriving)
            assert 0 < share <= limits[kind], (build.label, share)


def test_what_streams_memory_loads_16_bytes_at_once(compiled: dict[Build, Compiled]) -> None:
    for build, code in compiled.items():
        wide = sum(number for name, number in code.instructions.items() if name.startswith("LDG") and ".128" in name)
        few = build.name == "_put" and "length" not in build.multiples_of_16  # scales, a thirtieth of the rest
        if build.name in STREAMING and not few:
            assert wide, build.label
        copies = [name for name in code.instructions if name.startswith("LDGSTS")]
        bytes_too = dict(build.constants).get("BYTES")
        if build.name in ("_split", "_attend_chunk") and not bytes_too:
            assert copies and all(name.endswith(".128") for name in copies), "keys and values only so"
        if build.name == "_attend_chunk" or (build.name == "_split" and dict(build.constants)["DOT"]):
            assert code.count("HMMA") or code.count("HGMMA"), build.label


def test_step_launches_the_same_for_any_number_of_lanes(recorder: Recorder, operators: Counter[str]) -> None:
    model = on_meta(LMConfig(layers=2, depformer_layers=2), MimiConfig(layers=2))
    before = recorder.launches.copy()
    first = step(model, 12)
    middle = recorder.launches.copy()
    assert step(model, 128) == first
    assert (recorder.launches - middle).total() == (middle - before).total()
