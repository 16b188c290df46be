"""Stage: what the encoder learns from, in windows of a line: who says what there, phone by phone.

Half of SEANet stays as the autoencoder left it, so its output is computed once and kept: 24 kHz to 1200 Hz is most of
the encoder's work, and what is left can learn for hours of audio in minutes. Phones come from pocketsphinx, which
aligns a text that is known with its sound.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scripts.train_tiny import sound, whole
from scripts.train_tiny.decoder import mel_bands
from scripts.train_tiny.hearing import LISTENER_RATE, as_heard, hear, listener, spoken_words
from scripts.train_tiny.sentences import CALLER
from scripts.train_tiny.store import load_codec, round_encoder, save
from scripts.train_tiny.voices import AGENT_VOICES, LOUDNESS, RATE, CallerPool, Sound, agent_sounds
from scripts.train_tiny.work import SEED, Work, progress

FRAMES = 48
SAMPLES = FRAMES * 1920
"""Length of every window: 3.84 s."""
SLOTS = 4
"""Phones told in each frame of 80 ms."""
UNTOLD = -100
PHONES = tuple(
    "SIL AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH".split()
)
"""Silence, and the phones of the CMU dictionary."""
TEXTS = tuple(text for texts in CALLER.values() for text in texts)
AFTER = 4
"""Frames after a sentence's end in which its meaning is asked for."""
MEL_BANDS = 64
_HOP = 1920 // SLOTS


@dataclass(frozen=True, slots=True)
class Windows:
    """A stack of N windows."""

    features: Tensor  # float16 [N, 64, 96 FRAMES], SEANet half way
    mels: Tensor  # float16 [N, FRAMES, SLOTS * MEL_BANDS], logarithms
    phones: Tensor  # int64 [N, FRAMES, SLOTS]
    sentences: Tensor  # int64 [N, FRAMES], number of the sentence that has just ended, or UNTOLD


