r"""AID and SOBA, which solve the adjoint system of a hypergradient approximately.

At a solution y of the lower level and for the face of Y on which it lies (T and b of
:mod:`~lightning_bilevel.core.sets`, s the step of y), the hypergradient is
:math:`\nabla_x f - \nabla^2_{xy} g\, v` with

.. math:: A v = T\, \nabla_y f, \qquad
    A v = T\, \nabla^2_{yy} g\, v + (b/s + d)\, v, \qquad v = T v

where d is the damping. Without constraints and damping this is :math:`\nabla^2_{yy} g\, v =
\nabla_y f`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.curvature import difference_curvature, difference_products
from lightning_bilevel.core.lower import At, LowerLevel, LowerPoint, vector
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import face_at
from lightning_bilevel.core.vectors import dot, norm
from lightning_bilevel.solvers.base import BilevelOptimizer, Method, State, descend
from lightning_bilevel.solvers.constants import (
    Power,
    choice,
    nonnegative,
    positive,
    schedule,
    whole,
)
from lightning_bilevel.solvers.record import AdjointInfo

# How products with second derivatives are computed.
Ways = Literal["autograd", "difference"]
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class AdjointState(State):
    """The state of a method that solves the adjoint system.

    Attributes:
        v: Its last solution; None if the next one does not start there.
        indefinite: Whether a curvature that is not positive has been reported.
    """

    v: Tensor | None = None
    indefinite: bool = False


def products(lower: LowerLevel, y: At, v: Tensor, way: Ways, unit: float) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\nabla^2_{yy} g\, v` and :math:`\nabla^2_{xy} g\, v`, at two passes."""
    if way == "difference":
        return difference_products(lower, vector(y), v, unit=unit)
    exact = lower.products(y, v)
    return exact.yy, exact.xy


def resolution(way: Ways, dtype: torch.dtype) -> float:
    """Return the relative accuracy of a product, with a margin of a hundred."""
    eps = torch.finfo(dtype).eps
    return 100 * (eps if way == "autograd" else eps ** (2 / 3))


class Solved(NamedTuple):
    """A solution of A v = b, exact or not.

    Attributes:
        v: The vector.
        curvature: The smallest <p, A p>/|p|^2 that was met if it is not positive, and else None.
    """

    v: Tensor
    curvature: float | None = None


def nonpositive(p: Tensor, Ap: Tensor, resolution: float) -> float | None:
    """Return the curvature <p, A p>/|p|^2 if it is not positive.

    It counts as 0 if it is below the resolution times |A p|/|p|, where rounding decides its sign.
    """
    length = norm(p)
    if length == 0.0:
        return None
    curvature = dot(p, Ap) / length**2
    return curvature if curvature <= resolution * norm(Ap) / length else None


def conjugate_gradients(
    A: Product, b: Tensor, v: Tensor | None, steps: int, tolerance: float, resolution: float
) -> Solved:
    """Solve A v = b by conjugate gradients, which end where A is not positive definite.

    Args:
        A: The product with the matrix.
        b: The right-hand side.
        v: The start; None for 0, which saves a product.
        steps: At most so many.
        tolerance: They end at this residual, relative to b.
        resolution: The relative accuracy of the products.
    """
    r = b if v is None else b - A(v)
    v = torch.zeros_like(b) if v is None else v
    p = r
    squared = dot(r, r)
    enough = (max(tolerance, torch.finfo(b.dtype).eps) * norm(b)) ** 2
    # The largest curvature so far: a direction whose curvature is that much smaller counts as flat.
    largest = 0.0
    for _ in range(steps):
        if squared <= enough:
            break
        Ap = A(p)
        length = dot(p, p)
        bent = dot(p, Ap)
        largest = max(largest, norm(Ap) / length**0.5)
        if bent <= resolution * largest * length:
            return Solved(v, bent / length)
        alpha = squared / bent
        v = v + alpha * p
        r = r - alpha * Ap
        new = dot(r, r)
        p = r + (new / squared) * p
        squared = new
    return Solved(v)


