"""A safetensors file, mapped and not read: only the pages of what is used ever leave the disk.

The format: eight bytes of length, a JSON table of names with dtype, shape and place, then the numbers themselves.
"""

import json
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.weights import Piece, Shape, write

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_MAX_HEADER_BYTES = 100_000_000
"""As the format's own library."""

_OLD_NAMES = (
    (re.compile(r"_codebook\.inited$"), "_codebook._initialized"),
    (re.compile(r"_codebook\.cluster_size$"), "_codebook.cluster_usage"),
    (re.compile(r"_codebook\.(embed_avg|embed_sum)$"), "_codebook.embedding_sum"),
)
"""What early codec files call their buffers (Kyutai's first releases)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's line of the table; `start` counts from the beginning of the file."""

    dtype: str
    shape: Shape
    start: int

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()


class TensorFile:
    """The table of a file and, on demand, views of its tensors."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises CheckpointError if it is missing, cut short or no safetensors file."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path} is empty, not a safetensors file") from error
        self.entries = self._read_table()

    def tensor(self, key: str) -> Tensor:
        """A view of the tensor in the file; only what is read of it is read from the disk."""
        entry = self.entries[key]
        if not entry.count:
            return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        flat = torch.frombuffer(self._memory, dtype=_DTYPES[entry.dtype], count=entry.count, offset=entry.start)
        return flat.view(entry.shape)

    def require(self, key: str, shape: Shape) -> None:
        """Raise CheckpointError unless the file holds floats of this shape under this name."""
        if key not in self.entries:
            raise CheckpointError(f"{self.path} lacks {key!r}: wanted {list(shape)}, found no such tensor")
        entry = self.entries[key]
        if entry.shape != shape:
            raise CheckpointError(f"{self.path}: {key!r} must be {list(shape)}, but is {list(entry.shape)}")
        if entry.dtype not in _DTYPES or not _DTYPES[entry.dtype].is_floating_point:
            raise CheckpointError(f"{self.path}: {key!r} must be BF16, F16, F32 or F64, but is {entry.dtype}")

    def _read_table(self) -> Mapping[str, Entry]:
        size = len(self._memory)
        length = struct.unpack_from("<Q", self._memory)[0] if size >= 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path} is no safetensors file: it does not begin with the length of a table")
        if 8 + length > size:
            raise CheckpointError(f"{self.path} is cut short: its table alone needs {8 + length} bytes, it has {size}")
        try:
            table = json.loads(self._memory[8 : 8 + length])
            table.pop("__metadata__", None)
            entries = {_current_name(key): self._entry(key, line, 8 + length) for key, line in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} is no safetensors file: its table cannot be understood") from error
        return entries

    def _entry(self, key: str, line: Mapping[str, object], base: int) -> Entry:
        dtype, shape, offsets = line["dtype"], line["shape"], line["data_offsets"]
        if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
            raise TypeError(key)
        start, end = (base + int(offset) for offset in offsets)
        entry = Entry(dtype, tuple(int(length) for length in shape), start)
        if min(entry.shape, default=0) < 0 or start < base:
            raise ValueError(key)
        if end > len(self._memory):
            raise CheckpointError(
                f"{self.path} is cut short: {key!r} ends at byte {end}, the file at byte {len(self._memory)}; "
                "copy or download it again"
            )
        if dtype in _DTYPES and end - start != entry.count * _DTYPES[dtype].itemsize:
            raise ValueError(key)
        return entry


def _current_name(key: str) -> str:
    for pattern, name in _OLD_NAMES:
        key = pattern.sub(name, key)
    return key


def check(pieces: Iterable[Piece], file: TensorFile, unread: re.Pattern[str]) -> None:
    """Raise CheckpointError unless the file and the pieces fit each other.

    Every tensor that the pieces are made of must be there, in its exact shape. What else the file holds must be of a
    name that `unread` matches whole: a layer or a bias too many is a model that ours is not.
    """
    used = set[str]()
    for piece in pieces:
        for key, shape in piece.sources:
            file.require(key, shape)
            used.add(key)
    surplus = [key for key in file.entries if key not in used and not unread.fullmatch(key)]
    if surplus:
        first = f"{surplus[0]!r} {list(file.entries[surplus[0]].shape)}"
        raise CheckpointError(
            f"{file.path} holds {len(surplus)} tensors that this model has no use for, such as {first}: "
            "it is of another model, or of another size than its config says"
        )


@torch.no_grad()
def fill(module: nn.Module, pieces: Iterable[Piece], file: TensorFile) -> None:
    """Write the file's tensors into the module's own, piece by piece: nothing is held twice.

    The tensors keep their device and dtype; the file's are converted on the way.
    """
    targets = dict(module.named_parameters()) | dict(module.named_buffers())
    for piece in pieces:
        made = piece.make(*(file.tensor(key) for key, _ in piece.sources))
        write(targets[piece.target][piece.into], made)
