r"""The backtracking search of Algorithm 1 (line 4), its tests, and its start."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bilevel.core.errors import (
    BilevelError,
    InnerLoopError,
    LineSearchError,
    NonFiniteError,
)
from lightning_bilevel.core.vectors import Metric, squared_distance
from lightning_bilevel.solvers.ivsp.constants import IVSPConstants
from lightning_bilevel.solvers.ivsp.point import LowerBound, Merit, Point, rounding
from lightning_bilevel.solvers.ivsp.rules import Rules


@dataclass(frozen=True)
class Trial:
    r"""A trial of the line search.

    Attributes:
        accepted: Whether it passed the test.
        merit: Its merit; a lower bound of it if the values alone rejected it.
        bound: What the merit had to be at most.
        step: :math:`\|w_L - w\|`.
        point: None if it was rejected or could not be evaluated.
        next_L: The curvature of the next trial if this one is rejected.
    """

    accepted: bool
    merit: float
    bound: float
    step: float
    point: Point | None
    next_L: float

    def __str__(self) -> str:
        return (
            f"the last trial has merit {self.merit:.9g}, to be at most {self.bound:.9g}, after a "
            f"step of {self.step:.3g}."
        )


class Search:
    r"""The trials from a point, with the Armijo test.

    The trial with curvature L goes to

    .. math:: w_L = P_C(w - \tfrac{\mu}{L} [\gamma \nabla f + \phi'_\mu(\tilde R) \tilde\nabla R])

    and is accepted if

    .. math::
        \gamma f(w_L) + \phi_\mu(\tilde R_L + \zeta_{k+1}) \le \gamma f(w) + \phi_\mu(\tilde R)
          + e - \tfrac{c_1}{2\mu} \|w_L - w\|^2 + \tau_L

    The paper has e = 0. The adaptive rules have the excess of an average of earlier merits
    (:func:`~lightning_bilevel.solvers.ivsp.adaptive.zhang_hager`).

    Args:
        rules: The rules of the run, with what they know of the iteration.
        here: The current point.
        error: The bound on the error of the gradient here.
        zeta: The accuracy of trial points.

    Attributes:
        start: The merit of the current point.
        failures: The errors of the trials that could not be evaluated.
    """

    def __init__(self, rules: Rules, here: Point, error: float, zeta: float) -> None:
        self.rules = rules
        self.here = here
        self.error = error
        self.zeta = zeta
        self.merit, self.metric = rules.merit, rules.state.metric
        self.start = self.merit.value(here)
        self.failures: list[BilevelError] = []

    def backtrack(self, L: float) -> tuple[Trial, float, int]:
        """Make trials, each with the curvature that the one before asks for, until one is accepted.

        Returns:
            The accepted trial, its curvature, and how many trials were made.
        """
        most = self.rules.constants.max_trials
        self.here.release()
        for count in range(1, most + 1):
            result = self.trial(L)
            if result.accepted:
                return result, L, count
            last, L = L, result.next_L
        self.check_evaluated(most)
        raise LineSearchError(
            f"the line search made {most} trials, up to L = {last:.3g}, and accepted none: {result}"
        )

    def trial(self, L: float) -> Trial:
        """Make the trial with curvature L."""
        here, merit, metric = self.here, self.merit, self.metric
        moved = metric.scaled(merit.direction(here).mul_(merit.mu / L), 2)
        w = self.rules.feasible.project(torch.sub(here.w, moved, out=moved))
        del moved
        d = step_length(w, here.w, metric)

        def seen() -> float:
            """Return the curvature of the merit on the way to the trial."""
            if d == 0.0:
                return math.inf
            promise = sum(metric.dots(merit.direction(here), w - here.w, 0))
            return 2 * merit.mu * (value - self.start - promise) / d**2

        value = math.inf
        try:
            there = self.rules.trial(here, w, self.zeta, lambda low: self._exceeds(low, L, d))
        except (NonFiniteError, InnerLoopError) as error:
            self._note(error)
            return Trial(False, value, self.start, d, None, self.rules.next_L(L, seen))
        bound = self._bound(there, L, d)
        if isinstance(there, LowerBound):
            value = merit.value(there)
            return Trial(False, value, bound, d, None, self.rules.next_L(L, seen))
        value = merit.value(there, self.zeta)
        accepted = self.rules.constants.fixed_L is not None or value <= bound
        if not accepted:
            # The next trial needs the memory of this point.
            return Trial(False, value, bound, d, None, self.rules.next_L(L, seen))
        return Trial(True, value, bound, d, there, L)

    def check_evaluated(self, trials: int) -> None:
        """Raise the last failure if none of the trials could be evaluated.

        It says more than that the trials were rejected.
        """
        if self.failures and len(self.failures) >= trials:
            last = self.failures[-1]
            raise type(last)(
                f"in each of {trials} trials of the line search, in the last: {last}"
            ) from last

    def _exceeds(self, there: LowerBound, L: float, d: float) -> bool:
        # The margin is for the rounding of both merits.
        margin = 10 * rounding(self.here, there, self.merit.gamma)
        return self.merit.value(there) > self._bound(there, L, d) + margin

    def _bound(self, there: Point | LowerBound, L: float, d: float) -> float:
        """Return what the merit of a trial must be at most."""
        c = self.rules.constants
        mu = self.merit.mu
        tau = allowance(d, self.rules.L_in_allowance(L), mu, self.error, c)
        tau = tau + self.here.zeta + self.zeta
        slack = self.rules.slack(self.here, there)
        return self.start + self.rules.state.excess - c.c1 / (2 * mu) * d**2 + tau + slack

    def _note(self, error: BilevelError) -> None:
        """Note a failed trial. A shorter step may succeed; raise the error if that is hopeless."""
        here = self.here
        if not self.failures and isinstance(error, InnerLoopError):
            # Checked at the first failure: if f or g changes between calls, all trials would fail.
            self.rules.evaluate.problem.check_unchanged(here.x, here.y, here.f, here.lower)
        self.failures.append(error)
        failed = sum(isinstance(failure, InnerLoopError) for failure in self.failures)
        if self.rules.constants.fixed_L is not None or failed > self.rules.patience:
            raise error


def step_length(a: Tensor, b: Tensor, metric: Metric) -> float:
    """Return the distance of two points; each level is summed on its own.

    x may be one number and y a million.
    """
    x, y = slice(metric.split), slice(metric.split, None)
    return math.sqrt(
        squared_distance(a[x], b[x]) / metric.x**2 + squared_distance(a[y], b[y]) / metric.y**2
    )


def allowance(step: float, L: float, mu: float, error: float, c: IVSPConstants) -> float:
    r"""Return the allowance of the Armijo test for a gradient error of at most ``error``.

    .. math::
        \frac{\mu E^2}{2\vartheta}, \qquad
        \vartheta = \max\{\min\{\mu E / \|w_L - w\|, \hat\vartheta L\}, \underline\vartheta\}

    with an infinite ratio where the step is zero.
    """
    ratio = mu * error / step if step > 0.0 else math.inf
    theta = max(min(ratio, c.theta_hat * L), c.theta_low)
    return mu * error**2 / (2 * theta)


@dataclass(frozen=True)
class Secant:
    r"""Inner products of a step :math:`\Delta w` and of the change :math:`\Delta v` of direction.

    A pair is x's and y's.

    Attributes:
        products: :math:`\langle \Delta w, \Delta v \rangle`.
        squares: :math:`\|\Delta w\|^2`.
        dv_dv: :math:`\|\Delta v\|^2` of both levels.
    """

    products: tuple[float, float]
    squares: tuple[float, float]
    dv_dv: float

    @property
    def dw_dv(self) -> float:
        return self.products[0] + self.products[1]

    @property
    def dw_dw(self) -> float:
        return self.squares[0] + self.squares[1]

    @property
    def log2_curvature_ratio(self) -> float | None:
        r"""How much more the merit is curved in x than in y.

        .. math::
            \log_2 \frac{\langle \Delta x, \Delta v_x \rangle / \|\Delta x\|^2}
              {\langle \Delta y, \Delta v_y \rangle / \|\Delta y\|^2}

        None if one of the levels did not move, or is not convex along the step: that says nothing
        about how long the next one may be.
        """
        if 0.0 in self.squares or min(self.products) <= 0.0:
            return None
        of_x, of_y = (
            math.log2(product) - math.log2(square)
            for product, square in zip(self.products, self.squares, strict=True)
        )
        return of_x - of_y


def secant(here: Point, there: Point, now: Merit, then: Merit, metric: Metric) -> Secant:
    r"""Compare two points, each with the direction of its own merit function.

    .. math::
        \Delta v = \gamma_{k+1} (\nabla f^{k+1} - \nabla f^k)
          + \sum_i \phi'_{\mu_{k+1}} \nabla r_i^{k+1} - \phi'_{\mu_k} \nabla r_i^k
    """
    dv = torch.sub(there.grad_f, here.grad_f).mul_(then.gamma)
    dv.add_(then.weight(there) * there.grad_R).sub_(now.weight(here) * here.grad_R)
    for merit, point, sign in ((then, there, 1.0), (now, here, -1.0)):
        for residual, gradient in zip(point.residuals[1:], point.gradients[1:], strict=True):
            dv.add_(gradient, alpha=sign * merit.phi.slope(residual, merit.mu))
    dw = there.w - here.w
    return Secant(
        products=metric.dots(dw, dv, 0),
        squares=metric.dots(dw, dw, -2),
        dv_dv=sum(metric.dots(dv, dv, 2)),
    )


def barzilai_borwein(
    change: Secant, mu: float, previous_start: float, c: IVSPConstants, long: bool
) -> float:
    r"""Return the first curvature of the next line search.

    .. math::
        L^{\text{short}} = \mu \|\Delta v\|^2 / |\langle \Delta w, \Delta v \rangle|, \qquad
        L^{\text{long}} = \mu |\langle \Delta w, \Delta v \rangle| / \|\Delta w\|^2

    The guess is safe if :math:`|\langle \Delta w, \Delta v \rangle| > 10^{-24}` and L_min <= L <=
    L_max. Otherwise half the previous start replaces it, clipped to [L_min, L_max]. The names are
    those of the steps :math:`\mu/L`; the short one gives stiff directions more weight.
    """
    product = abs(change.dw_dv)
    if product > 1e-24:
        guess = mu * product / change.dw_dw if long else mu * change.dv_dv / product
        if c.L_min <= guess <= c.L_max:
            return guess
    return min(c.L_max, max(c.L_min, previous_start / 2))
