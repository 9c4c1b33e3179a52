"""What a batch consists of: its chunks, their samples, and the tensors that it nests.

A batch nests tensors in dicts, lists, tuples, named tuples and dataclasses.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor


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


def as_chunks(batch: Any) -> Chunks:
    """Read a batch as chunks.

    A non-empty list without tensors is a list of chunks. Everything else is one batch.
    """
    if isinstance(batch, Chunks):
        return batch
    if isinstance(batch, list) and batch and not any(isinstance(part, Tensor) for part in batch):
        return Chunks(batch)
    return Chunks([batch])


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor of a batch that has one; 0 if none has."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.ndim), 0)


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of a batch in order, and the keys of its dicts.

    The keys belong to it: two batches may differ in them alone.

    Example:
        >>> list(leaves({"a": [1, (2.0, None)]}))
        ['a', 1, 2.0, None]
    """
    if isinstance(batch, Mapping):
        children = [part for item in batch.items() for part in item]
    elif isinstance(batch, (list, tuple, deque)):
        children = list(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        children = [getattr(batch, field.name) for field in fields(batch)]
    else:
        yield batch
        return
    for child in children:
        yield from leaves(child)


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch in order."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return a batch of the same structure with each tensor replaced; ``batch`` is unchanged."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, (list, tuple, deque)):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, Mapping):
        mapping: Any = copy.copy(batch)
        mapping.update({key: map_tensors(function, value) for key, value in batch.items()})
        return mapping
    if is_dataclass(batch) and not isinstance(batch, type):
        copied: Any = copy.copy(batch)
        for field in fields(batch):
            # A frozen dataclass refuses its own `__setattr__`, and its constructor may take other
            # arguments.
            value = map_tensors(function, getattr(batch, field.name))
            object.__setattr__(copied, field.name, value)
        return copied
    return batch
