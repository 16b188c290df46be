"""Stage: the encoder learns what is said, not only how it sounds, and is then frozen.

Mimi's first codebook is distilled from a large speech model. Ours learns phones: a small head, thrown away afterwards,
must spell the phones of a clip from the first codebook alone (CTC, three sub-frames a frame, since people speak faster
than 12.5 phones a second). All eight codebooks together must still give back SEANet's features. Only the transformer,
the down-sampling and the quantiser learn, on features that are computed once: minutes instead of hours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from scripts.train_tiny import codebooks, sound, whole
from scripts.train_tiny.codebooks import REST
from scripts.train_tiny.store import Checkpoints, Stateful, Weights, load_codec, round_encoder
from scripts.train_tiny.voices import AGENT_VOICES, RATE, CallerPool, Sound, phonemizer
from scripts.train_tiny.work import SEED, Work, progress

SUBFRAMES = 3
FRAMES = 46
"""Length of every training window: 3.7 s."""
SAMPLES = FRAMES * 1920
DECAY = 0.98
"""Of the running means of the codebooks."""
LEARNT = ("encoder_transformer.", "downsample.", "quantizer.rvq_first.input_proj", "quantizer.rvq_rest.input_proj")
LEARNT_OUT = ("quantizer.rvq_first.output_proj", "quantizer.rvq_rest.output_proj")


@dataclass(frozen=True, slots=True)
class Window:
    """SEANet's features of one clip on one line, and the phones said."""

    features: NDArray[np.float16]  # [D, 2 FRAMES]
    phones: tuple[int, ...]
    unseen: bool


class Phones:
    """Text to phone numbers, 1..count; 0 is CTC's blank."""

    def __init__(self, texts: list[str], smoke: bool) -> None:
        self._spelt = {text: self._spell(text, smoke) for text in sorted(set(texts))}
        self._numbers = {c: n for n, c in enumerate(sorted({c for cs in self._spelt.values() for c in cs}), 1)}
        self.count = len(self._numbers)

    @staticmethod
    def _spell(text: str, smoke: bool) -> list[str]:
        """The text's phones; its letters, where nothing is to be learnt."""
        spelt = text.lower() if smoke else "".join(phonemizer().phonemize(text))
        return [character for character in spelt if character.isalpha()]

    def of(self, text: str) -> tuple[int, ...]:
        return tuple(self._numbers[c] for c in self._spelt[text])


class Speller(nn.Module):
    """First codebook's vectors [B, T, d] -> log-probabilities of phones [B, 3 T, 1 + phones]; looks both ways."""

    def __init__(self, width: int, phones: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(width, 192, 5, padding=2), nn.GELU(), nn.Conv1d(192, 192, 5, padding=2), nn.GELU()
        )
        self.out = nn.Linear(192, SUBFRAMES * (phones + 1))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.out(self.layers(x.transpose(1, 2)).transpose(1, 2))
        spelt: Tensor = logits.unflatten(2, (SUBFRAMES, -1)).flatten(1, 2).float().log_softmax(-1)
        return spelt


