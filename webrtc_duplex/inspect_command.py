"""`webrtc-duplex inspect DIR`: does a checkpoint say what we assume of it?"""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_inspect_command(commands: "Subparsers") -> None:
    """Add `inspect`."""
    inspect = commands.add_parser("inspect", help="what to look at first in a checkpoint: steps, voices, codec, memory")
    inspect.add_argument("model", help="a checkpoint's directory or hub id")
    inspect.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    from webrtc_duplex.model.checkpoint import open_checkpoint
    from webrtc_duplex.model.hub import find_checkpoint
    from webrtc_duplex.model.inspection import inspect

    bad = 0
    for finding in inspect(open_checkpoint(find_checkpoint(options.model))):
        print("good " if finding.good else "WRONG", finding.text)
        bad += not finding.good
    return 1 if bad else 0
