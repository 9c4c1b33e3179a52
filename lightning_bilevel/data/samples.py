"""Images and labels as two tensors: read from a Dataset, checked, drawn at random, compared."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

__all__ = [
    "DATA_VARIABLE",
    "AnyDataset",
    "Samples",
    "as_images",
    "check_labels",
    "common_images",
    "draw",
    "length",
    "read_dataset",
]

if TYPE_CHECKING:
    AnyDataset = Dataset[Any]
else:
    # jsonargparse reads a subclass of `Dataset` from YAML, but not one of `Dataset[Any]`.
    AnyDataset = Dataset

# The environment variable that names the folder of the data sets.
DATA_VARIABLE = "LIGHTNING_BILEVEL_DATA"

Samples = tuple[Tensor, Tensor]
"""Images and labels, each with one entry per sample."""


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
    if labels.is_floating_point():
        raise TypeError(
            f"`{call}` has labels of {labels.dtype}: they must be integers, the numbers of the "
            "classes."
        )
    if labels.shape != (n,):
        raise ValueError(
            f"`{call}` has labels of shape {tuple(labels.shape)} for {n:,} images: it must be "
            f"({n},)."
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


def draw(
    call: str, samples: Samples, sizes: Mapping[str, int | None], generator: torch.Generator
) -> list[Samples]:
    """Draw disjoint parts in random order.

    Args:
        call: The name of the class whose arguments the sizes are, for the error.
        samples: The samples to draw from.
        sizes: The size of each part by the name of its argument; None takes the rest.
        generator: The source of randomness.
    """
    images, labels = samples
    needed = sum(size or 1 for size in sizes.values())
    if needed > len(labels):
        arguments = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"`{call}({arguments})` needs {needed:,} samples: there are {len(labels):,}."
        )
    rest = len(labels) - sum(size or 0 for size in sizes.values())
    order = torch.randperm(len(labels), generator=generator)
    lengths = [rest if size is None else size for size in sizes.values()]
    return [(images[part], labels[part]) for part in torch.split(order[: sum(lengths)], lengths)]


def length(call: str, dataset: AnyDataset) -> int:
    """Return the number of samples of a Dataset; refuse one without a length or without samples."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"`{call}` is a {type(dataset).__name__}: it must be a Dataset with `__getitem__` and "
            "`__len__`."
        )
    if len(dataset) == 0:
        raise ValueError(
            f"`{call}` is an empty {type(dataset).__name__}: it must have at least one sample."
        )
    return len(dataset)


def read_dataset(call: str, dataset: AnyDataset) -> Samples:
    """Return the samples of a Dataset of (image, label) pairs; images as in :func:`as_images`."""
    images, labels = _tensors(call, dataset) or _stacked(call, dataset)
    return as_images(call, images), labels


def _tensors(call: str, dataset: AnyDataset) -> Samples | None:
    """Return the tensors of a TensorDataset, or of a Subset of one, without reading each sample."""
    if type(dataset) is Subset:
        whole = _tensors(call, dataset.dataset)
        if whole is None:
            return None
        indices = torch.as_tensor(dataset.indices)
        return whole[0][indices], whole[1][indices]
    if type(dataset) is not TensorDataset:  # a subclass may change the samples that it returns
        return None
    if len(dataset.tensors) != 2:
        raise TypeError(
            f"`{call}` is a TensorDataset of {len(dataset.tensors)} tensors: it must have two, "
            "images and labels."
        )
    return dataset.tensors[0], dataset.tensors[1]


def _stacked(call: str, dataset: Any) -> Samples:
    images: list[Tensor] = []
    labels: list[int] = []
    for i in range(len(dataset)):
        sample = dataset[i]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise TypeError(
                f"`{call}` gives a {type(sample).__name__} as sample {i}: it must be a pair "
                "(image, label)."
            )
        image, label = sample
        images.append(_tensor(call, i, image))
        if images[i].shape != images[0].shape:
            raise ValueError(
                f"`{call}` has an image of size {_size(images[i])} at sample {i} and of size "
                f"{_size(images[0])} at sample 0: all must have the same size."
            )
        try:
            labels.append(operator.index(label))
        except TypeError as error:
            raise TypeError(
                f"`{call}` has the label {label!r} at sample {i}: labels must be integers, the "
                "numbers of the classes."
            ) from error
    return torch.stack(images), torch.tensor(labels)


def _tensor(call: str, i: int, image: Any) -> Tensor:
    if isinstance(image, Tensor):
        return image
    from torchvision.transforms.functional import to_tensor

    try:
        return to_tensor(image)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{call}` has a {type(image).__name__} as the image of sample {i}: it must be a "
            "tensor, a PIL image or an array."
        ) from error


def _size(image: Tensor) -> str:
    return "x".join(map(str, image.shape))


def common_images(first: Tensor, second: Tensor) -> list[tuple[int, int]]:
    """Return the pairs (index in first, index in second) of equal images, sorted by the second."""

    def digests(images: Tensor) -> list[bytes]:
        return [
            hashlib.blake2b(image.tobytes(), digest_size=16).digest()
            for image in images.contiguous().numpy()
        ]

    places: dict[bytes, int] = {}
    for i, digest in enumerate(digests(first)):
        places.setdefault(digest, i)
    return [(places[digest], j) for j, digest in enumerate(digests(second)) if digest in places]
