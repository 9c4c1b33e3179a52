"""SOBA, implicit differentiation in a single loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_bilevel.core.differences import difference_products
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import face_at
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.hypergradient import Ways, resolution
from lightning_bilevel.solvers.linear import nonpositive, warn_once
from lightning_bilevel.solvers.record import AdjointInfo
from lightning_bilevel.solvers.schedule import Power, value_at
from lightning_bilevel.solvers.steps import plain

__all__ = ["SOBA"]


class SOBA(BilevelOptimizer):
    r"""Single-loop bilevel algorithm.

    It takes one step each on the lower level, on the linear system of the hypergradient
    :math:`\nabla_x f - \nabla^2_{xy} g\, v`, :math:`\nabla^2_{yy} g\, v = \nabla_y f`, and along
    it. All gradients are those at the old point :math:`(x^k, y^k, v^k)`, and :math:`v^0 = 0`:

    .. math::
        y^{k+1} &= P_Y\bigl(y^k - \beta_k \nabla_y g\bigr) \\
        v^{k+1} &= v^k - \beta_k \bigl[(\nabla^2_{yy} g + d I)\, v^k - \nabla_y f\bigr] \\
        x^{k+1} &= P_X\bigl(x^k - \alpha_k [\nabla_x f - \nabla^2_{xy} g\, v^k]\bigr)

    In a set Y the system is that of the face on which :math:`y^{k+1}` lies: of a box, v is 0 in the
    coordinates that this step moves to a bound.

    Assumption on g: g(x, .) is strongly convex and Y is the whole space. Guarantee: stationarity of
    :math:`f(x, y^*(x))` up to epsilon in :math:`O(\epsilon^{-2})` iterations with constant steps.
    There is none for a weakly convex g, where v may diverge: the method warns of a curvature that
    is not positive along v. Cost of an iteration: 3 passes, and 4 with differences. Upper and lower
    of the record are f and g at :math:`(x^k, y^k)`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha_k`, the step of x.
        beta: :math:`\beta_k`, the step of y and v; below 2/L for a curvature of g(x, .) up to L.
            It stays that of v if y has a torch optimiser.
        damping: d. It makes a system solvable that is not, or is hardly; the hypergradient is then
            another one.
        products: ``"autograd"`` differentiates g twice; ``"difference"`` takes central differences
            of its gradients, for models that have no second derivatives.

    alpha and beta are numbers or schedules (:class:`~lightning_bilevel.solvers.schedule.Power`).
    The defaults are generic.

    References:
        Dagréou, Ablin, Vaiter, Moreau: A Framework for Bilevel Optimization that Enables Stochastic
            and Global Variance Reduction Algorithms. NeurIPS 2022.

    Notes:
        The updates were read in benchopt's benchmark, where v has the other sign: it tends to
        :math:`-(\nabla^2_{yy} g)^{-1} \nabla_y f` there. The rate is quoted from memory of the
        paper. The projections and the damping are not part of it.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        alpha: float | Power = 0.01,
        beta: float | Power = 0.01,
        damping: float = 0.0,
        products: Ways = "autograd",
    ) -> None:
        constants = constants_of(
            locals(),
            lr="alpha",
            schedules=("alpha", "beta"),
            nonnegative=("damping",),
            choices={"products": get_args(Ways)},
        )
        super().__init__(params, constants)
        # Whether a curvature that is not positive has been reported.
        self.memory["indefinite"] = False

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, AdjointInfo]:
        c = self.constants
        k = self.memory["iteration"]
        alpha = value_at(c["alpha"], k)
        beta = value_at(c["beta"], k)
        v = self.memory["v"] if "v" in self.memory else torch.zeros_like(y)
        here = problem.at(x)
        f = problem.upper(x, y)
        if c["products"] == "autograd":
            lower, slope, yy, xy = here.products(y, v)
        else:
            lower, slope = here.value_and_gradient(y)
            yy, xy = difference_products(here, y, v)
        face = face_at(problem.lower_set, y - beta * slope)
        Av = yy + (face.bend / beta + c["damping"]) * v
        curvature = nonpositive(v, Av, resolution(c["products"], y.dtype))
        self.memory["indefinite"] = warn_once(
            "SOBA",
            self.memory["indefinite"],
            curvature,
            c["damping"],
            "The steps of v may diverge.",
        )
        x_new = plain(x, f.grad_x - xy, alpha, problem.upper_set)
        y_new = plain(y, slope, beta, problem.lower_set)
        self.memory["v"] = face.tangent(v - beta * (Av - f.grad_y))
        info = AdjointInfo(
            upper=f.value,
            lower=lower,
            inner_iterations=1,
            lr=alpha,
            indefinite=curvature is not None,
        )
        return x_new, y_new, info
