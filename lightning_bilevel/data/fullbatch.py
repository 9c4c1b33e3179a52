"""Full-batch data: the same batch at every step, neither collated nor moved again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lightning_bilevel.leaves import tensors

__all__ = ["Chunks", "FullBatchDataModule", "as_chunks", "samples_in"]


@dataclass
class Chunks:
    """A batch that is evaluated in parts, one after another, because it is larger than memory (or than a cache).

    The losses of a module are means over the samples of what they are given, so the whole is the mean of the parts weighted
    by their sizes.

    Args:
        batches: The parts.
        weights: The weight of each; None weights each by its number of samples (the length of its first tensor).
    """

    batches: list[Any]
    weights: list[float] | None = None

    def __post_init__(self) -> None:
        if not self.batches or (self.weights is not None and len(self.weights) != len(self.batches)):
            raise ValueError(
                f"`Chunks` was given {len(self.batches)} batches and {len(self.weights or [])} weights: it needs at least one "
                "batch, and as many weights."
            )

    @property
    def shares(self) -> list[float]:
        """The weights, adding up to one where they count samples."""
        if self.weights is not None:
            return self.weights
        if len(self.batches) == 1:
            return [1.0]
        sizes = [samples_in(batch) for batch in self.batches]
        if not all(sizes):
            raise ValueError("`Chunks` cannot tell how many samples each part has: give `weights`.")
        return [size / sum(sizes) for size in sizes]


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor of a batch; 0 where it has none."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.ndim), 0)


def as_chunks(batch: Any) -> Chunks:
    """Read a batch as chunks: a list that holds no tensor itself is a list of chunks, everything else is one batch."""
    if isinstance(batch, Chunks):
        return batch
    if isinstance(batch, list) and batch and not any(isinstance(part, Tensor) for part in batch):
        return Chunks(batch)
    return Chunks([batch])


class Repeated:
    """A loader that yields one and the same object a number of times.

    It is not a DataLoader, whose sampler, fetcher and collation cost more than a small step of a solver.
    """

    def __init__(self, batch: Any, length: int) -> None:
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, self.length)

    def state_dict(self) -> dict[str, Any]:
        """Tell Lightning that a run can resume in the middle of an epoch: its batches are all the same."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing, see :meth:`state_dict`."""


class FullBatchDataModule(LightningDataModule):
    """Hands out the same full batch at each step: one batch is one outer iteration.

    A subclass sets ``upper``, ``lower``, ``validation`` and ``test`` in its ``setup``; a problem without data needs none.

    Args:
        upper: The batch of the upper level, or its chunks.
        lower: The batch of the lower level, or its chunks.
        validation: The batch that ``validation_step`` is given.
        test: The batch that ``test_step`` is given.
        epoch_length: Outer iterations per epoch, after which validation, checkpoints and the progress bar have their turn.
    """

    def __init__(
        self, upper: Any = None, lower: Any = None, validation: Any = None, test: Any = None, *, epoch_length: int = 100
    ) -> None:
        super().__init__()
        if epoch_length < 1:
            raise ValueError(f"`{type(self).__name__}(epoch_length={epoch_length})` must be at least 1.")
        self.upper, self.lower, self.validation, self.test = upper, lower, validation, test
        self.epoch_length = epoch_length

    def train_dataloader(self) -> Repeated:
        return self._loader({"upper": self.upper, "lower": self.lower}, self.epoch_length)

    def val_dataloader(self) -> Repeated:
        return self._loader(self.validation, 1)

    def test_dataloader(self) -> Repeated:
        return self._loader(self.test, 1)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # it is there already

    def _loader(self, batch: Any, length: int) -> Repeated:
        if self.trainer is not None:
            # Once here, so that the Trainer finds nothing left to convert or to move at any step.
            batch = self.trainer.precision_plugin.convert_input(batch)
            batch = move_data_to_device(batch, self.trainer.strategy.root_device)
        return Repeated({} if batch is None else batch, length)
