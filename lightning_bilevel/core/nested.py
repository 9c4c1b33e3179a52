"""Nested random samples of a data set: each one is a part of the next."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["nested_order"]


def nested_order(n: int, seed: int, classes: Tensor | None = None) -> Tensor:
    r"""Return the numbers 0, ..., n - 1 in a random order, each beginning of which is a sample.

    With classes, each beginning is stratified. Member j of a class of :math:`n_c` samples, counted
    from 0 in a random order of the class, has the place :math:`(j + u_c)/n_c`, with :math:`u_c`
    drawn uniformly from [0, 1) for each class. All samples are sorted by it. Two classes are then
    represented alike, up to one sample of each.

    The order depends on the arguments alone: it neither uses nor changes torch's random state. Two
    levels with as many samples and without classes have the same order, which keeps together the
    two sets of a few-shot task.

    Args:
        n: The number of samples.
        seed: Decides the order.
        classes: The class of each sample; None draws from all alike.

    Example:
        >>> classes = torch.tensor([0, 0, 0, 0, 1, 1])
        >>> classes[nested_order(6, seed=0, classes=classes)[:3]].sort().values
        tensor([0, 0, 1])
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(n, generator=generator, device="cpu")
    if classes is None:
        return order
    labels, numbers, counts = torch.unique(classes, return_inverse=True, return_counts=True)
    lonely = labels[counts == 1]
    if len(lonely):
        raise ValueError(
            f"class {lonely[0].item()} has one of the {n:,} samples alone: a stratified sample "
            "needs at least two of each class. Leave it out, or draw from all classes alike with "
            "`Growing(stratified=False)`."
        )
    offsets = torch.rand(len(labels), generator=generator, dtype=torch.float64, device="cpu")
    # The samples class by class, and in random order within each.
    by_class = order[torch.argsort(numbers[order], stable=True)]
    firsts = counts.cumsum(0) - counts
    numbers = numbers[by_class]
    rank = torch.arange(n, device="cpu") - firsts[numbers]
    places = (rank + offsets[numbers]) / counts[numbers]
    return by_class[torch.argsort(places, stable=True)]
