#!/usr/bin/env python3
"""Run our model on a pack of golden numbers and compare: one line a file, exit code 1 if any is missed.

    scripts/check_golden.py [DIR]      default: tests/reference

A pack is a folder of the layout that `tests/reference/README.md` describes; sizes, lengths, schedules are read from it.
Integers must be equal; floats must satisfy abs(a - b) <= 1e-5 + 1e-5 * abs(b).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from webrtc_duplex.model.config import LMConfig, MimiConfig  # noqa: E402
from webrtc_duplex.model.depformer import Choose  # noqa: E402
from webrtc_duplex.model.mimi import Mimi, MimiState  # noqa: E402
from webrtc_duplex.model.personaplex import LM, LMState  # noqa: E402
from webrtc_duplex.model.prompts import (  # noqa: E402
    PromptColumns,
    Voice,
    VoiceCodes,
    VoiceEmbeddings,
    bare_start,
    system_prompt,
)
from webrtc_duplex.model.streaming import Hints, tensors, zero_row  # noqa: E402
from webrtc_duplex.model.tensor_file import TensorFile, fill  # noqa: E402

CPU = torch.device("cpu")
TOLERANCE = 1e-5
LANES = 4
"""A single stream runs beside scratch lanes: below 4 the CPU's matrix kernels round differently."""

Json = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


@dataclass
class Check:
    """What came of one file."""

    file: str
    worst: float = 0.0
    """Largest absolute difference of floats."""
    excess: float = 0.0
    """Largest difference over what is allowed; up to 1 passes."""
    unequal: int = 0
    """Integers that differ."""
    compared: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.unequal == 0 and self.excess <= 1.0 and not self.remarks and self.compared > 0

    def compare(self, ours: Tensor, golden: Tensor, name: str) -> None:
        """Compare one tensor by its kind's rule."""
        if ours.shape != golden.shape:
            self.remarks.append(f"{name}: shape {list(ours.shape)}, wanted {list(golden.shape)}")
            return
        self.compared += golden.numel()
        if not golden.is_floating_point():
            self.unequal += int((ours != golden).sum())
            return
        difference = (ours.double() - golden.double()).abs()
        share = difference / (TOLERANCE + TOLERANCE * golden.double().abs())
        self.worst = max(self.worst, float(difference.max()))
        self.excess = max(self.excess, float(share.nan_to_num(nan=torch.inf).max()))

    def demand(self, holds: bool, remark: str) -> None:
        if not holds:
            self.remarks.append(remark)

    def __str__(self) -> str:
        verdict = "ok  " if self.passed else "MISS"
        numbers = f"largest difference {self.worst:.1e} ({self.excess:.2f} of the tolerance), unequal {self.unequal}"
        return "; ".join([f"{verdict} {self.file:<44} {numbers} of {self.compared}", *self.remarks])


@torch.inference_mode()
def checks(pack: Path) -> Iterator[Check]:
    """Every file of expected numbers in the pack, run and compared."""
    codec = pack / "mimi"
    if codec.is_dir():
        yield from check_codec(codec)
    if (pack / "mimi_rows").is_dir():
        yield check_codec_rows(codec, pack / "mimi_rows" / "rows.safetensors")
    for file in sorted(pack.glob("*/teacher_forced.safetensors")):
        yield check_teacher_forced(file)
    for config in sorted(pack.glob("*/config.json")):
        entry = json.loads(config.read_text())
        if "variants" in entry:
            yield from check_loop(config.parent, entry)


def conventions(nominal: int) -> dict[str, int]:
    """How many keys a query sees once the ring of `nominal` slots is full, by the suffix of the tensors' names."""
    return {"nvidia": nominal - 1, "moshi": nominal}


# ---- codec


