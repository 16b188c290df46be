"""Mimi, the codec: 80 ms of sound to 8 codes and back, one frame at a time for the rows listed.

    pcm [B, 1920] -> SEANet -> [B, 2, D] -> transformer -> downsample -> latent [B, D] -> quantizer -> codes [B, 8]
    codes [B, 8] -> quantizer -> latent [B, D] -> upsample -> [B, 2, D] -> transformer -> SEANet -> pcm [B, 1920]

Everything is channels-last, [B, T, C]. Then each convolution, transposed ones too, is one matrix product: output t
reads K * C numbers that lie together in a padded buffer, from t * S * C on. What a convolution remembers is the first
columns of that buffer; all of a row's lie in one vector, in the order in which the convolutions run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from webrtc_duplex.audio import FRAME_SAMPLES
from webrtc_duplex.model.config import CODEBOOKS, MimiConfig
from webrtc_duplex.model.kernels import ops
from webrtc_duplex.model.streaming import NO_HINTS, Hints, Ring, Rings, Window, open_window, rope_frequencies
from webrtc_duplex.model.weights import (
    Piece,
    Stack,
    add_product,
    matrix,
    one,
    product,
    rows_of,
    scalar,
    turned_matrix,
    under,
    vector,
)

LATENTS = 2
"""Positions of the codec's transformers in a frame: 25 Hz."""

DOWNSAMPLE_KERNEL = 2 * LATENTS

NORM_EPSILON = 1e-5

LONG = 64
"""Outputs from which on a convolution is summed by taps: laying windows out costs more than one large product saves."""

LARGE = 1_500_000
"""Numbers in a convolution's weight from which on it is laid in blocks; none of these has `LONG` outputs."""

LONG_STAGES = 2
"""Stages at the sound's end of SEANet that run for a few lanes at a time on the CPU."""

SHORTER = 2
"""Times as many lanes at a time run the shorter one of them: it has half the numbers a lane, and larger weights."""

CACHED = 1 << 17
"""Numbers of a layer that fit a core's own cache of 2 MB with what is made of them: a lane of the released codec."""

_USAGE_FLOOR = 1e-5
"""A centroid is its sum over its usage; an unused one's sum is divided by this (moshi `EuclideanCodebook`)."""


