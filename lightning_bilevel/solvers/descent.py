"""Steps on the lower level, and what the next iteration needs of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from lightning_bilevel.core.lower import At, LowerLevel, vector
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.base import State

__all__ = ["AheadState", "Descent", "descend"]


@dataclass(frozen=True, kw_only=True)
class AheadState(State):
    """The state of a method that evaluates g at the new x, where its next iteration begins.

    Attributes:
        here: g(x, .); None at the start, after a load, and after a change from outside.
    """

    here: LowerLevel | None = None

    UNSAVED: ClassVar[tuple[str, ...]] = (*State.UNSAVED, "here")

    def moved(self, x: Tensor, y: Tensor) -> AheadState:
        return replace(self, x=x, y=y, here=None)


class Descent(NamedTuple):
    r"""The end of some steps on g(x, .).

    Attributes:
        end: The last point.
        first: The gradient at the first point.
        lower: g at the point before the last step.
        before: The last points before the projection, oldest first; the last of them leads to
            ``end``.
    """

    end: Tensor
    first: Tensor | None
    lower: float
    before: list[Tensor]


def descend(
    lower: LowerLevel, z: At, rate: float, steps: int, lower_set: ConvexSet, keep: int = 1
) -> Descent:
    r"""Repeat :math:`u = z - s \nabla_y g(x, z)`, :math:`z \leftarrow P_Y(u)`; keep the last u."""
    first: Tensor | None = None
    before: list[Tensor] = []
    value = 0.0
    for _ in range(steps):
        value, slope = lower.value_and_gradient(z)
        first = slope if first is None else first
        u = vector(z) - rate * slope
        z = lower_set.project(u)
        before = [*before, u][-keep:]
    return Descent(vector(z), first, value, before)
