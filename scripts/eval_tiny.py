"""How the small agent behaves: streaming, sampling on, by the runner that serves callers.

    python -m scripts.eval_tiny --work build/tiny --json out.json     # the model card's figures
    python -m scripts.eval_tiny --wav caller.wav --out folder         # one recording: a timeline and a stereo WAV

Synthetic callers are the held-out voices of `scripts/train_tiny/voices.py`, whose clips lie in the training's folder
(`python -m scripts.train_tiny --stage callers` makes them). A frame that the model says when it has heard frame n is
counted as said at the end of frame n.
"""

import argparse
import json
import os
import re
import wave
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from scripts.train_tiny import calls, sound, whole
from scripts.train_tiny.codes import CODEC_KEYS, load_tables
from scripts.train_tiny.decoder import mel_bands
from scripts.train_tiny.dialogue import Turn
from scripts.train_tiny.hearing import as_heard, hear, listener
from scripts.train_tiny.semantic import edit_distance
from scripts.train_tiny.sentences import (
    CALLER,
    DEFAULT_TEXT,
    FALLBACK,
    GREETINGS,
    HOTEL_TEXT,
    INTERRUPTION,
    QUESTION,
    ROLES,
    agent_sentences,
    answers_to,
)
from scripts.train_tiny.voices import AGENT_VOICES, RATE, CallerPool, Sound, agent_sounds
from scripts.train_tiny.work import Work, progress
from webrtc_duplex.messages import ModelCard, Prompt
from webrtc_duplex.model.hub import find_checkpoint
from webrtc_duplex.model.runner import PersonaPlexRunner, load_runner
from webrtc_duplex.model.wav import read_wav, to_pcm

