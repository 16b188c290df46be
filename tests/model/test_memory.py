"""The memory plan: counted on shapes, and true."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import personaplex_directory
from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.checkpoint import load_lm, load_mimi, open_checkpoint
from webrtc_duplex.model.config import LMConfig, MimiConfig
from webrtc_duplex.model.memory import MemoryPlan, available_bytes, group_rooms, plan_memory
from webrtc_duplex.model.personaplex import PersonaPlex
from webrtc_duplex.model.streaming import tensors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_the_plan_equals_what_is_then_allocated(tmp_path: Path, kv_dtype: torch.dtype | None) -> None:
    checkpoint = open_checkpoint(personaplex_directory(tmp_path))
    plan = plan_memory(checkpoint.lm, checkpoint.mimi, CPU, torch.float32, kv_dtype)
    lm, mimi = load_lm(checkpoint, CPU, torch.float32), load_mimi(checkpoint, CPU)
    assert plan.weights == sum(tensor.nbytes for module in (lm, mimi) for tensor in module.parameters())
    state = PersonaPlex(lm, mimi).allocate(5, kv_dtype)
    assert plan.total(5) - plan.total(0) == 5 * plan.row
    assert sum(tensor.nbytes for _, tensor in tensors(state)) == 6 * plan.row


def test_the_released_model_is_counted_as_its_specification_does() -> None:
    plan = plan_memory(LMConfig(), MimiConfig(), CUDA, torch.bfloat16)
    assert plan.row == pytest.approx(2999 * 524_288 + 16.5e6, rel=1e-3)
    assert plan.weights == pytest.approx(2 * 7.69e9 + 0.32e9, rel=0.01)  # 8 steps, and a codec without 24 codebooks
    assert 70 < plan.rows_in(141_000_000_000) < 80


def test_keys_of_a_byte_take_half_the_room_and_their_scales_a_thirtieth() -> None:
    plan = plan_memory(LMConfig(), MimiConfig(), CUDA, torch.bfloat16, torch.int8)
    assert plan.row == pytest.approx(2999 * (262_144 + 8_192) + 16.5e6, rel=1e-3)
    assert 140 < plan.rows_in(141_000_000_000) < 160


def test_an_impossible_number_of_rows_is_refused_with_the_numbers() -> None:
    plan = MemoryPlan(weights=10 << 30, row=1 << 30, workspace=1 << 30)
    plan.require(4, 16 << 30)
    with pytest.raises(
        CheckpointError,
        match=r"5 rows do not fit: weights of 10\.00 GiB, 1\.00 GiB a row, a workspace of 1\.00 GiB make 17\.00 GiB, "
        r"and 16\.00 GiB are free; 4 rows would fit",
    ):
        plan.require(5, 16 << 30)


def test_no_rows_fit_where_the_weights_do_not() -> None:
    assert MemoryPlan(weights=10 << 30, row=1 << 30, workspace=0).rows_in(5 << 30) == 0


def test_free_memory_of_the_host_is_some() -> None:
    assert available_bytes(CPU) > 1 << 20


def group(folder: Path, idle: str, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{idle} 100\n")


def test_a_group_has_left_what_its_limit_and_those_around_it_leave(tmp_path: Path) -> None:
    group(tmp_path / "a", "inactive_file", max="5000", current="4500")
    group(tmp_path / "a" / "b", "inactive_file", max="1000", current="300")
    group(tmp_path / "a" / "b" / "c", "inactive_file", max="max", current="200")
    assert list(group_rooms("0::/a/b/c\n", tmp_path)) == [800, 600]


def test_a_group_of_version_1_is_found_also_where_a_container_has_it_at_the_top(
    tmp_path: Path,
) -> None:
    group(tmp_path / "memory", "total_inactive_file", limit_in_bytes="1000", usage_in_bytes="950")
    assert list(group_rooms("5:devices:/x\n4:cpu,memory:/docker/1f\n", tmp_path)) == [150]
