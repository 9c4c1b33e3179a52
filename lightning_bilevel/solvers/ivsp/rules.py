r"""The two sets of rules of IVSP: the paper's, and its own for constants that it has chosen.

Both keep the conditions of the theorem: a grid of inverse penalties that falls to 0 by bounded
factors, accuracies that never exceed the schedule, and a line search that allows for the error of
the evaluations.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bilevel.core.moreau import gradient_error
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import norm, squared_distance
from lightning_bilevel.solvers.ivsp.constants import Constants
from lightning_bilevel.solvers.ivsp.merit import Merit, rounding
from lightning_bilevel.solvers.ivsp.penalty import (
    inverse_penalty,
    matching_factor,
    needs_update,
    prox_accuracy,
    smoothing_function,
    smoothing_parameter,
)
from lightning_bilevel.solvers.ivsp.point import Evaluator, Glimpse, Point

__all__ = ["Own", "Paper", "adapted_accuracy", "rules_for"]

# IVSP's own rules multiply the inverse penalty by this in each update.
_RATIO = 0.5
# An evaluation cannot be more accurate than this many times the rounding of g.
_FLOOR = 4.0
# With rho = 1/(4 L_yy) the inner loop's error falls by 0.4 in each iteration. A loop that needs
# more iterations than this is at a point where g is far more curved; a shorter step avoids it.
_MAX_INNER = 50
# The factor of L after a rejected trial is at most _FARTHEST, and _BLIND where nothing was seen.
_FARTHEST = 1024.0
_BLIND = 8.0
# The inverse penalty follows the multiplier once the gradient mapping is this small, compared with
# what a change would make of it, and until the penalty has been changed this often. That it was
# made too strong is told sooner: the constraint holds by then.
_SOLVED = 0.05
_HOLDS = 0.5
_MATCHES = 200
# How much the reference of the line search remembers of earlier merits.
_MEMORY = 0.85
# The error of a gradient is at most this share of the gradient mapping; one above the whole of it
# is computed again.
_ERROR = 0.5


class Paper:
    """The rules of the paper's Algorithm 1; the user sets all constants per task."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants

    def merit(self, k: int, gamma: float) -> Merit:
        """Return the smoothed penalty function of iteration k with the inverse penalty gamma."""
        c = self.constants
        mu = smoothing_parameter(k, c.mu0, c.block, c.r)
        return Merit(gamma, mu, smoothing_function(c.smoothing))

    def inverse_penalty(self, t: int) -> float:
        r"""Return :math:`\hat\gamma_t = \gamma_0 (t + 1)^{-1/2}`."""
        return inverse_penalty(t, self.constants.gamma0)

    def next_penalty(
        self, there: Point, merit: Merit, step: float, L: float, feasible: ConvexSet, t: int
    ) -> float:
        r"""Return the inverse penalty of the next iteration: the next one on the grid if need be.

        Args:
            there: The accepted point.
            merit: The merit function that accepted it.
            step: The length of the step.
            L: The accepted curvature.
            feasible: C.
            t: How often the penalty has been changed so far.
        """
        return self.inverse_penalty(t + 1) if self._must_update(there, merit, step) else merit.gamma

    def _must_update(self, there: Point, merit: Merit, step: float) -> bool:
        """Tell whether the paper's test strengthens the penalty."""
        c2 = self.constants.c2
        return needs_update(there.worst, step, mu=merit.mu, gamma=merit.gamma, a=merit.phi.a, c2=c2)

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

    def slack(self, here: Point, there: Point | Glimpse, gamma: float) -> float:
        """Return the rounding error that the Armijo test allows for.

        It is the paper's 1e-12. The paper names no dtype. In float32 we add the rounding error of
        the compared values, which is ours: it is larger than 1e-12, and without it a step could be
        rejected for its rounding alone.
        """
        if here.w.dtype == torch.float64:
            return 1e-12
        return 1e-12 + rounding(here, there, gamma)

    def inner_start(self, evaluate: Evaluator, here: Point, w: Tensor) -> Tensor:
        """Return where the inner loop of a trial w starts: at the current z."""
        return here.z

    def retry(self, L: float, seen: Callable[[], float]) -> float:
        """Return the curvature after L was rejected: the double.

        Args:
            L: The rejected curvature.
            seen: Returns the curvature of the merit that the trial saw; inf if it could not be
                evaluated.
        """
        return 2 * L

    def allowed_at(self, L: float) -> float:
        """Return the curvature by which the allowance of a trial with L is computed: L itself."""
        return L

    def starts_long(self, trials: int) -> bool:
        """Tell whether the next line search starts from the long Barzilai-Borwein step."""
        return self.constants.bb == "long"

    @property
    def memory(self) -> float:
        """How much the reference of the line search remembers of earlier merits: nothing."""
        return 0.0

    @property
    def trial_cap(self) -> int:
        """The cap on the inner iterations of a trial."""
        return self.constants.max_inner

    @property
    def gives_up_early(self) -> bool:
        """Whether the line search ends after a few trials whose inner loop fails."""
        return True  # each failure costs max_inner gradients

    @property
    def rejects_early(self) -> bool:
        """Whether a trial is rejected by its values alone where they show that it will be."""
        return False  # the paper's Algorithm 1 evaluates every trial


