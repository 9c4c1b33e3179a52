"""Lu and Mei's first-order penalty method for convex lower levels, and its saddle-point solver."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import Product
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.base import BilevelOptimizer, Method, State
from lightning_bilevel.solvers.constants import positive, whole
from lightning_bilevel.solvers.record import StepInfo


@dataclass(frozen=True, kw_only=True)
class LuMeiState(State):
    """The state of Lu and Mei's method.

    Attributes:
        z: The inner variable; None before the first iteration.
        z_first: The z of the start, which the problem of each iteration draws to.
    """

    z: Tensor | None = None
    z_first: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LuMeiMethod(Method[LuMeiState]):
    """The constants of Lu and Mei's method and its iteration."""

    eps: float = positive(0.1)
    L_f: float = positive(1.0)
    L_g: float = positive(1.0)
    D: float = positive(10.0)
    max_inner: int = whole(10_000)

    def lr_at(self, k: int) -> float:
        return 1 / (2 * (self.L_f + 2 * self.L_g / self.eps))

    def step(self, problem: BilevelProblem, s: LuMeiState) -> tuple[LuMeiState, StepInfo]:
        eps, L_g = self.eps, self.L_g
        rho, s_z, L_h = 1 / eps, eps / (2 * self.D), self.L_f + 2 * L_g / eps
        accuracy = eps**1.5 / (s.k + 1)
        first = math.ceil(self.D * math.sqrt(2 * L_g / eps)) if s.z is None else 0
        y = _accelerated(problem, s.x, s.y, s.rate_y(1 / L_g), first)
        z = y if s.z is None else s.z
        z_first = y if s.z_first is None else s.z_first
        sizes = [s.x.numel(), y.numel(), y.numel()]
        feasible = Product([problem.upper_set, problem.lower_set, problem.lower_set], sizes)
        # The saddle problem is solved in w = (x, y, z), each in its unit.
        scaled, size_u = s.metric.scaled, sizes[0] + sizes[1]
        values: dict[str, Any] = {}

        def F(w: Tensor) -> Tensor:
            x, y, z = torch.split(scaled(w, 1), sizes)
            f = problem.upper(x, y)
            gap = problem.at(x).full_gap(y, z)
            values.update(upper=f.value, lower=gap.value_y)
            slopes = [f.grad_x + rho * gap.grad_x, f.grad_y + rho * gap.grad_y, rho * gap.grad_z]
            # The gradients of L_h |u - u^k|^2 and s_z/2 |z - z^0|^2.
            pulls = torch.cat([2 * L_h * (w - start)[:size_u], s_z * (w - anchor)[size_u:]])
            return scaled(torch.cat(slopes), 1) + pulls

        def project(w: Tensor) -> Tensor:
            return scaled(feasible.project(scaled(w, 1)), -1)

        start, anchor = (scaled(torch.cat([s.x, y, v]), -1) for v in (z, z_first))
        saddle = Saddle(F, project, size_u, L_h, s_z, 3 * L_h + s_z)
        w, residual, steps = solve_saddle(saddle, start, accuracy, self.max_inner)
        x, y, z = (part.clone() for part in torch.split(scaled(w, 1), sizes))
        if residual > accuracy:
            # Python shows the same warning once.
            warnings.warn(
                f"LuMei ended outer iterations at `max_inner={self.max_inner}`.", stacklevel=5
            )
        info = StepInfo(**values, inner_iterations=first + steps, multiplier=rho)
        return s.after(x, y, z=z, z_first=z_first), info