def load_mimi(folder: Path, keys: int | None = None) -> Mimi:
    config = MimiConfig.from_json(json.loads((folder / "config.json").read_text()))
    mimi = Mimi(replace(config, keys=keys or config.keys), CPU)
    fill(mimi, mimi.pieces(), TensorFile(folder / "model.safetensors"))
    return mimi


def nominal_context(folder: Path) -> int:
    context = json.loads((folder / "config.json").read_text())["transformer"]["context"]
    return int(context)


def alone(row: int, rows: int) -> Tensor:
    """Lanes of one row, filled up with the scratch row."""
    return torch.tensor([row] + [rows] * (LANES - 1))


def in_lanes(x: Tensor) -> Tensor:
    """One row's input [...] in all lanes [LANES, ...]."""
    return x.expand(LANES, *x.shape).clone()


def check_codec(folder: Path) -> Iterator[Check]:
    stream, decode = load_file(folder / "stream.safetensors"), load_file(folder / "decode.safetensors")
    offline = load_file(folder / "offline.safetensors")
    streamed, offlined = Check("mimi/stream.safetensors"), Check("mimi/offline.safetensors")
    for name, keys in conventions(nominal_context(folder)).items():
        mimi = load_mimi(folder, keys)
        codes, latents, pcm = run_codec(mimi, stream["pcm_in_int16"].flatten())
        ours = {"codes": codes, "latent": latents, "pcm_out": pcm[None, None]}
        for what in ours.keys() & {key.removesuffix(f"_{name}") for key in stream}:
            streamed.compare(ours[what], stream[f"{what}_{name}"], what)
        frames = offline["codes"].shape[1]
        offlined.compare(codes[:, :frames], offline["codes"], "codes")
        offlined.compare(decode_stream(mimi, offline["codes"]), offline["pcm_out"].flatten(), "pcm_out")
    yield streamed
    yield offlined
    decoded = Check("mimi/decode.safetensors")
    for name, keys in conventions(nominal_context(folder)).items():
        if f"pcm_out_{name}" in decode:
            pcm = decode_stream(load_mimi(folder, keys), decode["codes"])
            decoded.compare(pcm, decode[f"pcm_out_{name}"].flatten(), "pcm_out")
    yield decoded


