"""The command line: `webrtc-duplex COMMAND`, or `python -m webrtc_duplex COMMAND`."""

import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""Exit code for Ctrl-C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns its exit code."""
    try:
        from webrtc_duplex.commands import run  # here, as that takes a second, in which Ctrl-C may come too

        return run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
