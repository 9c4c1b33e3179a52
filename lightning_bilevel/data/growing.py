"""A nested sample of the data that grows by a schedule until it is all data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.chunks import Chunks, as_chunks, map_tensors, samples_in, tensors
from lightning_bilevel.data.samples import check_positive

__all__ = ["Growing", "NestedSample", "stratified_permutation"]

# The first sample, if none is given: this share of the data, and not fewer samples than that.
_SHARE, _LEAST = 32, 256


@dataclass(frozen=True)
class Growing:
    """A random sample of the data that grows from stage to stage until it is all data.

    A stage of m samples has m of each level, or all of a level that has fewer. Each stage is the
    solver's own algorithm on a smaller problem, and the last one is a run on all data.

    Args:
        start: The samples of the first stage; None is 1/32 of the data, and at least 256. With as
            many as the data or more there is one stage, which is a run on all data.
        factor: A stage has so many times as many samples as the one before, or more.
        every: The outer iterations of a stage.
        seed: Decides the samples.
    """

    start: int | None = None
    factor: float = 4.0
    every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "start", "every")
        if not 1.0 < self.factor < float("inf"):
            raise ValueError(f"`Growing(factor={self.factor})` must be above 1 and finite.")

    def sizes(self, total: int) -> list[int]:
        """Return the samples of each stage, for so many in all.

        Example:
            >>> Growing(start=1000).sizes(50_000), Growing().sizes(5000), Growing().sizes(200)
            ([1000, 4000, 16000, 50000], [256, 1024, 5000], [200])
        """
        sizes = [min(self.start or max(_LEAST, total // _SHARE), total)]
        # A last stage that is hardly larger than the one before would be no stage of its own.
        while sizes[-1] * self.factor**1.5 < total:
            sizes.append(max(int(sizes[-1] * self.factor), sizes[-1] + 1))
        return sizes if sizes[-1] == total else [*sizes, total]


class NestedSample:
    """The stages of one batch, ``{"upper": ..., "lower": ...}``.

    Args:
        growing: How it grows.
        batch: All data.

    Attributes:
        sizes: The samples of each stage.
        number: The stage of the iteration that :meth:`at` was last called for.
        begins: Whether a later stage than the first began with that iteration.
        share: The shares of the upper and the lower level's data; None for all data.
    """

    def __init__(self, growing: Growing, batch: dict[str, Any]) -> None:
        self.batch = batch
        self._every = growing.every
        self._chunks = {level: as_chunks(batch[level]) for level in ("upper", "lower")}
        self._orders = {
            level: _order(level, chunks, growing.seed) for level, chunks in self._chunks.items()
        }
        self.sizes = growing.sizes(max(map(len, self._orders.values())))
        self.number, self.begins = -1, False
        self.share: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"a sample of {self.sizes[self.number]:,} of {self.sizes[-1]:,} samples"

    def at(self, iteration: int) -> dict[str, Any]:
        """Return the batch of an outer iteration, counted from 0: one object for each stage.

        The batch of the last stage is the given batch itself.
        """
        number = min(iteration // self._every, len(self.sizes) - 1)
        self.begins = 0 < number == iteration / self._every
        if number != self.number:
            self.number, size = number, self.sizes[number]
            taken = {
                level: self._taken(level, order[:size].sort().values)
                for level, order in self._orders.items()
                if size < len(order)
            }
            self._sample = {**self.batch, **taken} if taken else self.batch
            upper, lower = (min(size / max(len(o), 1), 1.0) for o in self._orders.values())
            self.share = (upper, lower) if taken else None
        return self._sample

    def _taken(self, level: str, index: Tensor) -> Any:
        """Return some samples of a level, from each of its chunks."""
        parts, start = [], 0
        for chunk in self._chunks[level].batches:
            end = start + samples_in(chunk)
            mine = index[(start <= index) & (index < end)] - start
            if len(mine):
                parts.append(map_tensors(partial(_picked, index=mine), chunk))
            start = end
        return parts[0] if len(parts) == 1 else Chunks(parts)


def _picked(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor[index.to(tensor.device)] if tensor.ndim else tensor


def stratified_permutation(n: int, seed: int, classes: Tensor | None = None) -> Tensor:
    r"""Return the numbers 0, ..., n - 1 in a random order, each beginning of which is a sample.

    With classes, each beginning is stratified. Member j of a class of :math:`n_c` samples, counted
    from 0 in a random order of the class, has the place :math:`(j + u_c)/n_c`, with :math:`u_c`
    drawn uniformly from [0, 1) for each class. All samples are sorted by it. Two classes are then
    represented alike, up to one sample of each.

    The order depends on the arguments alone: it neither uses nor changes torch's random state.

    Example:
        >>> classes = torch.tensor([0, 0, 0, 0, 1, 1])
        >>> classes[stratified_permutation(6, seed=0, classes=classes)[:3]].sort().values
        tensor([0, 0, 1])
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(n, generator=generator, device="cpu")
    if classes is None:
        return order
    labels, numbers, counts = torch.unique(classes, return_inverse=True, return_counts=True)
    offsets = torch.rand(len(labels), generator=generator, dtype=torch.float64, device="cpu")
    # The samples class by class, and in random order within each.
    by_class = order[torch.argsort(numbers[order], stable=True)]
    firsts = counts.cumsum(0) - counts
    numbers = numbers[by_class]
    rank = torch.arange(n, device="cpu") - firsts[numbers]
    places = (rank + offsets[numbers]) / counts[numbers]
    return by_class[torch.argsort(places, stable=True)]


def _order(level: str, chunks: Chunks, seed: int) -> Tensor:
    counts = list(map(samples_in, chunks.batches))
    lengths = [{len(tensor) for tensor in tensors(part) if tensor.ndim} for part in chunks.batches]
    if chunks.weights is not None or any(len(each) > 1 for each in lengths):
        raise ValueError(
            f"`growing` was given a {level} batch that it cannot draw from: the first dimension of "
            "each tensor must count the samples, and `Chunks` must have no weights."
        )
    # The labels of a batch (inputs, labels, ...), if they are classes.
    given = [part[1] for part in chunks.batches if isinstance(part, (tuple, list)) and part[1:]]
    labels = [label.cpu() for label in given if isinstance(label, Tensor) and label.ndim == 1]
    whole = len(labels) == len(counts) and not labels[0].is_floating_point()
    return stratified_permutation(sum(counts), seed, torch.cat(labels) if whole else None)
