"""Real telephones for tests: Janus as the gateway, baresip as the phone, each a process with a folder of its own.

All of them use one local address: Janus' RTP sockets are connected, and drop what comes from another one. The address
must not be a loopback one, as libnice gathers no candidates there; `scripts/test_sip.sh` makes a network namespace.
"""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

JANUS_PLUGINS = Path("/usr/lib/x86_64-linux-gnu/janus")
BARESIP_MODULES = Path("/usr/lib/baresip/modules")
MEDIA_PORTS = range(21_000, 24_001)
"""Those of Janus' RTP and ICE sockets."""

JANUS = """
general: {{
    configs_folder = "{folder}"
    plugins_folder = "{plugins}/plugins"
    transports_folder = "{plugins}/transports"
    log_to_stdout = true
    debug_level = 4
}}
nat: {{ ice_enforce_list = "{address}" }}
media: {{ rtp_port_range = "{first_port}-{last_port}" }}
plugins: {{ disable = "{other_plugins}" }}
transports: {{ disable = "{other_transports}" }}
"""

JANUS_SIP = """
general: {{
    local_ip = "{address}"
    sdp_ip = "{address}"
    behind_nat = false
    rtp_port_range = "{first_port}-{last_port}"
}}
"""

JANUS_HTTP = """
general: {{
    base_path = "/janus"
    http = true
    port = {port}
    ip = "127.0.0.1"
    https = false
}}
admin: {{ admin_http = false }}
"""

BARESIP = """
poll_method epoll
sip_listen {address}:0
audio_source {source}
audio_player aufile,/dev/null
ausrc_srate 48000
ausrc_channels 2
auplay_srate 48000
audio_buffer 20-160
rtp_ports {first_port}-{last_port}
rtcp_mux yes
jitter_buffer_delay 0-0
dns_server 127.0.0.1:53
snd_path {folder}
module_path {modules}
{module_lines}
ctrl_tcp_listen 127.0.0.1:{control_port}
"""


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask the process to end, and make it, if it does not within five seconds."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 5)
    except TimeoutError:
        process.kill()
        await process.wait()


