"""Data sets that are downloaded: MNIST, FashionMNIST, and the characters of Omniglot."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel.data.cleaning import CleaningData, Splits
from lightning_bilevel.data.episodes import EpisodeData
from lightning_bilevel.data.samples import Samples, draw

# The environment variable that names the folder of the data sets.
_DATA_VARIABLE = "LIGHTNING_BILEVEL_DATA"


def data_root(root: str | None) -> Path:
    """Return the folder of the data sets."""
    return Path(root or os.environ.get(_DATA_VARIABLE) or "data")


@contextmanager
def whole(data: MNISTCleaning | OmniglotEpisodes, folder: str, files: str) -> Iterator[None]:
    """Say what to put where, if data are not there or not whole."""
    try:
        yield
    # torchvision, zipfile and PIL raise all kinds for failed downloads and broken files.
    except Exception as error:
        raise MisconfigurationException(
            f"`{type(data).__name__}(root={str(data.root)!r})` has not all of its data there, and "
            f"a download by `prepare_data()` did not bring them ({' '.join(str(error).split())}): "
            f"put {files} into {data.root / folder}, or name the folder that has {folder} as "
            f"`root` or in the environment variable {_DATA_VARIABLE}."
        ) from error


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

        with whole(self, f"{self.source}/raw", "the two image and the two label files (*-ubyte)"):
            dataset = getattr(datasets, self.source)(self.root, train=train, download=download)
        return dataset.data, dataset.targets


class FashionMNISTCleaning(MNISTCleaning):
    """FashionMNIST with wrong training labels; otherwise the same as :class:`MNISTCleaning`.

    Args:
        root: The folder of the data, laid out as by torchvision (``FashionMNIST/raw``). None takes
            the environment variable LIGHTNING_BILEVEL_DATA, or else ``data``.
        options: The arguments of :class:`CleaningData`.
    """

    source = "FashionMNIST"


class OmniglotEpisodes(EpisodeData):
    """Few-shot episodes of Omniglot, 1,623 characters of 20 drawings, with the paper's defaults.

    The drawings come from ``omniglot-py`` in the root: the archives ``images_background.zip`` and
    ``images_evaluation.zip`` as torchvision downloads them. Missing archives are downloaded.
    Nothing of them is extracted: all drawings are read at each start.

    Args:
        root: The folder of ``omniglot-py``; None takes the environment variable
            LIGHTNING_BILEVEL_DATA, or else ``data``.
        image_size: The height and width of an image.
        options: The arguments of :class:`~lightning_bilevel.data.episodes.EpisodeData`.
    """

    DRAWINGS: ClassVar[int] = 20

    def __init__(self, root: str | None = None, image_size: int = 28, **options: Any) -> None:
        super().__init__(**options)
        self.root = data_root(root)
        self.image_size = image_size
        folder = self.root / "omniglot-py"
        self._archives = folder / "images_background.zip", folder / "images_evaluation.zip"

    def prepare_data(self) -> None:
        """Download the archives if they are missing."""
        from torchvision import datasets

        for archive, background in zip(self._archives, (True, False), strict=True):
            if not archive.exists():
                with self._whole():
                    datasets.Omniglot(self.root, background=background, download=True)

    def load(self) -> Tensor:
        """Return all drawings, (1623, 20, 1, size, size); ink is 1, paper is 0."""
        with self._whole():
            drawings = [drawing for path in self._archives for drawing in self._drawings(path)]
            ink = 1 - torch.stack(drawings).float() / 255
            return ink.reshape(-1, self.DRAWINGS, *ink.shape[1:])

    def _whole(self) -> Any:
        return whole(self, "omniglot-py", "images_background.zip and images_evaluation.zip")

    def _drawings(self, path: Path) -> Iterator[Tensor]:
        from PIL import Image
        from torchvision.transforms.functional import pil_to_tensor

        size = self.image_size, self.image_size
        with zipfile.ZipFile(path) as file:
            for name in sorted(file.namelist()):
                if name.endswith(".png"):
                    drawing = Image.open(io.BytesIO(file.read(name))).convert("L")
                    yield pil_to_tensor(drawing.resize(size, Image.Resampling.BILINEAR))
