"""moshi 0.2.13, the public reference, and our model on the same fresh random weights."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NO_TORCH_COMPILE", "1")
os.environ.setdefault("NO_CUDA_GRAPH", "1")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from webrtc_duplex.model.config import LMConfig, MimiConfig  # noqa: E402
from webrtc_duplex.model.mimi import Mimi  # noqa: E402
from webrtc_duplex.model.personaplex import LM  # noqa: E402
from webrtc_duplex.model.tensor_file import TensorFile, fill  # noqa: E402

Json = Mapping[str, Any]

CPU = torch.device("cpu")
DELAYS = [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]


@dataclass(frozen=True)
class Pair:
    """The same weights twice: `reference_*` are moshi's modules."""

    reference_lm: Any
    reference_mimi: Any
    lm: LM
    mimi: Mimi


def lm_entry(
    dim: int, heads: int, layers: int, context: int, depformer_dim: int, depformer_heads: int, **others: int
) -> Json:
    """A `config.json` of the family; `others`: text_card, card, depformer_num_layers."""
    return {
        "dim": dim,
        "text_card": 50,
        "existing_text_padding_id": 3,
        "n_q": 16,
        "dep_q": 8,
        "card": 64,
        "num_heads": heads,
        "num_layers": layers,
        "hidden_scale": 4.125,
        "causal": True,
        "layer_scale": None,
        "context": context,
        "max_period": 10_000,
        "gating": "silu",
        "norm": "rms_norm_f32",
        "positional_embedding": "rope",
        "depformer_dim": depformer_dim,
        "depformer_dim_feedforward": int(4.125 * depformer_dim),
        "depformer_num_heads": depformer_heads,
        "depformer_num_layers": 2,
        "depformer_layer_scale": None,
        "depformer_multi_linear": True,
        "depformer_context": 8,
        "depformer_max_period": 10_000,
        "depformer_gating": "silu",
        "depformer_pos_emb": "none",
        "depformer_weights_per_step": True,
        "delays": DELAYS,
        **others,
    }


def mimi_entry(filters: int, width: int, heads: int, layers: int, context: int, bins: int, hidden: int) -> Json:
    """A codec's `config.json` with the released ratios and kernels."""
    return {
        "sample_rate": 24_000,
        "channels": 1,
        "frame_rate": 12.5,
        "seanet": {
            "channels": 1,
            "dimension": width,
            "causal": True,
            "n_filters": filters,
            "n_residual_layers": 1,
            "activation": "ELU",
            "compress": 2,
            "dilation_base": 2,
            "disable_norm_outer_blocks": 0,
            "kernel_size": 7,
            "residual_kernel_size": 3,
            "last_kernel_size": 3,
            "norm": "none",
            "pad_mode": "constant",
            "ratios": [8, 6, 5, 4],
            "true_skip": True,
        },
        "quantizer": {
            "dimension": max(width // 2, 16),
            "n_q": 10,
            "bins": bins,
            "input_dimension": width,
            "output_dimension": width,
        },
        "transformer": {
            "d_model": width,
            "num_heads": heads,
            "num_layers": layers,
            "causal": True,
            "layer_scale": 0.01,
            "context": context,
            "conv_layout": True,
            "max_period": 10_000,
            "gating": "none",
            "norm": "layer_norm",
            "positional_embedding": "rope",
            "dim_feedforward": hidden,
            "input_dimension": width,
            "output_dimensions": [width],
        },
    }


def make_pair(directory: Path, lm: Json, mimi: Json, seed: int) -> Pair:
    """Random weights in moshi's modules, saved in the released layout, loaded into ours. Keys: all that moshi sees."""
    from moshi.models import loaders
    from moshi.models.lm import LMModel

    torch.manual_seed(seed)
    reference_lm = LMModel(device="cpu", dtype=torch.float32, **lm).eval()
    reference_mimi = loaders.get_mimi(None, dict(mimi), device="cpu", num_codebooks=8)
    with torch.no_grad():
        _randomise(reference_lm)
        _randomise(reference_mimi)
    save_file(_released_names(reference_lm.state_dict()), directory / "model.safetensors")
    save_file(_released_names(reference_mimi.state_dict()), directory / "mimi.safetensors")
    ours_lm = LM(LMConfig.from_json(lm), CPU, torch.float32)
    fill(ours_lm, ours_lm.pieces(), TensorFile(directory / "model.safetensors"))
    ours_mimi = Mimi(MimiConfig.from_json(mimi), CPU)
    fill(ours_mimi, ours_mimi.pieces(), TensorFile(directory / "mimi.safetensors"))
    return Pair(reference_lm, reference_mimi, ours_lm, ours_mimi)


def _randomise(module: nn.Module) -> None:
    """Weights of a size that keeps numbers near 1; codebooks, norms and scales of their own kinds."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith(("cluster_usage", "alpha", "norm1.weight", "norm2.weight")):
            tensor.uniform_(0.6, 1.4)
        elif name.endswith("layer_scale_1.scale") or name.endswith("layer_scale_2.scale"):
            tensor.uniform_(0.1, 0.5)
        elif name.endswith("embedding_sum"):
            tensor.normal_()
        elif tensor.dim() == 1 and tensor.is_floating_point() and not name.endswith("_initialized"):
            tensor.normal_(std=0.05)
        elif tensor.dim() == 2:
            tensor.normal_(std=1.0 if "emb" in name else 1.5 * tensor.shape[1] ** -0.5)
        elif tensor.dim() == 3:
            fan = tensor[0].numel() if "convtr" not in name else tensor.shape[0] * 2
            tensor.normal_(std=1.4 * fan**-0.5)


def _released_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """moshi 0.2.13 keeps one projection a step; the released files hold them stacked under one name."""
    released: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        head, separator, tail = name.partition(".in_projs.")
        if separator:
            released.setdefault(f"{head}.in_proj_weight", []).append(tensor)
            continue
        head, separator, tail = name.partition(".out_projs.")
        released.setdefault(f"{head}.out_proj.weight" if separator else name, []).append(tensor)
    return _contiguous({name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in released.items()})


def _contiguous(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}
