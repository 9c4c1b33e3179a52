"""Labels by simulated annotators, some reliable and some not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.data.cleaning import CleaningData, Splits

ANNOTATORS = 20


def error_rates(corruption: float, annotators: int = ANNOTATORS) -> Tensor:
    r"""Return the share of wrong labels of each annotator, from the most to the least reliable.

    .. math:: e_j = \Bigl(\frac{j + 1/2}{m}\Bigr)^{(1 - c)/c}, \qquad j = 0, \dots, m - 1

    whose mean is about c, the share of wrong labels of all: with c = 1/2 the shares are evenly
    spread between 0 and 1.

    Args:
        corruption: c, between 0 and 1.
        annotators: m, their number.
    """
    place = (torch.arange(annotators, dtype=torch.float64) + 0.5) / annotators
    if corruption == 0:
        return torch.zeros_like(place)
    return place ** ((1 - corruption) / corruption)


def annotated_labels(
    labels: Tensor,
    classes: int,
    corruption: float,
    *,
    annotators: int = ANNOTATORS,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Let annotators of different reliability label the samples, each sample by one of them.

    Each annotator labels the same number of samples, up to one, and takes a share of them for the
    next class (the last for the first): people confuse the same classes. The shares are those of
    :func:`error_rates`; which annotator has which is drawn.

    Args:
        labels: The true labels, 0 to ``classes - 1``.
        classes: The number of classes, at least 2.
        corruption: The share of wrong labels of all annotators together, about.
        annotators: The number of annotators.
        generator: The source of randomness, on the CPU.

    Returns:
        The new labels, the mask of the wrong ones, and the number of each sample's annotator.
    """
    n = len(labels)
    rates = error_rates(corruption, annotators)[torch.randperm(annotators, generator=generator)]
    annotator = torch.randperm(n, generator=generator) % annotators
    order = torch.randperm(n, generator=generator)
    corrupted = torch.zeros(n, dtype=torch.bool)
    for number, rate in enumerate(rates.tolist()):
        own = order[annotator[order] == number]
        corrupted[own[: round(rate * len(own))]] = True
    return torch.where(corrupted, (labels + 1) % classes, labels), corrupted, annotator


class Annotated(CleaningData):
    """Mix into a data module for cleaning: annotators have given its labels.

    The batch of the lower level has the number of each sample's annotator as its last entry.
    """

    annotators: Tensor

    def load(self, generator: torch.Generator) -> Splits:
        splits = super().load(generator)
        self._annotated = annotated_labels(
            splits.train[1], self.classes, self.corruption, generator=generator
        )
        return splits

    def setup(self, stage: str | None = None) -> None:
        if self.lower is None:
            super().setup(stage)
            noisy, self.corrupted, self.annotators = self._annotated
            whole: Any = self.lower
            self.lower = whole[0], noisy, whole[2], self.annotators


def annotated(data: type[Any]) -> type[Any]:
    """Return a class of data for cleaning with labels by annotators."""
    return type(f"Annotated{data.__name__}", (Annotated, data), {})
