"""Voice files read safely, checked against the model, and written in our own format.

| file           | holds                                                                                               |
|----------------|-----------------------------------------------------------------------------------------------------|
| `.pt`          | `embeddings` [T, 1, 1, D] and `cache` int64 [1, 17, 4], as the reference saves them                 |
| `.wav`         | somebody speaking; encoded once, by Mimi                                                            |
| `.safetensors` | ours: `codes` int64 [8, V], or `embeddings` [T, D] and `cache` int64 [17, 4]                        |
| `voices.tgz`   | any of these, by basename; read member by member, nothing is ever extracted                         |

`.pt` files are pickles: they are read with torch's weights-only loader, and nothing but the two tensors is accepted.
"""

import io
import logging
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from webrtc_duplex.audio import FRAME_SAMPLES, SAMPLE_RATE
from webrtc_duplex.errors import CheckpointError, DuplexError, RequestError
from webrtc_duplex.model.config import CODEBOOKS, LMConfig
from webrtc_duplex.model.prompts import CACHE_COLUMNS, ROWS, Voice, VoiceCodes, VoiceEmbeddings
from webrtc_duplex.model.wav import Samples, decode_wav

Encode = Callable[[Tensor], Tensor]
"""A recording, float32 [n], to codes int64 [8, frames], by a Mimi that has heard nothing before."""

SUFFIXES = (".pt", ".safetensors", ".wav")
ARCHIVE = "voices.tgz"
FOLDER = "voices"

MAX_BYTES = 64 << 20
"""A bundled voice has 0.4 MB; what is larger than this is no voice."""

LOUDNESS_LUFS = -24.0
_MIN_LOUDNESS_S = 0.4
"""Integrated loudness is measured over blocks of 400 ms (ITU-R BS.1770)."""

_EMBEDDING_TOLERANCE = 0.05
"""Relative distance of the first embedding from ours: bfloat16 sums differ by 0.01, other models' by more than 1."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VoiceModel:
    """What a voice is checked against, and made with."""

    config: LMConfig
    initial_embedding: Tensor
    """Temporal input of the all-initial column, [D]."""
    encode: Encode


@dataclass(frozen=True, slots=True)
class VoiceShelf:
    """The voices of a checkpoint; those that do not fit it stay known by what is wrong with them."""

    voices: Mapping[str, Voice]
    faults: Mapping[str, CheckpointError]

    def get(self, name: str) -> Voice:
        """Return a voice; raises RequestError for a name that is none, CheckpointError for a voice that is unfit."""
        if name in self.faults:
            raise self.faults[name]
        if name not in self.voices:
            known = ", ".join(self.voices) or "it has none"
            raise RequestError(f"the model has no voice {name!r} ({known})", code="unknown_voice", param="voice")
        return self.voices[name]


def read_voices(directory: Path, model: VoiceModel) -> VoiceShelf:
    """Read every voice of a checkpoint directory.

    A voice that does not fit is a fault of its own. Raises CheckpointError if the archive as a whole cannot be trusted.
    """
    voices: dict[str, Voice] = {}
    faults: dict[str, CheckpointError] = {}
    for label, raw in _voice_files(directory):
        name = PurePosixPath(label).stem
        try:
            voices[name] = decode_voice(label, raw, model)
        except DuplexError as error:
            _log.warning("voice %s is not offered: %s", name, error.message)
            faults[name] = CheckpointError(error.message, status=400, code="bad_voice", param="voice")
    return VoiceShelf(dict(sorted(voices.items())), faults)


def has_voices(directory: Path) -> bool:
    """Whether a checkpoint directory has voices at all."""
    return (directory / ARCHIVE).is_file() or (directory / FOLDER).is_dir()


def read_voice(path: Path, model: VoiceModel) -> Voice:
    """Read one voice file. Raises CheckpointError, or RequestError for a recording that is none."""
    if path.suffix not in SUFFIXES:
        raise RequestError(f"{path} is no voice: its name must end in {', '.join(SUFFIXES)}")
    return decode_voice(path.name, _read_bytes(path), model)


def convert_voices(source: Path, folder: Path, model: VoiceModel) -> list[Path]:
    """Write a voice file, or every voice of an archive, in our own format; returns the files written.

    Raises CheckpointError or RequestError at the first voice that does not fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = archive_voices(source) if source.suffix not in SUFFIXES else [(source.name, _read_bytes(source))]
    written = []
    for label, raw in files:
        written.append(folder / f"{PurePosixPath(label).stem}.safetensors")
        save_voice(decode_voice(label, raw, model), written[-1])
    if not written:
        raise CheckpointError(f"{source} holds no voice: their names end in {', '.join(SUFFIXES)}")
    return written


