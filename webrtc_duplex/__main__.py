"""The command line: `webrtc-duplex serve` and the tools beside it."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import uvloop

from webrtc_duplex import settings
from webrtc_duplex.bridge.command import add_bridge_command
from webrtc_duplex.doctor import add_doctor_command
from webrtc_duplex.errors import DuplexError
from webrtc_duplex.inspect_command import add_inspect_command
from webrtc_duplex.offline import add_offline_command
from webrtc_duplex.server.key_command import add_key_command
from webrtc_duplex.voice_commands import add_voices_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns its exit code. A failure with a name is one sentence."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aioice").setLevel(logging.WARNING)  # a line for each candidate pair and each of its states
    try:
        return int(options.run(options))
    except DuplexError as error:
        print(f"webrtc-duplex: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="webrtc-duplex", description=__doc__)
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve_command(commands)
    add_offline_command(commands)
    add_voices_command(commands)
    add_inspect_command(commands)
    add_doctor_command(commands)
    add_key_command(commands)
    _add_settings_command(commands)
    add_bridge_command(commands)
    return parser


def _add_serve_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser("serve", help="serve calls over WebRTC, with the page")
    settings.add_flags(serve)
    serve.set_defaults(run=_serve)


def _add_settings_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    show = commands.add_parser("settings", help="every setting as a table: flag, environment variable, default")
    show.set_defaults(run=lambda options: print(settings.table()) or 0)


def _serve(options: argparse.Namespace) -> int:
    from webrtc_duplex import launch

    return uvloop.run(launch.serve(settings.read(vars(options), os.environ)))


if __name__ == "__main__":
    sys.exit(main())
