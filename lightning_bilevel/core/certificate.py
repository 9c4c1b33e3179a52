r"""The KKT residuals of the relaxed problem, its multiplier, and the certificate of a run.

For :math:`\min_{w \in C} f(w)` subject to :math:`R(w) \le 0` and a multiplier
:math:`\lambda \ge 0`:

.. math::
    \Phi^s = \operatorname{dist}(0, \nabla f + \lambda \nabla R + N_C(w)), \qquad
    \Phi^f = [R(w)]_+, \qquad \Phi^c = |\lambda R(w)|
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lightning_bilevel.core.moreau import Envelope, evaluate_gap
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.core.prox import precise_prox
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.table import table

__all__ = ["Certificate", "certify", "least_squares_multiplier"]


@dataclass(frozen=True)
class Certificate:
    r"""How well a point satisfies the KKT conditions of the delta-relaxed Moreau-gap problem.

    Attributes:
        stationarity: :math:`\Phi^s`.
        feasibility: :math:`\Phi^f`, the violation of the gap constraint.
        complementarity: :math:`\Phi^c`.
        multiplier: :math:`\lambda`.
        own_multiplier: Whether the solver reported the multiplier. Otherwise it is the
            least-squares one.
        residual: R itself, negative where the constraint is slack.
        upper: f.
        lower: g.
        prox_distance: |y - z|, z the proximal point.
        prox_stationarity: |y - z| / rho, how far z is from being stationary for g(x, .).
        distance_bound: What delta guarantees for ``prox_distance`` where R <= 0.
        stationarity_bound: What delta guarantees for ``prox_stationarity`` where R <= 0.
        rho: The parameter of the Moreau envelope.
        sigma: The assumed weak-convexity modulus.
        delta: The relaxation.
        tolerance: The accuracy of the proximal point.
        held_share: The share of the gradient of the Lagrangian in y that the normal cone of Y
            absorbs; 0 unless y is on the boundary.
        qualification: Why the constraint qualification (ENNAMCQ) holds, or "not known".
        upper_gradient: The norm of the gradient of f.
        lower_gradient: How far y itself is from being stationary for g(x, .).
        upper_norm: |x|.
        lower_norm: |y|.
        first_upper_gradient: ``upper_gradient`` at the start of the run; None if unknown.
        first_lower_gradient: ``lower_gradient`` at the start of the run; None if unknown.
        evaluated_on: The data that f and g were evaluated on, in words; empty for the data of the
            whole run.
        point: Which point of the run this is, in words; empty for the current one.
    """

    stationarity: float
    feasibility: float
    complementarity: float
    multiplier: float
    own_multiplier: bool
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
    held_share: float
    qualification: str
    upper_gradient: float
    lower_gradient: float
    upper_norm: float
    lower_norm: float
    first_upper_gradient: float | None = None
    first_lower_gradient: float | None = None
    evaluated_on: str = ""
    point: str = ""

    @property
    def kkt(self) -> float:
        """The largest of the three residuals."""
        return max(self.stationarity, self.feasibility, self.complementarity)

    def as_dict(self) -> dict[str, float | bool | str | None]:
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
            ("Moreau gap R", f"{self.residual:.3e}"),
            ("upper level f", f"{self.upper:.6g}"),
            ("lower level g", f"{self.lower:.6g}"),
            (
                "|y - z|",
                f"{self.prox_distance:.3e} (at most {self.distance_bound:.3e} where R <= 0)",
            ),
            (
                "lower-level stationarity",
                f"{self.prox_stationarity:.3e} "
                f"(at most {self.stationarity_bound:.3e} where R <= 0)",
            ),
            ("relaxation", f"delta = {self.delta:g}, rho = {self.rho:g}, sigma = {self.sigma:g}"),
            ("constraint qualification", self.qualification),
        ]
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
    qualification: str = "not known",
    start: Start | None = None,
    evaluated_on: str = "",
    point: str = "",
) -> Certificate:
    r"""Evaluate the KKT residuals at (x, y) independently of the solver that led there.

    Args:
        problem: f, g and the sets.
        x: The upper-level variables, in their set.
        y: The lower-level variables, in theirs.
        envelope: rho, sigma and delta.
        multiplier: The :math:`\lambda` of the solver; None chooses the one that minimises the
            stationarity.
        tolerance: The accuracy of the proximal point; None is 1e-9 in float64, 1e-5 otherwise.
        qualification: What is known about the constraint qualification, in words.
        start: The gradients at the start of the run, as
            :meth:`~lightning_bilevel.core.problem.BilevelProblem.check` returns them. The reading
            compares the end with them.
        evaluated_on: The data of ``problem``, in words, if they are not those of the whole run.
        point: Which point of the run (x, y) is, in words, if it is not the current one.
    """
    if not isinstance(envelope, Envelope):
        raise TypeError(
            f"`certify(envelope={envelope!r})` must be an `Envelope`: a solver that chooses rho "
            "and sigma for itself has none before its first step. Run it first, or give "
            "`Envelope(rho=..., sigma=..., delta=...)`."
        )
    if tolerance is not None and not tolerance > 0:
        raise ValueError(
            f"`certify(tolerance={tolerance})` must be positive, or None for what the dtype allows "
            "comfortably."
        )
    x, y = x.detach(), y.detach()
    if tolerance is None:
        tolerance = 1e-9 if y.dtype == torch.float64 else 1e-5
    with problem.uncounted():
        upper = problem.upper(x, y)
        lower = problem.at(x, remember=False)
        z = precise_prox(lower, y, envelope.rho, problem.lower_set, tolerance=tolerance)
        slope = lower.gradient(y, keep=True)
        gap = evaluate_gap(lower, y, z, envelope)

    def stationarity(weight: float) -> float:
        return math.hypot(
            problem.upper_set.normal_cone_distance(x, upper.grad_x + weight * gap.grad_x),
            problem.lower_set.normal_cone_distance(y, upper.grad_y + weight * gap.grad_y),
        )

    weight = least_squares_multiplier(stationarity) if multiplier is None else multiplier
    distance = norm(y - z)
    gradient_y = upper.grad_y + weight * gap.grad_y
    length = norm(gradient_y)
    free = problem.lower_set.normal_cone_distance(y, gradient_y)
    # A cone splits a vector into two orthogonal parts (Moreau): the absorbed part and the rest.
    held_share = math.sqrt(max(1 - (free / length) ** 2, 0.0)) if length > 0.0 else 0.0
    return Certificate(
        stationarity=stationarity(weight),
        feasibility=max(gap.residual, 0.0),
        complementarity=abs(weight * gap.residual),
        multiplier=weight,
        own_multiplier=multiplier is not None,
        residual=gap.residual,
        upper=upper.value,
        lower=gap.lower,
        prox_distance=distance,
        prox_stationarity=distance / envelope.rho,
        distance_bound=envelope.distance_bound,
        stationarity_bound=envelope.stationarity_bound,
        rho=envelope.rho,
        sigma=envelope.sigma,
        delta=envelope.delta,
        tolerance=tolerance,
        held_share=held_share,
        qualification=qualification,
        upper_gradient=math.hypot(norm(upper.grad_x), norm(upper.grad_y)),
        lower_gradient=problem.lower_set.normal_cone_distance(y, slope),
        upper_norm=norm(x),
        lower_norm=norm(y),
        first_upper_gradient=None if start is None else start.upper_gradient,
        first_lower_gradient=None if start is None else start.lower_gradient,
        evaluated_on=evaluated_on,
        point=point,
    )


def least_squares_multiplier(stationarity: Callable[[float], float], rounds: int = 45) -> float:
    r"""Return the :math:`\lambda \ge 0` that minimises the distance :math:`\Phi^s(\lambda)`.

    The distance to a closed convex cone is convex along the line
    :math:`\nabla f + \lambda \nabla R`. Doubling brackets its minimum, and a golden-section search
    finds it. Each round keeps 0.62 of the bracket, so 45 rounds leave 4e-10 of it. In a smaller
    bracket the compared distances differ only by rounding.
    """
    high = 1.0
    while stationarity(2 * high) < stationarity(high) and high < 1e12:
        high *= 2
    low = 0.0
    high = 2 * high
    ratio = (math.sqrt(5) - 1) / 2
    left = high - ratio * (high - low)
    right = low + ratio * (high - low)
    at_left = stationarity(left)
    at_right = stationarity(right)
    for _ in range(rounds):
        # Ties go to the left: where the gradient of R is 0, all multipliers are equally good and
        # the smallest is wanted.
        if at_left <= at_right:
            high = right
            right = left
            at_right = at_left
            left = high - ratio * (high - low)
            at_left = stationarity(left)
        else:
            low = left
            left = right
            at_left = at_right
            right = low + ratio * (high - low)
            at_right = stationarity(right)
    middle = (low + high) / 2
    return 0.0 if stationarity(0.0) <= stationarity(middle) else middle