FRAME = 1920
FRAME_S = FRAME / RATE
TALKING = 0.006
"""RMS of a frame in which the agent speaks, against full scale."""
PAUSE = 6
"""Frames of silence inside what is still one utterance."""
ANSWER_S, SLOW_S, STOP_S, GREETING_S = 2.0, 3.1, 0.8, 1.5
TEXTS = {"assistant": DEFAULT_TEXT, "hotel": HOTEL_TEXT}
RECORDED = {
    "human_assistant_40s.wav": ((3.2, 7.7), (21.8, 26.0)),
    "human_service_20s.wav": ((5.2, 8.4),),
}
"""Recordings of people outside the repository, and when they speak, in seconds."""
SPEECH = (
    Path(os.environ.get("WEBRTC_DUPLEX_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "data" / "speech"
)


@dataclass(frozen=True, slots=True)
class Wish:
    """Who is called: a role, in a voice, with a seed."""

    role: str
    voice: str
    seed: int


@dataclass(frozen=True, slots=True)
class Utterance:
    """What the agent says in one go; frames `start` to `end` (exclusive) on the caller's clock."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Heard:
    """The agent's side of a call: its sound [frames * 1920] as the caller hears it, and its utterances."""

    pcm: Sound
    utterances: tuple[Utterance, ...]

    def talking(self) -> NDArray[np.bool_]:
        return levels(self.pcm) > TALKING


def levels(pcm: Sound) -> NDArray[np.float64]:
    """RMS of each frame."""
    frames = pcm[: len(pcm) // FRAME * FRAME].reshape(-1, FRAME).astype(np.float64)
    return np.asarray(np.sqrt((frames**2).mean(1)))


def converse(
    runner: PersonaPlexRunner, lines: Sequence[Sound], wishes: Sequence[Wish], echo: Sequence[float] = ()
) -> list[Heard]:
    """Call after call in the runner's rows, at once; `echo` is how much of the agent comes back on each line."""
    rows = np.arange(len(lines))
    for row, wish in enumerate(wishes):
        left = runner.begin(row, prompt(runner.card, wish))
        while left:
            left = runner.prefill(row, left)
    frames = min(len(line) for line in lines) // FRAME
    said = np.zeros((frames + 1, len(lines), FRAME), np.int16)
    tokens = np.zeros((frames + 1, len(lines)), np.int64)
    back = np.asarray([*echo, *[0.0] * len(lines)][: len(lines)])[:, None]
    for frame in range(frames):
        heard = np.stack([line[frame * FRAME : (frame + 1) * FRAME] for line in lines]) * 32767
        heard = np.clip(heard + back * said[max(0, frame - 1)], -32768, 32767).astype(np.int16)
        said[frame + 1], tokens[frame + 1], _ = runner.step(rows, heard)
    return [_heard(runner, said[:, row], tokens[:, row]) for row in rows]


def prompt(card: ModelCard, wish: Wish) -> Prompt:
    """The wish, as far as the model takes prompts."""
    voice = wish.voice if wish.voice in card.voices else None
    return Prompt(voice=voice, text=TEXTS[wish.role] if card.takes_text else None, seed=wish.seed)


def _heard(runner: PersonaPlexRunner, said: NDArray[np.int16], tokens: NDArray[np.int64]) -> Heard:
    pcm = np.asarray(said.reshape(-1) / 32767, np.float32)
    talking = np.flatnonzero(levels(pcm) > TALKING)
    spans: list[list[int]] = []
    for frame in talking:
        if spans and frame - spans[-1][1] <= PAUSE:
            spans[-1][1] = int(frame) + 1
        else:
            spans.append([int(frame), int(frame) + 1])
    pieces = runner.card.pieces
    return Heard(
        pcm, tuple(Utterance(a, b, "".join(pieces[t] for t in tokens[max(0, a - 2) : b]).strip()) for a, b in spans)
    )


# ---- what happened in a call


@dataclass(slots=True)
class TurnFigures:
    """Sums over calls."""

    turns: int = 0
    premature: int = 0
    awaited: int = 0
    answered: int = 0
    answered_late: int = 0
    interruptions: int = 0
    yielded: int = 0

    def rates(self) -> dict[str, float]:
        return {
            "turns": self.turns,
            "started_inside_a_turn": self.premature,
            "turns_awaiting_an_answer": self.awaited,
            "answered_in_2.0_s": self.answered / max(1, self.awaited),
            "answered_in_3.1_s": self.answered_late / max(1, self.awaited),
            "interruptions": self.interruptions,
            "silent_in_0.8_s_of_an_interruption": self.yielded / max(1, self.interruptions),
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to a turn."""

    latency_s: float
    wanted: str
    found: str
    right: bool


def judge(turns: Sequence[Turn], heard: Heard, role: str, sums: TurnFigures) -> list[Reply]:
    """Count what became of each turn, and return the answers."""
    replies = []
    talking = heard.talking()
    for turn, following in zip(turns, [*(t.start for t in turns), len(talking)][1:], strict=True):
        sums.turns += 1
        busy = bool(talking[max(0, turn.start - 1) : turn.start + 1].all())
        sums.premature += any(turn.start + 1 < u.start < turn.end - 1 for u in heard.utterances)
        if busy and turn.end - turn.start >= 8:
            sums.interruptions += 1
            sums.yielded += not talking[turn.start + int(STOP_S / FRAME_S) : turn.end].any()
        first = next((u for u in heard.utterances if turn.end - 1 <= u.start), None)
        late_s = (first.start - turn.end) * FRAME_S if first else np.inf
        if talking[turn.end : turn.end + 2].all() or (following - turn.end) * FRAME_S < SLOW_S:
            continue  # it spoke over the turn's end, or had no time to answer
        sums.awaited += 1
        sums.answered += late_s <= ANSWER_S
        sums.answered_late += late_s <= SLOW_S
        if first is not None and late_s <= SLOW_S:
            replies.append(_reply(turn, first, role, busy, late_s))
    return replies


def _reply(turn: Turn, first: Utterance, role: str, interrupted: bool, late_s: float) -> Reply:
    found = closest(first.text)
    right = answers_to(turn.intent, role)
    if interrupted:
        right = (*right, *answers_to(INTERRUPTION, role))
    return Reply(late_s, turn.intent, _intent_of(found, role), found in right)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def closest(text: str) -> str:
    """The sentence of the agent nearest to what was said; an utterance may hold the end of another before it."""
    return min((s.text for s in agent_sentences()), key=lambda s: _distance(words(s), words(text)))


def _distance(wanted: list[str], found: list[str]) -> float:
    numbers = {word: n for n, word in enumerate(dict.fromkeys([*wanted, *found]))}
    return edit_distance([numbers[w] for w in wanted], [numbers[w] for w in found]) / max(1, len(wanted))


def _intent_of(sentence: str, role: str) -> str:
    if sentence in GREETINGS[role]:
        return "greeting"
    if sentence == QUESTION:
        return "question"
    return next((i for i in [FALLBACK, *CALLER] if sentence in answers_to(i, role) and i == FALLBACK), None) or next(
        (i for i in CALLER if sentence in answers_to(i, role)), "none"
    )


# ---- figures on synthetic callers


def turn_taking(runner: PersonaPlexRunner, pool: CallerPool, wanted: int, seeds: Sequence[int]) -> dict[str, object]:
    """Calls of a minute by held-out voices until so many turns were taken, spread over the seeds."""
    callers = calls.Callers(pool, unseen=True)
    sums, replies, speech = TurnFigures(), [], []
    rng = np.random.default_rng(11)
    number = 0
    while sums.turns < wanted:
        taken = [callers.call(60.0, rng) for _ in range(runner.rows)]
        lines = [calls.on_a_line(call, rng) for call in taken]
        seed = seeds[number % len(seeds)] * 1000 + number
        wishes = [Wish(ROLES[(k // 2) % 2], AGENT_VOICES[k % 2], seed + k) for k in range(len(lines))]
        for call, wish, heard in zip(taken, wishes, converse(runner, lines, wishes), strict=True):
            replies += judge(call.turns, heard, wish.role, sums)
            speech.append(heard)
        number += 1
        print(f"turn taking: {sums.turns} of {wanted} turns", flush=True)
    latencies = [reply.latency_s for reply in replies if reply.latency_s <= ANSWER_S]
    confusion = Counter((reply.wanted, reply.found) for reply in replies)
    known = [reply for reply in replies if reply.wanted != FALLBACK]
    return {
        **sums.rates(),
        "latency_median_s": float(np.median(latencies)) if latencies else None,
        "latency_p10_p90_s": [float(q) for q in np.quantile(latencies, [0.1, 0.9])] if latencies else None,
        "answered_rightly": float(np.mean([reply.right for reply in replies])) if replies else None,
        "intent_answered_rightly": float(np.mean([reply.right for reply in known])) if known else None,
        "confusion": {
            wanted: {found: n for (w, found), n in sorted(confusion.items()) if w == wanted} for wanted in CALLER
        },
        **speech_figures(speech),
    }


def speech_figures(calls_heard: Sequence[Heard], limit: int = 60) -> dict[str, object]:
    """Silence between utterances, and what a recogniser understands against the text that went with it."""
    quiet, wrong, total = [], 0, 0
    recognise = recogniser()
    for heard in calls_heard:
        talking = heard.talking()
        near = np.convolve(talking, np.ones(5), "same") > 0
        quiet += list(levels(heard.pcm)[: len(near)][~near])
    utterances = [(heard, u) for heard in calls_heard for u in heard.utterances if len(words(u.text)) >= 3][:limit]
    for heard, utterance in utterances:
        spoken = recognise(heard.pcm[max(0, utterance.start - 2) * FRAME : (utterance.end + 2) * FRAME])
        wanted = words(utterance.text)
        wrong += round(_distance(wanted, words(spoken)) * len(wanted))
        total += len(wanted)
    return {
        "silence_rms_p99": float(np.quantile(quiet, 0.99)) if quiet else None,
        "speech_against_its_text_wer": wrong / max(1, total),
        "speech_words": total,
    }


def recogniser(closed: bool = False) -> Callable[[Sound], str]:
    """pocketsphinx with its own open language model, or `closed` over the agent's sentences: 24 kHz to words."""
    decoder = listener(**({"lm": None} if closed else {}))
    if closed:
        choice = " | ".join(" ".join(words(sentence.text)) for sentence in agent_sentences())
        decoder.add_jsgf_string("sentences", f"#JSGF V1.0; grammar sentences; public <one> = {choice};")
        decoder.activate_search("sentences")

    def recognise(pcm: Sound) -> str:
        hear(decoder, as_heard(pcm, 3200, 3200))
        return str(decoder.hyp().hypstr) if decoder.hyp() else ""

    return recognise


def quiet_lines(runner: PersonaPlexRunner, minutes: float, seed: int) -> dict[str, object]:
    """Lines with nobody on them: what the agent says there."""
    rng = np.random.default_rng(seed)
    samples = int(minutes * 60 * RATE)
    hum = 0.02 * np.sin(2 * np.pi * 50 * np.arange(samples) / RATE).astype(np.float32)
    lines = {
        "silent": np.zeros(samples, np.float32),
        "white": np.asarray(rng.standard_normal(samples) * sound.decibels(-50), np.float32),
        "hum": hum,
        "music-like": np.asarray(sound.tones(samples, rng, -42.0), np.float32),
        "clicks": sound.clicks(samples, rng, int(minutes * 60)),
        "its echo at -30 dB": np.zeros(samples, np.float32),
    }
    back = [sound.decibels(-30) if "echo" in name else 0.0 for name in lines]
    wishes = [Wish(ROLES[k % 2], AGENT_VOICES[k % 2], seed + k) for k in range(len(lines))]
    heard = converse(runner, list(lines.values()), wishes, back)
    return {
        name: {"utterances": len(h.utterances), "said": [u.text for u in h.utterances][:12]}
        for name, h in zip(lines, heard, strict=True)
    }


class Speakers:
    """Tells the agent's voices apart by their long-term spectrum, against the synthesisers' own."""

    def __init__(self, work: Work) -> None:
        self._spectra = {
            voice: spectrum(np.concatenate([*agent_sounds(work, voice).values()])) for voice in AGENT_VOICES
        }

    def whose(self, pcm: Sound) -> str:
        found = spectrum(pcm)
        return max(self._spectra, key=lambda voice: float(np.corrcoef(self._spectra[voice], found)[0, 1]))


def spectrum(pcm: Sound) -> NDArray[np.float64]:
    """Mean of the logarithmic mel spectrum of what is loud, [80]."""
    windows = pcm[: len(pcm) // 1024 * 1024].reshape(-1, 1024).astype(np.float64)
    loud = windows[np.sqrt((windows**2).mean(1)) > 0.03]
    power = np.abs(np.fft.rfft(loud * np.hanning(1024)))
    return np.asarray(np.log10(power @ mel_bands(1024, 80).numpy().T + 1e-4).mean(0))


def greetings(
    runner: PersonaPlexRunner, speakers: Speakers, seeds: Sequence[int], tries: int = 40
) -> dict[str, object]:
    """Silent lines of 8 s in every voice and role: greeted in time, whole, once; in which voice, in which role."""
    figures: Counter[str] = Counter()
    starts: list[float] = []
    number = 0
    while number < tries:
        wishes = [
            Wish(ROLES[(number + k) % 2], AGENT_VOICES[(number + k) // 2 % 2], seeds[k % len(seeds)] + number + k)
            for k in range(runner.rows)
        ]
        lines = [np.zeros(8 * RATE, np.float32)] * len(wishes)
        for wish, heard in zip(wishes, converse(runner, lines, wishes), strict=True):
            said = [u.text for u in heard.utterances]
            figures["calls"] += 1
            figures["in time"] += bool(heard.utterances) and heard.utterances[0].start * FRAME_S <= GREETING_S
            figures["once"] += len(said) == 1
            figures["whole"] += bool(said) and said[0] in GREETINGS[wish.role]
            figures["role"] += bool(said) and closest(said[0]) in GREETINGS[wish.role]
            figures["voice"] += bool(said) and speakers.whose(heard.pcm) == wish.voice
            starts += [heard.utterances[0].start * FRAME_S] if said else []
        number += len(wishes)
    calls_made = figures.pop("calls")
    share = {name: figures[name] / calls_made for name in ("in time", "once", "whole", "role", "voice")}
    return {"calls": calls_made, **share, "start_median_s": float(np.median(starts)) if starts else None}


def codec_figures(work: Work) -> dict[str, object]:
    """The agent's sentences through the shipped codec: open word error rate against the originals'."""
    weights = {name: tensor.float() for name, tensor in torch.load(work.path("codec.pt")).items()}
    tables, recognise, choose = load_tables(work), recogniser(), recogniser(closed=True)
    figures: dict[str, object] = {}
    for number, voice in enumerate(AGENT_VOICES):
        errors, total = [0, 0], 0
        known = 0
        for text, original in progress(agent_sounds(work, voice).items(), f"codec {voice}"):
            silence = np.tile(tables.silence[number, 1], (6, 1))
            codes = np.concatenate([silence, tables.sentences[voice][text], silence])
            with torch.no_grad():
                decoded = whole.decode(weights, torch.from_numpy(codes.T.copy())[None], CODEC_KEYS)[0, 0].numpy()
            wanted = words(text)
            total += len(wanted)
            for k, pcm in enumerate((original, decoded)):
                errors[k] += round(_distance(wanted, words(recognise(pcm))) * len(wanted))
            known += choose(pcm).split() == wanted
        figures[voice] = {
            "sentences": len(tables.sentences[voice]),
            "wer_original": errors[0] / total,
            "wer_decoded": errors[1] / total,
            "known_of_the_closed_set": known,
        }
    return figures


# ---- the machine, and people


def speed(directory: Path) -> dict[str, object]:
    """Milliseconds of CPU time a frame, ours and moshi's on the same weights in one run, by rows."""
    from scripts.bench_engine import Size, compare_steps

    lm, mimi = (json.loads((directory / name).read_text()) for name in ("config.json", "mimi_config.json"))
    size = Size("tiny", lm, mimi, directory / "model.safetensors", directory / "mimi.safetensors")
    rows = (1, 8)
    lines = compare_steps(size, rows, frames=40)
    return {
        f"{count} rows": {"ours_ms": line.ours_ms, "moshi_ms": line.other_ms, "ratio": line.ratio}
        for count, line in zip(rows, lines, strict=True)
    }


def people(runner: PersonaPlexRunner, folder: Path, seeds: Sequence[int]) -> dict[str, object]:
    """The recorded callers' turns, whose times are known, each recording begun late by a chance."""
    sums, replies = TurnFigures(), []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        for name, spans in RECORDED.items():
            late = int(rng.integers(0, 25))
            silence = np.zeros(late * FRAME + int(rng.integers(0, FRAME)), np.float32)
            pcm = np.concatenate([silence, read_wav(folder / name, RATE), np.zeros(4 * RATE, np.float32)])
            turns = [
                Turn(
                    round((start + len(silence) / RATE) / FRAME_S),
                    round((end + len(silence) / RATE) / FRAME_S),
                    FALLBACK,
                )
                for start, end in spans
            ]
            replies += judge(
                turns, converse(runner, [pcm], [Wish("assistant", AGENT_VOICES[seed % 2], seed)])[0], "assistant", sums
            )
    return {**sums.rates(), "latencies_s": [reply.latency_s for reply in replies]}


# ---- one recording


def recording(runner: PersonaPlexRunner, path: Path, folder: Path, seed: int) -> dict[str, object]:
    """A caller's recording: turns by energy, what the agent did, a stereo WAV and a timeline."""
    pcm = np.concatenate([read_wav(path, RATE), np.zeros(4 * RATE, np.float32)])
    turns = turns_in(pcm)
    wish = Wish("assistant", AGENT_VOICES[0], seed)
    heard = converse(runner, [pcm], [wish])[0]
    sums = TurnFigures()
    replies = judge(turns, heard, wish.role, sums)
    folder.mkdir(parents=True, exist_ok=True)
    length = min(len(pcm), len(heard.pcm))
    write_stereo(folder / f"{path.stem}.wav", pcm[:length], heard.pcm[:length])
    timeline(folder / f"{path.stem}.png", pcm, heard, turns)
    said = [{"from": u.start * FRAME_S, "to": u.end * FRAME_S, "text": u.text} for u in heard.utterances]
    return {
        **sums.rates(),
        "turns_s": [[t.start * FRAME_S, t.end * FRAME_S] for t in turns],
        "latencies_s": [reply.latency_s for reply in replies],
        "said": said,
    }


def write_stereo(path: Path, caller: Sound, agent: Sound) -> None:
    """The caller on the left, the agent on the right."""
    with wave.open(str(path), "wb") as file:
        file.setparams((2, 2, RATE, 0, "NONE", "not compressed"))
        file.writeframes(np.stack([to_pcm(caller), to_pcm(agent)], 1).tobytes())


def turns_in(pcm: Sound, gap: int = 9) -> tuple[Turn, ...]:
    """Spans of speech by energy, pauses of up to `gap` frames inside; shorter than three frames is no turn."""
    level = levels(pcm)
    floor = max(float(np.quantile(level, 0.2)) * 3, 0.08 * float(np.quantile(level, 0.98)))
    spans: list[list[int]] = []
    for frame in np.flatnonzero(level > floor):
        if spans and frame - spans[-1][1] <= gap:
            spans[-1][1] = int(frame) + 1
        else:
            spans.append([int(frame), int(frame) + 1])
    return tuple(Turn(a, b, FALLBACK) for a, b in spans if b - a >= 3)


def timeline(path: Path, caller: Sound, heard: Heard, turns: Sequence[Turn]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(14, 4), sharex=True, sharey=True)
    for axis, pcm, name in ((axes[0], caller, "caller"), (axes[1], heard.pcm, "agent")):
        peaks = np.abs(pcm[: len(pcm) // 480 * 480]).reshape(-1, 480).max(1)
        axis.fill_between(np.arange(len(peaks)) * 0.02, -peaks, peaks, lw=0)
        axis.set_ylabel(name)
    for turn in turns:
        axes[0].axvspan(turn.start * FRAME_S, turn.end * FRAME_S, alpha=0.2, color="tab:orange")
    for utterance in heard.utterances:
        axes[1].axvspan(utterance.start * FRAME_S, utterance.end * FRAME_S, alpha=0.2, color="tab:green")
        axes[1].text(utterance.start * FRAME_S, -0.9, utterance.text, fontsize=6, rotation=20)
    axes[1].set_xlabel("seconds")
    axes[1].set_ylim(-1, 1)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


SECTIONS = ("greetings", "turns", "quiet", "codec", "people", "speed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or a checkpoint's directory")
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="folder of a training run, for its clips")
    parser.add_argument("--turns", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the quiet lines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS)
    parser.add_argument("--speech", type=Path, default=SPEECH, help="folder of the recorded people")
    parser.add_argument("--wav", type=Path, nargs="+", default=[], help="recordings of callers, instead")
    parser.add_argument("--out", type=Path, default=Path("build/eval"), help="folder for timelines and stereo WAVs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    missing = [name for name in RECORDED if not (options.speech / name).is_file()]
    if missing and "people" in options.only and not options.wav:
        parser.error(f"{options.speech} lacks {', '.join(missing)}: name their folder with --speech, or say --only")
    runner = load_runner(options.model, 1 if options.wav else options.rows, "cpu")
    assert isinstance(runner, PersonaPlexRunner)
    figures: dict[str, object] = {}
    if options.wav:
        for path in options.wav:
            for seed in options.seeds:
                figures[f"{path.name} seed {seed}"] = recording(runner, path, options.out / f"seed_{seed}", seed)
    else:
        work = Work(options.work)
        sections = {
            "greetings": lambda: greetings(runner, Speakers(work), options.seeds),
            "turns": lambda: turn_taking(runner, CallerPool(work), options.turns, options.seeds),
            "quiet": lambda: quiet_lines(runner, options.minutes, options.seeds[0]),
            "codec": lambda: codec_figures(work),
            "people": lambda: people(runner, options.speech, options.seeds),
            "speed": lambda: speed(find_checkpoint(options.model)),
        }
        for name in options.only:
            figures[name] = sections[name]()
            print(json.dumps({name: figures[name]}, indent=1), flush=True)
    text = json.dumps(figures, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
