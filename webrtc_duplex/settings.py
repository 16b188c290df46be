"""Every knob, read once and checked once; frozen from then on.

A knob is a field of one of the dataclasses here, and that is the only place it is named. Its value comes from the first
of these that has it: the flag (`--media-timeout-s 5`), the environment (`WEBRTC_DUPLEX_MEDIA_TIMEOUT_S=5`), the file of
`--config` (`[server]`, then `media_timeout_s = 5`), the default below. `webrtc-duplex settings` prints all of them as a
table.
"""

import argparse
import dataclasses
import ipaddress
import re
import sys
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar, cast, get_args, get_origin, get_type_hints

from webrtc_duplex import logs
from webrtc_duplex.errors import RequestError

T = TypeVar("T")

ENVIRONMENT_PREFIX = "WEBRTC_DUPLEX_"

_KEY = re.compile(r"[!-~]{1,512}", re.ASCII)
"""What fits into an Authorization header."""


_PLACE = re.compile(r"[a-z0-9]{1,32}", re.ASCII)
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?", re.ASCII)
_STUN_URL = re.compile(r"stuns?:[^\s<>/?#]+", re.ASCII)
_TURN_URL = re.compile(r"turns?:[^\s<>/?#]+(\?transport=(udp|tcp))?", re.ASCII)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#]+/?", re.ASCII | re.IGNORECASE)

ROWS_OF_A_WORKER = 60
"""Callers that one process carries with a core to itself."""
MOST_WORKERS = 64
MOST_ROWS = MOST_WORKERS * ROWS_OF_A_WORKER

MOST_PHASES = 16
"""Sub-ticks of 5 ms, the time of the fastest step there is."""

LONGEST_S = 31_536_000
"""A year: whoever wants no end leaves it out."""

LEAST_SIGNING_KEY = 32
"""Characters: nobody is to guess it."""


