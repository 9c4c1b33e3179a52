"""The problem of the current batch, made anew when the batch has changed."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel.core.leaves import leaves
from lightning_bilevel.core.problem import BilevelProblem

__all__ = ["BatchProblem", "Batches", "check_batch"]


@dataclass
class BatchProblem:
    """f and g on a batch.

    Attributes:
        contents: What tells the batch from another: its leaves, each tensor with its version, which
            counts in-place changes.
        batch: The batch.
        part: What this process evaluates of it; the batch itself where each process evaluates all
            of it.
        problem: f and g on it.
    """

    contents: list[tuple[Any, int]]
    batch: Any
    part: Any
    problem: BilevelProblem

    @property
    def is_split(self) -> bool:
        """Whether this process evaluates a part of the batch."""
        return self.part is not self.batch

    def is_of(self, contents: list[tuple[Any, int]]) -> bool:
        """Tell whether these are the contents of the batch: the same leaves, unchanged."""
        return len(contents) == len(self.contents) and all(
            a is b and version == other
            for (a, version), (b, other) in zip(contents, self.contents, strict=True)
        )


# Makes the problem on a batch with the contents, given the problem before it: the first batch of a
# run has none.
Make = Callable[[Any, list[tuple[Any, int]], BatchProblem | None], BatchProblem]


class Batches:
    """The batches that a run has seen.

    Attributes:
        current: The problem of the batch that was last asked for. It holds as long as the batch has
            the same contents.
        change: Whether training has seen different ones, as with mini-batches.
    """

    def __init__(self) -> None:
        self.current: BatchProblem | None = None
        self.change = False

    def problem_on(self, batch: Any, make: Make) -> BatchProblem:
        """Return the problem on a batch."""
        contents = [
            (leaf, leaf._version if isinstance(leaf, Tensor) else 0) for leaf in leaves(batch)
        ]
        if self.current is None or not self.current.is_of(contents):
            self.current = make(batch, contents, self.current)
        return self.current

    def next_problem(self, call: str, batch: Any, make: Make) -> BatchProblem:
        """Return the problem on the next batch of training.

        Args:
            call: The name of the module, for messages.
            batch: The batch.
            make: What makes its problem, if it is not the current one.
        """
        before = self.current
        if before is not None:
            _check_not_ended(call, batch, before.batch)
        now = self.problem_on(batch, make)
        if before is not None and now is not before:
            self.change = True
        return now

    def label(self, trainer: Any) -> str:
        """Say what the current problem is of, where that is not all data of a Trainer."""
        changing = self.change and getattr(trainer, "num_training_batches", 1) != 1
        return "the last mini-batch, not all data" if changing else ""

    def forget_points(self) -> None:
        """Make the problem of the current batch another object, of whose points solvers know
        nothing.
        """
        if self.current is not None:
            self.current = replace(self.current, problem=copy(self.current.problem))


def check_batch(call: str, batch: Any) -> None:
    """Refuse a training batch that is not one of two levels."""
    if not isinstance(batch, dict) or not {"upper", "lower"} <= batch.keys():
        got = (
            f"a dict with {sorted(batch)}"
            if isinstance(batch, dict)
            else f"a {type(batch).__name__}"
        )
        raise MisconfigurationException(
            f'`{call}` was given {got} as a training batch: it must be {{"upper": ..., "lower": ...}}, as a '
            "CombinedLoader over two loaders or a FullBatchDataModule gives it."
        )


def _check_not_ended(call: str, batch: Any, before: Any) -> None:
    for level in ("upper", "lower"):
        if isinstance(batch, dict) and batch.get(level) is None and before[level] is not None:
            raise MisconfigurationException(
                f"`{call}` was given a batch without data for the {level} level, whose loader has "
                "ended: "
                'use `CombinedLoader(..., "max_size_cycle")`, which starts it again, or "min_size".'
            )
