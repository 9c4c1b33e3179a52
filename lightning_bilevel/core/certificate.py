r"""The KKT residuals of the relaxed problem, its multiplier, and the certificate of a run.

For :math:`\min_{w \in C} f(w)` subject to :math:`R(w) \le 0` and a multiplier
:math:`\lambda \ge 0`:

.. math::
    \Phi^s = \operatorname{dist}(0, \nabla f + \lambda \nabla R + N_C(w)), \qquad
    \Phi^f = [R(w)]_+, \qquad \Phi^c = |\lambda R(w)|

Constraints :math:`c_i(w) \le 0` beside the lower level have a multiplier each, the best one for
the point. Their gradients enter the sum, and feasibility and complementarity are the largest of R
and the constraints. Without a lower level R is -delta.

For a lower level that is not convex, R <= 0 says that y is nearly stationary for g(x, .), which it
also is at a maximum: that y is nearly optimal is not certified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.assumptions import theorem
from lightning_bilevel.core.lagrangian import Lagrangian
from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.moreau import Envelope, MoreauPoint, evaluate_gap
from lightning_bilevel.core.multiplier import smallest_residual
from lightning_bilevel.core.passes import Residuals
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.core.prox import precise_prox, projected_step, slope_of_psi
from lightning_bilevel.core.qualification import Qualification, judge
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.table import table

__all__ = ["Certificate", "certify"]


@dataclass(frozen=True)
class Certificate:
    r"""How well a point satisfies the KKT conditions of the delta-relaxed Moreau-gap problem.

    Attributes:
        stationarity: :math:`\Phi^s`.
        feasibility: :math:`\Phi^f`, the largest violation of a constraint.
        complementarity: :math:`\Phi^c`.
        multiplier: :math:`\lambda`.
        own_multiplier: Whether the solver reported the multiplier. Otherwise it is the
            least-squares one.
        smallest_kkt: The smallest value of ``kkt`` over all multipliers :math:`\lambda \ge 0`; the
            multipliers of the constraints beside the lower level stay as they are.
        gap: H, the Moreau gap, which is 0 exactly where y is stationary for g(x, .).
        residual: R = H - delta, the relaxed residual, negative where the constraint is slack.
        upper: f.
        lower: g.
        prox_distance: |y - z|, z the proximal point.
        prox_stationarity: |y - z| / rho, a bound on how far z, not y, is from being stationary for
            g(x, .) over Y; equal to it where z is in the interior of Y.
        distance_bound: What delta + :math:`[R]_+` guarantees for ``prox_distance``.
        stationarity_bound: What delta + :math:`[R]_+` guarantees for ``prox_stationarity``.
        rho: The parameter of the Moreau envelope.
        sigma: The assumed weak-convexity modulus.
        delta: The relaxation.
        tolerance: The accuracy of the proximal point, as the norm of its gradient mapping.
        qualification: Why the constraint qualification (ENNAMCQ) holds or fails, or "not known".
        theorem: Whether the convergence theorem of IVSP covers the problem, as far as its
            assumptions can be seen.
        upper_gradient: The norm of the gradient of f.
        lower_gradient: How far y itself is from being stationary for g(x, .).
        upper_norm: |x|.
        lower_norm: |y|.
        first_upper_gradient: ``upper_gradient`` at the start of the run; None if unknown.
        first_lower_gradient: ``lower_gradient`` at the start of the run; None if unknown.
        evaluated_on: The data that f and g were evaluated on, in words; empty for the data of the
            whole run.
        point: Which point of the run this is, in words; empty for the current one.
        passes: The passes of f and g that the certificate took.
        constraints: The values of the constraints beside the lower level.
        constraint_multipliers: Their multipliers.
    """

    stationarity: float
    feasibility: float
    complementarity: float
    multiplier: float
    own_multiplier: bool
    smallest_kkt: float
    gap: float
    residual: float
    upper: float
    lower: float
    prox_distance: float
    prox_stationarity: float
    distance_bound: float
    stationarity_bound: float
    rho: float
    sigma: float
    delta: float
    tolerance: float
    qualification: str
    theorem: str
    upper_gradient: float
    lower_gradient: float
    upper_norm: float
    lower_norm: float
    first_upper_gradient: float | None = None
    first_lower_gradient: float | None = None
    evaluated_on: str = ""
    point: str = ""
    passes: int = field(default=0, compare=False)
    constraints: list[float] = field(default_factory=list)
    constraint_multipliers: list[float] = field(default_factory=list)

    @property
    def kkt(self) -> float:
        """The largest of the three residuals."""
        return max(self.stationarity, self.feasibility, self.complementarity)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain numbers and words, for JSON."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Return the certificate as pairs of words, for a table."""
        origin = "of the solver" if self.own_multiplier else "least squares"
        rows = [
            ("KKT stationarity", f"{self.stationarity:.3e}"),
            ("KKT feasibility", f"{self.feasibility:.3e}"),
            ("KKT complementarity", f"{self.complementarity:.3e}"),
            ("multiplier", f"{self.multiplier:.4g} ({origin})"),
            (
                "KKT residual",
                f"{self.kkt:.3e} (the best multiplier would give {self.smallest_kkt:.3e})",
            ),
            ("Moreau gap H", f"{self.gap:.3e}"),
            ("residual R = H - delta", f"{self.residual:.3e}"),
            ("upper level f", f"{self.upper:.6g}"),
            ("lower level g", f"{self.lower:.6g}"),
            (
                "|y - z|",
                f"{self.prox_distance:.3e} (at most {self.distance_bound:.3e})",
            ),
            (
                "stationarity of z for g",
                f"{self.prox_stationarity:.3e} (at most {self.stationarity_bound:.3e})",
            ),
            ("relaxation", f"delta = {self.delta:g}, rho = {self.rho:g}, sigma = {self.sigma:g}"),
            ("constraint qualification", self.qualification),
            ("theorem of IVSP", self.theorem),
        ]
        beside = zip(self.constraints, self.constraint_multipliers, strict=True)
        for number, (value, multiplier) in enumerate(beside, start=1):
            rows.append((f"constraint {number}", f"{value:.3e} (multiplier {multiplier:.4g})"))
        if self.evaluated_on:
            rows.insert(0, ("evaluated on", self.evaluated_on))
        if self.point:
            rows.insert(0, ("point", self.point))
        return rows

    def __str__(self) -> str:
        return table("certificate", self.rows())


