"""`webrtc-duplex bridge janus`: the command line of the telephone bridge."""

import argparse
import asyncio
from pathlib import Path

from webrtc_duplex.bridge import controller
from webrtc_duplex.bridge.table import BridgeSettings


def add_bridge_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bridge` and its gateways to the commands."""
    bridge = commands.add_parser("bridge", help="tie a telephone gateway to the server")
    gateways = bridge.add_subparsers(required=True, metavar="GATEWAY")
    janus = gateways.add_parser("janus", help="SIP calls through the SIP plugin of a Janus gateway")
    janus.add_argument("--table", type=Path, required=True, help="TOML: addresses, and which caller gets which agent")
    janus.set_defaults(run=_janus)


def _janus(options: argparse.Namespace) -> int:
    asyncio.run(controller.run(BridgeSettings.read(options.table)))
    return 0
