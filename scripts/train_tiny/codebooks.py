"""The codebooks while they learn: each centroid is the running mean of what falls to it, as the file stores it."""

import torch
from torch import Tensor

from scripts.train_tiny import whole
from scripts.train_tiny.store import Weights

REST = 7
"""Codebooks of `rvq_rest`; `rvq_first` has one."""


def book(group: str, layer: int) -> str:
    """Name of a codebook's tensors."""
    return f"quantizer.{group}.vq.layers.{layer}._codebook"


@torch.no_grad()
def learn(w: Weights, group: str, layer: int, x: Tensor, decay: float) -> Tensor:
    """Codes of x [..., d]; moves the centroids towards x, and those that nobody uses to some of x."""
    x = x.float()
    with torch.autocast("cpu", enabled=False):
        codes = whole.nearest(whole.centroids(w, group, layer), x)
    flat, index = x.reshape(-1, x.shape[-1]), codes.flatten()
    usage, total = w[f"{book(group, layer)}.cluster_usage"], w[f"{book(group, layer)}.embedding_sum"]
    usage.mul_(decay).index_add_(0, index, torch.full(index.shape, 1 - decay))
    total.mul_(decay).index_add_(0, index, flat * (1 - decay))
    dead = torch.nonzero(usage < 1 - decay)[:, 0]
    usage[dead] = 10 * (1 - decay)
    total[dead] = 10 * (1 - decay) * flat[torch.randint(len(flat), (len(dead),))]
    return codes


@torch.no_grad()
def seed(w: Weights, group: str, layers: int, x: Tensor, rounds: int = 8) -> None:
    """Fill codebooks by k-means on x [n, d], residual by residual."""
    for layer in range(layers):
        bins = len(w[f"{book(group, layer)}.cluster_usage"])
        table = x[torch.randint(len(x), (bins,))].clone()
        for _ in range(rounds):
            index = whole.nearest(table, x)
            count = torch.bincount(index, minlength=bins).float()[:, None]
            sums = torch.zeros_like(table).index_add_(0, index, x)
            table = torch.where(count > 0, sums / count.clamp(min=1), x[torch.randint(len(x), (bins,))])
        w[f"{book(group, layer)}.cluster_usage"].fill_(1.0)
        w[f"{book(group, layer)}.embedding_sum"].copy_(table)
        x = x - table[whole.nearest(table, x)]


def through(w: Weights, group: str, layers: int, z: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """z [B, T, d] quantised by so many codebooks, its gradient passed straight through; and the commitment loss."""
    residual = z.detach().float()
    found = torch.zeros_like(residual)
    for layer in range(layers):
        centroid = whole.centroids(w, group, layer)[learn(w, group, layer, residual, decay)]
        found, residual = found + centroid, residual - centroid
    loss = torch.nn.functional.mse_loss(z, found)
    return z + (found - z).detach(), loss
