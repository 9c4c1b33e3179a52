r"""What Algorithm 1 leaves to a set of rules, and the paper's set.

The paper's rules need all constants of a task. The adaptive ones
(:mod:`lightning_bilevel.solvers.ivsp.adaptive`) estimate them. Both keep the conditions of the
theorem: a grid of inverse penalties that falls to 0 by bounded factors, accuracies that never
exceed the schedule, and a line search that allows for the error of the evaluations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.moreau import gradient_error
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.ivsp.constants import IVSPConstants
from lightning_bilevel.solvers.ivsp.penalty import inverse_penalty, must_update
from lightning_bilevel.solvers.ivsp.point import Evaluator, LowerBound, Merit, Point, rounding
from lightning_bilevel.solvers.ivsp.state import State

# Trials of one line search whose inner loop may fail before the search gives up.
PATIENCE = 5

# Tells whether a lower bound of the merit suffices to reject a trial.
Exceeds = Callable[[LowerBound], bool]


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


@dataclass(frozen=True)
class Rules(ABC):
    """What Algorithm 1 leaves open, for iteration k.

    Attributes:
        state: The state before it.
        evaluate: The evaluation of points.
        merit: The smoothed penalty function, with mu_k and gamma_k.
        feasible: C.
    """

    state: State
    evaluate: Evaluator
    merit: Merit
    feasible: ConvexSet

    @property
    def constants(self) -> IVSPConstants:
        return self.state.constants

    @property
    @abstractmethod
    def patience(self) -> float:
        """Trials whose inner loop may fail before a line search gives up."""

    @abstractmethod
    def refine(self, here: Point) -> Refined:
        """Evaluate the current point more accurately if its step needs that."""

    @abstractmethod
    def trial(self, here: Point, w: Tensor, zeta: float, exceeds: Exceeds) -> Point | LowerBound:
        """Evaluate a trial point, from a warm start."""

    @abstractmethod
    def slack(self, here: Point, there: Point | LowerBound) -> float:
        """Return the rounding error that the Armijo test allows for."""

    @abstractmethod
    def L_in_allowance(self, L: float) -> float:
        """Return the curvature by which the allowance of a trial with L is computed."""

    @abstractmethod
    def next_L(self, L: float, seen: Callable[[], float]) -> float:
        """Return the curvature after L was rejected.

        Args:
            L: The rejected curvature.
            seen: Returns the curvature of the merit that the trial saw; inf if it could not be
                evaluated.
        """

    @abstractmethod
    def next_penalty(self, there: Point, step: float, L: float) -> float:
        """Return the inverse penalty of the next iteration, after a step with curvature L."""

    @abstractmethod
    def starts_long(self, trials: int) -> bool:
        """Tell whether the next line search starts from the long Barzilai-Borwein step."""


class PaperRules(Rules):
    """The rules of the paper's Algorithm 1; the user sets all constants per task."""

    @property
    def patience(self) -> float:
        return PATIENCE  # each failure costs max_inner gradients

    def refine(self, here: Point) -> Refined:
        return Refined(here, self.constants.B_R, math.inf)

    def trial(self, here: Point, w: Tensor, zeta: float, exceeds: Exceeds) -> Point | LowerBound:
        """Evaluate every trial to the end, from the current z."""
        return self.evaluate.at(w, here.at_z, zeta)

    def slack(self, here: Point, there: Point | LowerBound) -> float:
        """Return the paper's 1e-12.

        The paper names no dtype. In float32 we add the rounding error of the compared values, which
        is ours: it is larger than 1e-12, and without it a step could be rejected for its rounding
        alone.
        """
        if here.w.dtype == torch.float64:
            return 1e-12
        return 1e-12 + rounding(here, there, self.merit.gamma)

    def L_in_allowance(self, L: float) -> float:
        return L

    def next_L(self, L: float, seen: Callable[[], float]) -> float:
        return 2 * L

    def next_penalty(self, there: Point, step: float, L: float) -> float:
        r"""Return the next :math:`\gamma_0 (t + 1)^{-1/2}` if the test asks for it."""
        if must_update(there, step, self.merit, self.constants.c2):
            return inverse_penalty(self.state.t + 1, self.constants.gamma0)
        return self.merit.gamma

    def starts_long(self, trials: int) -> bool:
        return self.constants.bb == "long"


def prox_error(now: Rules, zeta: float, B_R: float) -> float:
    r"""Bound the error of the gradient of :math:`\phi_\mu(R)` at the accuracy zeta."""
    c, merit, L_xy = now.constants, now.merit, now.state.scaled_L_xy
    return gradient_error(zeta, merit.mu, c.envelope, L_xy=L_xy, b=merit.phi.b, B_R=B_R)
