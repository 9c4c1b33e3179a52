r"""A certificate and the counts of its run in plain words, and what to try where something is off."""

from __future__ import annotations

from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.report.tally import Tally

__all__ = ["advice", "reading"]

# A penalty that was strengthened in the last fifth of a run may be so again.
_SETTLED = 0.8
# Above the smoothing scale for so many iterations, and for a fifth of the run: nothing there pulls
# the residual down.
_STUCK = 20
# One line search in twenty at its cap is no accident.
_OFTEN = 0.05
# With the right step the inner loop, warm-started, takes a handful of iterations.
_SLOW = 30.0
# KKT residuals above this part of the largest gradient of f seen are not small.
_CONVERGED = 1e-2
# A point so far out was not looked for: f falls without end, or so it seems.
_FAR_OUT = 1e8
# Proximal steps of this part of 1 + |y| are considerable, or next to nothing.
_LONG, _SHORT = 1e-2, 1e-6
# Where delta and rho allow y this part of 1 + |y| and no more, it is rho that is small, and not the
# gradients.
_NEAR = 1e-4
# The part of the gradient in y that the boundary of Y has to hold before it is worth a word.
_HELD = 0.1


def reading(certificate: Certificate, tally: Tally | None = None) -> str:
    """Say in one sentence how feasible and how stationary a point is, and whether the penalty has
    settled.

    Args:
        certificate: The certificate of the point.
        tally: The counts of the run that led there.
    """
    c = certificate
    feasible = (
        f"feasible to {c.feasibility:.1e}"
        if c.feasibility > 0.0
        else f"feasible (R = {c.residual:.1e})"
    )
    ratio = _ratio(c)
    parts = [
        *([f"evaluated on {c.evaluated_on}"] if c.evaluated_on else []),
        *(
            [f"not converged, the residuals are {ratio:.2g} times the gradient of f"]
            if ratio > _CONVERGED
            else []
        ),
        feasible,
        f"lower level within {c.prox_stationarity:.2g} of stationary (delta allows {c.stationarity_bound:.2g})",
        *(
            [f"but not enforced, its gradient is {c.lower_gradient:.2g} where R is slack"]
            if _unenforced(c)
            else []
        ),
        f"upper level stationary to {c.stationarity:.1e} and complementary to {c.complementarity:.1e}",
    ]
    if tally is not None and tally.penalised:
        where = f"(iteration {tally.last_update} of {tally.iterations})"
        if tally.penalty_updates == 0:
            parts.append("the penalty never had to grow")
        elif _settled(tally):
            parts.append(f"the penalty settled at update {tally.penalty_updates} {where}")
        else:
            parts.append(f"the penalty is still moving: update {tally.penalty_updates} {where}")
    return "; ".join(parts) + "."


def advice(certificate: Certificate, tally: Tally) -> list[str]:
    """Return a sentence for each thing that is off, with what to try; none if all is well."""
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
    """The KKT residuals in f as a part of the largest gradient of f seen; 0 where that of the start
    is not known.
    """
    # The feasibility is in the unit of g, where delta is the measure.
    seen = max(c.first_upper_gradient or 0.0, c.upper_gradient)
    return (
        max(c.stationarity, c.complementarity) / seen
        if c.first_upper_gradient is not None and seen > 0.0
        else 0.0
    )


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
        # Their steps and penalties are set by hand.
        ways.append("make the steps shorter if the values go up and down")
        ways += (
            ["give the lower level more weight or more steps"] if c.feasibility > c.delta else []
        )
    way = ", or ".join(ways)
    return (
        f"Not converged: the KKT residuals are {ratio:.2g} times the largest gradient of f seen, "
        f"which a solution has below {_CONVERGED:g}. {way}."
    )


def _unenforced(c: Certificate) -> bool:
    """Whether f was minimised as if there were no lower level: R is slack, y hardly nearer to
    stationary than at the start.
    """
    first, y = c.first_lower_gradient, 1 + c.lower_norm
    if first is None or c.residual > -c.delta / 2 or c.lower_gradient <= first / 4:
        return False
    # A start that solves the lower level has no gradient to compare with, and a proximal step there
    # should be short.
    return c.rho * c.lower_gradient >= _LONG * y or _sees_little(c)


def _sees_little(c: Certificate) -> bool:
    seen, y = max(c.first_lower_gradient or 0.0, c.lower_gradient), 1 + c.lower_norm
    return 0.0 < c.rho * seen <= _SHORT * y and c.distance_bound <= _NEAR * y


def _not_enforced(c: Certificate) -> str:
    seen = max(c.first_lower_gradient or 0.0, c.lower_gradient)
    told = (
        "The lower level is not enforced: delta and rho allow a gradient of g of "
        f"{c.stationarity_bound:.2g}, and those seen are {c.first_lower_gradient:.2g} at the start "
        f"and {c.lower_gradient:.2g} at the end."
    )
    if _sees_little(c):
        return (
            f"{told} rho = {c.rho:.2g} is so small that the Moreau envelope looks only "
            f"{c.rho * seen:.1g} far, which is the case where the gradient of g jumps (an absolute "
            "value, ReLU, max) or its curvatures differ by many orders of magnitude. Smooth g, "
            "rescale its variables (`lower_unit`), or give `rho`."
        )
    # delta = rho (1 - rho sigma)/2 (G/10)^2 allows a tenth of the gradient G.
    delta = c.rho * (1 - c.rho * c.sigma) / 2 * (c.lower_gradient / 10) ** 2
    return f"{told} Make delta smaller, at most {delta:.1g}, or scale g up."


def _settled(tally: Tally) -> bool:
    return tally.last_update <= _SETTLED * tally.iterations
