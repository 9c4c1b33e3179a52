r"""A certificate and the counts of its run in plain words, and what to try where something is off."""

from __future__ import annotations

from lightning_bilevel.kkt import Certificate
from lightning_bilevel.tally import Tally

__all__ = ["advice", "reading"]

# A penalty that was strengthened in the last fifth of a run may be so again.
_SETTLED = 0.8
# Above the smoothing scale for so many iterations, and for a fifth of the run: nothing there pulls the residual down.
_STUCK = 20
# One line search in twenty at its cap is no accident.
_OFTEN = 0.05
# With the right step the inner loop, warm-started, takes a handful of iterations.
_SLOW = 30.0
# The part of the gradient in y that the boundary of Y has to hold before it is worth a word.
_HELD = 0.1


def reading(certificate: Certificate, tally: Tally | None = None) -> str:
    """Say in one sentence how feasible and how stationary a point is, and whether the penalty has settled.

    Args:
        certificate: The certificate of the point.
        tally: The counts of the run that led there.
    """
    c = certificate
    feasible = f"feasible to {c.feasibility:.1e}" if c.feasibility > 0.0 else f"feasible (R = {c.residual:.1e})"
    parts = [
        feasible,
        f"lower level within {c.prox_stationarity:.2g} of stationary (delta allows {c.stationarity_bound:.2g})",
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
    found = []
    if tally.penalised and tally.above >= max(_STUCK, (1 - _SETTLED) * tally.iterations):
        found.append(
            f"The residual has been above 2 a_phi mu for the last {tally.above} iterations: the penalty is too weak for it. Run "
            "longer, or start with a smaller `gamma0`."
        )
    if tally.capped > _OFTEN * tally.iterations:
        found.append(
            f"{tally.capped} of {tally.iterations} line searches ended at their cap: f or g is rougher than the method "
            "assumes. Look for a kink in them, evaluate in float64, or allow a larger `L_max`."
        )
    if tally.halvings:
        found.append(
            f"The inner step was divided by {2**tally.halvings}: `L_yy` is too small, g is more curved than that. A value "
            f"larger by that factor saves the inner loops that diverge."
        )
    elif tally.trials and tally.inner_iterations > _SLOW * tally.trials:
        found.append(
            f"The inner loop takes {tally.inner_iterations / tally.trials:.0f} iterations per evaluation: its step "
            "1/(L_yy + 1/rho) is short. Make `L_yy` smaller (too small is noticed and corrected), or `zeta_bar` larger."
        )
    if tally.penalty_updates and not _settled(tally):
        found.append(
            f"The penalty was still moving at iteration {tally.last_update} of {tally.iterations}: run longer, or start with a "
            "smaller `gamma0`."
        )
    if certificate.held_share > _HELD:
        found.append(
            f"y lies on the boundary of its set, which holds {certificate.held_share:.0%} of the gradient in y: if the bound is "
            "not part of the problem, widen it."
        )
    return found


def _settled(tally: Tally) -> bool:
    return tally.last_update <= _SETTLED * tally.iterations
