"""A point of IVSP and its evaluation: f, the inexact residual R, and further residuals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_bilevel.core.lower import At, LowerLevel, LowerPoint
from lightning_bilevel.core.moreau import Envelope, evaluate_gap
from lightning_bilevel.core.passes import Residuals
from lightning_bilevel.core.problem import BilevelProblem, Upper
from lightning_bilevel.core.prox import inexact_prox
from lightning_bilevel.core.vectors import squared_distance
from lightning_bilevel.solvers.ivsp.constants import IVSPConstants
from lightning_bilevel.solvers.ivsp.smoothing import Smoothing
from lightning_bilevel.solvers.record import evolve


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    r"""The relaxed gap at (x, y), evaluated at an approximate proximal point z.

    Attributes:
        z: The point.
        zeta: The accuracy of z.
        lower: g(x, y).
        residual: :math:`\tilde R`; -inf without a lower level.
        grad_R: Its gradient.
        halvings: How often the step of the inner loop was halved so far.
        at_z: z as a point of g(x, .), for a further evaluation.
    """

    z: Tensor
    zeta: float
    lower: float
    residual: float
    grad_R: Tensor
    halvings: int
    at_z: LowerPoint


@dataclass(frozen=True, kw_only=True)
class Point(Relaxed):
    r"""A point w = (x, y) with the values and gradients there.

    Attributes:
        w: The point.
        split: The length of x.
        f: f(w).
        grad_f: The gradient of f.
        beside: The residuals of the constraints beside the lower level.
        below: g(x, .), for a further evaluation at this x.
        at_y: y as a point of g(x, .), likewise.
    """

    w: Tensor
    split: int
    f: float
    grad_f: Tensor
    beside: Residuals
    below: LowerLevel
    at_y: LowerPoint

    @property
    def residuals(self) -> tuple[float, ...]:
        """R and the further residuals."""
        return self.residual, *self.beside.values

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        return self.grad_R, *self.beside.gradients

    @property
    def worst(self) -> float:
        """The largest residual."""
        return max(self.residuals)

    @property
    def x(self) -> Tensor:
        return self.w[: self.split]

    @property
    def y(self) -> Tensor:
        return self.w[self.split :]

    def release(self) -> None:
        """Free what another evaluation at this x or y would reuse: the trials need the memory."""
        self.below.release()
        self.at_y.release()

    def differs(self, f: float, residual: float) -> bool:
        """Compare with f and R at the same point, up to rounding and the accuracy of z."""
        eps = 30 * torch.finfo(self.w.dtype).eps
        apart = abs(self.f - f), abs(self.residual - residual)
        allowed = eps * max(abs(f), abs(self.f)), self.zeta + eps * abs(self.lower)
        return apart[0] > allowed[0] or apart[1] > allowed[1]


@dataclass(frozen=True)
class LowerBound:
    r"""The values at a point that was not evaluated to the end.

    Attributes:
        f: f(w).
        lower: g(w).
        residuals: A lower bound of R(w).
    """

    f: float
    lower: float
    residuals: tuple[float]


@dataclass(frozen=True)
class Merit:
    r"""The smoothed exact penalty :math:`\gamma f + \sum_i \phi_\mu(r_i)`.

    The residual :math:`r_0` is :math:`\tilde R`; others are of a problem that has further ones.

    Attributes:
        gamma: The inverse penalty.
        mu: The smoothing.
        phi: The smoothed plus function.
    """

    gamma: float
    mu: float
    phi: Smoothing

    def value(self, point: Point | LowerBound, extra: float = 0.0) -> float:
        r"""Return the penalty with :math:`\tilde R + \text{extra}` for :math:`\tilde R`."""
        R, *others = point.residuals
        total = self.gamma * point.f + self.phi.value(R + extra, self.mu)
        return total + sum(self.phi.value(residual, self.mu) for residual in others)

    def weight(self, point: Point) -> float:
        r"""Return :math:`\phi_\mu'(\tilde R)`."""
        return self.phi.slope(point.residual, self.mu)

    def direction(self, point: Point) -> Tensor:
        r"""Return :math:`\gamma \nabla f + \sum_i \phi_\mu'(r_i) \nabla r_i`.

        It is computed anew for each trial, to save memory while the trial is evaluated.
        """
        moved = self.gamma * point.grad_f
        for residual, gradient in zip(point.residuals, point.gradients, strict=True):
            moved.add_(gradient, alpha=self.phi.slope(residual, self.mu))
        return moved


def rounding(here: Point, there: Point | LowerBound, gamma: float) -> float:
    """Return the rounding error of the values that the Armijo test compares."""
    size = gamma * (abs(here.f) + abs(there.f)) + 2 * (abs(here.lower) + abs(there.lower))
    size += sum(map(abs, (*here.residuals[1:], *there.residuals[1:])))
    return float(torch.finfo(here.w.dtype).eps * size)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates points of one problem.

    Attributes:
        problem: f and g.
        constants: The constants of the run.
        split: The length of x.
        unit: The unit of y, in which rho, sigma and L_yy are given.
        halvings: How often the step of the inner loop has been halved so far.
    """

    problem: BilevelProblem
    constants: IVSPConstants
    split: int
    unit: float
    halvings: int

    @cached_property
    def envelope(self) -> Envelope:
        return self.constants.envelope.in_unit(self.unit)

    def accuracy(self, wanted: float) -> float:
        """Return the accuracy of evaluations: without a lower level they are exact, with z = y."""
        return 0.0 if self.problem.single_level else wanted

    def at(self, w: Tensor, z: At, zeta: float, max_inner: int | None = None) -> Point:
        """Evaluate f and, up to zeta, R at w, from the warm start z."""
        lower, at_y = self._handles(w)
        found = self._prox(lower, w, z, zeta, max_inner)
        return self._measured(lower, at_y, w, zeta, *found)

    def evaluate_or_reject(
        self,
        w: Tensor,
        z: Tensor,
        zeta: float,
        max_inner: int,
        exceeds_bound: Callable[[LowerBound], bool],
    ) -> Point | LowerBound:
        r"""Evaluate w as :meth:`at` does, but reject it early by a lower bound of its merit.

        For any z in Y

        .. math:: R(w) \ge g(x, y) - \psi(z; x, y) - \delta

        so f, and g at y and at the warm start, bound the merit from below. The gradient of f, and
        that of g at the warm start, are those that an accepted point needs anyway: a point that is
        not rejected costs one more value of g, and a rejected one two passes and that value.

        Args:
            w: The point.
            z: The warm start.
            zeta: The accuracy.
            max_inner: The cap on inner iterations.
            exceeds_bound: Tells from f, g and a lower bound of R whether w is rejected.
        """
        lower, at_y = self._handles(w)
        y = w[self.split :]
        upper = self.problem.upper(lower.x, y)
        g = lower.value(at_y)
        g_z, first = lower.value_and_gradient(z)
        least = g - g_z - squared_distance(y, z) / (2 * self.envelope.rho) - self.envelope.delta
        least = -math.inf if self.problem.single_level else least
        bound = LowerBound(upper.value, g, (least,))
        if exceeds_bound(bound):
            return bound
        found = self._prox(lower, w, z, zeta, max_inner, first)
        return self._measured(lower, at_y, w, zeta, *found, upper)

    def refined(self, point: Point, zeta: float) -> Point:
        """Evaluate R again, more accurately."""
        point.at_z.release()
        found = self._prox(point.below, point.w, point.z, zeta)
        return evolve(point, **vars(self._relaxed(point.below, point.at_y, zeta, *found)))

    def again(
        self, w: Tensor, z: Tensor, zeta: float, f: float, residual: float
    ) -> tuple[Point, bool]:
        """Evaluate w again, and tell whether f and the residual at z have their former values.

        If so, the data have not changed and z is as accurate as before. No inner loop is then
        needed.
        """
        lower, at_y = self._handles(w)
        upper = self.problem.upper(lower.x, w[self.split :])
        if upper.value == f:
            point = self._measured(lower, at_y, w, zeta, z, self.halvings, upper)
            if point.residual == residual:
                return point, True
        found = self._prox(lower, w, z, zeta)
        return self._measured(lower, at_y, w, zeta, *found, upper), False

    def _handles(self, w: Tensor) -> tuple[LowerLevel, LowerPoint]:
        return self.problem.at(w[: self.split]), LowerPoint(w[self.split :])

    def _prox(
        self,
        lower: LowerLevel,
        w: Tensor,
        z: At,
        zeta: float,
        max_inner: int | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, int]:
        c = self.constants
        if self.problem.single_level:
            return w[self.split :], self.halvings
        return inexact_prox(
            lower,
            w[self.split :],
            z,
            zeta,
            self.envelope,
            self.problem.lower_set,
            L_yy=c.L_yy / self.unit**2,
            halvings=self.halvings,
            max_inner=c.max_inner if max_inner is None else max_inner,
            accelerated=c.inner == "accelerated",
            spectral=c.inner is None,
            first=first,
        )

    def _relaxed(
        self, lower: LowerLevel, at_y: LowerPoint, zeta: float, z: Tensor, halvings: int
    ) -> Relaxed:
        at_z = LowerPoint(z)
        gap = evaluate_gap(lower, at_y, at_z, self.envelope)
        return Relaxed(
            z=z,
            zeta=self.accuracy(zeta),
            lower=gap.lower,
            residual=-math.inf if self.problem.single_level else gap.residual,
            grad_R=torch.cat([gap.grad_x, gap.grad_y]),
            halvings=halvings,
            at_z=at_z,
        )

    def _measured(
        self,
        lower: LowerLevel,
        at_y: LowerPoint,
        w: Tensor,
        zeta: float,
        z: Tensor,
        halvings: int,
        upper: Upper | None = None,
    ) -> Point:
        # The gap comes first: it needs more memory than f, and the gradient of f is not held yet.
        relaxed = self._relaxed(lower, at_y, zeta, z, halvings)
        y = w[self.split :]
        upper = self.problem.upper(lower.x, y) if upper is None else upper
        return Point(
            **vars(relaxed),
            w=w,
            split=self.split,
            f=upper.value,
            grad_f=torch.cat([upper.grad_x, upper.grad_y]),
            beside=self.problem.residuals(lower.x, y),
            below=lower,
            at_y=at_y,
        )
