"""SLM, the smoothed first-order Lagrangian method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_bilevel.core.lower import LowerPoint
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.base import AheadState, BilevelOptimizer, Method, Units, descend
from lightning_bilevel.solvers.constants import choice, nonnegative, positive, whole
from lightning_bilevel.solvers.record import StepInfo


@dataclass(frozen=True, kw_only=True)
class SLMState(AheadState):
    """The state of SLM.

    Attributes:
        multiplier: The multiplier of the next iteration.
        z: The inner variable, if it goes on; None where it starts at y.
    """

    multiplier: float
    z: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SLMMethod(Method[SLMState]):
    """The constants of SLM and its iteration."""

    eta: float = positive(0.01)
    alpha: float = positive(0.01)
    gamma: float = positive(0.01)
    tau: float = positive(0.01)
    T: int = whole(10)
    delta: float = nonnegative(1e-3)
    lambda0: float = nonnegative(0.0)
    restart: bool = True
    dual: Literal["ascent", "damped"] = choice("ascent", "ascent", "damped")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual == "damped" and self.tau > 1:
            raise ValueError(f"`SLM(tau={self.tau!r}, dual='damped')` must be at most 1.")

    def start(self, problem: BilevelProblem, x: Tensor, y: Tensor, units: Units) -> SLMState:
        return SLMState(x=x, y=y, units=units, multiplier=float(self.lambda0))

    def step(self, problem: BilevelProblem, s: SLMState) -> tuple[SLMState, StepInfo]:
        inner_step, dual_step, damping = self.gamma, self.tau, 0.0
        if self.dual == "damped":
            # In this reading gamma and tau belong to the multiplier.
            inner_step, dual_step, damping = self.alpha, self.gamma, self.tau
        weight, here, at_y = s.multiplier, s.here or problem.at(s.x), LowerPoint(s.y)
        start = at_y if s.z is None else s.z
        inner = descend(here, start, s.rate_y(inner_step), self.T, problem.lower_set)
        z = LowerPoint(inner.end)
        f = problem.upper(s.x, s.y)
        gap = here.gap(at_y, z, inner.first if s.z is None else None)
        d_x, d_y = f.grad_x + weight * gap.grad_x, f.grad_y + weight * gap.grad_y
        x = problem.upper_set.project(s.x - s.rate_x(self.eta) * d_x)
        y = problem.lower_set.project(s.y - s.rate_y(self.alpha) * d_y)
        there = problem.at(x)
        lower = there.value(y)
        slack = lower - there.value(z) - self.delta
        info = StepInfo(upper=f.value, lower=lower, inner_iterations=self.T, multiplier=weight)
        multiplier = max(0.0, (1 - damping) * weight + dual_step * slack)
        kept = None if self.restart else inner.end
        return s.after(x, y, here=there, multiplier=multiplier, z=kept), info


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

    method_type = SLMMethod
