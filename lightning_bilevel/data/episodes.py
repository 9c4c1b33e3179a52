"""Few-shot episodes: classes that a model has to tell apart after seeing a few examples of each."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.data.fullbatch import FullBatchDataModule, Repeated

__all__ = ["EpisodeData", "Episodes", "TaskEpisodes", "draw_episode"]

SPLITS = ("train", "validation", "test")


class Episodes(NamedTuple):
    """Episodes side by side, E of them, with labels from 0 to ways - 1 in each.

    Attributes:
        support: The examples to learn from, (E, ways * shots, C, H, W).
        support_labels: Their labels, (E, ways * shots).
        query: The examples to tell, (E, ways * queries, C, H, W).
        query_labels: Their labels, (E, ways * queries).
    """

    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor

    def tasks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each episode as learn2learn has its tasks: ``(data, labels)``, examples of one
        class next to each other.
        """
        for support, support_labels, query, query_labels in zip(*self, strict=True):
            data, labels = torch.cat([support, query]), torch.cat([support_labels, query_labels])
            order = torch.argsort(labels, stable=True)
            yield data[order], labels[order]

    @classmethod
    def from_tasks(cls, tasks: Iterable[tuple[Tensor, Tensor]], count: int, shots: int) -> Episodes:
        """Take the first ``count`` tasks of learn2learn's ``Taskset``, or of anything that yields
        ``(data, labels)``.

        Args:
            tasks: What yields the tasks. Labels may be any integers; the classes of a task are
                numbered by their order.
            count: How many episodes to take.
            shots: How many examples of each class, its first ones, are the support; the others are
                queries.
        """
        call = f"Episodes.from_tasks(count={count}, shots={shots})"
        if count < 1 or shots < 1:
            raise ValueError(f"`{call}`: both must be at least 1.")
        parts: list[tuple[Tensor, ...]] = []
        for number, task in zip(range(count), tasks, strict=False):
            parts.append(_split(f"`{call}`, task {number}", task, shots))
            shapes = [[tuple(tensor.shape) for tensor in part] for part in (parts[0], parts[-1])]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"`{call}`, task {number} has shapes {shapes[1]}, task 0 has {shapes[0]}: they "
                    "must agree."
                )
        if len(parts) < count:
            raise ValueError(
                f"`{call}` was given {len(parts)} tasks: there must be at least {count}."
            )
        return cls(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))


def _split(call: str, task: Any, shots: int) -> tuple[Tensor, ...]:
    if not isinstance(task, (tuple, list)) or len(task) != 2 or len(task[0]) != len(task[1]):
        raise TypeError(f"{call} must be a pair (data, labels) of the same length.")
    data, given = torch.as_tensor(task[0]).float(), torch.as_tensor(task[1])
    classes, labels = torch.unique(given, return_inverse=True)
    places = [(labels == label).nonzero().reshape(-1) for label in range(len(classes))]
    sizes = sorted({len(place) for place in places})
    if len(places) < 2 or len(sizes) > 1 or sizes[0] <= shots:
        raise ValueError(
            f"{call} has {len(places)} classes of {' or '.join(map(str, sizes))} examples: it "
            "needs at least two classes, each with the same number of examples, more than the "
            f"{shots} of the support."
        )
    support, query = torch.cat([p[:shots] for p in places]), torch.cat([p[shots:] for p in places])
    return data[support], labels[support], data[query], labels[query]


def draw_episode(
    images: Tensor, ways: int, shots: int, queries: int, key: str
) -> tuple[Tensor, ...]:
    """Draw one episode from images of shape (classes, examples, C, H, W): as many of each class, no
    example twice.

    Args:
        images: What to draw from.
        ways: The number of classes.
        shots: Support examples of each class.
        queries: Query examples of each class.
        key: Decides the draw: the same key gives the same episode, whatever was drawn before.
    """
    # Python's generator takes text as its seed, by a hash that is the same everywhere; torch's
    # takes 32 bits.
    dice = random.Random(key)
    classes = dice.sample(range(len(images)), ways)
    examples = torch.stack(
        [images[c][dice.sample(range(images.shape[1]), shots + queries)] for c in classes]
    )
    labels = torch.arange(ways)
    return (
        examples[:, :shots].flatten(0, 1),
        labels.repeat_interleave(shots),
        examples[:, shots:].flatten(0, 1),
        labels.repeat_interleave(queries),
    )


