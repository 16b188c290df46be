"""Where a server's processes meet: a directory for their sockets and sound rings."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def runtime_directory(base: Path = Path("/dev/shm")) -> Iterator[Path]:
    """A private directory for socket and ring, in memory if there is such a place; removed at the end.

    A lock in it is held as long as it is used, so that what a killed server has left is known and swept.
    """
    parent = base if os.access(base, os.W_OK) else Path(tempfile.gettempdir())
    _sweep(parent)
    directory = Path(tempfile.mkdtemp(prefix="webrtc-duplex-", dir=parent))  # of mode 0700
    try:
        with (directory / "unlocked").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (directory / "unlocked").rename(directory / "lock")
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove directories of this user whose server is gone."""
    for path in parent.glob("webrtc-duplex-*/lock"):
        try:
            with path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # in use, or somebody else's
            continue
