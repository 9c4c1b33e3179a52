"""BOME, bilevel optimisation by a dynamic barrier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.vectors import dot
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import MultiplierInfo
from lightning_bilevel.solvers.steps import descend, plain

__all__ = ["BOME"]

Barrier = Literal["gradient", "value"]

# The authors' guard against a vanishing gradient of q.
_GUARD = 1e-8


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

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        xi: float = 0.01,
        alpha: float = 0.01,
        eta: float = 0.5,
        T: int = 10,
        barrier: Barrier = "gradient",
    ) -> None:
        constants = constants_of(
            locals(),
            lr="xi",
            positive=("xi", "alpha", "eta"),
            whole=("T",),
            choices={"barrier": get_args(Barrier)},
        )
        super().__init__(params, constants)

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, MultiplierInfo]:
        c = self.constants
        here = problem.at(x)
        theta = descend(here, y, c["alpha"], c["T"], problem.lower_set)
        f = problem.upper(x, y)
        q = here.gap(y, theta)
        square = dot(q.grad_x, q.grad_x) + dot(q.grad_y, q.grad_y)
        product = dot(f.grad_x, q.grad_x) + dot(f.grad_y, q.grad_y)
        phi = c["eta"] * (square if c["barrier"] == "gradient" else q.value_y - q.value_z)
        # lambda = max((phi - <grad f, grad q>) / (|grad q|^2 + 1e-8), 0)
        weight = max((phi - product) / (square + _GUARD), 0.0)
        x_new = plain(x, f.grad_x + weight * q.grad_x, c["xi"], problem.upper_set)
        y_new = plain(y, f.grad_y + weight * q.grad_y, c["xi"], problem.lower_set)
        info = MultiplierInfo(
            upper=f.value, lower=q.value_y, inner_iterations=c["T"], lr=c["xi"], multiplier=weight
        )
        return x_new, y_new, info
