"""MEHA, the Moreau-envelope Hessian-free algorithm, and PNGBiO, its normalised form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel, LowerPoint
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.prox import projected_step, slope_of_psi
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.base import AheadState, BilevelOptimizer, Method, Units
from lightning_bilevel.solvers.constants import Power, choice, positive, schedule
from lightning_bilevel.solvers.record import StepInfo

# Keeps a direction that is zero at zero; smaller than any other rounding in d/|d|.
_GUARD = 1e-12


@dataclass(frozen=True, kw_only=True)
class MEHAState(AheadState):
    r"""The state of both methods.

    Attributes:
        theta: :math:`\theta`, the follower of the proximal point.
    """

    theta: Tensor


@dataclass(frozen=True, kw_only=True)
class MEHAMethod(Method[MEHAState]):
    """The constants of MEHA and its iteration."""

    alpha: Power = schedule(0.01)
    beta: Power = schedule(0.01)
    eta: Power = schedule(0.01)
    gamma: float = positive(1.0)
    # The paper's penalty grows slowly.
    c: Power = schedule(Power(1.0, 0.25))

    def start(self, problem: BilevelProblem, x: Tensor, y: Tensor, units: Units) -> MEHAState:
        return MEHAState(x=x, y=y, units=units, theta=y)

    def step(self, problem: BilevelProblem, s: MEHAState) -> tuple[MEHAState, StepInfo]:
        k, c, gamma = s.k, self.c.at(s.k), s.rate_y(self.gamma)
        here, at_y = s.here or problem.at(s.x), LowerPoint(s.y)
        theta = self.followed(problem, here, s)
        # d_x = grad_x f(x, y)/c + grad_x g(x, y) - grad_x g(x, theta)
        _, gap_x = here.gap_x(at_y, theta)
        d_x = torch.add(gap_x, problem.upper_x(s.x, s.y), alpha=1 / c)
        x = self.moved(s.x, d_x, self.alpha.at(k), s.units[0], problem.upper_set)
        # d_y = grad_y f(x+, y)/c + grad_y g(x+, y) - (y - theta)/gamma, at the new x
        there = problem.at(x)
        upper, f_y = problem.upper_y(x, s.y)
        lower, g_y = there.value_and_gradient(at_y)
        d_y = torch.add(g_y, f_y, alpha=1 / c).sub_(s.y - theta, alpha=1 / gamma)
        y = self.moved(s.y, d_y, self.beta.at(k), s.units[1], problem.lower_set)
        info = StepInfo(upper=upper, lower=lower, inner_iterations=1)
        return s.after(x, y, theta=theta, here=there), info

    def followed(self, problem: BilevelProblem, here: LowerLevel, s: MEHAState) -> Tensor:
        r"""Return :math:`P_Y(\theta - \eta [\nabla_y g(x, \theta) + (\theta - y)/\gamma])`."""
        slope = slope_of_psi(here.gradient(s.theta), s.theta, s.y, s.rate_y(self.gamma))
        return projected_step(s.theta, slope, s.rate_y(self.eta.at(s.k)), problem.lower_set)

    def moved(self, v: Tensor, d: Tensor, rate: float, unit: float, feasible: ConvexSet) -> Tensor:
        """Return the variable of a level after its step along -d."""
        return projected_step(v, d, rate * unit**2, feasible)


@dataclass(frozen=True, kw_only=True)
class PNGBiOMethod(MEHAMethod):
    """The constants of PNGBiO and its iteration: MEHA's, with steps of given lengths."""

    norms: Literal["separate", "joint"] = choice("separate", "separate", "joint")

    def step(self, problem: BilevelProblem, s: MEHAState) -> tuple[MEHAState, StepInfo]:
        if self.norms == "separate":
            return super().step(problem, s)
        k, c, here = s.k, self.c.at(s.k), problem.at(s.x)
        theta = self.followed(problem, here, s)
        f, gap = problem.upper(s.x, s.y), here.gap(s.y, theta)
        d_x = f.grad_x / c + gap.grad_x
        d_y = f.grad_y / c + gap.grad_y - (s.y - theta) / s.rate_y(self.gamma)
        length = math.hypot(s.units[0] * norm(d_x), s.units[1] * norm(d_y)) + _GUARD
        alpha, beta = self.alpha.at(k), self.beta.at(k)
        x = problem.upper_set.project(s.x - s.rate_x(alpha / length) * d_x)
        y = problem.lower_set.project(s.y - s.rate_y(beta / length) * d_y)
        info = StepInfo(upper=f.value, lower=gap.value_y, inner_iterations=1)
        return s.after(x, y, theta=theta), info

    def moved(self, v: Tensor, d: Tensor, rate: float, unit: float, feasible: ConvexSet) -> Tensor:
        length = unit * norm(d) + _GUARD
        return feasible.project(v - rate / length * unit**2 * d)


