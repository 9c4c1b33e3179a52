r"""The adaptive rules: constants are estimated, and follow the run.

L is not doubled but set to the curvature that the rejected trial saw. Trials are compared with an
average of earlier merits. The inverse penalty follows the multiplier. The accuracy is half of what
a step promises. The unit of x gets shorter where x limits the step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.moreau import gradient_error
from lightning_bilevel.solvers.ivsp.linesearch import Secant
from lightning_bilevel.solvers.ivsp.penalty import matching_factor, must_update
from lightning_bilevel.solvers.ivsp.point import LowerBound, Point, rounding
from lightning_bilevel.solvers.ivsp.rules import (
    PATIENCE,
    Exceeds,
    Refined,
    Rules,
    prox_error,
)
from lightning_bilevel.solvers.ivsp.state import State
from lightning_bilevel.solvers.record import evolve

# An update of the penalty multiplies the inverse penalty by this.
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
# what a change would make of it, and until the penalty has been changed this often. A penalty that
# is too strong shows sooner: the constraint holds by then.
_SOLVED = 0.05
_HOLDS = 0.5
_MATCHES = 200
# How much the reference of the line search remembers of earlier merits.
_MEMORY = 0.85
# The error of a gradient is at most this share of the gradient mapping; one above the whole of it
# is computed again.
_ERROR = 0.5
# The unit of x may get shorter after every so many iterations, and this often in a run.
_EVERY = 10
_MOST = 10


class AdaptiveRules(Rules):
    """The rules for constants that IVSP has estimated."""

    @property
    def conditioned(self) -> bool:
        """Whether rho was estimated such that the inner loop converges fast."""
        return {"rho", "L_yy"} <= set(self.state.estimated)

    @property
    def patience(self) -> float:
        return math.inf if self.conditioned else PATIENCE  # a low cap makes failures cheap

    def refine(self, here: Point) -> Refined:
        """Evaluate R again if the gradient's error may be larger than the mapping."""
        merit, scale = self.merit, float(self.merit.mu / self.state.L_start)
        B_R = self._gradient_bound(here, self.state.B_R)
        mapping = self._mapping(here, merit.direction(here), scale)
        needed = self.accuracy(mapping, here, B_R)
        if mapping >= prox_error(self, here.zeta, B_R) or needed >= here.zeta:
            return Refined(here, B_R, needed)
        here = self.evaluate.refined(here, needed)
        B_R = self._gradient_bound(here, B_R)
        mapping = self._mapping(here, merit.direction(here), scale)
        return Refined(here, B_R, self.accuracy(mapping, here, B_R))

    def trial(self, here: Point, w: Tensor, zeta: float, exceeds: Exceeds) -> Point | LowerBound:
        """Evaluate a trial from z, moved as far as y moves; reject it early by its values."""
        c, evaluate = self.constants, self.evaluate
        cap = min(c.max_inner, _MAX_INNER) if self.conditioned else c.max_inner
        here.at_z.release()  # no trial starts from z itself
        start = evaluate.problem.lower_set.project(here.z + (w[here.split :] - here.y))
        # Further residuals are not among the values, and a fixed L takes all.
        if c.fixed_L is not None or len(here.residuals) > 1:
            return evaluate.at(w, start, zeta, cap)
        return evaluate.evaluate_or_reject(w, start, zeta, cap, exceeds)

    def slack(self, here: Point, there: Point | LowerBound) -> float:
        """Return the rounding error: each value is exact up to some roundings of its terms."""
        return _FLOOR * rounding(here, there, self.merit.gamma)

    def L_in_allowance(self, L: float) -> float:
        r"""Return the curvature by which the allowance is computed: at least L_init.

        The allowance :math:`\mu E^2/(2\vartheta)` grows as L falls. In float32 the error E cannot
        be made smaller than rounding allows. Where the gradient mapping is smaller than that, an
        allowance by the L of a long Barzilai-Borwein step would accept any step. The lemma needs
        the allowance only where L is as large as the curvature of the merit.
        """
        return max(L, self.constants.L_init)

    def next_L(self, L: float, seen: Callable[[], float]) -> float:
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

    def next_penalty(self, there: Point, step: float, L: float) -> float:
        r"""Return the inverse penalty of the next iteration.

        The paper's test halves it. Besides, it follows the multiplier
        (:func:`~lightning_bilevel.solvers.ivsp.penalty.matching_factor`), also upwards: a penalty
        may turn out too strong. It does so as soon as the smoothed problem is solved well enough:
        the gradient mapping of the merit is at most a twentieth of what the change of
        :math:`\gamma` makes of the mapping of :math:`\gamma f`, and at most half of it where
        :math:`\gamma` grows towards :math:`\gamma_0` again. (It may be above :math:`\gamma_0`, but
        where a constraint hardly binds it would grow without end.) That happens in the first
        iterations of a run only; from then on the grid falls by halves, as the theorem wants it.
        """
        merit, gamma = self.merit, self.merit.gamma
        if must_update(there, step, merit, self.constants.c2):
            return max(_RATIO * gamma, sys.float_info.min)
        factor = matching_factor(merit.phi.slope(there.worst, merit.mu))
        if factor == 1.0 or self.state.gamma_changes >= _MATCHES:
            return gamma
        scale = float(merit.mu / L)
        left = self._mapping(there, merit.direction(there), scale)
        of_f = self._mapping(there, gamma * there.grad_f, scale)
        returns = 1.0 < factor <= self.constants.gamma0 / gamma
        share = _HOLDS if returns else _SOLVED
        return factor * gamma if left < share * (abs(1 - factor) * of_f) else gamma

    def starts_long(self, trials: int) -> bool:
        """If ``bb`` is None, it does as long as the first trial is accepted."""
        return self.constants.bb == "long" or (self.constants.bb is None and trials == 1)

    def _gradient_bound(self, here: Point, seen: float) -> float:
        """Return the user's B_R, or the largest norm of the gradient so far plus its error."""
        c, s = self.constants, self.state
        if c.B_R is not None:
            return c.B_R
        error = gradient_error(here.zeta, 1.0, c.envelope, L_xy=s.scaled_L_xy, b=0.0, B_R=0.0)
        return max(seen, s.metric.dual_norm(here.grad_R) + error)

    def accuracy(self, mapping: float, here: Point, B_R: float) -> float:
        r"""Return the accuracy for a gradient error of at most half of the gradient mapping M.

        Both terms of :func:`~lightning_bilevel.core.moreau.gradient_error` are then at most M/4:

        .. math::
            \sqrt{L_{xy}^2 + 1/\rho^2}\,\sqrt{2\zeta/m} \le M/4, \qquad
            b_\phi B_R \zeta/\mu \le M/4

        The rounding of g is a lower bound.
        """
        part = _ERROR / 2 * mapping
        envelope, merit = self.constants.envelope, self.merit
        lipschitz = math.hypot(self.state.scaled_L_xy, 1 / envelope.rho)
        from_distance = envelope.modulus / 2 * (part / lipschitz) ** 2
        from_slope = part * merit.mu / (merit.phi.b * B_R) if B_R > 0.0 else math.inf
        least = _FLOOR * torch.finfo(here.w.dtype).eps * abs(here.lower)
        return max(min(from_distance, from_slope), least)

    def _mapping(self, here: Point, direction: Tensor, scale: float) -> float:
        """Return the norm of the gradient mapping of a step against the direction, in place."""
        metric = self.state.metric
        moved = metric.scaled(direction.mul_(scale), 2)
        projected = self.feasible.project(torch.sub(here.w, moved, out=moved))
        return metric.distance(projected, here.w) / scale


