"""Stage: the language model learns to be the teacher, from the caller's codes alone."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn

from scripts.train_tiny import whole
from scripts.train_tiny.codes import Tables, Track, load_tables, load_tracks
from scripts.train_tiny.dialogue import Act, Teacher, play
from scripts.train_tiny.sentences import ASSISTANT_PROMPTS, CALLER, HOTEL_PROMPTS, ROLES
from scripts.train_tiny.store import Checkpoints, Weights
from scripts.train_tiny.tokenizer import PAD, SYSTEM_TAG, UNKNOWN, pieces, write_tokenizer
from scripts.train_tiny.voices import AGENT_VOICES
from scripts.train_tiny.work import SEED, Work, progress

GAP = 6
SHORTEST = 140
"""Frames of a call that is cut short; it is cut at its end, never at its start."""
OPENING = 8
"""Live columns in which the text's padding, and so the role, is learnt from the prompt: later ones just copy it on."""
IGNORED = -100
PADDING = {"assistant": PAD, "hotel": UNKNOWN}
"""Text of a frame without a word: neither is shown, so the agent can remember its role in them."""
INTENTS = tuple(CALLER)

Frames = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Text [n], the agent's codes [n, 8], the caller's codes [n, 8]."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model; written to `config.json` under the family's names."""

    dim: int = 224
    heads: int = 4
    layers: int = 5
    feedforward: int = 672
    keys: int = 200
    depformer_dim: int = 64
    depformer_heads: int = 4
    depformer_layers: int = 2
    depformer_feedforward: int = 192
    card: int = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """One call as the model sees it, P columns of prompt and F live ones."""

    columns: NDArray[np.int64]  # [P + F, 17]
    prompt: int
    sounding: NDArray[np.bool_]  # [P + F] the depformer has something to learn here
    intents: NDArray[np.int64]  # [P + F] meaning of the turn that just ended, or IGNORED
    role: int
    voice: int


def new_weights(sizes: Sizes, generator: torch.Generator) -> Weights:
    """Random weights under the names of the file."""
    words, d, e = len(pieces()), sizes.dim, sizes.depformer_dim
    hidden, dep_hidden = 2 * sizes.feedforward // 3, 2 * sizes.depformer_feedforward // 3

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return normal(rows, columns, scale=gain / math.sqrt(columns))

    w = {"text_emb.weight": normal(words + 1, d, scale=0.3), "text_linear.weight": matrix(words, d)}
    w |= {f"emb.{k}.weight": normal(sizes.card + 1, d, scale=0.3 if k in (0, 8) else 0.1) for k in range(16)}
    for i in range(sizes.layers):
        name, gain = f"transformer.layers.{i}", 1 / math.sqrt(2 * sizes.layers)
        w[f"{name}.self_attn.in_proj_weight"] = matrix(3 * d, d)
        w[f"{name}.self_attn.out_proj.weight"] = matrix(d, d, gain)
        w[f"{name}.gating.linear_in.weight"] = matrix(2 * hidden, d)
        w[f"{name}.gating.linear_out.weight"] = matrix(d, hidden, gain)
        w |= {f"{name}.norm{n}.alpha": torch.ones(1, 1, d) for n in (1, 2)}
    w["out_norm.alpha"] = torch.ones(1, 1, d)
    w["depformer_text_emb.weight"] = normal(words + 1, e, scale=0.5)
    for k in range(8):
        w[f"depformer_in.{k}.weight"] = matrix(e, d)
        w[f"linears.{k}.weight"] = matrix(sizes.card, e)
        if k < 7:
            w[f"depformer_emb.{k}.weight"] = normal(sizes.card + 1, e, scale=0.5)
    for i in range(sizes.depformer_layers):
        name, gain = f"depformer.layers.{i}", 1 / math.sqrt(2 * sizes.depformer_layers)
        w[f"{name}.self_attn.in_proj_weight"] = matrix(8 * 3 * e, e)
        w[f"{name}.self_attn.out_proj.weight"] = matrix(8 * e, e, gain)
        for k in range(8):
            w[f"{name}.gating.{k}.linear_in.weight"] = matrix(2 * dep_hidden, e)
            w[f"{name}.gating.{k}.linear_out.weight"] = matrix(e, dep_hidden, gain)
        w |= {f"{name}.norm{n}.alpha": torch.ones(1, 1, e) for n in (1, 2)}
    return w


