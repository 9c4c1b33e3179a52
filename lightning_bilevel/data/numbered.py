"""A Dataset whose samples know their number, and their source or class."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from lightning_bilevel.data.samples import AnyDataset

__all__ = ["Numbered"]


class Numbered(Dataset[Any]):
    """Any Dataset, each sample of which carries its number, by which its weight is found.

    A pair (input, label) becomes (input, label, number), or with keys (input, label, number, key).
    A dict gets the entries ``number`` and ``key``.

    Args:
        dataset: A Dataset with a length, of pairs or dicts.
        keys: The source of each sample, such as an annotator or a corpus, in the order of the
            samples: numbers from 0; or names of any kind, which are numbered as they come.

    Attributes:
        names: The name of each source, by its number; empty without keys. Export weights with it:
            ``weights.export("weights.csv", ids=dataset.names)``.

    Example:
        >>> data = Numbered([("a", 0), ("b", 1), ("c", 0)], keys=["web", "books", "web"])
        >>> data[2], data.names
        (('c', 0, 2, 0), ['web', 'books'])
    """

    def __init__(
        self, dataset: AnyDataset, keys: Sequence[Hashable] | Tensor | None = None
    ) -> None:
        self.dataset = dataset
        self.names: list[Any] = []
        self.keys: list[int] | None = None
        if keys is None:
            return
        given: list[Any] = keys.tolist() if isinstance(keys, Tensor) else list(keys)
        if len(given) != len(self):
            raise ValueError(
                f"`Numbered(keys=...)` has {len(given):,} keys for {len(self):,} samples: one for "
                "each is needed."
            )
        if all(isinstance(key, int) and key >= 0 for key in given):
            self.keys = given
            self.names = list(range(max(given) + 1))
            return
        numbers: dict[Any, int] = {}
        self.keys = [numbers.setdefault(key, len(numbers)) for key in given]
        self.names = list(numbers)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        number = index + len(self) if index < 0 else index
        sample = self.dataset[number]
        if isinstance(sample, dict):
            more = {} if self.keys is None else {"key": self.keys[number]}
            return {**sample, "number": number, **more}
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise TypeError(
                f"`Numbered(dataset=...)` gives a {type(sample).__name__} as sample {number}: it "
                "must be a pair (input, label) or a dict."
            )
        keys = () if self.keys is None else (self.keys[number],)
        return (*sample, number, *keys)