def zhang_hager(fall: float, weight: float) -> tuple[float, float]:
    r"""Return how far the line search's reference is above the new merit, and the new weight.

    The reference is an average C of the merits m so far (Zhang and Hager's):

    .. math::
        C_{k+1} = \frac{\eta Q_k C_k + m_{k+1}}{Q_{k+1}}, \qquad Q_{k+1} = \eta Q_k + 1

    with :math:`\eta` = 0.85. A trial may be above the current merit, but not above C.
    Barzilai-Borwein steps need that: most of what they gain, they gain by steps that are not
    monotone. Where a step passes the test,
    :math:`C_{k+1} \le C_k - (1 - \eta)(\tfrac{c_1}{2\mu}\|w^{k+1} - w^k\|^2 - \tau)`, because
    :math:`Q \le 1/(1 - \eta)`: the sums of the theorem are those of a monotone run up to the factor
    :math:`1/(1 - \eta)`. The excess :math:`C_{k+1} - m_{k+1}` stays when the smoothing or the
    penalty changes, so C is shifted as the merit is.

    Args:
        fall: :math:`C_k - m_{k+1}`.
        weight: :math:`Q_k`, 1 at the start.
    """
    before = _MEMORY * weight
    return max(before / (before + 1) * fall, 0.0), before + 1


