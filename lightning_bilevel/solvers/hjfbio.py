"""HJFBiO, the Hessian- and Jacobian-free single-loop method."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bilevel.core.curvature import difference_length
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import Ball, Box, ConvexSet, Product
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.base import BilevelOptimizer, Method, State, Units
from lightning_bilevel.solvers.constants import positive
from lightning_bilevel.solvers.record import StepInfo


@dataclass(frozen=True, kw_only=True)
class HJFBiOState(State):
    """The state of HJFBiO.

    Attributes:
        v: The solution of the linear system so far.
        on_sphere: Whether v has been reported to be on the surface of its ball.
    """

    v: Tensor
    on_sphere: bool = False


@dataclass(frozen=True, kw_only=True)
class HJFBiOMethod(Method[HJFBiOState]):
    """The constants of HJFBiO and its iteration."""

    gamma: float = positive(0.005)
    lam: float = positive(0.01)
    tau: float = positive(0.01)
    r: float = positive(5.0)
    delta: float | None = positive(None)

    def start(self, problem: BilevelProblem, x: Tensor, y: Tensor, units: Units) -> HJFBiOState:
        return HJFBiOState(x=x, y=y, units=units, v=torch.zeros_like(y))

    def step(self, problem: BilevelProblem, s: HJFBiOState) -> tuple[HJFBiOState, StepInfo]:
        v, unit, here = s.v, s.units[1], problem.at(s.x)
        delta = difference_length(s.y, v, unit) if self.delta is None else self.delta
        lower, g_y = here.value_and_gradient(s.y)
        probes = here.full_gap(s.y + delta * v, s.y - delta * v)
        f = problem.upper(s.x, s.y)
        J = probes.grad_x / (2 * delta)
        H = (probes.grad_y - probes.grad_z) / (2 * delta)
        y = problem.lower_set.project(s.y - s.rate_y(self.lam) * g_y)
        x = problem.upper_set.project(s.x - s.rate_x(self.gamma) * (f.grad_x - J))
        v = Ball(self.r * unit).project(v - s.rate_y(self.tau) * (H - f.grad_y))
        held = _held(problem.lower_set, s.y, g_y)
        v = v if held is None else v.masked_fill(held, 0.0)
        # A projected v is on the surface up to rounding.
        outside = norm(v) >= self.r * unit * (1 - 8 * torch.finfo(v.dtype).eps)
        if outside and not s.on_sphere:
            warnings.warn(
                f"HJFBiO's v has reached the surface of its ball, `r={self.r:g}`, in outer "
                f"iteration {s.k + 1}: while it stays there, the hypergradient is wrong. Make `r` "
                "larger; if v goes on growing, the Hessian of g(x, .) is singular or indefinite, "
                "or `tau` is too long.",
                stacklevel=5,
            )
        info = StepInfo(upper=f.value, lower=lower, inner_iterations=1)
        return s.after(x, y, v=v, on_sphere=s.on_sphere or outside), info


def _held(lower_set: ConvexSet, y: Tensor, slope: Tensor) -> Tensor | None:
    """Return which coordinates of y a bound holds against a step along -slope; None if none can."""
    if isinstance(lower_set, Product):
        parts = (torch.split(v, lower_set.sizes) for v in (y, slope))
        held = [_held(*block) for block in zip(lower_set.sets, *parts, strict=True)]
        free = [y.new_zeros(n, dtype=torch.bool) for n in lower_set.sizes]
        return torch.cat([f if h is None else h for f, h in zip(free, held, strict=True)])
    if not isinstance(lower_set, Box):
        return None
    # A long step outwards does not leave a coordinate that is at its bound.
    away = slope.sign() * (1 + y.abs())
    return (slope != 0) & (lower_set.project(y - away) == y)


class HJFBiO(BilevelOptimizer):
    r"""Hessian/Jacobian-free bilevel optimisation.

    It descends on the hyper-objective :math:`f(x, y^*(x))` by its gradient
    :math:`\nabla_x f - \nabla^2_{xy} g\, v` with :math:`\nabla^2_{yy} g\, v = \nabla_y f`. The
    three unknowns x, y and v move together, from :math:`v^0 = 0`, and products with second
    derivatives are central differences of gradients at :math:`y^k \pm \delta v^k`:

    .. math::
        J &= \bigl[\nabla_x g(x^k, y^k + \delta v^k) - \nabla_x g(x^k, y^k - \delta v^k)\bigr]
          / (2\delta), \quad
        H = \bigl[\nabla_y g(x^k, y^k + \delta v^k) - \nabla_y g(x^k, y^k - \delta v^k)\bigr]
          / (2\delta) \\
        y^{k+1} &= P_Y\bigl(y^k - \lambda \nabla_y g(x^k, y^k)\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \gamma [\nabla_x f(x^k, y^k) - J]\bigr) \\
        v^{k+1} &= P_{\|v\| \le r}\bigl(v^k - \tau [H - \nabla_y f(x^k, y^k)]\bigr)

    Assumption on g: g(x, .) satisfies the Polyak-Lojasiewicz (PL) condition, its Hessian is
    Lipschitz and not singular at the minimiser, and the gradient of f in y is bounded. Guarantee:
    the hyper-objective is stationary up to epsilon in :math:`O(\epsilon^{-2})` iterations. Cost of
    an iteration: 4 passes, gradients only. Upper and lower of the record are f and g at
    :math:`(x^k, y^k)`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        gamma: :math:`\gamma`, the step of x.
        lam: :math:`\lambda`, the step of y.
        tau: :math:`\tau`, the step of v.
        r: The radius of the ball of v; in theory (bound on the gradient of f in y)/(smallest
            eigenvalue of the Hessian). Where v ends on its surface, the hypergradient is wrong;
            the first time, there is a warning.
        delta: :math:`\delta`, the distance of the difference, in units of v. None chooses
            :math:`\delta = \sqrt[3]{u}\,(1 + \|y\|)/\|v\|` with the rounding unit u: a fixed small
            one such as 1e-4 loses most digits in float32.

    The default steps and r are those seen in the code of a descendant of the method.

    References:
        Huang: Optimal Hessian/Jacobian-Free Nonconvex-PL Bilevel Optimization. ICML 2024.

    Notes:
        Of the method's paper the abstract was at hand, and code of a Riemannian descendant; the
        updates are from memory. That all three move from the old point is part of that memory: the
        descendant uses the new y. The paper may clip H and J to balls, which is not done here. The
        choice of delta is the library's own. Projections of x and y are the natural insertion. The
        points :math:`y \pm \delta v` may leave Y, so g must be defined around it. In a
        :class:`~lightning_bilevel.core.sets.Box` v is 0 in the coordinates of y that a bound holds
        (y is at it, and the gradient step pushes outwards): then the hypergradient is that of the
        free coordinates. At the boundary of other sets v does not know of the constraint, and the
        hypergradient is not exact.
    """

    method_type = HJFBiOMethod
