"""F2SA, the fully first-order method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.base import BilevelOptimizer, Method, State, Units
from lightning_bilevel.solvers.constants import Power, choice, positive, schedule, whole
from lightning_bilevel.solvers.record import MultiplierInfo

__all__ = ["F2SA", "F2SAMethod"]


@dataclass(frozen=True, kw_only=True)
class F2SAState(State):
    """The state of F2SA.

    Attributes:
        z: The follower of the lower level's minimiser.
    """

    z: Tensor


@dataclass(frozen=True, kw_only=True)
class F2SAMethod(Method[F2SAState]):
    """The constants of F2SA and its iteration."""

    alpha: Power = schedule(0.01)
    gamma: Power = schedule(0.01)
    xi: float = positive(1.0)
    lambda0: float = positive(1.0)
    T: int = whole(1)
    multiplier: Literal["growing", "constant"] = choice("growing", "growing", "constant")

    def lr_at(self, k: int) -> float:
        return self.xi * self.alpha.at(k)

    def start(self, problem: BilevelProblem, x: Tensor, y: Tensor, units: Units) -> F2SAState:
        return F2SAState(x=x, y=y, units=units, z=y)

    def step(self, problem: BilevelProblem, s: F2SAState) -> tuple[F2SAState, MultiplierInfo]:
        k, Y, here = s.k, problem.lower_set, problem.at(s.x)
        alpha, gamma = self.alpha.at(k), s.rate_y(self.gamma.at(k))
        weight = self.lambda0
        if self.multiplier == "growing":
            weight *= self.alpha.at(0) / alpha
        y, z, upper = s.y, s.z, 0.0
        for _ in range(self.T):
            z = Y.project(z - gamma * here.gradient(z))
            upper, f_y = problem.upper_y(s.x, y)
            y = Y.project(y - s.rate_y(alpha) * (f_y + weight * here.gradient(y)))
        # x moves with the new y and z.
        lower, gap_x = here.gap_x(y, z)
        d_x = problem.upper_x(s.x, y) + weight * gap_x
        x = problem.upper_set.project(s.x - s.rate_x(self.xi * alpha) * d_x)
        info = MultiplierInfo(upper=upper, lower=lower, inner_iterations=self.T, multiplier=weight)
        return s.after(x, y, z=z), info


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

    alpha and gamma are numbers or schedules (:class:`~lightning_bilevel.solvers.constants.Power`).
    The defaults are generic.

    References:
        Kwon, Kwon, Wright, Nowak: A Fully First-Order Method for Stochastic Bilevel Optimization.
            ICML 2023.

    Notes:
        The paper that this library follows does not state the growth of the multiplier.
        ``"growing"`` is the scaling of the method's deterministic theory, a multiplier in
        proportion to 1/alpha; the constant one is nearly as plausible.
    """

    method_type = F2SAMethod
