"""Heads that belong to a batch of episodes, solved on its features by gradient steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_bilevel.modules.networks import cross_entropy_slope
from lightning_bilevel.stochastic.penalties import Weights

__all__ = ["EpisodeSets", "mean_loss", "solved"]


class EpisodeSets(NamedTuple):
    """The support or query sets of a batch of episodes, and the loss of heads (E, ways, d) on them.

    Attributes:
        features: (E, N, d).
        labels: (E, N).
        ways: The number of classes.
    """

    features: Tensor
    labels: Tensor
    ways: int

    def start(self) -> Tensor:
        """Return heads at zero."""
        tasks, _, size = self.features.shape
        return self.features.new_zeros(tasks, self.ways, size)

    def loss(self, heads: Tensor) -> Tensor:
        """Return the mean loss."""
        return mean_loss(self._logits(heads), self.labels)

    def gradient(self, heads: Tensor) -> Tensor:
        """Return the gradient of the mean loss in the heads."""
        slope = cross_entropy_slope(self._logits(heads), self.labels) / self.labels.numel()
        return slope.transpose(1, 2) @ self.features

    def _logits(self, heads: Tensor) -> Tensor:
        return self.features @ heads.transpose(1, 2)


@torch.no_grad()
def solved(
    support: EpisodeSets,
    query: EpisodeSets,
    weights: Weights,
    rho: float | None,
    *,
    steps: int,
    lr: float,
    bound: float,
) -> tuple[Tensor, Tensor]:
    """Return the heads y and z of a batch.

    Args:
        support: The support sets, of g.
        query: The query sets, of f.
        weights: Those of f and of the gap.
        rho: The proximal parameter; None without a proximal term.
        steps: The gradient steps of z, and then of y from there.
        lr: The step of a head on the loss of its own task.
        bound: The largest weight.
    """
    # The losses are means over the tasks, so the gradient of a head is divided by their number.
    lr *= len(support.features)
    total = weights.upper + weights.gap
    a, b = weights.upper / total, weights.gap / total
    z = support.start()
    for _ in range(steps):
        z = (z - lr * support.gradient(z)).clamp_(-bound, bound)
    y = z
    for _ in range(steps):
        f_y, g_y = query.gradient(y), support.gradient(y)
        if rho is not None:
            pull = (z - y) / rho
            g_y = g_y + pull
            z = (z - lr * (support.gradient(z) + pull)).clamp_(-bound, bound)
        y = (y - lr * (a * f_y + b * g_y)).clamp_(-bound, bound)
    return y, z


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (E, N, ways)."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten())