def knob(default: T, help: str) -> T:
    """A field with a default and the sentence that explains it, in `--help` and in the table."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine process is started with."""

    model: str = knob("tiny", "`tiny` (embedded), `echo`, or the directory of a checkpoint")
    rows: int | None = knob(
        4, "callers at once on a device; `auto`: as many as steps measured at start-up leave time for"
    )
    phases: int = knob(1, "sub-ticks in 80 ms; rows are spread over them")
    device: str = knob("cpu", "torch device of the model; several with commas: an engine for each")
    kv_dtype: str = knob("auto", "keys and values: `auto`, as the weights, or `int8`, half of bf16's memory")
    resume_grace_s: float = knob(10.0, "how long the row of a vanished caller is kept; 0: it ends at once")
    connect_deadline_s: float = knob(15.0, "how long a lease may wait for its caller's media")

    def __post_init__(self) -> None:
        _between("rows", self.rows, 1, MOST_ROWS)
        _between("phases", self.phases, 1, MOST_PHASES)
        _between("resume_grace_s", self.resume_grace_s, 0, LONGEST_S)
        _between("connect_deadline_s", self.connect_deadline_s, 0, LONGEST_S)
        if self.kv_dtype not in ("auto", "int8"):
            raise RequestError(f"kv_dtype must be auto or int8, not {self.kv_dtype!r}", param="kv_dtype")
        _each("device", self.devices, _DEVICE, "cpu, cuda or cuda:N")

    @property
    def devices(self) -> tuple[str, ...]:
        """Each of which has an engine of its own."""
        return tuple(name.strip() for name in self.device.split(","))


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What one server process is started with."""

    host: str = knob("127.0.0.1", "address that HTTP listens on")
    port: int = knob(8080, "port that HTTP listens on; 0: the system chooses")
    media_workers: int | None = knob(None, "processes that carry calls; 1: the server itself; not set: one for 60 rows")
    media_timeout_s: float = knob(5.0, "no RTP, RTCP or STUN for so long: the caller has vanished")
    max_duration_s: float | None = knob(None, "a call is ended after so long")
    idle_timeout_s: float | None = knob(None, "a call in which nobody has spoken for so long is ended")
    drain_timeout_s: float = knob(10.0, "how long callers may go on when the server is asked to end; asked twice: 0")
    recordings: Path | None = knob(None, "directory for the calls whose callers ask to be recorded; without it none is")
    recordings_quota_mb: int = knob(1000, "what all recordings together may take up")
    log_format: str = knob("text", "`text`, or `json`: an object a line, the call's id a field of it")
    static: Path | None = knob(None, "directory of the page, instead of the one in the package")
    place: str = knob("0", "name of this server in the ids of its calls, where several share a signing_key")
    signing_key: str | None = knob(None, "what ids and secrets of calls are signed with; best in the environment")
    tls_cert: Path | None = knob(None, "certificate chain (PEM): serve HTTPS, which browsers want off this machine")
    tls_key: Path | None = knob(None, "its private key (PEM)")
    tls_dev: bool = knob(False, "serve HTTPS with a self-signed certificate made at start, for development")

    def __post_init__(self) -> None:
        _between("port", self.port, 0, 65535)
        if self.log_format not in logs.FORMATS:
            raise RequestError(f"log_format must be text or json, not {self.log_format!r}", param="log_format")
        _between("media_workers", self.media_workers, 1, MOST_WORKERS)
        if not _PLACE.fullmatch(self.place):
            raise RequestError(f"place must be 1-32 lower-case letters and digits, not {self.place!r}", param="place")
        if self.signing_key is not None and len(self.signing_key) < LEAST_SIGNING_KEY:
            raise RequestError(f"signing_key must have at least {LEAST_SIGNING_KEY} characters", param="signing_key")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise RequestError("tls_cert and tls_key belong together: one of them is missing", param="tls_cert")
        if self.tls_dev and self.tls_cert is not None:
            raise RequestError("tls_dev makes a certificate, so there is no use for a tls_cert", param="tls_dev")
        _between("media_timeout_s", self.media_timeout_s, 0, LONGEST_S)
        _between("max_duration_s", self.max_duration_s, 0, LONGEST_S)
        _between("idle_timeout_s", self.idle_timeout_s, 0, LONGEST_S)
        _between("drain_timeout_s", self.drain_timeout_s, 0, LONGEST_S)
        _at_least("recordings_quota_mb", self.recordings_quota_mb, 1)


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may call, and how much."""

    api_keys: tuple[str, ...] = knob((), "keys that may call; best in the environment, as flags show in process lists")
    api_key_file: Path | None = knob(
        None, "file of keys that may call, a line the SHA-256 of one (`webrtc-duplex key`)"
    )
    operator_key: str | None = knob(None, "key of `/metrics` and of the list of calls")
    insecure: bool = knob(False, "let everybody call without a key from other machines too")
    allowed_origins: tuple[str, ...] = knob((), "other origins whose pages may call; `*`: all")
    trust_proxy: bool = knob(False, "take a caller's address from X-Forwarded-For, as a proxy of ours wrote it")
    requests_per_minute_per_key: int = knob(600, "attempts to open a call by one key")
    requests_per_minute_per_address: int = knob(60, "attempts to open a call from one address; loopback is free")
    max_calls_per_key: int | None = knob(None, "calls at once by one key")
    max_calls_per_address: int | None = knob(None, "calls at once from one address; loopback is free")
    max_connecting_per_address: int = knob(8, "calls not yet connected, from one address; loopback is free")

    def __post_init__(self) -> None:
        _keys("api_keys", self.api_keys)
        _keys("operator_key", () if self.operator_key is None else (self.operator_key,))
        _each("allowed_origins", self.allowed_origins, _ORIGIN, "as https://host:port, or *")
        _at_least("requests_per_minute_per_key", self.requests_per_minute_per_key, 1)
        _at_least("requests_per_minute_per_address", self.requests_per_minute_per_address, 1)
        _at_least("max_calls_per_key", self.max_calls_per_key, 1)
        _at_least("max_calls_per_address", self.max_calls_per_address, 1)
        _at_least("max_connecting_per_address", self.max_connecting_per_address, 1)

    @property
    def open(self) -> bool:
        """Whether no key is asked for."""
        return not self.api_keys and self.api_key_file is None


