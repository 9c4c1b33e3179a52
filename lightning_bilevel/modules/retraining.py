"""Train a classifier from scratch, such as on the samples that cleaning has kept."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["fresh_copy", "retrain"]


def fresh_copy(classifier: nn.Module) -> nn.Module:
    """Return a copy whose layers are initialised again, all that have ``reset_parameters``."""
    fresh = copy.deepcopy(classifier)
    for layer in fresh.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()
    return fresh


def retrain(
    classifier: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    steps: int = 300,
    lr: float = 0.01,
    weight_decay: float = 1e-4,
) -> nn.Module:
    """Train a copy of a classifier from scratch with full-batch Adam.

    Args:
        classifier: The classifier to copy; the parameters of the copy are initialised again.
        images: The images to train on.
        labels: Their labels.
        steps: The number of Adam steps.
        lr: The step size of Adam.
        weight_decay: The weight decay of Adam.
    """
    fresh = fresh_copy(classifier)
    optimizer = torch.optim.Adam(fresh.parameters(), lr=lr, weight_decay=weight_decay)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(fresh(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return fresh
