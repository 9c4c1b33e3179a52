"""SLM, the smoothed first-order Lagrangian method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import MultiplierInfo
from lightning_bilevel.solvers.steps import descend, plain

__all__ = ["SLM"]

Dual = Literal["ascent", "damped"]


class SLM(BilevelOptimizer):
    r"""Smoothed first-order Lagrangian method, in its most consistent reading.

    It is a primal-dual method on the Lagrangian :math:`f + \lambda (g - g^* - \delta)` of the
    relaxed value-function problem :math:`\min f` s.t. :math:`g(x, y) - g^*(x) \le \delta`, where
    :math:`g^*(x) = \min_{u \in Y} g(x, u)` is approximated by g(x, z) after T gradient steps from
    y:

    .. math::
        z &= y^r, \quad\text{then T times}\quad
          z \leftarrow P_Y\bigl(z - \gamma \nabla_y g(x^r, z)\bigr) \\
        x^{r+1} &= P_X\bigl(x^r - \eta [\nabla_x f
          + \lambda_r (\nabla_x g(x^r, y^r) - \nabla_x g(x^r, z))]\bigr) \\
        y^{r+1} &= P_Y\bigl(y^r - \alpha [\nabla_y f + \lambda_r \nabla_y g(x^r, y^r)]\bigr) \\
        \lambda_{r+1} &= \max\bigl\{0,\; \lambda_r
          + \tau [g(x^{r+1}, y^{r+1}) - g(x^{r+1}, z) - \delta]\bigr\}

    with the gradients of f at :math:`(x^r, y^r)`. Assumption on g: g(x, .) satisfies the
    Polyak-Lojasiewicz (PL) condition and the constraint is regular. Guarantee: an epsilon-KKT point
    of the relaxed problem, for a fixed :math:`\delta`, in :math:`O(\epsilon^{-2})` iterations. Cost
    of an iteration: T + 3 passes and two values of g. Upper of the record is f at
    :math:`(x^r, y^r)` and lower is g at :math:`(x^{r+1}, y^{r+1})`, where the iteration last
    evaluates them; the multiplier is :math:`\lambda_r`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        eta: :math:`\eta`, the step of x.
        alpha: :math:`\alpha`, the step of y.
        gamma: :math:`\gamma`, the step of the inner variable z.
        tau: :math:`\tau`, the step of the multiplier.
        T: :math:`T_r`, the inner steps.
        delta: :math:`\delta`, the relaxation.
        lambda0: :math:`\lambda_0`, the first multiplier.
        restart: Whether z starts at y in each iteration, as above, or goes on from where it was.
        dual: ``"ascent"`` is the above. ``"damped"`` reads gamma as the step and tau as the damping
            of the multiplier, :math:`\lambda_{r+1} = \max\{0, (1 - \tau) \lambda_r + \gamma s\}`
            with :math:`s = g(x^{r+1}, y^{r+1}) - g(x^{r+1}, z) - \delta`; z then steps with alpha,
            as y does.

    The defaults are generic, but for delta, the relaxation that the paper uses for IVSP.

    References:
        Lu: SLM: A Smoothed First-Order Lagrangian Method for Structured Constrained Nonconvex
            Optimization. NeurIPS 2023.

    Notes:
        The method's paper was at hand as an abstract only. The formulation is certain; the form of
        the updates and the role of each constant were chosen as those most consistent with the
        settings of the paper that this library follows, on its synthetic problem. Whatever
        smoothing the method's name refers to is not part of this reading.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        eta: float = 0.01,
        alpha: float = 0.01,
        gamma: float = 0.01,
        tau: float = 0.01,
        T: int = 10,
        delta: float = 1e-3,
        lambda0: float = 0.0,
        restart: bool = True,
        dual: Dual = "ascent",
    ) -> None:
        if dual == "damped" and tau > 1:
            raise ValueError(
                f"`SLM(tau={tau!r}, dual='damped')` must be at most 1: it is the damping of the "
                "multiplier."
            )
        constants = constants_of(
            locals(),
            lr="eta",
            positive=("eta", "alpha", "gamma", "tau"),
            nonnegative=("delta", "lambda0"),
            whole=("T",),
            choices={"dual": get_args(Dual)},
        )
        super().__init__(params, constants)
        self.memory["lambda"] = float(lambda0)

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, MultiplierInfo]:
        c = self.constants
        weight = self.memory["lambda"]
        if c["dual"] == "damped":
            # In this reading gamma and tau belong to the multiplier.
            inner_step, dual_step, damping = c["alpha"], c["gamma"], c["tau"]
        else:
            inner_step, dual_step, damping = c["gamma"], c["tau"], 0.0
        here = problem.at(x)
        z_start = y if c["restart"] else self.memory.get("z", y)
        z = descend(here, z_start, inner_step, c["T"], problem.lower_set)
        f = problem.upper(x, y)
        gap = here.gap(y, z)
        x_new = plain(x, f.grad_x + weight * gap.grad_x, c["eta"], problem.upper_set)
        y_new = plain(y, f.grad_y + weight * gap.grad_y, c["alpha"], problem.lower_set)
        there = problem.at(x_new)
        lower = there.value(y_new)
        slack = lower - there.value(z) - c["delta"]
        self.memory["lambda"] = max(0.0, (1 - damping) * weight + dual_step * slack)
        if not c["restart"]:
            self.memory["z"] = z
        info = MultiplierInfo(
            upper=f.value, lower=lower, inner_iterations=c["T"], lr=c["eta"], multiplier=weight
        )
        return x_new, y_new, info
