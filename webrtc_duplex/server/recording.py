"""A call on disk: a stereo WAV, the caller left and the agent right, and the call's events as lines of JSON.

Both are written as the call goes: after a crash they are whole up to the last second. The two voices are aligned as a
listener beside the server would hear them: the model says frame p while the caller speaks frame p + 1.
"""

import itertools
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import FRAME_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.errors import RequestError

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
"""RIFF header of 16-bit PCM with one fmt and one data chunk: 44 bytes."""

CHANNELS = 2
FRAME_BYTES = FRAME_SAMPLES * CHANNELS * 2
FRAMES_A_SECOND = 13
"""Frames between two updates of the header: a second of sound, rounded up."""

LATEST = 2
"""How many frames a half of a frame may come after its other half before silence stands in for it."""


def require_folder(folder: Path) -> None:
    """Make the directory of recordings. Raises RequestError if none can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(f"recordings: {folder} cannot be written: {error.strerror}", param="recordings") from error


class Shelf:
    """The directory that recordings go to, and how many bytes it may hold; one for all calls of a process."""

    def __init__(self, folder: Path, quota_bytes: int) -> None:
        self.folder = folder
        self._quota_bytes = quota_bytes
        self._room = quota_bytes  # by the last look, less what was written since

    def take(self, size: int) -> bool:
        """Whether so many bytes may still be written; then they are counted."""
        if size > self._room:
            return False
        self._room -= size
        return True

    def _look(self) -> None:
        """Other processes write here too, and somebody may tidy up."""
        used = sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())
        self._room = max(0, self._quota_bytes - used)

    @contextmanager
    def recording(self, call_id: str) -> "Iterator[Recording]":
        """A recording of one call; finished and closed when the block ends. Its files are readable by their owner.

        The second one of the same call is called `CALL-2`, and so on.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        names = itertools.chain([call_id], (f"{call_id}-{n}" for n in itertools.count(2)))
        name = next(name for name in names if not (self.folder / f"{name}.wav").exists())
        with (
            open(self.folder / f"{name}.wav", "xb", opener=_private) as wav,
            open(self.folder / f"{name}.jsonl", "x", encoding="utf-8", opener=_private) as events,
        ):
            self._look()
            recording = Recording(wav, events, self)
            yield recording
            recording.finish()  # which also closes both, as that writes too


class Recording:
    """Takes both voices frame by frame, by position, and the events; stops by itself when the shelf is full."""

    def __init__(self, wav: BinaryIO, events: TextIO, shelf: Shelf) -> None:
        self._wav = wav
        self._events = events
        self._shelf = shelf
        self._frames: dict[int, NDArray[np.int16]] = {}  # at most LATEST + 1 half-filled frames, by their place in time
        self._begins_at: int | None = None
        self._next = 0
        self.full = not shelf.take(HEADER.size)
        """Whether the shelf's quota has ended the recording; the call goes on."""
        self._write_header()

    def hear(self, position: int, frame: Pcm) -> None:
        """The caller's frame [1920] of this position."""
        with self._ends_where_it_fails():
            self._put(position, 0, frame)

    def say(self, position: int, frame: Pcm) -> None:
        """The agent's frame [1920] of this position; it sounds while the caller speaks the next one."""
        with self._ends_where_it_fails():
            self._put(position + 1, 1, frame)

    def event(self, event: Mapping[str, object]) -> None:
        """One event of the call, as the data channel carries it, on a line of its own."""
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":")) + "\n"
        with self._ends_where_it_fails():
            if self._afford(len(line.encode())):
                self._events.write(line)

    def finish(self) -> None:
        """Write what is still half-filled, and the final header; close both files."""
        with self._ends_where_it_fails():
            if self._frames:
                self._write_up_to(max(self._frames))
            self._write_header()
        for file in (self._wav, self._events):
            with self._ends_where_it_fails():
                file.close()

    @contextmanager
    def _ends_where_it_fails(self) -> Iterator[None]:
        """A disk that is full or gone ends the recording, and not the call."""
        try:
            yield
        except OSError as error:
            self.full = True
            self._frames.clear()
            logger.error("a recording ends here: %s", error)

    @property
    def _written(self) -> int:
        """Frames so far."""
        return self._next - (self._begins_at or 0)

    def _put(self, place: int, channel: int, frame: Pcm) -> None:
        if self._begins_at is None:
            self._begins_at = self._next = place
        if place < self._next or self.full:
            return
        stereo = self._frames.setdefault(place, np.zeros((FRAME_SAMPLES, CHANNELS), np.int16))
        stereo[:, channel] = frame
        self._write_up_to(place - LATEST)

    def _write_up_to(self, last: int) -> None:
        while self._next <= last and self._afford(FRAME_BYTES):
            stereo = self._frames.pop(self._next, None)
            self._wav.write(bytes(FRAME_BYTES) if stereo is None else stereo.tobytes())
            self._next += 1
            if self._written % FRAMES_A_SECOND == 0:
                self._write_header()

    def _afford(self, size: int) -> bool:
        if not self.full and not self._shelf.take(size):
            self.full = True
            self._frames.clear()
            logger.warning("the recordings' quota is used up; this recording ends here")
        return not self.full

    def _write_header(self) -> None:
        """The header for what is written so far; then both files are handed to the system."""
        size = self._written * FRAME_BYTES
        facts = (b"RIFF", 36 + size, b"WAVE", b"fmt ", 16, 1, CHANNELS, SAMPLE_RATE, SAMPLE_RATE * CHANNELS * 2)
        self._wav.seek(0)
        self._wav.write(HEADER.pack(*facts, CHANNELS * 2, 16, b"data", size))
        self._wav.seek(0, os.SEEK_END)
        self._wav.flush()
        self._events.flush()


def _private(path: str, flags: int) -> int:
    """An opener for files that only their owner may read."""
    return os.open(path, flags, 0o600)
