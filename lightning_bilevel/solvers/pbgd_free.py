"""PBGD-Free, penalty-based bilevel gradient descent without the value function's gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.steps import plain

__all__ = ["PBGDFree"]

_FROZEN = (
    "f does not depend on x, so its gradient in x is 0. This method leaves out the penalty's "
    "gradient in x, and would never move x. Take a method that has it, such as F2BA or VPBGD, or "
    "add a term in x to f."
)


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
        gradient, is :class:`~lightning_bilevel.solvers.f2ba.F2BA` with :math:`\sigma = 1/\gamma`.
        Projections are the natural insertion for constrained levels.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        eta: float = 0.01,
        alpha: float = 0.01,
        gamma: float = 10.0,
        K: int = 1,
    ) -> None:
        constants = constants_of(
            locals(), lr="eta", positive=("eta", "alpha", "gamma"), whole=("K",)
        )
        super().__init__(params, constants)

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        c = self.constants
        here = problem.at(x)
        y_new = y
        upper = lower = 0.0
        for _ in range(c["K"]):
            upper, f_y = problem.upper_y(x, y_new)
            lower, g_y = here.value_and_gradient(y_new)
            y_new = plain(y_new, f_y / c["gamma"] + g_y, c["alpha"], problem.lower_set)
        d_x = problem.upper_x(x, y_new)
        if not problem.upper_has_x:
            raise BilevelError(_FROZEN)
        x_new = plain(x, d_x, c["eta"], problem.upper_set)
        info = StepInfo(upper=upper, lower=lower, inner_iterations=c["K"], lr=c["eta"])
        return x_new, y_new, info
