"""DARTS, the hypergradient of a single step of the lower level."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import face_at
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.base import BilevelOptimizer, Method
from lightning_bilevel.solvers.constants import Power, nonnegative, schedule
from lightning_bilevel.solvers.descent import AheadState
from lightning_bilevel.solvers.record import StepInfo

__all__ = ["DARTS", "DARTSMethod"]

# The length of the difference, as in the published code.
_LENGTH = 0.01


@dataclass(frozen=True, kw_only=True)
class DARTSMethod(Method[AheadState]):
    """The constants of DARTS and its iteration."""

    alpha: Power = schedule(0.01)
    beta: Power = schedule(0.01)
    xi: float = nonnegative(0.01)

    def step(self, problem: BilevelProblem, s: AheadState) -> tuple[AheadState, StepInfo]:
        alpha, xi, Y = self.alpha.at(s.k), s.rate_y(self.xi), problem.lower_set
        if xi == 0.0:
            f = problem.upper(s.x, s.y)
            d_x = f.grad_x
            if not problem.upper_has_x:
                raise BilevelError(
                    "`DARTS(xi=0.0)` moves x along the gradient of f in x alone, and the "
                    "upper-level function f does not depend on x directly: x would never move. "
                    "Give a positive `xi`, which differentiates f through a step on g."
                )
        else:
            here = s.here or problem.at(s.x)
            ahead = s.y - xi * here.gradient(s.y)
            f = problem.upper(s.x, Y.project(ahead))
            p = face_at(Y, ahead).differential(f.grad_y)
            # The quotient is 0 for p = 0, at the same two passes.
            length = norm(p)
            e = s.units[1] * _LENGTH / length if length > 0.0 else 1.0
            _, change = here.gap_x(s.y + e * p, s.y - e * p)
            d_x = f.grad_x - xi * (change / (2 * e))
        x = problem.upper_set.project(s.x - s.rate_x(alpha) * d_x)
        # y moves at the new x.
        there = problem.at(x)
        lower, slope = there.value_and_gradient(s.y)
        y = Y.project(s.y - s.rate_y(self.beta.at(s.k)) * slope)
        info = StepInfo(upper=f.value, lower=lower, inner_iterations=1)
        return s.after(x, y, here=there), info


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

    alpha and beta are numbers or schedules (:class:`~lightning_bilevel.solvers.constants.Power`).
    The defaults are generic.

    References:
        Liu, Simonyan, Yang: DARTS: Differentiable Architecture Search. ICLR 2019.

    Notes:
        The updates were read in the published code, which moves y by SGD with momentum and x by
        Adam. The projections and D are the natural insertion for constrained levels. The points
        :math:`y \pm e p` may lie outside Y.
    """

    method_type = DARTSMethod
