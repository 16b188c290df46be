"""The GPU check: the card's ceilings, each part of the step, the whole step at released sizes, and whether it is right.

    scripts/gpu_check.sh [--json FILE] [--dry]

Parts run in order, each in a time box of its own and all within eight minutes; one that fails or is late is reported,
and the next one runs. All weights are random and made on the device: speed does not depend on them. The last lines are
the bars, passed or failed; exit code 1 if one failed or could not be judged. With --dry nothing is measured that means
anything: the model runs in plain torch, kernels only where they are called by themselves.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

DRY = "--dry" in sys.argv[1:] or os.environ.get("TRITON_INTERPRET") == "1"
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from webrtc_duplex.audio import FRAME_S, FRAME_SAMPLES, Pcm  # noqa: E402
from webrtc_duplex.messages import ModelCard, Prompt  # noqa: E402
from webrtc_duplex.model.config import LMConfig, MimiConfig  # noqa: E402
from webrtc_duplex.model.kernels import attention, convolution, ops, sampler  # noqa: E402
from webrtc_duplex.model.kernels.attention import Split  # noqa: E402
from webrtc_duplex.model.mimi import Mimi  # noqa: E402
from webrtc_duplex.model.personaplex import LM, PersonaPlex  # noqa: E402
from webrtc_duplex.model.prompter import Wish  # noqa: E402
from webrtc_duplex.model.prompts import PromptColumns, VoiceCodes, bare_start, system_prompt  # noqa: E402
from webrtc_duplex.model.runner import PersonaPlexRunner  # noqa: E402
from webrtc_duplex.model.streaming import Ring, Rings, RowImage, Store, quantised, rope_frequencies, tensors  # noqa: E402

Row = dict[str, object]
Late = Callable[[], bool]

BUDGET_S = 480.0


@dataclass(frozen=True)
class Sizes:
    """What is measured: the released model on a card, or next to nothing."""

    lm: LMConfig
    mimi: MimiConfig
    rows: tuple[int, ...]
    ages: tuple[int, ...]
    gemm_lines: tuple[int, ...]
    big: int
    """Bytes of the copies that the ceilings are taken from"""
    square: int
    """Side of the product"""
    replays: int
    paced: int
    prompt: int
    """Columns of the prompts that join"""


FULL = Sizes(
    lm=LMConfig(keys=3000, file_steps=8), mimi=MimiConfig(), rows=(1, 16, 64), ages=(375, 1500, 3000),
    gemm_lines=(1, 8, 16, 32, 64, 128), big=1 << 32, square=8192, replays=300, paced=100, prompt=150,
)  # fmt: skip

TINY = Sizes(
    lm=LMConfig(
        width=32, heads=2, layers=1, hidden=48, keys=12, text_card=40, card=64, depformer_width=16, depformer_heads=1,
        depformer_layers=1, depformer_hidden=24, file_steps=8, silence_codes=(1,) * 8, sine_codes=(2,) * 8,
    ),
    mimi=MimiConfig(
        filters=4, width=32, heads=2, layers=1, hidden=48, keys=7, codebook_width=16, codebook_size=64, file_codebooks=8
    ),
    rows=(2,), ages=(3,), gemm_lines=(2,), big=1 << 12, square=16, replays=1, paced=1, prompt=9,
)  # fmt: skip

SPLITS = (
    attention.HALF,
    replace(attention.HALF, stages=2),
    replace(attention.HALF, chunk=256),
    Split(dot=True, block=128, warps=8, stages=2, resident=1),
    attention.BYTES,
    replace(attention.BYTES, stages=3, resident=3),
    replace(attention.BYTES, chunk=256),
    Split(dot=False, block=16, warps=4, stages=3, resident=5),
    Split(dot=False, block=32, warps=8, stages=3, resident=2),
)


@dataclass(frozen=True)
class Bar:
    name: str
    passed: bool | None
    """None: could not be judged"""
    seen: str


@dataclass
class Report:
    """What was found, part by part."""

    sizes: Sizes
    device: torch.device
    started: float
    parts: dict[str, object] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def run(self, name: str, limit_s: float, part: Callable[["Report", Late], list[Row]]) -> None:
        """One part in its time box; nothing that goes wrong in it ends the check."""
        began = time.monotonic()
        left = BUDGET_S - (began - self.started)
        if left < 5 and not DRY:
            self.parts[name] = "skipped: out of time"
            return
        end = began + min(limit_s, left)
        try:
            rows = part(self, lambda: time.monotonic() > end and not DRY)
            self.parts[name] = rows
            for row in rows:
                print("   ", "  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        except Exception as error:  # survived: what the other parts say is still worth having
            self.parts[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc(limit=-4)
        print(
            f"--- {name}: {time.monotonic() - began:.1f} s, {time.monotonic() - self.started:.0f} s in all", flush=True
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def bar(self, name: str, value: float | None, limit: float, unit: str = "ms") -> None:
        judged = None if value is None or DRY else value < limit
        seen = "not measured" if value is None else f"{value:.2f} {unit}"
        self.bars.append(Bar(f"{name} < {limit:g} {unit}", judged, seen))

    def rule(self, name: str, kept: bool) -> None:
        self.bars.append(Bar(name, kept, "yes" if kept else "no"))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds(run: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Median time of one replay of the graph of `run`."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    graph = graph_of(run)
    spans = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1e-3)
    return float(np.median(spans))


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run twice beside the default stream, then capture."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def machine(report: Report, late: Late) -> list[Row]:
    row: Row = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    if report.device.type == "cuda":
        properties = torch.cuda.get_device_properties(report.device)
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        row |= {"card": properties.name, "multiprocessors": properties.multi_processor_count}
        row |= {"free GB": torch.cuda.mem_get_info()[0] / 1e9}
        row |= {"driver, clocks, power": subprocess.run(query, capture_output=True, text=True).stdout.strip()}
    return [row]


def ceilings(report: Report, late: Late) -> list[Row]:
    sizes, device = report.sizes, report.device
    source = torch.empty(sizes.big // 4, device=device).normal_()
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device)
    read_s = seconds(lambda: source.amax(), device)
    a, b = (torch.randn(sizes.square, sizes.square, device=device).bfloat16() for _ in range(2))
    product_s = seconds(lambda: torch.mm(a, b), device)
    row: Row = {"copy TB/s": 2 * sizes.big / copy_s / 1e12, "read TB/s": sizes.big / read_s / 1e12}
    return [row | {"product TFLOP/s": 2 * sizes.square**3 / product_s / 1e12}]


def attention_bf16(report: Report, late: Late) -> list[Row]:
    """The temporal transformer's attention with every way to split it; its error against f64."""
    return list(_attention(report, late, _half(report.device)))


