"""MEHA, the Moreau-envelope Hessian-free algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.prox import projected_step, slope_of_psi
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.schedule import Power, value_at

__all__ = ["GROWING", "MEHA", "bracket_x", "bracket_y", "prox_step"]

# The paper's penalty grows slowly.
GROWING = Power(1.0, 0.25)


def prox_step(
    lower: LowerLevel,
    theta: Tensor,
    y: Tensor,
    eta: float,
    gamma: float,
    lower_set: ConvexSet,
) -> Tensor:
    r"""Return :math:`P_Y(\theta - \eta [\nabla_y g(x, \theta) + (\theta - y)/\gamma])`."""
    slope = slope_of_psi(lower.gradient(theta), theta, y, gamma)
    return projected_step(theta, slope, eta, lower_set)


def bracket_x(
    problem: BilevelProblem, lower: LowerLevel, y: Tensor, theta: Tensor, c: float
) -> Tensor:
    r"""Return :math:`d_x = \nabla_x f(x, y)/c + \nabla_x g(x, y) - \nabla_x g(x, \theta)`."""
    _, gap_x = lower.gap_x(y, theta)
    return torch.add(gap_x, problem.upper_x(lower.x, y), alpha=1 / c)


def bracket_y(
    problem: BilevelProblem, lower: LowerLevel, y: Tensor, theta: Tensor, c: float, gamma: float
) -> tuple[Tensor, float, float]:
    r"""Return :math:`\nabla_y f(x, y)/c + \nabla_y g(x, y) - (y - \theta)/\gamma`, f and g."""
    f, f_y = problem.upper_y(lower.x, y)
    g, g_y = lower.value_and_gradient(y)
    d_y = torch.add(g_y, f_y, alpha=1 / c).sub_(y - theta, alpha=1 / gamma)
    return d_y, f, g


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

    The steps and c are numbers or schedules (:class:`~lightning_bilevel.solvers.schedule.Power`).
    The defaults are generic: steps that suit functions of curvature about 1, and a slowly growing
    penalty.

    References:
        Liu, Liu, Yao, Zeng, Zhang: Moreau Envelope for Nonconvex Bi-Level Optimization: A
        Single-Loop and Hessian-Free Solution Strategy. ICML 2024.

    Notes:
        The published toy code multiplies f by :math:`c_k`; the paper divides, as here. The
        projections are the natural insertion for constrained levels.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        alpha: float | Power = 0.01,
        beta: float | Power = 0.01,
        eta: float | Power = 0.01,
        gamma: float = 1.0,
        c: float | Power = GROWING,
    ) -> None:
        constants = constants_of(
            locals(), lr="alpha", schedules=("alpha", "beta", "eta", "c"), positive=("gamma",)
        )
        super().__init__(params, constants)

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        k = self.memory["iteration"]
        gamma = self.constants["gamma"]
        alpha, beta, eta, c = (
            value_at(self.constants[name], k) for name in ("alpha", "beta", "eta", "c")
        )
        here = problem.at(x)
        theta = self.memory.get("theta", y)
        theta = prox_step(here, theta, y, eta, gamma, problem.lower_set)
        x_new = projected_step(x, bracket_x(problem, here, y, theta, c), alpha, problem.upper_set)
        # y moves at the new x.
        there = problem.at(x_new)
        d_y, upper, lower = bracket_y(problem, there, y, theta, c, gamma)
        y_new = projected_step(y, d_y, beta, problem.lower_set)
        self.memory["theta"] = theta
        return x_new, y_new, StepInfo(upper=upper, lower=lower, inner_iterations=1, lr=alpha)
