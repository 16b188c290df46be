"""Stage: the encoder learns what is said, not only how it sounds, and is then frozen.

Mimi's first codebook is distilled from a large speech model. Ours learns phones: a small head, thrown away afterwards,
must name the phones of every 20 ms from the first codebook alone. All eight codebooks together must give back the
spectrum, and let a second head understand a sentence that has just ended, whoever said it. The second half of SEANet,
the transformer, the down-sampling and the quantiser learn; see `windows.py` for the first half.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from scripts.train_tiny import codebooks, whole
from scripts.train_tiny.codebooks import REST
from scripts.train_tiny.store import Checkpoints, Stateful, Weights, load_codec, round_encoder
from scripts.train_tiny.windows import MEL_BANDS, PHONES, SLOTS, TEXTS, UNTOLD, Windows, load_windows
from scripts.train_tiny.work import SEED, Work, progress

DECAY = 0.98
"""Of the running means of the codebooks."""
LEARNT = (
    *(f"encoder.model.{index}." for index in (7, 9, 10, 12, 14)),
    "encoder_transformer.",
    "downsample.",
    "quantizer.rvq_first.input_proj",
    "quantizer.rvq_rest.input_proj",
    "quantizer.rvq_first.output_proj",
    "quantizer.rvq_rest.output_proj",
)


class Heads(nn.Module):
    """What judges the codes, and is thrown away: phones, spectrum, sentences."""

    def __init__(self, width: int, code_width: int) -> None:
        super().__init__()
        self.phones = _convolutions(code_width, 192, SLOTS * len(PHONES), 5)
        self.mels = _convolutions(width, 320, SLOTS * MEL_BANDS, 5)
        self.memory = nn.GRU(width, 256, batch_first=True)
        self.sentences = nn.Linear(256, len(TEXTS))

    def understood(self, y: Tensor) -> Tensor:
        """y [B, D, T] -> logits of the sentence that has just ended [B, T, texts]; looks back only."""
        heard, _ = self.memory(F.dropout(y.transpose(1, 2).float(), 0.4, self.training))
        sentences: Tensor = self.sentences(heard)
        return sentences


def _convolutions(inward: int, width: int, outward: int, kernel: int) -> nn.Sequential:
    """Two layers that look both ways and one that does not."""
    first = nn.Conv1d(inward, width, kernel, padding=kernel // 2)
    second = nn.Conv1d(width, width, kernel, padding=kernel // 2)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Conv1d(width, outward, 1))


@dataclass(frozen=True, slots=True)
class Judgement:
    """Losses, and how often phones and sentences are told rightly."""

    phones: Tensor
    mels: Tensor
    sentences: Tensor
    commitment: Tensor
    phones_right: float
    sentences_right: float

    def total(self) -> Tensor:
        return 2 * self.phones + 2 * self.mels + 0.5 * self.sentences + 0.2 * self.commitment

    def figures(self) -> dict[str, float]:
        losses = {"phones": self.phones, "mels": self.mels, "sentences": self.sentences, "commitment": self.commitment}
        rounded = {name: round(float(loss.detach()), 3) for name, loss in losses.items()}
        return {**rounded, "phones_right": self.phones_right, "sentences_right": self.sentences_right}


class Learner:
    """The part of the codec that learns here, and its judges."""

    def __init__(self, weights: Weights) -> None:
        self.fixed = {name: tensor.clone() for name, tensor in weights.items() if not name.startswith(LEARNT)}
        self.learnt = {
            name: nn.Parameter(tensor.clone()) for name, tensor in weights.items() if name.startswith(LEARNT)
        }
        projection = weights["quantizer.rvq_first.input_proj.weight"]
        self.heads = Heads(projection.shape[1], projection.shape[0])

    @property
    def weights(self) -> Weights:
        return {**self.fixed, **self.learnt}

    def parameters(self) -> list[nn.Parameter]:
        return [*self.learnt.values(), *self.heads.parameters()]

    def latents(self, features: Tensor, keys: int) -> Tensor:
        """SEANet half way [B, 64, 96 T] -> [B, D, T]; the transformer in float32, as the package runs it."""
        x = whole.seanet_finish(self.weights, features)
        with torch.autocast("cpu", enabled=False):
            return whole.latents(self.weights, x.float(), keys)

    def judge(self, windows: Windows, keys: int, quantised: bool, layers: int = REST) -> Judgement:
        features = windows.features.float()
        x = self.latents(roughened(features) if self.heads.training else features, keys)
        w = self.weights
        with torch.autocast("cpu", enabled=False):
            first = whole.project(w, "rvq_first", x)
            rest = whole.project(w, "rvq_rest", x)
            commitment = torch.zeros(())
            if quantised:
                first, commitment = codebooks.through(self.fixed, "rvq_first", 1, first, DECAY)
                rest, more = codebooks.through(self.fixed, "rvq_rest", layers, rest, DECAY)
                commitment = commitment + more
            y = whole.unproject(w, first, rest)
        phones = self.heads.phones(first.transpose(1, 2)).transpose(1, 2).unflatten(2, (SLOTS, -1)).float()
        mels = (self.heads.mels(y).transpose(1, 2) - windows.mels).abs().mean()
        sentences = self.heads.understood(y)
        return Judgement(
            F.cross_entropy(phones.flatten(0, 2), windows.phones.flatten()),
            mels,
            F.cross_entropy(sentences.flatten(0, 1), windows.sentences.flatten()),
            commitment,
            right(phones, windows.phones),
            right(sentences, windows.sentences),
        )


def roughened(features: Tensor) -> Tensor:
    """Features [B, C, T] with noise, up to a fifth of the channels missing and two gaps of at most 80 ms, so that no
    window is met twice as it was."""
    batch, channels, length = features.shape
    spread = features.std((1, 2), keepdim=True)
    rough = features + torch.randn_like(features) * spread * 0.3 * torch.rand(batch, 1, 1)
    kept = torch.rand(batch, channels, 1) >= 0.2 * torch.rand(batch, 1, 1)
    place = torch.arange(length)
    for _ in range(2):
        start = torch.randint(0, length, (batch, 1, 1))
        kept = kept & ~((place >= start) & (place < start + torch.randint(0, 96, (batch, 1, 1))))
    return rough * kept


def right(logits: Tensor, wanted: Tensor) -> float:
    """Share of what is told rightly, of what is asked; silence is not."""
    asked = (wanted != UNTOLD) & ((wanted > 0) | (logits.shape[-1] == len(TEXTS)))
    return round(float((logits.argmax(-1) == wanted)[asked].float().mean()), 3) if asked.any() else 0.0


class Supply:
    """Batches out of the shards that there are so far; raises FileNotFoundError if there is none.

    The newest `_KEPT` are held, 0.3 GB each: what has been met often teaches least.
    """

    _KEPT = 12

    def __init__(self, work: Work, seed: int) -> None:
        self._work, self._known, self._shards = work, set[str](), list[Windows]()
        self._rng = np.random.default_rng(seed)

    def batches(self, size: int) -> Iterator[Windows]:
        """Endless; shards that are made meanwhile join in."""
        while True:
            self._shards += load_windows(self._work, self._known)
            if not self._shards:
                raise FileNotFoundError(f"{self._work.path('windows')} holds no windows: run the stage `windows` first")
            del self._shards[: -self._KEPT]
            for _ in range(20):
                shard = self._shards[int(self._rng.integers(len(self._shards)))]
                yield pick(shard, self._rng.choice(len(shard.phones), size, replace=False))


def pick(windows: Windows, index: NDArray[np.int64]) -> Windows:
    chosen = torch.from_numpy(index)
    return Windows(windows.features[chosen], windows.mels[chosen], windows.phones[chosen], windows.sentences[chosen])


def train(work: Work, steps: int = 2000, keys: int = 25, unquantised: int = 300, peak: float = 1e-3) -> None:
    """Train, round to bf16, and write `codec_frozen.pt`; resumable."""
    steps, unquantised = work.scale(steps, 12), work.scale(unquantised, 4)
    torch.manual_seed(SEED)
    learner = Learner(load_codec(work))
    optimiser = torch.optim.AdamW(learner.parameters(), peak, betas=(0.9, 0.98), weight_decay=0.01)
    checkpoints = Checkpoints(work, "semantic")
    state: dict[str, Stateful] = {"optimiser": optimiser, "heads": learner.heads}
    tensors = learner.learnt | {name: tensor for name, tensor in learner.fixed.items() if "_codebook" in name}
    start = checkpoints.resume(tensors, state)
    batches = Supply(work, SEED + start).batches(work.scale(16, 4))
    unseen = torch.load(work.path("windows/unseen.pt"), weights_only=False)
    for step in progress(range(start, steps), "semantic"):
        if step == unquantised:
            _seed(learner, [next(batches) for _ in range(8)], keys)
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps, peak)
        with torch.autocast("cpu", torch.bfloat16):
            judged = learner.judge(next(batches), keys, step >= unquantised, REST if step % 3 == 0 else 3)
        optimiser.zero_grad()
        torch.autograd.backward(judged.total())
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 99 or step == steps - 1:
            work.note("semantic", step=step + 1, **judged.figures())
            found = _of_unseen(learner, unseen, keys, step >= unquantised)
            work.note("semantic_unseen", step=step + 1, **found)
            checkpoints.save(step + 1, tensors, state)
            print(f"semantic {step + 1}: {judged.figures()} unseen {found}", flush=True)
    final = {name: tensor.detach() for name, tensor in learner.weights.items()}
    torch.save(round_encoder(final), work.path("codec_frozen.pt"))


def rate(step: int, steps: int, peak: float) -> float:
    """Up over 50 steps, and down in a line to a fiftieth."""
    return peak * min(1, (step + 1) / 50, max(0.02, 1.05 - step / steps))


@torch.no_grad()
def _seed(learner: Learner, windows: list[Windows], keys: int) -> None:
    """Fill both groups' codebooks from what the latents are now."""
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.cat([learner.latents(some.features.float(), keys) for some in windows])
    for group, layers in (("rvq_first", 1), ("rvq_rest", REST)):
        codebooks.seed(learner.fixed, group, layers, whole.project(learner.weights, group, x).flatten(0, 1))


@torch.no_grad()
def _of_unseen(learner: Learner, windows: Windows, keys: int, quantised: bool) -> dict[str, float]:
    """Phones and sentences of voices of the evaluation, told rightly; in float32, nothing moves."""
    fixed = learner.fixed
    learner.fixed = {name: tensor.clone() for name, tensor in fixed.items()}
    learner.heads.eval()
    found = learner.judge(windows, keys, quantised).figures()
    learner.heads.train()
    learner.fixed = fixed
    return found


def edit_distance(a: list[int], b: list[int]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]
