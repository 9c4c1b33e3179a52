"""PBGD-Free, penalty-based bilevel gradient descent without the value function's gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sample import Sample
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.streaming import Directions
from lightning_bilevel.solvers.torch_rule import OptimizerCallable

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

    On mini-batches (a problem with ``mini_batch=True``) x and y move once per batch, both from the
    old point; K is not used, and the record is a
    :class:`~lightning_bilevel.solvers.record.StreamInfo`. A variable z follows the lower level for
    the gap of the record alone, so a batch costs 3 passes.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        eta: :math:`\eta`, the step of x.
        alpha: :math:`\alpha`, the step of y.
        gamma: :math:`\gamma`, the penalty.
        K: The steps of y per iteration.
        upper_optimizer: What makes the torch optimiser of x, such as
            ``functools.partial(torch.optim.AdamW, lr=1e-2)``; None takes the step above.
        lower_optimizer: That of y, likewise.
        upper_clip: The largest norm of the direction of x; None for no bound.
        lower_clip: That of the direction of y.
        x_every: On mini-batches x moves in every so many steps.
        warmup: On mini-batches x stays for so many steps at first.

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

    stochastic = True

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        eta: float = 0.01,
        alpha: float = 0.01,
        gamma: float = 10.0,
        K: int = 1,
        upper_optimizer: OptimizerCallable | None = None,
        lower_optimizer: OptimizerCallable | None = None,
        upper_clip: float | None = None,
        lower_clip: float | None = None,
        x_every: int = 1,
        warmup: int = 0,
    ) -> None:
        checked = constants_of(locals(), lr="eta", positive=("eta", "alpha", "gamma"), whole=("K",))
        super().__init__(params, *checked)

    def directions(self, sample: Sample, x: Tensor, y: Tensor, z: Tensor) -> Directions:
        c = self.constants
        # Looking costs a transfer from the device, so only the first batch is looked at.
        if self.memory["iteration"] == 0 and not sample.upper_x.any():
            raise BilevelError(_FROZEN)
        return Directions(
            upper=sample.upper_x,
            lower=torch.add(sample.lower_y, sample.upper_y, alpha=1 / c["gamma"]),
            inner=sample.inner_y,
            multiplier=c["gamma"],
            rates=(c["eta"], c["alpha"], c["alpha"]),
        )

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        c = self.constants
        here = problem.at(x)
        step_y = self.rule("lower")
        y_new = y
        upper = lower = 0.0
        for _ in range(c["K"]):
            upper, f_y = problem.upper_y(x, y_new)
            lower, g_y = here.value_and_gradient(y_new)
            y_new = step_y(y_new, f_y / c["gamma"] + g_y, c["alpha"], problem.lower_set)
        d_x = problem.upper_x(x, y_new)
        if not problem.upper_has_x:
            raise BilevelError(_FROZEN)
        x_new = self.rule("upper")(x, d_x, c["eta"], problem.upper_set)
        info = StepInfo(upper=upper, lower=lower, inner_iterations=c["K"], lr=c["eta"])
        return x_new, y_new, info
