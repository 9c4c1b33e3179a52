"""AID, approximate implicit differentiation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import Face, face_at
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.hypergradient import (
    Ways,
    adjoint_matrix,
    descend_to,
    products,
    resolution,
)
from lightning_bilevel.solvers.linear import Solved, conjugate_gradients, fixed_point, warn_once
from lightning_bilevel.solvers.record import AdjointInfo
from lightning_bilevel.solvers.schedule import Power, value_at
from lightning_bilevel.solvers.steps import plain

__all__ = ["AID"]

LinearSolver = Literal["cg", "neumann", "fixed_point"]


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

    alpha and beta are numbers or schedules (:class:`~lightning_bilevel.solvers.schedule.Power`).
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

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        alpha: float | Power = 0.01,
        beta: float | Power = 0.01,
        T: int = 10,
        N: int = 10,
        linear_solver: LinearSolver = "cg",
        eta: float | None = None,
        warm_start: bool = True,
        damping: float = 0.0,
        tolerance: float = 1e-10,
        products: Ways = "autograd",
    ) -> None:
        constants = constants_of(
            locals(),
            lr="alpha",
            schedules=("alpha", "beta"),
            positive=("tolerance", "eta"),
            nonnegative=("damping",),
            whole=("T",) if N == 0 and linear_solver == "neumann" else ("T", "N"),
            optional=("eta",),
            choices={
                "linear_solver": get_args(LinearSolver),
                "products": get_args(Ways),
            },
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
        here = problem.at(x)
        descent = descend_to(here, y, beta, c["T"], 1, problem.lower_set)
        y_new = descent.y
        f = problem.upper(x, y_new)
        face = face_at(problem.lower_set, descent.before[-1])
        matrix = adjoint_matrix(here, y_new, face, beta, c["damping"], c["products"])
        right = face.tangent(f.grad_y)
        accuracy = resolution(c["products"], y.dtype)
        solved: Solved
        if c["linear_solver"] == "cg":
            start = self._last_v(face)
            solved = conjugate_gradients(matrix, right, start, c["N"], c["tolerance"], accuracy)
        else:
            start = self._first_v(face, right, beta)
            solved = fixed_point(matrix, right, start, c["N"], c["eta"] or beta, accuracy)
        self._warn(solved)
        _, xy = products(here, y_new, solved.v, c["products"])
        d_x = f.grad_x - xy
        x_new = plain(x, d_x, alpha, problem.upper_set)
        if self._keeps_v:
            self.memory["v"] = solved.v
        info = AdjointInfo(
            upper=f.value,
            lower=descent.lower,
            inner_iterations=c["T"],
            lr=alpha,
            indefinite=solved.curvature is not None,
        )
        return x_new, y_new, info

    @property
    def _keeps_v(self) -> bool:
        """Whether the next iteration starts at v."""
        return bool(self.constants["warm_start"] and self.constants["linear_solver"] != "neumann")

    def _last_v(self, face: Face) -> Tensor | None:
        return face.tangent(self.memory["v"]) if "v" in self.memory else None

    def _first_v(self, face: Face, right: Tensor, beta: float) -> Tensor:
        """Return where the steps of v start: the series has its first term."""
        if self.constants["linear_solver"] == "neumann":
            return (self.constants["eta"] or beta) * right
        v = self._last_v(face)
        return 0.0 * right if v is None else v

    def _warn(self, solved: Solved) -> None:
        c = self.constants
        consequence = (
            "Conjugate gradients stop there, with the v so far."
            if c["linear_solver"] == "cg"
            else "The steps of v may diverge."
        )
        self.memory["indefinite"] = warn_once(
            "AID", self.memory["indefinite"], solved.curvature, c["damping"], consequence
        )
