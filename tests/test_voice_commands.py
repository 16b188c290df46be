"""`webrtc-duplex voices`."""

import argparse
import tarfile
import wave
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import moshi_directory, personaplex_directory
from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.voice_commands import add_voices_command


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_voices_command(parser.add_subparsers(required=True))
    options = parser.parse_args([str(argument) for argument in arguments])
    return int(options.run(options))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return personaplex_directory(tmp_path / "personaplex")


def test_voices_are_listed_with_length_and_kind(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("voices", "list", "--model", directory) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        [name, "9", "frames", "0.72", "s", "embeddings"] for name in ("NATF0", "NATM0")
    ]


def test_a_model_of_one_voice_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("voices", "list", "--model", moshi_directory(tmp_path / "moshi")) == 0
    assert capsys.readouterr().out == "moshi has no voices to choose from\n"


def test_an_unfit_voice_is_listed_with_what_is_wrong(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "voices").mkdir()
    (directory / "voices" / "mine.pt").write_bytes(b"PK no more")
    assert run("voices", "list", "--model", directory) == 1
    assert "mine             unfit: mine.pt is no plain file of tensors" in capsys.readouterr().out


def test_an_archive_and_a_recording_become_voices_of_our_own(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with wave.open(str(tmp_path / "me.wav"), "wb") as file:
        file.setparams((1, 2, 24_000, 0, "NONE", ""))
        file.writeframes((np.random.default_rng(0).normal(0, 3000, 24_000)).astype("<i2").tobytes())
    assert run("voices", "convert", "--model", directory, tmp_path / "me.wav", directory / "voices.tgz") == 0
    (directory / "voices.tgz").unlink()
    assert run("voices", "list", "--model", directory) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [(line[0], line[-1]) for line in listed] == [
        ("NATF0", "embeddings"),
        ("NATM0", "embeddings"),
        ("me", "codes"),
    ]


def test_an_archive_without_voices_is_refused(directory: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "empty.tgz", "w:gz"):
        pass
    with pytest.raises(CheckpointError, match="holds no voice"):
        run("voices", "convert", "--model", directory, tmp_path / "empty.tgz")
