"""DARTS, the hypergradient of a single step of the lower level."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import face_at
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.schedule import Power, value_at
from lightning_bilevel.solvers.steps import plain

__all__ = ["DARTS"]

# The length of the difference, as in the published code.
_LENGTH = 0.01


class DARTS(BilevelOptimizer):
    r"""Differentiable architecture search: f is differentiated through one step on g.

    .. math::
        y' &= P_Y\bigl(y^k - \xi \nabla_y g(x^k, y^k)\bigr), \qquad
          p = D\, \nabla_y f(x^k, y'), \qquad e = 0.01/\|p\| \\
        x^{k+1} &= P_X\Bigl(x^k - \alpha_k \Bigl[\nabla_x f(x^k, y') - \xi\,
          \frac{\nabla_x g(x^k, y^k + e p) - \nabla_x g(x^k, y^k - e p)}{2 e}\Bigr]\Bigr) \\
        y^{k+1} &= P_Y\bigl(y^k - \beta_k \nabla_y g(x^{k+1}, y^k)\bigr)

    The quotient stands for :math:`\nabla^2_{xy} g(x^k, y^k)\, p`, and D is the derivative of the
    projection of :math:`y'`: of a box, p is 0 in the coordinates that the step moves to a bound.
    :math:`\xi = 0` is the first-order form: x moves along :math:`\nabla_x f(x^k, y^k)` alone.

    Assumption on g: none is stated. Guarantee: none. The direction of x is that of the
    hypergradient with :math:`\xi I` for the inverse of :math:`\nabla^2_{yy} g`, so the method may
    stop where :math:`f(x, y^*(x))` is not stationary; the first-order form ignores that y follows
    x. It is a cheap reference. Cost of an iteration: 5 passes, and 2 for the first-order form.
    Upper of the record is f at :math:`(x^k, y')`, lower is g at :math:`(x^{k+1}, y^k)`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha_k`, the step of x.
        beta: :math:`\beta_k`, the step of y.
        xi: :math:`\xi`, the step that is differentiated; the paper takes that of y. 0 is the
            first-order form, which is refused if f does not depend on x: x would never move.

    alpha and beta are numbers or schedules (:class:`~lightning_bilevel.solvers.schedule.Power`).
    The defaults are generic.

    References:
        Liu, Simonyan, Yang: DARTS: Differentiable Architecture Search. ICLR 2019.

    Notes:
        The updates were read in the published code, which moves y by SGD with momentum and x by
        Adam. The projections and D are the natural insertion for constrained levels. The points
        :math:`y \pm e p` may lie outside Y.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        alpha: float | Power = 0.01,
        beta: float | Power = 0.01,
        xi: float = 0.01,
    ) -> None:
        constants = constants_of(
            locals(), lr="alpha", schedules=("alpha", "beta"), nonnegative=("xi",)
        )
        super().__init__(params, constants)

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        c = self.constants
        k = self.memory["iteration"]
        alpha = value_at(c["alpha"], k)
        beta = value_at(c["beta"], k)
        if c["xi"] == 0.0:
            f = problem.upper(x, y)
            d_x = f.grad_x
            if not problem.upper_has_x:
                raise BilevelError(
                    "`DARTS(xi=0.0)` moves x along the gradient of f in x alone, and the "
                    "upper-level function f does not depend on x directly: x would never move. "
                    "Give a positive `xi`, which differentiates f through a step on g."
                )
        else:
            here = problem.at(x)
            ahead = y - c["xi"] * here.gradient(y)
            f = problem.upper(x, problem.lower_set.project(ahead))
            p = face_at(problem.lower_set, ahead).differential(f.grad_y)
            d_x = f.grad_x - c["xi"] * _mixed(here, y, p)
        x_new = plain(x, d_x, alpha, problem.upper_set)
        # y moves at the new x.
        lower, slope = problem.at(x_new).value_and_gradient(y)
        y_new = plain(y, slope, beta, problem.lower_set)
        info = StepInfo(upper=f.value, lower=lower, inner_iterations=1, lr=alpha)
        return x_new, y_new, info


def _mixed(lower: LowerLevel, y: Tensor, p: Tensor) -> Tensor:
    """Return the difference quotient; it is 0 for p = 0, at the same two passes."""
    length = norm(p)
    e = _LENGTH / length if length > 0.0 else 1.0
    _, grad_x = lower.gap_x(y + e * p, y - e * p)
    return grad_x / (2 * e)
