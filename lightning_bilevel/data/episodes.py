"""Few-shot episodes: a model sees a few examples of each class, then classifies new ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_bilevel.data.fresh import FreshBatches
from lightning_bilevel.data.fullbatch import FullBatchDataModule, Repeated

__all__ = ["EpisodeData", "Episodes", "TaskEpisodes", "draw_episode"]

SPLITS = ("train", "validation", "test")


class Episodes(NamedTuple):
    """E stacked episodes, each with labels from 0 to ways - 1.

    Attributes:
        support: The examples to learn from, (E, ways * shots, C, H, W).
        support_labels: Their labels, (E, ways * shots).
        query: The examples to classify, (E, ways * queries, C, H, W).
        query_labels: Their labels, (E, ways * queries).
    """

    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor

    def tasks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each episode as a task of learn2learn: ``(data, labels)``, sorted by class."""
        for support, support_labels, query, query_labels in zip(*self, strict=True):
            data = torch.cat([support, query])
            labels = torch.cat([support_labels, query_labels])
            order = torch.argsort(labels, stable=True)
            yield data[order], labels[order]

    @classmethod
    def from_tasks(cls, tasks: Iterable[tuple[Tensor, Tensor]], count: int, shots: int) -> Episodes:
        """Make episodes of the first ``count`` tasks, such as those of learn2learn's ``Taskset``.

        Args:
            tasks: Any iterable of ``(data, labels)``. Labels may be any integers; the classes of a
                task are numbered in increasing order.
            count: The number of episodes.
            shots: The first ``shots`` examples of each class are the support, the others are
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
    data = torch.as_tensor(task[0]).float()
    classes, labels = torch.unique(torch.as_tensor(task[1]), return_inverse=True)
    places = [(labels == label).nonzero().reshape(-1) for label in range(len(classes))]
    sizes = sorted({len(place) for place in places})
    if len(places) < 2 or len(sizes) > 1 or sizes[0] <= shots:
        raise ValueError(
            f"{call} has {len(places)} classes of {' or '.join(map(str, sizes))} examples: it "
            "needs at least two classes, each with the same number of examples, more than the "
            f"{shots} of the support."
        )
    support = torch.cat([place[:shots] for place in places])
    query = torch.cat([place[shots:] for place in places])
    return data[support], labels[support], data[query], labels[query]


def draw_episode(
    images: Tensor, ways: int, shots: int, queries: int, key: str
) -> tuple[Tensor, ...]:
    """Draw one episode: random classes, and random examples of each without repetition.

    Args:
        images: The images of all classes, (classes, examples, C, H, W).
        ways: The number of classes.
        shots: Support examples of each class.
        queries: Query examples of each class.
        key: The seed: the same key gives the same episode, whatever was drawn before.
    """
    # Python's generator accepts text as its seed and hashes it the same way on every machine;
    # torch's generator accepts only 32 bits.
    generator = random.Random(key)
    classes = generator.sample(range(len(images)), ways)
    chosen = [generator.sample(range(images.shape[1]), shots + queries) for _ in classes]
    examples = images[torch.tensor(classes).unsqueeze(1), torch.tensor(chosen)]
    labels = torch.arange(ways)
    return (
        examples[:, :shots].flatten(0, 1),
        labels.repeat_interleave(shots),
        examples[:, shots:].flatten(0, 1),
        labels.repeat_interleave(queries),
    )


class EpisodeData(FullBatchDataModule):
    """Few-shot episodes; validation and test use classes that training does not see.

    The upper level f has the query sets as its batch, ``(images, labels, index)``, where the index
    numbers the episodes. The lower level g has the support sets in the same form. Validation uses
    the :class:`Episodes` of the validation classes as loader 0, and those of the test classes as
    loader 1. Images are float32 of shape (E, N, C, H, W).

    The training episodes are the same in each step. With ``tasks_per_batch`` each step has so many
    other episodes instead, drawn from the training classes for ever.

    This is the base class of the ready data sets; a subclass defines :meth:`load`. Episode i of a
    split depends only on the seed, the split and i.

    Args:
        ways: Classes of an episode.
        shots: Support examples of each class.
        queries: Query examples of each class.
        n_train: Training episodes.
        n_validation: Validation episodes.
        n_test: Test episodes.
        train_classes: Classes of the training split.
        validation_classes: Classes of the validation split.
        test_classes: Classes of the test split; None takes all remaining ones.
        split_seed: Decides which class is in which split.
        seed: Decides the episodes.
        epoch_length: Outer iterations per epoch; validation, checkpoints and the progress bar come
            at the end of an epoch.
        tasks_per_batch: Fresh episodes of each step; None has the ``n_train`` fixed ones in all
            steps. Only a solver for mini-batches can take fresh ones.

    Attributes:
        image_shape: The shape of an image, (C, H, W). Set by ``setup``.
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
        tasks_per_batch: int | None = None,
    ) -> None:
        super().__init__(epoch_length=epoch_length)
        sizes = {"ways": ways, "shots": shots, "queries": queries}
        sizes |= {"n_train": n_train, "n_validation": n_validation, "n_test": n_test}
        if tasks_per_batch is not None:
            sizes["tasks_per_batch"] = tasks_per_batch
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
        for name, count in classes.items():
            if count is not None and count < ways:
                raise ValueError(
                    f"`{type(self).__name__}(ways={ways}, {name}={count})`: an episode needs "
                    f"{ways} classes."
                )
        self.ways = ways
        self.shots = shots
        self.queries = queries
        self.counts = dict(zip(SPLITS, (n_train, n_validation, n_test), strict=True))
        self.split_sizes = classes
        self.split_seed = split_seed
        self.seed = seed
        self.tasks_per_batch = tasks_per_batch
        self._train_images: Tensor | None = None

    @property
    def n_train(self) -> int:
        """The number of training episodes."""
        return self.counts["train"]

    def load(self) -> Tensor:
        """Return all images, (classes, examples, C, H, W); ink is 1, paper is 0."""
        raise NotImplementedError(
            f"`{type(self).__name__}` must define `load()`: it returns the images of all classes."
        )

    def fresh_episodes(self, key: str) -> Callable[[int], Episodes]:
        """Return what draws further episodes of the training classes, as many as asked for.

        Args:
            key: Decides the draws; they do not repeat, and are not those of ``setup``.
        """
        images = self._class_splits(self.load())[0]
        numbers = itertools.count()

        def drawn(count: int) -> Episodes:
            keys = [
                f"{self.seed}/fresh/{key}/{number}" for number in itertools.islice(numbers, count)
            ]
            return self._episodes(images, keys)

        return drawn

    def setup(self, stage: str | None = None) -> None:
        """Load the images and draw the episodes, once: all stages use the same data."""
        if self.lower is not None:
            return
        images = self.load()
        self.image_shape = tuple(images.shape[2:])
        splits = dict(zip(SPLITS, self._class_splits(images), strict=True))
        if self.tasks_per_batch is not None:
            self._train_images = splits["train"]
        self._set({name: self._draw(name, classes) for name, classes in splits.items()})

    def _set(self, episodes: dict[str, Episodes]) -> None:
        train = episodes["train"]
        index = torch.arange(len(train.support))
        self.upper = (train.query, train.query_labels, index)
        self.lower = (train.support, train.support_labels, index)
        self.validation = episodes["validation"]
        self.test = episodes["test"]

    def train_dataloader(self) -> Any:
        """Return the fixed episodes, or a loader of fresh ones."""
        if self.tasks_per_batch is None:
            return super().train_dataloader()
        trainer = self.trainer
        place = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        return FreshBatches(self.fresh, self.tasks_per_batch, self.epoch_length, *place)

    def fresh(self, numbers: Sequence[int]) -> Episodes:
        """Return further training episodes, which depend only on the seed and their numbers."""
        if self._train_images is None:
            raise ValueError(
                f"`{type(self).__name__}.fresh()` needs `tasks_per_batch`, and `setup()` before."
            )
        return self._episodes(self._train_images, [f"{self.seed}/fresh/{i}" for i in numbers])

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch of fresh episodes; all others are there already."""
        return move_data_to_device(batch, device)

    def val_dataloader(self) -> list[Repeated]:
        """Return the validation episodes and the test episodes."""
        return [self._loader(episodes, 1) for episodes in (self.validation, self.test)]

    def _class_splits(self, images: Tensor) -> list[Tensor]:
        call = type(self).__name__
        sizes = list(self.split_sizes.values())
        needed = sum(self.ways if size is None else size for size in sizes)
        if needed > len(images):
            arguments = ", ".join(f"{name}={size}" for name, size in self.split_sizes.items())
            raise ValueError(
                f"`{call}({arguments})` with ways={self.ways} needs {needed:,} classes: there are "
                f"{len(images):,}."
            )
        if self.shots + self.queries > images.shape[1]:
            raise ValueError(
                f"`{call}(shots={self.shots}, queries={self.queries})` needs "
                f"{self.shots + self.queries} examples of each class: there are {images.shape[1]}."
            )
        generator = torch.Generator().manual_seed(self.split_seed)
        order = torch.randperm(len(images), generator=generator)
        rest = len(images) - sum(size or 0 for size in sizes)
        lengths = [rest if size is None else size for size in sizes]
        return [images[part] for part in torch.split(order[: sum(lengths)], lengths)]

    def _draw(self, name: str, images: Tensor) -> Episodes:
        return self._episodes(images, [f"{self.seed}/{name}/{i}" for i in range(self.counts[name])])

    def _episodes(self, images: Tensor, keys: Sequence[str]) -> Episodes:
        drawn = [draw_episode(images, self.ways, self.shots, self.queries, key) for key in keys]
        return Episodes(*(torch.stack(tensors) for tensors in zip(*drawn, strict=True)))


class TaskEpisodes(EpisodeData):
    """Ready-made episodes, such as those from learn2learn's ``Taskset``.

    Args:
        train: The training episodes.
        validation: The validation episodes.
        test: The test episodes.
        epoch_length: Outer iterations per epoch.
        tasks_per_batch: Training episodes of each step, in another order each time that all have
            had their turn; None has all of them in all steps. Only a solver for mini-batches can
            take batches that change.

    Example:
        >>> task = (torch.rand(8, 1, 16, 16), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
        >>> episodes = Episodes.from_tasks([task, task], count=2, shots=1)
        >>> data = TaskEpisodes(episodes, episodes, episodes)
        >>> data.n_train, data.ways, data.shots, data.queries, data.image_shape
        (2, 4, 1, 1, (1, 16, 16))
    """

    def __init__(
        self,
        train: Episodes,
        validation: Episodes,
        test: Episodes,
        epoch_length: int = 10,
        tasks_per_batch: int | None = None,
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
        super().__init__(
            ways,
            shots,
            queries,
            **counts,
            epoch_length=epoch_length,
            tasks_per_batch=tasks_per_batch,
        )
        if tasks_per_batch is not None and tasks_per_batch > len(train.support):
            raise ValueError(
                f"`TaskEpisodes(tasks_per_batch={tasks_per_batch})` was given "
                f"{len(train.support)} training episodes: it needs at least as many."
            )
        self.given = given
        self.image_shape = tuple(train.support.shape[2:])

    def setup(self, stage: str | None = None) -> None:
        """Set the batches of both levels, and the validation and test episodes."""
        self._set(self.given)

    def fresh(self, numbers: Sequence[int]) -> Episodes:
        """Return training episodes; all have had their turn before one comes again."""
        train = self.given["train"]
        count = len(train.support)
        turns = {turn: self._order(turn, count) for turn in {i // count for i in numbers}}
        chosen = torch.tensor([turns[i // count][i % count] for i in numbers])
        return Episodes(*(tensor[chosen] for tensor in train))

    def _order(self, turn: int, count: int) -> list[int]:
        return random.Random(f"{self.seed}/turn/{turn}").sample(range(count), count)
