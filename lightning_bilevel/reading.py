"""The counts of a run, and its certificate in plain words, with advice if something is off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.passes import Calls
from lightning_bilevel.solvers.record import PenaltyInfo, StepInfo

# A penalty that was strengthened in the last fifth of a run may be strengthened again.
_SETTLED = 0.8
# One line search in twenty at its cap is no accident.
_OFTEN = 0.05
# With the right step the inner loop, warm-started, takes a handful of iterations.
_SLOW = 30.0
# KKT residuals are small below this part of the largest gradient of f in the run.
_CONVERGED = 1e-2
# A proximal step is long above the first part of 1 + |y|, and next to nothing below the second.
_LONG = 1e-2
_SHORT = 1e-6
# If delta and rho allow |y - z| at most this part of 1 + |y|, then rho is small, not the gradients.
_NEAR = 1e-4


@dataclass
class Tally:
    """Counts over a run, from the records of its iterations.

    Attributes:
        iterations: Outer iterations.
        inner_iterations: Gradient steps on the lower level.
        calls: Evaluations of f and g.
        trials: Trials of the line search; 0 for methods without one.
        capped: Line searches that used up their trials or ended at L_max.
        penalty_updates: How often the penalty was strengthened; None if the method never does so.
        last_update: The iteration of the last penalty update, 0 for none.
    """

    iterations: int = 0
    inner_iterations: int = 0
    calls: Calls = field(default_factory=Calls)
    trials: int = 0
    capped: int = 0
    penalty_updates: int | None = None
    last_update: int = 0

    def add(self, info: StepInfo) -> None:
        """Count one iteration; the first one of a run begins anew."""
        if info.iteration == 1:
            vars(self).update(vars(Tally()))
        self.iterations = info.iteration
        self.inner_iterations += info.inner_iterations
        self.calls += info.calls
        if isinstance(info, PenaltyInfo):
            self.trials += info.trials
            self.capped += info.capped
            self.penalty_updates = info.penalty_updates
            if info.penalty_updated:
                self.last_update = info.iteration

    @classmethod
    def from_dict(cls, counts: Mapping[str, Any]) -> Tally:
        """Return the counts that `dataclasses.asdict` has made plain."""
        return cls(**{**counts, "calls": Calls(**counts["calls"])})


def reading(certificate: Certificate, tally: Tally | None = None) -> str:
    """Say in one sentence how feasible and stationary a point is, and if the penalty settled.

    The lower level is judged at the proximal point z: the bounds are for z and its distance from y.

    Args:
        certificate: The certificate of the point.
        tally: The counts of the run that led there.
    """
    c = certificate
    parts = [f"point: {c.point}"] if c.point else []
    if c.evaluated_on:
        parts.append(f"evaluated on {c.evaluated_on}")
    if (ratio := _ratio(c)) > _CONVERGED:
        parts.append(f"not converged, the residuals are {ratio:.2g} times the gradient of f")
    parts.append(f"feasible to {c.feasibility:.1e}" if c.feasibility > 0.0 else "feasible")
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
    if tally is not None and tally.penalty_updates is not None:
        number, last, iterations = tally.penalty_updates, tally.last_update, tally.iterations
        words = "settled at" if last <= _SETTLED * iterations else "is still moving:"
        words += f" update {number} (iteration {last} of {iterations})"
        parts.append(f"the penalty {words if number else 'never had to grow'}")
        # The theorem is about such a method only.
        if c.theorem.startswith("does not apply"):
            parts.append(f"the theorem {c.theorem}")
    return "; ".join(parts) + "."


def advice(certificate: Certificate, tally: Tally) -> list[str]:
    """Return one sentence per problem, which says what to try; none if all is well."""
    c, found = certificate, []
    if (ratio := _ratio(c)) > _CONVERGED:
        found.append(
            f"Not converged: the KKT residuals are {ratio:.2g} times the largest gradient of f "
            f"seen, which a solution has below {_CONVERGED:g}. Run longer; if the values go up and "
            "down, make the steps shorter; if f falls without end, give the levels a set (`Box`)."
        )
    if _unenforced(c):
        # delta = rho (1 - rho sigma)/2 (G/10)^2 allows a tenth of the gradient G.
        delta = c.rho * (1 - c.rho * c.sigma) / 2 * (c.lower_gradient / 10) ** 2
        found.append(
            "The lower level is not enforced: delta and rho allow a gradient of g of "
            f"{c.stationarity_bound:.2g} at z, and those seen at y are "
            f"{c.first_lower_gradient:.2g} at the start and {c.lower_gradient:.2g} at the end. "
            f"Make delta smaller, at most {delta:.1g}, or scale g up; where g has kinks or very "
            "different curvatures, smooth it, rescale its variables (`lower_unit`) or give `rho`."
        )
    if tally.capped > _OFTEN * tally.iterations:
        found.append(
            f"{tally.capped} of {tally.iterations} line searches ended at their cap: look for "
            "kinks, evaluate in float64, or allow a larger `L_max`."
        )
    if tally.trials and tally.inner_iterations > _SLOW * tally.trials:
        found.append(
            f"The inner loop takes {tally.inner_iterations / tally.trials:.0f} iterations per "
            "evaluation: make `L_yy` smaller (too small is corrected), or `zeta_bar` larger."
        )
    return found


def _ratio(c: Certificate) -> float:
    """Return the KKT residuals divided by the largest gradient of f in the run.

    Without the gradient at the start it is 0. The feasibility does not count: it has the unit of g,
    and delta is its measure.
    """
    if c.start is None:
        return 0.0
    largest = max(c.start.upper_gradient, c.upper_gradient)
    return max(c.stationarity, c.complementarity) / largest if largest > 0.0 else 0.0


def _unenforced(c: Certificate) -> bool:
    """Return whether f was minimised as if there were no lower level.

    Then R is slack, and y is hardly nearer to stationary than at the start.
    """
    first = c.first_lower_gradient
    if first is None or c.residual > -c.delta / 2 or c.lower_gradient <= first / 4:
        return False
    # A start that solves the lower level has no gradient to compare with. The proximal step tells
    # more: it is short where the lower level holds, and nothing at all where rho is too small.
    step, size = c.rho * c.lower_gradient, 1 + c.lower_norm
    unseen = 0.0 < step <= _SHORT * size and c.distance_bound <= _NEAR * size
    return unseen or step >= _LONG * size