# ---- from tracks to columns


class Samples:
    """Draws calls: a track, a role, a voice, a prompt, and what the teacher does then."""

    def __init__(
        self, tables: Tables, tracks: Sequence[Track], tokenizer: SentencePieceProcessor, sizes: Sizes
    ) -> None:
        self._tables, self.tracks, self.tokenizer, self._sizes = tables, tracks, tokenizer, sizes
        self._words = len(pieces())
        self._word_ids = [index for index, piece in enumerate(pieces()) if index > 4 and not _of_a_hotel(piece)]

    def draw(self, rng: np.random.Generator) -> Sample:
        track = self.tracks[int(rng.integers(len(self.tracks)))]
        bare = rng.random() < 0.06 and track.acts is None
        role = "assistant" if bare else track.role or str(rng.choice(ROLES))
        voice = AGENT_VOICES[0] if bare else track.voice or str(rng.choice(AGENT_VOICES))
        acts = track.acts or play(Teacher(role, self._tables.lengths(voice), rng), track.voiced, track.turns)
        acts = acts[: int(rng.integers(SHORTEST, len(acts) + 1))]
        text, agent, user = self._bare() if bare else self._prompt(role, voice, rng)
        return self._columns(track, role, voice, acts, text, agent, user)

    def _bare(self) -> Frames:
        """Frame 0, which never arrives."""
        return np.array([PAD]), self._tables.silence[0, :1], self._tables.sine[None]

    def _prompt(self, role: str, voice: str, rng: np.random.Generator) -> Frames:
        """Frames of a system prompt: the voice says something, a gap, the text, a gap."""
        spoken = list(self._tables.sentences[voice].values())
        codes = spoken[int(rng.integers(len(spoken)))] if rng.random() < 0.6 else self.voice_prompt(voice)
        text = [PAD] * (len(codes) + GAP) + self._text(role, rng) + [PAD] * GAP
        silence = np.tile(self._tables.silence[0, 0], (len(text) - len(codes), 1))
        return np.array(text), np.concatenate([codes, silence]), np.tile(self._tables.sine, (len(text), 1))

    def voice_prompt(self, voice: str) -> NDArray[np.int64]:
        """What the shipped voice file holds: [V, 8]."""
        return self._tables.sentences[voice]["I am fine, thank you. And you?"]

    def _text(self, role: str, rng: np.random.Generator) -> list[int]:
        """Tokens of a prompt: one of the role's, with words that mean nothing put in anywhere."""
        if role == "assistant" and rng.random() < 0.3:
            words = [self._any_word(rng) for _ in range(int(rng.integers(0, 30)))]
        else:
            texts = HOTEL_PROMPTS if role == "hotel" else ASSISTANT_PROMPTS
            words = self.tokenizer.encode(texts[int(rng.integers(len(texts)))])
            for _ in range(int(rng.integers(0, 12)) if rng.random() < 0.5 else 0):
                words.insert(int(rng.integers(len(words) + 1)), self._any_word(rng))
        if not words:
            return []
        tag = self.tokenizer.piece_to_id("\u2581" + SYSTEM_TAG)
        return [tag, *words, tag]

    def _any_word(self, rng: np.random.Generator) -> int:
        return UNKNOWN if rng.random() < 0.6 else self._word_ids[int(rng.integers(len(self._word_ids)))]

    def _columns(
        self,
        track: Track,
        role: str,
        voice: str,
        acts: Sequence[Act],
        text: NDArray[np.int64],
        agent: NDArray[np.int64],
        user: NDArray[np.int64],
    ) -> Sample:
        """The prompt's frames and the call's, laid into columns by the delay rule."""
        prompt = len(text)
        spoken = [self._word(voice, act) for act in acts]
        pad = PADDING[role]
        text = np.concatenate([text, [pad if word is None else word for word in spoken]])
        agent = np.concatenate([agent, [self._tables.frame(voice, act) for act in acts]])
        user = np.concatenate([user, track.user[: len(acts)]])
        columns = np.full((len(text), 17), self._sizes.card)
        columns[:, 0] = self._words
        columns[1:, 0], columns[1:, 1], columns[1:, 9] = text[1:], agent[1:, 0], user[1:, 0]
        columns[2:, 2:9], columns[2:, 10:] = agent[1:-1, 1:], user[1:-1, 1:]
        changes = (agent[1:] != agent[:-1]).any(1)
        near = np.zeros(len(text), bool)
        near[1:] |= changes
        near[2:] |= changes[:-1]
        near[:prompt] = False
        meanings = self._meanings(track, prompt, len(text))
        return Sample(columns, prompt, near, meanings, ROLES.index(role), AGENT_VOICES.index(voice))

    def _word(self, voice: str, act: Act) -> int | None:
        if act.sentence is None:
            return None
        starts = self._tables.words[voice][act.sentence]
        hits = np.flatnonzero(starts == act.frame)
        return None if not len(hits) else self.tokenizer.encode(act.sentence)[int(hits[0])]

    def _meanings(self, track: Track, prompt: int, length: int) -> NDArray[np.int64]:
        meanings = np.full(length, IGNORED)
        for turn in track.turns:
            meanings[prompt + turn.end - 1 : prompt + turn.end + 9] = INTENTS.index(turn.intent)
        return meanings


