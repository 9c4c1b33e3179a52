r"""Second derivatives of f and g around a point, as differences of gradients.

The Hessian H is never formed: :math:`H v \approx (\nabla g(y + h v) - \nabla g(y))/h`. Repeating
:math:`v \leftarrow H v / \|H v\|` turns v towards the direction of the largest curvature.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bilevel.core.errors import NonFiniteError
from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import Product
from lightning_bilevel.core.vectors import Metric, norm

_Map = Callable[[Tensor], Tensor]


def lower_curvature(
    problem: BilevelProblem, x: Tensor, y: Tensor, steps: int = 10, unit: float = 1.0
) -> float:
    r"""Estimate :math:`L_{yy}`, the Lipschitz constant of :math:`\nabla_y g(x, \cdot)`, at y.

    Each step of the power iteration takes one gradient of g, and so does its start. All points lie
    in Y. The estimate is that of y in the unit.
    """
    lower, feasible = problem.at(x), problem.lower_set
    return _largest(
        lambda v: unit * lower.gradient(unit * v),
        y / unit,
        lambda v: feasible.project(unit * v) / unit,
        steps,
    )


def upper_curvature(
    problem: BilevelProblem, x: Tensor, y: Tensor, metric: Metric, steps: int = 4
) -> float:
    r"""Estimate the Lipschitz constant of :math:`\nabla f` at (x, y), in the units of the metric.

    Each step of the power iteration takes one pass of f.
    """
    split = metric.split
    both = Product([problem.upper_set, problem.lower_set], [split, y.numel()])

    def gradient(w: Tensor) -> Tensor:
        w = metric.scaled(w, 1)
        f = problem.upper(w[:split], w[split:])
        return metric.scaled(torch.cat([f.grad_x, f.grad_y]), 1)

    def project(w: Tensor) -> Tensor:
        return metric.scaled(both.project(metric.scaled(w, 1)), -1)

    return _largest(gradient, metric.scaled(torch.cat([x, y]), -1), project, steps)


def coupling(problem: BilevelProblem, x: Tensor, y: Tensor, z: Tensor) -> float:
    r"""Estimate :math:`L_{xy}` by :math:`\|\nabla_x g(x, y) - \nabla_x g(x, z)\| / \|y - z\|`.

    The estimate is 0 where y = z.
    """
    distance = norm(y - z)
    return norm(problem.at(x).gap_x(y, z)[1]) / distance if distance > 0.0 else 0.0


def _largest(gradient: _Map, w: Tensor, project: _Map, steps: int) -> float:
    """Return the largest |gradient(w + d) - gradient(w)| / |d| of a power iteration in the set."""
    start = gradient(w)
    largest = 0.0
    # If the points differ in half of their digits, the difference of the gradients keeps half.
    length = torch.finfo(w.dtype).eps ** 0.5 * (1.0 + norm(w))
    # The first direction is the same in every process and every run. It contains the gradient,
    # because the first step of the solver follows it.
    generator = torch.Generator("cpu").manual_seed(0)
    v = torch.randn(w.numel(), generator=generator, dtype=torch.float64, device="cpu").to(w)
    v = v + _unit(start) * w.numel() ** 0.5
    for _ in range(steps):
        moved = project(w + length * _unit(v))
        if norm(moved - w) < 0.5 * length:
            moved = project(w - length * _unit(v))
        distance = norm(moved - w)
        if distance == 0.0:
            break
        try:
            v = gradient(moved) - start
        except NonFiniteError:
            break
        largest = max(largest, norm(v) / distance)
    # A difference of gradients is exact to half of their digits, and the last digits depend on the
    # order of a sum. Rounded to eight bits, the estimate is the same in one process and in several.
    mantissa, exponent = math.frexp(largest)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _unit(v: Tensor) -> Tensor:
    return v / max(norm(v), torch.finfo(v.dtype).tiny)


def reachable_envelope(
    problem: BilevelProblem, x: Tensor, y: Tensor, wanted: Envelope, steps: int = 5
) -> Envelope:
    r"""Return the wanted envelope, or one with a smaller rho if its proximal point is far to find.

    L is the curvature of g(x, .) at y, as a power iteration estimates it. An envelope with
    :math:`4 \rho L \le 1` is returned as it is.

    The proximal point minimises :math:`\psi = g(x, \cdot) + \|\cdot - y\|^2/(2\rho)`. Where the
    curvature of g(x, .) is at most L in size, psi has curvatures from :math:`1/\rho - L` to
    :math:`1/\rho + L`, and the number of gradient steps grows with the quotient of the two. It is
    5/3 for

    .. math:: \rho = \frac{1}{4L}, \qquad \sigma = L,

    which is also what IVSP chooses for itself. L is a weak-convexity modulus of any g with such a
    curvature, so nothing is assumed about convexity. With a smaller rho the same gap allows a
    longer gradient of g. So delta falls along with it, and a feasible point has the same bound
    :math:`\sqrt{2\delta/(\rho(1 - \rho\sigma))}` on how far z is from being stationary.

    Args:
        problem: f, g and the sets.
        x: The upper-level variables.
        y: The lower-level variables.
        wanted: The envelope to begin with.
        steps: The steps of the power iteration. Each is a gradient of g, and there is one more.
    """
    curvature = lower_curvature(problem, x, y, steps)
    if 4 * wanted.rho * curvature <= 1:
        return wanted
    rho = 1 / (4 * curvature)
    share = rho * (1 - rho * curvature) / (wanted.rho * (1 - wanted.rho * wanted.sigma))
    return Envelope(rho=rho, sigma=curvature, delta=share * wanted.delta)


def difference_products(
    lower: LowerLevel, y: Tensor, v: Tensor, step: float | None = None, unit: float = 1.0
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\nabla^2_{yy} g\, v` and :math:`\nabla^2_{xy} g\, v` by central differences.

    .. math:: \nabla^2 g(x, y)\, v \approx
        \frac{\nabla g(x, y + h v) - \nabla g(x, y - h v)}{2 h}, \qquad
        h = s\, (1 + \|y\|) / \|v\|

    They count as a gap, and serve functions that torch cannot differentiate twice. The error is of
    the order of :math:`s^2`, plus that of rounding over s. Both points may lie outside Y.

    Double differentiation refuses such a function, with one exception. A function that is marked
    ``once_differentiable`` may enter the loss linearly: torch then takes its curvature for 0, and
    only a comparison with these differences shows it.

    Args:
        lower: g(x, .).
        y: The point.
        v: The vector.
        step: s; None for the cube root of the machine precision, which balances the two errors.
        unit: The unit of y, in which h is measured.
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
    """Return the h of :func:`difference_products`."""
    numbers = torch.finfo(y.dtype)
    relative = numbers.eps ** (1 / 3) if step is None else step
    # For v = 0 both points are y, and the difference is 0. The square root keeps h finite there.
    return float(relative * (unit + norm(y)) / max(norm(v), math.sqrt(numbers.tiny)))
