"""Stage: the codec from nothing, an autoencoder of callers' and agent's voices that later stages go on from.

Two traps, both met. With torch's initial convolutions the signal shrinks at each of 25 layers until the decoder says
nothing, for ever: so each layer is scaled to unit output on one batch first. And codebooks must not start at random:
they are found by k-means on latents of an autoencoder that has been warmed up without them.
"""

import math
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.train_tiny import codebooks, sound, whole
from scripts.train_tiny.codebooks import REST, book
from scripts.train_tiny.codes import CODEC_KEYS, FRAME
from scripts.train_tiny.decoder import MelLoss, rate
from scripts.train_tiny.store import Checkpoints, Weights
from scripts.train_tiny.voices import AGENT_VOICES, CallerPool, Sound, agent_sounds
from scripts.train_tiny.work import SEED, Work, progress

FILTERS, WIDTH, HIDDEN, LAYERS = 16, 128, 256, 2
BINS, CODE_WIDTH = 512, 32
FRAMES = 16
DECAY = 0.99


def new_codec(generator: torch.Generator) -> Weights:
    """Random weights under the names of the file."""
    w: Weights = {}

    def conv(name: str, outward: int, inward: int, kernel: int) -> None:
        w[f"{name}.weight"] = torch.randn(outward, inward, kernel, generator=generator) / math.sqrt(inward * kernel)
        w[f"{name}.bias"] = torch.zeros(outward)

    def residual(name: str, channels: int) -> None:
        conv(f"{name}.block.1.conv.conv", channels // 2, channels, 3)
        conv(f"{name}.block.3.conv.conv", channels, channels // 2, 1)

    conv("encoder.model.0.conv.conv", FILTERS, 1, 7)
    for stage, stride in enumerate(whole.STRIDES):
        channels, index = FILTERS << stage, 1 + 3 * stage
        residual(f"encoder.model.{index}", channels)
        conv(f"encoder.model.{index + 2}.conv.conv", 2 * channels, channels, 2 * stride)
    conv("encoder.model.14.conv.conv", WIDTH, FILTERS << 4, 3)
    conv("decoder.model.0.conv.conv", FILTERS << 4, WIDTH, 7)
    for stage, stride in enumerate(reversed(whole.STRIDES)):
        channels, index = FILTERS << (3 - stage), 2 + 3 * stage
        conv(f"decoder.model.{index}.convtr.convtr", channels, 2 * channels, 2 * stride)
        name = f"decoder.model.{index}.convtr.convtr.weight"
        w[name] = w[name].transpose(0, 1).contiguous()  # transposed convolutions are stored [in, out, kernel]
        residual(f"decoder.model.{index + 1}", channels)
    conv("decoder.model.14.conv.conv", 1, FILTERS, 3)
    for side in ("encoder_transformer", "decoder_transformer"):
        for layer in range(LAYERS):
            w |= _layer(f"{side}.transformer.layers.{layer}", generator)
    w["downsample.conv.conv.conv.weight"] = torch.randn(WIDTH, WIDTH, 4, generator=generator) / math.sqrt(4 * WIDTH)
    w["upsample.convtr.convtr.convtr.weight"] = torch.full((WIDTH, 1, 4), 0.5)
    for group, count in (("rvq_first", 1), ("rvq_rest", REST)):
        name = f"quantizer.{group}"
        w[f"{name}.input_proj.weight"] = torch.randn(CODE_WIDTH, WIDTH, 1, generator=generator) / math.sqrt(WIDTH)
        w[f"{name}.output_proj.weight"] = torch.randn(WIDTH, CODE_WIDTH, 1, generator=generator) / math.sqrt(CODE_WIDTH)
        for layer in range(count):
            w[f"{book(group, layer)}.embedding_sum"] = torch.randn(BINS, CODE_WIDTH, generator=generator)
            w[f"{book(group, layer)}.cluster_usage"] = torch.ones(BINS)
            w[f"{book(group, layer)}._initialized"] = torch.ones(1)
    return w


def _layer(name: str, generator: torch.Generator) -> Weights:
    w = {}
    for key, rows, columns in (
        ("self_attn.in_proj_weight", 3 * WIDTH, WIDTH),
        ("self_attn.out_proj.weight", WIDTH, WIDTH),
        ("linear1.weight", HIDDEN, WIDTH),
        ("linear2.weight", WIDTH, HIDDEN),
    ):
        w[f"{name}.{key}"] = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
    for n in (1, 2):
        w[f"{name}.norm{n}.weight"], w[f"{name}.norm{n}.bias"] = torch.ones(WIDTH), torch.zeros(WIDTH)
        w[f"{name}.layer_scale_{n}.scale"] = torch.full((WIDTH,), 0.1)
    return w


@torch.no_grad()
def even_out(w: Weights, pcm: Tensor) -> None:
    """Scale every convolution so that its output has unit deviation on this batch; the last one 0.05."""
    names = [name for name in w if name.endswith((".conv.weight", ".convtr.weight")) and "sample" not in name]
    for name in names:
        target = 0.05 if name.startswith("decoder.model.14") else 1.0
        w[name] *= target / (_output(w, pcm, name).std() + 1e-6)


def _output(w: Weights, pcm: Tensor, name: str) -> Tensor:
    """What the layer of this weight puts out when the codec runs without quantisation."""
    caught: list[Tensor] = []

    def catching(run: Callable[[Weights, str, Tensor, int], Tensor]) -> Callable[[Weights, str, Tensor, int], Tensor]:
        def call(w: Weights, layer: str, x: Tensor, stride: int) -> Tensor:
            y = run(w, layer, x, stride)
            if name == f"{layer}.weight":
                caught.append(y)
            return y

        return call

    with (
        patch.object(whole, "conv", catching(whole.conv)),
        patch.object(whole, "conv_transposed", catching(whole.conv_transposed)),
    ):
        _through(w, pcm, False)
    return caught[0]


def _through(w: Weights, pcm: Tensor, quantised: bool) -> tuple[Tensor, Tensor]:
    """The codec there and back, [B, 1, n] -> the same, and the commitment loss."""
    x = whole.latents(w, whole.seanet_encode(w, pcm), CODEC_KEYS)
    y, commit = torch.zeros_like(x), torch.zeros(())
    for group, layers in (("rvq_first", 1), ("rvq_rest", REST)):
        z = whole.project(w, group, x).float()
        if quantised:
            z, loss = codebooks.through(w, group, layers, z, DECAY)
            commit = commit + loss
        y = y + F.conv1d(z.transpose(1, 2), w[f"quantizer.{group}.output_proj.weight"])
    return whole.seanet_decode(w, whole.unlatents(w, y, CODEC_KEYS)), commit


class Snippets:
    """Windows of 1.3 s: half from the agent, clean; half from callers on lines of all kinds."""

    def __init__(self, work: Work) -> None:
        self._agent = [clip for voice in AGENT_VOICES for clip in agent_sounds(work, voice).values()]
        self._pool = CallerPool(work)
        self._callers = [index for index, clip in enumerate(self._pool.clips) if not clip.unseen]

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        return torch.from_numpy(np.stack([self._one(rng) for _ in range(count)]))[:, None]

    def _one(self, rng: np.random.Generator) -> Sound:
        samples = FRAMES * FRAME
        agent = rng.random() < 0.5
        clip = (
            self._agent[int(rng.integers(len(self._agent)))]
            if agent
            else self._pool.sound(int(rng.choice(self._callers)))
        )
        at = int(rng.integers(-samples // 3, max(1, len(clip) - samples // 2)))
        window = np.zeros(samples, np.float32)
        piece = clip[max(0, at) : max(0, at) + samples - max(0, -at)]
        window[max(0, -at) : max(0, -at) + len(piece)] = piece
        return window if agent else sound.line(window, rng) + sound.background(samples, rng)


def train(work: Work, steps: int = 2200, warm: int = 400, batch: int = 4) -> None:
    """Write `codec_base.pt`; resumable."""
    steps, warm, batch = work.scale(steps, 6), work.scale(warm, 2), work.scale(batch, 2)
    torch.manual_seed(SEED)
    snippets, mel = Snippets(work), MelLoss()
    raw = new_codec(torch.Generator().manual_seed(SEED))
    rng = np.random.default_rng(SEED)
    even_out(raw, snippets.draw(4, rng))
    learnt = {name: nn.Parameter(tensor) for name, tensor in raw.items() if "_codebook" not in name}
    w: dict[str, Tensor] = {**raw, **learnt}
    optimiser = torch.optim.AdamW(learnt.values(), 5e-4, betas=(0.8, 0.99), weight_decay=0.0)
    checkpoints = Checkpoints(work, "base")
    start = checkpoints.resume(w, {"optimiser": optimiser})
    rng = np.random.default_rng(SEED + start)
    for step in progress(range(start, steps), "base"):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps, 5e-4)
        if step == warm:
            _seed(w, snippets.draw(work.scale(100, 4), rng))
        pcm = snippets.draw(batch, rng)
        with torch.autocast("cpu", torch.bfloat16):
            y, commit = _through(w, pcm, step >= warm)
        spectral = mel(y[:, 0].float(), pcm[:, 0])
        loss = spectral + 0.1 * commit
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(learnt.values(), 1.0)
        optimiser.step()
        if step % 200 == 199:
            checkpoints.save(step + 1, w, {"optimiser": optimiser})
            work.note("base", step=step + 1, spectral=float(spectral.detach()))
    torch.save({name: tensor.detach() for name, tensor in w.items()}, work.path("codec_base.pt"))


@torch.no_grad()
def _seed(w: Weights, pcm: Tensor) -> None:
    x = whole.latents(w, whole.seanet_encode(w, pcm), CODEC_KEYS)
    for group, layers in (("rvq_first", 1), ("rvq_rest", REST)):
        codebooks.seed(w, group, layers, whole.project(w, group, x).flatten(0, 1))
