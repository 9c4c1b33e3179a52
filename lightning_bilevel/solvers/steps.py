"""The step of a level along a direction, and the descent of an inner variable."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.sets import ConvexSet

__all__ = ["StepRule", "clipped", "descend", "plain", "touching"]

# (v, direction, rate, feasible) -> the new v, in the set. The fused `core.prox.projected_step` has
# this type too.
StepRule = Callable[[Tensor, Tensor, float, ConvexSet], Tensor]

# Keeps a direction that is zero at zero, as in torch's clipping.
_GUARD = 1e-6


def plain(v: Tensor, direction: Tensor, rate: float, feasible: ConvexSet) -> Tensor:
    r"""Return :math:`P(v - s d)`, the step of the papers, for the direction d and the rate s."""
    return feasible.project(v - rate * direction)


def touching(
    v: Tensor, direction: Tensor, rate: float, feasible: ConvexSet, touched: Tensor
) -> Tensor:
    r"""Return :math:`P(v - s d)` for a direction that is 0 but at the touched coordinates."""
    moved = v.index_add(0, touched, direction[touched], alpha=-rate)
    return feasible.project(moved)


def clipped(direction: Tensor, bound: float | None) -> Tensor:
    r"""Return :math:`d \min\{1, c/\|d\|\}` for the bound c, without a transfer from the device."""
    if bound is None:
        return direction
    length = torch.linalg.vector_norm(direction)
    return direction * torch.clamp(bound / (length + _GUARD), max=1.0)


def descend(
    lower: LowerLevel,
    z: Tensor,
    step: float,
    steps: int,
    lower_set: ConvexSet,
    rule: StepRule = plain,
) -> Tensor:
    r"""Repeat :math:`z \leftarrow P_Y(z - s \nabla_y g(x, z))`, at one pass of g each."""
    for number in range(steps):
        # Methods that start at y need the gap at y afterwards, so the first gradient is kept.
        z = rule(z, lower.gradient(z, keep=number == 0), step, lower_set)
    return z
