#!/usr/bin/env python3
"""Our engine beside moshi 0.2.13 on the CPU, in one process and one run, on the same weights and the same sound.

    scripts/bench_engine.py [--quick] [--sizes tiny middle] [--json OUT]

A step is a frame for B callers: encode, language model, decode. Both sides use one thread and sample as the family
does; their frames take turns, so that both meet the same machine, and what is compared is CPU time. Further lines: the
prompt in one pass against moshi stepping through it, joining from the prompt cache against joining cold, and what a
tick costs beside the model (`bench_ticks.py`). moshi runs without torch.compile. Exit code 1 if a bar is missed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NO_TORCH_COMPILE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from moshi.models import loaders  # noqa: E402
from moshi.models.lm import LMGen  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts.bench_ticks import tick_cost  # noqa: E402
from webrtc_duplex.audio import FRAME_SAMPLES, Pcm  # noqa: E402
from webrtc_duplex.messages import ModelCard, Prompt  # noqa: E402
from webrtc_duplex.model.config import LMConfig, MimiConfig  # noqa: E402
from webrtc_duplex.model.hub import TINY  # noqa: E402
from webrtc_duplex.model.mimi import Mimi  # noqa: E402
from webrtc_duplex.model.personaplex import LM, PersonaPlex  # noqa: E402
from webrtc_duplex.model.prompter import Wish  # noqa: E402
from webrtc_duplex.model.prompts import GAP_FRAMES, PromptColumns, bare_start, system_prompt  # noqa: E402
from webrtc_duplex.model.runner import PersonaPlexRunner  # noqa: E402
from webrtc_duplex.model.tensor_file import TensorFile, fill  # noqa: E402

CPU = torch.device("cpu")
Json = Mapping[str, Any]

BATCHES = (1, 4, 8, 16)
PROMPT_COLUMNS = 150

STEP_BAR, TICK_BAR_MS, PREFILL_BAR, JOIN_BAR = 0.5, 2.0, 10.0, 10.0

MIDDLE_LM: Json = loaders._lm_kwargs | {
    "dim": 512,
    "num_heads": 8,
    "num_layers": 8,
    "context": 300,
    "depformer_dim": 256,
    "depformer_num_heads": 4,
    "depformer_num_layers": 4,
    "depformer_dim_feedforward": int(4.125 * 256),
}
MIDDLE_MIMI: Json = {
    "sample_rate": 24_000,
    "channels": 1,
    "frame_rate": 12.5,
    "seanet": loaders._seanet_kwargs,
    "quantizer": loaders._quantizer_kwargs | {"n_q": 8},
    "transformer": loaders._transformer_kwargs,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One thing measured: ours and theirs in milliseconds of CPU time, their ratio against its bar."""

    what: str
    ours_ms: float
    other_ms: float
    ratio: float
    bar: str
    met: bool | None
    """None where no bar is set."""

    def __str__(self) -> str:
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        return f"{self.what:<52} {self.ours_ms:9.2f} {self.other_ms:9.2f} {self.ratio:8.3f}  {self.bar:<8} {verdict}"


@dataclass(frozen=True, slots=True)
class Size:
    """A model's files and what they say, for both sides."""

    name: str
    lm: Json
    mimi: Json
    lm_file: Path
    mimi_file: Path


@dataclass(frozen=True, slots=True)
class Prompts:
    """A model without voices: a text of n letters is a prompt of n columns, no text the bare start."""

    config: LMConfig

    def card(self) -> ModelCard:
        return ModelCard("bench", (), None, True, 10_000, ("",) * self.config.text_card)

    def wish(self, prompt: Prompt) -> Wish:
        return Wish(None, prompt.text or "")

    def columns(self, wish: Wish) -> PromptColumns:
        if not wish.text:
            return bare_start(self.config)
        return system_prompt(self.config, None, [ord(letter) for letter in wish.text[2 * GAP_FRAMES :]])


# ---- the two sides


class Ours:
    """Our runner, one row a caller, each as dear as a call whose windows are full."""

    def __init__(self, size: Size, batch: int) -> None:
        config, codec = LMConfig.from_json(size.lm), MimiConfig.from_json(size.mimi)
        lm, mimi = LM(config, CPU, torch.float32), Mimi(codec, CPU)
        fill(lm, lm.pieces(), TensorFile(size.lm_file))
        fill(mimi, mimi.pieces(), TensorFile(size.mimi_file))
        self.runner = PersonaPlexRunner(PersonaPlex(lm, mimi), Prompts(config), batch)
        self._rows = np.arange(batch)
        for row in range(batch):
            self.join(row, Prompt(seed=row))
            self.runner.fill(row)

    def join(self, row: int, prompt: Prompt) -> None:
        """Begin a call and run its prompt."""
        left = self.runner.begin(row, prompt)
        while left:
            left = self.runner.prefill(row, PROMPT_COLUMNS)

    def step(self, pcm: Pcm) -> None:
        self.runner.step(self._rows, pcm)


class Moshi:
    """The reference, streaming a batch."""

    def __init__(self, size: Size, batch: int) -> None:
        self.mimi = loaders.get_mimi(size.mimi_file, dict(size.mimi), device="cpu", num_codebooks=8)
        family = {key: value for key, value in size.lm.items() if key in loaders._lm_kwargs}
        self.lm = loaders.get_moshi_lm(size.lm_file, family, device="cpu", dtype=torch.float32)
        self._generator = LMGen(self.lm)
        self.mimi.streaming_forever(batch)
        self._generator.streaming_forever(batch)

    @torch.no_grad()
    def step(self, pcm: Pcm) -> None:
        codes = self.mimi.encode(torch.from_numpy(pcm)[:, None] / 32768)
        said = self._generator.step(codes)
        if said is not None:
            self.mimi.decode(said[:, 1:])

    @torch.no_grad()
    def replay(self, columns: PromptColumns) -> None:
        """Step through a prompt: the caller's codes go in, and what the model chooses is overruled."""
        for column in columns.tokens:
            self._generator.step(column[None, 9:, None], depformer_replace_tokens=column[None, 1:9, None])


