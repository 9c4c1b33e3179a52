"""Full-batch data: the same batch at every step, neither collated nor moved again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset

__all__ = ["FullBatchDataModule"]


class Repeated:
    """A loader that yields one and the same object a number of times.

    It is not a DataLoader, whose sampler, fetcher and collation cost more than a small step of a
    solver.
    """

    def __init__(self, batch: Any, length: int) -> None:
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, self.length)

    def state_dict(self) -> dict[str, Any]:
        """Tell Lightning that a run can resume in the middle of an epoch: its batches are all the
        same.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing, see :meth:`state_dict`."""


class NoValidation(Repeated):
    """A loader without a batch, at which Lightning skips validation."""

    def __init__(self) -> None:
        super().__init__({}, 0)
        # Lightning asks whether that was the intention; it was.
        warnings.filterwarnings(
            "ignore", message="Total length of `NoValidation` across ranks is zero"
        )


class FullBatchDataModule(LightningDataModule):
    """Hands out the same full batch at each step: one batch is one outer iteration.

    A subclass sets ``upper``, ``lower``, ``validation`` and ``test`` in its ``setup``; a problem
    without data needs none, and its steps are given ``{}``.

    Args:
        upper: The batch of the upper level, or its chunks.
        lower: The batch of the lower level, or its chunks.
        validation: The batch that ``validation_step`` is given; without one there is no validation.
        test: The batch that ``test_step`` and ``predict_step`` are given.
        epoch_length: Outer iterations per epoch, after which validation, checkpoints and the
            progress bar have their turn.
    """

    def __init__(
        self,
        upper: Any = None,
        lower: Any = None,
        validation: Any = None,
        test: Any = None,
        *,
        epoch_length: int = 100,
    ) -> None:
        super().__init__()
        if epoch_length < 1:
            raise ValueError(
                f"`{type(self).__name__}(epoch_length={epoch_length})` must be at least 1."
            )
        self.upper, self.lower, self.validation, self.test = upper, lower, validation, test
        self.epoch_length = epoch_length

    def train_dataloader(self) -> Repeated:
        if self.trainer is not None and any(
            isinstance(c, BatchSizeFinder) for c in self.trainer.callbacks
        ):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                f"`BatchSizeFinder` cannot work on a `{type(self).__name__}`: a full batch has no "
                "batch size to find. `Chunks` evaluates a batch that is larger than memory."
            )
        levels = {"upper": self.upper, "lower": self.lower}
        missing = [name for name, batch in levels.items() if batch is None]
        if len(missing) == 1:
            raise MisconfigurationException(
                f"`{type(self).__name__}({missing[0]}=None)` has a batch of the other level alone: "
                f"give `{missing[0]}` too, "
                "`{}` if its loss needs no data."
            )
        return self._loader({name: self._batch_of(name) for name in levels}, self.epoch_length)

    def val_dataloader(self) -> Repeated | list[Repeated]:
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
        """Return what is tested on."""
        if self.test is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}` has no test set, which is what it predicts: give it one, "
                "or give `Trainer.predict(dataloaders=...)` what to predict."
            )
        return self.test_dataloader()

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return batch  # it is there already

    def _has(self, name: str) -> bool:
        """Whether there is such a batch; a problem without any data is validated and tested all the
        same.
        """
        return getattr(self, name) is not None or (self.upper is None and self.lower is None)

    def _batch_of(self, name: str) -> Any:
        batch = getattr(self, name)
        if isinstance(batch, (DataLoader, CombinedLoader, Dataset)):
            kind, call = type(batch).__name__, type(self).__name__
            way = (
                'pass `{"upper": loader, "lower": loader}` to `Trainer.fit`'
                if name in ("upper", "lower")
                else "pass the loader to the Trainer"
            )
            raise MisconfigurationException(
                f"`{call}({name}=...)` is a {kind}: it must be a batch, which is handed out as it "
                "is. Give its tensors, such as `(inputs, labels)`; or, for batches that change, "
                f"{way}."
            )
        return batch

    def _loader(self, batch: Any, length: int) -> Repeated:
        if self.trainer is not None:
            # Once here, so that the Trainer finds nothing left to convert or to move at any step.
            batch = self.trainer.precision_plugin.convert_input(batch)
            batch = move_data_to_device(batch, self.trainer.strategy.root_device)
        return Repeated({} if batch is None else batch, length)