@dataclass(frozen=True, slots=True)
class CodecState:
    """What one direction of the codec remembers.

    | field    | shape         | dtype | meaning                                             |
    |----------|---------------|-------|-----------------------------------------------------|
    | taps     | [R + 1, n]    | f32   | last inputs of every convolution, one after another |
    | rings    | Rings         | f32   | of its transformer                                  |
    | position | [R + 1]       | int64 | positions of the transformer so far, 2 a frame      |
    """

    taps: Tensor
    rings: Rings
    position: Tensor

    @classmethod
    def allocate(cls, config: MimiConfig, taps: int, rows: int, device: torch.device) -> Self:
        shape = (config.layers, rows, config.heads, config.keys, config.head_width)
        return cls(
            taps=torch.zeros(rows + 1, taps, device=device),
            rings=Rings.allocate(*shape, device, torch.float32),
            position=torch.zeros(rows + 1, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class MimiState:
    """Both directions of all rows; they advance apart (a voice prompt is only heard, a first answer only said)."""

    encoder: CodecState
    decoder: CodecState


class Taps:
    """The remembered columns of one step's lanes, handed to the convolutions in the order in which they run."""

    def __init__(self, lanes: Tensor, used: int = 0) -> None:
        self._lanes = lanes  # [B, n]
        self._used = used

    @classmethod
    def of_rows(cls, state: CodecState, rows: Tensor) -> Self:
        return cls(state.taps.index_select(0, rows))

    def store(self, state: CodecState, rows: Tensor) -> None:
        """Write what the lanes remember back to their rows."""
        state.taps.index_copy_(0, rows, self._lanes)

    def by_groups(self, x: Tensor, size: int, served: int | None, run: Callable[[Tensor, "Taps"], Tensor]) -> Tensor:
        """run(x, taps), on the CPU for `size` lanes at a time, so that long layers' activations stay in its cache.

        There groups of lanes that serve no row (those from `served` on) are left out, and their result is 0: each
        lane's products are its own here, so that the others' bits do not depend on them.
        """
        size = min(size, len(x)) if x.device.type == "cpu" else len(x)
        lanes = slice(None if served is None else -(-max(served, 1) // size) * size)
        groups = [Taps(part, self._used) for part in torch.split(self._lanes[lanes], size)]
        parts = [run(part, group) for part, group in zip(torch.split(x[lanes], size), groups, strict=True)]
        self._used = groups[0]._used
        padding = len(x) - sum(map(len, parts))
        if padding:
            parts.append(parts[0].new_zeros(padding, *parts[0].shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pad(self, x: Tensor, columns: int, activate: bool = True) -> Tensor:
        """x [B, T, C], through ELU or not, after the columns remembered of it: [B, columns + T, C]; its end is kept."""
        lanes, length, channels = x.shape
        remembered = self._take(columns, channels)
        if ops.usable(x):
            return ops.convolution.pad(x, remembered, activate)
        padded = x.new_empty(lanes, columns + length, channels)
        padded[:, :columns] = remembered
        if activate:
            elu(x, out=padded[:, columns:])
        else:
            padded[:, columns:] = x
        remembered.copy_(padded[:, length:])
        return padded

    def pad_first(self, x: Tensor, columns: int, fresh: Tensor) -> Tensor:
        """As `pad` without ELU; where `fresh` [B] the remembered columns are the first of x, repeated."""
        remembered = self._take(columns, x.shape[2])
        start = torch.where(fresh[:, None, None], x[:, :1], remembered)
        padded = torch.cat([start, x], dim=1)
        remembered.copy_(padded[:, x.shape[1] :])
        return padded

    def _take(self, columns: int, channels: int) -> Tensor:
        start = self._used
        self._used += columns * channels
        return self._lanes[:, start : self._used].view(len(self._lanes), columns, channels)


def cached_lanes(channels: int) -> int:
    """How many lanes' frames of so many channels a core's cache holds: a power of two."""
    return 1 << max(0, (CACHED // (FRAME_SAMPLES * channels)).bit_length() - 1)


def elu(x: Tensor, out: Tensor) -> None:
    """ELU as min(e^x - 1, max(x, 0)); `out` may be x. Not expm1, which costs seven times exp on the CPU: near 0 the
    difference is below 1e-7."""
    below = torch.exp(x, out=None if out is x else out).sub_(1.0)
    torch.clamp(x, min=scalar(0.0, x.device), max=below, out=out)


def conv_matrix(rows: int, columns: int, device: torch.device) -> nn.Parameter:
    """A convolution's weight: in blocks where reading it costs more than multiplying, at SEANet's narrow end."""
    if rows * columns >= LARGE:
        return matrix(rows, columns, device=device, dtype=torch.float32)
    return turned_matrix(rows, columns, device, torch.float32)


def taps_of(weight: Tensor, inputs: int) -> list[Tensor]:
    """A weight [out, in] by blocks of so many inputs, as views: [1, inputs, out] each; none of what lies in blocks."""
    return list(torch.split(weight.mT[None], inputs, dim=1)) if weight.dim() == 2 else []


def taps_product(padded: Tensor, taps: list[Tensor], bias: Tensor, stride: int, count: int) -> Tensor:
    """The convolution as a sum over its K / S blocks of S columns, with no windows laid out: [B, count, C']."""
    lanes = len(padded)
    columns = padded.view(lanes, -1, stride * padded.shape[2])
    product = torch.baddbmm(bias, columns[:, :count], each(taps[0], lanes))
    for tap in range(1, len(taps)):
        product.baddbmm_(columns[:, tap : tap + count], each(taps[tap], lanes))
    return product


def each(weight: Tensor, lanes: int) -> Tensor:
    """The same weight [1, in, out] for every lane."""
    return weight if lanes == 1 else weight.expand(lanes, -1, -1)


def windows(padded: Tensor, kernel: int, stride: int, count: int) -> Tensor:
    """Overlapping windows of padded [B, n, C] as rows of a matrix: [B * count, kernel * C]."""
    lanes, length, channels = padded.shape
    strides = (length * channels, stride * channels, 1)
    return padded.as_strided((lanes, count, kernel * channels), strides).reshape(lanes * count, kernel * channels)


class CausalConv(nn.Module):
    """A convolution that sees no later input; the first K - S columns of its padded input are the past."""

    def __init__(self, narrow: int, wide: int, kernel: int, stride: int, device: torch.device) -> None:
        super().__init__()
        self.narrow, self.wide, self.kernel, self.stride = narrow, wide, kernel, stride
        self.past = kernel - stride
        self.weight = conv_matrix(wide, kernel * narrow, device)
        self.bias = vector(wide, device=device, dtype=torch.float32)
        self._by_taps = taps_of(self.weight, stride * narrow)

    @property
    def taps(self) -> int:
        return self.past * self.narrow

    def run(self, padded: Tensor) -> Tensor:
        """padded [B, K - S + T, C] -> [B, T / S, C']"""
        count = (padded.shape[1] - self.past) // self.stride
        if ops.usable(padded):
            return ops.convolution.product(padded, self.weight, self.bias, self.stride, count)
        if count >= LONG and self._by_taps and self.narrow > 1:
            return taps_product(padded, self._by_taps, self.bias, self.stride, count)
        made = product(windows(padded, self.kernel, self.stride, count), self.weight, self.bias)
        return made.view(padded.shape[0], count, self.wide)

    def pieces(self, key: str) -> list[Piece]:
        shape = (self.wide, self.narrow, self.kernel)
        return [
            one("weight", f"{key}.conv.conv.weight", shape, lambda w: w.transpose(1, 2).flatten(1)),
            one("bias", f"{key}.conv.conv.bias", (self.wide,)),
        ]


class CausalUpConv(nn.Module):
    """A transposed convolution with K = 2 S: S outputs from each pair of neighbouring inputs, the past one first."""

    past = 1

    def __init__(self, narrow: int, wide: int, stride: int, device: torch.device) -> None:
        super().__init__()
        self.narrow, self.wide, self.stride = narrow, wide, stride
        self.weight = conv_matrix(stride * wide, 2 * narrow, device)
        self.bias = vector(stride * wide, device=device, dtype=torch.float32)
        self._by_taps = taps_of(self.weight, narrow)

    @property
    def taps(self) -> int:
        return self.narrow

    def run(self, padded: Tensor) -> Tensor:
        """padded [B, 1 + T, C] -> [B, T * S, C']"""
        count = padded.shape[1] - 1
        if ops.usable(padded):
            made = ops.convolution.product(padded, self.weight, self.bias, 1, count)
            return made.view(len(padded), -1, self.wide)
        if count >= LONG and self._by_taps:
            return taps_product(padded, self._by_taps, self.bias, 1, count).view(len(padded), -1, self.wide)
        made = product(windows(padded, 2, 1, count), self.weight, self.bias)
        return made.view(padded.shape[0], count * self.stride, self.wide)

    def pieces(self, key: str) -> list[Piece]:
        shape = (self.narrow, self.wide, 2 * self.stride)
        return [
            one("weight", f"{key}.convtr.convtr.weight", shape, self._by_output),
            one("bias", f"{key}.convtr.convtr.bias", (self.wide,), lambda bias: bias.repeat(self.stride)),
        ]

    def _by_output(self, weight: Tensor) -> Tensor:
        """[in, out, (now | past) * S] -> [S * out, (past | now) * in]"""
        now, past = weight.view(self.narrow, self.wide, 2, self.stride).unbind(2)  # [in, out, S]
        return torch.stack([past, now]).permute(3, 2, 0, 1).flatten(2).flatten(0, 1)


class ResidualBlock(nn.Module):
    """x + conv1(ELU(conv3(ELU(x))))"""

    def __init__(self, channels: int, config: MimiConfig, device: torch.device) -> None:
        super().__init__()
        hidden = channels // config.compress
        self.narrow = CausalConv(channels, hidden, config.residual_kernel, 1, device)
        self.widen = CausalConv(hidden, channels, 1, 1, device)
        (self._widen,) = taps_of(self.widen.weight, hidden)

    def run(self, x: Tensor, taps: Taps) -> Tensor:
        padded = taps.pad(x, self.narrow.past)
        if ops.usable(x):
            return self._fused(x, padded)
        hidden = self.narrow.run(padded)
        elu(hidden, out=hidden)
        return x.add_(self.widen.bias).baddbmm_(hidden, each(self._widen, len(x)))

    def _fused(self, x: Tensor, padded: Tensor) -> Tensor:
        narrow, widen, count = self.narrow, self.widen, x.shape[1]
        hidden = ops.convolution.product(padded, narrow.weight, narrow.bias, 1, count, activate=True)
        return ops.convolution.product(hidden, widen.weight, widen.bias, 1, count, residual=x)

    def pieces(self, key: str) -> list[Piece]:
        return under("narrow", self.narrow.pieces(f"{key}.block.1")) + under(
            "widen", self.widen.pieces(f"{key}.block.3")
        )


class EncoderStage(nn.Module):
    """Residual block, then ELU and a strided convolution to twice the channels."""

    def __init__(self, channels: int, stride: int, config: MimiConfig, device: torch.device) -> None:
        super().__init__()
        self.residual = ResidualBlock(channels, config, device)
        self.down = CausalConv(channels, 2 * channels, 2 * stride, stride, device)

    def run(self, x: Tensor, taps: Taps) -> Tensor:
        return self.down.run(taps.pad(self.residual.run(x, taps), self.down.past))


class DecoderStage(nn.Module):
    """ELU and a transposed convolution to half the channels, then a residual block."""

    def __init__(self, channels: int, stride: int, config: MimiConfig, device: torch.device) -> None:
        super().__init__()
        self.up = CausalUpConv(channels, channels // 2, stride, device)
        self.residual = ResidualBlock(channels // 2, config, device)

    def run(self, x: Tensor, taps: Taps) -> Tensor:
        return self.residual.run(self.up.run(taps.pad(x, self.up.past)), taps)


class Norm(nn.Module):
    """Layer norm."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = vector(width, device=device, dtype=torch.float32)
        self.bias = vector(width, device=device, dtype=torch.float32)

    def run(self, x: Tensor) -> Tensor:
        if ops.usable(x):
            return ops.pointwise.layer_norm(x, self.weight, self.bias, NORM_EPSILON)
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, NORM_EPSILON)

    def pieces(self, key: str) -> list[Piece]:
        return [one(name, f"{key}.{name}", tuple(self.weight.shape)) for name in ("weight", "bias")]


def gelu(x: Tensor) -> Tensor:
    """GELU, with the error function; x may be overwritten."""
    return ops.pointwise.gelu(x) if ops.usable(x) else functional.gelu(x)


class CodecLayer(nn.Module):
    """One layer of the codec's transformers; its two layer scales are folded into `out` and `down`."""

    def __init__(self, config: MimiConfig, device: torch.device) -> None:
        super().__init__()
        self.width, self.heads, self.hidden = config.width, config.heads, config.hidden
        width, hidden = config.width, config.hidden
        self.norm1 = Norm(width, device)
        self.norm2 = Norm(width, device)
        self.qkv = matrix(3 * width, width, device=device, dtype=torch.float32)
        self.out = matrix(width, width, device=device, dtype=torch.float32)
        self.up = matrix(hidden, width, device=device, dtype=torch.float32)
        self.down = matrix(width, hidden, device=device, dtype=torch.float32)

    def run(self, x: Tensor, window: Window, ring: Ring) -> None:
        """Add the layer's two branches to x [B, T, D] in place."""
        qkv = product(self.norm1.run(x), self.qkv, shape=(3, self.heads, -1))
        add_product(x, window.attend(qkv, ring), self.out)
        add_product(x, gelu(product(self.norm2.run(x), self.up)), self.down)

    def pieces(self, key: str) -> list[Piece]:
        width, hidden = self.width, self.hidden
        norms = under("norm1", self.norm1.pieces(f"{key}.norm1")) + under("norm2", self.norm2.pieces(f"{key}.norm2"))
        scale_1, scale_2 = ((f"{key}.layer_scale_{branch}.scale", (width,)) for branch in (1, 2))
        return norms + [
            one("qkv", f"{key}.self_attn.in_proj_weight", (3 * width, width)),
            Piece("out", (), ((f"{key}.self_attn.out_proj.weight", (width, width)), scale_1), _scaled),
            one("up", f"{key}.linear1.weight", (hidden, width)),
            Piece("down", (), ((f"{key}.linear2.weight", (width, hidden)), scale_2), _scaled),
        ]


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    return scale.float()[:, None] * weight.float()


class CodecTransformer(nn.Module):
    """Two new positions a frame; the earlier one sees one key fewer once the ring is full, as in the references."""

    frequencies: Tensor

    def __init__(self, config: MimiConfig, device: torch.device) -> None:
        super().__init__()
        self.layers: Stack[CodecLayer] = Stack(CodecLayer(config, device) for _ in range(config.layers))
        frequencies = rope_frequencies(config.head_width, config.max_period, device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def run(self, x: Tensor, state: CodecState, rows: Tensor, hints: Hints) -> None:
        """Run x [B, 2, D] through the layers in place."""
        used = None if hints.frames is None else LATENTS * hints.frames
        window = open_window(state.position, rows, LATENTS, state.rings.layers[0], self.frequencies, used, hints.lanes)
        for layer, ring in zip(self.layers, state.rings.layers, strict=True):
            layer.run(x, window, ring)
        state.position.index_add_(0, rows, torch.full_like(rows, LATENTS))

    def pieces(self, key: str) -> list[Piece]:
        return [
            piece
            for index, layer in enumerate(self.layers)
            for piece in under(f"layers.{index}", layer.pieces(f"{key}.transformer.layers.{index}"))
        ]


class Encoder(nn.Module):
    """80 ms of sound to one latent."""

    def __init__(self, config: MimiConfig, device: torch.device) -> None:
        super().__init__()
        channels = [config.filters << stage for stage in range(len(config.strides) + 1)]
        self.first = CausalConv(1, channels[0], config.first_kernel, 1, device)
        self.stages: Stack[EncoderStage] = Stack(
            EncoderStage(wide, stride, config, device) for wide, stride in zip(channels, config.strides, strict=False)
        )
        self._long, self._short = list(self.stages)[:LONG_STAGES], list(self.stages)[LONG_STAGES:]
        self.last = CausalConv(channels[-1], config.width, config.last_kernel, 1, device)
        self.transformer = CodecTransformer(config, device)
        self.downsample = matrix(config.width, DOWNSAMPLE_KERNEL * config.width, device=device, dtype=torch.float32)

    @property
    def taps(self) -> int:
        """Numbers that a row's convolutions remember."""
        past = DOWNSAMPLE_KERNEL - LATENTS
        return sum(conv.taps for conv in self.modules() if isinstance(conv, CausalConv)) + past * self.last.wide

    def run(self, pcm: Tensor, state: CodecState, rows: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        """pcm f32 [B, 1920], -1 to 1 -> latent [B, D]"""
        taps = Taps.of_rows(state, rows)
        fresh = state.position.index_select(0, rows) == 0
        x = taps.by_groups(pcm[:, :, None], SHORTER * cached_lanes(self.first.wide), hints.lanes, self._run_long)
        for stage in self._short:
            x = stage.run(x, taps)
        x = self.last.run(taps.pad(x, self.last.past))  # [B, 2, D]
        self.transformer.run(x, state, rows, hints)
        x = taps.pad_first(x, DOWNSAMPLE_KERNEL - LATENTS, fresh)
        taps.store(state, rows)
        return product(x.flatten(1), self.downsample)

    def _run_long(self, x: Tensor, taps: Taps) -> Tensor:
        """The first layers, where a frame is long and its channels few."""
        x = taps.by_groups(x, cached_lanes(self.first.wide), None, self._run_longest)
        return self._long[1].run(x, taps)

    def _run_longest(self, x: Tensor, taps: Taps) -> Tensor:
        return self._long[0].run(self.first.run(taps.pad(x, self.first.past, activate=False)), taps)

    def pieces(self) -> list[Piece]:
        key = "encoder.model"
        width = self.last.wide
        pieces = under("first", self.first.pieces(f"{key}.0"))
        for index, stage in enumerate(self.stages):
            pieces += under(f"stages.{index}.residual", stage.residual.pieces(f"{key}.{3 * index + 1}"))
            pieces += under(f"stages.{index}.down", stage.down.pieces(f"{key}.{3 * index + 3}"))
        pieces += under("last", self.last.pieces(f"{key}.{3 * len(self.stages) + 2}"))
        pieces += under("transformer", self.transformer.pieces("encoder_transformer"))
        shape = (width, width, DOWNSAMPLE_KERNEL)
        pieces.append(one("downsample", "downsample.conv.conv.conv.weight", shape, lambda w: w.mT.flatten(1)))
        return pieces


class Decoder(nn.Module):
    """One latent to 80 ms of sound."""

    def __init__(self, config: MimiConfig, device: torch.device) -> None:
        super().__init__()
        strides = tuple(reversed(config.strides))
        channels = [config.filters << stage for stage in range(len(strides), -1, -1)]
        self.upsample = vector(2, LATENTS, config.width, device=device, dtype=torch.float32)
        self.transformer = CodecTransformer(config, device)
        self.first = CausalConv(config.width, channels[0], config.first_kernel, 1, device)
        self.stages: Stack[DecoderStage] = Stack(
            DecoderStage(wide, stride, config, device) for wide, stride in zip(channels, strides, strict=False)
        )
        self._short, self._long = list(self.stages)[:-LONG_STAGES], list(self.stages)[-LONG_STAGES:]
        self.last = CausalConv(channels[-1], 1, config.last_kernel, 1, device)

    @property
    def taps(self) -> int:
        """Numbers that a row's convolutions remember."""
        convs = (conv for conv in self.modules() if isinstance(conv, CausalConv | CausalUpConv))
        return self.first.narrow + sum(conv.taps for conv in convs)

    def run(self, latent: Tensor, state: CodecState, rows: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        """latent [B, D] -> pcm f32 [B, 1920]"""
        taps = Taps.of_rows(state, rows)
        past, now = taps.pad(latent[:, None], 1, activate=False).chunk(2, dim=1)  # [B, 1, D] each
        x = past * self.upsample[0] + now * self.upsample[1]  # [B, 2, D]
        self.transformer.run(x, state, rows, hints)
        x = self.first.run(taps.pad(x, self.first.past, activate=False))
        for stage in self._short:
            x = stage.run(x, taps)
        x = taps.by_groups(x, SHORTER * cached_lanes(self.last.narrow), hints.lanes, self._run_long)
        taps.store(state, rows)
        return x.squeeze(2)

    def _run_long(self, x: Tensor, taps: Taps) -> Tensor:
        """The last layers, where a frame is long and its channels few."""
        x = self._long[0].run(x, taps)
        return taps.by_groups(x, cached_lanes(self.last.narrow), None, self._run_longest)

    def _run_longest(self, x: Tensor, taps: Taps) -> Tensor:
        x = self._long[1].run(x, taps)
        return self.last.run(taps.pad(x, self.last.past))

    def pieces(self) -> list[Piece]:
        key = "decoder.model"
        pieces = under("first", self.first.pieces(f"{key}.0"))
        for index, stage in enumerate(self.stages):
            pieces += under(f"stages.{index}.up", stage.up.pieces(f"{key}.{3 * index + 2}"))
            pieces += under(f"stages.{index}.residual", stage.residual.pieces(f"{key}.{3 * index + 3}"))
        pieces += under("last", self.last.pieces(f"{key}.{3 * len(self.stages) + 2}"))
        pieces += under("transformer", self.transformer.pieces("decoder_transformer"))
        shape = (self.first.narrow, 1, 2 * LATENTS)
        pieces.append(one("upsample", "upsample.convtr.convtr.convtr.weight", shape, _past_then_now))
        return pieces


def _past_then_now(weight: Tensor) -> Tensor:
    """[C, 1, (now | past) * 2] -> [past | now, 2, C]"""
    return weight.view(-1, 2, LATENTS).permute(1, 2, 0).flip(0)


class Quantizer(nn.Module):
    """Latent to 8 codes and back.

    Codebook 0 stands alone; 1 to 7 code what the ones before them left. Both start from the same latent, each through
    its own projection, and their sums come back through their own projections.
    """

    offsets: Tensor

    def __init__(self, config: MimiConfig, device: torch.device) -> None:
        super().__init__()
        width, size = config.codebook_width, config.codebook_size
        self.latent_width, self.width, self.size = config.width, width, size
        self.project_in = matrix(2, width, config.width, device=device, dtype=torch.float32)
        self.project_out = matrix(config.width, 2 * width, device=device, dtype=torch.float32)
        self.centroids = matrix(CODEBOOKS, size, width, device=device, dtype=torch.float32)
        self.handicaps = vector(CODEBOOKS, size, device=device, dtype=torch.float32)
        offsets = (torch.arange(CODEBOOKS) * size).to(device)
        self.register_buffer("offsets", offsets, persistent=False)

    def encode(self, latent: Tensor) -> Tensor:
        """latent [B, D] -> codes int64 [B, 8]"""
        first, rest = product(latent, self.project_in.flatten(0, 1)).chunk(2, dim=1)
        codes = [self._nearest(first, 0)]
        for level in range(1, CODEBOOKS):
            codes.append(self._nearest(rest, level))
            rest = rest - rows_of(self.centroids[level], codes[-1])
        return torch.stack(codes, dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        """codes int64 [B, 8] -> latent [B, D]"""
        chosen = rows_of(self.centroids.flatten(0, 1), codes + self.offsets)  # [B, 8, d]
        first, rest = chosen[:, 0], chosen[:, 1:].sum(1)
        return product(torch.cat([first, rest], dim=1), self.project_out)

    def _nearest(self, latent: Tensor, level: int) -> Tensor:
        """The centroid with the least |e - r|^2: that is the one with the greatest r e - |e|^2 / 2."""
        return product(latent, self.centroids[level], self.handicaps[level]).argmax(1)

    def pieces(self) -> list[Piece]:
        width, latent = self.width, self.latent_width
        groups = ("quantizer.rvq_first", "quantizer.rvq_rest")
        pieces = []
        for index, key in enumerate(groups):
            half = slice(index * width, (index + 1) * width)
            inward, outward = (
                (f"{key}.input_proj.weight", (width, latent, 1)),
                (f"{key}.output_proj.weight", (latent, width, 1)),
            )
            pieces.append(Piece("project_in", (index,), (inward,), lambda w: w.squeeze(2)))
            pieces.append(Piece("project_out", (slice(None), half), (outward,), lambda w: w.squeeze(2)))
        for level in range(CODEBOOKS):
            key = f"{groups[0]}.vq.layers.0" if level == 0 else f"{groups[1]}.vq.layers.{level - 1}"
            sums = (f"{key}._codebook.embedding_sum", (self.size, width))
            usage = (f"{key}._codebook.cluster_usage", (self.size,))
            pieces.append(Piece("centroids", (level,), (sums, usage), _centroids))
            pieces.append(
                Piece("handicaps", (level,), (sums, usage), lambda s, u: _centroids(s, u).square().sum(1) / -2)
            )
        return pieces


def _centroids(sums: Tensor, usage: Tensor) -> Tensor:
    return sums.float() / usage.float().clamp_min(_USAGE_FLOOR)[:, None]


class Mimi(nn.Module):
    """The codec's weights, f32 everywhere; uninitialised until the pieces are loaded."""

    def __init__(self, config: MimiConfig, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, device)
        self.quantizer = Quantizer(config, device)
        self.decoder = Decoder(config, device)

    def allocate(self, rows: int) -> MimiState:
        """State of `rows` fresh rows and the scratch row, where the weights are."""
        device = self.quantizer.centroids.device
        return MimiState(
            encoder=CodecState.allocate(self.config, self.encoder.taps, rows, device),
            decoder=CodecState.allocate(self.config, self.decoder.taps, rows, device),
        )

    def encode(self, pcm: Tensor, state: MimiState, rows: Tensor) -> Tensor:
        """pcm f32 [B, 1920], one frame of each listed row -> codes int64 [B, 8]"""
        return self.quantizer.encode(self.encoder.run(pcm, state.encoder, rows))

    def decode(self, codes: Tensor, state: MimiState, rows: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        """codes int64 [B, 8], one frame of each listed row -> pcm f32 [B, 1920]"""
        return self.decoder.run(self.quantizer.decode(codes), state.decoder, rows, hints)

    def encode_stream(self, pcm: Tensor) -> Tensor:
        """A whole recording, f32 [n], as a stream of its own: codes int64 [8, frames], the last frame zero-padded."""
        frames = functional.pad(pcm, (0, -len(pcm) % FRAME_SAMPLES)).view(-1, 1, FRAME_SAMPLES)
        state, row = self.allocate(1), torch.zeros(1, dtype=torch.int64, device=pcm.device)
        return torch.cat([self.encode(frame, state, row) for frame in frames]).T

    def pieces(self) -> list[Piece]:
        """How the released tensors fill the parameters."""
        return (
            under("encoder", self.encoder.pieces())
            + under("quantizer", self.quantizer.pieces())
            + under("decoder", self.decoder.pieces())
        )
