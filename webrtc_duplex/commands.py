"""The commands: `webrtc-duplex serve` and the tools beside it."""

import argparse
import os
import sys
from collections.abc import Sequence

import uvloop

from webrtc_duplex import logs, settings
from webrtc_duplex.bridge.command import add_bridge_command
from webrtc_duplex.doctor import add_doctor_command
from webrtc_duplex.errors import DuplexError, RequestError
from webrtc_duplex.inspect_command import add_inspect_command
from webrtc_duplex.offline import add_offline_command
from webrtc_duplex.server.key_command import add_key_command
from webrtc_duplex.voice_commands import add_voices_command


def run(arguments: Sequence[str] | None) -> int:
    """Run the command that the arguments name; returns its exit code. A failure with a name is one sentence."""
    options = _parser().parse_args(arguments)
    logs.configure(options.log_level, "text")
    try:
        return int(options.run(options))
    except DuplexError as error:
        print(f"webrtc-duplex: {error.message}", file=sys.stderr)
        return 2


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
    serve.add_argument(
        "--cluster",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="try Ray Serve on this machine: N replicas, each a server with its engine (extra `cluster`)",
    )
    serve.set_defaults(run=_serve)


def _add_settings_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    show = commands.add_parser("settings", help="every setting as a table: flag, environment variable, default")
    show.set_defaults(run=lambda options: print(settings.table()) or 0)


def _serve(options: argparse.Namespace) -> int:
    if options.cluster is not None:
        return _serve_cluster(options)
    from webrtc_duplex.launch.serve import serve

    wanted = settings.read(vars(options), os.environ)
    logs.configure(options.log_level, wanted.server.log_format)
    return uvloop.run(serve(wanted))


def _serve_cluster(options: argparse.Namespace) -> int:
    try:
        from webrtc_duplex.cluster.command import serve_cluster
    except ImportError as error:
        raise RequestError(f"--cluster needs Ray ({error}): pip install 'webrtc-duplex[cluster]'") from error
    flags = vars(options)
    if flags.get("config") is not None:
        raise RequestError("--cluster takes flags and the environment, not a --config file", param="config")
    given = {knob.name: str(flags[knob.name]) for knob in settings.knobs() if knob.name in flags}
    return serve_cluster(settings.read(flags, os.environ), given, options.cluster)
