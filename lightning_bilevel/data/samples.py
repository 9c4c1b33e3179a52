"""Images and labels as two tensors: read from a Dataset, checked, drawn at random, compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Dataset, default_collate

__all__ = [
    "AnyDataset",
    "Samples",
    "as_images",
    "check_labels",
    "check_positive",
    "common_images",
    "data_root",
    "draw",
    "missing_data",
    "parts",
    "read_dataset",
]

if TYPE_CHECKING:
    AnyDataset = Dataset[Any]
else:
    # jsonargparse reads a subclass of `Dataset` from YAML, but not one of `Dataset[Any]`.
    AnyDataset = Dataset

# The environment variable that names the folder of the data sets.
_DATA_VARIABLE = "LIGHTNING_BILEVEL_DATA"

Samples = tuple[Tensor, Tensor]
"""Images and labels, each with one entry per sample."""


def data_root(root: str | None) -> Path:
    """Return the folder of the data sets."""
    return Path(root or os.environ.get(_DATA_VARIABLE) or "data")


def missing_data(call: str, files: str, root: Path, folder: str) -> MisconfigurationException:
    """Return the error for data that are not there, or not whole."""
    return MisconfigurationException(
        f"`{call}(root={str(root)!r})` has not all of its data there, and a download by "
        f"`prepare_data()` did not bring them: put {files} into {root / folder}, or name the "
        f"folder that has {folder} as `root` or in the environment variable {_DATA_VARIABLE}."
    )


def check_positive(owner: object, *names: str) -> None:
    """Refuse a size below 1; None is no size."""
    for name in names:
        size = getattr(owner, name)
        if size is not None and size < 1:
            raise ValueError(f"`{type(owner).__name__}({name}={size})` must be at least 1.")


def as_images(call: str, images: Tensor) -> Tensor:
    """Return images as float32 of shape (N, C, H, W).

    Bytes are divided by 255, floats are not rescaled. A missing channel is added; vectors of
    features stay vectors.
    """
    if images.dtype == torch.uint8:
        images = images.float() / 255
    if not images.is_floating_point():
        raise TypeError(
            f"`{call}` has images of {images.dtype}: they must be torch.uint8 (0 to 255) or floats."
        )
    return (images.unsqueeze(1) if images.ndim == 3 else images).detach().float().cpu()


def check_labels(call: str, labels: Tensor, n: int, classes: int) -> Tensor:
    """Return labels as int64; refuse them unless each of the n images has a valid class."""
    if labels.is_floating_point() or labels.shape != (n,):
        raise TypeError(
            f"`{call}` has labels of {labels.dtype} and shape {tuple(labels.shape)} for {n:,} "
            "images: each must have an integer, the number of its class."
        )
    labels = labels.detach().cpu().long()
    bad = ((labels < 0) | (labels >= classes)).nonzero()
    if len(bad):
        i = int(bad[0])
        raise ValueError(
            f"`{call}` has the label {int(labels[i])} at sample {i}: with {classes} classes it "
            f"must be from 0 to {classes - 1}."
        )
    return labels


def parts(
    call: str, n: int, sizes: Mapping[str, int | None], generator: torch.Generator, least: int = 1
) -> list[Tensor]:
    """Draw the numbers of disjoint parts of n things in random order.

    Args:
        call: The name of the class whose arguments the sizes are, for the error.
        n: The number of things.
        sizes: The size of each part by the name of its argument; None takes the rest.
        generator: The source of randomness.
        least: The smallest size of a part.
    """
    rest = n - sum(size or 0 for size in sizes.values())
    lengths = [rest if size is None else size for size in sizes.values()]
    if rest < 0 or min(lengths) < least:
        arguments = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"`{call}({arguments})` does not fit: there are {n:,}, and each needs at least {least}."
        )
    order = torch.randperm(n, generator=generator)
    return list(torch.split(order[: sum(lengths)], lengths))


def draw(
    call: str, samples: Samples, sizes: Mapping[str, int | None], generator: torch.Generator
) -> list[Samples]:
    """Draw disjoint parts of the samples, see :func:`parts`."""
    images, labels = samples
    return [(images[part], labels[part]) for part in parts(call, len(labels), sizes, generator)]


def read_dataset(call: str, dataset: AnyDataset) -> Samples:
    """Return the samples of a Dataset of (image, label) pairs; images as in :func:`as_images`."""
    from torchvision.transforms.functional import to_tensor

    samples = [dataset[i] for i in range(len(dataset))]  # type: ignore[arg-type]
    pair = samples[0]
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or isinstance(pair[1], str):
        raise TypeError(
            f"`{call}` must be a Dataset of pairs (image, label), each label the number of a class."
        )
    images, labels = default_collate(
        [(x if isinstance(x, Tensor) else to_tensor(x), label) for x, label in samples]
    )
    return as_images(call, images), labels


def common_images(first: Tensor, second: Tensor) -> list[tuple[int, int]]:
    """Return the pairs (index in first, index in second) of equal images, sorted by the second."""
    digests = [
        [blake2b(image.tobytes(), digest_size=16).digest() for image in images.numpy()]
        for images in (first, second)
    ]
    places = {digest: i for i, digest in reversed(list(enumerate(digests[0])))}
    return [(places[digest], j) for j, digest in enumerate(digests[1]) if digest in places]