def _of_a_hotel(piece: str) -> bool:
    """Whether a word alone makes a prompt a hotel's."""
    words = {"hotel", "front", "desk", "reception", "receptionist", "guest", "guests", "rooms", "room", "breakfast"}
    return piece.strip("\u2581.,?!").lower() in words


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples padded at the end to one length; `live` marks columns that are foretold and count."""

    columns: Tensor  # [B, T, 17] as the model is fed: some tokens are wrong or hidden (-1)
    targets: Tensor  # [B, T, 17] as they were
    live: Tensor  # bool [B, T]
    opening: Tensor  # bool [B, T]: the first live columns, where the prompt alone tells the role
    sounding: Tensor  # bool [B, T]
    intents: Tensor  # [B, T]
    roles: Tensor  # [B]
    voices: Tensor  # [B]


def stacked(samples: Sequence[Sample], sizes: Sizes, rng: np.random.Generator) -> Batch:
    length = max(len(sample.columns) for sample in samples)

    def padded(rows: list[NDArray[np.int64]], fill: int) -> NDArray[np.int64]:
        widths = [[(0, length - len(row)), *[(0, 0)] * (row.ndim - 1)] for row in rows]
        return np.stack([np.pad(row, width, constant_values=fill) for row, width in zip(rows, widths, strict=True)])

    targets = padded([sample.columns for sample in samples], 0)
    positions = np.arange(length)[None]
    prompts = np.array([[sample.prompt] for sample in samples])
    live = (positions >= prompts) & (positions < np.array([[len(sample.columns)] for sample in samples]))
    opening = live & (positions < prompts + OPENING)
    sounding = padded([sample.sounding.astype(np.int64) for sample in samples], 0).astype(bool)
    sounding |= live & (rng.random(live.shape) < 0.1)
    intents = padded([sample.intents for sample in samples], IGNORED)
    roles, voices = np.array([sample.role for sample in samples]), np.array([sample.voice for sample in samples])
    fed = _blurred(targets, live, sizes, rng)
    padding = np.isin(targets[..., 0], list(PADDING.values()))
    fed[opening & padding & (rng.random((len(samples), 1)) < 0.5), 0] = -1
    return Batch(*map(torch.from_numpy, (fed, targets, live, opening, sounding & live, intents, roles, voices)))


def _blurred(
    columns: NDArray[np.int64], live: NDArray[np.bool_], sizes: Sizes, rng: np.random.Generator
) -> NDArray[np.int64]:
    """What the model is fed: 3 % wrong codes of the agent, so that it recovers from its own slips; 8 % of the caller's
    wrong and a third of the acoustic codebooks hidden for a whole call, so that it rests on no single one."""
    fed = columns.copy()
    wrong = rng.integers(0, sizes.card, columns.shape)
    chance = rng.random(columns.shape)
    limit = np.array([0.0] + [0.03] * 8 + [0.08] * 8) * live[..., None]
    np.copyto(fed, wrong, where=chance < limit)
    hidden = rng.random((len(columns), 1, 17)) < np.array([0.0] * 10 + [0.3] * 7)
    fed[np.broadcast_to(hidden & live[..., None], fed.shape)] = -1
    return fed


# ---- learning


@dataclass(frozen=True, slots=True)
class Losses:
    """Means over a batch."""

    text: Tensor
    semantic: Tensor
    acoustic: Tensor
    intent: Tensor
    prompt: Tensor
    text_right: float
    intent_right: float
    prompt_right: float

    def figures(self) -> dict[str, float]:
        named = {field.name: torch.as_tensor(getattr(self, field.name)) for field in fields(self)}
        return {name: round(float(value.detach()), 4) for name, value in named.items()}

    def total(self) -> Tensor:
        return self.text + 2 * self.semantic + self.acoustic + 0.5 * self.intent + 0.5 * self.prompt


def losses(w: whole.Weights, judge: nn.Linear, batch: Batch, sizes: Sizes) -> Losses:
    h = whole.temporal(w, batch.columns, sizes.heads, sizes.keys)
    foretold, wanted = batch.live[:, 1:], batch.targets[:, 1:]
    text_logits = F.linear(h[:, :-1][foretold], w["text_linear.weight"]).float()
    text = wanted[foretold][:, 0]
    silent = (text == PAD) | (text == UNKNOWN)
    weight = torch.where(batch.opening[:, 1:][foretold], 3.0, torch.where(silent, 0.15, 1.0))
    text_loss = (F.cross_entropy(text_logits, text, reduction="none") * weight).sum() / weight.sum()
    sounding = batch.sounding[:, 1:]
    column = wanted[sounding]
    logits = whole.depformer(w, h[:, :-1][sounding], column[:, 0], column[:, 1:9], sizes.depformer_heads).float()
    code_losses = F.cross_entropy(
        logits.reshape(-1, sizes.card), column[:, 1:9].reshape(-1), reduction="none", ignore_index=sizes.card
    ).view(-1, 8)
    asked = batch.intents != IGNORED
    meaning = judge(h[asked])[:, : len(INTENTS)].float()
    prompt_loss, prompt_right = _prompt_heard(judge(h[batch.live])[:, len(INTENTS) :].float(), batch)
    intent_loss = F.cross_entropy(meaning, batch.intents[asked]) if asked.any() else text_loss.new_zeros(())
    return Losses(
        text_loss,
        code_losses[:, 0].mean(),
        code_losses[:, 1:].mean(),
        intent_loss,
        prompt_loss,
        float((text_logits.argmax(-1) == text)[~silent].float().mean()),
        float((meaning.argmax(-1) == batch.intents[asked]).float().mean()) if asked.any() else 0.0,
        prompt_right,
    )


def _prompt_heard(logits: Tensor, batch: Batch) -> tuple[Tensor, float]:
    """Loss of telling role and voice at every live column, and how often both are told rightly."""
    owner = batch.live.nonzero()[:, 0]
    roles, voices = batch.roles[owner], batch.voices[owner]
    role, voice = logits[:, : len(ROLES)], logits[:, len(ROLES) :]
    right = (role.argmax(1) == roles) & (voice.argmax(1) == voices)
    return F.cross_entropy(role, roles) + F.cross_entropy(voice, voices), float(right.float().mean())


def drawn(samples: Samples, sizes: Sizes, count: int, seed: int) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    while True:
        yield stacked([samples.draw(rng) for _ in range(count)], sizes, rng)


@torch.no_grad()
def _unseen(w: whole.Weights, judge: nn.Linear, samples: Samples, sizes: Sizes) -> float:
    """How often a turn of the evaluation's voices is understood, told at each frame just after it."""
    rng = np.random.default_rng(SEED)
    right, total = 0.0, 0
    for _ in range(3):
        batch = stacked([samples.draw(rng) for _ in range(8)], sizes, rng)
        asked = batch.intents != IGNORED
        with torch.autocast("cpu", torch.bfloat16):
            meaning = judge(whole.temporal(w, batch.targets, sizes.heads, sizes.keys)[asked])
        right += float((meaning[:, : len(INTENTS)].argmax(-1) == batch.intents[asked]).sum())
        total += int(asked.sum())
    return right / max(1, total)