def attention_int8(report: Report, late: Late) -> list[Row]:
    """The same with keys and values of bytes, and a scale for each vector."""
    return list(_attention(report, late, torch.int8))


def attention_e4m3(report: Report, late: Late) -> list[Row]:
    """What int8 is the choice over: as many bytes, and no integers to convert."""
    return list(_attention(report, late, torch.float8_e4m3fn))


def references(report: Report, late: Late) -> list[Row]:
    """The same attention as torch has it: behind a mask, in blocks of 128 slots, and by lengths."""
    sizes, device, rows = report.sizes, report.device, list[Row]()
    ways: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Callable[[], object]]] = {
        "scaled_dot_product_attention, a mask": _behind_a_mask, "varlen_attn": _by_lengths, "flex_attention": _in_blocks
    }  # fmt: skip
    for lanes in sizes.rows:
        shape = (lanes, sizes.lm.heads, sizes.lm.keys, sizes.lm.head_width)
        keys, values = (torch.randn(shape, device=device).to(_half(device)) for _ in range(2))
        for age in sizes.ages:
            lengths = torch.full((lanes,), age, dtype=torch.int32, device=device)
            for name, way in ways.items():
                if late():
                    return rows
                row: Row = {"reference": name, "lanes": lanes, "age": age}
                try:
                    spent = seconds(way(torch.randn_like(keys[:, :, :1]), keys, values, lengths), device, 8)
                    row |= {"us": spent * 1e6, "GB/s": 2 * keys.nbytes * age / shape[2] / spent / 1e9}
                except Exception as error:  # this torch, or this device, has it not
                    row |= {"failed": f"{type(error).__name__}: {str(error)[:100]}"}
                rows.append(row)
    return rows


