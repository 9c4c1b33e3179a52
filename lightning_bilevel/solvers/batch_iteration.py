"""Methods whose step on a mini-batch is their own iteration, or a part of it, on that batch."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from lightning_bilevel.core.errors import NonFiniteError
from lightning_bilevel.core.one_draw import with_one_draw
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo, StreamInfo
from lightning_bilevel.solvers.streaming import Streamed, skip_batch

__all__ = ["BatchIteration"]


class BatchIteration(BilevelOptimizer):
    """A method on hypergradients that runs on mini-batches.

    A step calls :meth:`advance_on_batch`, in which f and g are fixed functions: all evaluations of
    g see the same batch and the same random numbers, and so do those of f. A batch with a number
    that is not finite is left out, with the state of the run as it was before.
    """

    stochastic: ClassVar[bool] = True

    @property
    def takes_differences(self) -> bool:
        """Unless products with second derivatives are by double differentiation."""
        return bool(self.constants.get("products") != "autograd")

    def advance_on_batch(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        """Do what one mini-batch is for: an iteration, unless the method takes several for one."""
        return self.advance(problem, x, y)

    def on_batch(self, problem: BilevelProblem, x: Tensor, y: Tensor, seconds: float) -> Streamed:
        memory = self.memory
        before = dict(memory)
        fixed = with_one_draw(problem, x.device)
        try:
            new_x, new_y, info = self.advance_on_batch(fixed, x, y)
        except NonFiniteError as error:
            memory.clear()
            memory.update(before)
            return Streamed(x, y, skip_batch(self, error), None, 0.0)
        finally:
            problem.calls = fixed.calls
        memory["skipped_in_a_row"] = 0
        memory.setdefault("skipped", 0)
        streamed = StreamInfo(
            upper=info.upper,
            lower=info.lower,
            inner_iterations=info.inner_iterations,
            lr=info.lr,
            skipped=memory["skipped"],
        )
        rate = self.param_groups[0]["lr"] if info.lr is None else info.lr
        shared = problem.mean_over_ranks(seconds, x)
        return Streamed(new_x, new_y, streamed, (rate, rate), shared)
