"""Tensors as a Dataset whose batches are cut out in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["TensorTable", "as_it_is"]


class TensorTable(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal length, as torch's TensorDataset.

    A DataLoader asks it for all samples of a batch at once, with :func:`as_it_is` as its
    ``collate_fn``. To pick them one by one and stack them takes longer than a step of a small
    network.

    Args:
        tensors: The tensors; entry i of each is sample i.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a batch; a DataLoader calls this one if it is there."""
        chosen = torch.as_tensor(indices)
        return tuple(tensor.index_select(0, chosen) for tensor in self.tensors)


def as_it_is(batch: Any) -> Any:
    """Collate nothing."""
    return batch
