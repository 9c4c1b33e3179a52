r"""The two sets of rules of IVSP: the paper's, and its own for constants that it has chosen.

Both keep the conditions of the theorem: a grid of inverse penalties that falls to 0 by bounded
factors, accuracies that never exceed the schedule, and a line search that allows for the error of
the evaluations.
"""

from __future__ import annotations

import math

import torch

from lightning_bilevel.core.moreau import gradient_error
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import norm, squared_distance
from lightning_bilevel.solvers.ivsp.constants import Constants
from lightning_bilevel.solvers.ivsp.penalty import (
    inverse_penalty,
    prox_accuracy,
    smoothing_function,
    smoothing_parameter,
)
from lightning_bilevel.solvers.ivsp.point import Evaluator, Point
from lightning_bilevel.solvers.ivsp.search import Merit

__all__ = ["Own", "Paper", "adapted_accuracy", "rules_for"]

# IVSP's own rules multiply the inverse penalty by this in each update.
_RATIO = 0.5
# An evaluation cannot be more accurate than this many times the rounding of g.
_FLOOR = 4.0
# With rho = 1/(4 L_yy) the inner loop's error falls by 0.4 in each iteration. A loop that needs
# more iterations than this is at a point where g is far more curved; a shorter step avoids it.
_MAX_INNER = 200


class Paper:
    """The rules of the paper's Algorithm 1; the user sets all constants per task."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants

    def merit(self, k: int, t: int) -> Merit:
        """Return the smoothed penalty function of iteration k after t updates."""
        c = self.constants
        return Merit(
            self.inverse_penalty(t),
            smoothing_parameter(k, c.mu0, c.block, c.r),
            smoothing_function(c.smoothing),
        )

    def inverse_penalty(self, t: int) -> float:
        r"""Return :math:`\hat\gamma_t = \gamma_0 (t + 1)^{-1/2}`."""
        return inverse_penalty(t, self.constants.gamma0)

    def scheduled_accuracy(self, k: int) -> float:
        r"""Return :math:`\zeta_k = \bar\zeta \mu_k^q`."""
        c = self.constants
        return prox_accuracy(smoothing_parameter(k, c.mu0, c.block, c.r), c.zeta_bar, c.q)

    def gradient_bound(self, here: Point, seen: float) -> float:
        """Return B_R, the bound on the norm of the gradient of R.

        Args:
            here: The current point.
            seen: The largest bound so far.
        """
        assert self.constants.B_R is not None
        return self.constants.B_R

    def error(self, zeta: float, merit: Merit, B_R: float) -> float:
        r"""Bound the error of the gradient of :math:`\phi_\mu(R)` at the accuracy zeta."""
        c = self.constants
        return gradient_error(
            zeta, merit.mu, c.envelope, L_xy=c.scaled_L_xy, b=merit.phi.b, B_R=B_R
        )

    def sharpen(
        self,
        evaluate: Evaluator,
        here: Point,
        merit: Merit,
        feasible: ConvexSet,
        L_start: float,
        seen: float,
    ) -> tuple[Point, float, float]:
        """Evaluate the current point more accurately if its step needs that.

        Returns:
            The point, B_R, and the accuracy that trial points need.
        """
        return here, self.gradient_bound(here, seen), math.inf

    def slack(self, here: Point, there: Point, gamma: float) -> float:
        """Return the rounding error that the Armijo test allows for.

        It is the paper's 1e-12. The paper names no dtype. In float32 we add the rounding error of
        the compared values, which is ours: it is larger than 1e-12, and without it a step could be
        rejected for its rounding alone.
        """
        if here.w.dtype == torch.float64:
            return 1e-12
        return 1e-12 + _rounding(here, there, gamma)

    def starts_long(self, trials: int) -> bool:
        """Tell whether the next line search starts from the long Barzilai-Borwein step."""
        return self.constants.bb == "long"

    @property
    def trial_cap(self) -> int:
        """The cap on the inner iterations of a trial."""
        return self.constants.max_inner

    @property
    def gives_up_early(self) -> bool:
        """Whether the line search ends after a few trials whose inner loop fails."""
        return True  # each failure costs max_inner gradients


class Own(Paper):
    """The rules for constants that IVSP has chosen: they adapt to the run."""

    def inverse_penalty(self, t: int) -> float:
        r"""Return :math:`\gamma_0 2^{-t}`."""
        return inverse_penalty(t, self.constants.gamma0, _RATIO)

    def gradient_bound(self, here: Point, seen: float) -> float:
        """Return the user's B_R, or the largest norm of the gradient so far plus its error."""
        c = self.constants
        if c.B_R is not None:
            return c.B_R
        error = gradient_error(here.zeta, 1.0, c.envelope, L_xy=c.scaled_L_xy, b=0.0, B_R=0.0)
        return max(seen, norm(here.grad_R) + error)

    def sharpen(
        self,
        evaluate: Evaluator,
        here: Point,
        merit: Merit,
        feasible: ConvexSet,
        L_start: float,
        seen: float,
    ) -> tuple[Point, float, float]:
        """Evaluate R again if the gradient's error is more than a fifth of the mapping."""
        B_R = self.gradient_bound(here, seen)
        mapping = _mapping(here, merit, feasible, L_start)
        needed = self._needed(mapping, here, merit, B_R)
        if mapping / 5 >= self.error(here.zeta, merit, B_R) or needed >= here.zeta:
            return here, B_R, needed
        here = evaluate.sharper(here, needed)
        B_R = self.gradient_bound(here, B_R)
        mapping = _mapping(here, merit, feasible, L_start)
        return here, B_R, self._needed(mapping, here, merit, B_R)

    def slack(self, here: Point, there: Point, gamma: float) -> float:
        """Return the rounding error of the values that the Armijo test compares."""
        return _rounding(here, there, gamma)

    def starts_long(self, trials: int) -> bool:
        """Tell whether the next line search starts from the long Barzilai-Borwein step.

        If ``bb`` is None, it does as long as the first trial is accepted.
        """
        return self.constants.bb == "long" or (self.constants.bb is None and trials == 1)

    @property
    def trial_cap(self) -> int:
        """The cap on the inner iterations of a trial."""
        cap = self.constants.max_inner
        return min(cap, _MAX_INNER) if self._conditioned else cap

    @property
    def gives_up_early(self) -> bool:
        """Whether the line search ends after a few trials whose inner loop fails."""
        return not self._conditioned  # a low cap makes failures cheap

    @property
    def _conditioned(self) -> bool:
        """Whether rho was chosen such that the inner loop converges fast."""
        return {"rho", "L_yy"} <= set(self.constants.chosen)

    def _needed(self, mapping: float, here: Point, merit: Merit, B_R: float) -> float:
        """Return the accuracy for an error of a tenth of the mapping, or the rounding of g."""
        wanted = adapted_accuracy(mapping, merit, self.constants, B_R)
        return max(wanted, _FLOOR * torch.finfo(here.w.dtype).eps * abs(here.lower))