class LuMei(BilevelOptimizer):
    r"""First-order penalty method of Lu and Mei, by proximal-point steps on a minimax problem.

    It solves, with :math:`u = (x, y)` and :math:`\rho = 1/\varepsilon`,

    .. math:: \min_{u \in X \times Y} \max_{z \in Y}
        P(u, z) = f(x, y) + \rho \bigl(g(x, y) - g(x, z)\bigr)

    by an inexact proximal-point method. At the first iteration y moves to :math:`y^0` with
    :math:`g(x^0, y^0) \le \min_u g(x^0, u) + \varepsilon`, by
    :math:`\lceil D \sqrt{2 L_g/\varepsilon} \rceil` accelerated gradient steps, and
    :math:`z^0 = y^0`. Iteration k solves the strongly-convex-strongly-concave problem

    .. math::
        (u^{k+1}, z^{k+1}) \approx \arg\min_u \max_z P(u, z)
          - \tfrac{\varepsilon}{4 D} \|z - z^0\|^2 + L_h \|u - u^k\|^2,
          \qquad L_h = L_f + 2 \rho L_g

    up to a residual of :math:`\varepsilon^{3/2}/(k + 1)` by a method of optimal order (anchored
    extragradient steps within accelerated ones). The published method stops when
    :math:`\|u^{k+1} - u^k\| \le \varepsilon/(4 L_h)`, which is the ``step`` of the record.

    Assumption on g: g(x, .) is **convex** (nothing strong), Y is compact. Guarantee: an
    epsilon-KKT point of the penalty problem in :math:`\tilde O(\varepsilon^{-4})` evaluations. Cost
    of an iteration: 6 passes per extragradient step and 12 per step around them, **hundreds to
    hundreds of thousands in all**: this is a reference for theory and for tiny problems, slow for
    anything else. Upper and lower of the record are f and g at the new point, the multiplier is
    :math:`\rho`, inner iterations are extragradient steps.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        eps: :math:`\varepsilon`, the accuracy.
        L_f: The Lipschitz constant of the gradient of f.
        L_g: The Lipschitz constant of the gradient of g.
        D: The diameter of Y.
        max_inner: The cap on the extragradient steps of an iteration. An iteration that ends by it
            is short of its accuracy, so a short step then means nothing: there is a warning.

    The constants are those of the problem and have no good default: 1, 1 and 10 are generic. The
    cap is that of the published code.

    References:
        Lu, Mei: First-Order Penalty Methods for Bilevel Optimization. SIAM Journal on Optimization
            34(2), 2024 (Algorithms 2, 5 and 6).

    Notes:
        The updates are those of published code that follows the paper's algorithms by number; the
        paper's text was not at hand. Sets take the place of its nonsmooth proximal terms, and its
        functional constraints on the lower level (Algorithm 4) are not part of this. The code adds
        1e-8 to the inner stopping rule; here the slack is the rounding of the terms, because a
        fixed one ends all progress far above rounding. The code's cap is for the loop within, here
        it is for the whole iteration.
    """

    method_type = LuMeiMethod


def _accelerated(problem: BilevelProblem, x: Tensor, y: Tensor, step: float, steps: int) -> Tensor:
    """Return y after Nesterov's accelerated projected gradient steps for convex functions."""
    here, ahead, t = problem.at(x), y, 1.0
    for _ in range(steps):
        new = problem.lower_set.project(ahead - step * here.gradient(ahead))
        before, t = t, (1 + math.sqrt(1 + 4 * t * t)) / 2
        ahead = new + (before - 1) / t * (new - y)
        y = new
    return y


class Saddle(NamedTuple):
    r"""A saddle-point problem :math:`\min_u \max_z h(u, z)`, with w = (u, z).

    Attributes:
        F: w -> :math:`(\nabla_u h, -\nabla_z h)`.
        project: w -> the nearest point of the sets.
        size_u: The number of coordinates of u.
        s_u: The modulus of strong convexity of h in u.
        s_z: The modulus of strong concavity of h in z.
        L: The Lipschitz constant of F.
    """

    F: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    size_u: int
    s_u: float
    s_z: float
    L: float


