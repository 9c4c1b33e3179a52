"""AID, approximate implicit differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_bilevel.core.lower import LowerPoint
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import face_at
from lightning_bilevel.solvers.base import BilevelOptimizer, Method
from lightning_bilevel.solvers.constants import (
    Power,
    choice,
    nonnegative,
    positive,
    schedule,
    whole,
)
from lightning_bilevel.solvers.descent import descend
from lightning_bilevel.solvers.hypergradient import (
    AdjointState,
    Ways,
    adjoint_matrix,
    conjugate_gradients,
    fixed_point,
    products,
    resolution,
    warn_once,
)
from lightning_bilevel.solvers.record import AdjointInfo

__all__ = ["AID", "AIDMethod"]


@dataclass(frozen=True, kw_only=True)
class AIDMethod(Method[AdjointState]):
    """The constants of AID and its iteration."""

    alpha: Power = schedule(0.01)
    beta: Power = schedule(0.01)
    T: int = whole(10)
    N: int = whole(10, least=0)
    linear_solver: Literal["cg", "neumann", "fixed_point"] = choice(
        "cg", "cg", "neumann", "fixed_point"
    )
    eta: float | None = positive(None)
    warm_start: bool = True
    damping: float = nonnegative(0.0)
    tolerance: float = positive(1e-10)
    products: Ways = choice("autograd", "autograd", "difference")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.N == 0 and self.linear_solver != "neumann":
            raise ValueError(
                f"`AID(N=0, linear_solver={self.linear_solver!r})` makes no step on v: N must be a "
                "positive whole number."
            )

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
        A = adjoint_matrix(here, at_y, face, shift, self.products, unit)
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
        warned = warn_once(self.name, s.indefinite, curvature, self.damping, consequence, unit)
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