def follow(new: State, fall: float, change: Secant | None, refined: Refined, zeta: float) -> State:
    """Return the state after an iteration with what the adaptive rules keep of it.

    Args:
        new: The state after the iteration.
        fall: How far the merit fell below the reference of the line search.
        change: The change along the step; None with a fixed L.
        refined: The point that the iteration started from.
        zeta: The accuracy of the new point.
    """
    excess, weight = zhang_hager(fall, new.weight)
    ratio = None if change is None else change.log2_curvature_ratio
    return evolve(
        new,
        excess=excess,
        weight=weight,
        zeta=zeta,
        B_R=refined.B_R if new.constants.B_R is None else new.B_R,
        stiffness=new.stiffness + (0.0 if ratio is None else ratio / _EVERY),
    )


def shortened(s: State) -> State:
    r"""Return the state with a shorter unit of x, if x limits the steps.

    One step length serves both levels. The unit of x, estimated by the gradients at the start, may
    be too long: the merit is then far more curved in x than in y, x limits the step, and y crawls.
    Each step shows both curvatures. With the mean s of their logarithmic ratio over ten steps, to
    which a step that shows none adds 0, the unit is multiplied by :math:`2^{-s/4}`, rounded to a
    power of two: half of the way to equal curvatures, as at the start. It is never made longer
    again, and there are at most ten changes in a run, so the theorem holds from the last one on.
    """
    if s.k % _EVERY or s.stiffness == 0.0:
        return s
    factor = shortening(s.stiffness)
    s = evolve(s, stiffness=0.0)
    if factor == 1.0 or s.shortened == _MOST:
        return s
    # The theorem counts from here, and the point is evaluated again.
    return evolve(
        s,
        units=(factor * s.units[0], s.units[1]),
        own_unit=factor * s.own_unit,
        shortened=s.shortened + 1,
        theorem=s.theorem.restart(s.k),
        point=None,
        resumed=False,
    )


def corrected(s: State, factor: int) -> State:
    """Return the state with an L_yy that the inner loop found too small by a factor."""
    more: dict[str, Any] = s.constants.more_curved(factor, s.estimated)
    # R has another rho now, so the point is evaluated again.
    return evolve(s, constants=replace(s.constants, **more), halvings=0, point=None)


def shortening(stiffness: float) -> float:
    r"""Return the factor of the unit: :math:`2^{-s/4}` rounded to a power of two, at most 1.

    Example:
        >>> [shortening(s) for s in (-8.0, 1.9, 2.1, 8.0)]
        [1.0, 1.0, 0.5, 0.25]
    """
    return 2.0 ** -max(round(stiffness / 4), 0)
