"""ITD, iterative differentiation: through the steps of the lower level, all or the last of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import face_at
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.hypergradient import Ways, descend_to, products
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.schedule import Power, value_at
from lightning_bilevel.solvers.steps import plain

__all__ = ["ITD"]


class ITD(BilevelOptimizer):
    r"""Iterative differentiation in reverse mode, truncated to the last K steps.

    It moves x along the gradient of :math:`f(x, y_T(x))`, where :math:`y_T` is the result of T
    steps on g from :math:`y_0 = y^k`, whose own dependence on x is left out:

    .. math::
        y_{t+1} &= P_Y\bigl(y_t - \beta_k \nabla_y g(x^k, y_t)\bigr), \qquad t = 0, \dots, T - 1 \\
        p &= \nabla_y f(x^k, y_T), \qquad d = \nabla_x f(x^k, y_T) \\
        p &\leftarrow D_t\, p, \qquad d \leftarrow d - \beta_k \nabla^2_{xy} g(x^k, y_t)\, p, \qquad
          p \leftarrow p - \beta_k \nabla^2_{yy} g(x^k, y_t)\, p, \qquad t = T - 1, \dots, T - K \\
        x^{k+1} &= P_X(x^k - \alpha_k d), \qquad y^{k+1} = y_T

    :math:`D_t` is the derivative of the projection of step t: of a box, it sets the coordinates to
    0 that the step has moved to a bound. K = T differentiates all steps; K < T leaves out the
    oldest ones, at an error of the order of :math:`(1 - \beta \mu)^K` for a curvature of at least
    :math:`\mu`.

    Each step is differentiated anew at its point :math:`y_t`, so that the memory is that of K + 1
    vectors and one evaluation; no graph of the steps is kept.

    Assumption on g: g(x, .) is strongly convex and Y is the whole space; for K < T around the
    minimiser alone. Guarantee: stationarity of :math:`f(x, y^*(x))` up to epsilon and the error of
    T and K, in :math:`O(\epsilon^{-2})` iterations. Cost of an iteration: T + 1 + 2K passes. Upper
    of the record is f at :math:`(x^k, y^{k+1})`, lower is g at :math:`x^k` and the y before its
    last step.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha_k`, the step of x.
        beta: :math:`\beta_k`, the step of y; below 2/L for a curvature of g(x, .) up to L.
        T: The steps of y.
        K: The steps that are differentiated, at most T; None for all.
        products: ``"autograd"`` differentiates g twice; ``"difference"`` takes central differences
            of its gradients, for models that have no second derivatives.

    alpha and beta are numbers or schedules (:class:`~lightning_bilevel.solvers.schedule.Power`).
    The defaults are generic.

    References:
        - Franceschi, Donini, Frasconi, Pontil: Forward and Reverse Gradient-Based Hyperparameter
          Optimization. ICML 2017.
        - Shaban, Cheng, Hatch, Boots: Truncated Back-propagation for Bilevel Optimization. AISTATS
          2019.

    Notes:
        The recursion was read in public implementations (hypertorch, BOAT); the rates are quoted
        from memory of the papers. The projections and their derivative are the natural insertion
        for constrained levels.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        alpha: float | Power = 0.01,
        beta: float | Power = 0.01,
        T: int = 10,
        K: int | None = None,
        products: Ways = "autograd",
    ) -> None:
        constants = constants_of(
            locals(),
            lr="alpha",
            schedules=("alpha", "beta"),
            whole=("T", "K"),
            optional=("K",),
            choices={"products": get_args(Ways)},
        )
        super().__init__(params, constants)

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        c = self.constants
        k = self.memory["iteration"]
        alpha = value_at(c["alpha"], k)
        beta = value_at(c["beta"], k)
        T = c["T"]
        K = min(c["K"] or T, T)
        here = problem.at(x)
        descent = descend_to(here, y, beta, T, K + 1, problem.lower_set)
        f = problem.upper(x, descent.y)
        # u_t leads to y_{t+1}, so y_t is the projection of the u before it; y_0 has none.
        before = descent.before
        d_x = f.grad_x
        p = f.grad_y
        for _ in range(K):
            p = face_at(problem.lower_set, before.pop()).differential(p)
            y_t = problem.lower_set.project(before[-1]) if before else y
            yy, xy = products(here, y_t, p, c["products"])
            d_x = d_x - beta * xy
            p = p - beta * yy
        x_new = plain(x, d_x, alpha, problem.upper_set)
        info = StepInfo(upper=f.value, lower=descent.lower, inner_iterations=T, lr=alpha)
        return x_new, descent.y, info