def rate(step: int, steps: int) -> float:
    """Up over 100 steps, level, and down to nearly nothing over the last quarter."""
    return min(1.0, (step + 1) / 100, max(0.02, 4 * (steps - step) / steps))


def train(work: Work, steps: int = 6000, batch: int = 4, peak: float = 1.2e-3) -> None:
    """Train; `checkpoints/lm.pt` every 50 steps, `lm.pt` at the end. A smaller `steps` on resuming ends it earlier."""
    steps, batch = work.scale(steps, 6), work.scale(batch, 2)
    sizes = Sizes()
    torch.manual_seed(SEED)
    weights = {k: nn.Parameter(v) for k, v in new_weights(sizes, torch.Generator().manual_seed(SEED)).items()}
    judge = nn.Linear(sizes.dim, len(INTENTS) + len(ROLES) + len(AGENT_VOICES))
    samples = Samples(load_tables(work), load_tracks(work), write_tokenizer(work.path("tokenizer.model")), sizes)
    unseen = Samples(load_tables(work), load_tracks(work, "unseen.pt"), samples.tokenizer, sizes)
    matrices = [p for p in weights.values() if p.dim() == 2]
    others = [p for p in [*weights.values(), *judge.parameters()] if p.dim() != 2 or p is judge.weight]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}],
        peak,
        betas=(0.9, 0.98),
        fused=True,
    )
    checkpoints = Checkpoints(work, "lm")
    start = checkpoints.resume(weights, {"optimiser": optimiser, "judge": judge})
    batches = drawn(samples, sizes, batch, SEED + start)
    for step in progress(range(start, steps), "lm"):
        for group in optimiser.param_groups:
            group["lr"] = peak * rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            found = losses(weights, judge, next(batches), sizes)
        optimiser.zero_grad()
        torch.autograd.backward(found.total())
        nn.utils.clip_grad_norm_([*weights.values(), *judge.parameters()], 1.0)
        optimiser.step()
        if step % 50 == 49 or step == steps - 1:
            samples.tracks = load_tracks(work)  # there may be more by now
            if step % 200 == 199 and unseen.tracks:
                work.note("lm_unseen", step=step + 1, intent_right=_unseen(weights, judge, unseen, sizes))
            checkpoints.save(step + 1, weights, {"optimiser": optimiser, "judge": judge})
            figures = found.figures()
            work.note("lm", step=step + 1, **figures)
            print(f"lm {step + 1}: {figures}", flush=True)
    torch.save({k: v.detach().bfloat16().float() for k, v in weights.items()}, work.path("lm.pt"))
