"""A checkpoint directory: which files it has, what they say of the model, and whether they fit each other.

|       | released (PersonaPlex), moshiko, moshika           | tiny                 |
|-------|----------------------------------------------------|----------------------|
| LM    | `model.safetensors`                                | the same             |
| codec | `tokenizer-e351c8d8-checkpoint125.safetensors`     | `mimi.safetensors`   |
| text  | `tokenizer_spm_32k_3.model`                        | `tokenizer.model`    |
| sizes | the defaults of `config.py`, or as the tiny one    | `config.json`, `mimi_config.json` |

Voices lie in `voices.tgz` or `voices/` (`voices.py`). Besides the family's names, `config.json` may say `keys`,
`silence_codes`, `sine_codes`, `sampling` (`config.py`), `system_prompt`, `default_voice` and `default_text`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.config import CODEBOOKS, STEPS, LMConfig, MimiConfig
from webrtc_duplex.model.mimi import Mimi
from webrtc_duplex.model.personaplex import LM
from webrtc_duplex.model.prompts import initial_column
from webrtc_duplex.model.tensor_file import TensorFile, check, fill
from webrtc_duplex.model.voices import VoiceModel, has_voices

LM_NAMES = ("model.safetensors",)
MIMI_NAMES = ("tokenizer-e351c8d8-checkpoint125.safetensors", "mimi.safetensors")
TOKENIZER_NAMES = ("tokenizer_spm_32k_3.model", "tokenizer.model")
LM_CONFIG_NAME = "config.json"
MIMI_CONFIG_NAME = "mimi_config.json"

DEFAULT_TEXT = "You are a wise and friendly teacher. Answer questions or provide advice in a clear and engaging way."
"""The persona that PersonaPlex was trained with as its plain assistant."""

_PERSONAPLEX_STEPS = 16
_MOSHI_KEYS, _MOSHI_MIMI_KEYS = 3000, 250

_STEP_UNHEARD = r"([89]|1\d)"
LM_UNREAD = re.compile(
    rf"(depformer_in|linears|depformer\.layers\.\d+\.gating)\.{_STEP_UNHEARD}\..*|depformer_emb\.(7|{_STEP_UNHEARD})\..*"
    r"|(?!emb\.|text_emb|text_linear|transformer\.|out_norm|depformer|linears\.).*"
)
"""Depformer steps 8..15, which predict the caller; and whatever is of no part that we run."""
MIMI_UNREAD = re.compile(
    r"quantizer\.rvq_rest\.vq\.layers\.([7-9]|[1-9]\d+)\..*|.*\._codebook\._initialized"
    r"|(?!encoder|decoder|downsample|upsample|quantizer).*"
)
"""Codebooks 8..31, a flag of training; and whatever is of no part that we run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a directory says of its model, all files open and nothing of the weights read yet."""

    directory: Path
    lm: LMConfig
    mimi: MimiConfig
    lm_file: TensorFile
    mimi_file: TensorFile
    tokenizer: SentencePieceProcessor
    system_prompt: bool
    """Whether a call begins with voice and persona (PersonaPlex), or on the bare initial column (Moshi, tiny)."""
    default_voice: str | None
    """The voice of callers that ask for none; None: the first there is."""
    default_text: str

    @property
    def name(self) -> str:
        return self.directory.name


def open_checkpoint(directory: Path, keys: int | None = None) -> Checkpoint:
    """Open a checkpoint directory; `keys` overrides the LM's attention window.

    Raises CheckpointError with what is missing, damaged, or does not fit.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory: wanted one that holds {_wanted_files()}")
    lm_file, mimi_file = TensorFile(_find(directory, LM_NAMES)), TensorFile(_find(directory, MIMI_NAMES))
    entry, mimi_entry = _read_json(directory / LM_CONFIG_NAME), _read_json(directory / MIMI_CONFIG_NAME)
    sizes = LMConfig.from_json(entry)
    steps = steps_in(lm_file, sizes)
    released = mimi_file.path.name == MIMI_NAMES[0]
    personaplex = released and (steps == _PERSONAPLEX_STEPS or has_voices(directory))
    lm = replace(sizes, file_steps=steps, keys=keys or _keys(entry, "context", _MOSHI_KEYS, personaplex))
    system_prompt = _flag(entry, "system_prompt", personaplex)
    if system_prompt and not (lm.silence_codes and lm.sine_codes):
        raise CheckpointError(f"{directory / LM_CONFIG_NAME} must name silence_codes and sine_codes of its own codec")
    mimi = replace(MimiConfig.from_json(mimi_entry), keys=_mimi_keys(mimi_entry, personaplex))
    if mimi.codebook_size != lm.card:
        raise CheckpointError(
            f"{directory}: the codec has {mimi.codebook_size} codes a codebook, but the model was made for {lm.card}"
        )
    return Checkpoint(
        directory=directory,
        lm=lm,
        mimi=mimi,
        lm_file=lm_file,
        mimi_file=mimi_file,
        tokenizer=load_tokenizer(_find(directory, TOKENIZER_NAMES), lm.text_card),
        system_prompt=system_prompt,
        default_voice=_text(entry, "default_voice", "") or None,
        default_text=_text(entry, "default_text", DEFAULT_TEXT if personaplex else ""),
    )


