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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.moreau import Envelope, evaluate_gap
from lightning_bilevel.core.passes import Residuals
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.core.prox import precise_prox, projected_step, slope_of_psi
from lightning_bilevel.core.qualification import Qualification, theorem
from lightning_bilevel.core.sets import ConvexSet, Product
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.output import table

# Multipliers are searched one after another, in so many rounds at most.
_ROUNDS = 100
_Number = cached_property[float]
_Numbers = cached_property[list[float]]
_Known = cached_property[float | None]


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

    #: The parameters of the Moreau envelope, and the relaxation.
    rho = _Number(lambda c: c.envelope.rho)
    sigma = _Number(lambda c: c.envelope.sigma)
    delta = _Number(lambda c: c.envelope.delta)
    #: R, and its multiplier.
    residual = _Number(lambda c: c.residuals[0])
    multiplier = _Number(lambda c: c.multipliers[0])
    #: The constraints beside the lower level, and their multipliers.
    constraints = _Numbers(lambda c: c.residuals[1:])
    constraint_multipliers = _Numbers(lambda c: c.multipliers[1:])
    #: The largest violation of a constraint.
    feasibility = _Number(lambda c: max(0.0, *c.residuals))
    #: The largest product of a constraint and its multiplier.
    complementarity = _Number(
        lambda c: max(abs(m * r) for m, r in zip(c.multipliers, c.residuals, strict=True))
    )
    #: The largest of stationarity, feasibility and complementarity.
    kkt = _Number(lambda c: max(c.stationarity, c.feasibility, c.complementarity))
    #: H, the Moreau gap, which is 0 exactly where y is stationary for g(x, .).
    gap = _Number(lambda c: max(c.residual + c.delta, 0.0))
    #: |y - z| / rho, a bound on how far z, not y, is from stationary for g(x, .) over Y. It is
    #: exact where z is in the interior of Y.
    prox_stationarity = _Number(lambda c: c.prox_distance / c.rho)
    #: What delta + [R]_+ guarantees for ``prox_distance`` and for ``prox_stationarity``.
    distance_bound = _Number(lambda c: c.envelope.distance_bound(max(c.residual, 0.0)))
    stationarity_bound = _Number(lambda c: c.envelope.stationarity_bound(max(c.residual, 0.0)))
    #: ``upper_gradient`` and ``lower_gradient`` at the start of the run; None if unknown.
    first_upper_gradient = _Known(lambda c: c.start and c.start.upper_gradient)
    first_lower_gradient = _Known(lambda c: c.start and c.start.lower_gradient)

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes as plain numbers and words, for JSON."""
        derived = (
            name for name, of in vars(Certificate).items() if isinstance(of, cached_property)
        )
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


@dataclass(frozen=True)
class Lagrangian:
    """The gradients at a point w = (x, y) of the set C."""

    feasible: ConvexSet
    w: Tensor
    grad_f: Tensor
    residuals: Residuals

    def stationarity(self, multipliers: Sequence[float]) -> float:
        r"""Return :math:`\Phi^s`, the distance of the negative gradient from the normal cone."""
        total = self.grad_f
        for multiplier, gradient in zip(multipliers, self.residuals.gradients, strict=True):
            total = total + multiplier * gradient
        return self.feasible.normal_cone_distance(self.w, total)

    def best_multipliers(self, first: float | None) -> list[float]:
        r"""Return the multipliers; that of R is ``first``, if it is known.

        Without constraints beside it, that of R minimises :math:`\Phi^s`. Complementarity has no
        say in it, so another one may have a smaller largest residual: see
        :meth:`smallest_kkt`. With constraints they minimise
        :math:`(\Phi^s)^2 + \sum_{i > 0} (\lambda_i r_i)^2`, so that a slack one has none. This is
        convex and smooth, and minimising along one multiplier after the other finds the smallest.
        """
        best = [first or 0.0] + [0.0] * (len(self.residuals.values) - 1)
        free = range(0 if first is None else 1, len(best))
        for _ in range(_ROUNDS if len(free) > 1 else 1):
            before = list(best)
            for i in free:
                best[i] = minimiser(partial(self._error, best, i))
            if all(map(partial(math.isclose, abs_tol=1e-9), before, best)):
                break
        return best

    def smallest_kkt(self, multipliers: Sequence[float]) -> float:
        r"""Return the smallest KKT residual over all multipliers of R, with the others fixed.

        .. math:: \min_{\lambda \ge 0} \max\{\Phi^s(\lambda), [R]_+, \lambda |R|\}

        It is the smallest :math:`\epsilon` for which the point is an :math:`\epsilon`-KKT point.
        All three are convex in :math:`\lambda`, so their maximum is. The search ends at 7e-5 of
        its bracket, so the result is right to some three digits, and never too small. It is at
        least as good as the given multipliers.
        """
        weight, *others = multipliers
        residual, *beside = self.residuals.values

        def largest(weight: float) -> float:
            return max(self.stationarity([weight, *others]), residual, weight * abs(residual))

        smallest = largest(weight)
        # No multiplier makes the violation smaller.
        if smallest > residual:
            smallest = min(smallest, largest(minimiser(largest, rounds=20)))
        products = (abs(weight * value) for weight, value in zip(others, beside, strict=True))
        return max([smallest, *beside, *products])

    def _error(self, multipliers: Sequence[float], i: int, value: float) -> float:
        changed = [*multipliers[:i], value, *multipliers[i + 1 :]]
        beside = zip(changed[1:], self.residuals.values[1:], strict=True)
        return math.hypot(self.stationarity(changed), *(weight * r for weight, r in beside))


def minimiser(function: Callable[[float], float], rounds: int = 45) -> float:
    """Return the smallest minimiser of a convex function on the nonnegative numbers.

    Doubling brackets it, and a golden-section search finds it. Each round keeps 0.62 of the
    bracket, so 20 rounds leave 7e-5 of it and 45 rounds 4e-10. In a smaller bracket the compared
    values differ only by rounding.
    """
    low, high = 0.0, 2.0
    while function(high) < function(high / 2) and high < 2e12:
        high *= 2
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(rounds):
        # Ties go to the left: where the gradient of R is 0, all multipliers are equally good and
        # the smallest is wanted.
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    middle = (low + high) / 2
    return 0.0 if function(0.0) <= function(middle) else middle


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
            f"`certify(envelope={envelope!r})` must be an `Envelope`: a solver that chooses it has "
            "none before its first step. Run it first, or give `Envelope(rho, sigma, delta)`."
        )
    x, y = x.detach(), y.detach()
    if tolerance is None:
        tolerance = 1e-9 if y.dtype == torch.float64 else 1e-5
    calls = problem.calls
    with problem.uncounted():
        upper = problem.upper(x, y)
        beside = problem.residuals(x, y)
        lower = problem.at(x)
        prox = partial(precise_prox, lower, y, envelope.rho, problem.lower_set, tolerance=tolerance)
        if passes is None:
            z = prox()
        else:
            z = prox(max_iterations=passes, best_effort=True)
            direction = slope_of_psi(lower.gradient(z), z, y, envelope.rho)
            step = projected_step(z, direction, envelope.rho, problem.lower_set)
            tolerance = max(tolerance, norm(z - step) / envelope.rho)
        slope = lower.gradient(y)
        gap = evaluate_gap(lower, y, z, envelope, slope)
        spent = (problem.calls - calls).passes
    residuals = Residuals(
        (gap.residual, *beside.values), (torch.cat([gap.grad_x, gap.grad_y]), *beside.gradients)
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
