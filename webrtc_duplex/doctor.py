"""`webrtc-duplex doctor`: would `serve` with these options work here, and if not, what is to be done?"""

import argparse
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from webrtc_duplex import settings
from webrtc_duplex.audio import SoundRing
from webrtc_duplex.errors import DuplexError
from webrtc_duplex.launch.port import require_port
from webrtc_duplex.media import opus
from webrtc_duplex.server.recording import require_folder
from webrtc_duplex.settings import Settings

ROWS_PER_CORE = 70
"""Callers that one core's worth of packets carries; the rows of the model are another matter."""

DESCRIPTORS_PER_CALL = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `advice` is what to do about it."""

    name: str
    found: str
    advice: str | None = None

    def __str__(self) -> str:
        mark = "ok" if self.advice is None else "!!"
        return f"{mark}  {self.name}: {self.found}" + ("" if self.advice is None else f"\n      {self.advice}")


Check = Callable[[Settings], Iterator[Finding]]


def add_doctor_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor`, which takes the options of `serve`."""
    doctor = commands.add_parser("doctor", help="check whether `serve` with the same options would work here")
    settings.add_flags(doctor)
    doctor.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = list(examine(settings.read(vars(options), os.environ)))
    for finding in found:
        print(finding)
    return 1 if any(finding.advice for finding in found) else 0


def examine(wanted: Settings) -> Iterator[Finding]:
    """Everything that can be known without starting."""
    for check in CHECKS:
        yield from check(wanted)


def _libraries(wanted: Settings) -> Iterator[Finding]:
    for name in ("aiortc", "aiohttp", "numpy", "torch"):
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed", f"pip install {name}, or make the environment with scripts/serve")


def _sound(wanted: Settings) -> Iterator[Finding]:
    try:
        opus.Decoder()
        yield Finding("libopus", "found")
    except DuplexError as error:
        yield Finding("libopus", error.message, "apt-get install libopus0, or a wheel of PyAV that brings it")


def _http_port(wanted: Settings) -> Iterator[Finding]:
    try:
        require_port(wanted.server.host, wanted.server.port)
        yield Finding("HTTP port", f"{wanted.server.host}:{wanted.server.port} is free")
    except DuplexError as error:
        yield Finding("HTTP port", error.message, "end what listens there, or choose another --host or --port")


def _origin(wanted: Settings) -> Iterator[Finding]:
    """Browsers give the microphone to secure contexts only."""
    server = wanted.server
    if settings.is_loopback(server.host):
        yield Finding("microphone", "browsers allow it on localhost; pages from other machines would need TLS")
    elif server.tls_cert is not None or server.tls_dev:
        yield Finding("microphone", "browsers allow it over HTTPS")
    else:
        advice = "give --tls-cert and --tls-key, try --tls-dev, or put a TLS proxy in front"
        yield Finding("microphone", f"browsers refuse it on http://{server.host}", advice)


def _udp_ports(wanted: Settings) -> Iterator[Finding]:
    ports, rows = wanted.ice.ports, wanted.engine.rows or 0
    if ports is None:
        yield Finding("UDP ports", "any; a firewall or a container wants a range (--udp-ports)")
        return
    free = sum(_is_free(port) for port in ports)
    found = f"{free} of {len(ports)} ports of {wanted.ice.udp_ports} are free"
    yield Finding(
        "UDP ports", found, None if free >= 2 * rows else f"{rows} rows want {2 * rows} ports: widen the range"
    )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _limits(wanted: Settings) -> Iterator[Finding]:
    rows = wanted.engine.rows or ROWS_PER_CORE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 100 + DESCRIPTORS_PER_CALL * rows
    found = f"{hard} may be open" + (f" ({soft} by default; `serve` raises that itself)" if soft != hard else "")
    advice = f"{rows} rows want {needed}: raise the hard limit (LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
    yield Finding("descriptors", found, None if hard >= needed else advice)
    cores = len(os.sched_getaffinity(0))
    found = f"{cores}; packets of {rows} callers take about {max(1, round(rows / ROWS_PER_CORE))} of them"
    yield Finding("cores", found, None if cores > 1 else "with one core packets and model delay each other")


def _shared_memory(wanted: Settings) -> Iterator[Finding]:
    place, needed = Path("/dev/shm"), SoundRing.size(wanted.engine.rows or ROWS_PER_CORE)
    if not os.access(place, os.W_OK):
        yield Finding("shared memory", f"{place} cannot be written; the sound ring goes to the temporary folder")
        return
    free = shutil.disk_usage(place).free
    advice = None if free > needed else f"the sound ring takes {needed} bytes: more --shm-size for a container"
    yield Finding("shared memory", f"{free >> 20} MiB are free", advice)


def _recordings(wanted: Settings) -> Iterator[Finding]:
    folder = wanted.server.recordings
    if folder is None:
        return
    try:
        require_folder(folder)
    except DuplexError as error:
        yield Finding("recordings", error.message, "choose another --recordings directory")
        return
    free, quota = shutil.disk_usage(folder).free >> 20, wanted.server.recordings_quota_mb
    advice = None if free >= quota else "make room or lower --recordings-quota-mb"
    yield Finding("recordings", f"{folder} has {free} MiB free for {quota} MB", advice)


def _model(wanted: Settings) -> Iterator[Finding]:
    engine = wanted.engine
    if engine.model == "echo":
        yield Finding("model", "the echo needs none")
        return
    from webrtc_duplex.model import runner  # torch takes seconds to import, so only where it is asked about

    try:
        rows = runner.rows_in_memory(engine.model, engine.devices[0], engine.kv_dtype)
    except DuplexError as error:
        yield Finding("model", error.message, "choose another --model or --device")
        return
    wanted_rows = engine.rows or 1
    found = f"memory for {rows} rows; how many are stepped in time, `serve` measures when it starts"
    advice = None if rows >= wanted_rows else f"{wanted_rows} rows do not fit: lower --rows"
    yield Finding("model", f"{engine.model} on {engine.devices[0]}: {found}", advice)


CHECKS: tuple[Check, ...] = (
    _libraries,
    _sound,
    _http_port,
    _origin,
    _udp_ports,
    _limits,
    _shared_memory,
    _recordings,
    _model,
)
