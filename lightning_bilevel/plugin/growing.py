"""A growing sample: the stages of a run that ends on all data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.chunks import Chunks, as_chunks, samples_in
from lightning_bilevel.core.leaves import map_tensors, tensors
from lightning_bilevel.core.nested import nested_order
from lightning_bilevel.core.stage import Stage
from lightning_bilevel.plugin.processes import cut

__all__ = ["Growing", "NestedSample"]

LEVELS = ("upper", "lower")
# The first sample, if none is given: a share of the data, and not fewer than this.
_LEAST = 256
_SHARE = 32


@dataclass(frozen=True)
class Growing:
    """A random sample of the data that grows from stage to stage until it is all data.

    In a stage all evaluations are of the same sample, so each stage is the solver's own algorithm
    on a smaller problem. Samples are nested, and drawn by the seed alone. A stage of m samples has
    m of each level, or all of a level that has fewer.

    Args:
        start: The samples of the first stage; None is 1/32 of the data, and at least 256. With as
            many as the data there is one stage, which is a run on all data.
        factor: A stage has so many times as many samples as the one before, or more.
        every: Grow after so many outer iterations of a stage; None grows by what the run shows,
            where the solver can tell (IVSP), and else after 50.
        stratified: Whether the samples of each class grow alike, where a batch is (inputs, labels,
            ...) with whole numbers as labels.
        seed: Decides the samples.
    """

    start: int | None = None
    factor: float = 4.0
    every: int | None = None
    stratified: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("start", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`Growing({name}={value})` must be at least 1.")
        if not 1.0 < self.factor < float("inf"):
            raise ValueError(
                f"`Growing(factor={self.factor})` must be above 1 and finite: each stage has more "
                "samples than the one before."
            )

    def sizes(self, total: int) -> list[int]:
        """Return the samples of each stage, for so many in all.

        Example:
            >>> Growing(start=1000).sizes(50_000), Growing().sizes(5000), Growing().sizes(200)
            ([1000, 4000, 16000, 50000], [256, 1024, 5000], [200])
        """
        if self.start is not None and self.start > total:
            raise ValueError(
                f"`Growing(start={self.start:,})` is larger than the data, which have {total:,} "
                "samples: the first sample must be a part of them. Leave `start` out for 1/32 of "
                "the data."
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
    """

    def __init__(self, growing: Growing, batch: dict[str, Any]) -> None:
        self.batch = batch
        self._chunks = {level: as_chunks(batch[level]) for level in LEVELS}
        self.counts = {level: _count(level, self._chunks[level]) for level in LEVELS}
        total = max(self.counts.values())
        if total == 0:
            raise ValueError(
                "`growing` was given data without a length: neither the upper nor the lower batch "
                "has a tensor whose first dimension counts samples. Leave `growing` out; a problem "
                "without data has nothing to draw from."
            )
        self.sizes = growing.sizes(total)
        self._orders: dict[str, Tensor] = {}
        for level, count in self.counts.items():
            # A level that is whole in each stage is drawn from for the parts alone.
            stratified = growing.stratified and self.sizes[0] < count
            classes = _classes(self._chunks[level]) if stratified else None
            if count:
                self._orders[level] = nested_order(count, growing.seed, classes)

    def stage(self, number: int, parts: int = 1) -> Stage:
        """Return how much of all data a stage is, or one of its parts."""
        size = self.sizes[number]
        shares = [
            len(self._part(level, number, 0, parts)) / count if count else 1.0
            for level, count in self.counts.items()
        ]
        return Stage(size, self.sizes[-1], *shares)

    def at(self, number: int) -> dict[str, Any]:
        """Return the batch of a stage; that of the last one is the given batch itself."""
        size = self.sizes[number]
        return {
            **self.batch,
            **{
                level: self._taken(level, order[:size].sort().values)
                for level, order in self._orders.items()
                if size < self.counts[level]
            },
        }

    def entering(self, number: int) -> tuple[Any, float] | None:
        """Return the lower level's samples that a stage has and the one before has not.

        With them comes their share of all; None if there are none.
        """
        order = self._orders.get("lower")
        before, size = self.sizes[number - 1 : number + 1]
        if order is None or before >= len(order):
            return None
        index = order[before:size]
        return self._taken("lower", index), len(index) / len(order)

    def unseen(self, number: int) -> tuple[dict[str, Any], Stage]:
        """Return samples that a stage has not, half as many as it has, and their share of all.

        They are the first that the next stage will have. A level that has no others is whole.
        """
        size = self.sizes[number]
        taken = {
            level: order[size : size + max(size // 2, 1)]
            for level, order in self._orders.items()
            if size < len(order)
        }
        batch = {level: self._taken(level, index) for level, index in taken.items()}
        shares = (
            len(taken[level]) / count if level in taken else 1.0
            for level, count in self.counts.items()
        )
        return {**self.batch, **batch}, Stage(size, self.sizes[-1], *shares)

    def parts(self, number: int, count: int) -> list[dict[str, Any]]:
        """Return parts of a stage, about equally large and stratified as it is.

        They are disjoint, unless a level has fewer samples than there are parts: then each has all.
        """
        return [
            {
                **self.batch,
                **{
                    level: self._taken(level, self._part(level, number, i, count))
                    for level in self._orders
                },
            }
            for i in range(count)
        ]

    def _part(self, level: str, number: int, i: int, count: int) -> Tensor:
        taken = self._orders[level][: self.sizes[number]]
        return taken[i::count] if len(taken) >= count else taken

    def _taken(self, level: str, index: Tensor) -> Any:
        """Return some samples of a level, in chunks as long as those of all data."""
        chunks = self._chunks[level].batches
        longest = max(map(samples_in, chunks))
        # The chunks have one structure: the tensors of the first are replaced, one after another.
        columns = iter(list(zip(*map(tensors, chunks), strict=True)))

        def picked(tensor: Tensor) -> Tensor:
            column = next(columns)
            if not tensor.ndim:
                return tensor
            whole = tensor if len(column) == 1 else torch.cat(column)
            return whole[index.to(tensor.device)]

        taken = map_tensors(picked, chunks[0])
        if len(index) <= longest:
            return taken
        return Chunks([cut(taken, i, i + longest) for i in range(0, len(index), longest)])


def _count(level: str, chunks: Chunks) -> int:
    if chunks.weights is not None:
        raise ValueError(
            f"`growing` was given a {level} batch of `Chunks` with weights: a sample of it has no "
            "known weight. Leave the weights out, which then are the numbers of samples."
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