def save_voice(voice: Voice, path: Path) -> None:
    """Write a voice in our own format."""
    match voice:
        case VoiceCodes(codes):
            tensors = {"codes": codes}
        case VoiceEmbeddings(embeddings, cache):
            tensors = {"embeddings": embeddings, "cache": cache}
    safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)


def decode_voice(label: str, raw: bytes, model: VoiceModel) -> Voice:
    """Make a voice of a file's bytes; the end of `label` says of which kind they are."""
    match PurePosixPath(label).suffix:
        case ".wav":
            return encode_recording(label, decode_wav(raw, label), model)
        case ".pt":
            voice: Voice = _from_pickle(label, _unpickle(label, raw))
        case _:
            voice = _from_safetensors(label, _load_safetensors(label, raw))
    _check(label, voice, model)
    return voice


def encode_recording(label: str, samples: Samples, model: VoiceModel) -> VoiceCodes:
    """Make a voice of a recording at 24 kHz: set its loudness and encode it."""
    _check_length(label, -(-len(samples) // FRAME_SAMPLES), model.config)
    return VoiceCodes(model.encode(torch.from_numpy(_normalise_loudness(label, samples))))


def _normalise_loudness(label: str, samples: Samples) -> Samples:
    try:
        import pyloudnorm
    except ImportError as error:
        raise CheckpointError(
            f"{label}: voices from recordings need pyloudnorm, which is not installed: "
            "pip install 'webrtc-duplex[wav-voices]', or convert the voice once elsewhere"
        ) from error
    if len(samples) < _MIN_LOUDNESS_S * SAMPLE_RATE:
        seconds = len(samples) / SAMPLE_RATE
        raise RequestError(f"{label} is {seconds:.2f} s long: a voice needs at least {_MIN_LOUDNESS_S} s of speech")
    loudness = pyloudnorm.Meter(SAMPLE_RATE).integrated_loudness(samples.astype(np.float64))
    if not np.isfinite(loudness):
        raise RequestError(f"{label} is silent: a voice needs somebody who speaks")
    spoken: Samples = samples * np.float32(10 ** ((LOUDNESS_LUFS - loudness) / 20))
    return spoken


# ---- from files to bytes


def _voice_files(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each voice file; a file in the folder takes the place of its namesake in the archive."""
    folder = directory / FOLDER
    loose = [path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES] if folder.is_dir() else []
    archive = directory / ARCHIVE
    if archive.is_file():
        names = {path.stem for path in loose}
        yield from ((label, raw) for label, raw in archive_voices(archive) if PurePosixPath(label).stem not in names)
    for path in loose:
        yield path.name, _read_bytes(path)


def archive_voices(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Basename and bytes of each voice in a tar, streamed. Raises CheckpointError, also for a path that leads out."""
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                _check_member(archive, member)
                path = PurePosixPath(member.name)
                if not member.isfile() or path.suffix not in SUFFIXES or path.name.startswith("._"):
                    continue
                file = tar.extractfile(member)
                assert file is not None  # a regular file has content
                yield path.name, file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise CheckpointError(f"{archive} cannot be read as a tar archive of voices: {error}") from error


def _check_member(archive: Path, member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{archive} holds a member {member.name!r} that leads out of it: do not trust it")
    if member.size > MAX_BYTES:
        raise CheckpointError(f"{archive}: {member.name} has {member.size} bytes, a voice at most {MAX_BYTES}")


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, a voice at most {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


# ---- from bytes to tensors


def _unpickle(label: str, raw: bytes) -> Mapping[str, Tensor]:
    if not raw.startswith(b"PK"):  # the older formats of torch.save are bare pickles and tars
        raise CheckpointError(f"{label} is no file of torch.save, which would be a zip archive")
    try:
        content = torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{label} is no plain file of tensors: its pickle asks for code to be run, which is never done, "
            "or is damaged"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{label} is damaged or no file of torch.save: {_first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{label} holds a {type(content).__name__}, not a dict of tensors")
    return content


def _load_safetensors(label: str, raw: bytes) -> Mapping[str, Tensor]:
    try:
        return safetensors.torch.load(raw)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{label} is damaged or no safetensors file: {_first_line(error)}") from error


def _from_pickle(label: str, tensors: Mapping[str, Tensor]) -> VoiceEmbeddings:
    _check_keys(label, tensors, {"embeddings", "cache"})
    embeddings, cache = tensors["embeddings"], tensors["cache"]
    if embeddings.dim() != 4 or embeddings.shape[1:3] != (1, 1):
        raise CheckpointError(f"{label}: embeddings must be [T, 1, 1, D], not {list(embeddings.shape)}")
    if cache.shape[:1] != (1,):
        raise CheckpointError(f"{label}: cache must be [1, {ROWS}, {CACHE_COLUMNS}], not {list(cache.shape)}")
    return VoiceEmbeddings(embeddings[:, 0, 0], cache[0])


def _from_safetensors(label: str, tensors: Mapping[str, Tensor]) -> Voice:
    if "codes" in tensors:
        _check_keys(label, tensors, {"codes"})
        return VoiceCodes(tensors["codes"])
    _check_keys(label, tensors, {"embeddings", "cache"})
    return VoiceEmbeddings(tensors["embeddings"], tensors["cache"])


def _check_keys(label: str, tensors: Mapping[str, Tensor], wanted: set[str]) -> None:
    if set(tensors) != wanted:
        found = ", ".join(sorted(map(str, tensors))) or "nothing"
        raise CheckpointError(f"{label} must hold {' and '.join(sorted(wanted))}, but holds {found}")


# ---- does it fit the model?


def _check(label: str, voice: Voice, model: VoiceModel) -> None:
    match voice:
        case VoiceCodes(codes):
            _check_codes(label, codes, model.config)
        case VoiceEmbeddings(embeddings, cache):
            _check_embeddings(label, embeddings, model)
            _check_cache(label, cache, embeddings.shape[0], model.config)


def _check_codes(label: str, codes: Tensor, config: LMConfig) -> None:
    if codes.dtype != torch.int64 or codes.dim() != 2 or codes.shape[0] != CODEBOOKS or not codes.shape[1]:
        raise CheckpointError(f"{label}: codes must be int64 [{CODEBOOKS}, frames], not {_describe(codes)}")
    _check_range(label, "codes", codes, config.card)
    _check_length(label, codes.shape[1], config)


def _check_embeddings(label: str, embeddings: Tensor, model: VoiceModel) -> None:
    width = model.config.width
    if not embeddings.is_floating_point() or embeddings.dim() != 2 or not embeddings.shape[0]:
        raise CheckpointError(f"{label}: embeddings must be floats, one row a column, not {_describe(embeddings)}")
    if embeddings.shape[1] != width:
        raise CheckpointError(
            f"{label} is a voice of another model: its embeddings are {embeddings.shape[1]} wide, this model is {width}"
        )
    if not embeddings.isfinite().all():
        raise CheckpointError(f"{label}: its embeddings hold numbers that are not finite")
    _check_length(label, embeddings.shape[0] + 1, model.config)
    distance = first_embedding_distance(embeddings, model.initial_embedding)
    if distance > _EMBEDDING_TOLERANCE:
        raise CheckpointError(
            f"{label} is a voice of another model: its first embedding differs from this model's initial column by "
            f"{distance:.2f} of its length, and may by {_EMBEDDING_TOLERANCE}"
        )


def first_embedding_distance(embeddings: Tensor, initial: Tensor) -> float:
    """How far a voice's first embedding lies from the model's own of the initial column, relative to its length."""
    own = initial.detach().to("cpu", torch.float32)
    return float((embeddings[0].float() - own).norm() / own.norm())


def _check_cache(label: str, cache: Tensor, end: int, config: LMConfig) -> None:
    """Shape of the cache, and range of what is used of it: column T whole, and column T + 1 in its delayed rows."""
    if cache.dtype != torch.int64 or cache.shape != (ROWS, CACHE_COLUMNS):
        raise CheckpointError(f"{label}: cache must be int64 [{ROWS}, {CACHE_COLUMNS}], not {_describe(cache)}")
    last, after = cache[:, end % CACHE_COLUMNS], cache[:, (end + 1) % CACHE_COLUMNS]
    _check_range(label, "the text row of its cache", last[:1], config.text_card + 1)
    _check_range(label, "its cache", torch.cat([last[1:], after[2:9], after[10:]]), config.card + 1)


def _check_range(label: str, what: str, tokens: Tensor, end: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= end:
        raise CheckpointError(f"{label}: {what} must lie in 0..{end - 1}, but reaches from {low} to {high}")


def _check_length(label: str, frames: int, config: LMConfig) -> None:
    limit = config.keys // 2
    if frames > limit:
        raise CheckpointError(f"{label} is {frames} frames long, a voice at most {limit}: half of the model's window")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
