"""PNGBiO, the penalty normalised gradient method."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.meha import GROWING, bracket_x, bracket_y, prox_step
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.schedule import Power, value_at
from lightning_bilevel.solvers.steps import plain

__all__ = ["PNGBiO"]

Norms = Literal["separate", "joint"]

# Keeps a direction that is zero at zero; smaller than any other rounding in d/|d|.
_GUARD = 1e-12


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
    (:class:`~lightning_bilevel.solvers.schedule.Power`). The defaults are generic.

    References:
        Zhang, Huang, Huang: Generalized Smooth Bilevel Optimization with Nonconvex Lower-Level.
            ICML 2025.

    Notes:
        The method's paper was at hand as an abstract only. That :math:`\theta` takes a plain step
        and that the norms are separate is inferred from a sister method of the same group and from
        numerical tests; joint norms cannot be excluded.
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
        norms: Norms = "separate",
    ) -> None:
        constants = constants_of(
            locals(),
            lr="alpha",
            schedules=("alpha", "beta", "eta", "c"),
            positive=("gamma",),
            choices={"norms": get_args(Norms)},
        )
        super().__init__(params, constants)

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        k = self.memory["iteration"]
        gamma = self.constants["gamma"]
        X = problem.upper_set
        Y = problem.lower_set
        alpha, beta, eta, c = (
            value_at(self.constants[name], k) for name in ("alpha", "beta", "eta", "c")
        )
        here = problem.at(x)
        theta = self.memory.get("theta", y)
        theta = prox_step(here, theta, y, eta, gamma, Y)
        if self.constants["norms"] == "joint":
            f = problem.upper(x, y)
            gap = here.gap(y, theta)
            upper, lower = f.value, gap.value_y
            d_x = f.grad_x / c + gap.grad_x
            d_y = f.grad_y / c + gap.grad_y - (y - theta) / gamma
            length = math.hypot(norm(d_x), norm(d_y)) + _GUARD
            x_new = plain(x, d_x, alpha / length, X)
        else:
            d_x = bracket_x(problem, here, y, theta, c)
            x_new = plain(x, d_x, alpha / (norm(d_x) + _GUARD), X)
            # y moves at the new x.
            there = problem.at(x_new)
            d_y, upper, lower = bracket_y(problem, there, y, theta, c, gamma)
            length = norm(d_y) + _GUARD
        y_new = plain(y, d_y, beta / length, Y)
        self.memory["theta"] = theta
        return x_new, y_new, StepInfo(upper=upper, lower=lower, inner_iterations=1, lr=alpha)