def load_lm(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> LM:
    """Load the language model, 8 depformer steps of it. Raises CheckpointError before anything is allocated."""
    check(LM(checkpoint.lm, torch.device("meta"), dtype).pieces(), checkpoint.lm_file, LM_UNREAD)
    lm = LM(checkpoint.lm, device, dtype)
    fill(lm, lm.pieces(), checkpoint.lm_file)
    return lm


def load_mimi(checkpoint: Checkpoint, device: torch.device) -> Mimi:
    """Load the codec, in f32 whatever the file holds. Raises CheckpointError before anything is allocated."""
    check(Mimi(checkpoint.mimi, torch.device("meta")).pieces(), checkpoint.mimi_file, MIMI_UNREAD)
    mimi = Mimi(checkpoint.mimi, device)
    fill(mimi, mimi.pieces(), checkpoint.mimi_file)
    return mimi


def voice_model(checkpoint: Checkpoint) -> VoiceModel:
    """What the checkpoint's voices are checked against; its codec is loaded only if a voice is a recording."""
    cpu = torch.device("cpu")
    codec = cache(lambda: load_mimi(checkpoint, cpu))

    @torch.no_grad()
    def encode(pcm: Tensor) -> Tensor:
        return codec().encode_stream(pcm)

    return VoiceModel(checkpoint.lm, initial_embedding(checkpoint), encode)


def steps_in(lm_file: TensorFile, config: LMConfig) -> int:
    """Depformer steps that the file was made with: its projections are stacked by step."""
    key, width = "depformer.layers.0.self_attn.in_proj_weight", 3 * config.depformer_width
    if key not in lm_file.entries:
        raise CheckpointError(f"{lm_file.path} lacks {key!r}: it is no model of the Moshi family")
    shape = lm_file.entries[key].shape
    steps, rest = divmod(shape[0] if shape else 0, width)
    if rest or steps < STEPS:
        raise CheckpointError(
            f"{lm_file.path}: {key!r} must be {width} rows a step, for at least {STEPS} steps, but is {list(shape)}"
        )
    return steps


def initial_embedding(checkpoint: Checkpoint) -> Tensor:
    """What the temporal transformer is fed at the all-initial column, [D] in float32."""
    file, config = checkpoint.lm_file, checkpoint.lm
    column = initial_column(config).tolist()
    file.require("text_emb.weight", (config.text_card + 1, config.width))
    total = file.tensor("text_emb.weight")[column[0]].float()
    for k in range(2 * CODEBOOKS):
        file.require(f"emb.{k}.weight", (config.card + 1, config.width))
        total = total + file.tensor(f"emb.{k}.weight")[column[1 + k]].float()
    return total


def load_tokenizer(path: Path, text_card: int) -> SentencePieceProcessor:
    """Load a SentencePiece model. Raises CheckpointError if it is damaged or has not `text_card` pieces."""
    try:
        tokenizer = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no SentencePiece model that can be read") from error
    if tokenizer.get_piece_size() != text_card:
        raise CheckpointError(
            f"{path} is the tokenizer of another model: it has {tokenizer.get_piece_size()} pieces, "
            f"this model has {text_card} text tokens"
        )
    return tokenizer


def _find(directory: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"{directory} lacks {' or '.join(names)}: a checkpoint directory holds {_wanted_files()}")


def _wanted_files() -> str:
    return "; ".join(" or ".join(names) for names in (LM_NAMES, MIMI_NAMES, TOKENIZER_NAMES))


def _keys(entry: Mapping[str, object], name: str, default: int, personaplex: bool) -> int:
    """Keys that a query sees: the ring cache of NVIDIA's PersonaPlex hides the oldest of its context."""
    for key, hidden in (("keys", 0), (name, int(personaplex))):
        value = entry.get(key)
        if isinstance(value, int):  # of another type: `from_json` has refused it
            return value - hidden
    return default - int(personaplex)


def _mimi_keys(entry: Mapping[str, object], personaplex: bool) -> int:
    transformer = entry.get("transformer", {})
    assert isinstance(transformer, Mapping)  # else `from_json` has refused it
    return _keys({**transformer, **entry}, "context", _MOSHI_MIMI_KEYS, personaplex)


def _read_json(path: Path) -> Mapping[str, object]:
    """The table in a file; empty if there is no such file."""
    try:
        entry = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no JSON that can be read: {error}") from error
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path} must hold a table, not {type(entry).__name__}")
    return entry


def _flag(entry: Mapping[str, object], name: str, default: bool) -> bool:
    value = entry.get(name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config entry {name!r} must be true or false, not {value!r}", param=name)
    return value


def _text(entry: Mapping[str, object], name: str, default: str) -> str:
    value = entry.get(name, default)
    if not isinstance(value, str):
        raise CheckpointError(f"config entry {name!r} must be a text, not {value!r}", param=name)
    return value
