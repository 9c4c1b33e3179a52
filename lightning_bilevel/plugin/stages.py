"""The stages of a run on a growing sample, and when the next one begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_bilevel.core.episode import Adaptation
from lightning_bilevel.core.passes import Calls
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.stage import Stage
from lightning_bilevel.core.unseen import Unseen
from lightning_bilevel.plugin.batches import BatchProblem
from lightning_bilevel.plugin.declaration import Declaration
from lightning_bilevel.plugin.growing import Growing, NestedSample
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["Stages", "stages_of"]

# So many outer iterations are between two looks at the noise. A look takes three passes over the
# sample and about one over unseen samples, an iteration six or more.
_INTERVAL = 5
# A look evaluates so many parts of the sample.
_PARTS = 8
# A solver that cannot tell makes so many outer iterations in a stage.
_EVERY = 50
# No stage is longer than this, so that every run comes to all data.
_LONGEST = 500

# Makes f and g on some data, as all processes share them, and the part of this process.
Make = Callable[[Any], tuple[BilevelProblem, Any]]


def stages_of(
    trainer: Any,
    batch: Any,
    declared: Declaration,
    saved: dict[str, Any] | None,
    started: bool,
) -> Stages | None:
    """Return the stages of a run, if its data module has a growing sample of several.

    Args:
        trainer: The Trainer.
        batch: All data.
        declared: What the module declares.
        saved: What the run that this one goes on from has saved of its stages.
        started: Whether this run goes on from another one.
    """
    growing: Growing | None = getattr(trainer.train_dataloader, "growing", None)
    stages = None if growing is None else Stages(growing, batch, declared, saved)
    several = stages is not None and len(stages.sample.sizes) > 1
    if started and several != (saved is not None):
        was, now = ("a growing sample", "all data") if saved else ("all data", "a growing sample")
        raise MisconfigurationException(
            f"the checkpoint is of a run on {was}, and this one is on {now}: give the data module "
            "the same `growing`, or start anew."
        )
    return stages if several else None


class Stages:
    """Where a run on a growing sample is.

    Args:
        growing: How the sample grows.
        batch: All data.
        declared: What the module declares. Where its lower level belongs to the batch
            (``adaptation``), the part of new samples is solved before they count.
        saved: What :meth:`state` returned in the run that this one goes on from.

    Attributes:
        number: The number of the stage, from 0.
        since: The outer iterations of this stage.
        current: f and g on the sample.
    """

    def __init__(
        self,
        growing: Growing,
        batch: Any,
        declared: Declaration,
        saved: dict[str, Any] | None = None,
    ) -> None:
        self.growing = growing
        self.declared = declared
        self.adaptation = declared.adaptation
        self.sample = NestedSample(growing, batch)
        self.number = 0
        self.since = 0
        self.current: BatchProblem | None = None
        self._parts: list[BilevelProblem] = []
        self._outside: BilevelProblem | None = None
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

    @property
    def stage(self) -> Stage:
        """How much of all data the sample is."""
        return self.sample.stage(self.number)

    def check_same(self, call: str, batch: Any) -> None:
        """Refuse data that change by themselves."""
        if batch is not self.sample.batch:
            raise MisconfigurationException(
                f"`{call}` was given a batch with other values than the one before, as "
                "augmentation and shuffling make them: a growing sample is a part of data that "
                "stay. Leave out what changes them, or leave out `growing` and use mini-batches."
            )

    def warn_of_sample(self) -> None:
        """Warn of a run that ends before its sample is all data."""
        if not self.is_last:
            rank_zero_warn(
                f"The run ended on {self.stage}: its point is none of a run on all data, and the "
                "convergence theorem says nothing of it. The certificate is of all data. Run "
                "longer, or let the sample grow earlier with `Growing(every=...)`."
            )

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
            self._outside = None
            if self.adaptation is not None:
                self._solve_entering(solver, self.adaptation, make)
        if self.current is None:
            self.current = whole if self.is_last else self._made(self.number, make)
            self.current.problem.is_stage(self.stage, whole.problem)
        self.since += 1
        return self.current

    def _solve_entering(self, solver: BilevelOptimizer, adaptation: Adaptation, make: Make) -> None:
        """Solve the part of y that belongs to the new samples, on these alone.

        Otherwise R would jump, because it has not moved yet.
        """
        entering = self.sample.entering(self.number)
        if entering is None:
            return
        began = time.perf_counter()
        batch, share = entering
        problem = make({**self.sample.batch, "lower": batch})[0]
        problem.stage = replace(self.sample.stage(self.number), lower=share)
        x, y = self.declared.read()
        self.declared.write(x, _adapted(problem, x, y, adaptation, share))
        solver.count([problem], time.perf_counter() - began)

    def _look_outside(self, make: Make) -> Unseen:
        """Evaluate f on samples that the stage has not seen, with their own part of y solved."""
        if self._outside is None:
            batch, stage = self.sample.unseen(self.number)
            self._outside = make(batch)[0]
            self._outside.stage = stage
        problem = self._outside
        problem.calls = Calls()
        size, following = self.sample.sizes[self.number : self.number + 2]
        upper = None
        if self.sample.counts["upper"] > size:
            x, y = self.declared.read()
            if self.adaptation is not None:
                assert problem.stage is not None
                y = _adapted(problem, x, y, self.adaptation, problem.stage.lower)
            upper = problem.upper(x, y).value
        has_gap = self.adaptation is None and self.sample.counts["lower"] > size
        return Unseen(problem, upper, has_gap, following / size)

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
        if self.since >= _LONGEST:
            return True
        if self.since % _INTERVAL:
            return False
        too_small = solver.look(self._cut(make), partial(self._look_outside, make))
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


def _adapted(
    problem: BilevelProblem, x: Tensor, y: Tensor, adaptation: Adaptation, share: float
) -> Tensor:
    """Return y with the part that belongs to some samples solved on these alone.

    Their losses do not depend on the rest of y, which stays. The rate is that of a mean over all
    samples; here the mean is over a share of them.
    """
    lower = problem.at(x)
    rate = share * adaptation.lr
    value, slope = lower.value_and_gradient(y)
    for _ in range(adaptation.steps):
        moved = problem.lower_set.project(y - rate * slope)
        new_value, new_slope = lower.value_and_gradient(moved)
        if new_value <= value:
            y, value, slope = moved, new_value, new_slope
        else:
            rate /= 2
    return y


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
