"""BOME, bilevel optimisation by a dynamic barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_bilevel.core.lower import LowerPoint
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.vectors import dot
from lightning_bilevel.solvers.base import BilevelOptimizer, Method, State, descend
from lightning_bilevel.solvers.constants import choice, positive, whole
from lightning_bilevel.solvers.record import StepInfo

# The authors' guard against a vanishing gradient of q.
_GUARD = 1e-8


@dataclass(frozen=True, kw_only=True)
class BOMEMethod(Method[State]):
    """The constants of BOME and its iteration."""

    xi: float = positive(0.01)
    alpha: float = positive(0.01)
    eta: float = positive(0.5)
    T: int = whole(10)
    barrier: Literal["gradient", "value"] = choice("gradient", "gradient", "value")

    def step(self, problem: BilevelProblem, s: State) -> tuple[State, StepInfo]:
        here, at_y = problem.at(s.x), LowerPoint(s.y)
        inner = descend(here, at_y, s.rate_y(self.alpha), self.T, problem.lower_set)
        f = problem.upper(s.x, s.y)
        q = here.gap(at_y, inner.end, inner.first)
        # Gradients have the weight of a squared unit.
        a, b = s.rate_x(1.0), s.rate_y(1.0)
        square = a * dot(q.grad_x, q.grad_x) + b * dot(q.grad_y, q.grad_y)
        product = a * dot(f.grad_x, q.grad_x) + b * dot(f.grad_y, q.grad_y)
        phi = self.eta * (square if self.barrier == "gradient" else q.value_y - q.value_z)
        # lambda = max((phi - <grad f, grad q>) / (|grad q|^2 + 1e-8), 0)
        weight = max((phi - product) / (square + _GUARD), 0.0)
        x = problem.upper_set.project(s.x - s.rate_x(self.xi) * (f.grad_x + weight * q.grad_x))
        y = problem.lower_set.project(s.y - s.rate_y(self.xi) * (f.grad_y + weight * q.grad_y))
        info = StepInfo(upper=f.value, lower=q.value_y, inner_iterations=self.T, multiplier=weight)
        return s.after(x, y), info


class BOME(BilevelOptimizer):
    r"""Bilevel optimisation made easy: a gradient step with a dynamic barrier.

    It minimises f subject to :math:`q = g - g^* \le 0`, where
    :math:`g^*(x) = \min_{u \in Y} g(x, u)` is approximated by :math:`g(x, \theta)` after T gradient
    steps from y. The direction is the nearest to :math:`\nabla f` along which q falls at the rate
    :math:`\phi_k` at least. With :math:`w = (x, y)`:

    .. math::
        \theta &= y^k, \quad\text{then T times}\quad
          \theta \leftarrow P_Y\bigl(\theta - \alpha \nabla_y g(x^k, \theta)\bigr) \\
        \nabla q &= \bigl(\nabla_x g(x^k, y^k) - \nabla_x g(x^k, \theta),\;
          \nabla_y g(x^k, y^k)\bigr) \\
        \lambda_k &= \max\bigl\{(\phi_k - \langle \nabla f, \nabla q \rangle)
          / (\|\nabla q\|^2 + 10^{-8}),\; 0\bigr\}, \quad \phi_k = \eta \|\nabla q\|^2 \\
        w^{k+1} &= P_{X \times Y}\bigl(w^k - \xi [\nabla f(w^k) + \lambda_k \nabla q]\bigr)

    Assumption on g: g(x, .) satisfies the Polyak-Lojasiewicz (PL) condition. Guarantee: an
    epsilon-KKT* point in :math:`O(\epsilon^{-6})` to :math:`O(\epsilon^{-8})` iterations, where
    KKT* is the method's own measure
    :math:`\min_{\lambda \ge 0} \|\nabla f + \lambda \nabla q\|^2 + q` and not the classical KKT
    residual. Cost of an iteration: T + 3 passes. Upper and lower of the record are f and g at
    :math:`(x^k, y^k)`, the multiplier is :math:`\lambda_k`, which is not carried over.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        xi: :math:`\xi`, the step of x and y.
        alpha: :math:`\alpha`, the step of the inner variable.
        eta: :math:`\eta`, the barrier's coefficient.
        T: The inner steps.
        barrier: ``"gradient"`` is :math:`\phi_k = \eta \|\nabla q\|^2`, ``"value"`` is
            :math:`\phi_k = \eta q`.

    The defaults are generic.

    References:
        Liu, Ye, Wright, Stone, Liu: BOME! Bilevel Optimization Made Easy: A Simple First-Order
            Approach. NeurIPS 2022.

    Notes:
        The authors' toy code has the gradient barrier, their hyper-cleaning code the value barrier.
        The paper that this library follows does not say which of them its settings are for.
    """

    method_type = BOMEMethod
