"""Data for hyper-cleaning: a training set with some wrong labels, and a clean validation set.

The digits of scikit-learn are ready; the others are downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.data.fullbatch import FullBatchDataModule, Growing, Parts
from lightning_bilevel.data.samples import (
    AnyDataset,
    Samples,
    check_positive,
    checked,
    draw,
    read_dataset,
)

LabelNoise = Literal["uniform", "pair"]


class Splits(NamedTuple):
    """The three sets before labels are corrupted; without a test set no test error is logged."""

    train: Samples
    validation: Samples
    test: Samples | None = None


def corrupt_labels(
    labels: Tensor,
    classes: int,
    corruption: float,
    kind: LabelNoise = "uniform",
    *,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Replace a share of the labels by wrong ones.

    The random draws do not depend on the rate. With the same generator state, a lower rate corrupts
    a subset of the same samples in the same way, so results at different rates can be compared.

    Args:
        labels: The true labels, 0 to ``classes - 1``.
        classes: The number of classes, at least 2.
        corruption: The share of labels to replace: exactly ``round(corruption * len(labels))``.
        kind: A label becomes any of the other classes with equal probability (``uniform``), or the
            next class (``pair``; the last class becomes the first).
        generator: The source of randomness, on the CPU.

    Returns:
        The new labels, and the mask of those that were replaced.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> labels = torch.tensor([0, 1, 2, 2])
        >>> noisy, corrupted = corrupt_labels(labels, 3, 0.5, "pair", generator=generator)
        >>> int(corrupted.sum()), bool(torch.equal(corrupted, noisy != labels))
        (2, True)
    """
    if classes < 2 or not 0.0 <= corruption <= 1.0 or kind not in ("uniform", "pair"):
        raise ValueError(
            f"`corrupt_labels(classes={classes}, corruption={corruption}, kind={kind!r})` needs "
            "two classes, a share from 0 to 1, and 'uniform' or 'pair'."
        )
    n = len(labels)
    order = torch.randperm(n, generator=generator)
    shift: Tensor | int = 1
    if kind == "uniform":
        shift = torch.randint(1, classes, (n,), generator=generator)
    corrupted = torch.zeros(n, dtype=torch.bool)
    corrupted[order[: round(corruption * n)]] = True
    return torch.where(corrupted, (labels + shift) % classes, labels), corrupted


class Table(TensorDataset):
    """Tensors from which a DataLoader cuts a batch in one piece.

    To pick samples one by one and stack them takes longer than a step of a small network.
    """

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        chosen = torch.as_tensor(indices)
        return tuple(tensor.index_select(0, chosen) for tensor in self.tensors)