def solve_saddle(saddle: Saddle, w: Tensor, accuracy: float, cap: int) -> tuple[Tensor, float, int]:
    r"""Solve a saddle-point problem from w up to a residual: Algorithm 5 of Lu and Mei.

    Sets take the place of their proximal terms. Each outer step solves a proximal problem by an
    anchored extragradient method up to a relative accuracy. Momentum acts on the dual image
    :math:`q = -s_u u` of u, and on z. One extragradient step evaluates F twice, an outer step four
    times more. A solve that ends at ``cap`` extragradient steps, over all outer steps,
    returns the point of smallest residual.

    Returns:
        The point, the norm of an element of F plus the normal cone there, and the extragradient
        steps.
    """
    size, s_u, s_z = saddle.size_u, saddle.s_u, saddle.s_z
    mix = min(1.0, math.sqrt(8 * s_z / s_u))
    e_z = min(1 / (2 * s_z), 4 / (mix * s_u))
    q = q_f = -s_u * w[:size]
    z = z_f = w[size:]
    best = w, math.inf
    steps = 0
    while best[1] > accuracy and steps < cap:
        q_g, z_g = mix * q + (1 - mix) * q_f, mix * z + (1 - mix) * z_f
        v, slope, done = _proximal(saddle, q_g, z_g, cap - steps)
        steps += done
        # q_f and w_f are subgradients, at (u_f, z_f), of h - s_u |u|^2/2 + s_z |z|^2/2 in u and of
        # minus that in z.
        u_f, z_f = v[:size], v[size:]
        q_f, w_f = slope[:size] - s_u * u_f, slope[size:] - s_z * z_f
        q = q + (q_f - q) / 2 - s_u / 2 * (u_f + q_f / s_u)
        z = z + e_z * s_z * (z_f - z) - e_z * (w_f + s_z * z_f)
        best = min(best, _candidate(saddle, torch.cat([-q / s_u, z])), key=itemgetter(1))
    if best[1] > accuracy:
        # Too few steps may lead away from the solution. The start is never left for worse.
        best = min(best, _candidate(saddle, w), key=itemgetter(1))
    return *best, steps


def _candidate(saddle: Saddle, w: Tensor) -> tuple[Tensor, float]:
    """Return a point of the sets near w, and the norm of a subgradient there."""
    step = min(saddle.s_u, saddle.s_z) / saddle.L**2
    before = saddle.F(w)
    new = saddle.project(w - step * before)
    return new, norm((w - new) / step - before + saddle.F(new))


def _proximal(saddle: Saddle, q_g: Tensor, z_g: Tensor, cap: int) -> tuple[Tensor, Tensor, int]:
    r"""Find v, and b in the normal cone of the sets at v, with A(v) + b near 0.

    .. math::
        A(w) = F(w) + \bigl(-\tfrac{s_u}{2} u - \tfrac12 q_g,\; \tfrac{s_u}{8} (z - z_g)\bigr),
        \qquad \gamma \|A(v) + b\| \le \|v - v_{-1}\|

    Returns:
        v, F(v) + b and the steps made.
    """
    size, s_u = saddle.size_u, saddle.s_u
    gamma = 8 / s_u
    rate = gamma / (2 * math.sqrt(5.0) * (1 + 8 * saddle.L / s_u))

    def A(w: Tensor, F: Tensor) -> Tensor:
        return F + torch.cat([-(s_u * w[:size] + q_g) / 2, s_u / 8 * (w[size:] - z_g)])

    start = torch.cat([-q_g / s_u, z_g])
    argument = start - rate * A(start, saddle.F(start))
    v = anchor = saddle.project(argument)
    done = 0
    while True:
        b = (argument - v) / rate
        F = saddle.F(v)
        of_v = A(v, F)
        total = of_v + b
        # A gradient is exact up to some tens of roundings of its largest terms: near the solution
        # both sides of the rule drown in them. The published code adds 1e-8 to the squares, which
        # ends all progress at a residual of 5e-5 on the problem of the tests.
        noise = 50 * torch.finfo(v.dtype).eps * (norm(of_v) + norm(b) + saddle.L * norm(v))
        if done >= cap or norm(total) <= noise or gamma * norm(total) <= norm(v - start):
            return v, F + b, done
        towards = v + 2 / (done + 3) * (anchor - v)
        half = towards - rate * total
        argument = towards - rate * A(half, saddle.F(half))
        v = saddle.project(argument)
        done += 1
