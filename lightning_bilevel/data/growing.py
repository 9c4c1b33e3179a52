"""A nested sample of the data that grows by a schedule until it is all data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.chunks import Chunks, as_chunks, samples_in
from lightning_bilevel.core.leaves import map_tensors, tensors
from lightning_bilevel.plugin.processes import cut

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
            many as the data there is one stage, which is a run on all data.
        factor: A stage has so many times as many samples as the one before, or more.
        every: The outer iterations of a stage.
        seed: Decides the samples.
    """

    start: int | None = None
    factor: float = 4.0
    every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("start", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`Growing({name}={value})` must be at least 1.")
        if not 1.0 < self.factor < float("inf"):
            raise ValueError(f"`Growing(factor={self.factor})` must be above 1 and finite.")

    def sizes(self, total: int) -> list[int]:
        """Return the samples of each stage, for so many in all.

        Example:
            >>> Growing(start=1000).sizes(50_000), Growing().sizes(5000), Growing().sizes(200)
            ([1000, 4000, 16000, 50000], [256, 1024, 5000], [200])
        """
        if self.start is not None and self.start > total:
            raise ValueError(
                f"`Growing(start={self.start:,})` is larger than the data, which have {total:,} "
                "samples."
            )
        size = min(self.start or max(_LEAST, total // _SHARE), total)
        sizes = [size]
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
    """

    def __init__(self, growing: Growing, batch: dict[str, Any]) -> None:
        self.growing = growing
        self.batch = batch
        self._chunks = {level: as_chunks(batch[level]) for level in ("upper", "lower")}
        counts = {level: _count(level, chunks) for level, chunks in self._chunks.items()}
        if not any(counts.values()):
            raise ValueError(
                "`growing` was given data without a length: neither the upper nor the lower batch "
                "has a tensor whose first dimension counts samples."
            )
        self.sizes = growing.sizes(max(counts.values()))
        self._orders = {
            level: stratified_permutation(count, growing.seed, _classes(self._chunks[level]))
            for level, count in counts.items()
            if count > self.sizes[0]
        }
        self.number, self.begins = 0, False
        self._sample: tuple[int, dict[str, Any]] | None = None

    def __str__(self) -> str:
        return f"a sample of {self.sizes[self.number]:,} of {self.sizes[-1]:,} samples"

    @property
    def is_last(self) -> bool:
        """Whether the sample is all data."""
        return self.number + 1 == len(self.sizes)

    @property
    def share(self) -> tuple[float, float] | None:
        """The shares of the upper and the lower level's data; None for all data."""
        if self.is_last:
            return None
        size = self.sizes[self.number]
        counts = (len(self._orders.get(level, ())) for level in ("upper", "lower"))
        upper, lower = (min(size / count, 1.0) if count else 1.0 for count in counts)
        return upper, lower

    def at(self, iteration: int) -> dict[str, Any]:
        """Return the batch of an outer iteration, counted from 0: one object for each stage.

        The batch of the last stage is the given batch itself.
        """
        every, last = self.growing.every, len(self.sizes) - 1
        self.number = min(iteration // every, last)
        self.begins = 0 < self.number == iteration / every
        if self._sample is None or self._sample[0] != self.number:
            size = self.sizes[self.number]
            taken = {
                level: self._taken(level, order[:size].sort().values)
                for level, order in self._orders.items()
                if size < len(order)
            }
            self._sample = self.number, {**self.batch, **taken} if taken else self.batch
        return self._sample[1]

    def _taken(self, level: str, index: Tensor) -> Any:
        """Return some samples of a level, in chunks as long as those of all data."""
        chunks = self._chunks[level].batches
        longest = max(map(samples_in, chunks))
        # The chunks have one structure: the tensors of the first are replaced, one after another.
        columns = iter(list(zip(*map(tensors, chunks), strict=True)))

        def picked(tensor: Tensor) -> Tensor:
            first, *rest = next(columns)
            whole = torch.cat([first, *rest]) if rest else first
            return whole[index.to(whole.device)] if whole.ndim else whole

        taken = map_tensors(picked, chunks[0])
        if len(index) <= longest:
            return taken
        return Chunks([cut(taken, i, i + longest) for i in range(0, len(index), longest)])


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


def _count(level: str, chunks: Chunks) -> int:
    if chunks.weights is not None:
        raise ValueError(
            f"`growing` was given a {level} batch of `Chunks` with weights: a sample of it has no "
            "known weight."
        )
    for chunk in chunks.batches:
        lengths = sorted({len(tensor) for tensor in tensors(chunk) if tensor.ndim})
        if len(lengths) > 1:
            raise ValueError(
                f"`growing` was given a {level} batch with tensors of lengths "
                f"{', '.join(map(str, lengths))}: the first dimension of each must count the "
                "samples. Keep what is no sample in the module."
            )
    return sum(map(samples_in, chunks.batches))


def _classes(chunks: Chunks) -> Tensor | None:
    """Return the labels of a batch (inputs, labels, ...), if they are classes."""
    parts = []
    for chunk in chunks.batches:
        label = chunk[1] if isinstance(chunk, (tuple, list)) and len(chunk) > 1 else None
        if not isinstance(label, Tensor) or label.ndim != 1 or label.is_floating_point():
            return None
        parts.append(label.cpu())
    return torch.cat(parts)
