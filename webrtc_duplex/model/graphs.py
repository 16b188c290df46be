"""The model's work as the device runs it: a step for each number of lanes, a prompt's pieces, the opening of a call.

On the CPU it is run as it is (`Lanes`, `Prompting`). On a GPU each is captured at start as a CUDA graph, from and to
static buffers, so that the host neither launches some thousand kernels a tick nor lays out a single tensor
(`CudaLanes`, `CudaPrompting`). The first run of each, which compiles kernels and lets libraries initialise, is on the
scratch row and leaves no trace.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from webrtc_duplex.audio import FRAME_SAMPLES, Pcm
from webrtc_duplex.model.kernels import ops
from webrtc_duplex.model.personaplex import ModelState, PersonaPlex, Said, Thought
from webrtc_duplex.model.prompts import PromptColumns
from webrtc_duplex.model.streaming import Hints

T = TypeVar("T")

LANE_COUNTS = (4, 8, 16, 32, 64, 128)
"""Lanes of a step on the CPU: with fewer than 4 its matrix kernels round differently."""

CUDA_LANE_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Lanes of a captured step: one graph each."""

CUDA_PIECES = (64, 128, 256)
"""Columns of a captured piece of a prompt: one graph each; the scheduler asks for no more than the last."""


class Graph(Generic[T]):
    """A function of static tensors; what it returns lies in the same tensors after every replay."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: T) -> None:
        self._graph, self._result = graph, result
        self._done: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def replay(self) -> T:
        """Begin it; whoever reads the result on this stream reads it afterwards."""
        self._graph.replay()
        return self._result

    def finish(self) -> T:
        """Begin it and wait until it is done."""
        self._graph.replay()
        self._done.record()
        self._done.synchronize()
        return self._result


class Graphs:
    """Captures; no two graphs are replayed at once, so they share their memory, and the largest is best the first."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Run it once, which compiles kernels and lets libraries initialise, then once more into a graph."""
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return Graph(graph, result)


def graphs_for(state: ModelState) -> Graphs | None:
    """What captures graphs where the state is; None where there are none."""
    return Graphs() if state.lm.own.is_cuda else None


class Lanes:
    """The step for a fixed number of lanes, from and to static buffers; lanes without a row work on the scratch row."""

    def __init__(self, model: PersonaPlex, state: ModelState, count: int, scratch: int) -> None:
        self._model, self._state, self._scratch = model, state, scratch
        self._rows = torch.full((count,), scratch)
        self._pcm = torch.zeros(count, FRAME_SAMPLES, dtype=torch.int16)

    def step(self, rows: NDArray[np.int64], pcm: Pcm, hints: Hints) -> Said:
        """Rows [n], pcm [n, 1920]; the answer has all lanes, the first n are the rows'."""
        self._fill(rows, pcm)
        return self._model.step(self._pcm, self._rows, self._state, hints)

    def _fill(self, rows: NDArray[np.int64], pcm: Pcm) -> None:
        self._rows[: len(rows)] = torch.from_numpy(rows)
        self._rows[len(rows) :] = self._scratch
        self._pcm[: len(rows)] = torch.from_numpy(pcm)
        self._pcm[len(rows) :] = 0


class CudaLanes(Lanes):
    """The same as one graph: pinned buffers, one copy in and one out of each inside the graph, one wait."""

    def __init__(self, model: PersonaPlex, state: ModelState, count: int, scratch: int, graphs: Graphs) -> None:
        super().__init__(model, state, count, scratch)
        device = state.lm.own.device
        self._rows, self._pcm = _pinned(self._rows), _pinned(self._pcm)
        self._device_rows, self._device_pcm = self._rows.to(device), self._pcm.to(device)
        said = model.step(self._device_pcm, self._device_rows, state)
        self._said = Said(*(_pinned(torch.empty_like(part, device="cpu")) for part in parts(said)))
        self._graph = graphs.capture(self._run)

    def step(self, rows: NDArray[np.int64], pcm: Pcm, hints: Hints) -> Said:
        """As `Lanes.step`; a graph does the same whatever is hinted."""
        self._fill(rows, pcm)
        self._graph.finish()
        return self._said

    def _run(self) -> None:
        self._device_rows.copy_(self._rows, non_blocking=True)
        self._device_pcm.copy_(self._pcm, non_blocking=True)
        said = self._model.step(self._device_pcm, self._device_rows, self._state)
        for host, device in zip(parts(self._said), parts(said), strict=True):
            host.copy_(device, non_blocking=True)


