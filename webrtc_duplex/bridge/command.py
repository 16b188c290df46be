"""`webrtc-duplex bridge janus`: the command line of the telephone bridge."""

import argparse
import asyncio
import signal
from contextlib import suppress
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
    asyncio.run(_until_told(BridgeSettings.read(options.table)))
    return 0


async def _until_told(settings: BridgeSettings) -> None:
    """Bridge until SIGTERM comes; calls are ended then, as they are at SIGINT."""
    bridging = asyncio.create_task(controller.run(settings))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, bridging.cancel)
    with suppress(asyncio.CancelledError):
        await bridging