def rules_for(constants: Constants) -> Paper:
    """Return the rules that the constants name."""
    return Own(constants) if constants.rules == "own" else Paper(constants)


def adapted_accuracy(mapping: float, merit: Merit, constants: Constants, B_R: float) -> float:
    r"""Return the accuracy for a gradient error of at most a tenth of the gradient mapping M.

    Both terms of :func:`~lightning_bilevel.core.moreau.gradient_error` are then at most M/20:

    .. math::
        \sqrt{L_{xy}^2 + 1/\rho^2}\,\sqrt{2\zeta/m} \le M/20, \qquad
        b_\phi B_R \zeta/\mu \le M/20
    """
    part = mapping / 20
    envelope = constants.envelope
    lipschitz = math.hypot(constants.scaled_L_xy, 1 / envelope.rho)
    from_distance = envelope.modulus / 2 * (part / lipschitz) ** 2
    from_slope = part * merit.mu / (merit.phi.b * B_R) if B_R > 0.0 else math.inf
    return min(from_distance, from_slope)


def _mapping(here: Point, merit: Merit, feasible: ConvexSet, L_start: float) -> float:
    """Return the norm of the gradient mapping of the first trial."""
    scale = float(merit.mu / L_start)
    moved = merit.direction(here).mul_(scale)
    projected = feasible.project(torch.sub(here.w, moved, out=moved))
    return math.sqrt(squared_distance(projected, here.w)) / scale


def _rounding(here: Point, there: Point, gamma: float) -> float:
    size = gamma * (abs(here.f) + abs(there.f)) + 2 * (abs(here.lower) + abs(there.lower))
    size += sum(map(abs, (*here.limits.values, *there.limits.values)))
    return float(torch.finfo(here.w.dtype).eps * size)
