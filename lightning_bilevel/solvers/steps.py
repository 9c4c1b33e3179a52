"""The step of a level along a direction, and the descent of an inner variable."""

from __future__ import annotations

from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.sets import ConvexSet

__all__ = ["descend", "plain"]


def plain(v: Tensor, direction: Tensor, rate: float, feasible: ConvexSet) -> Tensor:
    r"""Return :math:`P(v - s d)`, the step of the papers, for the direction d and the rate s."""
    return feasible.project(v - rate * direction)


def descend(lower: LowerLevel, z: Tensor, step: float, steps: int, lower_set: ConvexSet) -> Tensor:
    r"""Repeat :math:`z \leftarrow P_Y(z - s \nabla_y g(x, z))`, at one pass of g each."""
    for number in range(steps):
        # Methods that start at y need the gap at y afterwards, so the first gradient is kept.
        z = plain(z, lower.gradient(z, keep=number == 0), step, lower_set)
    return z