class MEHA(BilevelOptimizer):
    r"""Moreau-envelope Hessian-free algorithm.

    It takes gradient steps on the penalised Moreau gap :math:`f/c_k + g - v_\gamma`, where
    :math:`v_\gamma(x, y) = \min_{\theta \in Y} g(x, \theta) + \|\theta - y\|^2/(2\gamma)` and
    :math:`\theta` follows the minimiser by one step per iteration, from :math:`\theta^0 = y^0`:

    .. math::
        \theta^{k+1} &= P_Y\bigl(\theta^k - \eta_k [\nabla_y g(x^k, \theta^k)
          + (\theta^k - y^k)/\gamma]\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \alpha_k [\nabla_x f(x^k, y^k)/c_k + \nabla_x g(x^k, y^k)
          - \nabla_x g(x^k, \theta^{k+1})]\bigr) \\
        y^{k+1} &= P_Y\bigl(y^k - \beta_k [\nabla_y f(x^{k+1}, y^k)/c_k + \nabla_y g(x^{k+1}, y^k)
          - (y^k - \theta^{k+1})/\gamma]\bigr)

    Assumption on g: g(x, .) is weakly convex (it may be nonconvex). Guarantee: stationarity of the
    penalised problem and feasibility of the Moreau gap, both up to epsilon, in
    :math:`O(\epsilon^{-4})` iterations with a growing :math:`c_k`. Cost of an iteration: 6 passes,
    of which one is saved where f does not depend on x. Upper and lower of the record are f and g at
    :math:`(x^{k+1}, y^k)`, where the iteration last evaluates them.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha_k`, the step of x.
        beta: :math:`\beta_k`, the step of y.
        eta: :math:`\eta_k`, the step of :math:`\theta`.
        gamma: :math:`\gamma`, the proximal parameter; below 1/(weak-convexity modulus of g(x, .)).
        c: :math:`c_k`, the penalty, which divides f: the larger, the closer the lower level is held
            to stationarity.

    The steps and c are numbers or schedules (:class:`~lightning_bilevel.solvers.constants.Power`).
    The defaults are generic: steps that suit functions of curvature about 1, and a slowly growing
    penalty.

    References:
        Liu, Liu, Yao, Zeng, Zhang: Moreau Envelope for Nonconvex Bi-Level Optimization: A
        Single-Loop and Hessian-Free Solution Strategy. ICML 2024.

    Notes:
        The published toy code multiplies f by :math:`c_k`; the paper divides, as here. The
        projections are the natural insertion for constrained levels.
    """

    method_type = MEHAMethod


class PNGBiO(BilevelOptimizer):
    r"""Penalty normalised gradient method.

    It minimises MEHA's penalised Moreau gap (:class:`~lightning_bilevel.solvers.meha.MEHA`) by
    steps of prescribed lengths, whatever the size of the gradients. With :math:`\theta^0 = y^0`
    and :math:`\|\cdot\|_\circ = \|\cdot\| + 10^{-12}`:

    .. math::
        \theta^{k+1} &= P_Y\bigl(\theta^k - \eta_k [\nabla_y g(x^k, \theta^k)
          + (\theta^k - y^k)/\gamma]\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \alpha_k d_x / \|d_x\|_\circ\bigr), \quad
          d_x = \nabla_x f(x^k, y^k)/c_k + \nabla_x g(x^k, y^k) - \nabla_x g(x^k, \theta^{k+1}) \\
        y^{k+1} &= P_Y\bigl(y^k - \beta_k d_y / \|d_y\|_\circ\bigr), \quad
          d_y = \nabla_y f(x^{k+1}, y^k)/c_k + \nabla_y g(x^{k+1}, y^k)
          - (y^k - \theta^{k+1})/\gamma

    Assumption on g: g(x, .) is weakly convex, and f and g are smooth in a generalised sense (the
    curvature may grow with the gradient). Guarantee: stationarity of the penalised problem and
    feasibility of the Moreau gap, both up to epsilon, in :math:`O(\epsilon^{-4})` iterations. Cost
    of an iteration: 6 passes, of which one is saved where f does not depend on x; 4 with joint
    norms. Upper and lower of the record are f and g at :math:`(x^{k+1}, y^k)`, where the iteration
    last evaluates them; with joint norms at :math:`(x^k, y^k)`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha_k`, the length of the step of x.
        beta: :math:`\beta_k`, the length of the step of y. The iterate stays about that far from
            where it tends to, so the lengths should fall.
        eta: :math:`\eta_k`, the step of :math:`\theta`, which is not normalised.
        gamma: :math:`\gamma`, the proximal parameter; below 1/(weak-convexity modulus of g(x, .)).
        c: :math:`c_k`, the penalty, which divides f.
        norms: ``"separate"`` normalises the two directions each by itself, as above; ``"joint"``
            takes both at :math:`(x^k, y^k)` and divides them by the norm of :math:`(d_x, d_y)`.

    alpha, beta, eta and c are numbers or schedules
    (:class:`~lightning_bilevel.solvers.constants.Power`). The defaults are generic.

    References:
        Zhang, Huang, Huang: Generalized Smooth Bilevel Optimization with Nonconvex Lower-Level.
            ICML 2025.

    Notes:
        The method's paper was at hand as an abstract only. That :math:`\theta` takes a plain step
        and that the norms are separate is inferred from a sister method of the same group and from
        numerical tests; joint norms cannot be excluded.
    """

    method_type = PNGBiOMethod