@dataclass(frozen=True, slots=True)
class IceSettings:
    """Where media goes: our own UDP ports and address, and the STUN and TURN servers that callers are told of."""

    udp_ports: str | None = knob(None, "range that media's UDP ports are from, as `50000-50999`; else any")
    public_ip: str | None = knob(None, "address that callers reach this machine by, where a NAT hides it (1:1)")

    stun_urls: tuple[str, ...] = knob((), "STUN servers for callers, as `stun:host:port`")
    turn_urls: tuple[str, ...] = knob((), "TURN servers for callers, as `turn:host:port?transport=udp`")
    turn_secret: str | None = knob(None, "secret shared with the TURN servers, for credentials that expire")
    turn_ttl_s: float = knob(86_400.0, "how long such credentials last")
    gather: bool = knob(False, "use the first STUN and TURN server for our own candidates too; an answer waits 1 s")
    relay_only: bool = knob(False, "show callers no candidates but those of the TURN server; needs `gather`")

    def __post_init__(self) -> None:
        _each("stun_urls", self.stun_urls, _STUN_URL, "as stun:host:port")
        _each("turn_urls", self.turn_urls, _TURN_URL, "as turn:host:port?transport=udp")
        _between("turn_ttl_s", self.turn_ttl_s, 60, LONGEST_S)
        if self.turn_urls and not self.turn_secret:
            raise RequestError(
                "turn_urls need a turn_secret, from which callers' credentials are made", param="turn_secret"
            )
        if self.relay_only and not (self.gather and self.turn_urls):
            raise RequestError("relay_only needs turn_urls, and gather", param="relay_only")
        if self.public_ip is not None:
            _address("public_ip", self.public_ip)
        _ports("udp_ports", self.udp_ports)

    @property
    def ports(self) -> range | None:
        """The range of `udp_ports`."""
        return _ports("udp_ports", self.udp_ports)

    def share(self, number: int, count: int) -> Self:
        """The settings of one of `count` media workers: no two share a port."""
        ports = self.ports
        if ports is None:
            return self
        first, end = (len(ports) * edge // count for edge in (number, number + 1))
        return dataclasses.replace(self, udp_ports=f"{ports[first]}-{ports[end - 1]}")


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration of one `webrtc-duplex serve`; each field is a section of the TOML file."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    ice: IceSettings = field(default_factory=IceSettings)

    def __post_init__(self) -> None:
        workers, ports = self.media_workers or 1, self.ice.ports
        if ports is not None and len(ports) < workers:
            raise RequestError(f"{workers} media_workers need a UDP port each, and more", param="udp_ports")
        if self.access.open and not self.access.insecure and not is_loopback(self.server.host):
            raise RequestError(
                f"on host {self.server.host!r} everybody who reaches this machine could call: "
                "set api_keys or api_key_file, or say --insecure",
                param="insecure",
            )

    @property
    def media_workers(self) -> int | None:
        """Processes that are to carry calls; None where the engine has yet to find out how many rows there are."""
        if self.server.media_workers is not None or self.engine.rows is None:
            return self.server.media_workers
        return workers_for(self.engine.rows * len(self.engine.devices))


def workers_for(rows: int) -> int:
    """As many processes as it takes to carry so many calls, where each has a core to itself."""
    return -(-rows // ROWS_OF_A_WORKER)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise RequestError(f"{name} must be at least {least:g}, not {value:g}", param=name)


def _between(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise RequestError(f"{name} must be between {least:g} and {most:.10g}, not {value:.10g}", param=name)


def _each(name: str, values: Iterable[str], pattern: re.Pattern[str], wanted: str) -> None:
    for value in values:
        if not pattern.fullmatch(value):
            raise RequestError(f"{name} must be {wanted}, not {value!r}", param=name)


def _keys(name: str, values: Iterable[str]) -> None:
    """Whatever they are, they are not shown."""
    if not all(map(_KEY.fullmatch, values)):
        raise RequestError(f"{name}: a key is 1 to 512 visible ASCII characters, without blanks", param=name)


def _address(name: str, value: str) -> None:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise RequestError(f"{name} must be an IP address, not {value!r}", param=name) from None


def _ports(name: str, value: str | None) -> range | None:
    if value is None:
        return None
    first, _, last = value.partition("-")
    try:
        ports = range(int(first), int(last) + 1)
    except ValueError:
        raise RequestError(f"{name} must be two ports with a hyphen between, not {value!r}", param=name) from None
    if not ports or not 1024 <= ports[0] <= ports[-1] <= 65535:
        raise RequestError(f"{name} must rise within 1024-65535, not {value!r}", param=name)
    return ports


# ---- reading


@dataclass(frozen=True, slots=True)
class Knob:
    """One knob, as flags, environment and file name it."""

    section: str
    name: str
    kind: object
    default: object
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    def parse(self, value: object, where: str) -> object:
        """The value that a text, or a value of the TOML file, stands for; RequestError says what was wanted."""
        try:
            return _parse(self.kind, value)
        except ValueError as error:
            message = f"{where} must be {error}, not {value!r}"
            raise RequestError(message, param=self.name) from None


def knobs() -> Iterator[Knob]:
    """All knobs, section by section."""
    for section in dataclasses.fields(Settings):
        kinds = get_type_hints(section.type)
        for entry in dataclasses.fields(cast(type[EngineSettings], section.type)):
            yield Knob(section.name, entry.name, kinds[entry.name], entry.default, entry.metadata["help"])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each knob; one that is not given leaves no trace in the parsed options."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    for knob in knobs():
        help = f"{knob.help} (default: {_written(knob)})"
        if knob.kind is bool:
            parser.add_argument(
                knob.flag, dest=knob.name, action="store_const", const="true", default=argparse.SUPPRESS, help=help
            )
        else:
            parser.add_argument(knob.flag, dest=knob.name, metavar=_metavar(knob), default=argparse.SUPPRESS, help=help)


def read(flags: Mapping[str, object], environment: Mapping[str, str]) -> Settings:
    """The settings that flags, environment, and the file of `config` give together."""
    config = flags.get("config")
    document = _document(Path(str(config))) if config is not None else {}
    values: dict[str, dict[str, object]] = {section.name: {} for section in dataclasses.fields(Settings)}
    for knob in knobs():
        in_file = document.get(knob.section, {})
        if knob.name in flags:
            values[knob.section][knob.name] = knob.parse(flags[knob.name], knob.flag)
        elif knob.variable in environment:
            values[knob.section][knob.name] = knob.parse(environment[knob.variable], knob.variable)
        elif knob.name in in_file:
            where = f"{knob.section}.{knob.name} in {config}"
            values[knob.section][knob.name] = knob.parse(in_file[knob.name], where)
    sections = {section.name: section.type for section in dataclasses.fields(Settings)}
    return Settings(**{name: cast(type, kind)(**values[name]) for name, kind in sections.items()})


def _document(path: Path) -> dict[str, dict[str, object]]:
    """The file, with nothing in it that no knob is for."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise RequestError(f"the settings file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the settings file {path} is not TOML: {error}") from error
    known: dict[str, set[str]] = {}
    for knob in knobs():
        known.setdefault(knob.section, set()).add(knob.name)
    for section, entries in document.items():
        if section not in known or not isinstance(entries, dict):
            raise RequestError(f"{path} has sections {', '.join(known)}; it does not know {section}")
        if strange := sorted(set(entries) - known[section]):
            raise RequestError(f"[{section}] in {path} does not know {', '.join(strange)}")
    return document


def _parse(kind: object, value: object) -> object:
    """Raises ValueError naming what was wanted."""
    if get_origin(kind) is types.UnionType:  # X | None: `auto` and nothing mean None
        inner = next(one for one in get_args(kind) if one is not type(None))
        return None if value in ("", "auto", None) else _parse(inner, value)
    if get_origin(kind) is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise ValueError("texts with commas between them")
        return tuple(part.strip() for part in parts if part.strip())
    if kind is bool:
        return _parse_bool(value)
    if kind is int or kind is float:
        return _parse_number(kind, value)
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("a text")
    return Path(value).expanduser() if kind is Path else value


def _parse_bool(value: object) -> bool:
    match str(value).lower():
        case "true" | "yes" | "on" | "1":
            return True
        case "false" | "no" | "off" | "0":
            return False
    raise ValueError("true or false")


def _parse_number(kind: object, value: object) -> float:
    wanted = "a whole number" if kind is int else "a number"
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or (kind is int and isinstance(value, float))
    ):
        raise ValueError(wanted)
    try:
        number = int(value) if kind is int else float(value)
    except (ValueError, OverflowError):
        raise ValueError(wanted) from None
    if not abs(number) <= sys.float_info.max:
        raise ValueError(wanted)
    return number


# ---- telling


def table() -> str:
    """All knobs as a Markdown table."""
    lines = ["| section | flag | environment | default | what |", "|---|---|---|---|---|"]
    for knob in knobs():
        lines.append(f"| {knob.section} | `{knob.flag}` | `{knob.variable}` | {_written(knob)} | {knob.help} |")
    return "\n".join(lines)


def _written(knob: Knob) -> str:
    match knob.default:
        case None:
            return "none"
        case tuple():
            return ",".join(knob.default) or "none"
        case bool():
            return str(knob.default).lower()
    return str(knob.default)


def _metavar(knob: Knob) -> str:
    kinds = get_args(knob.kind) if get_origin(knob.kind) is types.UnionType else (knob.kind,)
    if Path in kinds:
        return "PATH"
    return "N" if {int, float} & set(kinds) else "TEXT"
