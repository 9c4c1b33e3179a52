"""Data for hyper-cleaning: a training set with some wrong labels, and a clean validation set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.data.corruption import LabelNoise, corrupt_labels
from lightning_bilevel.data.fullbatch import FullBatchDataModule, Repeated
from lightning_bilevel.data.growing import Growing
from lightning_bilevel.data.samples import (
    AnyDataset,
    Samples,
    as_images,
    check_labels,
    check_positive,
    common_images,
    read_dataset,
)

__all__ = ["CleaningData", "DatasetCleaning", "Splits"]


class Splits(NamedTuple):
    """The three sets before labels are corrupted; without a test set no test error is logged."""

    train: Samples
    validation: Samples
    test: Samples | None


class Table(TensorDataset):
    """Tensors from which a DataLoader cuts a batch in one piece.

    To pick samples one by one and stack them takes longer than a step of a small network.
    """

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        chosen = torch.as_tensor(indices)
        return tuple(tensor.index_select(0, chosen) for tensor in self.tensors)


def as_it_is(batch: Any) -> Any:
    return batch


class Parts(Repeated):
    """A loader that yields the parts of a batch one after another."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(parts, len(parts))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batch)


class CleaningData(FullBatchDataModule):
    """A training set with wrong labels and a clean validation set, as full or mini-batches.

    The upper level f has the validation set as its batch, ``(images, labels)``. The lower level g
    has the training set, ``(images, noisy labels, index)``, where the index numbers the samples.
    Validation uses the validation set as loader 0 and the test set as loader 1. Images are float32
    of shape (N, C, H, W).

    With a batch size both levels come from ordinary DataLoaders in random order, each of its own
    length: an epoch goes through the longer one once and starts the shorter one again. The samples
    of a lower batch still carry their numbers. Validation and test sets are not split by it.

    This is the base class of the ready data sets. For your own data use :meth:`from_datasets`, or
    write a subclass with :meth:`load`. All random draws depend on the seed alone: they neither use
    nor change torch's global random state.

    Args:
        n_train: The number of training samples.
        n_validation: The number of validation samples, disjoint from the training samples.
        n_test: The number of test samples; None takes all of them.
        corruption: The share of training labels that are made wrong, between 0 and 1.
        kind: A wrong label is any of the other classes (``uniform``), or the next class (``pair``).
        seed: Decides the samples of each set, their order, and the wrong labels.
        epoch_length: Outer iterations per epoch; validation, checkpoints and the progress bar come
            at the end of an epoch.
        chunk_size: The largest number of samples that are evaluated at once; None evaluates each
            set as a whole.
        batch_size: The number of training samples in a mini-batch, for solvers that are
            ``stochastic``; None trains on full batches. An epoch is then one pass over the data,
            and ``epoch_length`` is not used.
        upper_batch_size: The number of validation samples in a mini-batch; None takes
            ``batch_size``. A set that is smaller is taken whole.
        growing: Begin with a sample of both levels, which grows until it is all data; None has all
            data in each step. Weights outside the sample stay as they are.

    Attributes:
        n_train: The number of training samples.
        classes: The number of classes.
        image_shape: The shape of an image, (C, H, W).
        corrupted: The mask of the training samples with a wrong label; None if it is not known.
            Set by ``setup``.
        clean_labels: The true labels of the training samples; None if they are not known. Set by
            ``setup``.
    """

    classes: int
    image_shape: tuple[int, ...]
    corrupted: Tensor | None = None
    clean_labels: Tensor | None = None

    def __init__(
        self,
        n_train: int = 5000,
        n_validation: int = 5000,
        n_test: int | None = None,
        corruption: float = 0.5,
        kind: LabelNoise = "uniform",
        seed: int = 0,
        epoch_length: int = 100,
        chunk_size: int | None = None,
        batch_size: int | None = None,
        upper_batch_size: int | None = None,
        growing: Growing | None = None,
    ) -> None:
        super().__init__(epoch_length=epoch_length, growing=growing)
        if batch_size is None and upper_batch_size is not None:
            raise ValueError(
                f"`{type(self).__name__}(upper_batch_size={upper_batch_size})` needs `batch_size` "
                "too: mini-batches are for both levels, full batches for both."
            )
        if batch_size is not None and growing is not None:
            raise ValueError(
                f"`{type(self).__name__}(growing=..., batch_size={batch_size})` must be given one "
                "of the two: a growing sample is fixed within its stage."
            )
        self.n_train = n_train
        self.n_validation = n_validation
        self.n_test = n_test
        self.corruption = corruption
        self.kind = kind
        self.seed = seed
        self.chunk_size = chunk_size
        self.batch_size = batch_size
        self.upper_batch_size = upper_batch_size
        check_positive(self, "n_train", "n_validation", "n_test")
        check_positive(self, "chunk_size", "batch_size", "upper_batch_size")

    @classmethod
    def from_datasets(  # type: ignore[override]  # Lightning's has the arguments of DataLoaders
        cls,
        train: AnyDataset,
        validation: AnyDataset,
        test: AnyDataset | None = None,
        corrupted: Sequence[bool] | Tensor | None = None,
        **options: Any,
    ) -> DatasetCleaning:
        """Take any Datasets of (image, label) pairs; their labels are not changed.

        Args:
            train: The training set; the weights follow its order.
            validation: The clean validation set.
            test: The test set, if there is one.
            corrupted: The mask of the training samples with a wrong label, if it is known.
            options: The other arguments of :class:`DatasetCleaning`.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> train = TensorDataset(torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2]))
            >>> validation = TensorDataset(torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2]))
            >>> data = CleaningData.from_datasets(train, validation)
            >>> data.n_train, data.classes, data.image_shape
            (6, 3, (1, 8, 8))
        """
        return DatasetCleaning(train, validation, test, corrupted, **options)

    def load(self, generator: torch.Generator) -> Splits:
        """Return the three sets with their true labels, drawn with the generator."""
        raise NotImplementedError(f"`{type(self).__name__}` must define `load(generator)`.")

    def setup(self, stage: str | None = None) -> None:
        """Load the data and corrupt the labels, once: all stages use the same data."""
        if self.lower is not None:
            return
        generator = torch.Generator().manual_seed(self.seed)
        sets: dict[str, Samples] = {}
        for name, samples in self.load(generator)._asdict().items():
            if samples is not None:
                images = as_images(self._of(name), samples[0])
                labels = check_labels(self._of(name), samples[1], len(images), self.classes)
                sets[name] = images, labels
        images, self.clean_labels = sets["train"]
        self.image_shape = tuple(images.shape[1:])
        for name, (others, _) in sets.items():
            if others.shape[1:] != images.shape[1:]:
                raise ValueError(
                    f"`{self._of(name)}` has images of shape {tuple(others.shape[1:])} and "
                    f"`{self._of('train')}` of shape {self.image_shape}: all must have the same "
                    "size."
                )
        self.lower = self._batch(images, *self.corrupt(self.clean_labels, generator))
        self.upper = self.validation = self._batch(*sets["validation"])
        self.test = self._batch(*sets["test"]) if "test" in sets else None

    def corrupt(self, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return noisy labels and sample numbers; override it for another noise."""
        noisy, self.corrupted = corrupt_labels(
            labels, self.classes, self.corruption, self.kind, generator=generator
        )
        return noisy, torch.arange(len(labels))

    def train_dataloader(self) -> Any:
        """Return the full batch again and again, or a loader of mini-batches for each level."""
        if self.batch_size is None:
            return super().train_dataloader()
        sizes = {"upper": self.upper_batch_size or self.batch_size, "lower": self.batch_size}
        return {
            level: DataLoader(
                Table(*map(torch.cat, zip(*as_chunks(getattr(self, level)).batches, strict=True))),
                batch_size=size,
                shuffle=True,
                collate_fn=as_it_is,
            )
            for level, size in sizes.items()
        }

    def val_dataloader(self) -> list[Repeated]:
        """Return the validation set and, if there is one, the test set."""
        names = ("validation", "test")
        return [self._evaluation(name) for name in names if getattr(self, name) is not None]

    def _evaluation(self, name: str) -> Repeated:
        return Parts(self._moved(as_chunks(getattr(self, name)).batches))

    def _of(self, name: str) -> str:
        return f"{type(self).__name__}({name}=...)"

    def _batch(self, *tensors: Tensor) -> Any:
        if self.chunk_size is None:
            return tensors
        return list(zip(*(torch.split(tensor, self.chunk_size) for tensor in tensors), strict=True))


class DatasetCleaning(CleaningData):
    """Your own data: torch Datasets of (image, label) pairs, which the constructor reads once.

    An image is a tensor (bytes from 0 to 255, or floats, which are not rescaled), a PIL image or an
    array; a vector of features works as well. The samples keep their order, so weight i belongs to
    sample i of the training set.

    Args:
        train: The training set.
        validation: The clean validation set; it must share no image with the training set.
        test: The test set, if there is one.
        corrupted: The mask of the training samples with a wrong label, if it is known.
        classes: The number of classes; None takes the largest label plus one.
        corruption: The share of training labels that are made wrong, between 0 and 1; for
            experiments with clean data.
        options: The other arguments of :class:`CleaningData`.
    """

    def __init__(
        self,
        train: AnyDataset,
        validation: AnyDataset,
        test: AnyDataset | None = None,
        corrupted: Sequence[bool] | Tensor | None = None,
        classes: int | None = None,
        corruption: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(
            n_train=len(train),  # type: ignore[arg-type]
            n_validation=len(validation),  # type: ignore[arg-type]
            n_test=None if test is None else len(test),  # type: ignore[arg-type]
            corruption=corruption,
            **options,
        )
        self._datasets = {"train": train, "validation": validation}
        if test is not None:
            self._datasets["test"] = test
        self._classes = classes
        mask = None if corrupted is None else self._mask(corrupted)
        self.setup()
        # No label was changed here, so only the user's mask says which ones are wrong.
        if corruption == 0:
            self.corrupted = mask
            self.clean_labels = None

    def load(self, generator: torch.Generator) -> Splits:
        sets = {name: read_dataset(self._of(name), data) for name, data in self._datasets.items()}
        common = common_images(sets["train"][0], sets["validation"][0])
        if common:
            pairs = ", ".join(f"{j} is training image {i}" for i, j in common[:5])
            raise ValueError(
                f"`{self._of('validation')}` has {len(common)} of the training images ({pairs}"
                f"{', ...' if len(common) > 5 else ''}): leave them out of one of the two."
            )
        self.classes = self._classes or max(int(labels.max()) for _, labels in sets.values()) + 1
        return Splits(sets["train"], sets["validation"], sets.get("test"))

    def _mask(self, corrupted: Sequence[bool] | Tensor) -> Tensor:
        mask = torch.as_tensor(corrupted).cpu()
        if mask.dtype != torch.bool or mask.shape != (self.n_train,) or self.corruption:
            raise ValueError(
                f"`{self._of('corrupted')}` must be a mask of True and False, one for each of the "
                f"{self.n_train:,} training samples, and cannot be given together with "
                "`corruption`."
            )
        return mask
