"""Checkpoint directories: three layouts, read strictly, refused with a sentence that names what is wrong."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoints import MIMI_NAME, REFERENCE, TOKENIZER_NAME, moshi_directory, personaplex_directory
from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.checkpoint import DEFAULT_TEXT, load_lm, load_mimi, open_checkpoint, voice_model
from webrtc_duplex.model.personaplex import LM
from webrtc_duplex.model.tensor_file import fill

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return personaplex_directory(tmp_path_factory.mktemp("made"))


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    """A good directory of one's own, to spoil."""
    return shutil.copytree(made, tmp_path / "personaplex")


def edit_config(directory: Path, **entries: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)


# ---- layouts


def test_a_personaplex_directory_has_prompts_and_hides_the_oldest_key_of_its_window(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.lm.file_steps, checkpoint.system_prompt) == (16, True)
    assert (checkpoint.lm.keys, checkpoint.mimi.keys) == (199, 11)


def test_a_moshi_directory_has_no_prompts_and_sees_its_whole_window(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(moshi_directory(tmp_path))
    assert (checkpoint.lm.file_steps, checkpoint.system_prompt, checkpoint.default_text) == (8, False, "")
    assert (checkpoint.lm.keys, checkpoint.mimi.keys) == (13, 12)


def test_a_tiny_directory_is_read_by_its_own_names(tmp_path: Path) -> None:
    directory = moshi_directory(tmp_path)
    (directory / MIMI_NAME).rename(directory / "mimi.safetensors")
    (directory / TOKENIZER_NAME).rename(directory / "tokenizer.model")
    edit_config(directory, silence_codes=list(range(8)), sine_codes=list(range(8)), keys=12, system_prompt=True)
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.lm.keys, checkpoint.system_prompt) == (12, True)
    assert checkpoint.lm.silence_codes == tuple(range(8))


def test_eight_steps_with_voices_are_personaplex_too(tmp_path: Path) -> None:
    directory = moshi_directory(tmp_path)
    edit_config(directory, silence_codes=list(range(8)), sine_codes=list(range(8)))
    (directory / "voices").mkdir()
    assert open_checkpoint(directory).system_prompt


def test_the_depformer_steps_come_from_the_file_whatever_the_config_says(directory: Path) -> None:
    edit_config(directory, dep_q=8)
    assert open_checkpoint(directory).lm.file_steps == 16


def test_a_config_that_says_nothing_means_the_released_sizes(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"must be 3072 rows a step, .* but is \[384, 8\]"):
        open_checkpoint(directory)


def test_the_window_of_a_setting_wins(directory: Path) -> None:
    edit_config(directory, keys=150)
    assert open_checkpoint(directory).lm.keys == 150
    assert open_checkpoint(directory, keys=33).lm.keys == 33


def test_personaplex_without_a_default_of_its_own_gets_the_plain_assistant(directory: Path) -> None:
    edit_config(directory, default_text=None)
    assert open_checkpoint(directory).default_text == DEFAULT_TEXT


# ---- faults of a directory


