"""Corrupt labels on purpose, to test whether cleaning finds them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["LabelNoise", "corrupt_labels"]

LabelNoise = Literal["uniform", "pair"]


def corrupt_labels(
    labels: Tensor,
    classes: int,
    corruption: float,
    kind: LabelNoise = "uniform",
    *,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Replace a share of the labels by wrong ones.

    The random draws do not depend on the rate. With the same generator state, a lower rate corrupts
    a subset of the same samples in the same way, so results at different rates can be compared.

    Args:
        labels: The true labels, 0 to ``classes - 1``.
        classes: The number of classes, at least 2.
        corruption: The share of labels to replace: exactly ``round(corruption * len(labels))``.
        kind: A label becomes any of the other classes with equal probability (``uniform``), or the
            next class (``pair``; the last class becomes the first).
        generator: The source of randomness, on the CPU.

    Returns:
        The new labels, and the mask of those that were replaced.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> labels = torch.tensor([0, 1, 2, 2])
        >>> noisy, corrupted = corrupt_labels(labels, 3, 0.5, "pair", generator=generator)
        >>> int(corrupted.sum()), bool(torch.equal(corrupted, noisy != labels))
        (2, True)
    """
    if classes < 2 or not 0.0 <= corruption <= 1.0 or kind not in ("uniform", "pair"):
        raise ValueError(
            f"`corrupt_labels(classes={classes}, corruption={corruption}, kind={kind!r})` needs "
            "two classes, a share from 0 to 1, and 'uniform' or 'pair'."
        )
    n = len(labels)
    order = torch.randperm(n, generator=generator)
    shift: Tensor | int = 1
    if kind == "uniform":
        shift = torch.randint(1, classes, (n,), generator=generator)
    corrupted = torch.zeros(n, dtype=torch.bool)
    corrupted[order[: round(corruption * n)]] = True
    return torch.where(corrupted, (labels + shift) % classes, labels), corrupted
