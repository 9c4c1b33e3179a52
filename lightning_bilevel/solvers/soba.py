"""SOBA, implicit differentiation in a single loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_bilevel.core.curvature import difference_products
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import face_at
from lightning_bilevel.solvers.base import BilevelOptimizer, Method
from lightning_bilevel.solvers.constants import Power, choice, nonnegative, schedule
from lightning_bilevel.solvers.hypergradient import (
    AdjointState,
    Ways,
    nonpositive,
    resolution,
    warn_once,
)
from lightning_bilevel.solvers.record import AdjointInfo

__all__ = ["SOBA", "SOBAMethod"]


@dataclass(frozen=True, kw_only=True)
class SOBAMethod(Method[AdjointState]):
    """The constants of SOBA and its iteration."""

    alpha: Power = schedule(0.01)
    beta: Power = schedule(0.01)
    damping: float = nonnegative(0.0)
    products: Ways = choice("autograd", "autograd", "difference")

    def step(self, problem: BilevelProblem, s: AdjointState) -> tuple[AdjointState, AdjointInfo]:
        alpha, beta, unit = self.alpha.at(s.k), s.rate_y(self.beta.at(s.k)), s.units[1]
        v = torch.zeros_like(s.y) if s.v is None else s.v
        here = problem.at(s.x)
        f = problem.upper(s.x, s.y)
        if self.products == "autograd":
            lower, slope, yy, xy = here.products(s.y, v)
        else:
            lower, slope = here.value_and_gradient(s.y)
            yy, xy = difference_products(here, s.y, v, unit=unit)
        u = s.y - beta * slope
        face = face_at(problem.lower_set, u)
        Av = yy + (face.bend / beta + self.damping / unit**2) * v
        curvature = nonpositive(v, Av, resolution(self.products, v.dtype))
        warned = warn_once(
            self.name, s.indefinite, curvature, self.damping, "The steps of v may diverge.", unit
        )
        x = problem.upper_set.project(s.x - s.rate_x(alpha) * (f.grad_x - xy))
        y = problem.lower_set.project(u)
        v = face.tangent(v - beta * (Av - f.grad_y))
        bent = curvature is not None
        info = AdjointInfo(upper=f.value, lower=lower, inner_iterations=1, indefinite=bent)
        return s.after(x, y, v=v, indefinite=warned), info


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

    alpha and beta are numbers or schedules (:class:`~lightning_bilevel.solvers.constants.Power`).
    The defaults are generic.

    References:
        Dagréou, Ablin, Vaiter, Moreau: A Framework for Bilevel Optimization that Enables Stochastic
            and Global Variance Reduction Algorithms. NeurIPS 2022.

    Notes:
        The updates were read in benchopt's benchmark, where v has the other sign: it tends to
        :math:`-(\nabla^2_{yy} g)^{-1} \nabla_y f` there. The rate is quoted from memory of the
        paper. The projections and the damping are not part of it.
    """

    method_type = SOBAMethod
