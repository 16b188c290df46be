"""What is captured as graphs, run without a GPU: a double replays a graph by running its function again.

What the graphs are given, where their results are read, and which piece of a prompt goes into which graph, is real.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import pytest
import torch
from torch import Tensor

from tests.small_model import LM_CONFIG, MIMI_CONFIG, SmallPrompts, begin, randomise, speech, talk
from webrtc_duplex.engine.load import MOST_COLUMNS
from webrtc_duplex.messages import Prompt
from webrtc_duplex.model import graphs, temporal
from webrtc_duplex.model.graphs import CUDA_PIECES
from webrtc_duplex.model.kernels import ops
from webrtc_duplex.model.mimi import Mimi
from webrtc_duplex.model.personaplex import LM, PersonaPlex
from webrtc_duplex.model.runner import PersonaPlexRunner
from webrtc_duplex.model.streaming import ChunkWindow, Ring

T = TypeVar("T")

ROWS = 5
PROMPT = Prompt(voice="low", text=" ".join(str(3 + n % 30) for n in range(60)), seed=5)
"""77 columns: more than the smallest graph of a piece has."""


@dataclass
class Replayed(Generic[T]):
    """As `graphs.Graph`: the result of a replay lies where that of the capture does."""

    run: Callable[[], T]
    result: T
    replays: int = 0

    def replay(self) -> T:
        self.replays += 1
        new = self.run()
        if isinstance(self.result, Tensor) and isinstance(new, Tensor):
            self.result.copy_(new)
        return self.result

    finish = replay


class Doubles:
    """As `graphs.Graphs`."""

    def __init__(self) -> None:
        self.captured: list[Replayed[Any]] = []

    def capture(self, run: Callable[[], T]) -> Replayed[T]:
        run()
        graph = Replayed(run, run())
        self.captured.append(graph)
        return graph


@dataclass(frozen=True)
class PlainChunk:
    """As `streaming.KernelChunk`, in plain torch, whose sizes are the host's."""

    window: ChunkWindow
    count: int

    @classmethod
    def open(cls, positions: Tensor, row: Tensor, count: Tensor, columns: int, ring: Ring, frequencies: Tensor) -> Self:
        start = int(positions[row])
        assert start + columns <= ring.capacity or int(row) == len(positions) - 1, "the ring must not turn"
        return cls(ChunkWindow.open(int(row), start, int(count), ring, frequencies), int(count))

    def attend(self, qkv: Tensor, ring: Ring) -> Tensor:
        attended = self.window.attend(qkv[:, : self.count].clone(), ring)
        return torch.cat([attended, attended.new_full((1, qkv.shape[1] - self.count, attended.shape[2]), 7.0)], dim=1)


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> Doubles:
    doubles = Doubles()
    monkeypatch.setattr(graphs, "graphs_for", lambda state: doubles)
    monkeypatch.setattr(temporal, "KernelChunk", PlainChunk)
    monkeypatch.setattr(ops, "TRITON", True)
    return doubles


def model(keys: int) -> PersonaPlex:
    cpu, chance = torch.device("cpu"), torch.Generator().manual_seed(0)
    model = PersonaPlex(LM(replace(LM_CONFIG, keys=keys), cpu, torch.float32), Mimi(MIMI_CONFIG, cpu))
    for module in (model.lm, model.mimi):
        randomise(module, chance)
    return model


def runner(keys: int = 200, kv_dtype: torch.dtype | None = None) -> PersonaPlexRunner:
    """Lanes as on the CPU, where fewer are rounded otherwise."""
    return PersonaPlexRunner(model(keys), SmallPrompts(system=True), ROWS, lane_counts=(4, 8), kv_dtype=kv_dtype)


def runner_without_graphs(keys: int = 200, kv_dtype: torch.dtype | None = None) -> PersonaPlexRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "graphs_for", lambda state: None)
        return runner(keys, kv_dtype)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("columns", [256, 40])
def test_graphs_say_what_the_model_says_as_it_is(doubles: Doubles, columns: int, kv_dtype: torch.dtype | None) -> None:
    """A cold prompt in pieces, then a cached one; alone, and among others in another number of lanes."""
    captured, plain = runner(kv_dtype=kv_dtype), runner_without_graphs(kv_dtype=kv_dtype)
    said = []
    for one in (captured, plain):
        begin(one, 1, PROMPT, columns)
        begin(one, 4, Prompt(voice="high", text="9", seed=3))
        assert one.begin(2, PROMPT) == 0
        said += [talk(one, 1, speech(6, seed=1)), talk(one, 2, speech(6, seed=2), others=[4, 1])]
    assert said[0].equals(said[2]) and said[1].equals(said[3])


def test_each_piece_goes_into_the_smallest_graph_that_holds_it(doubles: Doubles) -> None:
    one = runner(keys=1000)
    lanes, pieces = doubles.captured[:2], doubles.captured[2:5]
    begin(one, 0, PROMPT, columns=64)  # 64 columns, and 13
    assert [graph.replays for graph in pieces] == [0, 0, 3], "the largest first; the smallest also ran the warm-up's"
    begin(one, 1, Prompt(voice="high", text=PROMPT.text))
    assert [graph.replays for graph in pieces] == [0, 1, 3]
    assert [graph.replays for graph in lanes] == [1, 1], "the warm-up's"


def test_a_piece_that_would_turn_the_ring_is_run_as_it_is(doubles: Doubles) -> None:
    captured, plain = runner(keys=70), runner_without_graphs(keys=70)
    for one in (captured, plain):
        begin(one, 1, PROMPT, columns=30)
    heard = speech(5, seed=1)
    assert talk(captured, 1, heard).equals(talk(plain, 1, heard))


def test_the_scheduler_asks_for_no_larger_pieces_than_there_are_graphs_for() -> None:
    assert MOST_COLUMNS == max(CUDA_PIECES)
