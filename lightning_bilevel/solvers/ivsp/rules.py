r"""The two sets of rules that IVSP runs by: the paper's, and its own, for constants that it has
chosen.

Both keep what the theorem asks for: a grid of inverse penalties that falls to 0 by bounded factors,
accuracies that never exceed the schedule, a line search that concedes what evaluations are wrong
by.
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

# The grid of inverse penalties where IVSP chooses for itself: an update halves.
_RATIO = 0.5
# Times the rounding of g: an evaluation cannot be more accurate than that.
_FLOOR = 4.0
# With rho = 1/(4 L_yy) the inner loop's error falls by 0.4 in each iteration: one that takes so
# many is at a point where g is far more curved, which a shorter step keeps clear of.
_MAX_INNER = 200


class Paper:
    """The rules of the paper's Algorithm 1, with all constants given."""

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
        """Return B_R, the bound on the gradient of R; ``seen`` is the largest so far."""
        assert self.constants.B_R is not None
        return self.constants.B_R

    def error(self, zeta: float, merit: Merit, B_R: float) -> float:
        r"""Bound the error of the gradient of :math:`\phi_\mu(R)` that an accuracy leaves."""
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
        """Return the current point, evaluated again if its step needs that, B_R, and the accuracy
        that trial points need.
        """
        return here, self.gradient_bound(here, seen), math.inf

    def slack(self, here: Point, there: Point, gamma: float) -> float:
        """Return the rounding error that the Armijo test allows for: the paper's 1e-12 is for
        float64.
        """
        return 1e-12 + (0.0 if here.w.dtype == torch.float64 else _rounding(here, there, gamma))

    def starts_long(self, trials: int) -> bool:
        """Tell whether the next line search starts from the long Barzilai-Borwein step."""
        return self.constants.bb == "long"

    @property
    def trial_cap(self) -> int:
        """The cap on the inner iterations of a trial."""
        return self.constants.max_inner

    @property
    def gives_up_early(self) -> bool:
        """Whether a few trials whose inner loop fails end the line search: each costs max_inner
        gradients.
        """
        return True


class Own(Paper):
    """The rules for constants that IVSP has chosen: they follow what the run meets."""

    def inverse_penalty(self, t: int) -> float:
        r"""Return :math:`\gamma_0 2^{-t}`."""
        return inverse_penalty(t, self.constants.gamma0, _RATIO)

    def gradient_bound(self, here: Point, seen: float) -> float:
        """Return B_R as given, or the largest norm of the gradient of R so far, with its error."""
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
        """Evaluate R again where its error is more than a fifth of what the step promises."""
        B_R = self.gradient_bound(here, seen)
        mapping = _mapping(here, merit, feasible, L_start)
        needed = self._needed(mapping, here, merit, B_R)
        if mapping / 5 >= self.error(here.zeta, merit, B_R) or needed >= here.zeta:
            return here, B_R, needed
        here = evaluate.sharper(here, needed)
        B_R = self.gradient_bound(here, B_R)
        return here, B_R, self._needed(_mapping(here, merit, feasible, L_start), here, merit, B_R)

    def slack(self, here: Point, there: Point, gamma: float) -> float:
        """Return the rounding of the values that the Armijo test compares."""
        return _rounding(here, there, gamma)

    def starts_long(self, trials: int) -> bool:
        """Tell it as given; left out, it is the long step as long as that is accepted at once."""
        return self.constants.bb == "long" or (self.constants.bb is None and trials == 1)

    @property
    def trial_cap(self) -> int:
        """The cap on the inner iterations of a trial."""
        return (
            min(self.constants.max_inner, _MAX_INNER)
            if self._conditioned
            else self.constants.max_inner
        )

    @property
    def gives_up_early(self) -> bool:
        """Not where the cap is low."""
        return not self._conditioned

    @property
    def _conditioned(self) -> bool:
        """Whether rho was chosen such that the inner loop converges fast."""
        return {"rho", "L_yy"} <= set(self.constants.chosen)

    def _needed(self, mapping: float, here: Point, merit: Merit, B_R: float) -> float:
        """The accuracy at which the gradient's error is a tenth of the mapping, or what rounding
        leaves of it.
        """
        c = self.constants
        wanted = adapted_accuracy(mapping, merit, c, B_R)
        return max(wanted, _FLOOR * torch.finfo(here.w.dtype).eps * abs(here.lower))


def rules_for(constants: Constants) -> Paper:
    """Return the rules that the constants ask for."""
    return Own(constants) if constants.rules == "own" else Paper(constants)


def adapted_accuracy(mapping: float, merit: Merit, constants: Constants, B_R: float) -> float:
    r"""Return the accuracy at which the gradient's error is at most a tenth of the gradient
    mapping.

    Both terms of :func:`~lightning_bilevel.core.moreau.gradient_error` are then at most a twentieth
    of it:

    .. math:: \sqrt{L_{xy}^2 + 1/\rho^2}\,\sqrt{2\zeta/m} \le M/20, \qquad b_\phi B_R \zeta/\mu \le M/20
    """
    part, envelope = mapping / 20, constants.envelope
    from_distance = (
        envelope.modulus / 2 * (part / math.hypot(constants.scaled_L_xy, 1 / envelope.rho)) ** 2
    )
    return min(from_distance, part * merit.mu / (merit.phi.b * B_R) if B_R > 0.0 else math.inf)


def _mapping(here: Point, merit: Merit, feasible: ConvexSet, L_start: float) -> float:
    """The gradient mapping that the first trial will have."""
    scale = float(merit.mu / L_start)
    moved = merit.direction(here).mul_(scale)
    return (
        math.sqrt(squared_distance(feasible.project(torch.sub(here.w, moved, out=moved)), here.w))
        / scale
    )


def _rounding(here: Point, there: Point, gamma: float) -> float:
    size = gamma * (abs(here.f) + abs(there.f)) + 2 * (abs(here.lower) + abs(there.lower))
    return float(torch.finfo(here.w.dtype).eps * size)
