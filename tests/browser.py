"""A real browser for tests: headless Chromium, driven over the DevTools protocol.

    async with open_browser(microphone=wav) as browser:
        page = await browser.open("http://127.0.0.1:8080/")
        await page.click("#call")
        await page.wait_for("document.body.dataset.phase === 'live'", timeout_s=20)

Chromium speaks DevTools over a pair of pipes (`--remote-debugging-pipe`): no port is opened, and a browser inside a
network namespace of its own is driven like any other. Its microphone is a WAV file. Whoever opens a browser ends it:
leaving the block closes the process and removes its profile.
"""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.conftest import missing

QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-sync",
    "--metrics-recording-only",
    "--no-pings",
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
    "--password-store=basic",
    "--disable-features=OptimizationHints,MediaRouter,Translate,CertificateTransparencyComponentUpdater",
)
MICROPHONE = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")

LARGEST_MESSAGE = 256 * 1024 * 1024
"""Screenshots and captured sound come back as base64 in one message."""

# Chromium reads commands from descriptor 3 and answers on 4, which only the child itself can arrange.
LAUNCH_WITH_PIPES = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 16) for number in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""

CAPTURE = """
(() => {
  const track = document.querySelector(%s).srcObject.getAudioTracks()[0].clone();
  const reader = new MediaStreamTrackProcessor({ track }).readable.getReader();
  const capture = { pieces: [], rate: 0, track, startedAt: performance.now() };
  window.__capture = capture;
  (async () => {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const piece = new Float32Array(value.numberOfFrames);
      value.copyTo(piece, { planeIndex: 0, format: "f32-planar" });
      capture.rate = value.sampleRate;
      capture.pieces.push(piece);
      value.close();
    }
  })();
})()
"""

CAPTURED = """
(async () => {
  const { pieces, rate, track } = window.__capture;
  track.stop();
  const samples = new Int16Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) for (const x of piece) samples[at++] = Math.max(-1, Math.min(1, x)) * 32767;
  const url = await new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(new Blob([samples]));
  });
  return { rate, pcm: url.slice(url.indexOf(",") + 1) };
})()
"""


NO_ECHO_CANCELLER = """
const take = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
navigator.mediaDevices.getUserMedia = ({ audio }) => take({ audio: { ...audio, echoCancellation: false } });
"""
"""What an echo model sends back is just what an echo canceller is there to remove."""


class BrowserError(Exception):
    """The browser, or a script in its page, did not do what a test asked."""


@dataclass(frozen=True, slots=True)
class Sound:
    """What a page played: mono samples at `rate` Hz."""

    pcm: NDArray[np.int16]
    rate: int


