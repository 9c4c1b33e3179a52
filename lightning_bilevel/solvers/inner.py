"""The inner variable z of a method: where it starts, and how it descends."""

from __future__ import annotations

from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.steps import StepRule, plain

__all__ = ["descend", "remembered"]


def remembered(optimizer: BilevelOptimizer, name: str, y: Tensor) -> Tensor:
    """Return the inner variable that the method has saved under a name; it starts at y."""
    saved: Tensor | None = optimizer.memory.get(name)
    if saved is None:
        return y
    if saved.shape != y.shape:
        raise ValueError(
            f"`{type(optimizer).__name__}` keeps {name} of {saved.numel()} coordinates, and the "
            f"lower level has {y.numel()}: the state was saved for another lower level."
        )
    return saved


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
