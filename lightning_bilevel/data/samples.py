"""Images and labels as two tensors: read from a Dataset, checked, drawn at random."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

if TYPE_CHECKING:
    AnyDataset = Dataset[Any]
else:
    # jsonargparse reads a subclass of `Dataset` from YAML, but not one of `Dataset[Any]`.
    AnyDataset = Dataset

Samples = tuple[Tensor, Tensor]
"""Images and labels, each with one entry per sample."""


def check_positive(owner: object, *names: str) -> None:
    """Refuse a size below 1; None is no size."""
    for name in names:
        size = getattr(owner, name)
        if size is not None and size < 1:
            raise ValueError(f"`{type(owner).__name__}({name}={size})` must be at least 1.")


def checked(call: str, samples: Samples, classes: int) -> Samples:
    """Return images as float32 of shape (N, C, H, W), and labels as int64, each a valid class.

    Bytes and other integers are divided by 255, floats are not rescaled. A missing channel is
    added; vectors of features stay vectors.
    """
    images, labels = samples[0].detach().cpu(), samples[1].detach().cpu()
    if (
        labels.is_floating_point()
        or labels.shape != (len(images),)
        or not 0 <= int(labels.min()) <= int(labels.max()) < classes
    ):
        raise ValueError(
            f"`{call}` must have one label per image, an integer from 0 to {classes - 1}."
        )
    if not images.is_floating_point():
        images = images.float() / 255
    return (images.unsqueeze(1) if images.ndim == 3 else images).float(), labels.long()


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
    """Return the samples of a Dataset of (image, label) pairs."""
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
    return images, labels


class Numbered(Dataset[Any]):
    """Any Dataset, each sample of which carries its number, by which its weight is found.

    A pair (input, label) becomes (input, label, number), or with keys (input, label, number, key).
    A dict gets the entries ``number`` and ``key``.

    Args:
        dataset: A Dataset with a length, of pairs or dicts.
        keys: The source of each sample, such as an annotator or a corpus, in the order of the
            samples: numbers from 0; or names of any kind, which are numbered as they come.

    Attributes:
        names: The name of each source, by its number; empty without keys.

    Example:
        >>> data = Numbered([("a", 0), ("b", 1), ("c", 0)], keys=["web", "books", "web"])
        >>> data[2], data.names
        (('c', 0, 2, 0), ['web', 'books'])
    """

    def __init__(
        self, dataset: AnyDataset, keys: Sequence[Hashable] | Tensor | None = None
    ) -> None:
        self.dataset = dataset
        given: list[Any] = (
            keys.tolist() if isinstance(keys, Tensor) else list(() if keys is None else keys)
        )
        if keys is not None and len(given) != len(self):
            raise ValueError(
                f"`Numbered(keys=...)` has {len(given):,} keys for {len(self):,} samples."
            )
        numbers = all(isinstance(key, int) and key >= 0 for key in given)
        self.names: list[Any] = (
            list(range(max(given, default=-1) + 1)) if numbers else list(dict.fromkeys(given))
        )
        places = {name: number for number, name in enumerate(self.names)}
        self.keys = None if keys is None else [places[key] for key in given]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        number = index + len(self) if index < 0 else index
        sample = self.dataset[number]
        more = {"number": number} | ({} if self.keys is None else {"key": self.keys[number]})
        if isinstance(sample, dict):
            return {**sample, **more}
        given, label = sample
        return (given, label, *more.values())