class Janus:
    """A running gateway; `url` is its HTTP API."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}/janus"

    def sip_port(self) -> int:
        """The UDP port of its SIP stack: the system chose it when an account was registered."""
        sockets = subprocess.run(["ss", "-Hlnup"], check=True, capture_output=True, text=True).stdout
        for line in sockets.splitlines():
            found = re.search(r":(\d+)\s", line)
            if found and f"pid={self.process.pid}," in line and int(found[1]) not in MEDIA_PORTS:
                return int(found[1])
        raise AssertionError(f"Janus listens on no UDP port for SIP:\n{sockets}")


@asynccontextmanager
async def running_janus(folder: Path, address: str, port: int = 8088) -> AsyncIterator[Janus]:
    """Janus with only its SIP plugin and plain HTTP, for as long as the block runs."""
    write_janus(folder, address, port)
    with (folder / "janus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "janus", "-F", str(folder), "-C", str(folder / "janus.jcfg"), stdout=log, stderr=log
        )
        try:
            await until_answered(f"http://127.0.0.1:{port}/janus/info")
            yield Janus(process, port)
        finally:
            await end(process)


def write_janus(folder: Path, address: str, port: int) -> None:
    plugins = {path.name for path in (JANUS_PLUGINS / "plugins").glob("*.so")} - {"libjanus_sip.so"}
    transports = {path.name for path in (JANUS_PLUGINS / "transports").glob("*.so")} - {"libjanus_http.so"}
    facts = {
        "folder": folder,
        "plugins": JANUS_PLUGINS,
        "address": address,
        "port": port,
        "other_plugins": ",".join(sorted(plugins)),
        "other_transports": ",".join(sorted(transports)),
        "first_port": MEDIA_PORTS[0],
        "last_port": MEDIA_PORTS[-1],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "janus.jcfg").write_text(JANUS.format(**facts))
    (folder / "janus.plugin.sip.jcfg").write_text(JANUS_SIP.format(**facts))
    (folder / "janus.transport.http.jcfg").write_text(JANUS_HTTP.format(**facts))


async def until_answered(url: str, limit_s: float = 15.0) -> None:
    """Wait until a GET of the URL gets any answer."""
    async with asyncio.timeout(limit_s), aiohttp.ClientSession() as http:
        while True:
            with suppress(aiohttp.ClientError):
                async with http.get(url):
                    return
            await asyncio.sleep(0.05)


class Phone:
    """A running baresip, driven over its control socket."""

    def __init__(self, folder: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._folder = folder
        self._reader = reader
        self._writer = writer

    async def command(self, name: str, parameters: str = "") -> None:
        """Give a command of baresip's menu (`dial`, `hangup`, `sndcode`, ...)."""
        body = json.dumps({"command": name, "params": parameters, "token": name}).encode()
        self._writer.write(b"%d:%s," % (len(body), body))
        await self._writer.drain()

    async def dial(self, uri: str) -> None:
        """Call; returns when the other side has answered."""
        await self.command("dial", uri)
        event = await self.event("CALL_ESTABLISHED", "CALL_CLOSED")
        assert event["type"] == "CALL_ESTABLISHED", event

    async def hang_up(self) -> None:
        await self.command("hangup")
        await self.event("CALL_CLOSED")

    async def press(self, keys: str) -> None:
        """Press keys, as RFC 4733 events of 200 ms or so each."""
        for key in keys:
            await self.command("sndcode", key)
            await asyncio.sleep(0.25)  # a finger's time, not a clock of ours
            await self.command("sndcode", "\x04")  # baresip's key-up
            await asyncio.sleep(0.1)

    async def event(self, *types: str) -> dict[str, str]:
        """The next event of one of these types; others, and answers to commands, are passed over."""
        while True:
            message = await self._message()
            if message.get("event") and message.get("type") in types:
                return message

    async def _message(self) -> dict[str, str]:
        length = await self._reader.readuntil(b":")
        message = await self._reader.readexactly(int(length[:-1]) + 1)
        parsed: dict[str, str] = json.loads(message[:-1])
        return parsed

    def trace(self) -> str:
        """Its log, with every SIP message sent and received."""
        return (self._folder / "baresip.log").read_text(errors="replace")

    def heard(self) -> Path:
        """The WAV file of what the phone's listener hears."""
        (path,) = self._folder.glob("*-dec.wav")
        return path


@asynccontextmanager
async def running_phone(
    folder: Path, address: str, source: str, codec: str, account: str = "", control_port: int = 4444
) -> AsyncIterator[Phone]:
    """baresip with one codec (`pcmu`, `pcma`, `g722`, `opus`); its microphone is `source`: `ausine,440`, `aufile,FILE`.

    `account` adds parameters to its SIP account, such as `;mediaenc=dtls_srtp;medianat=ice`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    module = "g711" if codec in ("pcmu", "pcma") else codec
    modules = [module, "aufile", "ausine", "sndfile", "stun", "ice", "srtp", "dtls_srtp", "account", "menu", "ctrl_tcp"]
    facts = {
        "address": address,
        "source": source,
        "folder": folder,
        "modules": BARESIP_MODULES,
        "module_lines": "\n".join(f"{_kind_of(name)} {name}.so" for name in modules),
        "control_port": control_port,
        "first_port": 25000,
        "last_port": 29000,
    }
    (folder / "config").write_text(BARESIP.format(**facts))
    (folder / "accounts").write_text(f"<sip:phone@{address}>;regint=0;audio_codecs={codec}{account}\n")
    (folder / "contacts").touch()
    with (folder / "baresip.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec("baresip", "-s", "-f", str(folder), "-v", stdout=log, stderr=log)
        try:
            async with _control(control_port) as (reader, writer):
                yield Phone(folder, reader, writer)
        finally:
            await end(process)


def _kind_of(module: str) -> str:
    return "module_app" if module in ("account", "menu", "ctrl_tcp") else "module"


@asynccontextmanager
async def _control(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The phone's control socket, closed whatever becomes of the test."""
    reader, writer = await _connected(port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _connected(port: int, limit_s: float = 10.0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(limit_s):
        while True:
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.05)
