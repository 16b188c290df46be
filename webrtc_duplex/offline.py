"""`webrtc-duplex offline`: calls without a network, from recordings to recordings - for evaluation.

    webrtc-duplex offline --input a.wav --output b.wav --text c.json
    webrtc-duplex offline --manifest list.jsonl --rows 8

The caller's recording is heard frame by frame by the runner that serves live calls, with the same prefill, the same
sampling and the same lanes; only the clock is missing. The answer is as long as the recording, and frame p of it stands
beside frame p of the input. In a live call it leaves 80 ms later, once that frame has been heard to its end: add
`FRAME_S` to latencies that are to be compared with a live call's.

The JSON of a call has the layout of time-aligned transcripts that Full-Duplex-Bench reads (`text`, and `chunks` of
`text` and `timestamp`), made of the model's own text stream: a word begins with the frame that said its first piece.
For that benchmark write a manifest of `input.wav`, `output.wav` and `output.json` in each sample's folder.
"""

import argparse
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, get_type_hints

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import FRAME_S, FRAME_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.engine.loop import ModelRunner
from webrtc_duplex.errors import DuplexError, EngineError, RequestError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.model.wav import read_wav, to_pcm, write_wav
from webrtc_duplex.settings import EngineSettings

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

ROWS = 4
"""Files at once, unless asked for otherwise; also the fewest lanes of a step on the CPU."""


class Talker(ModelRunner, Protocol):
    """A runner whose codes can be written down."""

    codes: NDArray[np.int64]
    """[n, 8]: what the rows of the last step said"""


@dataclass(frozen=True, slots=True)
class Job:
    """One call: what the caller says, what was asked of the agent, and where its answer goes."""

    input: Path
    output: Path | None
    text: Path | None
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Conversation:
    """A call that runs, or has run."""

    job: Job
    samples: int
    """Length of the caller's recording."""
    heard: Pcm
    """Frames [F, 1920], the last one padded with silence."""
    said: list[Pcm] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.said)

    @property
    def over(self) -> bool:
        return self.position == len(self.heard)

    @property
    def answer(self) -> Pcm:
        """What the agent said, as long as the recording."""
        return np.concatenate(self.said)[: self.samples]


Outcome = tuple[Job, Conversation | DuplexError]


def converse(jobs: Iterable[Job], runner: Talker, on_frames: Callable[[int], object] = int) -> Iterator[Outcome]:
    """Run every job, as many at once as the runner has rows; yields each when it is over.

    A job that fails - no such file, a voice that is none, numbers that are not finite - takes nobody else along.
    `on_frames` is told how many frames were stepped, again and again.
    """
    waiting = deque(jobs)
    seated: dict[int, Conversation] = {}
    while waiting or seated:
        for row in [row for row in range(runner.rows) if row not in seated]:
            while waiting and row not in seated:
                job = waiting.popleft()
                try:
                    seated[row] = _begin(job, row, runner)
                except DuplexError as error:
                    yield job, error
        ended = _step(seated, runner)
        on_frames(len(seated))
        for row, outcome in ended.items():
            yield seated.pop(row).job, outcome