def fixed_point(
    A: Product, b: Tensor, v: Tensor, steps: int, step: float, resolution: float
) -> Solved:
    r"""Repeat :math:`v \leftarrow v - s (A v - b)`.

    From :math:`v = s b` the result is the Neumann series :math:`s \sum_{j \le N} (I - s A)^j b`.
    """
    worst: float | None = None
    for _ in range(steps):
        Av = A(v)
        found = nonpositive(v, Av, resolution)
        if found is not None:
            worst = found if worst is None else min(worst, found)
        v = v - step * (Av - b)
    return Solved(v, worst)


@dataclass(frozen=True, kw_only=True)
class AdjointMethod(Method[AdjointState]):
    """The constants of both methods."""

    alpha: Power = schedule(0.01)
    beta: Power = schedule(0.01)
    damping: float = nonnegative(0.0)
    products: Ways = choice("autograd", "autograd", "difference")

    def warned(self, s: AdjointState, curvature: float | None, consequence: str) -> bool:
        """Warn at the first curvature that is not positive; return whether there has been one."""
        if curvature is not None and not s.indefinite:
            curvature *= s.units[1] ** 2  # the damping is in the unit of y
            warnings.warn(
                f"`{self.name}` met the curvature {curvature:.3g} along a direction of the lower "
                f"level, with `damping={self.damping:g}`: g(x, .) is not strongly convex at this "
                f"point, as the method assumes. {consequence} A `damping` above "
                f"{self.damping - curvature:.3g} makes it positive along this direction, and "
                "changes the hypergradient; IVSP and MEHA need no convexity.",
                stacklevel=6,
            )
        return s.indefinite or curvature is not None


@dataclass(frozen=True, kw_only=True)
class AIDMethod(AdjointMethod):
    """The constants of AID and its iteration."""

    T: int = whole(10)
    N: int = whole(10, least=0)
    linear_solver: Literal["cg", "neumann", "fixed_point"] = choice(
        "cg", "cg", "neumann", "fixed_point"
    )
    eta: float | None = positive(None)
    warm_start: bool = True
    tolerance: float = positive(1e-10)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.N == 0 and self.linear_solver != "neumann":
            solver = f"linear_solver={self.linear_solver!r}"
            raise ValueError(f"`AID(N=0, {solver})` makes no step on v: N must be positive.")

    def step(self, problem: BilevelProblem, s: AdjointState) -> tuple[AdjointState, AdjointInfo]:
        alpha, beta, unit = self.alpha.at(s.k), s.rate_y(self.beta.at(s.k)), s.units[1]
        eta = beta if self.eta is None else s.rate_y(self.eta)
        here = problem.at(s.x)
        y, _, lower, before = descend(here, s.y, beta, self.T, problem.lower_set)
        f = problem.upper(s.x, y)
        # A v = b on the face of y.
        face = face_at(problem.lower_set, before[-1])
        shift = face.bend / beta + self.damping / unit**2
        at_y = LowerPoint(y)

        def A(v: Tensor) -> Tensor:
            if self.products == "difference":
                yy = difference_curvature(here, y, v, unit=unit)
            else:
                yy = here.curvature(at_y, v)
            return face.tangent(yy) + shift * v

        b = face.tangent(f.grad_y)
        v = None if s.v is None else face.tangent(s.v)
        accuracy = resolution(self.products, y.dtype)
        if self.linear_solver == "cg":
            solved = conjugate_gradients(A, b, v, self.N, self.tolerance, accuracy)
            consequence = "Conjugate gradients stop there, with the v so far."
        else:
            # The series begins with its first term.
            start = eta * b if self.linear_solver == "neumann" else 0.0 * b if v is None else v
            solved = fixed_point(A, b, start, self.N, eta, accuracy)
            consequence = "The steps of v may diverge."
        v, curvature = solved
        warned = self.warned(s, curvature, consequence)
        _, xy = products(here, at_y, v, self.products, unit)
        x = problem.upper_set.project(s.x - s.rate_x(alpha) * (f.grad_x - xy))
        kept = v if self.warm_start and self.linear_solver != "neumann" else None
        bent = curvature is not None
        info = AdjointInfo(upper=f.value, lower=lower, inner_iterations=self.T, indefinite=bent)
        return s.after(x, y, v=kept, indefinite=warned), info


