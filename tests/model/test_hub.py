"""Finding a checkpoint here or on the hub, with the hub library's own failures and no network."""

from pathlib import Path

import httpx2
import pytest
from huggingface_hub import errors

from tests.checkpoints import personaplex_directory
from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.checkpoint import open_checkpoint
from webrtc_duplex.model.hub import Download, find_checkpoint


def failing(error: Exception) -> Download:
    def download(model: str) -> str:
        raise error

    return download


def never(model: str) -> str:
    raise AssertionError(f"{model} fetched")


def answer(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "http://127.0.0.1/"))


def test_a_directory_here_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path), never) == tmp_path


def test_tiny_is_the_one_in_the_package() -> None:
    assert open_checkpoint(find_checkpoint("tiny", never)).lm.file_steps in (8, 16)


def test_a_hub_id_is_fetched(tmp_path: Path) -> None:
    directory = personaplex_directory(tmp_path / "snapshot")
    assert find_checkpoint("nvidia/personaplex-7b-v1", lambda model: str(directory)) == directory


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (errors.GatedRepoError("gated", response=answer(401)), "accept its licence .* `hf auth login` or set HF_TOKEN"),
        (errors.RepositoryNotFoundError("none", response=answer(404)), "the hub knows no such model"),
        (errors.OfflineModeIsEnabled("offline"), "the hub cannot be reached.*HF_HUB_OFFLINE unset"),
        (errors.LocalEntryNotFoundError("not cached"), "fetch it once with `hf download some/model`"),
        (errors.IncompleteSnapshotError("partial", "/nowhere"), "not whole in its cache here"),
        (ConnectionResetError("reset by peer"), "the hub cannot be reached"),
        (errors.HfHubHTTPError("500 Server Error", response=answer(500)), r"failed \(500 Server Error\): try again"),
        (httpx2.ReadError("peer closed the connection"), r"failed \(peer closed the connection\)"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_failure_of_the_hub_becomes_a_sentence_that_says_what_to_do(error: Exception, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        find_checkpoint("some/model", failing(error))


def test_a_fetch_that_left_files_out_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="came without tokenizer-e351c8d8"):
        find_checkpoint("some/model", lambda model: str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/directory", "nothing-here", "a/b/c", "../up", "-x/y"])
def test_a_directory_that_is_none_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match="a directory that is here"):
        find_checkpoint(name, never)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file: name the directory"):
        find_checkpoint(str(tmp_path / "model.safetensors"), never)


def test_the_library_itself_is_offline_by_its_own_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="the hub cannot be reached"):
        find_checkpoint("some/model")