class Own(Paper):
    """The rules for constants that IVSP has chosen: they adapt to the run."""

    def next_penalty(
        self, there: Point, merit: Merit, step: float, L: float, feasible: ConvexSet, t: int
    ) -> float:
        r"""Return the inverse penalty of the next iteration.

        The paper's test halves it. Besides, it follows the multiplier
        (:func:`~lightning_bilevel.solvers.ivsp.penalty.matching_factor`), also upwards: a penalty
        may be found too strong. It does so as soon as the smoothed problem is solved well enough to
        tell: the gradient mapping of the merit is at most a twentieth of what the change of
        :math:`\gamma` makes of the mapping of :math:`\gamma f`, and at most half of it where
        :math:`\gamma` grows towards :math:`\gamma_0` again. (It may be above :math:`\gamma_0`, but
        where a constraint hardly binds it would grow without end.) That happens in the first
        iterations of a run only; from then on the grid falls by halves, as the theorem wants it.
        """
        if self._must_update(there, merit, step):
            return max(_RATIO * merit.gamma, sys.float_info.min)
        factor = matching_factor(merit.phi.slope(there.worst, merit.mu))
        if factor == 1.0 or t >= _MATCHES:
            return merit.gamma
        scale = float(merit.mu / L)
        left = _mapping(there, merit.direction(there), feasible, scale)
        change = abs(1 - factor) * _mapping(there, merit.gamma * there.grad_f, feasible, scale)
        returns = 1.0 < factor <= self.constants.gamma0 / merit.gamma
        share = _HOLDS if returns else _SOLVED
        return factor * merit.gamma if left < share * change else merit.gamma

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
        """Evaluate R again if the gradient's error may be larger than the mapping."""
        B_R = self.gradient_bound(here, seen)
        mapping = _mapping(here, merit.direction(here), feasible, float(merit.mu / L_start))
        needed = self._needed(mapping, here, merit, B_R)
        if mapping >= self.error(here.zeta, merit, B_R) or needed >= here.zeta:
            return here, B_R, needed
        here = evaluate.sharper(here, needed)
        B_R = self.gradient_bound(here, B_R)
        mapping = _mapping(here, merit.direction(here), feasible, float(merit.mu / L_start))
        return here, B_R, self._needed(mapping, here, merit, B_R)

    def slack(self, here: Point, there: Point | Glimpse, gamma: float) -> float:
        """Return the rounding error of the values that the Armijo test compares.

        Each value is exact up to some roundings of its terms.
        """
        return _FLOOR * rounding(here, there, gamma)

    def inner_start(self, evaluate: Evaluator, here: Point, w: Tensor) -> Tensor:
        """Return where the inner loop of a trial w starts: at z, moved as far as y moves."""
        y = here.levels[1]
        return evaluate.problem.lower_set.project(here.z + (w[here.split :] - y))

    def retry(self, L: float, seen: Callable[[], float]) -> float:
        r"""Return the curvature after L was rejected: the one that the trial saw.

        .. math::
            2\mu\,\frac{\text{merit}(w_L) - \text{merit}(w) - \langle d, w_L - w\rangle}
              {\|w_L - w\|^2}

        with the direction d. It is at least 2 L and at most 1,024 L, so a search ends below 1,024
        times the curvature from which on the lemma accepts every trial. A trial that could not be
        evaluated saw nothing, and L is multiplied by 8.
        """
        curvature = seen()
        if math.isinf(curvature):
            return _BLIND * L
        return min(max(curvature, 2 * L), _FARTHEST * L)

    def allowed_at(self, L: float) -> float:
        r"""Return the curvature by which the allowance is computed: at least L_init.

        The allowance :math:`\mu E^2/(2\vartheta)` grows as L falls. In float32 the error E cannot
        be made smaller than rounding allows. Where the gradient mapping is smaller than that, an
        allowance by the L of a long Barzilai-Borwein step would accept any step. The lemma needs
        the allowance only where L is as large as the curvature of the merit.
        """
        return max(L, self.constants.L_init)

    def starts_long(self, trials: int) -> bool:
        """Tell whether the next line search starts from the long Barzilai-Borwein step.

        If ``bb`` is None, it does as long as the first trial is accepted.
        """
        return self.constants.bb == "long" or (self.constants.bb is None and trials == 1)

    @property
    def memory(self) -> float:
        """How much the reference of the line search remembers of earlier merits."""
        return _MEMORY

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
    def rejects_early(self) -> bool:
        """Whether a trial is rejected by its values alone where they show that it will be."""
        return True

    @property
    def _conditioned(self) -> bool:
        """Whether rho was chosen such that the inner loop converges fast."""
        return {"rho", "L_yy"} <= set(self.constants.chosen)

    def _needed(self, mapping: float, here: Point, merit: Merit, B_R: float) -> float:
        """Return the accuracy for an error of half of the mapping, or the rounding of g."""
        wanted = adapted_accuracy(mapping, merit, self.constants, B_R)
        return max(wanted, _FLOOR * torch.finfo(here.w.dtype).eps * abs(here.lower))


