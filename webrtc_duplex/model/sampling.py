"""Sampling without a generator: the noise of a draw is a function of (call seed, frame, draw, token).

A token is drawn among the top k by an exponential race: the winner is argmax(logit / T - log E), E exponential, which
equals drawing from softmax(logits / T). The noise is Philox-4x32-10 with key (seed << 32 | frame * 16 + draw), so it
depends neither on neighbours nor on what else was drawn, and a row that is not stepped draws nothing. Of V tokens,
token w * ceil(V / 4) + c has word w of counter c. Draw 0 is the text, draw 1 + k codebook k. Tokens that tie with the
k-th best are all kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from webrtc_duplex.errors import RequestError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.model.config import LMConfig, SamplingConfig
from webrtc_duplex.model.kernels import ops

MAX_TOP_K = 256
"""The largest top-k that a call may ask for; 0 means every token."""

MAX_TEMPERATURE = 4.0

SHORTLISTED = 8 * MAX_TOP_K
"""Tokens from which on a text's noise is made for the best alone, each of which needs a counter of its own."""

_DRAWS_A_FRAME = 16
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_TO_UNIT = 4.6566127342e-10
"""Just below 2^-31: 31 bits to a number in [0, 1), as Triton's `rand` does."""
_LEAST = 2.0**-24
_WORDS_A_COUNTER = 4
_CACHED_COUNTERS = 1 << 14
"""Counters that Philox works on at once: six buffers of them fit the cache of a core, which is three times as fast."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    """What each row was asked to sample with, all [R + 1]: temperature 0 is greedy, top-k 0 keeps every token."""

    seed: Tensor
    text_temperature: Tensor
    text_top_k: Tensor
    audio_temperature: Tensor
    audio_top_k: Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device) -> Self:
        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows + 1, dtype=dtype, device=device)

        return cls(
            seed=zeros(torch.int64),
            text_temperature=zeros(torch.float32),
            text_top_k=zeros(torch.int64),
            audio_temperature=zeros(torch.float32),
            audio_top_k=zeros(torch.int64),
        )

    def set_row(self, row: int, seed: int, sampling: SamplingConfig) -> None:
        """Let the row sample as its call asks; of the seed 32 bits count."""
        self.seed[row] = seed & _WORD
        self.text_temperature[row] = sampling.text_temperature
        self.text_top_k[row] = sampling.text_top_k
        self.audio_temperature[row] = sampling.audio_temperature
        self.audio_top_k[row] = sampling.audio_top_k


class Choice(Protocol):
    """How one token is chosen in each lane."""

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, V] -> token int64 [B], and the greatest logit [B] (not a number if any is not)."""
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """A draw without chance, the same in every lane: cheaper than a race whose noise is 0, and equal to it."""

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        token = logits.argmax(1)
        return token, logits.gather(1, token[:, None])[:, 0].float()


@dataclass(frozen=True, slots=True)
class Draw:
    """All that one draw of B lanes needs besides the logits of V tokens."""

    noise: Tensor
    """-log E, 0 in greedy lanes: [B, V]"""
    inverse_temperature: Tensor
    """1 in greedy lanes: [B, 1]"""
    rank: Tensor
    """Place of the last token that top-k keeps among the sorted ones, from 0: int64 [B, 1]"""
    slack: Tensor
    """-inf where top-k keeps every token, else 0: [B, 1]"""

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        best = logits.topk(min(MAX_TOP_K, logits.shape[1])).values
        threshold = best.gather(1, self.rank) + self.slack
        race = torch.addcmul(self.noise, logits, self.inverse_temperature)
        race.masked_fill_(logits < threshold, -math.inf)
        return race.argmax(1), best[:, 0]


