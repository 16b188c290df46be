"""Safetensors files: mapped, checked to the last shape, written into modules piece by piece."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.tensor_file import TensorFile, check, fill
from webrtc_duplex.model.weights import Piece, one

NOTHING = re.compile("(?!)")


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3, dtype=dtype), requires_grad=False)
        self.table: Tensor
        self.register_buffer("table", torch.empty(4))


PIECES = [
    one("weight", "a", (3,), into=0),
    one("weight", "b", (3,), into=1),
    Piece("table", (), (("sum", (4,)), ("usage", (4,))), torch.div),
]


def contents(**changes: Tensor) -> dict[str, Tensor]:
    return {
        "a": torch.tensor([1.0, 2, 3]),
        "b": torch.tensor([4.0, 5, 6], dtype=torch.bfloat16),
        "sum": torch.arange(4.0),
        "usage": torch.full((4,), 2.0),
    } | changes


def saved(path: Path, tensors: dict[str, Tensor]) -> TensorFile:
    save_file(tensors, path / "model.safetensors")
    return TensorFile(path / "model.safetensors")


def test_every_tensor_is_what_was_saved(tmp_path: Path) -> None:
    tensors = contents(scalar=torch.tensor(5), none=torch.zeros(0, 3), flags=torch.tensor([True, False]))
    file = saved(tmp_path, tensors)
    assert file.entries.keys() == tensors.keys()
    for key, wanted in tensors.items():
        assert torch.equal(file.tensor(key), wanted)


def test_pieces_fill_the_modules_own_tensors_in_their_dtype(tmp_path: Path) -> None:
    module = Small(torch.bfloat16)
    weight = module.weight
    fill(module, PIECES, saved(tmp_path, contents()))
    assert module.weight is weight and weight.dtype == torch.bfloat16
    assert weight.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert module.table.tolist() == [0, 0.5, 1, 1.5]


def test_a_tensor_is_a_view_of_the_file_and_not_a_copy(tmp_path: Path) -> None:
    file = saved(tmp_path, contents(large=torch.ones(1 << 20)))
    first, second = file.tensor("large"), file.tensor("large")
    assert first.data_ptr() == second.data_ptr()


def test_names_of_early_codec_files_are_understood(tmp_path: Path) -> None:
    book = "quantizer.rvq_first.vq.layers.0._codebook"
    old = {f"{book}.{name}": torch.zeros(1) for name in ("inited", "cluster_size", "embed_avg")}
    wanted = {f"{book}.{name}" for name in ("_initialized", "cluster_usage", "embedding_sum")}
    assert saved(tmp_path, old).entries.keys() == wanted


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (
            {k: v for k, v in contents().items() if k != "b"},
            r"model\.safetensors lacks 'b': wanted \[3\], found no such",
        ),
        (contents(a=torch.zeros(4)), r"model\.safetensors: 'a' must be \[3\], but is \[4\]"),
        (contents(a=torch.zeros(3, dtype=torch.int64)), "'a' must be BF16, F16, F32 or F64, but is I64"),
        (contents(a=torch.zeros(3, dtype=torch.float8_e4m3fn)), "'a' must be BF16, F16, F32 or F64, but is F8_E4M3"),
        (contents(c=torch.zeros(7)), r"holds 1 tensors that this model has no use for, such as 'c' \[7\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_a_sentence(
    tensors: dict[str, Tensor], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        check(PIECES, saved(tmp_path, tensors), NOTHING)


def test_what_is_known_to_be_unread_is_no_surplus(tmp_path: Path) -> None:
    check(PIECES, saved(tmp_path, contents(unheard=torch.zeros(7))), re.compile("unheard"))


def table(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "is empty"),
        (b"PK\3\4", "does not begin with the length of a table"),
        (b"\xff" * 100, "does not begin with the length of a table"),
        (struct.pack("<Q", 1000) + b"{", "its table alone needs 1008 bytes, it has 9"),
        (struct.pack("<Q", 4) + b"null", "its table cannot be understood"),
        (struct.pack("<Q", 4) + b"{{{{", "its table cannot be understood"),
        (table({"a": {"dtype": "F32", "shape": [3]}}), "its table cannot be understood"),
        (table({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + b"1234", "cannot be understood"),
        (table({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"1234", "cannot be understood"),
        (table({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}), "cannot be understood"),
        (table({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + b"1234", "is cut short: 'a' ends at"),
    ],
)
def test_a_damaged_file_is_refused_with_a_sentence(raw: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=sentence):
        TensorFile(tmp_path / "model.safetensors")


def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    saved(tmp_path, contents())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is cut short: .* copy or download it again"):
        TensorFile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: No such file"):
        TensorFile(tmp_path / "model.safetensors")
