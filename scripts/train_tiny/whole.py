"""The model run over whole sequences, as functions of a checkpoint's own tensors, so that it can be trained.

The package runs one frame at a time, in place, without gradients. Here the same layers are written once more for a
whole dialogue at a time and for autograd, on a dict of the tensors under their names in the file: what is trained is
what is saved. `tests/test_train_tiny_whole.py` holds both equal. Shapes: B dialogues, T positions, D width.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

STRIDES = (4, 5, 6, 8)
HEADS = 4
MAX_PERIOD = 10_000.0


# ---- codec


def seanet_encode(w: Weights, pcm: Tensor) -> Tensor:
    """pcm [B, 1, 960 T] -> [B, D, T] at 25 Hz."""
    return seanet_finish(w, seanet_begin(w, pcm))


def seanet_begin(w: Weights, pcm: Tensor) -> Tensor:
    """pcm [B, 1, 960 T] -> [B, D / 2, 48 T], half way down at 1200 Hz."""
    return _down(w, conv(w, "encoder.model.0.conv.conv", pcm, 1), range(2))


def seanet_finish(w: Weights, x: Tensor) -> Tensor:
    """From half way down to [B, D, T] at 25 Hz."""
    return conv(w, "encoder.model.14.conv.conv", F.elu(_down(w, x, range(2, 4))), 1)


def _down(w: Weights, x: Tensor, stages: Iterable[int]) -> Tensor:
    for stage in stages:
        index = 1 + 3 * stage
        x = _residual(w, f"encoder.model.{index}", x)
        x = conv(w, f"encoder.model.{index + 2}.conv.conv", F.elu(x), STRIDES[stage])
    return x


def seanet_decode(w: Weights, x: Tensor) -> Tensor:
    """x [B, D, T] at 25 Hz -> pcm [B, 1, 960 T]."""
    x = conv(w, "decoder.model.0.conv.conv", x, 1)
    for stage, stride in enumerate(reversed(STRIDES)):
        index = 2 + 3 * stage
        x = conv_transposed(w, f"decoder.model.{index}.convtr.convtr", F.elu(x), stride)
        x = _residual(w, f"decoder.model.{index + 1}", x)
    return conv(w, "decoder.model.14.conv.conv", F.elu(x), 1)


def latents(w: Weights, features: Tensor, keys: int) -> Tensor:
    """SEANet's features [B, D, 2 T] -> what is quantised, [B, D, T] at 12.5 Hz."""
    x = codec_transformer(w, "encoder_transformer", features.transpose(1, 2), keys).transpose(1, 2)
    first = x[..., :1].expand(-1, -1, 2)
    return F.conv1d(torch.cat([first, x], 2), w["downsample.conv.conv.conv.weight"], stride=2)


def unlatents(w: Weights, x: Tensor, keys: int) -> Tensor:
    """Quantised latents [B, D, T] at 12.5 Hz -> what SEANet decodes, [B, D, 2 T]."""
    weight = w["upsample.convtr.convtr.convtr.weight"]
    x = F.conv_transpose1d(x, weight, stride=2, groups=weight.shape[0])[..., : 2 * x.shape[2]]
    return codec_transformer(w, "decoder_transformer", x.transpose(1, 2), keys).transpose(1, 2)


def codec_transformer(w: Weights, name: str, x: Tensor, keys: int) -> Tensor:
    """x [B, T, D]; of each pair of positions, which stream together, the first sees a key less."""
    positions = torch.arange(x.shape[1], device=x.device)
    distance = positions[:, None] - positions[None]
    mask = (distance >= 0) & (distance < keys - 1 + (positions % 2)[:, None])
    attend = partial(F.scaled_dot_product_attention, attn_mask=mask)
    layer = 0
    while f"{name}.transformer.layers.{layer}.norm1.weight" in w:
        x = _codec_layer(w, f"{name}.transformer.layers.{layer}", x, attend)
        layer += 1
    return x


def _codec_layer(w: Weights, name: str, x: Tensor, attend: Attend) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:], w[f"{name}.norm1.weight"], w[f"{name}.norm1.bias"], 1e-5)
    x = x + w[f"{name}.layer_scale_1.scale"] * attention(w, f"{name}.self_attn", normed, HEADS, attend)
    normed = F.layer_norm(x, x.shape[-1:], w[f"{name}.norm2.weight"], w[f"{name}.norm2.bias"], 1e-5)
    hidden = F.gelu(F.linear(normed, w[f"{name}.linear1.weight"]))
    return x + w[f"{name}.layer_scale_2.scale"] * F.linear(hidden, w[f"{name}.linear2.weight"])


def conv(w: Weights, name: str, x: Tensor, stride: int) -> Tensor:
    """The convolution `name`, causal."""
    weight = w[f"{name}.weight"]
    if stride > 1:
        return _strided(x, weight, w[f"{name}.bias"], stride)
    return F.conv1d(F.pad(x, (weight.shape[2] - 1, 0)), weight, w[f"{name}.bias"])