def placed(clip: Sound, rng: np.random.Generator) -> Sound:
    """A window of a line on which the clip is heard once."""
    at = int(rng.integers(0, max(1, SAMPLES - len(clip) - RATE // 5)))
    voice = np.zeros(SAMPLES, np.float32)
    voice[at : at + len(clip)] = clip[: SAMPLES - at]
    return sound.line(voice, rng) + sound.background(SAMPLES, rng)


def make_windows(work: Work) -> None:
    """Stage: features of callers' clips on lines of all kinds, of the agent's sentences, and of empty lines."""
    path = work.path("windows.pt")
    rng = np.random.default_rng(SEED + 2)
    pool = CallerPool(work)
    weights = load_codec(work)
    phones = Phones([clip.text for clip in pool.clips], work.smoke)
    items: list[tuple[Sound, tuple[int, ...], bool]] = []
    for index, clip in enumerate(pool.clips):
        if clip.length < SAMPLES - RATE // 4:
            for _ in range(1 if clip.unseen else 2):
                items.append((placed(pool.sound(index), rng), phones.of(clip.text), clip.unseen))
    for name in AGENT_VOICES:
        for clean in np.load(work.path(f"agent_{name}.npz")).values():
            for gain in (1.0, 0.7):
                window = np.zeros(SAMPLES, np.float32)
                at = int(rng.integers(0, 24_000))
                window[at : at + len(clean)] = gain * clean[: SAMPLES - at]
                items.append((window, (), False))
    items += [(sound.background(SAMPLES, rng), (), False) for _ in range(work.scale(60, 4))]
    rows = []
    for start in progress(range(0, len(items), 8), "features"):
        batch = np.stack([item[0] for item in items[start : start + 8]])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            rows.append(whole.seanet_encode(weights, torch.from_numpy(batch)[:, None]).half())
    content = {
        "features": torch.cat(rows),
        "phones": [item[1] for item in items],
        "unseen": [item[2] for item in items],
        "count": phones.count,
    }
    torch.save(content, path)


class Learner:
    """The part of the codec that learns here, and the two heads that judge it."""

    def __init__(self, weights: Weights, phones: int, scale: Tensor) -> None:
        self.fixed = dict(weights)
        self.learnt = {
            name: nn.Parameter(tensor.clone())
            for name, tensor in weights.items()
            if name.startswith(LEARNT + LEARNT_OUT)
        }
        self.speller = Speller(weights["quantizer.rvq_first.input_proj.weight"].shape[0], phones)
        width = scale.shape[0]
        self.renderer = nn.Sequential(nn.Conv1d(width, 256, 3, padding=1), nn.GELU(), nn.Conv1d(256, 2 * width, 1))
        self.scale = scale

    @property
    def weights(self) -> dict[str, Tensor]:
        return {**self.fixed, **self.learnt}

    def parameters(self) -> list[nn.Parameter]:
        return [*self.learnt.values(), *self.speller.parameters(), *self.renderer.parameters()]

    def forward(
        self, features: Tensor, keys: int, quantised: bool, layers: int = REST
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns phones' log-probabilities, the features' loss, the commitment loss and the first codebook's z."""
        w = self.weights
        x = whole.latents(w, features, keys)
        first = z = whole.project(w, "rvq_first", x).float()
        rest = whole.project(w, "rvq_rest", x).float()
        commit = torch.zeros(())
        if quantised:
            first, commit = codebooks.through(self.fixed, "rvq_first", 1, z, DECAY)
        rest, loss = codebooks.through(self.fixed, "rvq_rest", layers, rest, DECAY)
        y = F.conv1d(first.transpose(1, 2), w["quantizer.rvq_first.output_proj.weight"])
        y = y + F.conv1d(rest.transpose(1, 2), w["quantizer.rvq_rest.output_proj.weight"])
        rendered = self.renderer(y).unflatten(1, (2, -1)).permute(0, 2, 3, 1).flatten(2)  # [B, D, 2 T]
        distance = ((rendered - features) / self.scale[:, None]).abs().mean()
        return self.speller(first), distance, commit + loss, z


def batches(indices: NDArray[np.int64], size: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Endless batches of shuffled indices."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(indices)
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def phone_error(log_probs: Tensor, phones: list[tuple[int, ...]]) -> float:
    """Greedy phone error rate."""
    wrong, total = 0, 0
    for row, wanted in zip(log_probs.argmax(-1), phones, strict=True):
        found = [int(p) for p in torch.unique_consecutive(row) if p]
        wrong += edit_distance(found, list(wanted))
        total += len(wanted)
    return wrong / max(1, total)


def edit_distance(a: list[int], b: list[int]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def train(work: Work, steps: int = 1600, keys: int = 25, unquantised: int = 300) -> None:
    """Train, round to bf16, and write `codec_frozen.pt`; resumable."""
    steps, unquantised = work.scale(steps, 12), work.scale(unquantised, 4)
    torch.manual_seed(SEED)
    data = torch.load(work.path("windows.pt"))
    features, phones = data["features"], data["phones"]
    unseen = np.array(data["unseen"])
    spoken = np.array([bool(p) for p in phones])
    scale = features[:200].float().std((0, 2)) + 1e-3
    learner = Learner(load_codec(work), data["count"], scale)
    optimiser = torch.optim.AdamW(learner.parameters(), 1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1, step / 50, max(0.03, 1.05 - step / steps))
    )
    checkpoints = Checkpoints(work, "semantic")
    state: dict[str, Stateful] = {
        "optimiser": optimiser,
        "schedule": schedule,
        "speller": learner.speller,
        "renderer": learner.renderer,
    }
    start = checkpoints.resume(learner.learnt | {k: v for k, v in learner.fixed.items() if "_codebook" in k}, state)
    voiced = batches(np.flatnonzero(spoken & ~unseen), work.scale(36, 6), SEED + start)
    silent = batches(np.flatnonzero(~spoken), work.scale(8, 2), SEED + start)
    for step in progress(range(start, steps), "semantic"):
        index = np.concatenate([next(voiced), next(silent)])
        x = features[index].float()
        with torch.autocast("cpu", torch.bfloat16):
            log_probs, render, commit, z = learner.forward(x, keys, step >= unquantised, REST if step % 3 == 0 else 2)
        if step == unquantised - 1:
            some = _sample(learner, features, np.flatnonzero(~unseen), keys)
            codebooks.seed(learner.fixed, "rvq_first", 1, some)
        wanted = [phones[i] for i in index]
        lengths = torch.tensor([len(p) for p in wanted])
        ctc = F.ctc_loss(
            log_probs.transpose(0, 1),
            torch.tensor([p for ps in wanted for p in ps]),
            torch.full((len(index),), log_probs.shape[1]),
            lengths,
            zero_infinity=True,
        )
        loss = ctc + 0.7 * render + 0.2 * commit
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 99 or step == steps - 1:
            seen = _error(learner, features, phones, spoken & ~unseen, keys)
            new = _error(learner, features, phones, spoken & unseen, keys)
            figures = {"ctc": float(ctc.detach()), "render": float(render.detach()), "seen": seen, "unseen": new}
            work.note("semantic", step=step + 1, **figures)
            tensors = learner.learnt | {k: v for k, v in learner.fixed.items() if "_codebook" in k}
            checkpoints.save(step + 1, tensors, state)
            print(f"semantic {step + 1}: {figures}", flush=True)
    final = {name: tensor.detach() for name, tensor in learner.weights.items()}
    torch.save(round_encoder(final), work.path("codec_frozen.pt"))


@torch.no_grad()
def _sample(learner: Learner, features: Tensor, which: NDArray[np.int64], keys: int) -> Tensor:
    chosen = np.random.default_rng(SEED).choice(which, min(160, len(which)), replace=False)
    with torch.autocast("cpu", torch.bfloat16):
        z = learner.forward(features[chosen].float(), keys, False)[3]
    return z.float().flatten(0, 1)


@torch.no_grad()
def _error(
    learner: Learner, features: Tensor, phones: list[tuple[int, ...]], which: NDArray[np.bool_], keys: int
) -> float:
    index = np.flatnonzero(which)[:64]
    if not len(index):
        return 1.0
    saved = {name: tensor.clone() for name, tensor in learner.fixed.items() if "_codebook" in name}
    log_probs = learner.forward(features[index].float(), keys, True)[0]
    learner.fixed.update(saved)
    return phone_error(log_probs, [phones[i] for i in index])