class CleaningData(FullBatchDataModule):
    """A training set with wrong labels and a clean validation set, as full or mini-batches.

    The upper level f has the validation set as its batch, ``(images, labels)``. The lower level g
    has the training set, ``(images, noisy labels, index)``, where the index numbers the samples.
    Validation uses the validation set as loader 0 and the test set as loader 1. Images are float32
    of shape (N, C, H, W).

    With a batch size both levels come from ordinary DataLoaders in random order, each of its own
    length: an epoch goes through the longer one once and starts the shorter one again. The samples
    of a lower batch still carry their numbers. Validation and test sets are not split by it.

    This is the base class of the ready data sets. For your own data use :class:`DatasetCleaning`,
    or write a subclass with :meth:`load`. All random draws depend on the seed alone: they neither
    use nor change torch's global random state.

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
        batch_size: The number of samples in a mini-batch of either level, for solvers that are
            ``stochastic``; None trains on full batches. An epoch is then one pass over the data,
            and ``epoch_length`` is not used. A set that is smaller is taken whole.
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
        growing: Growing | None = None,
    ) -> None:
        super().__init__(epoch_length=epoch_length, growing=growing)
        if batch_size and growing:
            raise ValueError("`batch_size` is for mini-batches, `growing` for full batches.")
        self.n_train = n_train
        self.n_validation = n_validation
        self.n_test = n_test
        self.corruption = corruption
        self.kind = kind
        self.seed = seed
        self.chunk_size = chunk_size
        self.batch_size = batch_size
        check_positive(self, "n_train", "n_validation", "n_test", "chunk_size", "batch_size")

    def load(self, generator: torch.Generator) -> Splits:
        """Return the three sets with their true labels, drawn with the generator."""
        raise NotImplementedError(f"`{type(self).__name__}` must define `load(generator)`.")

    def setup(self, stage: str | None = None) -> None:
        """Load the data and corrupt the labels, once: all stages use the same data."""
        if self.lower is not None:
            return
        generator = torch.Generator().manual_seed(self.seed)
        sets = {
            name: checked(self._of(name), samples, self.classes)
            for name, samples in self.load(generator)._asdict().items()
            if samples is not None
        }
        images, self.clean_labels = sets["train"]
        self.image_shape = tuple(images.shape[1:])
        noisy, self.corrupted = corrupt_labels(
            self.clean_labels, self.classes, self.corruption, self.kind, generator=generator
        )
        self.lower = self._batch(images, noisy, torch.arange(len(noisy)))
        self.upper = self.validation = self._batch(*sets["validation"])
        self.test = self._batch(*sets["test"]) if "test" in sets else None

    def train_dataloader(self) -> Any:
        """Return the full batch again and again, or a loader of mini-batches for each level."""
        if self.batch_size is None:
            return super().train_dataloader()
        return {
            level: DataLoader(
                Table(*map(torch.cat, zip(*as_chunks(getattr(self, level)).batches, strict=True))),
                batch_size=self.batch_size,
                shuffle=True,
                collate_fn=tuple,
            )
            for level in ("upper", "lower")
        }

    def val_dataloader(self) -> list[Parts]:
        """Return the validation set and, if there is one, the test set."""
        return [self._evaluation(name) for name in ("validation", "test") if self._has(name)]

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
        validation: The clean validation set; no image of it should be in the training set.
        test: The test set, if there is one.
        corrupted: The mask of the training samples with a wrong label, if it is known and
            ``corruption`` is 0.
        classes: The number of classes; None takes the largest label plus one.
        corruption: The share of training labels that are made wrong, between 0 and 1; for
            experiments with clean data.
        options: The other arguments of :class:`CleaningData`.

    Example:
        >>> train = TensorDataset(torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2]))
        >>> validation = TensorDataset(torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2]))
        >>> data = DatasetCleaning(train, validation)
        >>> data.n_train, data.classes, data.image_shape
        (6, 3, (1, 8, 8))
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
        given = {"train": train, "validation": validation, "test": test}
        self._datasets = {name: data for name, data in given.items() if data is not None}
        self._classes = classes
        mask = None if corrupted is None else torch.as_tensor(corrupted, dtype=torch.bool).cpu()
        if mask is not None and (mask.shape != (self.n_train,) or corruption):
            raise ValueError(
                f"`{self._of('corrupted')}` must be True or False for each of the "
                f"{self.n_train:,} training samples, and needs `corruption=0`."
            )
        self.setup()
        # No label was changed here, so only the user's mask says which ones are wrong.
        if corruption == 0:
            self.corrupted = mask
            self.clean_labels = None

    def load(self, generator: torch.Generator) -> Splits:
        sets = {name: read_dataset(self._of(name), data) for name, data in self._datasets.items()}
        self.classes = self._classes or max(int(labels.max()) for _, labels in sets.values()) + 1
        return Splits(**sets)


class DigitsCleaning(CleaningData):
    """The 1,797 handwritten digits of scikit-learn (8 x 8 pixels) with wrong training labels.

    Args:
        n_train: The number of training samples.
        n_validation: The number of validation samples, disjoint from the training samples.
        options: The other arguments of :class:`CleaningData`.
    """

    classes = 10
    image_shape: tuple[int, ...] = (1, 8, 8)

    def __init__(self, n_train: int = 600, n_validation: int = 600, **options: Any) -> None:
        super().__init__(n_train=n_train, n_validation=n_validation, **options)

    def load(self, generator: torch.Generator) -> Splits:
        from sklearn.datasets import load_digits

        digits = load_digits()
        samples = torch.from_numpy(digits.images) / 16, torch.from_numpy(digits.target)
        sizes = {"n_train": self.n_train, "n_validation": self.n_validation, "n_test": self.n_test}
        return Splits(*draw(type(self).__name__, samples, sizes, generator))