def random_size(folder: Path, name: str, lm: Json, mimi: Json) -> Size:
    """Write random weights of a size in the released layout."""
    size = Size(name, lm, mimi, folder / "model.safetensors", folder / "mimi.safetensors")
    chance = torch.Generator().manual_seed(0)
    codec = Mimi(MimiConfig.from_json(mimi), torch.device("meta"))
    language = LM(LMConfig.from_json(lm), torch.device("meta"), torch.float32)
    for file, pieces in ((size.lm_file, language.pieces()), (size.mimi_file, codec.pieces())):
        shapes = {key: shape for piece in pieces for key, shape in piece.sources}
        tensors = {key: _random(key, shape, chance) for key, shape in shapes.items()}
        for key in [key for key in tensors if key.endswith("cluster_usage")]:
            tensors[key.replace("cluster_usage", "_initialized")] = torch.ones(1)
        save_file(tensors, file)
    return size


def _random(key: str, shape: Sequence[int], chance: torch.Generator) -> Tensor:
    if key.endswith(("alpha", "cluster_usage", "norm1.weight", "norm2.weight")):
        return torch.ones(shape)
    if key.endswith("bias"):
        return torch.zeros(shape)
    if key.endswith("scale"):
        return torch.full(shape, 0.1)
    width = torch.Size(shape[1:]).numel()
    return torch.randn(shape, generator=chance) / (1.0 if "emb" in key else width**0.5)


# ---- what is measured


def cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3


def compare_steps(size: Size, batches: Sequence[int], frames: int) -> Iterator[Line]:
    """A frame of ours, a frame of theirs, in turn; medians."""
    for batch in batches:
        ours, moshi = Ours(size, batch), Moshi(size, batch)
        sound = np.random.default_rng(0).normal(0, 3000, (frames + 3, batch, FRAME_SAMPLES)).astype(np.int16)
        times = [(cpu_ms(lambda: ours.step(pcm)), cpu_ms(lambda: moshi.step(pcm))) for pcm in sound]  # noqa: B023
        mine, theirs = (statistics.median(side) for side in zip(*times[3:], strict=True))
        barred = size.name == "middle" and batch == 8
        yield Line(
            f"{size.name}: step of {batch:2} callers, against moshi",
            mine,
            theirs,
            mine / theirs,
            f"<= {STEP_BAR}" if barred else "",
            mine / theirs <= STEP_BAR if barred else None,
        )


def compare_joins(size: Size, rounds: int) -> Iterator[Line]:
    """A prompt of 150 columns: moshi stepping, our one pass, our cache."""
    ours, moshi = Ours(size, 1), Moshi(size, 1)
    cold, warm, replay = [], [], []
    for turn in range(rounds):
        prompt = Prompt(text=chr(ord("a") + turn) * PROMPT_COLUMNS)
        cold.append(cpu_ms(lambda: ours.join(0, prompt)))  # noqa: B023
        warm.append(cpu_ms(lambda: ours.join(0, prompt)))  # noqa: B023
        columns = Prompts(LMConfig.from_json(size.lm)).columns(Wish(None, prompt.text or ""))
        replay.append(cpu_ms(lambda: moshi.replay(columns)))  # noqa: B023
    yield _faster(f"{size.name}: prompt of {PROMPT_COLUMNS} columns, against moshi stepping", cold, replay, PREFILL_BAR)
    yield _faster(f"{size.name}: join from the prompt cache, against cold", warm, cold, JOIN_BAR)


def _faster(what: str, ours: Sequence[float], other: Sequence[float], bar: float) -> Line:
    mine, theirs = statistics.median(ours), statistics.median(other)
    return Line(what, mine, theirs, theirs / mine, f">= {bar:g}", theirs / mine >= bar)


def measure_ticks(ticks: int) -> Line:
    """What the engine does at a tick of 64 callers beside the model; a machine at work makes the clock's p99 worse."""
    cost = tick_cost(64, ticks=ticks)
    return Line(
        "tick of 64 callers without a model, p99: CPU, clock",
        cost.cpu_p99_ms,
        cost.p99_ms,
        cost.cpu_p99_ms,
        f"<= {TICK_BAR_MS:g} ms",
        cost.cpu_p99_ms <= TICK_BAR_MS,
    )


def measure(options: argparse.Namespace) -> Iterator[Line]:
    frames, rounds = (6, 1) if options.quick else (30, 3)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sizes:
            size = tiny_size() if name == "tiny" else random_size(Path(folder), name, MIDDLE_LM, MIDDLE_MIMI)
            yield from compare_steps(size, options.batches, frames)
            if name == "middle":
                yield from compare_joins(size, rounds)
    if not options.no_ticks:
        yield measure_ticks(50 if options.quick else 500)


def tiny_size() -> Size:
    lm, mimi = (json.loads((TINY / name).read_text()) for name in ("config.json", "mimi_config.json"))
    return Size("tiny", lm, mimi, TINY / "model.safetensors", TINY / "mimi.safetensors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few frames only: does it run?")
    parser.add_argument("--sizes", nargs="+", choices=("tiny", "middle"), default=("tiny", "middle"))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--no-ticks", action="store_true", help="leave out the ticks, which take 80 ms each")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':52} {'ours ms':>9} {'other ms':>9} {'ratio':>8}  bar")
    lines = []
    for line in measure(options):
        lines.append(line)
        print(line, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")
    return 1 if any(line.met is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
