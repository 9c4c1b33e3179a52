"""A certificate and the counts of its run in plain words, with advice if something is off."""

from __future__ import annotations

from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.report.tally import Tally

__all__ = ["advice", "reading"]

# A penalty that was strengthened in the last fifth of a run may be strengthened again.
_SETTLED = 0.8
# If the residual has been above the smoothing scale for this many iterations, and for a fifth of
# the run, nothing pulls it down.
_STUCK = 20
# One line search in twenty at its cap is no accident.
_OFTEN = 0.05
# With the right step the inner loop, warm-started, takes a handful of iterations.
_SLOW = 30.0
# KKT residuals are small below this part of the largest gradient of f in the run.
_CONVERGED = 1e-2
# Nobody looks for a point with a larger norm: f seems to fall without end.
_FAR_OUT = 1e8
# A proximal step is long above the first part of 1 + |y|, and next to nothing below the second.
_LONG = 1e-2
_SHORT = 1e-6
# If delta and rho allow |y - z| at most this part of 1 + |y|, then rho is small, not the gradients.
_NEAR = 1e-4
# What makes rho small, and what helps.
_ROUGH = (
    "is the case where the gradient of g jumps (an absolute value, ReLU, max) or its curvatures "
    "differ by many orders of magnitude. Smooth g, rescale its variables (`lower_unit`), or give "
    "`rho`."
)
# The reading mentions the boundary of Y if it absorbs more than this part of the gradient in y.
_HELD = 0.1


def reading(certificate: Certificate, tally: Tally | None = None) -> str:
    """Say in one sentence how feasible and stationary a point is, and if the penalty settled.

    The lower level is judged at the proximal point z: the bounds are for z and its distance from y.

    Args:
        certificate: The certificate of the point.
        tally: The counts of the run that led there.
    """
    c = certificate
    parts = []
    if c.point:
        parts.append(f"point: {c.point}")
    if c.evaluated_on:
        parts.append(f"evaluated on {c.evaluated_on}")
    ratio = _ratio(c)
    if ratio > _CONVERGED:
        parts.append(f"not converged, the residuals are {ratio:.2g} times the gradient of f")
    if c.feasibility > 0.0:
        parts.append(f"feasible to {c.feasibility:.1e}")
    else:
        parts.append(f"feasible (R = {c.residual:.1e})")
    parts.append(
        f"lower level stationary to {c.prox_stationarity:.2g} at z, {c.prox_distance:.2g} from "
        f"y (bounds {c.stationarity_bound:.2g} and {c.distance_bound:.2g})"
    )
    if _unenforced(c):
        parts.append(f"but not enforced, its gradient is {c.lower_gradient:.2g} where R is slack")
    parts.append(
        f"upper level stationary to {c.stationarity:.1e} "
        f"and complementary to {c.complementarity:.1e}"
    )
    if tally is not None and tally.penalised:
        where = f"(iteration {tally.last_update} of {tally.iterations})"
        if tally.penalty_updates == 0:
            parts.append("the penalty never had to grow")
        elif _settled(tally):
            parts.append(f"the penalty settled at update {tally.penalty_updates} {where}")
        else:
            parts.append(f"the penalty is still moving: update {tally.penalty_updates} {where}")
        # The theorem is about such a method only.
        if c.theorem.startswith("does not apply"):
            parts.append(f"the theorem {c.theorem}")
    return "; ".join(parts) + "."


def advice(certificate: Certificate, tally: Tally) -> list[str]:
    """Return one sentence per problem, which says what to try; none if all is well."""
    ratio = _ratio(certificate)
    found = [] if ratio <= _CONVERGED else [_not_converged(certificate, tally, ratio)]
    if found and _far_out(certificate):
        return found
    if _unenforced(certificate):
        found.append(_not_enforced(certificate))
    if tally.penalised and tally.above >= max(_STUCK, (1 - _SETTLED) * tally.iterations):
        found.append(
            f"The residual has been above 2 a_phi mu for the last {tally.above} iterations: the "
            "penalty is too weak for it. Run longer, or start with a smaller `gamma0`."
        )
    if tally.capped > _OFTEN * tally.iterations:
        found.append(
            f"{tally.capped} of {tally.iterations} line searches ended at their cap: f or g is "
            "rougher than the method assumes. Look for a kink in them, evaluate in float64, or "
            "allow a larger `L_max`."
        )
    if tally.halvings:
        found.append(
            f"The inner step was divided by {2**tally.halvings}: `L_yy` is too small, g is more "
            "curved than that. A value larger by that factor saves the inner loops that diverge."
        )
    elif tally.trials and tally.inner_iterations > _SLOW * tally.trials:
        found.append(
            f"The inner loop takes {tally.inner_iterations / tally.trials:.0f} iterations per "
            "evaluation: its step 1/(L_yy + 1/rho) is short. Make `L_yy` smaller (too small is "
            "noticed and corrected), or `zeta_bar` larger."
        )
    if tally.penalty_updates and not _settled(tally):
        found.append(
            f"The penalty was still moving at iteration {tally.last_update} of {tally.iterations}: "
            "run longer, or start with a smaller `gamma0`."
        )
    if certificate.held_share > _HELD:
        found.append(
            f"y lies on the boundary of its set, which holds {certificate.held_share:.0%} of the "
            "gradient in y: if the bound is not part of the problem, widen it."
        )
    return found


