"""Checkpoints of the stages, and the codec that they start from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.train_tiny.work import Work

Weights = dict[str, Tensor]

SHIPPED = Path(__file__).resolve().parents[2] / "webrtc_duplex" / "model" / "tiny"


def save(content: object, path: Path) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".part")
    torch.save(content, partial)
    partial.rename(path)


class Stateful(Protocol):
    """Optimisers, schedules and modules."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: dict[str, object]) -> object: ...


class Checkpoints:
    """One file a stage, written whole or not at all."""

    def __init__(self, work: Work, stage: str) -> None:
        self._path = work.path(f"checkpoints/{stage}.pt")

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Stateful]) -> None:
        content = {
            "step": step,
            "tensors": {name: tensor.detach() for name, tensor in tensors.items()},
            "state": {name: part.state_dict() for name, part in state.items()},
        }
        save(content, self._path)

    def resume(self, tensors: Mapping[str, Tensor], state: Mapping[str, Stateful]) -> int:
        """Fill tensors and state in place from the last save; the step to go on at, 0 if there is none."""
        if not self._path.exists():
            return 0
        content = torch.load(self._path, weights_only=False)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(content["tensors"][name])
        for name, part in state.items():
            part.load_state_dict(content["state"][name])
        return int(content["step"])


def load_codec(work: Work) -> Weights:
    """The codec that this run goes on from: frozen by the semantic stage, else its first stage, in float32."""
    for name in ("codec_frozen.pt", "codec_base.pt"):
        if work.path(name).exists():
            return {key: tensor.float() for key, tensor in torch.load(work.path(name)).items()}
    return {key: tensor.float() for key, tensor in load_file(SHIPPED / "mimi.safetensors").items()}


def round_encoder(weights: Weights) -> Weights:
    """Weights of the encoder rounded to bfloat16, as they are shipped; codebooks and decoder as they are.

    Done before any codes are made, so that the shipped encoder makes these very codes.
    """
    return {
        name: tensor.bfloat16().float() if name.startswith(("encoder", "downsample")) or "_proj" in name else tensor
        for name, tensor in weights.items()
    }
