"""f is differentiated through steps on g: ITD through the last of them, DARTS through one step."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import face_at
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.aid import Ways, products
from lightning_bilevel.solvers.base import AheadState, BilevelOptimizer, Method, State, descend
from lightning_bilevel.solvers.constants import Power, choice, nonnegative, schedule, whole
from lightning_bilevel.solvers.record import StepInfo

# The length of the difference, as in the published code.
_LENGTH = 0.01


@dataclass(frozen=True, kw_only=True)
class ITDMethod(Method[State]):
    """The constants of ITD and its iteration."""

    alpha: Power = schedule(0.01)
    beta: Power = schedule(0.01)
    T: int = whole(10)
    K: int | None = whole(None)
    products: Ways = choice("autograd", "autograd", "difference")

    def step(self, problem: BilevelProblem, s: State) -> tuple[State, StepInfo]:
        alpha, beta = self.alpha.at(s.k), s.rate_y(self.beta.at(s.k))
        Y, K = problem.lower_set, min(self.K or self.T, self.T)
        here = problem.at(s.x)
        y, _, lower, before = descend(here, s.y, beta, self.T, Y, keep=K + 1)
        f = problem.upper(s.x, y)
        d_x, p = f.grad_x, f.grad_y
        for _ in range(K):
            # u_t leads to y_{t+1}, so y_t is the projection of the u before it; y_0 has none.
            p = face_at(Y, before.pop()).differential(p)
            y_t = Y.project(before[-1]) if before else s.y
            yy, xy = products(here, y_t, p, self.products, s.units[1])
            d_x = d_x - beta * xy
            p = p - beta * yy
        x = problem.upper_set.project(s.x - s.rate_x(alpha) * d_x)
        info = StepInfo(upper=f.value, lower=lower, inner_iterations=self.T)
        return s.after(x, y), info


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

    alpha and beta are numbers or schedules (:class:`~lightning_bilevel.solvers.constants.Power`).
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

    method_type = ITDMethod


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
                    "f does not depend on x, so `DARTS(xi=0.0)` would never move x. A positive "
                    "`xi` differentiates f through a step on g."
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
