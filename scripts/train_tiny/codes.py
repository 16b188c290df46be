"""Stages between the codec and the language model: everything that is ever said or heard, as codes."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scripts.train_tiny import calls, whole
from scripts.train_tiny.dialogue import ASKED, FRESH, USUAL, Act, Teacher, Turn, play
from scripts.train_tiny.hearing import as_heard, hear, listener, spoken_words
from scripts.train_tiny.sentences import ROLES
from scripts.train_tiny.store import Weights, load_codec, save
from scripts.train_tiny.voices import AGENT_VOICES, RATE, CallerPool, Sound, agent_sounds
from scripts.train_tiny.work import SEED, Work, progress

FRAME = 1920
CODEC_KEYS = 25
LEAD = 20
"""Frames of digital silence before a sentence, so that its codes are those of a line that was quiet."""
TRACK_S = 30.0


@dataclass(frozen=True, slots=True)
class Tables:
    """All that the agent can utter, as codes int64.

    `silence` is [voice, state, 8]: its last codebook tells voice and state, and is how the agent remembers both.
    """

    sentences: dict[str, dict[str, NDArray[np.int64]]]  # voice -> text -> [frames, 8]
    words: dict[str, dict[str, NDArray[np.int64]]]  # voice -> text -> frame at which each word begins
    silence: NDArray[np.int64]
    sine: NDArray[np.int64]

    def lengths(self, voice: str) -> dict[str, int]:
        return {text: len(codes) for text, codes in self.sentences[voice].items()}

    def frame(self, voice: str, act: Act) -> NDArray[np.int64]:
        """Codes [8] of what the agent does in a frame."""
        if act.sentence is None:
            found = self.silence[AGENT_VOICES.index(voice), act.silence]
        else:
            found = self.sentences[voice][act.sentence][act.frame]
        return np.asarray(found)


@dataclass(frozen=True, slots=True)
class Track:
    """A caller's side as codes int64 [frames, 8], and what the teacher is told of it.

    `acts` is what the agent does where its echo is in the track already: then role and voice are settled too.
    """

    user: NDArray[np.int64]
    voiced: NDArray[np.bool_]
    turns: tuple[Turn, ...]
    role: str | None = None
    voice: str | None = None
    acts: tuple[Act, ...] | None = None


def encode(weights: Weights, pcm: Sound, hasty: bool = False) -> NDArray[np.int64]:
    """Sound [n * 1920] -> codes [n, 8], from a fresh codec; `hasty`: SEANet in bfloat16, twice as fast, which changes
    codes as a little noise on the line would."""
    codes = whole.encode(weights, torch.from_numpy(pcm)[None, None], CODEC_KEYS, hasty)
    return np.asarray(codes[0].T.numpy())


def make_tables(work: Work) -> None:
    """Stage: `tables.pt`."""
    weights = load_codec(work)
    quiet = encode(weights, np.zeros(FRAME * 60, np.float32))[-1]
    seconds = np.arange(FRAME * 60) / RATE
    tone = encode(weights, (0.5 * np.sin(2 * np.pi * 440 * seconds)).astype(np.float32))[-1]
    sentences: dict[str, dict[str, NDArray[np.int64]]] = {}
    words: dict[str, dict[str, NDArray[np.int64]]] = {}
    for voice in AGENT_VOICES:
        sentences[voice], words[voice] = {}, {}
        for text, sound in agent_sounds(work, voice).items():
            frames = -(-len(sound) // FRAME)
            padded = np.zeros((LEAD + frames) * FRAME, np.float32)
            padded[LEAD * FRAME : LEAD * FRAME + len(sound)] = sound
            sentences[voice][text] = encode(weights, padded)[LEAD:]
            words[voice][text] = spread(text, frames) if work.smoke else align(text, sound)
    torch.save(Tables(sentences, words, _silences(weights, quiet), tone), work.path("tables.pt"))
    distinct = {tuple(frame) for voice in AGENT_VOICES for codes in sentences[voice].values() for frame in codes}
    total = sum(len(codes) for voice in AGENT_VOICES for codes in sentences[voice].values())
    work.note("tables", frames=total, distinct=len(distinct))


def _silences(weights: Weights, quiet: NDArray[np.int64]) -> NDArray[np.int64]:
    """Silence of each voice and state [voice, state, 8]; FRESH is the codec's own, the others its neighbours."""
    table = whole.centroids(weights, "rvq_rest", 6)
    near = (table - table[quiet[7]]).pow(2).sum(1).argsort()[1:].tolist()
    silence = np.tile(quiet, (len(AGENT_VOICES), 3, 1))
    for voice in range(len(AGENT_VOICES)):
        for state in (USUAL, ASKED):
            silence[voice, state, 7] = near.pop(0)
    assert FRESH == 0
    return silence


