r"""What the methods on hypergradients share: products in two ways, and the adjoint system.

At a solution y of the lower level and for the face of Y on which it lies (T and b of
:mod:`~lightning_bilevel.core.sets`, s the step of y), the hypergradient is
:math:`\nabla_x f - \nabla^2_{xy} g\, v` with

.. math:: A v = T\, \nabla_y f, \qquad
    A v = T\, \nabla^2_{yy} g\, v + (b/s + d)\, v, \qquad v = T v

where d is the damping. Without constraints and damping this is :math:`\nabla^2_{yy} g\, v =
\nabla_y f`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.curvature import difference_curvature, difference_products
from lightning_bilevel.core.lower import At, LowerLevel, vector
from lightning_bilevel.core.sets import Face
from lightning_bilevel.core.vectors import dot, norm
from lightning_bilevel.solvers.base import State

__all__ = [
    "AdjointState",
    "Solved",
    "Ways",
    "adjoint_matrix",
    "conjugate_gradients",
    "fixed_point",
    "nonpositive",
    "products",
    "resolution",
    "warn_once",
]

# How products with second derivatives are computed.
Ways = Literal["autograd", "difference"]
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class AdjointState(State):
    """The state of a method that solves the adjoint system.

    Attributes:
        v: Its last solution; None if the next one does not start there.
        indefinite: Whether a curvature that is not positive has been reported.
    """

    v: Tensor | None = None
    indefinite: bool = False


def products(lower: LowerLevel, y: At, v: Tensor, way: Ways, unit: float) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\nabla^2_{yy} g\, v` and :math:`\nabla^2_{xy} g\, v`, at two passes."""
    if way == "difference":
        return difference_products(lower, vector(y), v, unit=unit)
    exact = lower.products(y, v)
    return exact.yy, exact.xy


def resolution(way: Ways, dtype: torch.dtype) -> float:
    """Return the relative accuracy of a product, with a margin of a hundred."""
    eps = torch.finfo(dtype).eps
    return 100 * (eps if way == "autograd" else eps ** (2 / 3))


def adjoint_matrix(
    lower: LowerLevel, y: At, face: Face, shift: Tensor | float, way: Ways, unit: float
) -> Product:
    r"""Return :math:`v \mapsto T \nabla^2_{yy} g\, v + (b/s + d)\, v`, at two passes each."""

    def product(v: Tensor) -> Tensor:
        if way == "difference":
            yy = difference_curvature(lower, vector(y), v, unit=unit)
        else:
            yy = lower.curvature(y, v)
        return face.tangent(yy) + shift * v

    return product


class Solved(NamedTuple):
    """A solution of A v = b, exact or not.

    Attributes:
        v: The vector.
        curvature: The smallest <p, A p>/|p|^2 that was met if it is not positive, and else None.
    """

    v: Tensor
    curvature: float | None = None


def nonpositive(p: Tensor, Ap: Tensor, resolution: float) -> float | None:
    """Return the curvature <p, A p>/|p|^2 if it is not positive.

    It counts as 0 if it is below the resolution times |A p|/|p|, where rounding decides its sign.
    """
    length = norm(p)
    if length == 0.0:
        return None
    curvature = dot(p, Ap) / length**2
    return curvature if curvature <= resolution * norm(Ap) / length else None


def conjugate_gradients(
    A: Product, b: Tensor, v: Tensor | None, steps: int, tolerance: float, resolution: float
) -> Solved:
    """Solve A v = b by conjugate gradients, which end where A is not positive definite.

    Args:
        A: The product with the matrix.
        b: The right-hand side.
        v: The start; None for 0, which saves a product.
        steps: At most so many.
        tolerance: They end at this residual, relative to b.
        resolution: The relative accuracy of the products.
    """
    r = b if v is None else b - A(v)
    v = torch.zeros_like(b) if v is None else v
    p = r
    squared = dot(r, r)
    enough = (max(tolerance, torch.finfo(b.dtype).eps) * norm(b)) ** 2
    # The largest curvature so far: a direction whose curvature is that much smaller counts as flat.
    largest = 0.0
    for _ in range(steps):
        if squared <= enough:
            break
        Ap = A(p)
        length = dot(p, p)
        bent = dot(p, Ap)
        largest = max(largest, norm(Ap) / length**0.5)
        if bent <= resolution * largest * length:
            return Solved(v, bent / length)
        alpha = squared / bent
        v = v + alpha * p
        r = r - alpha * Ap
        new = dot(r, r)
        p = r + (new / squared) * p
        squared = new
    return Solved(v)


def fixed_point(
    A: Product, b: Tensor, v: Tensor, steps: int, step: float, resolution: float
) -> Solved:
    r"""Repeat :math:`v \leftarrow v - s (A v - b)`.

    From :math:`v = s b` the result is the Neumann series :math:`s \sum_{j \le N} (I - s A)^j b`.
    """
    worst: float | None = None
    for _ in range(steps):
        Av = A(v)
        found = nonpositive(v, Av, resolution)
        if found is not None:
            worst = found if worst is None else min(worst, found)
        v = v - step * (Av - b)
    return Solved(v, worst)


def warn_once(
    solver: str,
    warned: bool,
    curvature: float | None,
    damping: float,
    consequence: str,
    unit: float = 1.0,
) -> bool:
    """Warn at the first curvature that is not positive; return whether there has been a warning."""
    if curvature is not None and not warned:
        curvature *= unit**2  # the damping is in the unit of y
        warnings.warn(
            f"`{solver}` met the curvature {curvature:.3g} along a direction of the lower level, "
            f"with `damping={damping:g}`: g(x, .) is not strongly convex at this point, as the "
            f"method assumes. {consequence} A `damping` above {damping - curvature:.3g} makes it "
            "positive along this direction, and changes the hypergradient; IVSP and MEHA need no "
            "convexity. This is said once a run.",
            stacklevel=6,
        )
    return warned or curvature is not None
