"""Few-shot episodes: a model sees a few examples of each class, then classifies new ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.data.fullbatch import FullBatchDataModule, Parts
from lightning_bilevel.data.samples import check_positive, parts

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

    def levels(self) -> dict[str, Any]:
        """Return the batches of f and g; the index numbers the episodes."""
        index = torch.arange(len(self.support))
        return {
            "upper": (self.query, self.query_labels, index),
            "lower": (self.support, self.support_labels, index),
        }

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
        episodes = []
        for data, labels in itertools.islice(tasks, count):
            counts = torch.unique(torch.as_tensor(labels), return_counts=True)[1].tolist()
            if len(set(counts)) > 1 or counts[0] <= shots:
                raise ValueError(
                    f"`Episodes.from_tasks(shots={shots})` was given a task with classes of "
                    f"{counts} examples: each must have the same number, more than {shots}."
                )
            order = torch.argsort(torch.as_tensor(labels), stable=True).view(len(counts), -1)
            episodes.append(_divided(torch.as_tensor(data).float()[order], shots))
        return cls(*map(torch.stack, zip(*episodes, strict=True)))


def _divided(examples: Tensor, shots: int) -> tuple[Tensor, ...]:
    """Return the support and the queries of an episode with these examples of each class."""
    ways, count = examples.shape[:2]
    labels = torch.arange(ways)
    return (
        examples[:, :shots].flatten(0, 1),
        labels.repeat_interleave(shots),
        examples[:, shots:].flatten(0, 1),
        labels.repeat_interleave(count - shots),
    )


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
    return _divided(images[torch.tensor(classes).unsqueeze(1), torch.tensor(chosen)], shots)


@dataclass(eq=False)
class FreshBatches:
    """Yields batches that are numbered without end.

    An epoch is a number of batches. The next one goes on where it ended, and so does a resumed run,
    because the state of the loader is the number of the next batch.

    Args:
        batch: Returns the batch of a number.
        length: The number of batches of an epoch.
        next: The number of the next batch.
    """

    batch: Callable[[int], dict[str, Any]]
    length: int
    next: int = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A resumed epoch has only the rest of its batches.
        for _ in range(self.length - self.next % self.length):
            self.next += 1
            yield self.batch(self.next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


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
        seed: Decides the episodes. Which class is in which split is always the same.
        epoch_length: Outer iterations per epoch; validation, checkpoints and the progress bar come
            at the end of an epoch.
        tasks_per_batch: Fresh episodes of each step; None has the ``n_train`` fixed ones in all
            steps. Fresh ones need a method on mini-batches, such as ``FewShot(method=F2SA())``.

    Attributes:
        image_shape: The shape of an image, (C, H, W). Set by ``setup``.
    """

    image_shape: tuple[int, ...]
    _train_images: Tensor

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
        seed: int = 42,
        epoch_length: int = 10,
        tasks_per_batch: int | None = None,
    ) -> None:
        super().__init__(epoch_length=epoch_length)
        self.ways = ways
        self.shots = shots
        self.queries = queries
        self.n_train = n_train
        self.n_validation = n_validation
        self.n_test = n_test
        self.split_sizes = {
            "train_classes": train_classes,
            "validation_classes": validation_classes,
            "test_classes": test_classes,
        }
        self.seed = seed
        self.tasks_per_batch = tasks_per_batch
        check_positive(self, "ways", "shots", "queries", "tasks_per_batch")
        check_positive(self, *(f"n_{name}" for name in SPLITS))

    def load(self) -> Tensor:
        """Return all images, (classes, examples, C, H, W); ink is 1, paper is 0."""
        raise NotImplementedError(f"`{type(self).__name__}` must define `load()`.")

    def setup(self, stage: str | None = None) -> None:
        """Load the images and draw the episodes, once: all stages use the same data."""
        if self.lower is not None:
            return
        call = type(self).__name__
        images = self.load()
        count = images.shape[1]
        if self.shots + self.queries > count:
            raise ValueError(f"`{call}`: shots + queries are more than the {count} of a class.")
        generator = torch.Generator().manual_seed(0)
        numbers = parts(call, len(images), self.split_sizes, generator, least=self.ways)
        self._train_images = images[numbers[0]]
        episodes = []
        for name, part in zip(SPLITS, numbers, strict=True):
            keys = [f"{name}/{i}" for i in range(getattr(self, f"n_{name}"))]
            episodes.append(self._episodes(images[part], keys))
        self._set(*episodes)

    def _set(self, train: Episodes, validation: Episodes, test: Episodes) -> None:
        levels = train.levels()
        self.upper, self.lower = levels["upper"], levels["lower"]
        self.validation, self.test = validation, test
        self.image_shape = tuple(train.support.shape[2:])

    def _episodes(self, images: Tensor, keys: Iterable[str]) -> Episodes:
        sizes = self.ways, self.shots, self.queries
        drawn = [draw_episode(images, *sizes, f"{self.seed}/{key}") for key in keys]
        return Episodes(*map(torch.stack, zip(*drawn, strict=True)))

    def fresh(self, numbers: Sequence[int] | Sequence[str]) -> Episodes:
        """Return further training episodes, which depend only on the seed and their numbers."""
        return self._episodes(self._train_images, [f"fresh/{number}" for number in numbers])

    def train_dataloader(self) -> Any:
        """Return the fixed episodes, or a loader of fresh ones."""
        count = self.tasks_per_batch
        if count is None:
            return super().train_dataloader()
        trainer = self.trainer
        # Each process has batches of its own.
        rank, processes = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

        def batch(number: int) -> dict[str, Any]:
            first = (number * processes + rank) * count
            return self.fresh(range(first, first + count)).levels()

        return FreshBatches(batch, self.epoch_length)

    def val_dataloader(self) -> list[Parts]:
        """Return the validation episodes and the test episodes."""
        return [self._evaluation(name) for name in ("validation", "test")]


class TaskEpisodes(EpisodeData):
    """Ready-made episodes, such as those from learn2learn's ``Taskset``.

    Args:
        train: The training episodes.
        validation: The validation episodes.
        test: The test episodes.
        epoch_length: Outer iterations per epoch.
        tasks_per_batch: Training episodes of each step, in another order each time that all have
            had their turn; None has all of them in all steps. Batches that change need a method on
            mini-batches.

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
        ways = int(train.support_labels.max()) + 1
        shots, queries = (tensor.shape[1] // ways for tensor in (train.support, train.query))
        counts: Any = (len(episodes.support) for episodes in (train, validation, test))
        options: Any = {"epoch_length": epoch_length, "tasks_per_batch": tasks_per_batch}
        super().__init__(ways, shots, queries, *counts, **options)
        self._train = train
        self._set(train, validation, test)

    def fresh(self, numbers: Sequence[Any]) -> Episodes:
        """Return training episodes; all have had their turn before one comes again."""
        count = len(self._train.support)
        turns = {
            turn: random.Random(f"{self.seed}/turn/{turn}").sample(range(count), count)
            for turn in {i // count for i in numbers}
        }
        chosen = torch.tensor([turns[i // count][i % count] for i in numbers])
        return Episodes(*(tensor[chosen] for tensor in self._train))
