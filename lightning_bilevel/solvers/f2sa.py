"""F2SA, the fully first-order method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import MultiplierInfo
from lightning_bilevel.solvers.schedule import Power, value_at
from lightning_bilevel.solvers.steps import descend, plain

__all__ = ["F2SA"]

Growth = Literal["growing", "constant"]


class F2SA(BilevelOptimizer):
    r"""Fully first-order method (the paper's stochastic approximation, run on full batches).

    It solves :math:`\min_x \min_y \max_z f(x, y) + \lambda_k (g(x, y) - g(x, z))`, the penalty form
    of the value-function problem, from :math:`z^0 = y^0`. T times within iteration k, and then
    once:

    .. math::
        z &\leftarrow P_Y\bigl(z - \gamma_k \nabla_y g(x^k, z)\bigr), \qquad
          y \leftarrow P_Y\bigl(y - \alpha_k [\nabla_y f(x^k, y)
          + \lambda_k \nabla_y g(x^k, y)]\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \xi \alpha_k [\nabla_x f(x^k, y^{k+1})
          + \lambda_k (\nabla_x g(x^k, y^{k+1}) - \nabla_x g(x^k, z^{k+1}))]\bigr) \\
        \lambda_k &= \lambda_0 \alpha_0 / \alpha_k

    Assumption on g: g(x, .) is strongly convex. Guarantee: stationarity of the hyper-objective
    :math:`f(x, y^*(x))` up to epsilon in :math:`\tilde O(\epsilon^{-3})` iterations. Cost of an
    iteration: 3T + 3 passes, of which one is saved where f does not depend on x. Upper of the
    record is f at :math:`x^k` and the y before its last step, lower is g at :math:`(x^k, y^{k+1})`:
    where the iteration last evaluates them. Its multiplier is :math:`\lambda_k`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha_k`, the step of y, and times xi that of x.
        gamma: :math:`\gamma_k`, the step of z.
        xi: :math:`\xi`, the ratio of the steps of x and y.
        lambda0: :math:`\lambda_0`, the first multiplier.
        T: The steps of z and y per iteration.
        multiplier: ``"growing"`` is :math:`\lambda_k = \lambda_0 \alpha_0/\alpha_k`, ``"constant"``
            is :math:`\lambda_k = \lambda_0`; with a constant alpha they agree.

    alpha and gamma are numbers or schedules (:class:`~lightning_bilevel.solvers.schedule.Power`).
    The defaults are generic.

    References:
        Kwon, Kwon, Wright, Nowak: A Fully First-Order Method for Stochastic Bilevel Optimization.
            ICML 2023.

    Notes:
        The paper that this library follows does not state the growth of the multiplier.
        ``"growing"`` is the scaling of the method's deterministic theory, a multiplier in
        proportion to 1/alpha; the constant one is nearly as plausible.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        alpha: float | Power = 0.01,
        gamma: float | Power = 0.01,
        xi: float = 1.0,
        lambda0: float = 1.0,
        T: int = 1,
        multiplier: Growth = "growing",
    ) -> None:
        constants = constants_of(
            locals(),
            lr="alpha",
            schedules=("alpha", "gamma"),
            positive=("xi", "lambda0"),
            whole=("T",),
            choices={"multiplier": get_args(Growth)},
        )
        constants["lr"] *= xi
        super().__init__(params, constants)

    def _weight(self) -> float:
        """Return the multiplier of this iteration, lambda_0 or lambda_0 alpha_0 / alpha_k."""
        c = self.constants
        weight: float = c["lambda0"]
        if c["multiplier"] == "growing":
            weight *= value_at(c["alpha"], 0) / value_at(c["alpha"], self.memory["iteration"])
        return weight

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, MultiplierInfo]:
        c = self.constants
        k = self.memory["iteration"]
        here = problem.at(x)
        alpha = value_at(c["alpha"], k)
        gamma = value_at(c["gamma"], k)
        weight = self._weight()
        y_new = y
        z = self.memory.get("z", y)
        for _ in range(c["T"]):
            z = descend(here, z, gamma, 1, problem.lower_set)
            upper, f_y = problem.upper_y(x, y_new)
            y_new = plain(y_new, f_y + weight * here.gradient(y_new), alpha, problem.lower_set)
        # x moves with the new y and z.
        lower, gap_x = here.gap_x(y_new, z)
        d_x = problem.upper_x(x, y_new) + weight * gap_x
        x_new = plain(x, d_x, c["xi"] * alpha, problem.upper_set)
        self.memory["z"] = z
        info = MultiplierInfo(
            upper=upper, lower=lower, inner_iterations=c["T"], lr=c["xi"] * alpha, multiplier=weight
        )
        return x_new, y_new, info