@dataclass(frozen=True, slots=True)
class Shortlist:
    """A draw of many tokens among the `MAX_TOP_K` best, whose noise alone is made: of a text's 32 000 a hundredth.

    It takes what `Draw` takes, but where more tokens tie with the k-th best than there are places among the
    `MAX_TOP_K`, the others of them are left out.
    """

    seeds: Tensor
    """int64 [B]"""
    frames: Tensor
    """int64 [B]"""
    hot: Tensor
    """False in greedy lanes: [B, 1]"""
    inverse_temperature: Tensor
    rank: Tensor
    """As in `Draw`"""
    rest: Draw | None
    """For lanes that keep every token; None where there is none"""

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        best, tokens = logits.topk(MAX_TOP_K)
        noise = noise_of(tokens, self.seeds, self.frames, logits.shape[1]) * self.hot
        race = torch.addcmul(noise, best, self.inverse_temperature)
        race.masked_fill_(best < best.gather(1, self.rank), -math.inf)
        first = race >= race.amax(1, keepdim=True)
        token = torch.where(first, tokens, logits.shape[1] - 1).amin(1)  # of equals the first, as argmax does
        if self.rest is not None:
            token = torch.where(self.rest.slack[:, 0] < 0, self.rest.sample(logits)[0], token)
        return token, best[:, 0]


@dataclass(frozen=True, slots=True)
class KernelDraw:
    """`Draw` in one kernel, which makes its own noise."""

    number: int
    """0: the text; 1 + k: codebook k"""
    rows: Tensor
    frames: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        asked = (self.seed, self.temperature, self.top_k)
        return ops.sampler.sample(logits, self.rows, self.frames, *asked, self.number)


def draws(
    state: SamplerState, rows: Tensor, frames: Tensor, steps: int, config: LMConfig, every_token: bool = True
) -> tuple[Choice, Sequence[Choice]]:
    """The draws of a step: the text's, and `steps` codes'. `frames` int64 [B] are the columns that the lanes fill.

    `every_token`: any of the lanes may keep every token of the text.
    """
    if ops.usable(rows):
        lanes, of_audio = (rows, frames, state.seed), (state.audio_temperature, state.audio_top_k)
        of_text = KernelDraw(0, *lanes, state.text_temperature, state.text_top_k)
        return of_text, [KernelDraw(1 + step, *lanes, *of_audio) for step in range(steps)]
    seeds = state.seed.index_select(0, rows)
    text = _text_draw(state, rows, seeds, frames, config.text_card, every_token)
    audio_noise = race_noise(seeds, frames, 1, steps, config.card)
    temperature, top_k = state.audio_temperature.index_select(0, rows), state.audio_top_k.index_select(0, rows)
    first = _draw(audio_noise, temperature, top_k)
    audio = (Draw(noise, first.inverse_temperature, first.rank, first.slack) for noise in first.noise.unbind(1))
    return text, tuple(audio)


def _text_draw(
    state: SamplerState, rows: Tensor, seeds: Tensor, frames: Tensor, tokens: int, every_token: bool
) -> Draw | Shortlist:
    temperature, top_k = state.text_temperature.index_select(0, rows), state.text_top_k.index_select(0, rows)
    whole = None
    if every_token or tokens < SHORTLISTED:
        whole = _draw(race_noise(seeds, frames, 0, 1, tokens)[:, 0], temperature, top_k)
    if whole is not None and tokens < SHORTLISTED:
        return whole
    hot, inverse, rank, _ = _terms(temperature, top_k, tokens)
    return Shortlist(seeds, frames, hot, inverse, rank, whole)


def _draw(noise: Tensor, temperature: Tensor, top_k: Tensor) -> Draw:
    """noise [B, V] or [B, 8, V]"""
    hot, inverse, rank, slack = _terms(temperature, top_k, noise.shape[-1])
    return Draw(noise * hot.view(-1, *[1] * (noise.dim() - 1)), inverse, rank, slack)


