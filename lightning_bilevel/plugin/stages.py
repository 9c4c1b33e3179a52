"""The stages of a run on a growing sample, and when the next one begins."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.plugin.batches import BatchProblem
from lightning_bilevel.plugin.growing import Growing, NestedSample
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["Stages", "growing_of"]

# So many outer iterations are between two looks at the noise. A look takes three passes over the
# sample, an iteration six or more.
_INTERVAL = 5
# A look evaluates so many parts of the sample.
_PARTS = 8
# A solver that cannot tell makes so many outer iterations in a stage.
_EVERY = 50

# Makes f and g on some data, as all processes share them, and the part of this process.
Make = Callable[[Any], tuple[BilevelProblem, Any]]


def growing_of(trainer: Any) -> Growing | None:
    """Return how the sample of a run grows, if its data module says so."""
    found: Growing | None = getattr(trainer.train_dataloader, "growing", None)
    return found


class Stages:
    """Where a run on a growing sample is.

    Args:
        growing: How the sample grows.
        batch: All data.
        saved: What :meth:`state` returned in the run that this one goes on from.

    Attributes:
        number: The number of the stage, from 0.
        since: The outer iterations of this stage.
        current: f and g on the sample.
    """

    def __init__(self, growing: Growing, batch: Any, saved: dict[str, Any] | None) -> None:
        self.growing = growing
        self.sample = NestedSample(growing, batch)
        self.number = 0
        self.since = 0
        self.current: BatchProblem | None = None
        self._parts: list[BilevelProblem] = []
        if saved is not None:
            if saved["sizes"] != self.sample.sizes or saved["growing"] != vars(growing):
                raise MisconfigurationException(
                    f"the checkpoint is of a run whose sample grew as {saved['sizes']} by "
                    f"`Growing({_arguments(saved['growing'])})`, and here it is "
                    f"{self.sample.sizes} by `{growing}`: a run goes on with the same samples. "
                    "Give the same `growing` and data, or start anew."
                )
            self.number = saved["number"]
            self.since = saved["since"]

    @property
    def is_last(self) -> bool:
        """Whether the sample is all data."""
        return self.number + 1 == len(self.sample.sizes)

    def next_problem(
        self, solver: BilevelOptimizer, whole: BatchProblem, make: Make
    ) -> BatchProblem:
        """Return f and g of the next step; before that, let the sample grow if it is time.

        Args:
            solver: The solver.
            whole: f and g on all data.
            make: Makes f and g on a sample.
        """
        if not self.is_last and self.since and self._is_over(solver, make):
            self.number += 1
            self.since = 0
            self.current = None
            self._parts = []
        if self.current is None:
            self.current = whole if self.is_last else self._made(self.number, make)
            self.current.problem.stage = self.sample.stage(self.number)
        self.since += 1
        return self.current

    def forget_points(self) -> None:
        """Replace the problem by a copy, so that solvers forget its points."""
        if self.current is not None:
            self.current = replace(self.current, problem=copy(self.current.problem))

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data for a checkpoint."""
        return {
            "number": self.number,
            "since": self.since,
            "sizes": self.sample.sizes,
            "growing": dict(vars(self.growing)),
        }

    def _is_over(self, solver: BilevelOptimizer, make: Make) -> bool:
        """Tell whether the stage is over."""
        every = self.growing.every
        if every is not None:
            return self.since >= every
        if self.since % _INTERVAL:
            return False
        too_small = solver.look(self._cut(make))
        return self.since >= _EVERY if too_small is None else too_small

    def _made(self, number: int, make: Make) -> BatchProblem:
        batch = self.sample.at(number)
        problem, part = make(batch)
        return BatchProblem([], batch, part, problem)

    def _cut(self, make: Make) -> list[BilevelProblem]:
        if not self._parts:
            count = min(_PARTS, self.sample.sizes[self.number])
            for part in self.sample.parts(self.number, count):
                problem = make(part)[0]
                problem.stage = self.sample.stage(self.number, count)
                self._parts.append(problem)
        return self._parts


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
