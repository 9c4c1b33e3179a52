"""Full-batch data, moved once; all of them in each step, or a nested sample that grows to all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_bilevel.core.chunks import Chunks, as_chunks, map_tensors, samples_in, tensors
from lightning_bilevel.data.samples import check_positive

# The first sample, if none is given: this share of the data, and not fewer samples than that.
_SHARE, _LEAST = 32, 256


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


class Parts(list[Any]):
    """A loader for evaluation: the parts of a batch. Lightning takes a plain list for loaders."""


@dataclass(frozen=True)
class Growing:
    """A random sample of the data that grows from stage to stage until it is all data.

    A stage of m samples has m of each level, or all of a level that has fewer. Each stage is the
    solver's own algorithm on a smaller problem, and the last one is a run on all data.

    Args:
        start: The samples of the first stage; None is 1/32 of the data, and at least 256. With as
            many as the data or more there is one stage, which is a run on all data.
        factor: A stage has so many times as many samples as the one before, or more.
        every: The outer iterations of a stage.
        seed: Decides the samples.
    """

    start: int | None = None
    factor: float = 4.0
    every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "start", "every")
        if not 1.0 < self.factor < float("inf"):
            raise ValueError(f"`Growing(factor={self.factor})` must be above 1 and finite.")

    def sizes(self, total: int) -> list[int]:
        """Return the samples of each stage, for so many in all.

        Example:
            >>> Growing(start=1000).sizes(50_000), Growing().sizes(5000), Growing().sizes(200)
            ([1000, 4000, 16000, 50000], [256, 1024, 5000], [200])
        """
        sizes = [min(self.start or max(_LEAST, total // _SHARE), total)]
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
        share: The shares of the upper and the lower level's data; None for all data.
    """

    def __init__(self, growing: Growing, batch: dict[str, Any]) -> None:
        self.batch = batch
        self._every = growing.every
        self._orders = {
            name: _order(name, batch[name], growing.seed) for name in ("upper", "lower")
        }
        self.sizes = growing.sizes(max(map(len, self._orders.values())))
        self.number, self.begins = -1, False
        self.share: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"a sample of {self.sizes[self.number]:,} of {self.sizes[-1]:,} samples"

    def at(self, iteration: int) -> dict[str, Any]:
        """Return the batch of an outer iteration, counted from 0: one object for each stage.

        The batch of the last stage is the given batch itself.
        """
        number = min(iteration // self._every, len(self.sizes) - 1)
        self.begins = 0 < number == iteration / self._every
        if number != self.number:
            self.number, size = number, self.sizes[number]
            taken = {
                name: _taken(self.batch[name], order, size)
                for name, order in self._orders.items()
                if size < len(order)
            }
            self._sample = {**self.batch, **taken} if taken else self.batch
            upper, lower = (min(size / max(len(o), 1), 1.0) for o in self._orders.values())
            self.share = (upper, lower) if taken else None
        return self._sample


def _taken(batch: Any, order: Tensor, size: int) -> Any:
    """Return the first samples of an order, from each chunk of a batch."""
    chunks = as_chunks(batch).batches
    mask = torch.zeros(len(order), dtype=torch.bool)
    mask[order[:size]] = True
    masks = torch.split(mask, [samples_in(chunk) for chunk in chunks])
    parts = [
        map_tensors(lambda t, mask=mask: t[mask.to(t.device)] if t.ndim else t, chunk)  # type: ignore[misc]
        for chunk, mask in zip(chunks, masks, strict=True)
        if mask.any()
    ]
    return parts[0] if len(parts) == 1 else Chunks(parts)


def _order(level: str, batch: Any, seed: int) -> Tensor:
    """Return an order of the samples, stratified by the labels of (inputs, labels, ...)."""
    chunks = as_chunks(batch)
    lengths = [{len(tensor) for tensor in tensors(part) if tensor.ndim} for part in chunks.batches]
    if chunks.weights is not None or max(map(len, lengths)) > 1:
        raise ValueError(
            f"`growing` was given a {level} batch that it cannot draw from: the first dimension of "
            "each tensor must count the samples, and `Chunks` must have no weights."
        )
    return stratified_permutation(torch.cat([_classes(part) for part in chunks.batches]), seed)


def _classes(part: Any) -> Tensor:
    """Return the class of each sample; one for all, where the labels are none."""
    labels = part[1] if isinstance(part, (tuple, list)) and part[1:] else None
    if isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point():
        return labels.cpu()
    return torch.zeros(samples_in(part), dtype=torch.int64)


def stratified_permutation(classes: Tensor, seed: int) -> Tensor:
    r"""Return the numbers 0, ..., n - 1 in a random order, each beginning of which is a sample.

    Each beginning is stratified. Member j of a class of :math:`n_c` samples, counted from 0 in a
    random order of the class, has the place :math:`(j + u_c)/n_c`, with :math:`u_c` drawn uniformly
    from [0, 1) for each class. All samples are sorted by it. Two classes are then represented
    alike, up to one sample of each.

    The order depends on the arguments alone: it neither uses nor changes torch's random state.

    Args:
        classes: The class of each sample.
        seed: Decides the order.

    Example:
        >>> classes = torch.tensor([0, 0, 0, 0, 1, 1])
        >>> classes[stratified_permutation(classes, seed=0)[:3]].sort().values
        tensor([0, 0, 1])
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(len(classes), generator=generator, device="cpu")
    labels, numbers, counts = torch.unique(classes, return_inverse=True, return_counts=True)
    offsets = torch.rand(len(labels), generator=generator, dtype=torch.float64, device="cpu")
    # The samples class by class, and in random order within each.
    by_class = order[torch.argsort(numbers[order], stable=True)]
    firsts = counts.cumsum(0) - counts
    numbers = numbers[by_class]
    rank = torch.arange(len(classes), device="cpu") - firsts[numbers]
    places = (rank + offsets[numbers]) / counts[numbers]
    return by_class[torch.argsort(places, stable=True)]


class FullBatchDataModule(LightningDataModule):
    """Yields the same full batch at each step: one batch is one outer iteration.

    A subclass sets ``upper``, ``lower``, ``validation`` and ``test`` in its ``setup``. A problem
    without data needs none of them; the batch of its steps is ``{}``.

    Args:
        upper: The batch of the upper level, or its chunks.
        lower: The batch of the lower level, or its chunks.
        validation: The batch of ``validation_step``, or its chunks, one call each; without one
            there is no validation.
        test: The batch of ``test_step`` and ``predict_step``, or its chunks.
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
        return self._evaluation("validation") if self._has("validation") else []

    def test_dataloader(self) -> Parts:
        return self._evaluation("test")

    def predict_dataloader(self) -> Parts:
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

    def _evaluation(self, name: str) -> Parts:
        if not self._has(name):
            raise MisconfigurationException(
                f"`{type(self).__name__}` has no {name} set: give it one, or leave out what uses "
                "it."
            )
        batch = self._batch_of(name)
        return Parts([{}] if batch is None else as_chunks(self._moved(batch)).batches)

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