def certify(
    problem: BilevelProblem,
    x: Tensor,
    y: Tensor,
    envelope: Envelope,
    *,
    multiplier: float | None = None,
    tolerance: float | None = None,
    qualification: Qualification = "not known",
    kinks: Sequence[str] = (),
    start: Start | None = None,
    evaluated_on: str = "",
    point: str = "",
    passes: int | None = None,
) -> Certificate:
    r"""Evaluate the KKT residuals at (x, y) independently of the solver that led there.

    Args:
        problem: f, g and the sets.
        x: The upper-level variables, in their set.
        y: The lower-level variables, in theirs.
        envelope: rho, sigma and delta.
        multiplier: The :math:`\lambda` of the solver; None chooses the one that minimises the
            stationarity alone.
        tolerance: The accuracy of the proximal point; None is 1e-9 in float64, 1e-5 otherwise.
        qualification: What is known about the constraint qualification: words, a verdict, a
            :class:`~lightning_bilevel.core.qualification.Condition` or a function of the envelope.
        kinks: The parts of f or g that are not differentiable, in words, such as "ReLU".
        start: The gradients at the start of the run, as
            :meth:`~lightning_bilevel.core.problem.BilevelProblem.check` returns them. The reading
            compares the end with them.
        evaluated_on: The data of ``problem``, in words, if they are not those of the whole run.
        point: Which point of the run (x, y) is, in words, if it is not the current one.
        passes: The most passes of g for the proximal point; None allows 20,000, and more are an
            error. If they do not suffice, the ``tolerance`` of the certificate is what they
            reached.
    """
    if not isinstance(envelope, Envelope):
        raise TypeError(
            f"`certify(envelope={envelope!r})` must be an `Envelope`: a solver that chooses rho "
            "and sigma for itself has none before its first step. Run it first, or give "
            "`Envelope(rho=..., sigma=..., delta=...)`."
        )
    x, y = x.detach(), y.detach()
    if tolerance is None:
        tolerance = 1e-9 if y.dtype == torch.float64 else 1e-5
    calls = problem.calls
    with problem.uncounted():
        upper = problem.upper(x, y)
        beside = problem.residuals(x, y)
        gap, slope, tolerance = _look_below(problem, x, y, envelope, tolerance, passes)
        spent = (problem.calls - calls).passes
    residuals = Residuals(
        (gap.residual, *beside.values),
        (torch.cat([gap.grad_x, gap.grad_y]), *beside.gradients),
    )
    grad_f = torch.cat([upper.grad_x, upper.grad_y])
    lagrangian = Lagrangian(problem, x, y, grad_f, residuals)
    weights = lagrangian.multipliers(multiplier)
    weight, *others = weights

    def stationarity(value: float) -> float:
        return lagrangian.stationarity([value, *others])

    products = [abs(w * value) for w, value in zip(weights, residuals.values, strict=True)]
    below = max(gap.residual, 0.0)
    known = judge(qualification, envelope, problem.lower_set, problem.upper_set)
    distance = norm(y - gap.z)
    return Certificate(
        stationarity=stationarity(weight),
        feasibility=max(0.0, *residuals.values),
        complementarity=max(products),
        multiplier=weight,
        own_multiplier=multiplier is not None,
        smallest_kkt=max(
            [smallest_residual(stationarity, gap.residual, weight), *beside.values, *products[1:]]
        ),
        gap=max(gap.residual + envelope.delta, 0.0),
        residual=gap.residual,
        upper=upper.value,
        lower=gap.lower,
        prox_distance=distance,
        prox_stationarity=distance / envelope.rho,
        distance_bound=envelope.distance_bound(below),
        stationarity_bound=envelope.stationarity_bound(below),
        rho=envelope.rho,
        sigma=envelope.sigma,
        delta=envelope.delta,
        tolerance=tolerance,
        qualification=known,
        theorem=theorem(known, problem.upper_set, problem.lower_set, kinks, problem.beyond),
        upper_gradient=math.hypot(norm(upper.grad_x), norm(upper.grad_y)),
        lower_gradient=problem.lower_set.normal_cone_distance(y, slope),
        upper_norm=norm(x),
        lower_norm=norm(y),
        first_upper_gradient=None if start is None else start.upper_gradient,
        first_lower_gradient=None if start is None else start.lower_gradient,
        evaluated_on=evaluated_on,
        point=point,
        passes=spent,
        constraints=list(beside.values),
        constraint_multipliers=others,
    )


def _look_below(
    problem: BilevelProblem,
    x: Tensor,
    y: Tensor,
    envelope: Envelope,
    tolerance: float,
    passes: int | None,
) -> tuple[MoreauPoint, Tensor, float]:
    """Return R with its gradients, the gradient of g in y, and the accuracy of the former."""
    lower = problem.at(x)
    prox = partial(precise_prox, lower, y, envelope.rho, problem.lower_set)
    if passes is None:
        z = prox(tolerance=tolerance)
    else:
        z = prox(tolerance=tolerance, max_iterations=passes, best_effort=True)
        tolerance = max(tolerance, _accuracy(problem, lower, y, z, envelope.rho))
    slope = lower.gradient(y)
    return evaluate_gap(lower, y, z, envelope, slope), slope, tolerance


def _accuracy(
    problem: BilevelProblem, lower: LowerLevel, y: Tensor, z: Tensor, rho: float
) -> float:
    """Return the norm of the gradient mapping of psi at z."""
    direction = slope_of_psi(lower.gradient(z), z, y, rho)
    return norm(z - projected_step(z, direction, rho, problem.lower_set)) / rho
