"""V-PBGD, penalty-based bilevel gradient descent on the value-function gap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import MultiplierInfo
from lightning_bilevel.solvers.schedule import Power, value_at
from lightning_bilevel.solvers.steps import descend, plain

__all__ = ["VPBGD"]


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
            (:class:`~lightning_bilevel.solvers.schedule.Power`).
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

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        alpha: float = 0.01,
        beta: float = 0.01,
        gamma: float | Power = 10.0,
        T: int = 1,
        restart: bool = True,
    ) -> None:
        constants = constants_of(
            locals(), lr="alpha", schedules=("gamma",), positive=("alpha", "beta"), whole=("T",)
        )
        super().__init__(params, constants)

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, MultiplierInfo]:
        c = self.constants
        alpha = c["alpha"]
        gamma = value_at(c["gamma"], self.memory["iteration"])
        here = problem.at(x)
        w_start = y if c["restart"] else self.memory.get("w", y)
        w = descend(here, w_start, c["beta"], c["T"], problem.lower_set)
        f = problem.upper(x, y)
        gap = here.gap(y, w)
        x_new = plain(x, f.grad_x + gamma * gap.grad_x, alpha, problem.upper_set)
        y_new = plain(y, f.grad_y + gamma * gap.grad_y, alpha, problem.lower_set)
        if not c["restart"]:
            self.memory["w"] = w
        info = MultiplierInfo(
            upper=f.value, lower=gap.value_y, inner_iterations=c["T"], lr=alpha, multiplier=gamma
        )
        return x_new, y_new, info
