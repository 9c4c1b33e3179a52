"""Counts over a run, from the records of its iterations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning_bilevel.core.passes import Calls
from lightning_bilevel.solvers.record import PenaltyInfo, StepInfo

__all__ = ["Tally"]


@dataclass
class Tally:
    r"""Counts over a run, as plain numbers for a checkpoint.

    Attributes:
        iterations: Outer iterations.
        inner_iterations: Gradient steps on the lower level.
        upper_calls: Evaluations of f.
        lower_calls: Evaluations of the gradient of g(x, .).
        gap_calls: Evaluations of g(x, y) - g(x, z).
        product_calls: Products of second derivatives of g with a vector.
        value_calls: Evaluations of g without a gradient.
        trials: Trials of the line search; 0 for methods without one.
        capped: Line searches that used up their trials or ended at L_max.
        halvings: How often the inner step was halved.
        penalty_updates: How often the penalty was strengthened.
        last_update: The iteration of the last penalty update, 0 for none.
        above: The number of latest iterations, without a break, with
            :math:`\tilde R > 2 a_\phi \mu`.
        penalised: Whether the method has a penalty that it strengthens.
    """

    iterations: int = 0
    inner_iterations: int = 0
    upper_calls: int = 0
    lower_calls: int = 0
    gap_calls: int = 0
    product_calls: int = 0
    value_calls: int = 0
    trials: int = 0
    capped: int = 0
    halvings: int = 0
    penalty_updates: int = 0
    last_update: int = 0
    above: int = 0
    penalised: bool = False

    @property
    def passes(self) -> int:
        """Forward and backward passes, as :attr:`Calls.passes` counts them."""
        return Calls(
            self.upper_calls,
            self.lower_calls,
            self.gap_calls,
            self.product_calls,
            self.value_calls,
        ).passes

    def add(self, info: StepInfo) -> None:
        """Count one iteration."""
        self.iterations = info.iteration
        self.inner_iterations += info.inner_iterations
        self.upper_calls += info.calls.upper
        self.lower_calls += info.calls.lower
        self.gap_calls += info.calls.gap
        self.product_calls += info.calls.products
        self.value_calls += info.calls.values
        if isinstance(info, PenaltyInfo):
            self.penalised = True
            self.trials += info.trials
            self.capped += info.capped
            self.halvings = info.halvings
            self.penalty_updates = info.penalty_updates
            if info.penalty_updated:
                self.last_update = info.iteration
            self.above = self.above + 1 if info.residual > info.threshold else 0

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name."""
        return asdict(self)
