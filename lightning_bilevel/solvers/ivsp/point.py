"""A point of IVSP and its evaluation: f, the inexact residual R, and further residuals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.moreau import evaluate_gap
from lightning_bilevel.core.problem import BilevelProblem, Upper
from lightning_bilevel.core.prox import inexact_prox
from lightning_bilevel.core.vectors import squared_distance
from lightning_bilevel.solvers.ivsp.constants import Constants

__all__ = ["Evaluator", "Glimpse", "Point"]


@dataclass(frozen=True)
class Point:
    r"""A point w = (x, y) with the values and gradients there.

    Attributes:
        w: The point.
        split: The length of x.
        f: f(w).
        grad_f: The gradient of f.
        z: The approximate proximal point.
        zeta: The accuracy of z.
        lower: g(w).
        residuals: :math:`\tilde R(w)`, and those of the constraints beside the lower level. The
            first is -inf without a lower level.
        gradients: The gradient of each.
        halvings: How often the step of the inner loop was halved so far.
    """

    w: Tensor
    split: int
    f: float
    grad_f: Tensor
    z: Tensor
    zeta: float
    lower: float
    residuals: tuple[float, ...]
    gradients: tuple[Tensor, ...]
    halvings: int

    @property
    def residual(self) -> float:
        r""":math:`\tilde R(w)`."""
        return self.residuals[0]

    @property
    def grad_R(self) -> Tensor:
        """The gradient of R."""
        return self.gradients[0]

    @property
    def worst(self) -> float:
        """The largest residual."""
        return max(self.residuals)

    @property
    def levels(self) -> tuple[Tensor, Tensor]:
        """X and y."""
        return self.w[: self.split], self.w[self.split :]

    def differs(self, f: float, residual: float) -> bool:
        """Compare with f and R at the same point, up to rounding and the accuracy of z."""
        rounding = 30 * torch.finfo(self.w.dtype).eps
        apart = abs(self.f - f), abs(self.residual - residual)
        allowed = rounding * max(abs(f), abs(self.f)), self.zeta + rounding * abs(self.lower)
        return apart[0] > allowed[0] or apart[1] > allowed[1]


@dataclass(frozen=True)
class Glimpse:
    r"""The values at a point that was not evaluated to the end.

    Attributes:
        f: f(w).
        lower: g(w).
        residuals: A lower bound of R(w).
    """

    f: float
    lower: float
    residuals: tuple[float]


Hopeless = Callable[[Glimpse], bool]


class Evaluator:
    """Evaluates points of one problem.

    Args:
        problem: f and g.
        constants: The constants of the run.
        split: The length of x.
        halvings: How often the step of the inner loop has been halved so far.
    """

    def __init__(
        self, problem: BilevelProblem, constants: Constants, split: int, halvings: int
    ) -> None:
        self.problem = problem
        self.constants = constants
        self.split = split
        self.halvings = halvings

    def accuracy(self, wanted: float) -> float:
        """Return the accuracy of evaluations: without a lower level they are exact, with z = y."""
        return 0.0 if self.problem.single_level else wanted

    def _known(self, residual: float) -> float:
        """Return a value of R; without a lower level it is -inf and has no weight."""
        return -math.inf if self.problem.single_level else residual

    def at(self, w: Tensor, z: Tensor, zeta: float, max_inner: int | None = None) -> Point:
        """Evaluate f and, up to zeta, R at w, from the warm start z."""
        lower = self.problem.at(w[: self.split])
        z, halvings = self._prox(lower, w[self.split :], z, zeta, max_inner)
        return self._measure(lower, w, z, zeta, halvings)

    def promising(
        self, w: Tensor, z: Tensor, zeta: float, max_inner: int, hopeless: Hopeless
    ) -> Point | Glimpse:
        r"""Evaluate w as :meth:`at` does, but stop as soon as the values show that it is hopeless.

        For any z in Y

        .. math:: R(w) \ge g(x, y) - \psi(z; x, y) - \delta

        so f, and g at y and at the warm start, bound the merit from below. The gradient of f, and
        that of g at the warm start, are those that an accepted point needs anyway: a point that is
        not hopeless costs one more value of g, and a hopeless one two passes and that value.

        Args:
            w: The point.
            z: The warm start.
            zeta: The accuracy.
            max_inner: The cap on inner iterations.
            hopeless: Tells from f, g and a lower bound of R whether the point is.
        """
        lower = self.problem.at(w[: self.split])
        y = w[self.split :]
        upper = self.problem.upper(lower.x, y)
        g = lower.value(y)
        at_z, slope = lower.value_and_gradient(z)
        envelope = self.constants.envelope
        least = g - at_z - squared_distance(y, z) / (2 * envelope.rho) - envelope.delta
        glimpse = Glimpse(upper.value, g, (self._known(least),))
        if hopeless(glimpse):
            return glimpse
        z, halvings = self._prox(lower, y, z, zeta, max_inner, slope)
        return self._measure(lower, w, z, zeta, halvings, upper)

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
            residuals=(gap.residual, *point.residuals[1:]),
            gradients=(grad_R, *point.gradients[1:]),
            halvings=halvings,
        )

    def again(
        self, w: Tensor, z: Tensor, zeta: float, f: float, residual: float
    ) -> tuple[Point, bool]:
        """Evaluate w again, and tell whether f and the residual at z have their former values.

        If so, the data have not changed and z is as accurate as before. No inner loop is then
        needed.
        """
        lower = self.problem.at(w[: self.split])
        y = w[self.split :]
        upper = self.problem.upper(lower.x, y)
        if upper.value == f:
            point = self._measure(lower, w, z, zeta, self.halvings, upper)
            if point.residual == residual:
                return point, True
        z, halvings = self._prox(lower, y, z, zeta)
        return self._measure(lower, w, z, zeta, halvings, upper), False

    def _prox(
        self,
        lower: LowerLevel,
        y: Tensor,
        z: Tensor,
        zeta: float,
        max_inner: int | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, int]:
        c = self.constants
        if self.problem.single_level:
            return y, self.halvings
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
            spectral=c.inner is None,
            first=first,
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
        # The gap comes first: it needs more memory than f, and the gradient of f is not held yet.
        y = w[self.split :]
        gap = evaluate_gap(lower, y, z, self.constants.envelope)
        g = gap.lower
        residual = gap.residual
        grad_R = torch.cat([gap.grad_x, gap.grad_y])
        del gap
        upper = self.problem.upper(lower.x, y) if upper is None else upper
        grad_f = torch.cat([upper.grad_x, upper.grad_y])
        beside = self.problem.residuals(lower.x, y)
        return Point(
            w,
            self.split,
            upper.value,
            grad_f,
            z,
            self.accuracy(zeta),
            g,
            (self._known(residual), *beside.values),
            (grad_R, *beside.gradients),
            halvings,
        )
