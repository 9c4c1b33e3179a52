"""A loader that yields other episodes in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

__all__ = ["FreshBatches"]

# Support, support labels, queries and query labels of some episodes.
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


class FreshBatches:
    """Yields batches ``{"upper": ..., "lower": ...}`` of episodes, numbered without end.

    An epoch is a number of batches. The next one goes on where it ended, and so does a resumed run,
    because the state of the loader is the number of the next batch.

    Args:
        take: Returns the episodes of some numbers.
        tasks: The number of episodes of a batch.
        length: The number of batches of an epoch.
        rank: The number of this process.
        world_size: The number of processes; each has batches of its own.
    """

    def __init__(
        self,
        take: Callable[[Sequence[int]], Parts],
        tasks: int,
        length: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._take = take
        self._tasks = tasks
        self._length = length
        self._rank = rank
        self._world_size = world_size
        self._next = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A resumed epoch has only the rest of its batches.
        for _ in range(self._length - self._next % self._length):
            number = self._next * self._world_size + self._rank
            self._next += 1
            first = number * self._tasks
            yield self._batch(range(first, first + self._tasks))

    def _batch(self, numbers: Sequence[int]) -> dict[str, Any]:
        support, support_labels, query, query_labels = self._take(numbers)
        # No index: each task of a batch has a head of its own.
        return {"upper": (query, query_labels, None), "lower": (support, support_labels, None)}

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next batch."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with that batch."""
        self._next = state["next"]
