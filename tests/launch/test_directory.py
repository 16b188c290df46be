"""Where a server's processes meet."""

from pathlib import Path

from webrtc_duplex.launch.directory import runtime_directory


def test_the_runtime_directory_is_private_and_goes_with_its_block(tmp_path: Path) -> None:
    with runtime_directory(tmp_path) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        with runtime_directory(tmp_path) as another:
            assert another != directory and directory.exists()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_server_left_is_swept_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "webrtc-duplex-left"
    left.mkdir()
    (left / "lock").touch()
    (left / "sound.ring").touch()
    with runtime_directory(tmp_path):
        assert not left.exists()