@pytest.mark.parametrize("name", ["model.safetensors", MIMI_NAME, TOKENIZER_NAME])
def test_a_missing_file_is_named_with_all_that_belongs_there(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {name}.* a checkpoint directory holds model\.safetensors; "):
        open_checkpoint(directory)


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is no directory: wanted one that holds"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["model.safetensors", MIMI_NAME])
def test_a_truncated_file_is_refused(directory: Path, name: str) -> None:
    path = directory / name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{name} is cut short"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "config.json is no JSON that can be read"),
        ("[]", "config.json must hold a table, not list"),
        ('{"dim": "wide"}', "config entry 'dim' must be a whole number, not 'wide'"),
        ('{"system_prompt": 1}', "config entry 'system_prompt' must be true or false, not 1"),
        ('{"default_voice": 1}', "config entry 'default_voice' must be a text, not 1"),
        ('{"silence_codes": [1]}', "config entry 'silence_codes' must hold 8 codes, not 1"),
    ],
)
def test_a_broken_config_is_refused(directory: Path, text: str, sentence: str) -> None:
    if text.startswith("{") and text != "{":
        edit_config(directory, **json.loads(text))
    else:
        (directory / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(directory)


def test_prompts_need_the_silence_of_the_models_own_codec(tmp_path: Path) -> None:
    directory = moshi_directory(tmp_path)
    edit_config(directory, system_prompt=True)
    with pytest.raises(CheckpointError, match="must name silence_codes and sine_codes of its own codec"):
        open_checkpoint(directory)


def test_another_models_codec_is_refused(directory: Path) -> None:
    shutil.copy(REFERENCE / "mimi" / "config.json", directory / "mimi_config.json")
    with pytest.raises(CheckpointError, match="the codec has 64 codes a codebook, but the model was made for 2048"):
        open_checkpoint(directory)


def test_another_models_tokenizer_is_refused(directory: Path, tmp_path: Path) -> None:
    shutil.copy(moshi_directory(tmp_path / "other") / TOKENIZER_NAME, directory)
    with pytest.raises(CheckpointError, match="it has 50 pieces, this model has 60 text tokens"):
        open_checkpoint(directory)


@pytest.mark.parametrize("raw", [b"", b"no tokenizer", b"\x0a\xff\xff"])
def test_a_broken_tokenizer_is_refused(directory: Path, raw: bytes) -> None:
    (directory / TOKENIZER_NAME).write_bytes(raw)
    with pytest.raises(CheckpointError, match="is no SentencePiece model that can be read"):
        open_checkpoint(directory)


def test_a_file_of_another_family_is_refused(directory: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(3)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks 'depformer.*it is no model of the Moshi family"):
        open_checkpoint(directory)


# ---- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_language_model_is_loaded_in_the_dtype_asked_for(directory: Path, dtype: torch.dtype) -> None:
    lm = load_lm(open_checkpoint(directory), CPU, dtype)
    assert {parameter.dtype for parameter in lm.parameters()} == {dtype}
    codes = load_file(directory / "model.safetensors")["emb.3.weight"]
    assert torch.equal(lm.temporal.table[3 * 2049 : 4 * 2049], codes.to(dtype))


def test_every_parameter_is_filled_from_either_layout(tmp_path: Path) -> None:
    for make in (personaplex_directory, moshi_directory):
        checkpoint = open_checkpoint(make(tmp_path / make.__name__))
        for module in (load_lm(checkpoint, CPU, torch.float32), load_mimi(checkpoint, CPU)):
            written = {(piece.target, str(piece.into)) for piece in module.pieces()}
            assert {target for target, _ in written} == {name for name, _ in module.named_parameters()}
            assert len(written) == len(module.pieces())


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of results that are no views of what went in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.bytes += result.untyped_storage().nbytes()
        return result


def test_the_language_model_goes_from_the_file_to_its_place_and_is_nowhere_held_twice(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    lm = LM(checkpoint.lm, CPU, torch.float32)
    with Allocations() as allocations:
        fill(lm, lm.pieces(), checkpoint.lm_file)
    assert allocations.bytes == 0


def test_depformer_steps_that_nobody_hears_are_never_read(directory: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            if re.search(r"(depformer_in|linears|gating)\.([89]|1\d)\.|depformer_emb\.([789]|1\d)\.", key):
                tensor.fill_(torch.nan)
            if re.search(r"depformer\.layers\.\d\.self_attn", key):
                tensor[len(tensor) // 2 :] = torch.nan

    edit_tensors(directory / "model.safetensors", spoil)
    lm = load_lm(open_checkpoint(directory), CPU, torch.float32)
    assert all(parameter.isfinite().all() for parameter in lm.parameters())


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda tensors: tensors.pop("depformer_emb.6.weight"),
            r"lacks 'depformer_emb\.6\.weight': wanted \[2049, 8\]",
        ),
        (lambda tensors: tensors.pop("linears.7.weight"), r"lacks 'linears\.7\.weight'"),
        (
            lambda tensors: tensors.update({"out_norm.alpha": torch.zeros(1, 1, 16)}),
            r"'out_norm\.alpha' must be \[1, 1, 12\], but is \[1, 1, 16\]",
        ),
        (
            lambda tensors: tensors.update({"text_linear.weight": torch.zeros(60, 12, dtype=torch.int8)}),
            "'text_linear.weight' must be BF16, F16, F32 or F64, but is I8",
        ),
        (
            lambda tensors: tensors.update({"transformer.layers.2.norm1.alpha": torch.zeros(1, 1, 12)}),
            r"no use for, such as 'transformer\.layers\.2\.norm1\.alpha' \[1, 1, 12\]",
        ),
        (
            lambda tensors: tensors.update({"depformer_norms.0.alpha": torch.zeros(1, 1, 8)}),
            "no use for, such as 'depformer_norms",
        ),
    ],
)
def test_a_language_model_that_does_not_fit_is_refused_by_the_tensors_name(
    directory: Path, edit: Callable[[dict[str, Tensor]], object], sentence: str
) -> None:
    edit_tensors(directory / "model.safetensors", edit)
    with pytest.raises(CheckpointError, match=sentence):
        load_lm(open_checkpoint(directory), CPU, torch.float32)


def test_a_config_of_another_size_is_refused_before_anything_is_allocated(directory: Path) -> None:
    edit_config(directory, num_layers=50)
    with pytest.raises(CheckpointError, match=r"lacks 'transformer\.layers\.2"):
        load_lm(open_checkpoint(directory), CPU, torch.float32)


def test_parts_that_no_model_of_ours_has_are_passed_over(directory: Path) -> None:
    edit_tensors(directory / "model.safetensors", lambda tensors: tensors.update({"optimizer.step": torch.zeros(1)}))
    load_lm(open_checkpoint(directory), CPU, torch.float32)


def test_a_codec_stored_in_part_as_bfloat16_is_loaded_in_float32(directory: Path) -> None:
    def lessen(tensors: dict[str, Tensor]) -> None:
        tensors.update({key: tensor.bfloat16() for key, tensor in tensors.items() if key.startswith("decoder")})

    edit_tensors(directory / MIMI_NAME, lessen)
    mimi = load_mimi(open_checkpoint(directory), CPU)
    assert {parameter.dtype for parameter in mimi.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda tensors: tensors.pop("upsample.convtr.convtr.convtr.weight"), r"lacks 'upsample.*wanted \[24, 1, 4\]"),
        (lambda tensors: tensors.update({"encoder.model.0.conv.conv.bias": torch.zeros(5)}), r"be \[4\], but is \[5\]"),
        (
            lambda tensors: tensors.update({"encoder_transformer.transformer.layers.2.norm1.weight": torch.zeros(24)}),
            r"no use for, such as 'encoder_transformer\.transformer\.layers\.2",
        ),
    ],
)
def test_a_codec_that_does_not_fit_is_refused_by_the_tensors_name(
    directory: Path, edit: Callable[[dict[str, Tensor]], object], sentence: str
) -> None:
    edit_tensors(directory / MIMI_NAME, edit)
    with pytest.raises(CheckpointError, match=sentence):
        load_mimi(open_checkpoint(directory), CPU)


def test_codebooks_that_nobody_hears_are_never_read(directory: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for level in (7, 8):
            tensors[f"quantizer.rvq_rest.vq.layers.{level}._codebook.embedding_sum"].fill_(torch.nan)

    edit_tensors(directory / MIMI_NAME, spoil)
    mimi = load_mimi(open_checkpoint(directory), CPU)
    assert all(parameter.isfinite().all() for parameter in mimi.parameters())


def test_a_recording_becomes_codes_by_the_checkpoints_own_codec(directory: Path) -> None:
    pcm = torch.randn(3 * 1920 - 100, generator=torch.Generator().manual_seed(0))
    codes = voice_model(open_checkpoint(directory)).encode(pcm)
    assert torch.equal(codes, load_mimi(open_checkpoint(directory), CPU).encode_stream(pcm))
    assert codes.shape == (8, 3)