def _begin(job: Job, row: int, runner: ModelRunner) -> Conversation:
    """Read the recording, and run the prompt into the row."""
    pcm = to_pcm(read_wav(job.input))
    frames = -(-len(pcm) // FRAME_SAMPLES)
    heard = np.pad(pcm, (0, frames * FRAME_SAMPLES - len(pcm))).reshape(frames, FRAME_SAMPLES)
    columns = runner.load_prompt(job.prompt)
    left = runner.begin(row, job.prompt)
    while left:
        left = runner.prefill(row, columns)
    return Conversation(job, len(pcm), heard)


def _step(seated: Mapping[int, Conversation], runner: Talker) -> dict[int, Conversation | DuplexError]:
    """One frame of every call; returns those that are over, or at fault, by their row."""
    if not seated:
        return {}
    ended: dict[int, Conversation | DuplexError] = {}
    rows = np.array(sorted(seated))
    heard = np.stack([seated[row].heard[seated[row].position] for row in rows])
    pcm, text, sound = runner.step(rows, heard)
    for lane, row in enumerate(rows.tolist()):
        call = seated[row]
        if not sound[lane]:
            at = call.position * FRAME_S
            ended[row] = EngineError(f"{call.job.input}: the model's numbers were not finite at {at:.2f} s")
            continue
        call.said.append(pcm[lane])
        call.tokens.append(int(text[lane]))
        call.codes.append(runner.codes[lane].tolist())
        if call.over:
            ended[row] = call
    return ended


# ---- what is written


@dataclass(frozen=True, slots=True)
class Word:
    """A word that the agent said: from the frame of its first piece to the end of its last one's, in seconds."""

    text: str
    start_s: float
    end_s: float


def words(tokens: Iterable[int], pieces: Sequence[str]) -> list[Word]:
    """The words of a text stream, one token a frame; pieces without a leading space go on with the word before."""
    said: list[Word] = []
    for position, token in enumerate(tokens):
        piece, start, end = pieces[token], position * FRAME_S, (position + 1) * FRAME_S
        if not piece.strip():
            continue
        if said and not piece.startswith(" "):
            said[-1] = Word(said[-1].text + piece, said[-1].start_s, end)
        else:
            said.append(Word(piece.strip(), start, end))
    return said


def transcript(call: Conversation, runner: Talker, with_tokens: bool) -> dict[str, object]:
    """A call as JSON: words with times, and on demand every token and code."""
    said = words(call.tokens, runner.card.pieces)
    told: dict[str, object] = {
        "text": " ".join(word.text for word in said),
        "chunks": [{"text": word.text, "timestamp": [round(word.start_s, 2), round(word.end_s, 2)]} for word in said],
        "duration_s": round(call.samples / SAMPLE_RATE, 4),
        "model": runner.card.name,
        "prompt": asdict(call.job.prompt),
    }
    if with_tokens:
        told |= {"frame_s": FRAME_S, "tokens": call.tokens, "codes": call.codes}
    return told


def write(call: Conversation, runner: Talker, with_tokens: bool) -> None:
    """Write what the job asks for, making folders as needed. Raises RequestError where that cannot be."""
    try:
        for path in (call.job.output, call.job.text):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if call.job.output is not None:
            write_wav(call.job.output, call.answer)
        if call.job.text is not None:
            call.job.text.write_text(json.dumps(transcript(call, runner, with_tokens), ensure_ascii=False) + "\n")
    except OSError as error:
        raise RequestError(f"cannot write {error.filename}: {error.strerror}") from error


# ---- what is asked for

_PROMPT_TYPES: Mapping[str, type] = get_type_hints(Prompt)
_PATH_KEYS = {"input", "output", "text"}


def read_manifest(path: Path, default: Prompt) -> list[Job]:
    """Jobs of a JSON Lines file, one a line: `input`, `output` and `text` are paths, seen from the file's folder.

    `instructions` is the text prompt; `voice`, `seed` and the rest of a prompt may stand there too, and go before
    those of the command line. Raises RequestError, naming the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}", param="manifest") from error
    jobs = [_read_line(f"{path}:{number}", line, path.parent, default) for number, line in enumerate(lines, 1) if line]
    if not jobs:
        raise RequestError(f"{path} names no input", param="manifest")
    return jobs


def _read_line(where: str, line: str, folder: Path, default: Prompt) -> Job:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is no JSON: {error}", param="manifest") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("input"), str):
        raise RequestError(f'{where} must be a table with an "input", not {line[:60]!r}', param="manifest")
    paths = {key: folder / str(entry.pop(key)) for key in _PATH_KEYS & entry.keys()}
    wish = {"text" if key == "instructions" else key: value for key, value in entry.items()}
    for key, value in wish.items():
        if key not in _PROMPT_TYPES:
            raise RequestError(f"{where} says {key!r}, which is neither a path nor of a prompt", param="manifest")
        if not isinstance(value, _PROMPT_TYPES[key]) and not (isinstance(value, int) and "temperature" in key):
            raise RequestError(f"{where}: {key} cannot be {value!r}", param="manifest")
    return _job(where, paths, replace(default, **wish))


def _job(where: str, paths: Mapping[str, Path | None], prompt: Prompt) -> Job:
    source, output, text = paths["input"], paths.get("output"), paths.get("text")
    assert source is not None
    if output is None and text is None:
        raise RequestError(f"{where} asks for nothing: name an output (a WAV file), a text (a JSON file), or both")
    return Job(source, output, text, prompt)


# ---- the command line


def add_offline_command(commands: "Subparsers") -> None:
    """Add `offline`."""
    offline = commands.add_parser("offline", help="calls from recordings to recordings, without a network")
    offline.add_argument("--input", type=Path, metavar="WAV", help="what the caller says")
    offline.add_argument("--output", type=Path, metavar="WAV", help="what the agent says, as long as the input")
    offline.add_argument("--text", type=Path, metavar="JSON", help="the agent's words with times")
    offline.add_argument("--manifest", type=Path, metavar="JSONL", help="many calls instead: a table a line")
    offline.add_argument("--tokens", action="store_true", help="write every text token and code into the JSON too")
    offline.add_argument("--voice", help="voice of the agent")
    offline.add_argument("--prompt", help="text prompt: who the agent is")
    offline.add_argument("--seed", type=int, default=0, help="key of all sampling noise (default: %(default)s)")
    for stream in ("text", "audio"):
        offline.add_argument(f"--{stream}-temperature", type=float, help="0 is greedy (default: the checkpoint's)")
        offline.add_argument(f"--{stream}-top-k", type=int, help="0 keeps every token (default: the checkpoint's)")
    offline.add_argument("--model", default="tiny", help="tiny, or a checkpoint's directory or hub id")
    offline.add_argument("--device", default="cpu", help="torch device of the model (default: %(default)s)")
    offline.add_argument("--rows", type=int, default=ROWS, help="calls at once (default: %(default)s)")
    offline.set_defaults(run=_offline)


def _offline(options: argparse.Namespace) -> int:
    jobs = _jobs(options)
    wanted = EngineSettings(model=options.model, rows=options.rows, device=options.device)
    runner = load_talker(wanted.model, min(options.rows, len(jobs)), wanted.device)
    bar = Progress(sum(map(_frames, jobs)), time.monotonic)
    failed = 0
    for job, outcome in converse(jobs, runner, bar.advance):
        try:
            if isinstance(outcome, DuplexError):
                raise outcome
            write(outcome, runner, options.tokens)
        except DuplexError as error:
            failed += 1
            print(f"webrtc-duplex: {job.input}: {error.message}", file=sys.stderr)
    bar.end()
    return 1 if failed else 0


def load_talker(model: str, rows: int, device: str) -> Talker:
    """Load a model that says something of its own. Raises CheckpointError with what is wrong with it."""
    from webrtc_duplex.model.runner import PersonaPlexRunner, load_runner

    runner = load_runner(model, rows, device)
    if not isinstance(runner, PersonaPlexRunner):
        raise RequestError(f"{model} has nothing of its own to say", param="model")
    return runner


def _jobs(options: argparse.Namespace) -> list[Job]:
    wish = {key: getattr(options, key) for key in _PROMPT_TYPES.keys() - {"text"}}
    prompt = Prompt(text=options.prompt, **wish)
    if options.manifest is not None:
        return read_manifest(options.manifest, prompt)
    if options.input is None:
        raise RequestError("name an --input, or a --manifest of many")
    return [_job("the command line", {key: getattr(options, key) for key in _PATH_KEYS}, prompt)]


def _frames(job: Job) -> int:
    """Frames of a recording, 0 where it cannot be read (which is told when its turn comes)."""
    try:
        return -(-len(read_wav(job.input)) // FRAME_SAMPLES)
    except RequestError:
        return 0


class Progress:
    """A bar on standard error, where somebody sees it."""

    WIDTH = 40
    PAUSE_S = 0.2

    def __init__(self, frames: int, clock: Callable[[], float]) -> None:
        self._frames, self._clock = frames, clock
        self._done, self._began, self._drawn = 0, clock(), -math.inf
        self._seen = sys.stderr.isatty()

    def advance(self, frames: int) -> None:
        """So many frames more are done."""
        self._done += frames
        if self._seen and self._clock() - self._drawn >= self.PAUSE_S:
            self._drawn = self._clock()
            sys.stderr.write(f"\r{self.line()}")
            sys.stderr.flush()

    def line(self) -> str:
        """The bar as it stands: sound done and to be done, and how much faster than a call."""
        share = self._done / self._frames if self._frames else 1.0
        spent = max(1e-9, self._clock() - self._began)
        filled = "#" * round(share * self.WIDTH)
        seconds = f"{self._done * FRAME_S:.1f} of {self._frames * FRAME_S:.1f} s"
        return f"[{filled:<{self.WIDTH}}] {share:4.0%}  {seconds}  {self._done * FRAME_S / spent:.1f} x real time "

    def end(self) -> None:
        if self._seen:
            sys.stderr.write(f"\r{self.line()}\n")
