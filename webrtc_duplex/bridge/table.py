"""What the bridge is told: where Janus and the server are, under which SIP address to answer, and who gets which agent.

A TOML file, read once and checked once:

    [janus]
    url = "http://127.0.0.1:8088/janus"

    [server]
    url = "http://127.0.0.1:8080"
    api_key_file = "key.txt"            # optional

    [sip]
    address = "sip:agent@192.0.2.10"    # a guest: calls reach it at Janus' own SIP port
    secret = "..."                      # with a secret it registers at `proxy`
    proxy = "sip:pbx.example"
    lines = 8                           # calls at once; more than the server's rows, so that it refuses, not Janus

    [default]
    voice = "NATF2"
    instructions = "You answer the telephone of a small hotel."

    [[route]]                           # the first that fits
    number = "1001"                     # user part of the called address
    instructions = "You are the night desk."

    [[route]]
    header = "X-Agent: sales"           # a header of the INVITE
    instructions = "You sell bicycles."

    [keys]
    "#" = "hang_up"
    "*" = "recording"                   # on, and off again; the server needs a directory for it

    [metrics]                           # optional: Prometheus' text at http://HOST:PORT/metrics
    host = "127.0.0.1"
    port = 9108
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self, cast

from webrtc_duplex.errors import RequestError

Table = Mapping[str, object]
DTMF_KEYS = frozenset("0123456789*#ABCD")


class KeyAction(StrEnum):
    """What a key of the caller's telephone does."""

    HANG_UP = "hang_up"
    RECORDING = "recording"


@dataclass(frozen=True, slots=True)
class Agent:
    """The prompt of a call; None is the server's default."""

    voice: str | None = None
    instructions: str | None = None
    seed: int | None = None

    def as_session(self) -> dict[str, str | int]:
        """The session object of `POST /v1/realtime/calls`."""
        wishes = {"voice": self.voice, "instructions": self.instructions, "seed": self.seed}
        return {name: wish for name, wish in wishes.items() if wish is not None}