def _strided(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """A convolution whose kernel is two strides long, as one product over each block and the one before it.

    PyTorch's own is wrong in bfloat16 for some shapes (2.13.0, AMX: 16 to 32 channels, kernel 8, stride 4).
    """
    batch, channels, length = x.shape
    blocks = x.view(batch, channels, length // stride, stride).transpose(1, 2)  # [B, T, C, stride]
    both = torch.cat([F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1], blocks], 3)
    return F.linear(both.flatten(2), weight.flatten(1), bias).transpose(1, 2)


def conv_transposed(w: Weights, name: str, x: Tensor, stride: int) -> Tensor:
    """The transposed convolution `name`, causal."""
    y = F.conv_transpose1d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride)
    return y[..., : stride * x.shape[2]]


def _residual(w: Weights, name: str, x: Tensor) -> Tensor:
    y = conv(w, f"{name}.block.1.conv.conv", F.elu(x), 1)
    return x + conv(w, f"{name}.block.3.conv.conv", F.elu(y), 1)


# ---- quantiser


def centroids(w: Weights, group: str, layer: int) -> Tensor:
    """Table of codebook `layer` of `rvq_first` or `rvq_rest`, [bins, width]."""
    name = f"quantizer.{group}.vq.layers.{layer}._codebook"
    return w[f"{name}.embedding_sum"] / w[f"{name}.cluster_usage"].clamp(min=1e-5)[:, None]


def nearest(table: Tensor, x: Tensor) -> Tensor:
    """Index of the centroid nearest to each x [..., width]."""
    return ((table**2).sum(1) - 2 * x @ table.T).argmin(-1)


def project(w: Weights, group: str, x: Tensor) -> Tensor:
    """Latents [B, D, T] into the codebooks' space, [B, T, width]."""
    return F.conv1d(x, w[f"quantizer.{group}.input_proj.weight"]).transpose(1, 2)


def quantise(w: Weights, x: Tensor, codebooks: int = 8) -> Tensor:
    """Latents [B, D, T] -> codes int64 [B, 8, T]."""
    codes = [nearest(centroids(w, "rvq_first", 0), project(w, "rvq_first", x))]
    residual = project(w, "rvq_rest", x)
    for layer in range(codebooks - 1):
        table = centroids(w, "rvq_rest", layer)
        codes.append(nearest(table, residual))
        residual = residual - table[codes[-1]]
    return torch.stack(codes, 1)


def dequantise(w: Weights, codes: Tensor) -> Tensor:
    """codes int64 [B, 8, T] -> latents [B, D, T]."""
    first = centroids(w, "rvq_first", 0)[codes[:, 0]]
    layers = range(codes.shape[1] - 1)
    rest = torch.stack([centroids(w, "rvq_rest", layer)[codes[:, layer + 1]] for layer in layers]).sum(0)
    return unproject(w, first, rest)


def unproject(w: Weights, first: Tensor, rest: Tensor) -> Tensor:
    """What both groups' codebooks found, [B, T, width] each -> latents [B, D, T]."""
    return F.conv1d(first.transpose(1, 2), w["quantizer.rvq_first.output_proj.weight"]) + F.conv1d(
        rest.transpose(1, 2), w["quantizer.rvq_rest.output_proj.weight"]
    )


@torch.no_grad()
def encode(w: Weights, pcm: Tensor, keys: int, hasty: bool = False) -> Tensor:
    """pcm [B, 1, 1920 T] -> codes int64 [B, 8, T]; `hasty`: SEANet in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16, enabled=hasty):
        features = seanet_encode(w, pcm)
    return quantise(w, latents(w, features.float(), keys))


def decode(w: Weights, codes: Tensor, keys: int) -> Tensor:
    """codes int64 [B, 8, T] -> pcm [B, 1, 1920 T]."""
    return seanet_decode(w, unlatents(w, dequantise(w, codes), keys))


# ---- language model


def temporal(w: Weights, columns: Tensor, heads: int, keys: int) -> Tensor:
    """Columns int64 [B, T, 17] -> out_norm's output [B, T, D], which both heads read; a token of -1 counts nothing."""
    tables = [w["text_emb.weight"], *(w[f"emb.{row}.weight"] for row in range(16))]
    nothing = torch.zeros(1, tables[0].shape[1])
    starts = torch.tensor([0, *(len(table) for table in tables)]).cumsum(0)
    index = torch.where(columns < 0, starts[-1], columns + starts[:-1]).view(-1, 17)
    x = F.embedding_bag(index, torch.cat([*tables, nothing]), mode="sum").view(*columns.shape[:2], -1)
    attend = partial(in_window, keys=keys)
    layer = 0
    while f"transformer.layers.{layer}.norm1.alpha" in w:
        name = f"transformer.layers.{layer}"
        x = x + attention(w, f"{name}.self_attn", rms_norm(x, w[f"{name}.norm1.alpha"]), heads, attend)
        hidden = F.linear(rms_norm(x, w[f"{name}.norm2.alpha"]), w[f"{name}.gating.linear_in.weight"])
        gate, value = hidden.chunk(2, -1)
        x = x + F.linear(F.silu(gate) * value, w[f"{name}.gating.linear_out.weight"])
        layer += 1
    return rms_norm(x, w["out_norm.alpha"])


