"""Stage: the decoder learns the agent's voices from frozen codes.

The loss is on mel spectra of four resolutions. A loss on the waveform would pull amplitudes to zero, since phases
cannot be matched at this size. Silence must be silent, also right after a sentence that was broken off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from scripts.train_tiny import whole
from scripts.train_tiny.codes import CODEC_KEYS, FRAME, Tables, load_tables
from scripts.train_tiny.dialogue import FRESH, USUAL
from scripts.train_tiny.sentences import agent_sentences
from scripts.train_tiny.store import Checkpoints, Weights, load_codec
from scripts.train_tiny.voices import AGENT_VOICES, RATE, Sound, agent_sounds
from scripts.train_tiny.work import SEED, Work, progress

LEARNT = ("decoder", "upsample", "quantizer.rvq_first.output_proj", "quantizer.rvq_rest.output_proj")
RESOLUTIONS = ((256, 32), (512, 48), (1024, 80), (2048, 96))
"""Window of the spectrum, and mel bands."""
AVERAGE = 0.999
FADE = RATE // 50
WINDOW, WARM_UP = 24, 4
"""Frames of a training window, and how many at its start only fill the decoder's memory."""


class MelLoss(nn.Module):
    """Distance of mel spectra: their logarithms, and twice their amplitudes."""

    def __init__(self) -> None:
        super().__init__()
        for window, bands in RESOLUTIONS:
            self.register_buffer(f"bands_{window}", mel_bands(window, bands))
            self.register_buffer(f"window_{window}", torch.hann_window(window))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        total = y.new_zeros(())
        for window, _ in RESOLUTIONS:
            a, b = self._mel(y, window), self._mel(target, window)
            log = (a.clamp(min=1e-4).log10() - b.clamp(min=1e-4).log10()).abs().mean()
            total = total + log + 2 * (a - b).abs().mean()
        return total / len(RESOLUTIONS)

    def _mel(self, x: Tensor, window: int) -> Tensor:
        shape = self.get_buffer(f"window_{window}")
        spectrum = torch.stft(x, window, window // 4, window, shape, return_complex=True).abs()
        return self.get_buffer(f"bands_{window}") @ (spectrum / shape.sum() * 8)


def mel_bands(window: int, bands: int) -> Tensor:
    """Triangular filters [bands, window // 2 + 1], equally spaced in mel from 0 to 12 kHz."""
    hertz = torch.linspace(0, RATE / 2, window // 2 + 1)
    mels = 2595 * torch.log10(1 + hertz / 700)
    centres = torch.linspace(0, float(mels[-1]), bands + 2)
    width = centres[1] - centres[0]
    filters = (1 - (mels[None] - centres[1:-1, None]).abs() / width).clamp(min=0)
    return filters / filters.sum(1, keepdim=True).clamp(min=1.0)


@dataclass(frozen=True, slots=True)
class Passage:
    """Codes [n, 8] and the sound [n * 1920] they stand for."""

    codes: np.ndarray
    sound: Sound


class Passages:
    """Sentences between silences, whole or broken off, as the model will utter them."""

    def __init__(self, work: Work, tables: Tables) -> None:
        self._tables = tables
        self._sounds = {voice: agent_sounds(work, voice) for voice in AGENT_VOICES}
        self._all = [(voice, sentence.text) for voice in AGENT_VOICES for sentence in agent_sentences()]

    def draw(self, rng: np.random.Generator) -> Passage:
        """A window of `WINDOW` frames of a sentence, whole or broken off, between silences."""
        voice, text = self._all[int(rng.integers(len(self._all)))]
        codes, sound = self._tables.sentences[voice][text], self._sounds[voice][text]
        sound = np.pad(sound, (0, len(codes) * FRAME - len(sound)))
        if rng.random() < 0.2:
            codes, sound = self._broken_off(codes, sound, int(rng.integers(1, len(codes))))
        number = AGENT_VOICES.index(voice)
        before = self._tables.silence[number, int(rng.integers(3)) if rng.random() < 0.7 else FRESH]
        after = self._tables.silence[number, USUAL]
        codes = np.concatenate([np.tile(before, (WARM_UP + 2, 1)), codes, np.tile(after, (WINDOW, 1))])
        sound = np.pad(sound, ((WARM_UP + 2) * FRAME, WINDOW * FRAME))
        start = int(rng.integers(0, max(1, len(codes) - 2 * WINDOW + 8)))
        return Passage(codes[start : start + WINDOW], sound[start * FRAME : (start + WINDOW) * FRAME])

    def _broken_off(self, codes: np.ndarray, sound: Sound, frames: int) -> tuple[np.ndarray, Sound]:
        cut = sound[: frames * FRAME].copy()
        cut[-FADE:] *= np.linspace(1, 0, FADE, dtype=np.float32)
        return codes[:frames], cut

    def silence(self) -> Passage:
        """All silences one after another."""
        every = self._tables.silence.reshape(-1, 8)
        return Passage(np.repeat(every, -(-WINDOW // len(every)), 0)[:WINDOW], np.zeros(WINDOW * FRAME, np.float32))


def together(passages: Sequence[Passage]) -> tuple[Tensor, Tensor]:
    """Codes [B, 8, n] and sound [B, n * 1920]."""
    codes = np.stack([passage.codes for passage in passages])
    sounds = np.stack([passage.sound for passage in passages]).astype(np.float32)
    return torch.from_numpy(codes).transpose(1, 2), torch.from_numpy(sounds)


def quiet_loss(y: Tensor, target: Tensor) -> Tensor:
    """Mean amplitude where the target is silent."""
    silent = target == 0
    return (y.abs() * silent).sum() / silent.sum().clamp(min=1)


def train(work: Work, steps: int = 12_000, batch: int = 2, peak: float = 6e-4) -> None:
    """Train; `codec.pt` (averaged weights, decoder rounded to bf16) is written every 250 steps. Resumable."""
    steps, batch = work.scale(steps, 6), work.scale(batch, 1)
    codec = load_codec(work)
    learnt = {name: nn.Parameter(tensor.clone()) for name, tensor in codec.items() if name.startswith(LEARNT)}
    averaged = {name: tensor.detach().clone() for name, tensor in learnt.items()}
    passages, mel = Passages(work, load_tables(work)), MelLoss()
    optimiser = torch.optim.AdamW(learnt.values(), peak, betas=(0.8, 0.99), weight_decay=0.0, fused=True)
    checkpoints = Checkpoints(work, "decoder")
    both = learnt | {f"averaged.{name}": tensor for name, tensor in averaged.items()}
    start = checkpoints.resume(both, {"optimiser": optimiser})
    rng = np.random.default_rng(SEED + 4 + start)
    running = 0.0
    for step in progress(range(start, steps), "decoder"):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps, peak)
        chosen = [passages.draw(rng) for _ in range(batch)]
        if step % 8 == 0:
            chosen[0] = passages.silence()
        codes, sound = together(chosen)
        with torch.autocast("cpu", torch.bfloat16):
            y = whole.decode({**codec, **learnt}, codes, CODEC_KEYS)
        y, sound = y[:, 0, WARM_UP * FRAME :].float(), sound[:, WARM_UP * FRAME :]
        spectral = mel(y, sound)
        loss = spectral + 5 * quiet_loss(y, sound)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(learnt.values(), 1.0)
        optimiser.step()
        blend(averaged, learnt, min(AVERAGE, (step + 1) / (step + 10)))
        running = float(spectral.detach()) if step == start else 0.98 * running + 0.02 * float(spectral.detach())
        if step % 250 == 249 or step == steps - 1:
            checkpoints.save(step + 1, both, {"optimiser": optimiser})
            torch.save(round_decoder({**codec, **averaged}), work.path("codec.pt"))
            work.note("decoder", step=step + 1, spectral=running)
            print(f"decoder {step + 1}: spectral {running:.4f}", flush=True)
    work.path("decoder.done").touch()


def rate(step: int, steps: int, peak: float) -> float:
    """Cosine from the peak to a thirtieth of it."""
    return peak * (1 / 30 + 29 / 30 * 0.5 * (1 + float(np.cos(np.pi * min(1.0, step / steps)))))


@torch.no_grad()
def blend(averaged: Weights, learnt: dict[str, nn.Parameter], keep: float) -> None:
    for name, tensor in averaged.items():
        tensor.lerp_(learnt[name], 1 - keep)


def round_decoder(weights: Weights) -> Weights:
    """The decoder's weights in bfloat16, as they are shipped."""
    return {name: tensor.bfloat16() if name.startswith(LEARNT) else tensor for name, tensor in weights.items()}
