r"""What Algorithm 1 leaves to a set of rules, and the paper's set.

The paper's rules need all constants of a task. The adaptive ones
(:mod:`lightning_bilevel.solvers.ivsp.adaptive`) estimate them. Both keep the conditions of the
theorem: a grid of inverse penalties that falls to 0 by bounded factors, accuracies that never
exceed the schedule, and a line search that allows for the error of the evaluations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_bilevel.core.moreau import gradient_error
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.ivsp.penalty import inverse_penalty, needs_update
from lightning_bilevel.solvers.ivsp.point import Evaluator, LowerBound, Merit, Point, rounding
from lightning_bilevel.solvers.ivsp.state import State

__all__ = ["PATIENCE", "Accepted", "PaperRules", "Refined", "Rules", "must_update", "prox_error"]

# Trials of one line search whose inner loop may fail before the search gives up.
PATIENCE = 5


class Refined(NamedTuple):
    """The current point as accurate as its step needs it.

    Attributes:
        point: The point.
        B_R: The bound on the norm of the gradient of R.
        zeta: The accuracy that trial points need beyond the schedule; inf for none.
    """

    point: Point
    B_R: float
    zeta: float


class Accepted(NamedTuple):
    """What a line search has led to.

    Attributes:
        there: The accepted point.
        merit: The merit function that accepted it.
        step: The length of the step.
        L: The accepted curvature.
        feasible: C.
    """

    there: Point
    merit: Merit
    step: float
    L: float
    feasible: ConvexSet


class Rules(Protocol):
    """What Algorithm 1 leaves open, for one iteration from a state."""

    # Trials whose inner loop may fail before a line search gives up.
    patience: float

    def refine(
        self, evaluate: Evaluator, here: Point, merit: Merit, feasible: ConvexSet
    ) -> Refined:
        """Evaluate the current point more accurately if its step needs that."""

    def evaluate(
        self,
        evaluate: Evaluator,
        here: Point,
        w: Tensor,
        zeta: float,
        exceeds_bound: Callable[[LowerBound], bool],
    ) -> Point | LowerBound:
        """Evaluate a trial point, from a warm start."""

    def slack(self, here: Point, there: Point | LowerBound, gamma: float) -> float:
        """Return the rounding error that the Armijo test allows for."""

    def allowed_at(self, L: float) -> float:
        """Return the curvature by which the allowance of a trial with L is computed."""

    def retry(self, L: float, seen: Callable[[], float]) -> float:
        """Return the curvature after L was rejected.

        Args:
            L: The rejected curvature.
            seen: Returns the curvature of the merit that the trial saw; inf if it could not be
                evaluated.
        """

    def next_penalty(self, done: Accepted) -> float:
        """Return the inverse penalty of the next iteration."""

    def starts_long(self, trials: int) -> bool:
        """Tell whether the next line search starts from the long Barzilai-Borwein step."""


class PaperRules:
    """The rules of the paper's Algorithm 1; the user sets all constants per task."""

    patience = float(PATIENCE)  # each failure costs max_inner gradients

    def __init__(self, state: State) -> None:
        self.state = state
        self.constants = state.constants

    def refine(
        self, evaluate: Evaluator, here: Point, merit: Merit, feasible: ConvexSet
    ) -> Refined:
        return Refined(here, self.constants.B_R, float("inf"))

    def evaluate(
        self,
        evaluate: Evaluator,
        here: Point,
        w: Tensor,
        zeta: float,
        exceeds_bound: Callable[[LowerBound], bool],
    ) -> Point | LowerBound:
        """Evaluate every trial to the end, from the current z."""
        return evaluate.at(w, here.at_z, zeta)

    def slack(self, here: Point, there: Point | LowerBound, gamma: float) -> float:
        """Return the paper's 1e-12.

        The paper names no dtype. In float32 we add the rounding error of the compared values, which
        is ours: it is larger than 1e-12, and without it a step could be rejected for its rounding
        alone.
        """
        if here.w.dtype == torch.float64:
            return 1e-12
        return 1e-12 + rounding(here, there, gamma)

    def allowed_at(self, L: float) -> float:
        return L

    def retry(self, L: float, seen: Callable[[], float]) -> float:
        return 2 * L

    def next_penalty(self, done: Accepted) -> float:
        r"""Return the next :math:`\hat\gamma_t = \gamma_0 (t + 1)^{-1/2}` if the test asks for it."""
        if must_update(self.state, done):
            return inverse_penalty(self.state.t + 1, self.constants.gamma0)
        return done.merit.gamma

    def starts_long(self, trials: int) -> bool:
        return self.constants.bb == "long"


def must_update(state: State, done: Accepted) -> bool:
    """Tell whether the paper's test strengthens the penalty."""
    merit, c2 = done.merit, state.constants.c2
    return needs_update(
        done.there.worst, done.step, mu=merit.mu, gamma=merit.gamma, a=merit.phi.a, c2=c2
    )


def prox_error(state: State, zeta: float, merit: Merit, B_R: float) -> float:
    r"""Bound the error of the gradient of :math:`\phi_\mu(R)` at the accuracy zeta."""
    c = state.constants
    return gradient_error(
        zeta, merit.mu, c.envelope, L_xy=state.scaled_L_xy, b=merit.phi.b, B_R=B_R
    )
