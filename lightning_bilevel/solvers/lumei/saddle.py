r"""A method of optimal order for strongly-convex-strongly-concave saddle points.

.. math:: \min_u \max_z h(u, z)

This is Algorithm 5 of Lu and Mei, with sets in place of their proximal terms. A pair (u, z) is one
vector w, and :math:`F(w) = (\nabla_u h, -\nabla_z h)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.vectors import norm

__all__ = ["Saddle", "SaddlePoint", "solve_saddle"]

# A gradient is exact up to some tens of roundings of its largest terms.
_NOISE = 50.0


class Saddle(NamedTuple):
    """A saddle-point problem.

    Attributes:
        F: w -> the gradient of h in u, and minus that in z.
        project: w -> the nearest point of the sets.
        size_u: The number of coordinates of u.
        s_u: The modulus of strong convexity of h in u.
        s_z: The modulus of strong concavity of h in z.
        L: The Lipschitz constant of F.
    """

    F: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    size_u: int
    s_u: float
    s_z: float
    L: float

    def split(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return u and z."""
        return w[: self.size_u], w[self.size_u :]


class SaddlePoint(NamedTuple):
    """What a solve ended with.

    Attributes:
        w: The point (u, z), in the sets.
        residual: The distance of 0 to F plus the normal cone at w, at most.
        steps: Extragradient steps.
        outer: Outer steps.
        reached: Whether the residual is at most the tolerance.
    """

    w: Tensor
    residual: float
    steps: int
    outer: int
    reached: bool


def solve_saddle(saddle: Saddle, w: Tensor, tolerance: float, max_steps: int) -> SaddlePoint:
    r"""Solve a saddle-point problem from w up to a residual.

    Each outer step solves a proximal problem by an anchored extragradient method up to a relative
    accuracy. Momentum acts on the dual image :math:`q = -s_u u` of u, and on z. One extragradient
    step evaluates F twice, an outer step three times more.

    Args:
        saddle: The problem.
        w: The start.
        tolerance: The residual.
        max_steps: The cap on extragradient steps, over all outer steps. A solve that ends by it
            returns the point of smallest residual.
    """
    s_u, s_z = saddle.s_u, saddle.s_z
    mix = min(1.0, math.sqrt(8 * s_z / s_u))
    e_q = s_u / 2
    e_z = min(1 / (2 * s_z), 4 / (mix * s_u))
    start = w
    best: tuple[Tensor, float] | None = None
    u, z = saddle.split(w)
    q = q_f = -s_u * u
    z_f = z
    steps = 0
    outer = 0
    while True:
        outer += 1
        inner = _Proximal(saddle, mix * q + (1 - mix) * q_f, mix * z + (1 - mix) * z_f)
        steps += inner.solve(max_steps - steps)
        # q_f and w_f are subgradients, at (u_f, z_f), of h - s_u |u|^2/2 + s_z |z|^2/2 in u and of
        # minus that in z.
        u_f, z_f = saddle.split(inner.v)
        F_u, F_z = saddle.split(inner.F + inner.b)
        q_f = F_u - s_u * u_f
        w_f = F_z - s_z * z_f
        q = q + (e_q / s_u) * (q_f - q) - e_q * (u_f + q_f / s_u)
        z = z + e_z * s_z * (z_f - z) - e_z * (w_f + s_z * z_f)
        found = _candidate(saddle, torch.cat([-q / s_u, z]))
        if best is None or found[1] < best[1]:
            best = found
        if best[1] <= tolerance:
            return SaddlePoint(*best, steps, outer, True)
        if steps >= max_steps:
            # Too few steps may lead away from the solution. The start is never left for worse.
            best = min(best, _candidate(saddle, start), key=lambda candidate: candidate[1])
            return SaddlePoint(*best, steps, outer, False)


def _candidate(saddle: Saddle, w: Tensor) -> tuple[Tensor, float]:
    """Return a point of the sets near w, and the norm of a subgradient there."""
    step = min(saddle.s_u, saddle.s_z) / saddle.L**2
    before = saddle.F(w)
    new = saddle.project(w - step * before)
    return new, norm((w - new) / step - before + saddle.F(new))


class _Proximal:
    r"""The proximal problem of an outer step: a zero of A + B, with B the sets' normal cones.

    .. math::
        A(w) = F(w) + \bigl(-\tfrac{s_u}{2} u - \tfrac12 q_g,\; \tfrac{s_u}{8} (z - z_g)\bigr)

    Attributes:
        v: The approximate solution.
        b: An element of B(v).
        F: F(v).
    """

    def __init__(self, saddle: Saddle, q_g: Tensor, z_g: Tensor) -> None:
        self._saddle = saddle
        self._q_g = q_g
        self._z_g = z_g
        self._gamma = 8 / saddle.s_u
        self._rate = self._gamma / (2 * math.sqrt(5.0) * (1 + 8 * saddle.L / saddle.s_u))
        self.v = torch.cat([-q_g / saddle.s_u, z_g])
        self.b = torch.zeros_like(self.v)
        self.F = self.b

    def solve(self, max_steps: int) -> int:
        """Move v until A(v) + b is small against the way from the start; return the steps made."""
        start = self.v
        self._resolve(start - self._rate * self._A(start))
        anchor = self.v
        done = 0
        while True:
            A = self._A(self.v)
            total = A + self.b
            if done >= max_steps or self._is_solved(start, A, total):
                return done
            towards = self.v + 2 / (done + 3) * (anchor - self.v)
            half = towards - self._rate * total
            self._resolve(towards - self._rate * self._A(half))
            done += 1

    def _A(self, w: Tensor) -> Tensor:
        self.F = self._saddle.F(w)
        u, z = self._saddle.split(w)
        s_u = self._saddle.s_u
        return self.F + torch.cat([-(s_u * u + self._q_g) / 2, s_u / 8 * (z - self._z_g)])

    def _resolve(self, argument: Tensor) -> None:
        self.v = self._saddle.project(argument)
        self.b = (argument - self.v) / self._rate

    def _is_solved(self, start: Tensor, A: Tensor, total: Tensor) -> bool:
        r"""Tell whether :math:`\gamma \|A(v) + b\| \le \|v - v_{-1}\|`, up to rounding."""
        residual = norm(total)
        if self._gamma * residual <= norm(self.v - start):
            return True
        # Near the solution both sides drown in rounding. The published code adds 1e-8 to the
        # squares: on the problem of the tests this ends all progress at a residual of 5e-5.
        terms = norm(A) + norm(self.b) + self._saddle.L * norm(self.v)
        return residual <= _NOISE * torch.finfo(self.v.dtype).eps * terms
