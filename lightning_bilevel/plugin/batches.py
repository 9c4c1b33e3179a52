"""The problem of the current batch, made again when the batch has changed."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_bilevel.core.chunks import leaves
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["ON_MINI_BATCHES", "BatchProblem", "Batches", "check_batch", "warn_of_sample"]

# How to run on mini-batches, for messages of exact runs.
ON_MINI_BATCHES = (
    "return two torch optimisers, one per level, from `configure_optimizers`, and say `method=` in "
    "place of `solver=`"
)


@dataclass
class BatchProblem:
    """f and g on a batch.

    Attributes:
        contents: The leaves of the batch, which identify it. Each tensor comes with its version,
            which counts in-place changes.
        batch: The batch.
        part: The part that this process evaluates; the batch itself if each process evaluates all
            of it.
        problem: f and g on the batch.
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
        """Tell whether the batch has these contents: the same leaves, unchanged, or equal ones.

        A loader of one whole batch collates equal tensors anew in each epoch.
        """
        if len(contents) != len(self.contents):
            return False
        pairs = list(zip(contents, self.contents, strict=True))
        return all(a is b and version == other for (a, version), (b, other) in pairs) or all(
            _equal(a, b, other) for (a, _), (b, other) in pairs
        )


# Makes the problem on a batch from the batch, its contents and the previous problem. The first
# batch of a run has no previous problem.
Make = Callable[[Any, list[tuple[Any, int]], BatchProblem | None], BatchProblem]


class Batches:
    """The batches that a run has seen.

    Attributes:
        current: The problem on the latest batch. It is valid as long as the batch has the same
            contents.
        whole: The problem on all data, in a run on a growing sample; None otherwise.
    """

    def __init__(self) -> None:
        self.current: BatchProblem | None = None
        self.whole: BatchProblem | None = None

    def problem_on(self, batch: Any, make: Make) -> BatchProblem:
        """Return the problem on a batch."""
        contents = [
            (leaf, leaf._version if isinstance(leaf, Tensor) else 0) for leaf in leaves(batch)
        ]
        if self.current is None or not self.current.is_of(contents):
            self.current = make(batch, contents, self.current)
        return self.current

    def next_problem(
        self,
        call: str,
        solver: BilevelOptimizer,
        batch: Any,
        make: Make,
        loader: Any = None,
    ) -> BatchProblem:
        """Return the problem on the next batch of training.

        Args:
            call: The name of the module, for messages.
            solver: Its solver.
            batch: The batch.
            make: Makes the problem, if the batch is not the current one.
            loader: The training loader, which has a ``sample`` if its batches are one that grows.
        """
        sample: Any = getattr(loader, "sample", None)
        before = self.current
        if sample is not None and self.whole is None:
            # The checks of the first problem are of all data.
            self.whole = self.problem_on(sample.batch, make)
        now = self.problem_on(batch, make)
        if self.whole is not None:
            now.problem.sampled_from(self.whole.problem, sample.share)
        if self.whole is not None and sample.begins:
            solver.problem_changed()
        elif before is not None and now is not before:
            _refuse_change(call, solver)
        return now

    def forget_points(self) -> None:
        """Replace the problems by copies, so that solvers and certificates forget their points."""
        if self.current is not None:
            self.current = replace(self.current, problem=copy(self.current.problem))
        if self.whole is not None:
            self.whole = replace(self.whole, problem=copy(self.whole.problem))


def warn_of_sample(loader: Any) -> None:
    """Warn of a run that ends before its sample is all data."""
    sample = getattr(loader, "sample", None)
    if sample is not None and sample.share is not None:
        rank_zero_warn(
            f"The run ended on {sample}, and its certificate is of all data: run longer, or let "
            "the sample grow earlier with `Growing(every=...)`."
        )


def _equal(new: Any, old: Any, version: int) -> bool:
    """Tell whether a leaf equals an older one, which had this version then."""
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return new is old or (type(new) is type(old) and bool(new == old))
    if new is old or old._version != version:
        return new is old and new._version == version
    kind = new.dtype, new.device, new.shape
    return kind == (old.dtype, old.device, old.shape) and torch.equal(new, old)


def _refuse_change(call: str, solver: BilevelOptimizer) -> None:
    name = type(solver).__name__
    raise MisconfigurationException(
        f"`{call}` was given a batch with other values than the one before, as mini-batches, "
        f"shuffling and augmentation make them. {name} needs the same data in each step: give it "
        f"all of them, by a FullBatchDataModule; or run on mini-batches: {ON_MINI_BATCHES}."
    )


def check_batch(call: str, batch: Any) -> None:
    """Refuse a training batch without an upper and a lower level."""
    if not isinstance(batch, dict) or not {"upper", "lower"} <= batch.keys():
        raise MisconfigurationException(
            f"`{call}` was given a {type(batch).__name__} as a training batch: it must be "
            '{"upper": ..., "lower": ...}, as a CombinedLoader over two loaders or a '
            "FullBatchDataModule gives it."
        )