def _terms(temperature: Tensor, top_k: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Temperature and top-k [B] of each lane -> whether it draws at all, and the last three of `Draw`: [B, 1]."""
    hot, kept = (temperature > 0)[:, None], top_k[:, None]
    inverse = torch.where(hot, temperature[:, None].reciprocal(), 1.0)
    return hot, inverse, kept.clamp(1, min(MAX_TOP_K, tokens)) - 1, torch.where(kept == 0, -math.inf, 0.0)


def race_noise(seeds: Tensor, frames: Tensor, first: int, count: int, tokens: int) -> Tensor:
    """-log E of every token in draws first .. first + count - 1: seeds and frames int64 [B] -> [B, count, tokens]."""
    which = torch.arange(first, first + count, device=seeds.device)
    low = (frames[:, None] * _DRAWS_A_FRAME + which).view(-1, 1)  # [B * count, 1]; Philox masks it
    high = seeds.repeat_interleave(count)[:, None]
    counter = torch.arange(-(-tokens // _WORDS_A_COUNTER), device=seeds.device)
    at_once = max(1, _CACHED_COUNTERS // len(counter)) if seeds.device.type == "cpu" else len(low)
    keys = zip(torch.split(low, at_once), torch.split(high, at_once), strict=True)
    noise = torch.cat([to_noise(torch.cat(philox(counter, *key), dim=1)) for key in keys])
    return noise.view(len(seeds), count, -1)[..., :tokens]


def noise_of(tokens: Tensor, seeds: Tensor, frames: Tensor, count: int) -> Tensor:
    """`race_noise` of draw 0, of these of `count` tokens alone: tokens int64 [B, n] -> [B, n]."""
    quarter = -(-count // _WORDS_A_COUNTER)
    words = philox(tokens % quarter, (frames * _DRAWS_A_FRAME)[:, None], seeds[:, None])
    return to_noise(torch.stack(words).gather(0, (tokens // quarter)[None])[0])


def to_noise(words: Tensor) -> Tensor:
    """Words of 32 random bits to -log E of exponential E, that is to Gumbel noise, f32."""
    bits = torch.minimum(words, _WORD - words)  # 31 bits: the signed word, folded at 0
    uniform = (bits.float() * _TO_UNIT).clamp_min_(_LEAST)
    return uniform.log_().neg_().log_().neg_()


def philox(counter: Tensor, key_low: Tensor, key_high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox-4x32-10 of the counter (counter, 0, 0, 0); 32-bit words in int64, shapes broadcast.

    J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. Products wrap in int64, and their bits are
    those of the unsigned ones. In place throughout: fresh memory for each of the 120 operations would cost twice.
    """
    c0 = counter + torch.zeros_like(key_low)
    c1, c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0), torch.zeros_like(c0)
    product0, product2 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(_ROUNDS):
        torch.mul(c0, _MULTIPLIERS[0], out=product0)
        torch.mul(c2, _MULTIPLIERS[1], out=product2)
        torch.bitwise_right_shift(product2, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(key_low).bitwise_and_(_WORD)
        torch.bitwise_right_shift(product0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(key_high).bitwise_and_(_WORD)
        torch.bitwise_and(product2, _WORD, out=c1)
        torch.bitwise_and(product0, _WORD, out=c3)
        key_low, key_high = (key_low + _KEY_STEPS[0]) & _WORD, (key_high + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def asked(prompt: Prompt, default: SamplingConfig) -> SamplingConfig:
    """How the call is to be sampled, defaults filled in. Raises RequestError for what cannot be."""
    return SamplingConfig(
        text_temperature=_temperature("text_temperature", prompt.text_temperature, default.text_temperature),
        text_top_k=_top_k("text_top_k", prompt.text_top_k, default.text_top_k),
        audio_temperature=_temperature("audio_temperature", prompt.audio_temperature, default.audio_temperature),
        audio_top_k=_top_k("audio_top_k", prompt.audio_top_k, default.audio_top_k),
    )


def _temperature(name: str, wanted: float | None, default: float) -> float:
    if wanted is None:
        return default
    if not 0.0 <= wanted <= MAX_TEMPERATURE:  # not a number is not in between either
        raise RequestError(f"{name} must be 0 (greedy) to {MAX_TEMPERATURE:g}, not {wanted}", param=name)
    return wanted


def _top_k(name: str, wanted: int | None, default: int) -> int:
    if wanted is None:
        return default
    if not 0 <= wanted <= MAX_TOP_K:
        raise RequestError(f"{name} must be 0 (every token) to {MAX_TOP_K}, not {wanted}", param=name)
    return wanted
