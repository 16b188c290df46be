"""`webrtc-duplex inspect`."""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoints import moshi_directory
from webrtc_duplex.errors import RequestError
from webrtc_duplex.inspect_command import add_inspect_command
from webrtc_duplex.model.wav import write_wav
from webrtc_duplex.offline import add_offline_command


def run(*arguments: str | Path | int) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    add_inspect_command(commands)
    add_offline_command(commands)
    options = parser.parse_args([str(argument) for argument in arguments])
    return int(options.run(options))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moshi_directory(tmp_path_factory.mktemp("moshi"))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    write_wav(tmp_path / "in.wav", np.random.default_rng(0).normal(0, 3000, 10 * 1920).astype(np.int16))
    return tmp_path / "in.wav"


@pytest.fixture
def said(directory: Path, recording: Path, tmp_path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """What the model says to the recording, greedily: [10, 9]."""
    greedy = ("--text-temperature", 0, "--audio-temperature", 0, "--tokens")
    run("offline", "--model", directory, "--input", recording, "--text", tmp_path / "out.json", *greedy)
    told = json.loads((tmp_path / "out.json").read_text())
    return np.column_stack([told["tokens"], told["codes"]])


def reference(path: Path, frames: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Path:
    """A dump as NVIDIA's code makes it: one call late."""
    save_file({"outputs": np.concatenate([np.full((1, 9), 3), frames]).astype(np.int32)}, path)
    return path


def test_every_finding_is_a_line_and_good_ones_end_well(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", directory) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 7 and all(line.startswith("good  ") for line in lines)


def test_a_wrong_finding_shows_in_the_exit_code(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = shutil.copytree(directory, tmp_path / "spoiled")
    (spoiled / "voices").mkdir()
    (spoiled / "voices" / "odd.pt").write_bytes(b"odd")
    config = json.loads((spoiled / "config.json").read_text())
    config |= {"silence_codes": list(range(8)), "sine_codes": list(range(8))}
    (spoiled / "config.json").write_text(json.dumps(config))
    assert run("inspect", spoiled) == 1
    assert "WRONG voice odd: odd.pt is no file of torch.save" in capsys.readouterr().out


def test_a_greedy_run_equals_its_reference(
    directory: Path,
    recording: Path,
    said: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dump = reference(tmp_path / "dump.safetensors", said[:8])
    assert run("inspect", directory, "--run", recording, "--reference", dump) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("good  greedy run of 0.8 s: tokens and codes have SHA-256 ")
    assert lines[-1] == "good  reference: all 8 frames are equal"


def test_the_first_frame_that_differs_from_the_reference_is_named(
    directory: Path,
    recording: Path,
    said: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said[6, 3] += 1
    dump = reference(tmp_path / "dump.safetensors", said)
    assert run("inspect", directory, "--run", recording, "--reference", dump) == 1
    assert "WRONG reference: 9 of 10 frames are equal, frame 6 (0.48 s) is the first" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(3, 8), (9,)])
def test_a_dump_of_another_shape_is_refused(
    directory: Path, recording: Path, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    save_file({"outputs": np.zeros(shape, np.int32)}, tmp_path / "dump.safetensors")
    with pytest.raises(RequestError, match=r"outputs must be \[calls, 9\]"):
        run("inspect", directory, "--run", recording, "--reference", tmp_path / "dump.safetensors")
