"""Ready data for hyper-cleaning: MNIST, FashionMNIST, and the digits of scikit-learn."""

from __future__ import annotations

from http.client import HTTPException
from typing import Any, ClassVar

import torch

from lightning_bilevel.data.cleaning import CleaningData, Splits
from lightning_bilevel.data.samples import Samples, data_root, draw, missing_data

__all__ = ["DigitsCleaning", "FashionMNISTCleaning", "MNISTCleaning"]


class MNISTCleaning(CleaningData):
    """MNIST with wrong training labels; the defaults are the paper's.

    Training and validation samples come from the 60,000 official training images, test samples from
    the 10,000 official test images. Missing files are downloaded to the root.

    Args:
        root: The folder of the data, laid out as by torchvision (``MNIST/raw`` or
            ``FashionMNIST/raw``). None takes the environment variable LIGHTNING_BILEVEL_DATA, or
            else ``data``.
        options: The arguments of :class:`CleaningData`.
    """

    classes = 10
    image_shape: tuple[int, ...] = (1, 28, 28)
    source: ClassVar[str] = "MNIST"

    def __init__(self, root: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.root = data_root(root)

    def prepare_data(self) -> None:
        """Download the files if they are missing."""
        self._official(train=True, download=True)

    def load(self, generator: torch.Generator) -> Splits:
        pool, test = (self._official(train=train, download=False) for train in (True, False))
        sizes = {"n_train": self.n_train, "n_validation": self.n_validation}
        call = type(self).__name__
        return Splits(
            *draw(call, pool, sizes, generator),
            *draw(call, test, {"n_test": self.n_test}, generator),
        )

    def _official(self, train: bool, download: bool) -> Samples:
        from torchvision import datasets

        try:
            dataset = getattr(datasets, self.source)(self.root, train=train, download=download)
        # torchvision and its libraries raise these for failed downloads and broken files.
        except (OSError, RuntimeError, HTTPException, AssertionError, ValueError) as error:
            files = "the two image and the two label files (*-ubyte)"
            folder = f"{self.source}/raw"
            raise missing_data(type(self).__name__, files, self.root, folder, error) from error
        return dataset.data, dataset.targets


class FashionMNISTCleaning(MNISTCleaning):
    """FashionMNIST with wrong training labels; otherwise the same as :class:`MNISTCleaning`.

    Args:
        root: The folder of the data, laid out as by torchvision (``FashionMNIST/raw``). None takes
            the environment variable LIGHTNING_BILEVEL_DATA, or else ``data``.
        options: The arguments of :class:`CleaningData`.
    """

    source = "FashionMNIST"


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