def _ratio(c: Certificate) -> float:
    """Return the KKT residuals divided by the largest gradient of f in the run.

    Without the gradient at the start it is 0. The feasibility does not count: it has the unit of g,
    and delta is its measure.
    """
    if c.first_upper_gradient is None:
        return 0.0
    largest = max(c.first_upper_gradient, c.upper_gradient)
    return max(c.stationarity, c.complementarity) / largest if largest > 0.0 else 0.0


def _far_out(c: Certificate) -> bool:
    return max(c.upper_norm, c.lower_norm) > _FAR_OUT


def _not_converged(c: Certificate, tally: Tally, ratio: float) -> str:
    if _far_out(c):
        return (
            f"Not converged: f is {c.upper:.3g} at a point with norms {c.upper_norm:.2g}, "
            f"{c.lower_norm:.2g}. It seems to be unbounded below where the lower level holds: give "
            "the levels a set such as `Box`, or add a penalty on their size."
        )
    ways = ["Run longer"]
    if not tally.penalised:
        # The user sets the steps and penalties of such a method.
        ways.append("make the steps shorter if the values go up and down")
        if c.feasibility > c.delta:
            ways.append("give the lower level more weight or more steps")
    told = (
        f"Not converged: the KKT residuals are {ratio:.2g} times the largest gradient of f seen, "
        f"which a solution has below {_CONVERGED:g}. {', or '.join(ways)}."
    )
    # At multiplier 0 the residual of the start is the gradient of f.
    if ratio > 1.0:
        told += (
            " That is farther from a solution than the start: `KKTMonitor(restore_best=True)` ends "
            "a fit at the best point that it sees."
        )
    if c.distance_bound <= _NEAR * (1 + c.lower_norm):
        told += (
            f" delta and rho hold y within {c.distance_bound:.1g} of z, so steps are short. That "
            f"{_ROUGH}"
        )
    return told


def _unenforced(c: Certificate) -> bool:
    """Return whether f was minimised as if there were no lower level.

    Then R is slack, and y is hardly nearer to stationary than at the start.
    """
    first = c.first_lower_gradient
    if first is None or c.residual > -c.delta / 2 or c.lower_gradient <= first / 4:
        return False
    # A start that solves the lower level has no gradient to compare with. The proximal step tells
    # more: it is short where the lower level holds.
    return c.rho * c.lower_gradient >= _LONG * (1 + c.lower_norm) or _sees_little(c)


def _sees_little(c: Certificate) -> bool:
    """Return whether rho is so small that the Moreau envelope sees next to nothing of g."""
    largest = max(c.first_lower_gradient or 0.0, c.lower_gradient)
    size = 1 + c.lower_norm
    return 0.0 < c.rho * largest <= _SHORT * size and c.distance_bound <= _NEAR * size


def _not_enforced(c: Certificate) -> str:
    largest = max(c.first_lower_gradient or 0.0, c.lower_gradient)
    diagnosis = (
        "The lower level is not enforced: delta and rho allow a gradient of g of "
        f"{c.stationarity_bound:.2g} at z, and those seen at y are {c.first_lower_gradient:.2g} at "
        f"the start and {c.lower_gradient:.2g} at the end."
    )
    if _sees_little(c):
        return (
            f"{diagnosis} rho = {c.rho:.2g} is so small that the Moreau envelope looks only "
            f"{c.rho * largest:.1g} far, which {_ROUGH}"
        )
    # delta = rho (1 - rho sigma)/2 (G/10)^2 allows a tenth of the gradient G.
    delta = c.rho * (1 - c.rho * c.sigma) / 2 * (c.lower_gradient / 10) ** 2
    return f"{diagnosis} Make delta smaller, at most {delta:.1g}, or scale g up."


def _settled(tally: Tally) -> bool:
    return tally.last_update <= _SETTLED * tally.iterations
