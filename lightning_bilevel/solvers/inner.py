"""The inner variable z of a method: where it starts, how it descends, and the record of a method that weights its gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.base import BilevelOptimizer, StepInfo

__all__ = ["MultiplierInfo", "descend", "remembered"]


@dataclass(frozen=True)
class MultiplierInfo(StepInfo):
    """What one outer iteration did of a method that weights the gap g(x, y) - g(x, z) of its inner variable z.

    Attributes:
        multiplier: The weight of the gap in this iteration.
    """

    multiplier: float

    NAMES: ClassVar[dict[str, str]] = {**StepInfo.NAMES, "multiplier": "bilevel/multiplier"}


def remembered(optimizer: BilevelOptimizer, name: str, y: Tensor) -> Tensor:
    """Return the inner variable that the method keeps under a name; it starts at y."""
    saved = optimizer.memory.get(name)
    if saved is None:
        return y
    kept: Tensor = saved
    if kept.shape != y.shape:
        raise ValueError(
            f"`{type(optimizer).__name__}` keeps {name} of {kept.numel()} coordinates, and the lower level has {y.numel()}: "
            "the state was saved for another lower level."
        )
    return kept


def descend(lower: LowerLevel, z: Tensor, step: float, steps: int, lower_set: ConvexSet) -> Tensor:
    r"""Repeat :math:`z \leftarrow P_Y(z - s \nabla_y g(x, z))`, at one pass of g each."""
    for number in range(steps):
        # Methods that start at y ask for the gap at y when they are done.
        z = lower_set.project(z - step * lower.gradient(z, keep=number == 0))
    return z
