"""`webrtc-duplex key`."""

import argparse
from pathlib import Path

import pytest

from webrtc_duplex.server.auth import Keys
from webrtc_duplex.server.key_command import add_key_command
from webrtc_duplex.settings import AccessSettings


def test_a_new_key_is_accepted_by_a_server_whose_file_holds_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_key_command(parser.add_subparsers())
    options = parser.parse_args(["key", "the shop"])
    assert options.run(options) == 0
    key, line = (told.partition(":")[2].strip() for told in capsys.readouterr().out.splitlines())
    assert line.endswith("  the shop")
    (tmp_path / "keys").write_text(line)
    assert Keys.read(AccessSettings(api_key_file=tmp_path / "keys")).owner_of(key) is not None
