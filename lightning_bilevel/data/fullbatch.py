"""Full-batch data: every step gets the same batch, which is collated and moved only once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from lightning_bilevel.data.growing import Growing, NestedSample

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

    sample: NestedSample

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
        if epoch_length < 1:
            raise ValueError(
                f"`{type(self).__name__}(epoch_length={epoch_length})` must be at least 1."
            )
        self.upper = upper
        self.lower = lower
        self.validation = validation
        self.test = test
        self.epoch_length = epoch_length
        self.growing = growing

    def train_dataloader(self) -> Repeated:
        callbacks = getattr(self.trainer, "callbacks", ())
        if any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
            raise MisconfigurationException(
                f"`BatchSizeFinder` cannot work on a `{type(self).__name__}`: a full batch has no "
                "batch size to find. `Chunks` evaluates a batch that is larger than memory."
            )
        levels = {"upper": self.upper, "lower": self.lower}
        missing = [name for name, batch in levels.items() if batch is None]
        if len(missing) == 1:
            raise MisconfigurationException(
                f"`{type(self).__name__}({missing[0]}=None)` has a batch of the other level alone: "
                f"give `{missing[0]}` too, `{{}}` if its loss needs no data."
            )
        loader = self._loader({name: self._batch_of(name) for name in levels}, self.epoch_length)
        if self.growing is None or self.trainer is None:
            return loader
        return Grown(NestedSample(self.growing, loader.batch), loader.length, self.trainer)

    def val_dataloader(self) -> Any:
        if self._has("validation"):
            return self._loader(self._batch_of("validation"), 1)
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
            raise MisconfigurationException(
                f"`{type(self).__name__}` has no validation set: give it one, or do not validate."
            )
        return NoValidation()

    def test_dataloader(self) -> Repeated:
        if not self._has("test"):
            raise MisconfigurationException(
                f"`{type(self).__name__}` has no test set: give it one, or do not test."
            )
        return self._loader(self._batch_of("test"), 1)

    def predict_dataloader(self) -> Repeated:
        """Return the test set."""
        if self.test is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}` has no test set, which is what it predicts: give it one, "
                "or give `Trainer.predict(dataloaders=...)` what to predict."
            )
        return self.test_dataloader()

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return batch  # `_loader` has moved it

    def _has(self, name: str) -> bool:
        """Whether to validate or test; a problem without any data needs no batch for that."""
        return getattr(self, name) is not None or (self.upper is None and self.lower is None)

    def _batch_of(self, name: str) -> Any:
        batch = getattr(self, name)
        if isinstance(batch, (DataLoader, CombinedLoader, Dataset)):
            if name in ("upper", "lower"):
                advice = 'pass `{"upper": loader, "lower": loader}` to `Trainer.fit`'
            else:
                advice = "pass the loader to the Trainer"
            raise MisconfigurationException(
                f"`{type(self).__name__}({name}=...)` is a {type(batch).__name__}: it must be a "
                "batch, which is handed out as it is. Give its tensors, such as `(inputs, "
                f"labels)`; or, for batches that change, {advice}."
            )
        return batch

    def _loader(self, batch: Any, length: int) -> Repeated:
        if self.trainer is not None:
            # Convert and move the batch once here, so that no step has to do it.
            batch = self.trainer.precision_plugin.convert_input(batch)
            batch = move_data_to_device(batch, self.trainer.strategy.root_device)
        return Repeated({} if batch is None else batch, length)