@dataclass(frozen=True, slots=True)
class Route:
    """Calls to `number`, or with `header`, get `agent`; where both are given both must fit."""

    agent: Agent
    number: str | None = None
    header: tuple[str, str] | None = None

    def fits(self, number: str, headers: Mapping[str, str]) -> bool:
        """Whether a call to this number with these INVITE headers is meant; header names know no case."""
        if self.number is not None and self.number != number:
            return False
        if self.header is None:
            return self.number is not None
        name, value = self.header
        return any(name == there.lower() and value == headers[there].strip() for there in headers)


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """The whole table, checked."""

    janus_url: str
    server_url: str
    address: str
    api_key: str | None = None
    secret: str | None = None
    proxy: str | None = None
    lines: int = 8
    default: Agent = Agent()
    routes: tuple[Route, ...] = ()
    keys: Mapping[str, KeyAction] = field(default_factory=dict)
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None

    def agent_for(self, number: str, headers: Mapping[str, str]) -> Agent:
        """The agent of the first route that fits, else the default one."""
        return next((route.agent for route in self.routes if route.fits(number, headers)), self.default)

    @property
    def header_names(self) -> list[str]:
        """INVITE headers that the routes ask about; Janus passes on only those it is told of."""
        return sorted({route.header[0] for route in self.routes if route.header is not None})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file; raises RequestError with a sentence for whatever is wrong in it."""
        try:
            document = tomllib.loads(path.read_text())
        except OSError as error:
            raise RequestError(f"the bridge's table {path} cannot be read: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise RequestError(f"the bridge's table {path} is not TOML: {error}") from error
        return cls.parse(document, path.parent)

    @classmethod
    def parse(cls, document: Table, folder: Path) -> Self:
        """The settings of a parsed file; paths in it are relative to `folder`."""
        _only(document, "the table", {"janus", "server", "sip", "default", "route", "keys", "metrics"})
        janus = _section(document, "janus", {"url"})
        server = _section(document, "server", {"url", "api_key_file"})
        sip = _section(document, "sip", {"address", "secret", "proxy", "lines"})
        metrics = _section(document, "metrics", {"host", "port"})
        address = _text(sip, "sip.address") or ""
        if not address.startswith(("sip:", "sips:")):
            raise RequestError(f'sip.address must be a SIP address such as "sip:agent@192.0.2.10", not {address!r}')
        return cls(
            janus_url=(_text(janus, "janus.url") or "http://127.0.0.1:8088/janus").rstrip("/"),
            server_url=(_text(server, "server.url") or "http://127.0.0.1:8080").rstrip("/"),
            api_key=_secret_of(_text(server, "server.api_key_file"), folder),
            address=address,
            secret=_text(sip, "sip.secret"),
            proxy=_text(sip, "sip.proxy"),
            lines=_lines(sip),
            default=_agent(_section(document, "default", AGENT_KEYS), "default"),
            routes=tuple(_routes(document)),
            keys=_keys(_section(document, "keys", DTMF_KEYS)),
            metrics_host=_text(metrics, "metrics.host") or "127.0.0.1",
            metrics_port=_port(metrics),
        )


AGENT_KEYS = {"voice", "instructions", "seed"}


def _only(table: Table, name: str, known: "set[str] | frozenset[str]") -> None:
    if strange := sorted(set(table) - known):
        raise RequestError(f"{name} knows {', '.join(sorted(known))}; it does not know {', '.join(strange)}")


def _section(document: Table, name: str, known: "set[str] | frozenset[str]") -> Table:
    section = document.get(name, {})
    if not isinstance(section, dict):
        raise RequestError(f"[{name}] must be a section, not {section!r}")
    _only(section, f"[{name}]", known)
    return section


def _text(section: Table, name: str) -> str | None:
    value = section.get(name.rpartition(".")[2])
    if value is None or isinstance(value, str):
        return value
    raise RequestError(f"{name} must be a text, not {value!r}")


def _whole(section: Table, name: str) -> int | None:
    value = section.get(name.rpartition(".")[2])
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise RequestError(f"{name} must be a whole number, not {value!r}")


def _lines(sip: Table) -> int:
    lines = _whole(sip, "sip.lines")
    if lines is not None and lines < 1:
        raise RequestError(f"sip.lines must be at least 1, not {lines}")
    return 8 if lines is None else lines


def _port(metrics: Table) -> int | None:
    port = _whole(metrics, "metrics.port")
    if port is not None and not 0 < port < 65536:
        raise RequestError(f"metrics.port must be 1 to 65535, not {port}")
    return port


def _agent(section: Table, name: str) -> Agent:
    return Agent(
        voice=_text(section, f"{name}.voice"),
        instructions=_text(section, f"{name}.instructions"),
        seed=_whole(section, f"{name}.seed"),
    )


def _routes(document: Table) -> list[Route]:
    entries = document.get("route", [])
    if not isinstance(entries, list):
        raise RequestError("routes are written as [[route]], each with a number or a header")
    return [_route(cast(Table, entry), f"route {index}") for index, entry in enumerate(entries, start=1)]


def _route(entry: Table, name: str) -> Route:
    _only(entry, name, {"number", "header", *AGENT_KEYS})
    number, header = _text(entry, f"{name}.number"), _text(entry, f"{name}.header")
    if number is None and header is None:
        raise RequestError(f"{name} needs a number or a header to know its calls by")
    key, colon, value = (header or "").partition(":")
    if header is not None and not (colon and key.strip()):
        raise RequestError(f'{name}.header must read "Name: value", not {header!r}')
    return Route(_agent(entry, name), number, (key.strip().lower(), value.strip()) if header is not None else None)


def _keys(section: Table) -> dict[str, KeyAction]:
    actions = {}
    for key, action in section.items():
        try:
            actions[key] = KeyAction(str(action))
        except ValueError:
            raise RequestError(f"key {key} can do {', '.join(KeyAction)}; it cannot do {action!r}") from None
    return actions


def _secret_of(name: str | None, folder: Path) -> str | None:
    if name is None:
        return None
    try:
        return (folder / name).read_text().strip()
    except OSError as error:
        raise RequestError(f"server.api_key_file {name} cannot be read: {error.strerror}") from error