class Prompting:
    """What prompts are made of: pieces that are prefilled, and the choice that ends them."""

    def __init__(self, model: PersonaPlex, state: ModelState) -> None:
        self._model, self._state = model, state

    def prefill(self, prompt: PromptColumns, row: int, start: int, count: int) -> Tensor:
        """Hear `count` columns from `start` on -> the last one's hidden vector [1, D]."""
        return self._model.lm.prefill(prompt, row, start, count, self._state.lm)

    def open(self, prompt: PromptColumns, thought: Thought, row: int) -> None:
        """Choose the call's first tokens."""
        self._model.lm.open(prompt, thought, row, self._state.lm)


class CudaPrompting(Prompting):
    """The same as graphs, one for each size of a piece; a piece that is larger, or turns the ring, is run as it is."""

    def __init__(self, model: PersonaPlex, state: ModelState, scratch: int, graphs: Graphs) -> None:
        super().__init__(model, state)
        lm, device = model.lm, state.lm.own.device
        self._capacity = state.lm.temporal.rings.capacity
        self._row = torch.full((1,), scratch, device=device)
        self._count = torch.ones_like(self._row)
        self._x = lm.temporal.table.new_zeros(CUDA_PIECES[-1], lm.config.width)
        sizes = CUDA_PIECES if ops.TRITON else ()
        self._pieces = {size: graphs.capture(self._piece(size)) for size in reversed(sizes)}
        self._thought = lm.consider(self._x[:1].clone())
        self._tail = torch.zeros(2, state.lm.heard.shape[1], dtype=torch.int64, device=device)
        self._opening = graphs.capture(lambda: lm.choose_first(self._thought, self._tail, self._row, state.lm))

    def prefill(self, prompt: PromptColumns, row: int, start: int, count: int) -> Tensor:
        size = min((size for size in self._pieces if size >= count), default=None)
        if size is None or start + size > self._capacity:
            return super().prefill(prompt, row, start, count)
        self._x[:count] = self._model.lm.embed(prompt, start, start + count)
        self._x[count:size] = 0
        self._row.fill_(row)
        self._count.fill_(count)
        return self._pieces[size].replay().clone()

    def open(self, prompt: PromptColumns, thought: Thought, row: int) -> None:
        self._thought.hidden.copy_(thought.hidden)
        self._thought.text_logits.copy_(thought.text_logits)
        self._tail.copy_(prompt.tail)
        self._row.fill_(row)
        self._opening.replay()

    def _piece(self, size: int) -> Callable[[], Tensor]:
        temporal, state = self._model.lm.temporal, self._state.lm.temporal
        return lambda: temporal.prefill_piece(self._x[:size], state, self._row, self._count)


def make_runs(
    model: PersonaPlex, state: ModelState, rows: int, wanted: Sequence[int] | None
) -> tuple[dict[int, Lanes], Prompting]:
    """Lanes for up to all rows, by their number, ascending (those wanted, or what suits the device), and prompts."""
    graphs = graphs_for(state)
    counts = list(wanted or (CUDA_LANE_COUNTS if graphs else LANE_COUNTS))
    while counts[-1] < rows:
        counts.append(2 * counts[-1])
    needed = counts[: next(i for i, count in enumerate(counts) if count >= rows) + 1]
    if graphs is None:
        return {count: Lanes(model, state, count, rows) for count in needed}, Prompting(model, state)
    captured = {count: CudaLanes(model, state, count, rows, graphs) for count in reversed(needed)}
    return dict(sorted(captured.items())), CudaPrompting(model, state, rows, graphs)


def parts(said: Said) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its four tensors, in order."""
    return said.pcm, said.text, said.codes, said.sound


def _pinned(tensor: Tensor) -> Tensor:
    """Where the GPU copies from and to by itself."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor
