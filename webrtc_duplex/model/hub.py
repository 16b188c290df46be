"""Where a checkpoint is: in the package, in a directory here, or on the hub, which fills its cache here."""

import re
from collections.abc import Callable
from pathlib import Path

from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.checkpoint import LM_CONFIG_NAME, LM_NAMES, MIMI_CONFIG_NAME, MIMI_NAMES, TOKENIZER_NAMES
from webrtc_duplex.model.voices import ARCHIVE, FOLDER

TINY = Path(__file__).parent / "tiny"
"""The checkpoint that ships with the package."""

PATTERNS = (*LM_NAMES, *MIMI_NAMES, *TOKENIZER_NAMES, LM_CONFIG_NAME, MIMI_CONFIG_NAME, ARCHIVE, f"{FOLDER}/*")
"""What is fetched of a model: what a checkpoint directory may hold."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Download = Callable[[str], str]
"""Fetch the hub's model of this id; returns the directory."""


def find_checkpoint(model: str, download: Download | None = None) -> Path:
    """Return the directory of `tiny`, of the path `model`, or of the hub id `model` (`owner/name`), fetched if need be.

    Raises CheckpointError with what to do.
    """
    if model == "tiny":
        return TINY
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise CheckpointError(f"{model} is a file: name the directory of the checkpoint")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"there is no model {model}: wanted tiny, echo, a directory that is here, or a hub id (owner/name)"
        )
    return _fetch(model, download or _hub_download())


def _fetch(model: str, download: Download) -> Path:
    from huggingface_hub import errors

    # Its bases are OSError and that of the HTTP library, which is another one in every few versions.
    transport = tuple(base for base in errors.HfHubHTTPError.__bases__ if issubclass(base, Exception))
    try:
        directory = Path(download(model))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"the hub does not give {model} to you: accept its licence on its page there, "
            "then log in with `hf auth login` or set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model} is no directory here, and the hub knows no such model "
            "(or it is private: log in with `hf auth login` or set HF_TOKEN)"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise CheckpointError(
            f"the hub cannot be reached, and {model} is not whole in its cache here: connect (HF_HUB_OFFLINE unset) "
            f"and fetch it once with `hf download {model}`, or name a directory"
        ) from error
    except transport as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"fetching {model} failed ({reason}): try again, what has come is kept; "
            f"or fetch it with `hf download {model}` and name its directory"
        ) from error
    for names in (LM_NAMES, MIMI_NAMES, TOKENIZER_NAMES):
        if not any((directory / name).is_file() for name in names):
            raise CheckpointError(
                f"{model} came without {' or '.join(names)}: it is no speech model of this family, or the fetch was "
                f"interrupted; fetch it again with `hf download {model}`"
            )
    return directory


def _hub_download() -> Download:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            "fetching from the hub needs huggingface_hub, which is not installed: pip install 'webrtc-duplex[hub]', "
            "or name a directory"
        ) from error
    return lambda model: snapshot_download(model, allow_patterns=list(PATTERNS))
