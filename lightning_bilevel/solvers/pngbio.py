"""PNGBiO, the penalty normalised gradient method."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.prox import projected_step
from lightning_bilevel.core.sample import Sample
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.meha import GROWING, bracket_x, bracket_y, brackets, prox_step
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.schedule import Power, value_at
from lightning_bilevel.solvers.steps import plain
from lightning_bilevel.solvers.streaming import Directions, Variable
from lightning_bilevel.solvers.torch_rule import OptimizerCallable

__all__ = ["PNGBiO"]

Norms = Literal["separate", "joint"]

# Keeps a direction that is zero at zero; smaller than any other rounding in d/|d|.
_GUARD = 1e-12


class PNGBiO(BilevelOptimizer):
    r"""Penalty normalised gradient method.

    It minimises MEHA's penalised Moreau gap (:class:`~lightning_bilevel.solvers.meha.MEHA`) by
    steps of prescribed lengths, whatever the size of the gradients. With :math:`\theta^0 = y^0`
    and :math:`\|\cdot\|_\circ = \|\cdot\| + 10^{-12}`:

    .. math::
        \theta^{k+1} &= P_Y\bigl(\theta^k - \eta_k [\nabla_y g(x^k, \theta^k)
          + (\theta^k - y^k)/\gamma]\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \alpha_k d_x / \|d_x\|_\circ\bigr), \quad
          d_x = \nabla_x f(x^k, y^k)/c_k + \nabla_x g(x^k, y^k) - \nabla_x g(x^k, \theta^{k+1}) \\
        y^{k+1} &= P_Y\bigl(y^k - \beta_k d_y / \|d_y\|_\circ\bigr), \quad
          d_y = \nabla_y f(x^{k+1}, y^k)/c_k + \nabla_y g(x^{k+1}, y^k)
          - (y^k - \theta^{k+1})/\gamma

    Assumption on g: g(x, .) is weakly convex, and f and g are smooth in a generalised sense (the
    curvature may grow with the gradient). Guarantee: stationarity of the penalised problem and
    feasibility of the Moreau gap, both up to epsilon, in :math:`O(\epsilon^{-4})` iterations. Cost
    of an iteration: 6 passes, of which one is saved where f does not depend on x; 4 with joint
    norms. Upper and lower of the record are f and g at :math:`(x^{k+1}, y^k)`, where the iteration
    last evaluates them; with joint norms at :math:`(x^k, y^k)`.

    On mini-batches (a problem with ``mini_batch=True``) x, y and :math:`\theta` move once per
    batch, all from the old point :math:`(x^k, y^k, \theta^k)`, by 3 passes; the record is a
    :class:`~lightning_bilevel.solvers.record.StreamInfo` with the multiplier :math:`c_k`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha_k`, the length of the step of x.
        beta: :math:`\beta_k`, the length of the step of y. The iterate stays about that far from
            where it tends to, so the lengths should fall.
        eta: :math:`\eta_k`, the step of :math:`\theta`, which is not normalised.
        gamma: :math:`\gamma`, the proximal parameter; below 1/(weak-convexity modulus of g(x, .)).
        c: :math:`c_k`, the penalty, which divides f.
        norms: ``"separate"`` normalises the two directions each by itself, as above; ``"joint"``
            takes both at :math:`(x^k, y^k)` and divides them by the norm of :math:`(d_x, d_y)`.
        upper_optimizer: What makes the torch optimiser of x, such as
            ``functools.partial(torch.optim.AdamW, lr=1e-2)``, which gets the normalised direction;
            None takes the step above.
        lower_optimizer: That of y, likewise.
        inner_optimizer: That of :math:`\theta`; None takes one as y has.
        upper_clip: The largest norm of the direction of x; None for no bound.
        lower_clip: That of the directions of y and :math:`\theta`.
        x_every: On mini-batches x moves in every so many steps.
        warmup: On mini-batches x stays for so many steps at first.

    alpha, beta, eta and c are numbers or schedules
    (:class:`~lightning_bilevel.solvers.schedule.Power`). The defaults are generic.

    References:
        Zhang, Huang, Huang: Generalized Smooth Bilevel Optimization with Nonconvex Lower-Level.
            ICML 2025.

    Notes:
        The method's paper was at hand as an abstract only. That :math:`\theta` takes a plain step
        and that the norms are separate is inferred from a sister method of the same group and from
        numerical tests; joint norms cannot be excluded.
    """

    stochastic = True
    inner_name = "theta"

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        alpha: float | Power = 0.01,
        beta: float | Power = 0.01,
        eta: float | Power = 0.01,
        gamma: float = 1.0,
        c: float | Power = GROWING,
        norms: Norms = "separate",
        upper_optimizer: OptimizerCallable | None = None,
        lower_optimizer: OptimizerCallable | None = None,
        inner_optimizer: OptimizerCallable | None = None,
        upper_clip: float | None = None,
        lower_clip: float | None = None,
        x_every: int = 1,
        warmup: int = 0,
    ) -> None:
        checked = constants_of(
            locals(),
            lr="alpha",
            schedules=("alpha", "beta", "eta", "c"),
            positive=("gamma",),
            choices={"norms": get_args(Norms)},
        )
        super().__init__(params, *checked)

    def directions(self, sample: Sample, x: Tensor, y: Tensor, z: Tensor) -> Directions:
        k = self.memory["iteration"]
        alpha, beta, eta, c = (
            value_at(self.constants[name], k) for name in ("alpha", "beta", "eta", "c")
        )
        rooms = self.room("lower direction", [y]), self.room("inner direction", [y])
        d_x, d_y, d_z = brackets(sample, y, z, c, self.constants["gamma"], rooms)
        # The norms stay on the device.
        length_x, length_y = (torch.linalg.vector_norm(d) for d in (d_x, d_y))
        if self.constants["norms"] == "joint":
            length_x = length_y = torch.hypot(length_x, length_y)
        d_x.div_(length_x + _GUARD)
        d_y.div_(length_y + _GUARD)
        return Directions(d_x, d_y, d_z, multiplier=c, rates=(alpha, beta, eta))

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        k = self.memory["iteration"]
        gamma = self.constants["gamma"]
        X = problem.upper_set
        Y = problem.lower_set
        alpha, beta, eta, c = (
            value_at(self.constants[name], k) for name in ("alpha", "beta", "eta", "c")
        )
        here = problem.at(x)
        theta = self.memory.get("theta", y)
        step_theta = self.rule("inner", projected_step)
        theta = prox_step(here, theta, y, eta, gamma, Y, step_theta)
        if self.constants["norms"] == "joint":
            f = problem.upper(x, y)
            gap = here.gap(y, theta)
            upper, lower = f.value, gap.value_y
            d_x = f.grad_x / c + gap.grad_x
            d_y = f.grad_y / c + gap.grad_y - (y - theta) / gamma
            length = math.hypot(norm(d_x), norm(d_y)) + _GUARD
            x_new = self._along("upper", x, d_x, alpha, length, X)
        else:
            d_x = bracket_x(problem, here, y, theta, c)
            x_new = self._along("upper", x, d_x, alpha, norm(d_x) + _GUARD, X)
            # y moves at the new x.
            there = problem.at(x_new)
            d_y, upper, lower = bracket_y(problem, there, y, theta, c, gamma)
            length = norm(d_y) + _GUARD
        y_new = self._along("lower", y, d_y, beta, length, Y)
        self.memory["theta"] = theta
        return x_new, y_new, StepInfo(upper=upper, lower=lower, inner_iterations=1, lr=alpha)

    def _along(
        self,
        variable: Variable,
        v: Tensor,
        direction: Tensor,
        rate: float,
        length: float,
        feasible: ConvexSet,
    ) -> Tensor:
        """Step along the direction divided by a length."""
        step = self.rule(variable)
        if step is plain:
            return plain(v, direction, rate / length, feasible)
        return step(v, direction / length, rate, feasible)
