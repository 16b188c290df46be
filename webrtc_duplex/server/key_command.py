"""`webrtc-duplex key`: a new API key, and the line that stands for it in the server's key file."""

import argparse

from webrtc_duplex.server.auth import digest, new_key


def add_key_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("key", help="make an API key, and its line for --api-key-file")
    parser.add_argument("whose", nargs="?", default="", help="who it is for; stands in the line as a reminder")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    key = new_key()
    print(f"key, for the caller:         {key}")
    print(f"line, for the --api-key-file: {digest(key).hex()}  {options.whose}".rstrip())
    return 0