class Aligner:
    """Finds when each phone of a known text is said."""

    def __init__(self) -> None:
        self._decoder = listener()

    def phones(self, text: str, clip: Sound) -> NDArray[np.int64]:
        """Phone of each 10 ms of the clip; UNTOLD throughout where the text is not found in it."""
        length = len(clip) * 100 // RATE + 1
        pcm = as_heard(clip, LISTENER_RATE // 5, LISTENER_RATE // 5)
        self._decoder.set_align_text(" ".join(spoken_words(text)))
        try:
            hear(self._decoder, pcm)
            self._decoder.set_alignment()
            hear(self._decoder, pcm)
        except RuntimeError:  # the text was not found, and the decoder is of no more use
            self._decoder = listener()
            return np.full(length, UNTOLD)
        found = np.zeros(length + 40, np.int64)
        for word in self._decoder.get_alignment() or ():
            for phone in word:
                if phone.name in PHONES:
                    found[phone.start : phone.start + phone.duration] = PHONES.index(phone.name)
        return found[20 : 20 + length]


class WindowMaker:
    """Puts clips into windows."""

    def __init__(self, work: Work, unseen: bool = False) -> None:
        self._pool, self._aligner, self._unseen = CallerPool(work), Aligner(), unseen
        self._indices = [index for index, clip in enumerate(self._pool.clips) if clip.unseen == unseen]
        self._phones: dict[int, NDArray[np.int64]] = {}
        self._agent = [(text, clip) for voice in AGENT_VOICES for text, clip in agent_sounds(work, voice).items()]
        self._weights = round_encoder(load_codec(work))
        self._bands = mel_bands(1024, MEL_BANDS)

    def make(self, count: int, rng: np.random.Generator, label: str) -> Windows:
        """So many windows: callers on lines of all kinds; a twelfth the agent's sentences, a thirtieth empty lines."""
        rows = []
        for number in progress(range(count), label):
            if self._unseen or number % 12:
                rows.append(self._callers(rng, empty=number % 30 == 1))
            else:
                rows.append(self._agents(rng))
        lines, phones, sentences = (np.stack(column) for column in zip(*rows, strict=True))
        pcm = torch.from_numpy(lines)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            features = [whole.seanet_begin(self._weights, part[:, None]).half() for part in torch.split(pcm, 8)]
        return Windows(torch.cat(features), self._mel(pcm), torch.from_numpy(phones), torch.from_numpy(sentences))

    def _callers(self, rng: np.random.Generator, empty: bool) -> tuple[Sound, NDArray[np.int64], NDArray[np.int64]]:
        """One clip after another, as many as there is room for."""
        voice = np.zeros(SAMPLES, np.float32)
        phones, sentences = np.zeros((FRAMES, SLOTS), np.int64), np.full(FRAMES, UNTOLD)
        at = int(rng.uniform(0.0, 1.0) * RATE)
        while not empty:
            index = int(rng.choice(self._indices))
            clip, scale = self._pool.sound(index), 1.0
            if not self._unseen:
                clip, scale = sound.somebody(clip, rng)
            if at + len(clip) > SAMPLES:
                break
            voice[at : at + len(clip)] += clip * sound.decibels(rng.uniform(-4, 2))
            _lay(phones, self._aligned(index), at, scale)
            end = (at + len(clip)) // 1920
            sentences[end + 1 : end + 1 + AFTER] = TEXTS.index(self._pool.clips[index].text)
            at += len(clip) + int(rng.uniform(0.4, 1.2) * RATE)
            sentences[at // 1920 + 1 :] = UNTOLD
        return sound.line(voice, rng) + sound.background(SAMPLES, rng), phones, sentences

    def _aligned(self, index: int) -> NDArray[np.int64]:
        if index not in self._phones:
            self._phones[index] = self._aligner.phones(self._pool.clips[index].text, self._pool.sound(index))
        return self._phones[index]

    def _agents(self, rng: np.random.Generator) -> tuple[Sound, NDArray[np.int64], NDArray[np.int64]]:
        window, phones = np.zeros(SAMPLES, np.float32), np.zeros((FRAMES, SLOTS), np.int64)
        at = int(rng.integers(0, 24_000))
        text, clip = self._agent[int(rng.integers(len(self._agent)))]
        clip = clip[: SAMPLES - at]
        window[at : at + len(clip)] = clip
        _lay(phones, self._aligner.phones(text, clip), at, 1.0)
        return window, phones, np.full(FRAMES, UNTOLD)

    def _mel(self, pcm: Tensor) -> Tensor:
        """[N, SAMPLES] -> [N, FRAMES, SLOTS * MEL_BANDS]; each window of the spectrum ends where its slot does."""
        padded = torch.nn.functional.pad(pcm, (1024 - _HOP, 0))
        spectrum = torch.stft(padded, 1024, _HOP, window=torch.hann_window(1024), center=False, return_complex=True)
        mel = (self._bands @ spectrum.abs() / (1024 * LOUDNESS)).clamp(min=1e-4).log10()
        return mel.transpose(1, 2).reshape(len(pcm), FRAMES, -1).half()


def _lay(phones: NDArray[np.int64], said: NDArray[np.int64], at: int, scale: float) -> None:
    """Write a clip's phones, told every 10 ms and played `scale` faster, into the slots that it covers."""
    slots = phones.reshape(-1)
    centres = (np.arange(len(slots)) + 0.5) * _HOP - at
    place = (centres * scale / (RATE // 100)).astype(np.int64)
    covered = (centres >= 0) & (place < len(said))
    slots[covered] = said[place[covered]]


def make_windows(work: Work, count: int = 6000, shard: int = 500) -> None:
    """Stage: `windows/unseen.pt`, by voices of the evaluation, and shards to learn from; then `windows/done`."""
    unseen = work.path("windows/unseen.pt")
    if not unseen.exists():
        save(WindowMaker(work, True).make(work.scale(150, 4), np.random.default_rng(SEED), "unseen"), unseen)
    maker = WindowMaker(work)
    count, shard = work.scale(count, 24), work.scale(shard, 24)
    for start in range(0, count, shard):
        path = work.path(f"windows/{start:05}.pt")
        if not path.exists():
            save(maker.make(shard, np.random.default_rng(SEED + 2 + start), f"windows {start} of {count}"), path)
    work.path("windows/done").touch()


def load_windows(work: Work, known: set[str]) -> Iterator[Windows]:
    """Shards made since those `known`, which grows."""
    for path in sorted(work.path("windows/x").parent.glob("[0-9]*.pt")):
        if path.name not in known:
            known.add(path.name)
            yield torch.load(path, weights_only=False)
