"""Penalty-based bilevel gradient descent: V-PBGD, and PBGD-Free without the value function."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.lower import LowerPoint
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.base import BilevelOptimizer, Method, State, descend
from lightning_bilevel.solvers.constants import Power, positive, schedule, whole
from lightning_bilevel.solvers.record import StepInfo


@dataclass(frozen=True, kw_only=True)
class VPBGDState(State):
    """The state of V-PBGD.

    Attributes:
        w: The inner variable, if it goes on; None where it starts at y.
    """

    w: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class VPBGDMethod(Method[VPBGDState]):
    """The constants of V-PBGD and its iteration."""

    alpha: float = positive(0.01)
    beta: float = positive(0.01)
    gamma: Power = schedule(10.0)
    T: int = whole(1)
    restart: bool = True

    def step(self, problem: BilevelProblem, s: VPBGDState) -> tuple[VPBGDState, StepInfo]:
        gamma, here, at_y = self.gamma.at(s.k), problem.at(s.x), LowerPoint(s.y)
        start = at_y if s.w is None else s.w
        inner = descend(here, start, s.rate_y(self.beta), self.T, problem.lower_set)
        f = problem.upper(s.x, s.y)
        gap = here.gap(at_y, inner.end, inner.first if s.w is None else None)
        d_x, d_y = f.grad_x + gamma * gap.grad_x, f.grad_y + gamma * gap.grad_y
        x = problem.upper_set.project(s.x - s.rate_x(self.alpha) * d_x)
        y = problem.lower_set.project(s.y - s.rate_y(self.alpha) * d_y)
        info = StepInfo(upper=f.value, lower=gap.value_y, inner_iterations=self.T, multiplier=gamma)
        return s.after(x, y, w=None if self.restart else inner.end), info


class VPBGD(BilevelOptimizer):
    r"""Penalty-based bilevel gradient descent with the value-function gap.

    It takes gradient steps on :math:`f + \gamma_k (g - g^*)`, where
    :math:`g^*(x) = \min_{u \in Y} g(x, u)` is approximated by g(x, w) after T gradient steps from
    y:

    .. math::
        w &= y^k, \quad\text{then T times}\quad
          w \leftarrow P_Y\bigl(w - \beta \nabla_y g(x^k, w)\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \alpha [\nabla_x f
          + \gamma_k (\nabla_x g(x^k, y^k) - \nabla_x g(x^k, w))]\bigr) \\
        y^{k+1} &= P_Y\bigl(y^k - \alpha [\nabla_y f + \gamma_k \nabla_y g(x^k, y^k)]\bigr)

    with the gradients of f at :math:`(x^k, y^k)`. Assumption on g: g(x, .) satisfies the
    Polyak-Lojasiewicz (PL) condition. Guarantee: stationarity of the penalised problem up to
    epsilon in :math:`\tilde O(\epsilon^{-2})` iterations, for a fixed penalty. Cost of an
    iteration: T + 3 passes. Upper and lower of the record are f and g at :math:`(x^k, y^k)`, the
    multiplier is :math:`\gamma_k`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha`, the step of x and y.
        beta: :math:`\beta`, the step of the inner variable w.
        gamma: :math:`\gamma_k`, the penalty, which multiplies the gap; a number or a schedule
            (:class:`~lightning_bilevel.solvers.constants.Power`).
        T: The inner steps.
        restart: Whether w starts at y in each iteration, as above, or goes on from where it was.

    The defaults are generic.

    References:
        Shen, Chen: On Penalty-based Bilevel Gradient Descent Method. ICML 2023 (Algorithm 1).

    Notes:
        The authors' hyper-cleaning code keeps w, which their Algorithm 1 restarts. On the synthetic
        problem with the settings of the paper that this library follows, only restarting reaches
        the solution.
    """

    method_type = VPBGDMethod


@dataclass(frozen=True, kw_only=True)
class PBGDFreeMethod(Method[State]):
    """The constants of PBGD-Free and its iteration."""

    eta: float = positive(0.01)
    alpha: float = positive(0.01)
    gamma: float = positive(10.0)
    K: int = whole(1)

    def step(self, problem: BilevelProblem, s: State) -> tuple[State, StepInfo]:
        here = problem.at(s.x)
        y, upper, lower = s.y, 0.0, 0.0
        for _ in range(self.K):
            upper, f_y = problem.upper_y(s.x, y)
            lower, g_y = here.value_and_gradient(y)
            y = problem.lower_set.project(y - s.rate_y(self.alpha) * (f_y / self.gamma + g_y))
        d_x = problem.upper_x(s.x, y)
        if not problem.upper_has_x:
            raise BilevelError(
                "f does not depend on x, so PBGDFree would never move x. Take a method with the "
                "penalty's gradient in x, such as F2BA or VPBGD, or add a term in x to f."
            )
        x = problem.upper_set.project(s.x - s.rate_x(self.eta) * d_x)
        info = StepInfo(upper=upper, lower=lower, inner_iterations=self.K)
        return s.after(x, y), info


class PBGDFree(BilevelOptimizer):
    r"""Penalty-based bilevel gradient descent, free of the value function.

    It takes the penalised problem :math:`f + \gamma (g - g^*)` with
    :math:`g^*(x) = \min_{u \in Y} g(x, u)` and **leaves out** the penalty's gradient in x,
    :math:`\gamma (\nabla_x g(x, y) - \nabla g^*(x))`, so that no inner variable is needed. K times
    within an iteration, and then once:

    .. math::
        y &\leftarrow P_Y\bigl(y - \alpha [\nabla_y f(x^k, y)/\gamma
          + \nabla_y g(x^k, y)]\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \eta \nabla_x f(x^k, y^{k+1})\bigr)

    Assumption on g: g(x, .) is strongly convex or satisfies the Polyak-Lojasiewicz (PL) condition,
    and f is *flat* in y: :math:`|f(x, y_g) - f(x, y)| \le c \|y_g - y\|^\alpha + \delta` with
    :math:`1 < \alpha \le 1.5`, for the lower level's solution :math:`y_g`. Guarantee: the mean
    squared gradient of the penalised hyper-objective is of order
    :math:`1/T + \delta^{2(\alpha-1)/\alpha}` after T iterations. Without flatness the bias does not
    vanish: on :math:`f = x^2 + 10 y`, :math:`g = (y - x + 1)^2` the method stops at x = 0, and the
    solution is x = -5. Cost of an iteration: 2K + 1 passes, the fewest of all methods here. Upper
    of the record is f at :math:`x^k` and the y before its last step, lower is g there: where the
    iteration last evaluates them.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        eta: :math:`\eta`, the step of x.
        alpha: :math:`\alpha`, the step of y.
        gamma: :math:`\gamma`, the penalty.
        K: The steps of y per iteration.

    The defaults of gamma and K are those of the authors' code, the steps are generic.

    Raises:
        BilevelError: f does not depend on x. Then :math:`\nabla_x f = 0` and x would never move.
            Data hyper-cleaning is such a problem.

    References:
        Jiang, Xiao, Chen, Chen: Efficient Penalty-Based Bilevel Methods: Improved Analysis, Novel
            Updates, and Flatness Condition. arXiv 2511.16796.

    Notes:
        The updates are those of the authors' code and of the paper's opening. For their SVM, whose
        f has no x, the authors add a term in x to f. The paper's ALT-PBGD, which has the left-out
        gradient, is :class:`~lightning_bilevel.solvers.f2sa.F2BA` with :math:`\sigma = 1/\gamma`.
        Projections are the natural insertion for constrained levels.
    """

    method_type = PBGDFreeMethod
