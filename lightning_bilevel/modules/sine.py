"""The paper's synthetic problem: a nonconvex lower level with a known solution."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.sets import Box, ConvexSet
from lightning_bilevel.module import BilevelModule
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP


class SineProblem(BilevelModule):
    r"""A toy problem with infinitely many lower-level solutions.

    .. math::
        \min_{x \in [-100, 100],\, y \in [-100, 100]^n} (x - a)^2 + \|y - a e - c\|^2
        \quad\text{s.t.}\quad y \in \arg\min_{z \in [-100, 100]^n} \sum_i \sin(x + z_i - c_i)

    Its solution is :math:`x^* = ((1 - n) a + n C)/(1 + n)`, :math:`y_i^* = C + c_i - x^*` with C
    the minimiser of the sine, :math:`-\pi/2 + 2 k \pi`, that is nearest to 2a. Validation reports
    the errors :math:`\|x - x^*\| / \max\{\|x^*\|, 1\}` and likewise in y.

    Args:
        n: The number of lower-level variables.
        a: The value of x that the upper level prefers.
        c: The shift of the lower level, one number or one per coordinate.
        x0: The start of x.
        y0: The start of each coordinate of y.
        solver: The solver and its arguments.

    Attributes:
        x_star: The solution in x.
        y_star: The solution in y.
    """

    def __init__(
        self,
        n: int = 1000,
        a: float = 2.0,
        c: float | list[float] = 2.0,
        x0: float = -6.0,
        y0: float = 0.0,
        solver: SolverCallable = IVSP,
    ) -> None:
        super().__init__()
        self.a = a
        # Stored in float64 and cast on use, because a float32 module may later run in float64.
        self.shift = torch.tensor(c, dtype=torch.float64)
        self.x = nn.Parameter(torch.full((1,), x0))
        self.y = nn.Parameter(torch.full((n,), y0))
        nearest = -math.pi / 2 + 2 * math.pi * round((2 * a + math.pi / 2) / (2 * math.pi))
        self.x_star = ((1 - n) * a + n * nearest) / (1 + n)
        self.y_star = nearest + self.shift.expand(n) - self.x_star
        self.declare(
            upper=self.x,
            lower=self.y,
            upper_set=Box(-100, 100),
            lower_set=Box(-100, 100),
            solver=solver,
            envelope=Envelope(rho=0.5, sigma=1.0, delta=1e-3),  # the paper's for this problem
            qualification=partial(_qualification, n),
        )

    def upper_loss(self, batch: Any) -> Tensor:
        """(x - a)^2 + |y - a e - c|^2."""
        target = self.a + self.shift.to(self.y)
        return ((self.x - self.a) ** 2).sum() + ((self.y - target) ** 2).sum()

    def lower_loss(self, batch: Any) -> Tensor:
        """The sum of sin(x + y_i - c_i)."""
        return torch.sin(self.x + self.y - self.shift.to(self.y)).sum()

    def errors(self) -> dict[str, float]:
        """Return the normalised errors in x and y."""
        x_error = abs(float(self.x.detach()) - self.x_star) / max(abs(self.x_star), 1.0)
        y_error = torch.linalg.vector_norm(self.y.detach().cpu().double() - self.y_star)
        return {
            "x_error": x_error,
            "y_error": float(y_error / max(float(torch.linalg.vector_norm(self.y_star)), 1.0)),
        }

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict(self.errors(), prog_bar=True, sync_dist=True, batch_size=1)

    test_step = validation_step


def _qualification(n: int, envelope: Envelope, *_: ConvexSet) -> str:
    # At s = 0 and z = -rho the gap of a sine is sin(rho) - rho/2: its maximum is not smaller.
    gap = n * (math.sin(envelope.rho) - envelope.rho / 2)
    if envelope.rho >= 1.0 or gap < envelope.delta:
        return f"not known: for rho = {envelope.rho:g} and delta = {envelope.delta:g}"
    return (
        "fails: the gap is periodic and has interior maxima, which are stationary points with "
        f"R of at least {gap - envelope.delta:.4g}"
    )
