"""Compile the kernels for a GPU that is not there, exactly as a step at released sizes launches them.

A step runs on the `meta` device, where a launch is not carried out but written down; from what was written down follows
what Triton would compile: types, which numbers are constants, which are multiples of 16, which pointers are aligned.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """One program that Triton would compile: equal for all launches that share it."""

    kernel: Any = field(compare=False)
    name: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    multiples_of_16: tuple[str, ...]
    warps: int
    stages: int

    @property
    def label(self) -> str:
        pointers = {kind for _, kind in self.signature if kind.startswith("*")} - {"*i32", "*i64"}
        numbers = (f"{name}={value}" for name, value in self.constants)
        return f"{self.name}({' '.join(sorted(pointers))}; {' '.join(numbers)}; {self.warps} warps)"


@dataclass(frozen=True)
class Compiled:
    registers: int
    spilled: int
    """Bytes of stack and local memory"""
    shared: int
    instructions: Counter[str]
    loop: int
    """Instructions of the innermost loop that multiplies, 0 without one"""

    def count(self, start: str) -> int:
        return sum(number for name, number in self.instructions.items() if name.startswith(start))


class Recorder:
    """Stands in for `launch`: writes down what would be compiled, and how often it would be launched."""

    def __init__(self) -> None:
        self.launches = Counter[Build]()
        self.whole_step = Counter[Build]()
        """Of one step at released sizes, for who sets it apart"""
        self.whole_join = Counter[Build]()
        """Of one join, likewise"""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: object, **options: int) -> None:
        self.launches[_build(kernel, arguments, options)] += 1


def _build(kernel: Any, arguments: tuple[object, ...], options: dict[str, int]) -> Build:
    signature, constants, multiples = [], [], []
    for parameter, value in zip(kernel.params, arguments, strict=True):
        name = parameter.name
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
            signature.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, Tensor):
            signature.append((name, f"*{_TYPES[value.dtype]}"))
            if value.storage_offset() * value.element_size() % 16 == 0:
                multiples.append(name)
        elif isinstance(value, int):
            signature.append((name, "i32" if abs(value) < 1 << 31 else "i64"))
            if special and value % 16 == 0:
                multiples.append(name)
        else:
            signature.append((name, "fp32"))
    warps, stages = options.get("num_warps", 4), options.get("num_stages", 3)
    kernel_name = kernel.fn.__name__
    return Build(kernel, kernel_name, tuple(signature), tuple(constants), tuple(multiples), warps, stages)


@cache
def compile_for(build: Build, capability: int = 90) -> Compiled:
    """Compile, and look at the machine code. Raises Triton's error where it cannot be compiled."""
    names = [parameter.name for parameter in build.kernel.params]
    source = ASTSource(
        build.kernel,
        dict(build.signature),
        constexprs={(names.index(name),): value for name, value in build.constants},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in build.multiples_of_16},
    )
    options = {"num_warps": build.warps, "num_stages": build.stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        usage, code = _dump("-res-usage", file.name), _dump("-sass", file.name)
    registers, stack, local = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", code, re.M)
    return Compiled(registers, stack + local, built.metadata.shared, Counter(instructions), _loop(code))


def _loop(code: str) -> int:
    """The shortest way back to an earlier address that passes 16 multiply-adds or more."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", code, re.M)]
    lengths = []
    for at, text in lines:
        back = re.search(r"BRA.*?(0x[0-9a-f]+)", text)
        if back and int(back[1], 16) < at:
            body = [inner for place, inner in lines if int(back[1], 16) <= place <= at]
            if sum(1 for inner in body if re.search(r"\b(FFMA|HMMA|HGMMA)", inner)) >= 16:
                lengths.append(len(body))
    return min(lengths, default=0)


def _dump(option: str, file: str) -> str:
    done = subprocess.run([TOOLS / "cuobjdump", option, file], capture_output=True, text=True, check=True)
    return done.stdout
