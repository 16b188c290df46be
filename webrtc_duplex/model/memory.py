"""What a model will need of memory, counted on shapes before a byte of it is allocated."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.config import LMConfig, MimiConfig
from webrtc_duplex.model.mimi import Mimi
from webrtc_duplex.model.personaplex import LM, PersonaPlex
from webrtc_duplex.model.streaming import tensors

_META = torch.device("meta")
_CUDA_OVERHEAD = 2 << 30
"""Context, libraries and the pools of captured graphs, rounded up."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a model needs on its device; one row more than callers can have is padding's."""

    weights: int
    row: int
    workspace: int
    """What a step and a prefill of half a window allocate and give back, and what the device's libraries keep."""

    def total(self, rows: int) -> int:
        return self.weights + self.row * (rows + 1) + self.workspace

    def rows_in(self, available: int) -> int:
        """How many callers fit."""
        return max(0, (available - self.total(0)) // self.row)

    def require(self, rows: int, available: int) -> None:
        """Raise CheckpointError, with the numbers, if `rows` callers do not fit."""
        if self.total(rows) > available:
            raise CheckpointError(
                f"{rows} rows do not fit: {self} make {_size(self.total(rows))}, and {_size(available)} are free; "
                f"{self.rows_in(available)} rows would fit"
            )

    def __str__(self) -> str:
        return f"weights of {_size(self.weights)}, {_size(self.row)} a row, a workspace of {_size(self.workspace)}"


def plan_memory(
    lm: LMConfig, mimi: MimiConfig, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> MemoryPlan:
    """Count the memory of a model of these sizes; keys and values as the weights, or int8."""
    language, codec = LM(lm, _META, dtype), Mimi(mimi, _META)
    state = PersonaPlex(language, codec).allocate(1, kv_dtype)  # and the scratch row
    overhead = _CUDA_OVERHEAD if device.type == "cuda" else 0
    return MemoryPlan(
        weights=_bytes(tensor for module in (language, codec) for tensor in module.parameters()),
        row=_bytes(tensor for _, tensor in tensors(state)) // 2,
        workspace=_prefill_bytes(lm, dtype, state.lm.temporal.rings.layers[0].dtype) + overhead,
    )


def available_bytes(device: torch.device) -> int:
    """Memory that is free now on the device; of the host's what this process' control groups leave it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):  # free, or in caches that can be dropped
            groups = Path("/proc/self/cgroup")
            rooms = list(group_rooms(groups.read_text(), Path("/sys/fs/cgroup"))) if groups.exists() else []
            return min([int(line.split()[1]) << 10, *rooms])
    raise CheckpointError("/proc/meminfo does not tell how much memory is free")


def group_rooms(groups: str, mounted: Path) -> Iterator[int]:
    """Bytes that each control group of a process, given as in /proc/PID/cgroup, and each one around it has left.

    cgroups(7), versions 2 and 1. Where a container sees its own group only, that is mounted at the top.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = mounted, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = mounted / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in [group, *group.parents][: 1 + len(group.relative_to(top).parts)]:
            if (folder / names[0]).exists():
                yield from _room(folder, *names)


def _room(folder: Path, limit: str, used: str, idle: str) -> Iterator[int]:
    """Nothing where there is no limit; what lies in caches that can be dropped counts as free."""
    most = (folder / limit).read_text().strip()
    if most != "max":
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        yield max(0, int(most) - int((folder / used).read_text()) + int(stat.get(idle, 0)))


def _prefill_bytes(lm: LMConfig, dtype: torch.dtype, attended: torch.dtype) -> int:
    """The most that one layer holds at once while half a window of columns runs through it.

    What is attended to lies there in `attended` numbers.
    """
    columns = lm.keys // 2
    wide = columns * (lm.width * 8 + lm.hidden * 3)  # norm in f32, qkv, attended; gate, value, product
    attention = columns * lm.keys + 2 * lm.keys * lm.width  # mask; keys and values put together
    return wide * dtype.itemsize + attention * attended.itemsize


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 29 else f"{count / (1 << 20):.1f} MiB"