def run_codec(mimi: Mimi, pcm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode and decode a stream of int16 samples: codes [8, n], latents [D, n], pcm [n * 1920]."""
    state, rows = mimi.allocate(1), alone(0, 1)
    codes, latents, sound = [], [], []
    for frame in pcm.view(-1, 1920).float() / 32768:
        latent = mimi.encoder.run(in_lanes(frame), state.encoder, rows)
        chosen = mimi.quantizer.encode(latent)
        latents.append(latent[0])
        codes.append(chosen[0])
        sound.append(mimi.decode(chosen, state, rows)[0])
    return torch.stack(codes, 1), torch.stack(latents, 1), torch.cat(sound)


def decode_stream(mimi: Mimi, codes: Tensor) -> Tensor:
    state, rows = mimi.allocate(1), alone(0, 1)
    return torch.cat([mimi.decode(in_lanes(frame), state, rows)[0] for frame in codes.T])


def check_codec_rows(codec: Path, file: Path) -> Check:
    check, golden = Check("mimi_rows/rows.safetensors"), load_file(file)
    for name, keys in conventions(nominal_context(codec)).items():
        if f"codes_{name}" not in golden:
            continue
        codes, pcm, untouched = run_codec_rows(load_mimi(codec, keys), golden)
        check.compare(codes, golden[f"codes_{name}"], "codes")
        check.demand(untouched, f"{name}: a masked row changed")
        if f"pcm_out_{name}" in golden:
            check.compare(pcm, golden[f"pcm_out_{name}"], "pcm_out")
    return check


def run_codec_rows(mimi: Mimi, golden: Tensors) -> tuple[Tensor, Tensor, bool]:
    """Codes [step, row, 8] with -1 where masked, pcm of what was executed, whether masked rows stayed bit for bit."""
    pcm_in, executed, resets = golden["pcm_in_int16"], golden["exec_mask"], golden["reset_before_step"]
    state = mimi.allocate(pcm_in.shape[1])
    codes, sound, untouched = [], [], True
    for pcm, active, reset in zip(pcm_in, executed, resets, strict=True):
        for row in reset.nonzero().flatten().tolist():
            zero_row(state, row)
        before = snapshot(state, ~active)
        rows = active.nonzero().flatten()
        chosen = torch.full((len(active), 8), -1)
        if len(rows):
            chosen[rows] = mimi.encode(pcm[rows].float() / 32768, state, rows)
            sound.append(mimi.decode(chosen[rows], state, rows))
        untouched &= all(torch.equal(a, b) for a, b in zip(before, snapshot(state, ~active), strict=True))
        codes.append(chosen)
    return torch.stack(codes), torch.cat(sound), untouched


def snapshot(state: MimiState, rows: Tensor) -> list[Tensor]:
    return [tensor[: len(rows)][rows].clone() for _, tensor in tensors(state)]


# ---- language model


def load_lm(folder: Path, entry: Json, keys: int) -> LM:
    lm = LM(replace(LMConfig.from_json(entry), keys=keys), CPU, torch.float32)
    fill(lm, lm.pieces(), TensorFile(folder / "model.safetensors"))
    return lm


def check_teacher_forced(file: Path) -> Check:
    check, golden = Check(f"{file.parent.name}/{file.name}"), load_file(file)
    entry = json.loads((file.parent / "config.json").read_text())
    for name, keys in conventions(entry["context"]).items():
        if f"hidden_{name}" not in golden:
            continue
        hidden, text, depformer = run_teacher_forced(load_lm(file.parent, entry, keys), golden)
        check.compare(hidden, golden[f"hidden_{name}"], "hidden")
        check.compare(text, golden[f"text_logits_{name}"], "text_logits")
        check.compare(depformer, golden[f"depformer_logits_{name}"], "depformer_logits")
    return check


def run_teacher_forced(lm: LM, golden: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden vectors [T, D], text logits [T, V], depformer logits [T, 8, card] of the forced columns."""
    state, rows = lm.allocate(1).temporal, alone(0, 1)
    hidden, text, depformer = [], [], []
    for column, said, codes in zip(golden["columns"], golden["forced_text"], golden["forced_audio"], strict=True):
        h = lm.temporal.step(in_lanes(column), state, rows)
        logits: list[Tensor] = []
        lm.depformer.run(h, in_lanes(said), forced(codes, logits))
        hidden.append(h[0])
        text.append(lm.temporal.text_logits(h)[0])
        depformer.append(torch.stack(logits))
    return torch.stack(hidden), torch.stack(text), torch.stack(depformer)


def forced(codes: Tensor, logits: list[Tensor]) -> Choose:
    """Stand in for sampling: give the codes [8] as told, and keep lane 0's logits."""

    def choose(step: int, of_step: Tensor) -> Tensor:
        logits.append(of_step[0])
        return codes[step].expand(LANES)

    return choose


# ---- the loop


def check_loop(folder: Path, entry: Json) -> Iterator[Check]:
    inputs = load_file(folder / "inputs.safetensors")
    for variant in entry["variants"].values():
        check, golden = Check(f"{folder.name}/{variant['file']}"), load_file(folder / variant["file"])
        lm = load_lm(folder, loop_config(entry), variant["keys_attended_when_full"])
        for voice in voices(folder, inputs) if variant["voice_prompt"] else [None]:
            compare_loop(check, run_loop(lm, variant, inputs, voice), golden)
        yield check


def loop_config(entry: Json) -> Json:
    loop: Json = entry["loop"]
    return {**entry["lm"], "silence_codes": loop["silence_codes"], "sine_codes": loop["sine_codes"]}


def voices(folder: Path, inputs: Tensors) -> list[Voice]:
    """The same voice by both routes: as codes, and as the reference saved it."""
    found: list[Voice] = [VoiceCodes(inputs["voice_codes"].long())]
    if (folder / "voice.pt").exists():
        saved = torch.load(folder / "voice.pt", weights_only=True, map_location=CPU)
        found.append(VoiceEmbeddings(saved["embeddings"].flatten(1), saved["cache"][0]))
    return found


@dataclass(frozen=True)
class Loop:
    """A greedy call, in the order of the reference, which is one call later than ours."""

    columns: Tensor
    """[n, 17]; where a voice's embeddings stand in, its columns are unknown: -1"""
    outputs: Tensor
    """[F, 9]: text and codes; -1 before the first"""
    text_logits: Tensor
    """[F - first, V], of live call `first` and later"""
    first: int
    """The first live call that has something to predict from"""


def run_loop(lm: LM, variant: Json, inputs: Tensors, voice: Voice | None) -> Loop:
    prompt = bare_start(lm.config)
    if variant["system_prompts_run"]:
        tokens = inputs["text_prompt_tokens"].tolist() if variant["text_prompt"] else []
        prompt = system_prompt(lm.config, voice, tokens)
    state = lm.allocate(1)
    hidden = lm.prefill(prompt, 0, 0, len(prompt), state)
    lm.open(prompt, lm.consider(hidden), 0, state)
    bare = not variant["system_prompts_run"]  # then frame 0 is dropped, and nothing is said for it
    live = inputs["user_codes"].long().T[int(bare) : variant["live_frames"] - 1]
    columns, outputs, logits = talk(lm, live, state)
    last_prompt_frame = torch.cat([prompt.tokens[-1:, 0], prompt.tail_agent])
    silent = torch.full((2, 9), -1) if bare else last_prompt_frame[None]
    return Loop(
        columns=torch.cat([known(prompt), columns])[: variant["prompt_frames_P"] - 1 + variant["live_frames"]],
        outputs=torch.cat([silent, outputs]),
        text_logits=torch.stack([lm.temporal.text_logits(hidden)[0], *logits]),
        first=int(bare),
    )


def known(prompt: PromptColumns) -> Tensor:
    columns = prompt.tokens.clone()
    if prompt.embeddings is not None:
        columns[: len(prompt.embeddings)] = -1
    return columns


def talk(lm: LM, live: Tensor, state: LMState) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Caller's codes [n, 8] -> columns heard [n, 17], frames said [n, 9], text logits after each."""
    rows = alone(0, 1)
    columns, outputs, logits = [], [], []
    for heard in live:
        column = lm.complete(in_lanes(heard), rows, state)
        answer = lm.answer(column, rows, state, Hints(greedy=True))
        columns.append(column[0])
        outputs.append(torch.cat([column[0, :1], answer.codes[0]]))
        logits.append(lm.temporal.text_logits(answer.hidden)[0])
    return torch.stack(columns), torch.stack(outputs), logits


def compare_loop(check: Check, ours: Loop, golden: Tensors) -> None:
    columns, wanted = ours.columns, golden["input_columns"]
    told = (columns >= 0).all(1)
    check.compare(columns[told].to(wanted.dtype), wanted[told], "input_columns")
    check.compare(ours.outputs.to(golden["outputs"].dtype), golden["outputs"], "outputs")
    check.compare((ours.outputs >= 0).all(1), golden["output_valid"], "output_valid")
    if "live_text_logits" in golden:
        check.compare(ours.text_logits, golden["live_text_logits"][ours.first :], "live_text_logits")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare our model with a pack of golden numbers.")
    parser.add_argument("pack", nargs="?", type=Path, default=ROOT / "tests" / "reference")
    torch.set_num_threads(1)
    passed = []
    for check in checks(parser.parse_args().pack):
        print(check)
        passed.append(check.passed)
    if not passed:
        print("no pack there")
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
