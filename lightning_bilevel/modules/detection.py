"""How well a score of suspicion finds the wrong labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

__all__ = ["detection", "missed_errors"]


def missed_errors(suspicion: Tensor, corrupted: Tensor) -> float:
    r"""Return the share of wrong labels that are missed at a budget equal to the noise rate.

    With n_wrong wrong labels, the n_wrong most suspicious samples S are looked at:

    .. math:: 1 - \frac{|S \cap \text{wrong}|}{n_\text{wrong}}

    Where samples at the border of S are equally suspicious, it is the expectation over a random
    choice among them. A score that knows nothing misses the share of right labels.

    Args:
        suspicion: One number per sample, larger where a wrong label is more likely.
        corrupted: The mask of the samples whose label is wrong.

    Example:
        >>> corrupted = torch.tensor([True, True, False, False])
        >>> missed_errors(torch.tensor([0.9, 0.2, 0.3, 0.1]), corrupted)
        0.5
    """
    budget = int(corrupted.sum())
    border = suspicion.sort(descending=True).values[budget - 1]
    above = suspicion > border
    at_border = suspicion == border
    places = budget - int(above.sum())
    found = int((above & corrupted).sum())
    found_at_border = places * int((at_border & corrupted).sum()) / int(at_border.sum())
    return 1 - (found + found_at_border) / budget


def detection(suspicion: Tensor, corrupted: Tensor) -> dict[str, float]:
    """Return both measures of a score of suspicion: ``auroc`` and ``missed_errors``.

    AUROC is the probability that a wrong label is more suspicious than a right one.

    Args:
        suspicion: One number per sample, larger where a wrong label is more likely.
        corrupted: The mask of the samples whose label is wrong.
    """
    return {
        "auroc": float(binary_auroc(_ranks(suspicion), corrupted.int())),
        "missed_errors": missed_errors(suspicion, corrupted),
    }


def _ranks(score: Tensor) -> Tensor:
    """Return the ranks of a score, scaled to [0, 1], equal where it is equal.

    torchmetrics takes scores outside [0, 1] for logits and puts them through a sigmoid, which
    makes large ones equal.
    """
    values, ranks = torch.unique(score, return_inverse=True)
    scaled: Tensor = ranks.double() / max(len(values) - 1, 1)
    return scaled
