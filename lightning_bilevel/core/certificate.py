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
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.moreau import Envelope, evaluate_gap
from lightning_bilevel.core.multiplier import Lagrangian
from lightning_bilevel.core.passes import Residuals
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.core.prox import precise_prox, projected_step, slope_of_psi
from lightning_bilevel.core.qualification import Qualification, theorem
from lightning_bilevel.core.sets import ConvexSet, Product
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.output import table

__all__ = ["Certificate", "certify"]


@dataclass(frozen=True)
class Certificate:
    r"""How well a point satisfies the KKT conditions of the delta-relaxed Moreau-gap problem.

    Attributes:
        stationarity: :math:`\Phi^s`.
        residuals: R = H - delta, the relaxed residual, which is negative where the constraint is
            slack; then the values of the constraints beside the lower level.
        multipliers: Their multipliers, :math:`\lambda` first.
        own_multiplier: Whether the solver reported :math:`\lambda`. Otherwise it is the
            least-squares one.
        smallest_kkt: The smallest value of ``kkt`` over all :math:`\lambda \ge 0`, with the other
            multipliers fixed.
        envelope: rho, sigma and delta.
        upper: f.
        lower: g.
        prox_distance: |y - z|, z the proximal point.
        tolerance: The accuracy of the proximal point, as the norm of its gradient mapping.
        qualification: Why the constraint qualification (ENNAMCQ) holds or fails, or "not known".
        theorem: Whether the convergence theorem of IVSP covers the problem, as far as its
            assumptions can be seen.
        upper_gradient: The norm of the gradient of f.
        lower_gradient: How far y itself is from being stationary for g(x, .).
        upper_norm: |x|.
        lower_norm: |y|.
        start: ``upper_gradient`` and ``lower_gradient`` at the start of the run; None if unknown.
        evaluated_on: The data that f and g were evaluated on, in words; empty for the data of the
            whole run.
        point: Which point of the run this is, in words; empty for the current one.
        passes: The passes of f and g that the certificate took.
    """

    stationarity: float
    residuals: list[float]
    multipliers: list[float]
    own_multiplier: bool
    smallest_kkt: float
    envelope: Envelope
    upper: float
    lower: float
    prox_distance: float
    tolerance: float
    qualification: str
    theorem: str
    upper_gradient: float
    lower_gradient: float
    upper_norm: float
    lower_norm: float
    start: Start | None = None
    evaluated_on: str = ""
    point: str = ""
    passes: int = field(default=0, compare=False)

    rho = property(attrgetter("envelope.rho"), doc="The parameter of the Moreau envelope.")
    sigma = property(attrgetter("envelope.sigma"), doc="The assumed weak-convexity modulus.")
    delta = property(attrgetter("envelope.delta"), doc="The relaxation.")

    @property
    def kkt(self) -> float:
        """The largest of the three residuals."""
        return max(self.stationarity, self.feasibility, self.complementarity)

    @property
    def feasibility(self) -> float:
        r""":math:`\Phi^f`, the largest violation of a constraint."""
        return max(0.0, *self.residuals)

    @property
    def complementarity(self) -> float:
        r""":math:`\Phi^c`, the largest product of a constraint and its multiplier."""
        pairs = zip(self.multipliers, self.residuals, strict=True)
        return max(abs(weight * residual) for weight, residual in pairs)

    @property
    def residual(self) -> float:
        """R."""
        return self.residuals[0]

    @property
    def multiplier(self) -> float:
        r""":math:`\lambda`, the multiplier of R."""
        return self.multipliers[0]

    @property
    def constraints(self) -> list[float]:
        """The values of the constraints beside the lower level."""
        return self.residuals[1:]

    @property
    def constraint_multipliers(self) -> list[float]:
        """The multipliers of the constraints beside the lower level."""
        return self.multipliers[1:]

    @property
    def gap(self) -> float:
        """H, the Moreau gap, which is 0 exactly where y is stationary for g(x, .)."""
        return max(self.residual + self.envelope.delta, 0.0)

    @property
    def prox_stationarity(self) -> float:
        """|y - z| / rho, a bound on how far z is from being stationary for g(x, .) over Y.

        It is for z, not y, and exact where z is in the interior of Y.
        """
        return self.prox_distance / self.envelope.rho

    @property
    def distance_bound(self) -> float:
        """What delta + :math:`[R]_+` guarantees for ``prox_distance``."""
        return self.envelope.distance_bound(max(self.residual, 0.0))

    @property
    def stationarity_bound(self) -> float:
        """What delta + :math:`[R]_+` guarantees for ``prox_stationarity``."""
        return self.envelope.stationarity_bound(max(self.residual, 0.0))

    @property
    def first_upper_gradient(self) -> float | None:
        """``upper_gradient`` at the start of the run; None if unknown."""
        return None if self.start is None else self.start.upper_gradient

    @property
    def first_lower_gradient(self) -> float | None:
        """``lower_gradient`` at the start of the run; None if unknown."""
        return None if self.start is None else self.start.lower_gradient

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes as plain numbers and words, for JSON."""
        derived = [name for name, kind in vars(Certificate).items() if isinstance(kind, property)]
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def rows(self) -> list[tuple[str, str]]:
        """Return the certificate as pairs of words, for a table."""
        origin = "of the solver" if self.own_multiplier else "least squares"
        best = f"(the best multiplier would give {self.smallest_kkt:.3e})"
        slope = f"{self.prox_stationarity:.3e} (at most {self.stationarity_bound:.3e})"
        rows = [
            ("point", self.point),
            ("evaluated on", self.evaluated_on),
            ("KKT stationarity", f"{self.stationarity:.3e}"),
            ("KKT feasibility", f"{self.feasibility:.3e}"),
            ("KKT complementarity", f"{self.complementarity:.3e}"),
            ("multiplier", f"{self.multiplier:.4g} ({origin})"),
            ("KKT residual", f"{self.kkt:.3e} {best}"),
            ("Moreau gap H", f"{self.gap:.3e}"),
            ("residual R = H - delta", f"{self.residual:.3e}"),
            ("upper level f", f"{self.upper:.6g}"),
            ("lower level g", f"{self.lower:.6g}"),
            ("|y - z|", f"{self.prox_distance:.3e} (at most {self.distance_bound:.3e})"),
            ("stationarity of z for g", slope),
            ("relaxation", f"delta = {self.delta:g}, rho = {self.rho:g}, sigma = {self.sigma:g}"),
            ("constraint qualification", self.qualification),
            ("theorem of IVSP", self.theorem),
        ]
        beside = zip(self.constraints, self.constraint_multipliers, strict=True)
        for number, (value, multiplier) in enumerate(beside, start=1):
            rows.append((f"constraint {number}", f"{value:.3e} (multiplier {multiplier:.4g})"))
        return [(name, text) for name, text in rows if text]

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
        qualification: What is known about the constraint qualification: words, or a
            :class:`~lightning_bilevel.core.qualification.Condition`.
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
        lower = problem.at(x)
        z, tolerance = _prox(lower, y, envelope.rho, problem.lower_set, tolerance, passes)
        slope = lower.gradient(y)
        gap = evaluate_gap(lower, y, z, envelope, slope)
        spent = (problem.calls - calls).passes
    residuals = Residuals(
        (gap.residual, *beside.values),
        (torch.cat([gap.grad_x, gap.grad_y]), *beside.gradients),
    )
    feasible = Product([problem.upper_set, problem.lower_set], [x.numel(), y.numel()])
    grad_f = torch.cat([upper.grad_x, upper.grad_y])
    lagrangian = Lagrangian(feasible, torch.cat([x, y]), grad_f, residuals)
    multipliers = lagrangian.best_multipliers(multiplier)
    if not isinstance(qualification, str):
        qualification = qualification(envelope, problem.lower_set, problem.upper_set)
    return Certificate(
        stationarity=lagrangian.stationarity(multipliers),
        residuals=list(residuals.values),
        multipliers=multipliers,
        own_multiplier=multiplier is not None,
        smallest_kkt=lagrangian.smallest_kkt(multipliers),
        envelope=envelope,
        upper=upper.value,
        lower=gap.lower,
        prox_distance=norm(y - z),
        tolerance=tolerance,
        qualification=qualification,
        theorem=theorem(qualification, problem.upper_set, problem.lower_set, kinks, problem.beyond),
        upper_gradient=math.hypot(norm(upper.grad_x), norm(upper.grad_y)),
        lower_gradient=problem.lower_set.normal_cone_distance(y, slope),
        upper_norm=norm(x),
        lower_norm=norm(y),
        start=start,
        evaluated_on=evaluated_on,
        point=point,
        passes=spent,
    )


def _prox(
    lower: LowerLevel, y: Tensor, rho: float, lower_set: ConvexSet, wanted: float, limit: int | None
) -> tuple[Tensor, float]:
    """Return the proximal point and its accuracy, which a limit may leave above the wanted one."""
    prox = partial(precise_prox, lower, y, rho, lower_set, tolerance=wanted)
    if limit is None:
        return prox(), wanted
    z = prox(max_iterations=limit, best_effort=True)
    direction = slope_of_psi(lower.gradient(z), z, y, rho)
    mapping = norm(z - projected_step(z, direction, rho, lower_set)) / rho
    return z, max(wanted, mapping)
