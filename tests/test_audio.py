"""The slots that sound crosses the process boundary in."""

import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from webrtc_duplex.audio import FRAME_SAMPLES, Pcm, SoundRing


def frame(value: int) -> Pcm:
    return np.full(FRAME_SAMPLES, value, np.int16)


def test_a_frame_is_read_under_its_epoch_and_position_only() -> None:
    ring, into = SoundRing.private(2), frame(0)
    ring.heard.write(1, 3, 10, frame(7))
    assert ring.heard.read(1, 3, 10, into) and np.array_equal(into, frame(7))
    for row, epoch, position in ((0, 3, 10), (1, 2, 10), (1, 3, 11), (1, 3, 10 + SoundRing.SLOTS)):
        assert not ring.heard.read(row, epoch, position, into)
    assert not ring.said.read(1, 3, 10, into)


def test_a_frame_that_was_written_twice_is_the_newer_one() -> None:
    ring, into = SoundRing.private(1), frame(0)
    ring.heard.write(0, 1, 0, frame(1))
    ring.heard.write(0, 1, 0, frame(2))
    assert ring.heard.read(0, 1, 0, into) and np.array_equal(into, frame(2))


def test_a_frame_is_kept_until_its_slot_comes_round_again() -> None:
    ring, into = SoundRing.private(1), frame(0)
    for position in range(10):
        ring.said.write(0, 1, position, frame(position))
    there = [position for position in range(10) if ring.said.read(0, 1, position, into)]
    assert there == list(range(10 - SoundRing.SLOTS, 10))


def test_nothing_is_in_a_fresh_or_an_emptied_row() -> None:
    ring, into = SoundRing.private(2), frame(0)
    assert not any(ring.heard.read(0, epoch, 0, into) for epoch in range(3))
    ring.heard.write(0, 1, 5, frame(1))
    ring.heard.write(1, 1, 5, frame(1))
    ring.heard.empty(0)
    assert not ring.heard.read(0, 1, 5, into) and ring.heard.read(1, 1, 5, into)


@settings(max_examples=50)
@given(
    written=st.dictionaries(st.integers(0, 7), st.tuples(st.integers(1, 3), st.integers(0, 9))),
    asked=st.dictionaries(st.integers(0, 7), st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1),
)
def test_many_rows_at_once_are_as_one_after_the_other(
    written: dict[int, tuple[int, int]], asked: dict[int, tuple[int, int]]
) -> None:
    one_by_one, at_once = SoundRing.private(8), SoundRing.private(8)
    for row, (epoch, position) in written.items():
        one_by_one.said.write(row, epoch, position, frame(row + 1))
    if written:
        epochs, positions = np.array(list(written.values())).T
        rows = np.array(list(written))
        at_once.said.write_many(rows, epochs, positions, np.stack([frame(int(row) + 1) for row in rows]))
    rows, (epochs, positions) = np.array(list(asked)), np.array(list(asked.values())).T
    into = np.ones((len(rows), FRAME_SAMPLES), np.int16)
    there = at_once.said.read_many(rows, epochs, positions, into)
    for lane, row in enumerate(rows.tolist()):
        expected = frame(0)
        assert one_by_one.said.read(row, int(epochs[lane]), int(positions[lane]), expected) == there[lane]
        assert np.array_equal(into[lane], expected if there[lane] else frame(0))


def test_a_ring_in_a_file_is_private_and_shared_by_who_joins_it(tmp_path: Path) -> None:
    path, into = tmp_path / "sound.ring", frame(0)
    engine = SoundRing.create(path, 3)
    server = SoundRing.join(Path(engine.name), 3)
    server.heard.write(2, 1, 0, frame(5))
    engine.said.write(2, 1, 0, frame(6))
    assert engine.heard.read(2, 1, 0, into) and np.array_equal(into, frame(5))
    assert server.said.read(2, 1, 0, into) and np.array_equal(into, frame(6))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        SoundRing.create(path, 3)
