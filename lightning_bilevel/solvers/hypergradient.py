"""What the methods on hypergradients share: products in two ways, and the adjoint system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.differences import difference_curvature, difference_products
from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.sets import ConvexSet, Face

__all__ = ["Descent", "Ways", "adjoint_matrix", "descend_to", "products", "resolution"]

# How products with second derivatives are computed.
Ways = Literal["autograd", "difference"]


def products(lower: LowerLevel, y: Tensor, v: Tensor, way: Ways) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\nabla^2_{yy} g\, v` and :math:`\nabla^2_{xy} g\, v`, at two passes."""
    if way == "difference":
        return difference_products(lower, y, v)
    exact = lower.products(y, v)
    return exact.yy, exact.xy


def resolution(way: Ways, dtype: torch.dtype) -> float:
    """Return the relative accuracy of a product, with a margin of a hundred."""
    eps = torch.finfo(dtype).eps
    return 100 * (eps if way == "autograd" else eps ** (2 / 3))


def adjoint_matrix(
    lower: LowerLevel, y: Tensor, face: Face, step: float, damping: float, way: Ways
) -> Callable[[Tensor], Tensor]:
    r"""Return :math:`v \mapsto T \nabla^2_{yy} g\, v + (b/s + d)\, v`, at two passes each."""
    shift = face.bend / step + damping

    def product(v: Tensor) -> Tensor:
        yy = difference_curvature(lower, y, v) if way == "difference" else lower.curvature(y, v)
        return face.tangent(yy) + shift * v

    return product


class Descent(NamedTuple):
    """The end of some steps on g(x, .).

    Attributes:
        y: The last point.
        before: The last points before the projection, oldest first; the last of them leads to y.
        lower: g at the point before the last step.
    """

    y: Tensor
    before: list[Tensor]
    lower: float


def descend_to(
    lower: LowerLevel,
    y: Tensor,
    step: float,
    steps: int,
    keep: int,
    lower_set: ConvexSet,
) -> Descent:
    r"""Repeat :math:`u = y - s \nabla_y g(x, y)`, :math:`y \leftarrow P_Y(u)`; keep the last u."""
    before: list[Tensor] = []
    value = 0.0
    for _ in range(steps):
        value, slope = lower.value_and_gradient(y)
        u = y - step * slope
        y = lower_set.project(u)
        before = [*before, u][-keep:]
    return Descent(y, before, value)