def rules_for(constants: Constants) -> Paper:
    """Return the rules that the constants name."""
    return Own(constants) if constants.rules == "own" else Paper(constants)


def adapted_accuracy(mapping: float, merit: Merit, constants: Constants, B_R: float) -> float:
    r"""Return the accuracy for a gradient error of at most half of the gradient mapping M.

    Both terms of :func:`~lightning_bilevel.core.moreau.gradient_error` are then at most M/4:

    .. math::
        \sqrt{L_{xy}^2 + 1/\rho^2}\,\sqrt{2\zeta/m} \le M/4, \qquad
        b_\phi B_R \zeta/\mu \le M/4
    """
    part = _ERROR / 2 * mapping
    envelope = constants.envelope
    lipschitz = math.hypot(constants.scaled_L_xy, 1 / envelope.rho)
    from_distance = envelope.modulus / 2 * (part / lipschitz) ** 2
    from_slope = part * merit.mu / (merit.phi.b * B_R) if B_R > 0.0 else math.inf
    return min(from_distance, from_slope)


def _mapping(here: Point, direction: Tensor, feasible: ConvexSet, scale: float) -> float:
    """Return the norm of the gradient mapping of a step against the direction, in place."""
    moved = direction.mul_(scale)
    projected = feasible.project(torch.sub(here.w, moved, out=moved))
    return math.sqrt(squared_distance(projected, here.w)) / scale
