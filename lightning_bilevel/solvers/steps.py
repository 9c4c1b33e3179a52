"""The step of a level along a direction."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_bilevel.core.sets import ConvexSet

__all__ = ["StepRule", "plain"]

# (v, direction, rate, feasible) -> the new v, in the set. The fused `core.prox.projected_step` has
# this type too.
StepRule = Callable[[Tensor, Tensor, float, ConvexSet], Tensor]


def plain(v: Tensor, direction: Tensor, rate: float, feasible: ConvexSet) -> Tensor:
    r"""Return :math:`P(v - s d)`, the step of the papers, for the direction d and the rate s."""
    return feasible.project(v - rate * direction)