class EpisodeData(FullBatchDataModule):
    """Fixed few-shot episodes: of training classes for both levels, of unseen classes for
    validation and test.

    The batch of the upper level f is the query sets, ``(images, labels, index)`` with the number of
    each episode; that of the lower level g is the support sets, likewise. At a validation the
    module is given the :class:`Episodes` of the validation classes as loader 0, and those of the
    test classes as loader 1. Images are float32 of shape (E, N, C, H, W).

    This is the base of the ready data sets; a subclass defines :meth:`load`. Episode i of a split
    depends on the seed, the split and i alone.

    Args:
        ways: Classes of an episode.
        shots: Support examples of each class.
        queries: Query examples of each class.
        n_train: Training episodes.
        n_validation: Validation episodes.
        n_test: Test episodes.
        train_classes: Classes of the training split.
        validation_classes: Classes of the validation split.
        test_classes: Classes of the test split; None takes all that are left.
        split_seed: Decides which class is in which split.
        seed: Decides the episodes.
        epoch_length: Outer iterations per epoch, after which validation, checkpoints and the
            progress bar have their turn.

    Attributes:
        image_shape: The shape of an image, (C, H, W). From ``setup`` on.
    """

    image_shape: tuple[int, ...]

    def __init__(
        self,
        ways: int = 10,
        shots: int = 1,
        queries: int = 5,
        n_train: int = 128,
        n_validation: int = 100,
        n_test: int = 100,
        train_classes: int = 1100,
        validation_classes: int = 100,
        test_classes: int | None = None,
        split_seed: int = 0,
        seed: int = 42,
        epoch_length: int = 10,
    ) -> None:
        super().__init__(epoch_length=epoch_length)
        sizes = {"ways": ways, "shots": shots, "queries": queries}
        sizes |= {"n_train": n_train, "n_validation": n_validation, "n_test": n_test}
        for name, size in sizes.items():
            least = 2 if name == "ways" else 1
            if size < least:
                raise ValueError(
                    f"`{type(self).__name__}({name}={size})` must be at least {least}."
                )
        classes = {
            "train_classes": train_classes,
            "validation_classes": validation_classes,
            "test_classes": test_classes,
        }
        for name, there in classes.items():
            if there is not None and there < ways:
                raise ValueError(
                    f"`{type(self).__name__}(ways={ways}, {name}={there})`: an episode needs "
                    f"{ways} classes."
                )
        self.ways, self.shots, self.queries = ways, shots, queries
        self.counts = dict(zip(SPLITS, (n_train, n_validation, n_test), strict=True))
        self.split_sizes, self.split_seed, self.seed = classes, split_seed, seed

    @property
    def n_train(self) -> int:
        """The number of training episodes."""
        return self.counts["train"]

    def load(self) -> Tensor:
        """Return all images, (classes, examples, C, H, W), ink 1 on paper 0."""
        raise NotImplementedError(
            f"`{type(self).__name__}` must define `load()`: it returns the images of all classes."
        )

    def setup(self, stage: str | None = None) -> None:
        """Load the images and draw the episodes; once, as every stage has the same."""
        if self.lower is not None:
            return
        images = self.load()
        self.image_shape = tuple(images.shape[2:])
        splits = zip(SPLITS, self._class_splits(images), strict=True)
        self._set({name: self._draw(name, classes) for name, classes in splits})

    def _set(self, episodes: dict[str, Episodes]) -> None:
        train = episodes["train"]
        index = torch.arange(len(train.support))
        self.upper = (train.query, train.query_labels, index)
        self.lower = (train.support, train.support_labels, index)
        self.validation, self.test = episodes["validation"], episodes["test"]

    def val_dataloader(self) -> list[Repeated]:
        """Return the validation episodes and the test episodes."""
        return [self._loader(episodes, 1) for episodes in (self.validation, self.test)]

    def _class_splits(self, images: Tensor) -> list[Tensor]:
        sizes, call = list(self.split_sizes.values()), type(self).__name__
        asked = sum(size if size is not None else self.ways for size in sizes)
        if asked > len(images):
            given = ", ".join(f"{name}={size}" for name, size in self.split_sizes.items())
            raise ValueError(
                f"`{call}({given})` with ways={self.ways} needs {asked:,} classes: there are "
                f"{len(images):,}."
            )
        if self.shots + self.queries > images.shape[1]:
            raise ValueError(
                f"`{call}(shots={self.shots}, queries={self.queries})` needs "
                f"{self.shots + self.queries} examples of each class: there are {images.shape[1]}."
            )
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(self.split_seed)
        )
        rest = len(images) - sum(size or 0 for size in sizes)
        lengths = [rest if size is None else size for size in sizes]
        return [images[part] for part in torch.split(order[: sum(lengths)], lengths)]

    def _draw(self, name: str, images: Tensor) -> Episodes:
        drawn = [
            draw_episode(images, self.ways, self.shots, self.queries, f"{self.seed}/{name}/{i}")
            for i in range(self.counts[name])
        ]
        return Episodes(*(torch.stack(tensors) for tensors in zip(*drawn, strict=True)))


class TaskEpisodes(EpisodeData):
    """Episodes that come as they are, such as from learn2learn's ``Taskset``.

    Args:
        train: The training episodes.
        validation: The validation episodes.
        test: The test episodes.
        epoch_length: Outer iterations per epoch.

    Example:
        >>> task = (torch.rand(8, 1, 16, 16), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
        >>> episodes = Episodes.from_tasks([task, task], count=2, shots=1)
        >>> data = TaskEpisodes(episodes, episodes, episodes)
        >>> data.n_train, data.ways, data.shots, data.queries, data.image_shape
        (2, 4, 1, 1, (1, 16, 16))
    """

    def __init__(
        self, train: Episodes, validation: Episodes, test: Episodes, epoch_length: int = 10
    ) -> None:
        given = dict(zip(SPLITS, (train, validation, test), strict=True))
        for name, episodes in given.items():
            if not isinstance(episodes, Episodes):
                raise TypeError(
                    f"`TaskEpisodes({name}=...)` is a {type(episodes).__name__}: it must be "
                    "`Episodes`, which `Episodes.from_tasks` makes of any source of tasks."
                )
            if episodes.support.shape[2:] != train.support.shape[2:]:
                raise ValueError(
                    f"`TaskEpisodes({name}=...)` has images of shape "
                    f"{tuple(episodes.support.shape[2:])}, the training episodes have "
                    f"{tuple(train.support.shape[2:])}: all must have the same."
                )
        ways = int(train.support_labels.max()) + 1
        shots, queries = (tensor.shape[1] // ways for tensor in (train.support, train.query))
        counts = {f"n_{name}": len(episodes.support) for name, episodes in given.items()}
        super().__init__(ways, shots, queries, **counts, epoch_length=epoch_length)
        self.given = given
        self.image_shape = tuple(train.support.shape[2:])

    def setup(self, stage: str | None = None) -> None:
        """Take the episodes as they are."""
        self._set(self.given)
