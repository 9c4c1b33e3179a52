"""Full-batch data: every step gets the same batch, which is collated and moved only once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from lightning_bilevel.data.growing import Growing, NestedSample
from lightning_bilevel.data.samples import check_positive

__all__ = ["FullBatchDataModule"]


class Repeated:
    """A loader that yields the same object several times.

    It is not a DataLoader: the sampler, fetcher and collation of one cost more than a small step of
    a solver.
    """

    # Tells a bilevel module that all steps see the same data.
    full_batch = True

    def __init__(self, batch: Any, length: int) -> None:
        self.batch = batch
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, self.length)

    def state_dict(self) -> dict[str, Any]:
        """Tell Lightning that a run can resume within an epoch: all batches are the same."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing, see :meth:`state_dict`."""


class Grown(Repeated):
    """A loader that yields the sample that belongs to the outer iteration of a run."""

    def __init__(self, sample: NestedSample, length: int, trainer: Trainer) -> None:
        super().__init__(sample.batch, length)
        self.sample = sample
        self.trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        # A checkpoint restores the number of steps, and with it the stage.
        return (self.sample.at(self.trainer.global_step) for _ in range(self.length))


class NoValidation(CombinedLoader):
    """No loader at all: Lightning skips validation, and warns of an empty loader only."""

    def __init__(self) -> None:
        super().__init__([], "sequential")

    @property
    def flattened(self) -> list[Any]:
        return []

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        """Lightning sets the loaders that it has processed."""


class FullBatchDataModule(LightningDataModule):
    """Yields the same full batch at each step: one batch is one outer iteration.

    A subclass sets ``upper``, ``lower``, ``validation`` and ``test`` in its ``setup``. A problem
    without data needs none of them; the batch of its steps is ``{}``.

    Args:
        upper: The batch of the upper level, or its chunks.
        lower: The batch of the lower level, or its chunks.
        validation: The batch of ``validation_step``; without one there is no validation.
        test: The batch of ``test_step`` and ``predict_step``.
        epoch_length: Outer iterations per epoch; validation, checkpoints and the progress bar come
            at the end of an epoch.
        growing: Begin with a sample of the data, which grows until it is all data; None has all
            data in each step.
    """

    def __init__(
        self,
        upper: Any = None,
        lower: Any = None,
        validation: Any = None,
        test: Any = None,
        *,
        epoch_length: int = 100,
        growing: Growing | None = None,
    ) -> None:
        super().__init__()
        self.upper = upper
        self.lower = lower
        self.validation = validation
        self.test = test
        self.epoch_length = epoch_length
        check_positive(self, "epoch_length")
        self.growing = growing

    def train_dataloader(self) -> Any:
        batch = self._moved({name: self._batch_of(name) for name in ("upper", "lower")})
        if self.growing is None or self.trainer is None:
            return Repeated(batch, self.epoch_length)
        return Grown(NestedSample(self.growing, batch), self.epoch_length, self.trainer)

    def val_dataloader(self) -> Any:
        if self._has("validation"):
            return self._evaluation("validation")
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
            raise self._missing("validation")
        return NoValidation()

    def test_dataloader(self) -> Repeated:
        if not self._has("test"):
            raise self._missing("test")
        return self._evaluation("test")

    def predict_dataloader(self) -> Repeated:
        """Return the test set."""
        return self.test_dataloader()

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        # `_moved` has moved a full batch.
        full = getattr(self.trainer and self.trainer.train_dataloader, "full_batch", False)
        return batch if full else move_data_to_device(batch, device)

    def _has(self, name: str) -> bool:
        """Whether to validate or test; a problem without any data needs no batch for that."""
        return getattr(self, name) is not None or (self.upper is None and self.lower is None)

    def _missing(self, name: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"`{type(self).__name__}` has no {name} set: give it one, or leave out what uses it."
        )

    def _evaluation(self, name: str) -> Repeated:
        batch = self._batch_of(name)
        return Repeated({} if batch is None else self._moved(batch), 1)

    def _batch_of(self, name: str) -> Any:
        batch = getattr(self, name)
        if isinstance(batch, (DataLoader, CombinedLoader, Dataset)):
            raise MisconfigurationException(
                f"`{type(self).__name__}({name}=...)` is a {type(batch).__name__}: give its "
                "tensors, such as `(inputs, labels)`. Pass loaders, for batches that change, to "
                'the Trainer: `{"upper": loader, "lower": loader}` for training.'
            )
        return batch

    def _moved(self, batch: Any) -> Any:
        """Convert and move a batch once, so that no step has to do it."""
        if self.trainer is None:
            return batch
        batch = self.trainer.precision_plugin.convert_input(batch)
        return move_data_to_device(batch, self.trainer.strategy.root_device)
