"""The tensors and other leaves of a batch.

A batch nests them in dicts, lists, tuples, named tuples and dataclasses.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["leaves", "map_tensors", "tensors"]


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of a batch in order, and the keys of its dicts.

    The keys belong to it: two batches may differ in them alone.

    Example:
        >>> list(leaves({"a": [1, (2.0, None)]}))
        ['a', 1, 2.0, None]
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield key
            yield from leaves(value)
    elif isinstance(batch, (list, tuple, deque)):
        for value in batch:
            yield from leaves(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from leaves(getattr(batch, field.name))
    else:
        yield batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch in order."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return a batch of the same structure with each tensor replaced; ``batch`` is unchanged."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapping: Any = copy.copy(batch)
        for key, value in batch.items():
            mapping[key] = map_tensors(function, value)
        return mapping
    if isinstance(batch, (list, tuple, deque)):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if is_dataclass(batch) and not isinstance(batch, type):
        copied: Any = copy.copy(batch)
        for field in fields(batch):
            # A frozen dataclass refuses its own `__setattr__`, and its constructor may take other
            # arguments.
            value = map_tensors(function, getattr(batch, field.name))
            object.__setattr__(copied, field.name, value)
        return copied
    return batch