def find_chromium() -> str:
    """Path of Chromium; without one the test is skipped with the reason, or fails where `CI=true`."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    missing("needs Chromium (Debian: apt-get install chromium)")


class DevTools:
    """One DevTools connection: commands and their answers, and events handed to who listens."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        """By session id: called with the method and parameters of each event."""

    async def send(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> Any:
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            command["sessionId"] = session
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(command).encode() + b"\0")
        answer = await self._waiting[number]
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def listen(self) -> None:
        """Read until the browser closes its end; commands still waiting then fail."""
        try:
            while True:
                self._dispatch(json.loads((await self._reader.readuntil(b"\0"))[:-1]))
        except asyncio.IncompleteReadError:
            pass
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(BrowserError("the browser has ended"))

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "id" in message:
            answer = self._waiting.pop(message["id"])
            if not answer.done():
                answer.set_result(message)
        elif listener := self.listeners.get(message.get("sessionId", "")):
            listener(message["method"], message["params"])


@dataclass(slots=True)
class Page:
    """One tab. `errors` collects what its console reported as an error, and exceptions that nobody caught."""

    devtools: DevTools
    session: str
    target: str
    errors: list[str] = field(default_factory=list)

    async def send(self, method: str, **params: Any) -> Any:
        return await self.devtools.send(method, params, self.session)

    def hear_event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.errors.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())

    async def close(self) -> None:
        await self.devtools.send("Target.closeTarget", {"targetId": self.target})

    async def navigate(self, url: str) -> None:
        result = await self.send("Page.navigate", url=url)
        if failure := result.get("errorText"):
            raise BrowserError(f"{url}: {failure}")
        await self.wait_for("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise; BrowserError if it throws."""
        result = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if details := result.get("exceptionDetails"):
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    async def wait_for(self, condition: str, timeout_s: float = 10.0) -> Any:
        """The value of an expression as soon as it is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (value := await self.evaluate(condition)):
                    await asyncio.sleep(0.05)
                return value
        except TimeoutError:
            where = await self.evaluate("document.body.innerText.slice(0, 800)")
            raise BrowserError(f"not true within {timeout_s} s: {condition}\npage: {where}\n{self.errors}") from None

    async def click(self, selector: str) -> None:
        """A real click in the middle of the element, scrolled into view first."""
        x, y = await self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{ block: "center", behavior: "instant" }});
              const box = element.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, key: str, text: str = "") -> None:
        """A key, by its DOM name: `Tab`, `Enter`."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)

    async def look(self, width: int, height: int, *, dark: bool = False, calm: bool = False, scale: float = 1) -> None:
        """The window's size in CSS pixels, the colour scheme, and whether the person prefers less motion."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"},
        ]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        result = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))

    async def start_capture(self, selector: str = "audio") -> None:
        """Begin to record what the media element at `selector` plays."""
        await self.evaluate(CAPTURE % json.dumps(selector))

    async def end_capture(self) -> Sound:
        captured = await self.evaluate(CAPTURED)
        pcm = np.frombuffer(base64.b64decode(captured["pcm"]), dtype="<i2")
        return Sound(pcm.astype(np.int16), int(captured["rate"]))


@dataclass(frozen=True, slots=True)
class Browser:
    """A running Chromium."""

    devtools: DevTools
    process: asyncio.subprocess.Process

    async def open(self, url: str, *, before: str = "") -> Page:
        """A new tab at `url`, loaded; `before` is a script that runs ahead of the page's own."""
        target = (await self.devtools.send("Target.createTarget", {"url": "about:blank"}))["targetId"]
        attached = await self.devtools.send("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(self.devtools, attached["sessionId"], target)
        self.devtools.listeners[page.session] = page.hear_event
        for domain in ("Page", "Runtime", "Log"):
            await page.send(f"{domain}.enable")
        if before:
            await page.send("Page.addScriptToEvaluateOnNewDocument", source=before)
        await page.navigate(url)
        return page


@asynccontextmanager
async def open_browser(
    microphone: Path | None = None, *, flags: Sequence[str] = (), namespace: str | None = None
) -> AsyncIterator[Browser]:
    """Chromium, perhaps in a network namespace. Its microphone is a WAV, played once, then silence (None: beeps)."""
    command = [find_chromium(), *QUIET, *MICROPHONE, "--remote-debugging-pipe", *flags]
    if microphone is not None:
        command.append(f"--use-file-for-fake-audio-capture={microphone}%noloop")
    if namespace is not None:
        command = ["ip", "netns", "exec", namespace, *command]
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        async with _start([*command, f"--user-data-dir={profile}"]) as browser:
            yield browser


@asynccontextmanager
async def _start(command: list[str]) -> AsyncIterator[Browser]:
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LAUNCH_WITH_PIPES, str(commands_out), str(answers_in), *command),
        pass_fds=(commands_out, answers_in),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands_out)
    os.close(answers_in)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LARGEST_MESSAGE)
    answers, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers_out, "rb", buffering=0)
    )
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(commands_in, "wb", buffering=0))
    devtools = DevTools(reader, writer)
    listening = asyncio.create_task(devtools.listen())
    try:
        yield Browser(devtools, process)
    finally:
        await _end(process)
        await listening
        writer.close()
        answers.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the whole process group: Chromium's own children, and `ip netns exec` around it."""
    if process.returncode is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(5):
            await process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
