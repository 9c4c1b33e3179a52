"""HJFBiO, the Hessian- and Jacobian-free single-loop method."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem, Scaled
from lightning_bilevel.core.sets import Ball, Box, ConvexSet, Product
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.steps import plain

__all__ = ["HJFBiO"]


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

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        gamma: float = 0.005,
        lam: float = 0.01,
        tau: float = 0.01,
        r: float = 5.0,
        delta: float | None = None,
    ) -> None:
        constants = constants_of(
            locals(),
            lr="gamma",
            positive=("gamma", "lam", "tau", "r", "delta"),
            optional=("delta",),
        )
        super().__init__(params, constants)
        self.memory["on_sphere"] = False

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        c = self.constants
        v = self.memory["v"] if "v" in self.memory else torch.zeros_like(y)
        delta = _distance(y, v) if c["delta"] is None else c["delta"]
        here = problem.at(x)
        lower, g_y = here.value_and_gradient(y)
        probes = here.full_gap(y + delta * v, y - delta * v)
        f = problem.upper(x, y)
        J = probes.grad_x / (2 * delta)
        H = (probes.grad_y - probes.grad_z) / (2 * delta)
        y_new = plain(y, g_y, c["lam"], problem.lower_set)
        x_new = plain(x, f.grad_x - J, c["gamma"], problem.upper_set)
        v_new = plain(v, H - f.grad_y, c["tau"], Ball(c["r"]))
        held = _held(problem.lower_set, y, g_y)
        if held is not None:
            v_new = v_new.masked_fill(held, 0.0)
        self.memory["v"] = v_new
        self._warn_on_sphere(v_new)
        return x_new, y_new, StepInfo(upper=f.value, lower=lower, inner_iterations=1, lr=c["gamma"])

    def _warn_on_sphere(self, v: Tensor) -> None:
        r = self.constants["r"]
        # A projected v is on the surface up to rounding.
        inside = norm(v) < r * (1 - 8 * torch.finfo(v.dtype).eps)
        if inside or self.memory["on_sphere"]:
            return
        self.memory["on_sphere"] = True
        warnings.warn(
            f"HJFBiO's v has reached the surface of its ball, `r={r:g}`, in outer iteration "
            f"{self.memory['iteration'] + 1}: while it stays there, the hypergradient is wrong. "
            "Make `r` larger; if v goes on growing, the Hessian of g(x, .) is singular or "
            "indefinite, or `tau` is too long.",
            stacklevel=4,
        )


def _distance(y: Tensor, v: Tensor) -> float:
    r"""Return :math:`\delta` with :math:`\|\delta v\| = \sqrt[3]{u} (1 + \|y\|)`."""
    numbers = torch.finfo(y.dtype)
    # The square root keeps delta finite where v is 0.
    return float(numbers.eps ** (1 / 3) * (1 + norm(y)) / max(norm(v), math.sqrt(numbers.tiny)))


def _held(lower_set: ConvexSet, y: Tensor, slope: Tensor) -> Tensor | None:
    """Return which coordinates of y a bound holds against a step along -slope; None if none can."""
    if isinstance(lower_set, Scaled):
        return _held(lower_set.base, y * lower_set.unit, slope)
    if isinstance(lower_set, Product):
        blocks = zip(
            lower_set.sets,
            torch.split(y, lower_set.sizes),
            torch.split(slope, lower_set.sizes),
            strict=True,
        )
        held = [_held(*block) for block in blocks]
        free = [torch.zeros(n, dtype=torch.bool, device=y.device) for n in lower_set.sizes]
        return torch.cat([f if h is None else h for f, h in zip(free, held, strict=True)])
    if not isinstance(lower_set, Box):
        return None
    # A long step outwards does not leave a coordinate that is at its bound.
    away = slope.sign() * (1 + y.abs())
    return (slope != 0) & (lower_set.project(y - away) == y)