def depformer(w: Weights, h: Tensor, text: Tensor, codes: Tensor, heads: int) -> Tensor:
    """h [N, D], the text token int64 [N] and the codes int64 [N, 8] of the column foretold -> logits [N, 8, card]."""
    steps = codes.shape[1]
    inputs = [F.embedding(text, w["depformer_text_emb.weight"])]
    inputs += [F.embedding(codes[:, step], w[f"depformer_emb.{step}.weight"]) for step in range(steps - 1)]
    projected = torch.bmm(
        h.expand(steps, *h.shape),
        torch.stack([w[f"depformer_in.{step}.weight"] for step in range(steps)]).transpose(1, 2),
    )
    x = torch.stack(inputs) + projected  # [S, N, d]
    layer = 0
    while f"depformer.layers.{layer}.norm1.alpha" in w:
        x = _depformer_layer(w, f"depformer.layers.{layer}", x, heads)
        layer += 1
    heads_out = torch.stack([w[f"linears.{step}.weight"] for step in range(steps)])
    return torch.bmm(x, heads_out.transpose(1, 2)).transpose(0, 1)


def _depformer_layer(w: Weights, name: str, x: Tensor, heads: int) -> Tensor:
    steps, count, width = x.shape
    qkv = _per_step(w[f"{name}.self_attn.in_proj_weight"], steps, rms_norm(x, w[f"{name}.norm1.alpha"]))
    q, k, v = qkv.view(steps, count, 3, heads, width // heads).permute(2, 1, 3, 0, 4)  # [N, H, S, d]
    with torch.autocast("cpu", enabled=False):
        mixed = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    mixed = mixed.permute(2, 0, 1, 3).reshape(steps, count, width)
    x = x + _per_step(w[f"{name}.self_attn.out_proj.weight"], steps, mixed)
    gating = [f"{name}.gating.{step}" for step in range(steps)]
    hidden = torch.bmm(
        rms_norm(x, w[f"{name}.norm2.alpha"]),
        torch.stack([w[f"{key}.linear_in.weight"] for key in gating]).transpose(1, 2),
    )
    gate, value = hidden.chunk(2, -1)
    out = torch.stack([w[f"{key}.linear_out.weight"] for key in gating])
    return x + torch.bmm(F.silu(gate) * value, out.transpose(1, 2))


def _per_step(weight: Tensor, steps: int, x: Tensor) -> Tensor:
    """x [S, N, d] through the weight [steps in file * out, d] whose rows are stacked by step."""
    rows = weight.view(-1, weight.shape[0] // steps, weight.shape[1])[:steps]
    return torch.bmm(x, rows.transpose(1, 2))


# ---- shared


def rms_norm(x: Tensor, alpha: Tensor) -> Tensor:
    """In float32, as the family's."""
    x32 = x.float()
    return x32 * (alpha.flatten() * torch.rsqrt(1e-8 + x32.pow(2).mean(-1, keepdim=True)))


def attention(w: Weights, name: str, x: Tensor, heads: int, attend: Attend) -> Tensor:
    """Self-attention with interleaved rotary positions 0..T-1; x [B, T, D]."""
    batch, length, width = x.shape
    qkv = F.linear(x, w[f"{name}.in_proj_weight"]).view(batch, length, 3, heads, width // heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    with torch.autocast("cpu", enabled=False):  # in bfloat16 PyTorch's fused attention is twice as slow on a CPU
        mixed = attend(rotate(q.float()), rotate(k.float()), v.float())
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, width), w[f"{name}.out_proj.weight"])


def in_window(q: Tensor, k: Tensor, v: Tensor, keys: int) -> Tensor:
    """Each position sees itself and the `keys` - 1 before; done in blocks, so that what nobody sees costs nothing."""
    blocks = []
    for start in range(0, q.shape[2], keys):
        end = min(start + keys, q.shape[2])
        first = max(0, start - keys + 1)
        distance = torch.arange(start, end)[:, None] - torch.arange(first, end)
        mask = (distance >= 0) & (distance < keys) if start else None
        blocks.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], attn_mask=mask, is_causal=not start
            )
        )
    return torch.cat(blocks, 2)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on x [..., T, d], float32: adjacent elements are a complex number, turned."""
    length, width = x.shape[-2:]
    frequency = torch.exp(torch.arange(width // 2, device=x.device) * (-2 * math.log(MAX_PERIOD) / width))
    angle = torch.arange(length, device=x.device)[:, None] * frequency
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)
