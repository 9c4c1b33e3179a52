r"""Products of the second derivatives of g with a vector, as central differences of gradients.

.. math:: \nabla^2 g(x, y)\, v \approx \frac{\nabla g(x, y + h v) - \nabla g(x, y - h v)}{2 h},
    \qquad h = s\, (1 + \|y\|) / \|v\|

They are for functions that torch cannot differentiate twice. Their error is of the order of
:math:`s^2`, plus that of rounding over s. Both points may lie outside Y. Where y is measured in a
unit, so are the lengths.

Double differentiation finds out about such a function, with one exception: if it is marked
``once_differentiable`` and its result enters the loss linearly, torch takes its curvature for 0
without a trace, and only a comparison with these differences shows it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.vectors import norm

__all__ = ["difference_curvature", "difference_length", "difference_products"]


def difference_products(
    lower: LowerLevel, y: Tensor, v: Tensor, step: float | None = None, unit: float = 1.0
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\nabla^2_{yy} g\, v` and :math:`\nabla^2_{xy} g\, v`, counted as a gap.

    Args:
        lower: g(x, .).
        y: The point.
        v: The vector.
        step: s; None for the cube root of the machine precision, which balances the two errors.
        unit: The unit of y.
    """
    h = difference_length(y, v, unit, step)
    gap = lower.full_gap(y + h * v, y - h * v)
    return (gap.grad_y - gap.grad_z) / (2 * h), gap.grad_x / (2 * h)


def difference_curvature(
    lower: LowerLevel, y: Tensor, v: Tensor, step: float | None = None, unit: float = 1.0
) -> Tensor:
    r"""Return :math:`\nabla^2_{yy} g\, v` alone, from two gradients of g(x, .)."""
    h = difference_length(y, v, unit, step)
    return (lower.gradient(y + h * v) - lower.gradient(y - h * v)) / (2 * h)


def difference_length(y: Tensor, v: Tensor, unit: float = 1.0, step: float | None = None) -> float:
    """Return h, for an s as above."""
    numbers = torch.finfo(y.dtype)
    relative = numbers.eps ** (1 / 3) if step is None else step
    # For v = 0 both points are y, and the difference is 0. The square root keeps h finite there.
    return float(relative * (unit + norm(y)) / max(norm(v), math.sqrt(numbers.tiny)))