def align(text: str, sound: Sound) -> NDArray[np.int64]:
    """Frame at which each word begins, each in a frame of its own (pocketsphinx, forced alignment)."""
    spoken, decoder = spoken_words(text), listener()
    decoder.set_align_text(" ".join(spoken))
    hear(decoder, as_heard(sound, after=3200))
    found = [segment for segment in decoder.seg() or () if segment.word.split("(")[0] in spoken]
    frames = -(-len(sound) // FRAME)
    if len(found) != len(spoken):
        return spread(text, frames)
    starts = [segment.start_frame * 10 // 80 for segment in found]
    for index in range(1, len(starts)):
        starts[index] = max(starts[index], starts[index - 1] + 1)
    late = max(0, starts[-1] - (frames - 1))
    return np.asarray(np.maximum(np.array(starts) - late, np.arange(len(starts))))


def spread(text: str, frames: int) -> NDArray[np.int64]:
    """Words begin at even distances."""
    count = len(text.split())
    return np.asarray(np.arange(count) * frames // count)


class TrackMaker:
    """Calls by callers of the pool, as the frozen encoder hears them."""

    def __init__(self, work: Work, unseen: bool = False) -> None:
        self._weights, self._tables = load_codec(work), load_tables(work)
        self._callers = calls.Callers(CallerPool(work), unseen)
        self._sounds = {voice: agent_sounds(work, voice) for voice in AGENT_VOICES}

    def make(self, index: int) -> Track:
        """The call of this number; in a third of them the agent is heard as an echo."""
        rng = np.random.default_rng(SEED + 3 + index)
        call = self._callers.call(TRACK_S, rng)
        line = calls.on_a_line(call, rng)
        if index % 3:
            return Track(encode(self._weights, line, True), call.voiced, call.turns)
        role, voice = str(rng.choice(ROLES)), str(rng.choice(AGENT_VOICES))
        acts = play(Teacher(role, self._tables.lengths(voice), rng), call.voiced, call.turns)
        line = line + calls.echo(calls.said(acts, self._sounds[voice]), rng)
        return Track(encode(self._weights, line, True), call.voiced, call.turns, role, voice, tuple(acts))


def make_unseen_tracks(work: Work, count: int = 24) -> None:
    """Stage: `unseen.pt`, calls by the voices of the evaluation, to watch the language model by."""
    maker = TrackMaker(work, unseen=True)
    torch.save([maker.make(index) for index in range(work.scale(count, 2))], work.path("unseen.pt"))


def make_tracks(work: Work, count: int = 320, shard: int = 40) -> None:
    """Stage: callers' sides of calls, by the shard; `tracks/done` says that it is over."""
    maker = TrackMaker(work)
    count = work.scale(count, 6)
    for start in range(0, count, shard):
        path = work.path(f"tracks/{start:04}.pt")
        if not path.exists():
            indices = progress(range(start, min(start + shard, count)), f"tracks from {start} of {count}")
            save([maker.make(index) for index in indices], path)
    work.path("tracks/done").touch()


def load_tables(work: Work) -> Tables:
    tables: Tables = torch.load(work.path("tables.pt"), weights_only=False)
    return tables


def load_tracks(work: Work, names: str = "tracks/*.pt") -> list[Track]:
    """All tracks that have been made so far."""
    shards = sorted(work.root.glob(names))
    return [track for shard in shards for track in torch.load(shard, weights_only=False)]


def as_tensor(codes: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes))
