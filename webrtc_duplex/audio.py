"""All numbers of audio time, and the shared slots that sound crosses the process boundary in.

Inside the server sound is always mono int16 at 24 kHz. Times are seconds of `time.monotonic`, which on Linux is one
clock for all processes of a machine.
"""

import mmap
import os
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 24_000
"""Samples a second, as Mimi hears and says them."""

CHUNK_SAMPLES = 480
CHUNK_S = CHUNK_SAMPLES / SAMPLE_RATE
"""A chunk: 20 ms, what one packet usually holds."""

FRAME_SAMPLES = 1920
FRAME_S = FRAME_SAMPLES / SAMPLE_RATE
"""A frame: 80 ms, what the model hears and says in one step (Mimi's 12.5 Hz)."""

CHUNKS_PER_FRAME = FRAME_SAMPLES // CHUNK_SAMPLES

Pcm = NDArray[np.int16]
"""Mono samples at 24 kHz; shapes are said where they matter: a chunk is [480], a frame [1920]."""

Numbers = NDArray[np.int64]
"""A number for each of several rows, [n]."""


class _Slots:
    """One direction of the ring: for each row a few frames, each stamped with the (epoch, position) it is for.

    One side writes, the other reads. The stamp is taken off before the samples change and put on after, so a reader
    that finds the same stamp before and after its copy has a whole frame (stores stay in order on x86-64; on weaker
    machines the control message that wakes the reader is the barrier).
    """

    def __init__(self, stamps: NDArray[np.int64], pcm: Pcm) -> None:
        self._stamps = stamps  # [rows, slots, 2]: epoch, position; (0, -1) is empty, as epochs start at 1
        self._pcm = pcm  # [rows, slots, 1920]
        self._count = stamps.shape[1]

    def write(self, row: int, epoch: int, position: int, frame: Pcm) -> None:
        """Put the frame [1920] of this position; the frame `slots` positions ago is overwritten."""
        slot = position % self._count
        stamp = self._stamps[row, slot]
        stamp[1] = -1
        self._pcm[row, slot] = frame
        stamp[0] = epoch
        stamp[1] = position

    def read(self, row: int, epoch: int, position: int, into: Pcm) -> bool:
        """Copy the frame of exactly this epoch and position into `into` [1920]; False if it is not there."""
        slot = position % self._count
        stamp = self._stamps[row, slot]
        if stamp[0] != epoch or stamp[1] != position:
            return False
        into[:] = self._pcm[row, slot]
        return bool(stamp[0] == epoch and stamp[1] == position)

    def write_many(self, rows: Numbers, epochs: Numbers, positions: Numbers, frames: Pcm) -> None:
        """`write` for several rows at once: frames [n, 1920], the others [n]."""
        slots = positions % self._count
        self._stamps[rows, slots, 1] = -1
        self._pcm[rows, slots] = frames
        self._stamps[rows, slots, 0] = epochs
        self._stamps[rows, slots, 1] = positions

    def read_many(self, rows: Numbers, epochs: Numbers, positions: Numbers, into: Pcm) -> NDArray[np.bool_]:
        """`read` for several rows at once, into [n, 1920]; what is not there [n: False] is silence."""
        slots = positions % self._count
        wanted = np.stack((epochs, positions), axis=1)
        there: NDArray[np.bool_] = (self._stamps[rows, slots] == wanted).all(axis=1)
        into[:] = self._pcm[rows, slots]
        there &= (self._stamps[rows, slots] == wanted).all(axis=1)
        into[~there] = 0
        return there

    def empty(self, row: int) -> None:
        """Forget whatever the row's slots hold."""
        self._stamps[row, :, 1] = -1
        self._stamps[row, :, 0] = 0


class SoundRing:
    """Where sound crosses between server and engine: `heard` towards the model, `said` from it.

    A plain block of memory, `SLOTS` frames a row each way. Position p of a row is its p-th tick since the call went
    live, so a slot written twice is heard once, and a frame that is not there in time is simply not found.
    `heard` is written by the server and read by the engine at the tick; `said` the other way.

    The engine makes the ring (`create`), any number of server processes join it (`join`); both are closed by whoever
    opened them, and the file is removed by the engine's side.
    """

    SLOTS = 4

    def __init__(self, rows: int, memory: bytearray | mmap.mmap, name: str = "") -> None:
        self.rows = rows
        self.name = name
        """Path of the shared file; empty for a ring in this process only."""
        self._memory = memory
        stamps = np.frombuffer(memory, np.int64, 2 * rows * self.SLOTS * 2)
        pcm = np.frombuffer(memory, np.int16, 2 * rows * self.SLOTS * FRAME_SAMPLES, offset=stamps.nbytes)
        both_stamps = stamps.reshape(2, rows, self.SLOTS, 2)
        both_pcm = pcm.reshape(2, rows, self.SLOTS, FRAME_SAMPLES)
        self.heard = _Slots(both_stamps[0], both_pcm[0])
        self.said = _Slots(both_stamps[1], both_pcm[1])

    @classmethod
    def size(cls, rows: int) -> int:
        """Bytes of a ring for so many rows."""
        return 2 * rows * cls.SLOTS * (2 * 8 + FRAME_SAMPLES * 2)

    @classmethod
    def private(cls, rows: int) -> Self:
        """A ring in this process's own memory, for an engine in a thread."""
        ring = cls(rows, bytearray(cls.size(rows)))
        ring._empty_all()
        return ring

    @classmethod
    def create(cls, path: Path, rows: int) -> Self:
        """Make the shared file (it must not exist) and map it."""
        with path.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(cls.size(rows))
        ring = cls.join(path, rows)
        ring._empty_all()
        return ring

    @classmethod
    def join(cls, path: Path, rows: int) -> Self:
        """Map a ring that another process made."""
        with path.open("r+b") as file:
            return cls(rows, mmap.mmap(file.fileno(), cls.size(rows)), str(path))

    def _empty_all(self) -> None:
        for row in range(self.rows):
            self.heard.empty(row)
            self.said.empty(row)
