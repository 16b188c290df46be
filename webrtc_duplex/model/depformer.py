"""The depformer: the 8 codes of the agent's next column, one after another, each with its own weights.

Step k hears the temporal transformer's hidden vector and the token before it (the text at step 0, code k - 1 after),
and attends to the steps before it in the same frame; between frames nothing is remembered.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from webrtc_duplex.model.config import STEPS, LMConfig
from webrtc_duplex.model.kernels import ops
from webrtc_duplex.model.temporal import gated_product, halves, rms_norm
from webrtc_duplex.model.weights import Piece, add_product, as_is, matrix, one, product, vector

Choose = Callable[[int, Tensor], Tensor]
"""(step, logits [B, card]) -> the code int64 [B] that stands at this step: sampled, or forced."""


@dataclass(frozen=True, slots=True)
class StepLayer:
    """One layer's weights at one step: views of the stacked parameters."""

    norm1: Tensor
    norm2: Tensor
    qkv: Tensor
    out: Tensor
    gate: Tensor
    down: Tensor


class Depformer(nn.Module):
    """Weights stacked with the step first, so that what one step reads lies together; norms are shared by the steps.

    The loop works on views of the parameters, made once: the parameters are filled in place and never moved.
    """

    def __init__(self, config: LMConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        width, hidden, stacked = config.depformer_width, config.depformer_hidden, (STEPS, config.depformer_layers)
        self.project_in = matrix(STEPS, width, config.width, device=device, dtype=dtype)
        self.text_table = vector(config.text_card + 1, width, device=device, dtype=dtype)
        self.tables = vector(STEPS - 1, config.card + 1, width, device=device, dtype=dtype)
        self.norm1 = vector(config.depformer_layers, width, device=device, dtype=dtype)
        self.norm2 = vector(config.depformer_layers, width, device=device, dtype=dtype)
        self.qkv = matrix(*stacked, 3 * width, width, device=device, dtype=dtype)
        self.out = matrix(*stacked, width, width, device=device, dtype=dtype)
        self.gate = matrix(*stacked, 2, hidden, width, device=device, dtype=dtype)
        self.down = matrix(*stacked, width, hidden, device=device, dtype=dtype)
        self.heads = matrix(STEPS, config.card, width, device=device, dtype=dtype)
        self._steps = [[self._step_layer(step, layer) for layer in range(stacked[1])] for step in range(STEPS)]

    def run(self, hidden: Tensor, text: Tensor, choose: Choose, steps: int = STEPS) -> list[Tensor]:
        """hidden [B, D] and the text token [B] that goes with it -> the codes of the first `steps` steps, [B] each."""
        inputs = self._inputs(hidden)
        memory = self._memory(hidden)
        codes: list[Tensor] = []
        for step in range(steps):
            said = functional.embedding(codes[-1], self.tables[step - 1]) if codes else self._text(text)
            logits = self._logits(step, inputs[:, step] + said, memory)
            codes.append(choose(step, logits))
        return codes

    def _inputs(self, hidden: Tensor) -> Tensor:
        """What every step hears of the hidden vector, in one product: [B, 8, d]."""
        return product(hidden, self.project_in.flatten(0, 1)).view(-1, STEPS, self.config.depformer_width)

    def _text(self, text: Tensor) -> Tensor:
        return functional.embedding(text, self.text_table)

    def _memory(self, hidden: Tensor) -> list[Tensor]:
        """Room for keys and values of this frame's steps: for each layer [2, B, H, 8, d]."""
        config = self.config
        shape = (2, len(hidden), config.depformer_heads, STEPS, config.depformer_head_width)
        return [hidden.new_empty(shape) for _ in range(config.depformer_layers)]

    def _logits(self, step: int, x: Tensor, memory: list[Tensor]) -> Tensor:
        """x [B, d], overwritten -> logits [B, card]"""
        for layer, remembered in zip(self._steps[step], memory, strict=True):
            qkv = product(rms_norm(x, layer.norm1), layer.qkv, shape=(3, self.config.depformer_heads, -1))
            add_product(x, attend_steps(qkv, remembered, step), layer.out)
            add_product(x, gated_product(rms_norm(x, layer.norm2), layer.gate), layer.down)
        return product(x, self.heads[step])

    def _step_layer(self, step: int, layer: int) -> StepLayer:
        return StepLayer(
            norm1=self.norm1[layer],
            norm2=self.norm2[layer],
            qkv=self.qkv[step, layer],
            out=self.out[step, layer],
            gate=self.gate[step, layer].flatten(0, 1),
            down=self.down[step, layer],
        )

    def pieces(self) -> list[Piece]:
        """How the released tensors fill the parameters; of `file_steps` steps in the file the first 8 are taken."""
        config = self.config
        width, hidden, all_steps = config.depformer_width, config.depformer_hidden, config.file_steps
        pieces = [one("text_table", "depformer_text_emb.weight", (config.text_card + 1, width))]
        for step in range(STEPS):
            pieces.append(one("project_in", f"depformer_in.{step}.weight", (width, config.width), into=step))
            pieces.append(one("heads", f"linears.{step}.weight", (config.card, width), into=step))
        for step in range(STEPS - 1):
            pieces.append(one("tables", f"depformer_emb.{step}.weight", (config.card + 1, width), into=step))
        for layer in range(config.depformer_layers):
            key, every = f"depformer.layers.{layer}", (slice(None), layer)
            qkv = (f"{key}.self_attn.in_proj_weight", (all_steps * 3 * width, width))
            out = (f"{key}.self_attn.out_proj.weight", (all_steps * width, width))
            pieces += [
                one("norm1", f"{key}.norm1.alpha", (1, 1, width), torch.flatten, into=layer),
                one("norm2", f"{key}.norm2.alpha", (1, 1, width), torch.flatten, into=layer),
                Piece("qkv", every, (qkv,), lambda w: w.view(all_steps, 3 * width, width)[:STEPS]),
                Piece("out", every, (out,), lambda w: w.view(all_steps, width, width)[:STEPS]),
            ]
            for step in range(STEPS):
                gate = (f"{key}.gating.{step}.linear_in.weight", (2 * hidden, width))
                down = (f"{key}.gating.{step}.linear_out.weight", (width, hidden))
                pieces.append(Piece("gate", (step, layer), (gate,), halves))
                pieces.append(Piece("down", (step, layer), (down,), as_is))
        return pieces


def attend_steps(qkv: Tensor, remembered: Tensor, step: int) -> Tensor:
    """Remember this step's key and value, attend to steps 0 to this one.

    qkv [B, 3, H, d], remembered [2, B, H, 8, d] -> [B, H * d].
    """
    if ops.usable(qkv):
        return ops.pointwise.attend_steps(qkv.flatten(1), remembered, step)
    remembered[:, :, :, step] = qkv[:, 1:].transpose(0, 1)
    keys, values = remembered[:, :, :, : step + 1]
    return functional.scaled_dot_product_attention(qkv[:, 0, :, None], keys, values).flatten(1)
