"""One line search of IVSP: its trials, and their Armijo test."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bilevel.core.errors import (
    BilevelError,
    InnerLoopError,
    LineSearchError,
    NonFiniteError,
)
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import dot, norm, squared_distance
from lightning_bilevel.solvers.ivsp.constants import Constants
from lightning_bilevel.solvers.ivsp.linesearch import allowance
from lightning_bilevel.solvers.ivsp.merit import Merit, rounding
from lightning_bilevel.solvers.ivsp.point import Evaluator, Glimpse, Point
from lightning_bilevel.solvers.ivsp.rules import Paper

__all__ = [
    "Armijo",
    "Trial",
    "backtrack",
    "check_trials",
    "warn_of_ascent",
    "warn_of_curvature",
    "warn_of_stall",
]

# Trials of one line search whose inner loop may fail before the search gives up.
_MAX_FAILURES = 5


@dataclass(frozen=True)
class Trial:
    r"""A trial of the line search.

    Attributes:
        accepted: Whether it passed the test.
        merit: Its merit; a lower bound of it if the values alone rejected it.
        bound: What the merit had to be at most.
        step: :math:`\|w_L - w\|`.
        point: None if it could not be evaluated, or was rejected by its values alone.
        retry: The curvature of the next trial if this one is rejected.
    """

    accepted: bool
    merit: float
    bound: float
    step: float
    point: Point | None
    retry: float

    def __str__(self) -> str:
        return (
            f"the last trial has merit {self.merit:.9g}, to be at most {self.bound:.9g}, after a "
            f"step of {self.step:.3g}."
        )


class Armijo:
    r"""The trials from a point, with the Armijo test.

    The trial with curvature L goes to

    .. math:: w_L = P_C(w - \tfrac{\mu}{L} [\gamma \nabla f + \phi'_\mu(\tilde R) \tilde\nabla R])

    and is accepted if

    .. math::
        \gamma f(w_L) + \phi_\mu(\tilde R_L + \zeta_{k+1}) \le \gamma f(w) + \phi_\mu(\tilde R)
          + e - \tfrac{c_1}{2\mu} \|w_L - w\|^2 + \tau_L

    The paper has e = 0. IVSP's own rules have the excess of an average of earlier merits
    (:func:`~lightning_bilevel.solvers.ivsp.linesearch.next_excess`).

    Args:
        evaluate: The evaluation of points.
        here: The current point.
        merit: The merit function.
        feasible: C.
        constants: The constants of the run.
        rules: The rules of the run.
        error: The bound on the error of the gradient here.
        zeta: The accuracy of trial points.
        excess: e.

    Attributes:
        start: The merit of the current point.
        failures: The errors of the trials that could not be evaluated.
    """

    def __init__(
        self,
        evaluate: Evaluator,
        here: Point,
        merit: Merit,
        feasible: ConvexSet,
        constants: Constants,
        rules: Paper,
        error: float,
        zeta: float,
        excess: float,
    ) -> None:
        self.evaluate = evaluate
        self.here = here
        self.merit = merit
        self.feasible = feasible
        self.constants = constants
        self.rules = rules
        self.error = error
        self.zeta = zeta
        self.excess = excess
        self.start = merit.value(here)
        self.failures: list[BilevelError] = []

    def __call__(self, L: float) -> Trial:
        """Make the trial with curvature L."""
        here = self.here
        merit = self.merit
        moved = merit.direction(here).mul_(merit.mu / L)
        w = self.feasible.project(torch.sub(here.w, moved, out=moved))
        del moved
        d = _distance(w, here.w, here.split)

        def seen() -> float:
            """Return the curvature of the merit on the way to the trial."""
            if d == 0.0:
                return math.inf
            promise = _dot(merit.direction(here), w - here.w, here.split)
            return 2 * merit.mu * (value - self.start - promise) / d**2

        value = math.inf
        try:
            there = self._evaluate(w, L, d)
        except (NonFiniteError, InnerLoopError) as error:
            self._note(error)
            return Trial(False, value, self.start, d, None, self.rules.retry(L, seen))
        bound = self._bound(there, L, d)
        if isinstance(there, Glimpse):
            value = merit.value(there)
            accepted = False
        else:
            value = merit.value(there, self.zeta)
            accepted = self.constants.fixed_L is not None or value <= bound
        point = None if isinstance(there, Glimpse) else there
        retry = L if accepted else self.rules.retry(L, seen)
        return Trial(accepted, value, bound, d, point, retry)

    def _evaluate(self, w: Tensor, L: float, d: float) -> Point | Glimpse:
        """Evaluate a trial, to the end if its values leave hope."""
        here = self.here
        start = self.rules.inner_start(self.evaluate, here, w)
        # Further residuals are not among the values, and a fixed L takes all.
        whole = self.constants.fixed_L is not None or len(here.residuals) > 1
        if whole or not self.rules.rejects_early:
            return self.evaluate.at(w, start, self.zeta, self.rules.trial_cap)

        def hopeless(glimpse: Glimpse) -> bool:
            # The margin is for the rounding of both merits.
            margin = 10 * rounding(here, glimpse, self.merit.gamma)
            return self.merit.value(glimpse) > self._bound(glimpse, L, d) + margin

        return self.evaluate.promising(w, start, self.zeta, self.rules.trial_cap, hopeless)

    def _bound(self, there: Point | Glimpse, L: float, d: float) -> float:
        """Return what the merit of a trial must be at most."""
        c = self.constants
        mu = self.merit.mu
        L = self.rules.allowed_at(L)
        tau = allowance(d, L, mu, self.error, theta_low=c.theta_low, theta_hat=c.theta_hat)
        tau = tau + self.here.zeta + self.zeta
        slack = self.rules.slack(self.here, there, self.merit.gamma)
        return self.start + self.excess - c.c1 / (2 * mu) * d**2 + tau + slack

    def _note(self, error: BilevelError) -> None:
        """Note a failed trial. A shorter step may succeed; raise the error if that is hopeless."""
        if not self.failures and isinstance(error, InnerLoopError):
            # Checked at the first failure: if f or g changes between calls, all trials would fail.
            self.evaluate.problem.check_unchanged(*self.here.levels, self.here.f, self.here.lower)
        self.failures.append(error)
        failed = sum(isinstance(failure, InnerLoopError) for failure in self.failures)
        too_many = self.rules.gives_up_early and failed > _MAX_FAILURES
        if self.constants.fixed_L is not None or too_many:
            raise error


def _distance(a: Tensor, b: Tensor, split: int) -> float:
    """Return the distance of two points; each level is summed on its own.

    x may be one number and y a million.
    """
    return math.sqrt(
        squared_distance(a[:split], b[:split]) + squared_distance(a[split:], b[split:])
    )


def _dot(a: Tensor, b: Tensor, split: int) -> float:
    return dot(a[:split], b[:split]) + dot(a[split:], b[split:])


def backtrack(
    trial: Callable[[float], Trial], curvature: float, max_trials: int
) -> tuple[Trial, float, int]:
    """Make trials, each with the curvature that the one before asks for, until one is accepted.

    Returns:
        The accepted trial, its curvature, and how many trials were made.
    """
    for count in range(1, max_trials + 1):
        result = trial(curvature)
        if result.accepted:
            return result, curvature, count
        last = curvature
        curvature = result.retry
    raise LineSearchError(
        f"the line search made {max_trials} trials, up to L = {last:.3g}, and accepted "
        f"none: {result}"
    )


def check_trials(failures: Sequence[BilevelError], trials: int) -> None:
    """Raise the last failure if none of the trials could be evaluated.

    It says more than that the trials were rejected.
    """
    if failures and len(failures) >= trials:
        last = failures[-1]
        raise type(last)(
            f"in each of {trials} trials of the line search, in the last: {last}"
        ) from last


def warn_of_ascent(fixed_L: float, safe: float, iteration: int, merit: float, bound: float) -> None:
    """Warn of a step with a fixed L that fails the test of the line search.

    Args:
        fixed_L: The L.
        safe: What L_safe is at least.
        iteration: The number of the iteration.
        merit: The merit of the new point.
        bound: What the test asks it to be at most.
    """
    warnings.warn(
        f"`IVSP(fixed_L={fixed_L!r})` is too small: in outer iteration {iteration} the merit "
        f"became {merit:.9g}, where a line search asks for at most {bound:.9g}. Descent is proved "
        f"only above L_safe, which is {safe:.3g} or more here: make fixed_L larger, or leave it "
        "out for the line search.",
        stacklevel=4,
    )


def warn_of_curvature(L_yy: float, factor: int) -> None:
    """Warn of an L_yy with which the inner loop diverged; its step was divided by the factor."""
    warnings.warn(
        f"The inner loop diverged with its step 1/(L_yy + 1/rho), L_yy={L_yy:g}: the lower level "
        f"is more curved than that. The step was divided by {factor} and will be divided further "
        "if need be, without a word.",
        stacklevel=3,
    )


def warn_of_stall(
    iteration: int, trials: int, merit: float, w: Tensor, direction: Tensor, feasible: ConvexSet
) -> bool:
    """Warn of a step of length zero at a point that is not stationary.

    Returns:
        Whether it warned.
    """
    measure = norm(feasible.project(w - direction) - w)
    stalled = measure > math.sqrt(torch.finfo(w.dtype).eps) * (1 + norm(w))
    if stalled:
        warnings.warn(
            f"IVSP does not move any more: in outer iteration {iteration} the line search accepted "
            f"a step of length 0 after {trials} trials, where the gradient mapping is "
            f"{measure:.3g}. The merit is {merit:.3g}, of which {w.dtype} resolves "
            f"{torch.finfo(w.dtype).eps * abs(merit):.1g}: scale f and g down, use float64, or "
            "make mu0 larger.",
            stacklevel=4,
        )
    return stalled
