"""The merit function of IVSP: its smoothed exact penalty."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bilevel.solvers.ivsp.penalty import Smoothing
from lightning_bilevel.solvers.ivsp.point import Glimpse, Point

__all__ = ["Merit", "rounding"]


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

    def value(self, point: Point | Glimpse, extra: float = 0.0) -> float:
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


def rounding(here: Point, there: Point | Glimpse, gamma: float) -> float:
    """Return the rounding error of the values that the Armijo test compares."""
    size = gamma * (abs(here.f) + abs(there.f)) + 2 * (abs(here.lower) + abs(there.lower))
    size += sum(map(abs, (*here.residuals[1:], *there.residuals[1:])))
    return float(torch.finfo(here.w.dtype).eps * size)