class AID(BilevelOptimizer):
    r"""Approximate implicit differentiation: gradient steps on :math:`F(x) = f(x, y^*(x))`.

    Where g(x, .) has one minimiser :math:`y^*(x)` and curvature around it, the gradient of F is
    :math:`\nabla_x f - \nabla^2_{xy} g\, v` with :math:`\nabla^2_{yy} g\, v = \nabla_y f`. Both
    :math:`y^*` and v are approximated, from where the last iteration left them:

    .. math::
        y &\leftarrow P_Y\bigl(y - \beta_k \nabla_y g(x^k, y)\bigr) \quad\text{T times, to }
          y^{k+1} \\
        v^{k+1} &\approx \bigl(\nabla^2_{yy} g(x^k, y^{k+1}) + d I\bigr)^{-1}
          \nabla_y f(x^k, y^{k+1}) \quad\text{by N steps} \\
        x^{k+1} &= P_X\bigl(x^k - \alpha_k [\nabla_x f(x^k, y^{k+1})
          - \nabla^2_{xy} g(x^k, y^{k+1})\, v^{k+1}]\bigr)

    The steps of the linear solver are those of conjugate gradients (``"cg"``), or of
    :math:`v \leftarrow v - \eta [(\nabla^2_{yy} g + d I)\, v - \nabla_y f]`: from the last v
    (``"fixed_point"``, known as AmIGO), or from :math:`\eta \nabla_y f` (``"neumann"``, known as
    stocBiO), which is :math:`\eta \sum_{j \le N} (I - \eta (\nabla^2_{yy} g + d I))^j \nabla_y f`.
    ``"neumann"`` with N = 0 is known as T1-T2.

    In a set Y the system is that of the face on which y lies. Of a box, the coordinates that the
    last step of y has moved to a bound are left out of the system, and v is 0 there.

    Assumption on g: g(x, .) is strongly convex and Y is the whole space. Guarantee: stationarity of
    F up to epsilon in :math:`O(\epsilon^{-2})` iterations. There is none for a weakly convex g:
    conjugate gradients then stop at a direction of curvature 0 or less with the v so far, and the
    method warns; the other two may diverge. Cost of an iteration: T + 1 passes, and 2 for each
    product with second derivatives of g: N + 1 of them, and one more for conjugate gradients that
    start at the last v. Conjugate gradients take fewer steps if they reach the tolerance. Upper of
    the record is f at :math:`(x^k, y^{k+1})`, lower is g at :math:`x^k` and the y before its last
    step.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha_k`, the step of x.
        beta: :math:`\beta_k`, the step of y; below 2/L for a curvature of g(x, .) up to L.
        T: The steps of y.
        N: The steps of the linear solver; 0 is allowed for ``"neumann"`` alone.
        linear_solver: ``"cg"``, ``"neumann"`` or ``"fixed_point"``.
        eta: :math:`\eta`, the step of the last two; None for :math:`\beta_k`.
        warm_start: Whether ``"cg"`` and ``"fixed_point"`` start at the last v, or at 0.
        damping: d. It makes a system solvable that is not, or is hardly; the hypergradient is then
            another one.
        tolerance: Conjugate gradients stop at this residual, relative to the right-hand side.
        products: ``"autograd"`` differentiates g twice; ``"difference"`` takes central differences
            of its gradients, for models that have no second derivatives.

    alpha and beta are numbers or schedules (:class:`~lightning_bilevel.solvers.constants.Power`).
    The tolerance is that of the package hypertorch; the other defaults are generic.

    References:
        - Pedregosa: Hyperparameter Optimization with Approximate Gradient. ICML 2016.
        - Grazzi, Franceschi, Pontil, Salzo: On the Iteration Complexity of Hypergradient
          Computation. ICML 2020.
        - Ji, Yang, Liang: Bilevel Optimization: Convergence Analysis and Enhanced Design. ICML
          2021.
        - Arbel, Mairal: Amortized Implicit Differentiation for Stochastic Bilevel Optimization.
          ICLR 2022.

    Notes:
        The updates were read in public implementations (hypertorch, benchopt's benchmark); the
        rates are quoted from memory of the papers. The projections and the system on a face are the
        natural insertion for constrained levels, outside the theorems. They are exact under strict
        complementarity. The tolerances of Pedregosa's method, which fall over the iterations, and
        its step of x are not part of this class.
    """

    method_type = AIDMethod


@dataclass(frozen=True, kw_only=True)
class SOBAMethod(AdjointMethod):
    """The constants of SOBA and its iteration."""

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
        warned = self.warned(s, curvature, "The steps of v may diverge.")
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
