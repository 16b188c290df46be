"""Recordings: aligned, whole after a crash, and within their quota."""

import json
import os
import resource
import wave
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from webrtc_duplex.audio import FRAME_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.errors import RequestError
from webrtc_duplex.server.recording import FRAME_BYTES, HEADER, Recording, Shelf, require_folder


def frame(value: int) -> Pcm:
    return np.full(FRAME_SAMPLES, value, np.int16)


def read(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    with wave.open(str(path)) as wav:
        assert (wav.getnchannels(), wav.getframerate(), wav.getsampwidth()) == (2, SAMPLE_RATE, 2)
        return np.frombuffer(wav.readframes(wav.getnframes()), np.int16).reshape(-1, FRAME_SAMPLES, 2)[:, 0]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "recordings", 10_000_000)


def test_the_agent_sounds_one_frame_after_the_caller_it_answers(shelf: Shelf) -> None:
    with shelf.recording("rtc_a") as recording:
        for position in range(4):
            recording.hear(position, frame(10 + position))
            recording.say(position, frame(20 + position))
    assert read(shelf.folder / "rtc_a.wav").tolist() == [[10, 0], [11, 20], [12, 21], [13, 22], [0, 23]]


def test_a_frame_that_never_came_is_silence_and_time_goes_on(shelf: Shelf) -> None:
    with shelf.recording("rtc_a") as recording:
        recording.hear(0, frame(1))
        recording.hear(3, frame(4))
        recording.say(3, frame(9))
    assert read(shelf.folder / "rtc_a.wav")[:, 0].tolist() == [1, 0, 0, 4, 0]


def test_a_late_frame_does_not_overwrite_what_is_on_disk(shelf: Shelf) -> None:
    with shelf.recording("rtc_a") as recording:
        for position in range(5):
            recording.hear(position, frame(position))
        recording.say(0, frame(99))
    assert read(shelf.folder / "rtc_a.wav")[:, 1].tolist() == [0] * 5


def test_a_crash_costs_at_most_the_last_second(shelf: Shelf) -> None:
    with shelf.recording("rtc_a") as recording:
        for position in range(100):
            recording.hear(position, frame(1))
        whole_before_the_end = read(shelf.folder / "rtc_a.wav")
        assert 100 - len(whole_before_the_end) <= 13 + 2


def test_events_are_lines_of_json(shelf: Shelf) -> None:
    with shelf.recording("rtc_a") as recording:
        recording.event({"type": "session.created", "word": "grüß"})
        recording.event({"type": "response.done"})
    lines = (shelf.folder / "rtc_a.jsonl").read_text().splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["session.created", "response.done"]


def test_the_quota_ends_the_recording_and_the_file_is_whole(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, HEADER.size + 3 * FRAME_BYTES + 10)
    with shelf.recording("rtc_a") as recording:
        for position in range(50):
            recording.hear(position, frame(1))
        assert recording.full
    assert len(read(tmp_path / "rtc_a.wav")) == 3


def test_calls_that_are_recorded_at_once_share_the_quota(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 2 * HEADER.size + 6 * FRAME_BYTES)
    with shelf.recording("rtc_a") as one, shelf.recording("rtc_b") as other:
        for position in range(50):
            one.hear(position, frame(1))
            other.hear(position, frame(1))
    assert len(read(tmp_path / "rtc_a.wav")) + len(read(tmp_path / "rtc_b.wav")) == 6


def test_what_lies_on_the_shelf_counts(tmp_path: Path) -> None:
    (tmp_path / "old.wav").write_bytes(bytes(1000))
    with Shelf(tmp_path, 900).recording("rtc_a") as recording:
        assert recording.full


def test_only_its_owner_may_read_a_recording(shelf: Shelf) -> None:
    with shelf.recording("rtc_a"):
        pass
    assert {path.stat().st_mode & 0o777 for path in shelf.folder.iterdir()} == {0o600}


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    events = (tmp_path / "events").open("w")
    full = FileIO(os.open("/dev/full", os.O_RDWR), "w")
    with events, full, (tmp_path / "header").open("wb") as header:
        recording = Recording(header, events, Shelf(tmp_path, 10_000_000))
        recording._wav = full
        for position in range(30):
            recording.hear(position, frame(1))
        recording.event({"type": "one"})
        recording.finish()
    assert recording.full


@pytest.fixture
def little_room() -> Iterator[None]:
    """No file of this process may grow beyond some frames, and half of another one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER.size + 20 * FRAME_BYTES + FRAME_BYTES // 2, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("frames", [15, 21, 22, 23, 24, 50])
def test_a_disk_that_fills_up_leaves_what_was_written_and_stops_nobody(
    shelf: Shelf, little_room: None, frames: int
) -> None:
    with shelf.recording("rtc_a") as recording:
        for position in range(frames):
            recording.hear(position, frame(1))
            recording.event({"type": "response.done", "word": 20_000 * "x"})
    written = read(shelf.folder / "rtc_a.wav")
    assert len(written) <= 20 and (written[:, 0] == 1).all()


def test_a_folder_that_cannot_be_one_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="recordings: .*file/folder cannot be written"):
        require_folder(tmp_path / "file" / "folder")
    require_folder(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