def _behind_a_mask(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Callable[[], object]:
    seen = torch.arange(keys.shape[2], device=keys.device) < lengths[:, None, None, None]
    mask = torch.zeros_like(seen, dtype=keys.dtype).masked_fill_(~seen, -math.inf)
    return lambda: functional.scaled_dot_product_attention(query, keys, values, mask)


def _in_blocks(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    lanes, blocks = len(keys), -(-keys.shape[2] // 128)
    used = (-(-lengths // 128)).to(torch.int32).view(lanes, 1, 1)
    order = torch.arange(blocks, dtype=torch.int32, device=keys.device).expand(lanes, 1, 1, blocks).contiguous()

    def seen(lane: Tensor, head: Tensor, asked: Tensor, slot: Tensor) -> Tensor:
        return slot < lengths[lane]

    mask = BlockMask.from_kv_blocks(
        used, order, BLOCK_SIZE=128, mask_mod=seen, seq_lengths=(1, keys.shape[2]), compute_q_blocks=False
    )
    attend = flex_attention if DRY else torch.compile(flex_attention, dynamic=False)
    return lambda: attend(query, keys, values, block_mask=mask)


def _by_lengths(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Callable[[], object]:
    from torch.nn.attention.varlen import varlen_attn

    lanes, capacity = len(keys), keys.shape[2]
    packed_keys, packed_values = (part.transpose(1, 2).flatten(0, 1).contiguous() for part in (keys, values))
    first = torch.arange(lanes + 1, dtype=torch.int32, device=keys.device)
    return lambda: varlen_attn(
        query[:, :, 0], packed_keys, packed_values, first, first * capacity, 1, capacity, seqused_k=lengths
    )


def _half(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32  # the interpreter cannot multiply bf16


def _attention(report: Report, late: Late, dtype: torch.dtype) -> Iterator[Row]:
    sizes, device = report.sizes, report.device
    heads, width, capacity = sizes.lm.heads, sizes.lm.head_width, sizes.lm.keys
    frequencies = rope_frequencies(width, 10_000.0, device)
    for lanes in sizes.rows:
        layers = 1 if DRY else 2  # more than the cache of the card holds, for more than one lane
        rings = _filled(layers, lanes, heads, capacity, width, device, dtype)
        qkv = torch.randn(lanes, 1, 3, heads, width, device=device).to(_half(device))
        for age in sizes.ages:
            positions = torch.full((lanes + 1,), age - 1, device=device)
            for split in SPLITS[:: 3 if DRY else 1]:
                if late():
                    return
                if split.dot and dtype == torch.float8_e4m3fn:
                    continue
                work = attention.plan(
                    positions, torch.arange(lanes, device=device), 1, capacity, frequencies, split,
                    attention.programs_for(device, split),
                )  # fmt: skip
                row: Row = {"lanes": lanes, "age": age, **_named(split)}
                try:
                    spent = seconds(lambda: [attention.attend(work, qkv, ring) for ring in rings], device) / layers  # noqa: B023
                    out = attention.attend(work, qkv, rings[-1]).view(lanes, heads, width)
                    read = 2 * lanes * heads * min(age, capacity) * width * dtype.itemsize
                    row |= {"us": spent * 1e6, "GB/s": read / spent / 1e9}
                    row |= {"error": _attention_error(out, qkv, rings[-1], work)}
                except Exception as error:  # this way of splitting does not run here
                    row |= {"failed": f"{type(error).__name__}: {str(error)[:100]}"}
                yield row


def _named(split: Split) -> Row:
    return {name: getattr(split, name) for name in Split.__slots__}


def _filled(
    layers: int, lanes: int, heads: int, capacity: int, width: int, device: torch.device, dtype: torch.dtype
) -> list[Ring]:
    """Random keys and values in every slot, made row by row, as whole rings do not fit twice."""
    e4m3 = dtype == torch.float8_e4m3fn
    rings = Rings.allocate(layers, lanes, heads, capacity, width, device, torch.int8 if e4m3 else dtype).layers
    if e4m3:
        rings = tuple(
            Ring(*(replace(half, vectors=half.vectors.view(dtype)) for half in (r.both, r.keys, r.values)))
            for r in rings
        )
    for store in (store for ring in rings for store in (ring.keys, ring.values)):
        for row, vectors in enumerate(store.vectors):
            new = torch.randn(vectors.shape, device=device)
            if store.scales is None:
                vectors.copy_(new)
            elif e4m3:
                store.scales[row] = new.abs().amax(-1) / 448
                vectors.copy_(new / store.scales[row, ..., None])
            else:
                kept, store.scales[row] = quantised(new)
                vectors.copy_(kept)
    return list(rings)


def _attention_error(out: Tensor, qkv: Tensor, ring: Ring, work: attention.Plan) -> float:
    """Of the last lane and head, relative, against f64 on what lies in the ring."""
    lane, head = len(out) - 1, out.shape[1] - 1
    used = int(work.lengths[lane])
    keys, values = (_numbers(store, lane, head, used) for store in (ring.keys, ring.values))
    turn = torch.complex(work.turns[lane, 0, 0].double(), work.turns[lane, 0, 1].double())
    pairs = torch.view_as_complex(qkv[lane, 0, 0, head].double().view(-1, 2))
    query = torch.view_as_real(pairs * turn).flatten()
    share = torch.softmax(keys @ query / math.sqrt(len(query)), dim=0)
    wanted = share @ values
    return float((out[lane, head].double() - wanted).norm() / wanted.norm())


def _numbers(store: Store, lane: int, head: int, used: int) -> Tensor:
    """f64 [used, d]"""
    vectors = store.vectors[lane, head, :used].double()
    return vectors if store.scales is None else vectors * store.scales[lane, head, :used, None]


def products(report: Report, late: Late) -> list[Row]:
    """The step's matrix products by themselves, with more weights than the card's cache holds."""
    lm, device, rows = report.sizes.lm, report.device, list[Row]()
    shapes = {
        "qkv": (3 * lm.width, lm.width), "out": (lm.width, lm.width), "gate": (2 * lm.hidden, lm.width),
        "down": (lm.width, lm.hidden), "text": (lm.text_card, lm.width),
        "depformer in": (8 * lm.depformer_width, lm.width),
        "depformer qkv": (3 * lm.depformer_width, lm.depformer_width),
        "depformer gate": (2 * lm.depformer_hidden, lm.depformer_width),
        "depformer down": (lm.depformer_width, lm.depformer_hidden), "depformer head": (lm.card, lm.depformer_width),
    }  # fmt: skip
    for name, (wide, deep) in shapes.items():
        count = 1 if DRY else max(2, min(40, 600_000_000 // (wide * deep * 2)))
        weights = [torch.randn(wide, deep, device=device).bfloat16() for _ in range(count)]
        for lines in report.sizes.gemm_lines:
            if late():
                return rows
            x = torch.randn(lines, deep, device=device).bfloat16()
            spent = seconds(lambda: [torch.mm(x, weight.t()) for weight in weights], device, 10) / count  # noqa: B023
            rows.append({"product": name, "lines": lines, "us": spent * 1e6, "GB/s": wide * deep * 2 / spent / 1e9})
    return rows


def randomise(module: nn.Module) -> None:
    """Weights that keep numbers near 1, made where they lie."""
    for name, weight in module.named_parameters():
        if "norm" in name and "bias" not in name:
            weight.fill_(1.0)
        elif "table" in name or "centroids" in name:
            weight.normal_()
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5)


def language_model(lm: LMConfig, device: torch.device, dtype: torch.dtype) -> LM:
    model = LM(lm, device, dtype)
    randomise(model)
    return model


def codec(mimi: MimiConfig, device: torch.device) -> Mimi:
    model = Mimi(mimi, device)
    randomise(model)
    return model


def depformer(report: Report, late: Late) -> list[Row]:
    sizes, device = report.sizes, report.device
    model = language_model(replace(sizes.lm, layers=1), device, _half(device))
    rows = list[Row]()
    for lanes in sizes.rows:
        if late():
            break
        hidden = torch.randn(lanes, sizes.lm.width, device=device).to(_half(device))
        text = torch.zeros(lanes, dtype=torch.int64, device=device)
        greedy = seconds(lambda: model.depformer.run(hidden, text, lambda step, logits: logits.argmax(1)), device)  # noqa: B023
        row: Row = {"lanes": lanes, "depformer ms": greedy * 1e3}
        for name, card, top_k in (("text", sizes.lm.text_card, 25), ("code", sizes.lm.card, 250)):
            whole = torch.arange(lanes, device=device)
            state = (whole, whole, whole, torch.full((lanes,), 0.8, device=device), torch.full_like(whole, top_k))
            logits = torch.randn(lanes, card, device=device).to(_half(device))
            row[f"{name} draw us"] = seconds(lambda: sampler.sample(logits, *state, 0), device) * 1e6  # noqa: B023
        rows.append(row)
    return rows


def mimi(report: Report, late: Late) -> list[Row]:
    """Both ways of the codec in each precision; how far its latents are from IEEE f32, and its sound, in dB."""
    sizes, device, rows = report.sizes, report.device, list[Row]()
    model = codec(sizes.mimi, device)
    for lanes in (*sizes.rows, *([] if DRY else [128])):
        pcm, listed = torch.randn(lanes, FRAME_SAMPLES, device=device) * 0.1, torch.arange(lanes, device=device)
        exact, clean = torch.empty(0), torch.empty(0)
        for precision in ("ieee",) if DRY else ("ieee", "tf32x3", "tf32"):
            if late():
                return rows
            state = model.allocate(lanes)
            with computing_in(precision):
                latent = model.encoder.run(pcm, state.encoder, listed)
                exact = latent.clone() if precision == "ieee" else exact
                codes = model.quantizer.encode(exact)
                sound = model.decode(codes, state, listed)
                clean = sound.clone() if precision == "ieee" else clean
                encode_s = seconds(lambda: model.encode(pcm, state, listed), device)  # noqa: B023
                decode_s = seconds(lambda: model.decode(codes, state, listed), device)  # noqa: B023
            error = float((latent - exact).norm() / exact.norm())
            row: Row = {
                "lanes": lanes,
                "precision": precision,
                "encode ms": encode_s * 1e3,
                "decode ms": decode_s * 1e3,
            }
            noise = float((sound - clean).norm() / clean.norm())
            rows.append(row | {"latent error": error, "sound dB": -20 * math.log10(max(noise, 1e-9))})
    return rows


@contextmanager
def computing_in(precision: str) -> Iterator[None]:
    """Convolutions compute their f32 products so."""
    exact = convolution.product
    convolution.product = partial(exact, precision=precision)
    yield
    convolution.product = exact


@dataclass(frozen=True)
class RandomPrompts:
    """No system prompt, or one of so many columns: a wish's text is that number."""

    lm: LMConfig

    def card(self) -> ModelCard:
        return ModelCard("random", ("any",), "any", True, 10_000, ("",) * self.lm.text_card)

    def wish(self, prompt: Prompt) -> Wish:
        return Wish("any", prompt.text or "")

    def columns(self, wish: Wish) -> PromptColumns:
        if not wish.text:
            return bare_start(self.lm)
        plain = len(system_prompt(self.lm, VoiceCodes(torch.zeros(8, 1, dtype=torch.int64)), []))
        more = int(wish.text) - plain
        return system_prompt(self.lm, VoiceCodes(torch.zeros(8, 1, dtype=torch.int64)), [1] * max(0, more))


@dataclass(frozen=True)
class Engine:
    """A runner of random weights, and a clock around its steps."""

    runner: PersonaPlexRunner
    model: PersonaPlex

    @classmethod
    def start(
        cls, model: PersonaPlex, rows: int, lane_counts: Sequence[int], kv_dtype: torch.dtype | None = None
    ) -> Self:
        prompts = RandomPrompts(model.lm.config)
        runner = PersonaPlexRunner(model, prompts, rows, lane_counts=lane_counts, kv_dtype=kv_dtype)
        engine = cls(runner, model)
        engine.open_rows()
        return engine

    def open_rows(self) -> None:
        """A fresh call in every row."""
        for row in range(self.runner.rows):
            left = self.runner.begin(row, Prompt(seed=row))
            while left:
                left = self.runner.prefill(row, 256)

    def set_ages(self, columns: int) -> None:
        state = self.runner.state
        for row in range(self.runner.rows):
            self.runner.fill(row)
        state.lm.temporal.position[: self.runner.rows] = columns

    def step_ms(self, rows: int, times: int, paced: bool = False, between: Callable[[], object] | None = None) -> Row:
        """Time of a step as the engine sees it, host and copies included; `between` runs after each."""
        listed, chance = np.arange(rows), np.random.default_rng(1)
        pcm = chance.integers(-3000, 3000, (rows, FRAME_SAMPLES)).astype(np.int16)
        spans = []
        due = time.perf_counter()
        for _ in range(times):
            if paced:
                due += FRAME_S
                time.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            self.runner.step(listed, pcm)
            spans.append((time.perf_counter() - began) * 1e3)
            if between:
                between()
        p50, p99 = np.percentile(spans, [50, 99])
        return {"p50 ms": float(p50), "p99 ms": float(p99), "max ms": max(spans)}


def whole_model(report: Report, late: Late) -> list[Row]:
    """The whole step with all rows of one age, paced and back to back; then more rows with half the window."""
    sizes, device = report.sizes, report.device
    most, longest = sizes.rows[-1], sizes.ages[-1]
    model = PersonaPlex(language_model(sizes.lm, device, _half(device)), codec(sizes.mimi, device))
    began = time.perf_counter()
    engine = Engine.start(model, most, sizes.rows)
    rows: list[Row] = [{"start and capture s": time.perf_counter() - began, **_memory(device)}]
    seen = dict[tuple[int, int], float]()
    places = [tensor.data_ptr() for _, tensor in tensors(engine.runner.state)]
    peak = _peak(device)
    for age in reversed(sizes.ages):
        for lanes in reversed(sizes.rows):
            if late():
                break
            engine.set_ages(age)
            engine.step_ms(lanes, 3)
            quick = engine.step_ms(lanes, sizes.replays if age == longest else sizes.replays // 3 + 1)
            rows.append({"rows": lanes, "age": age, "paced": False, **quick})
            if age != longest and lanes == most:
                seen[lanes, age] = _number(quick["p99 ms"])
            if age == longest and lanes in (1, most):
                engine.set_ages(age)
                calm = engine.step_ms(lanes, sizes.paced, paced=True)
                seen[lanes, age] = _number(calm["p99 ms"])
                rows.append({"rows": lanes, "age": age, "paced": True, **calm})
    report.rule("memory does not grow with steps", _peak(device) == peak)
    report.rule("state lies where it lay", [t.data_ptr() for _, t in tensors(engine.runner.state)] == places)
    rows += _stages(engine, most) + _joins(report, engine, late)
    report.bar(f"{most} rows, {longest} positions, bf16 keys, paced, p99", seen.get((most, longest)), 40)
    report.bar(f"{most} rows, {sizes.ages[0]} positions, p99", seen.get((most, sizes.ages[0])), 15)
    report.bar("1 row, p99", seen.get((1, longest)), 8)
    del engine
    _give_back(device)
    rows += _more_rows(report, model, late)
    return rows


def _number(value: object) -> float:
    assert isinstance(value, float)
    return value


def _more_rows(report: Report, model: PersonaPlex, late: Late) -> list[Row]:
    """Twice the rows: with half the window, and with the whole of it in bytes."""
    sizes, rows = report.sizes, list[Row]()
    most = 2 * sizes.rows[-1]
    for window, kv_dtype, kind in ((max(1, sizes.lm.keys // 2), None, "bf16"), (sizes.lm.keys, torch.int8, "int8")):
        name = f"{most} rows, {window} positions, {kind} keys, paced, p99"
        if late() or _slow_attention(report):
            report.bar(name, None, 60)
            continue
        model.lm.config = replace(sizes.lm, keys=window)
        engine = Engine.start(model, most, [most], kv_dtype)
        engine.set_ages(window)
        engine.step_ms(most, 3)
        seen = engine.step_ms(most, sizes.paced, paced=True)
        report.bar(name, _number(seen["p99 ms"]), 60)
        rows.append({"rows": most, "age": window, "keys": kind, "paced": True, **seen, **_memory(report.device)})
        model.lm.config = sizes.lm
        del engine
        _give_back(report.device)
    return rows


def _slow_attention(report: Report) -> bool:
    """Whether no way to split reached 70 % of what the card can read: then there is something to be found first."""
    found, card = report.parts.get("attention_bf16"), report.parts.get("ceilings")
    if DRY or not isinstance(found, list) or not isinstance(card, list):
        return False
    reached = [_number(row["GB/s"]) for row in found if "GB/s" in row and row["lanes"] == report.sizes.rows[-1]]
    return max(reached, default=0.0) < 0.7e3 * _number(card[0]["read TB/s"])


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _memory(device: torch.device) -> Row:
    if device.type != "cuda":
        return {}
    return {"allocated GB": torch.cuda.memory_allocated() / 1e9, "reserved GB": torch.cuda.memory_reserved() / 1e9}


def _peak(device: torch.device) -> int:
    """The most bytes that were ever allocated at once."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _stages(engine: Engine, lanes: int) -> list[Row]:
    """Where the time of a step goes, by graphs of its parts."""
    model, state = engine.model, engine.runner.state
    device = model.lm.late.device
    rows = torch.arange(lanes, device=device)
    pcm = torch.randn(lanes, FRAME_SAMPLES, device=device) * 0.1
    codes = torch.zeros(lanes, 8, dtype=torch.int64, device=device)
    column = torch.zeros(lanes, 17, dtype=torch.int64, device=device)
    with torch.inference_mode():
        return [
            {
                "stages of rows": lanes,
                "encode ms": seconds(lambda: model.mimi.encode(pcm, state.mimi, rows), device) * 1e3,
                "temporal ms": seconds(lambda: model.lm.temporal.step(column, state.lm.temporal, rows), device) * 1e3,
                "language model ms": seconds(lambda: model.lm.answer(column, rows, state.lm), device) * 1e3,
                "decode ms": seconds(lambda: model.mimi.decode(codes, state.mimi, rows), device) * 1e3,
            }
        ]


def _joins(report: Report, engine: Engine, late: Late) -> list[Row]:
    """Prompts prefilled, and joined from the cache; then live steps with one join after each."""
    sizes, runner, device = report.sizes, engine.runner, report.device
    last, prompt = runner.rows - 1, Prompt(text=str(sizes.prompt))

    def join(prompt: Prompt = prompt) -> None:
        left = runner.begin(last, prompt)
        while left:
            left = runner.prefill(last, 256)
        _wait(device)

    others = [Prompt(text=str(sizes.prompt - n)) for n in range(1 if DRY else 4)]  # none is in the cache
    cold_s = min(_spent(partial(join, other)) for other in others)
    join()
    warm_s = min(_spent(join) for _ in range(1 if DRY else 10))
    long_s = _spent(partial(join, Prompt(text=str(4 * sizes.prompt))))
    temporal = runner.state.lm.temporal
    prefix = RowImage.take(temporal, last, sizes.prompt)
    copy_s = seconds(lambda: prefix.put(temporal, last, sizes.prompt), device)
    report.bar(f"join: {sizes.prompt} columns prefilled", cold_s * 1e3, 8)
    report.bar(f"join: a cached prefix of {sizes.prompt} columns copied", copy_s * 1e3, 0.1)
    rows: list[Row] = [
        {
            "columns": sizes.prompt,
            "join from cold ms": cold_s * 1e3,
            "whole join from the cache ms": warm_s * 1e3,
            "its prefix copied ms": copy_s * 1e3,
            "copy GB/s": 2 * prefix.bytes / copy_s / 1e9,
            f"{4 * sizes.prompt} columns ms": long_s * 1e3,
        }
    ]
    if not late() and last:
        engine.set_ages(sizes.ages[-1])
        alone = engine.step_ms(last, sizes.paced, paced=True)
        engine.set_ages(sizes.ages[-1])
        beside = engine.step_ms(last, sizes.paced, paced=True, between=join)
        rows += [{"live, no joins": last, **alone}, {"live, a join after each step": last, **beside}]
        if not DRY:
            report.rule("live p99 unmoved by joins", _number(beside["p99 ms"]) < 1.05 * _number(alone["p99 ms"]) + 0.2)
    return rows


def _spent(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _equal(some: Sequence[NDArray[np.int64]], others: Sequence[NDArray[np.int64]]) -> bool:
    return all(map(np.array_equal, some, others))


def correctness(report: Report, late: Late) -> list[Row]:
    """On a small model: replay and eager, alone and in a batch, unlisted rows, two runs, and the CPU's plain torch."""
    device, sizes = report.device, TINY
    lm = replace(sizes.lm, width=128, heads=2, depformer_width=128, depformer_heads=2, keys=40) if not DRY else sizes.lm
    model = PersonaPlex(language_model(lm, device, torch.float32), codec(sizes.mimi, device))
    frames, rows = (1, 2) if DRY else (60, 4)
    sound = np.random.default_rng(2).integers(-3000, 3000, (frames, rows, FRAME_SAMPLES)).astype(np.int16)

    engine = Engine.start(model, rows, [rows])
    runner = engine.runner

    def talk(listed: Sequence[int]) -> list[NDArray[np.int64]]:
        engine.open_rows()
        said = []
        for frame in sound:
            pcm, text, _ = runner.step(np.array(listed), frame[list(listed)])
            said.append(np.concatenate([pcm, text[:, None], runner.codes], axis=1))
        return said

    everyone = list(range(rows))
    whole, turned = talk(everyone), talk(everyone[::-1])
    report.rule("a row of a second call is the same, and in another lane", _equal(whole, [a[::-1] for a in turned]))
    engine.open_rows()
    fresh = [tensor[1:rows].clone() for _, tensor in tensors(runner.state)]
    alone = talk([0])
    report.rule("a row alone equals it in a batch", _equal([a[:1] for a in whole], alone))
    kept = [tensor[1:rows] for _, tensor in tensors(runner.state)]
    report.rule("unlisted rows are untouched", all(map(torch.equal, fresh, kept)))
    report.rule("all sound is finite", bool(np.isfinite(np.stack(whole).astype(np.float64)).all()))
    _eager(report, model, runner, sound)
    _beside_plain_torch(report, model, sound, whole)
    return [{"frames": frames, "rows": rows}]


@torch.inference_mode()
def _eager(report: Report, model: PersonaPlex, runner: PersonaPlexRunner, sound: Pcm) -> None:
    """One more frame of all rows: once by the runner's graph, once eagerly from a copy of the state."""
    rows = sound.shape[1]
    twin = model.allocate(rows)
    for (_, into), (_, source) in zip(tensors(twin), tensors(runner.state), strict=True):
        into.copy_(source)
    pcm, text, _ = runner.step(np.arange(rows), sound[0])
    listed = torch.arange(rows, device=report.device)
    said = model.step(torch.from_numpy(sound[0]).to(report.device), listed, twin)
    same = np.array_equal(said.pcm.cpu().numpy(), pcm) and np.array_equal(said.text.cpu().numpy(), text)
    report.rule("replay equals eager, bit for bit", same)


def _beside_plain_torch(report: Report, model: PersonaPlex, sound: Pcm, whole: list[NDArray[np.int64]]) -> None:
    """Greedy or sampled, the tokens of the kernels are those of plain torch on the CPU, but for close calls."""
    cpu = torch.device("cpu")
    twin = PersonaPlex(LM(model.lm.config, cpu, torch.float32), Mimi(model.mimi.config, cpu))
    for to, source in ((twin.lm, model.lm), (twin.mimi, model.mimi)):
        for into, weight in zip(to.parameters(), source.parameters(), strict=True):
            into.copy_(weight.cpu())
    rows = sound.shape[1]
    with plain_torch():
        engine = Engine.start(twin, rows, [rows])
        pcm, text, _ = engine.runner.step(np.arange(rows), sound[0])
        first = np.concatenate([text[:, None], engine.runner.codes], axis=1)
    report.rule(
        "tokens of the first frame equal plain torch's on the CPU", np.array_equal(first, whole[0][:, FRAME_SAMPLES:])
    )


@contextmanager
def plain_torch() -> Iterator[None]:
    usable = ops.usable
    ops.usable = lambda x: False
    yield
    ops.usable = usable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    parser.add_argument("--dry", action="store_true", help="the same code on the CPU at tiny sizes; measures nothing")
    arguments = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        print("there is no GPU that torch sees; --dry runs the check without one", file=sys.stderr)
        return 2
    if DRY:
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    report = Report(TINY if DRY else FULL, torch.device("cpu" if DRY else "cuda"), time.monotonic())
    with torch.inference_mode():
        for part, limit_s in PARTS:
            report.run(part.__name__, limit_s, part)
    print_bars(report)
    if arguments.json:
        found = {"dry": DRY, "parts": report.parts, "bars": [asdict(bar) for bar in report.bars]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    failed = [bar for bar in report.bars if bar.passed is False or (bar.passed is None and not DRY)]
    broken = [name for name, rows in report.parts.items() if isinstance(rows, str)]
    return 1 if failed or broken else 0


PARTS: tuple[tuple[Callable[[Report, Late], list[Row]], float], ...] = (
    (machine, 10),
    (ceilings, 15),
    (correctness, 60),
    (attention_bf16, 60),
    (attention_int8, 30),
    (products, 30),
    (depformer, 30),
    (mimi, 30),
    (whole_model, 210),
    (attention_e4m3, 15),
    (references, 30),
)
"""What is right comes before what is fast: a card's time may end early."""


def print_bars(report: Report) -> None:
    for name, rows in report.parts.items():
        if isinstance(rows, str):
            print(f"part {name}: {rows}")
    for bar in report.bars:
        verdict = {True: "pass", False: "FAIL", None: "not judged"}[bar.passed]
        print(f"{verdict:>10}  {bar.name}  ({bar.seen})")


if __name__ == "__main__":
    sys.exit(main())
