"""Our model and the numbers that the public references computed."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import check_golden

REFERENCE = Path(__file__).resolve().parent.parent / "reference"
LOOP = REFERENCE / "personaplex_loop"
LOOP_ENTRY = json.loads((LOOP / "config.json").read_text())


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_codec_equals_the_references_in_both_window_conventions() -> None:
    for check in check_golden.check_codec(REFERENCE / "mimi"):
        assert check.passed, check


def test_codec_rows_with_absences_and_resets_equal_the_references_and_masked_rows_keep_every_bit() -> None:
    check = check_golden.check_codec_rows(REFERENCE / "mimi", REFERENCE / "mimi_rows" / "rows.safetensors")
    assert check.passed, check


@pytest.mark.parametrize("name", ["lm16", "lm8"])
def test_teacher_forced_numbers_equal_the_references(name: str) -> None:
    check = check_golden.check_teacher_forced(REFERENCE / name / "teacher_forced.safetensors")
    assert check.passed, check


@pytest.mark.parametrize("variant", LOOP_ENTRY["variants"])
def test_loop_says_what_the_references_say_by_codes_and_by_voice_file(variant: str) -> None:
    entry = LOOP_ENTRY | {"variants": {variant: LOOP_ENTRY["variants"][variant]}}
    for check in check_golden.check_loop(LOOP, entry):
        assert check.passed, check


def test_check_golden_walks_every_kind_of_file(tmp_path: Path) -> None:
    for name in ("mimi", "mimi_rows", "lm8"):
        shutil.copytree(REFERENCE / name, tmp_path / name)
    files = [check.file for check in check_golden.checks(tmp_path)]
    assert files == [
        "mimi/stream.safetensors",
        "mimi/offline.safetensors",
        "mimi/decode.safetensors",
        "mimi_rows/rows.safetensors",
        "lm8/teacher_forced.safetensors",
    ]


def test_a_wrong_number_is_a_miss(tmp_path: Path) -> None:
    shutil.copytree(REFERENCE / "lm8", tmp_path / "lm8")
    file = tmp_path / "lm8" / "teacher_forced.safetensors"
    golden = load_file(file)
    golden["hidden_moshi"][3, 5] += 1e-3
    save_file(golden, file)
    check = check_golden.check_teacher_forced(file)
    assert not check.passed
    assert check.excess > 1.0


def test_a_wrong_token_is_a_miss() -> None:
    check = check_golden.Check("tokens")
    check.compare(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]), "codes")
    assert check.unequal == 1
    assert not check.passed


def test_a_pack_that_is_not_there_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["check_golden.py", str(tmp_path)])
    assert check_golden.main() == 1
