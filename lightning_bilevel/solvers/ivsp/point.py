"""A point of IVSP, and its evaluation: f with its gradient, and the Moreau gap R up to an accuracy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.moreau import evaluate_gap
from lightning_bilevel.core.problem import BilevelProblem, Upper
from lightning_bilevel.core.prox import inexact_prox
from lightning_bilevel.solvers.ivsp.constants import Constants

__all__ = ["Evaluator", "Point"]


@dataclass(frozen=True)
class Point:
    r"""All that is known at w = (x, y).

    Attributes:
        w: The point.
        split: How long x is.
        f: f(w).
        grad_f: Its gradient.
        z: The approximate proximal point.
        zeta: Its accuracy.
        lower: g(w).
        residual: :math:`\tilde R(w)`.
        grad_R: Its gradient.
        halvings: How often the step of the inner loop was halved on the way.
    """

    w: Tensor
    split: int
    f: float
    grad_f: Tensor
    z: Tensor
    zeta: float
    lower: float
    residual: float
    grad_R: Tensor
    halvings: int

    @property
    def levels(self) -> tuple[Tensor, Tensor]:
        """X and y."""
        return self.w[: self.split], self.w[self.split :]


class Evaluator:
    """Evaluates points of one problem.

    Args:
        problem: f and g.
        constants: The constants of the run.
        split: How long x is.
        halvings: How often the step of the inner loop has been halved so far.
    """

    def __init__(
        self, problem: BilevelProblem, constants: Constants, split: int, halvings: int
    ) -> None:
        self.problem, self.constants, self.split, self.halvings = (
            problem,
            constants,
            split,
            halvings,
        )

    def at(self, w: Tensor, z: Tensor, zeta: float, max_inner: int | None = None) -> Point:
        """Evaluate f and, up to zeta, R at w, from the warm start z."""
        lower, y = self.problem.at(w[: self.split]), w[self.split :]
        z, halvings = self._prox(lower, y, z, zeta, max_inner)
        return self._measure(lower, w, z, zeta, halvings)

    def sharper(self, point: Point, zeta: float) -> Point:
        """Evaluate R again, more accurately."""
        x, y = point.levels
        lower = self.problem.at(x)
        z, halvings = self._prox(lower, y, point.z, zeta)
        gap = evaluate_gap(lower, y, z, self.constants.envelope)
        grad_R = torch.cat([gap.grad_x, gap.grad_y])
        return replace(
            point,
            z=z,
            zeta=zeta,
            lower=gap.lower,
            residual=gap.residual,
            grad_R=grad_R,
            halvings=halvings,
        )

    def again(
        self, w: Tensor, z: Tensor, zeta: float, f: float, residual: float
    ) -> tuple[Point, bool]:
        """Evaluate w where z gave f and the residual before, and tell whether they are still what
        they were.

        If so, the data are the same and z is as accurate as it was: the point is as it was, at the
        price of one look.
        """
        lower, y = self.problem.at(w[: self.split]), w[self.split :]
        upper = self.problem.upper(lower.x, y)
        if upper.value == f:
            point = self._measure(lower, w, z, zeta, self.halvings, upper)
            if point.residual == residual:
                return point, True
        z, halvings = self._prox(lower, y, z, zeta)
        return self._measure(lower, w, z, zeta, halvings, upper), False

    def _prox(
        self, lower: LowerLevel, y: Tensor, z: Tensor, zeta: float, max_inner: int | None = None
    ) -> tuple[Tensor, int]:
        c = self.constants
        return inexact_prox(
            lower,
            y,
            z,
            zeta,
            c.envelope,
            self.problem.lower_set,
            L_yy=c.L_yy,
            halvings=self.halvings,
            max_inner=c.max_inner if max_inner is None else max_inner,
            accelerated=c.inner == "accelerated",
        )

    def _measure(
        self,
        lower: LowerLevel,
        w: Tensor,
        z: Tensor,
        zeta: float,
        halvings: int,
        upper: Upper | None = None,
    ) -> Point:
        # The gap first: it needs more memory than f, and so need not hold the gradient of f as
        # well.
        y = w[self.split :]
        gap = evaluate_gap(lower, y, z, self.constants.envelope)
        at_y, residual, grad_R = gap.lower, gap.residual, torch.cat([gap.grad_x, gap.grad_y])
        del gap
        upper = self.problem.upper(lower.x, y) if upper is None else upper
        grad_f = torch.cat([upper.grad_x, upper.grad_y])
        return Point(w, self.split, upper.value, grad_f, z, zeta, at_y, residual, grad_R, halvings)
