"""The command line: `webrtc-duplex serve` and the tools beside it."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from webrtc_duplex.bridge.command import add_bridge_command
from webrtc_duplex.errors import DuplexError
from webrtc_duplex.settings import EngineSettings, ServerSettings, Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns its exit code. A failure with a name is one sentence."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
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
    add_bridge_command(commands)
    return parser


def _add_serve_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    server, engine = ServerSettings(), EngineSettings()
    serve = commands.add_parser("serve", help="serve calls over WebRTC, with the page")
    serve.add_argument("--host", default=server.host, help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=server.port, help="port of HTTP (default: %(default)s)")
    serve.add_argument("--model", default=engine.model, help="tiny (embedded), echo, or a checkpoint's directory")
    serve.add_argument("--rows", type=int, default=engine.rows, help="callers at once (default: %(default)s)")
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    from webrtc_duplex import launch

    settings = Settings(
        engine=EngineSettings(model=options.model, rows=options.rows),
        server=ServerSettings(host=options.host, port=options.port),
    )
    return asyncio.run(launch.serve(settings))


if __name__ == "__main__":
    sys.exit(main())
