"""A batch that is evaluated in parts, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_bilevel.core.leaves import tensors

__all__ = ["Chunks", "as_chunks", "samples_in"]


@dataclass
class Chunks:
    """A batch that is larger than memory (or than a cache) and is evaluated in parts.

    The losses of a module are means over the samples of a batch. The loss of the whole batch is
    therefore the mean over the parts, weighted by their sizes.

    Args:
        batches: The parts.
        weights: The weight of each part; None weights each part by its number of samples (the
            length of its first tensor).
    """

    batches: list[Any]
    weights: list[float] | None = None

    @property
    def shares(self) -> list[float]:
        """The weight of each part; weights by the number of samples add up to one."""
        if self.weights is not None:
            return self.weights
        if len(self.batches) == 1:
            return [1.0]
        sizes = [samples_in(batch) for batch in self.batches]
        if not all(sizes):
            raise ValueError("`Chunks` cannot tell how many samples each part has: give `weights`.")
        return [size / sum(sizes) for size in sizes]


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor of a batch that has one; 0 if none has."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.ndim), 0)


def as_chunks(batch: Any) -> Chunks:
    """Read a batch as chunks.

    A non-empty list without tensors is a list of chunks. Everything else is one batch.
    """
    if isinstance(batch, Chunks):
        return batch
    if isinstance(batch, list) and batch and not any(isinstance(part, Tensor) for part in batch):
        return Chunks(batch)
    return Chunks([batch])
