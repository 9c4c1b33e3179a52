"""The point of a run that the convergence theorem of its method speaks of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ProvedPoint"]


@dataclass(frozen=True)
class ProvedPoint:
    r"""The point of a run that a convergence theorem speaks of, in the user's units.

    Attributes:
        x: The upper-level variables.
        y: The lower-level variables.
        multiplier: :math:`\tilde\lambda`, the multiplier that the theorem takes there.
        iteration: The number of the iteration that led there, from 1. The theorem counts from 0:
            its :math:`\hat k` is one less.
        iterations: How many iterations the run has made.
        omega: :math:`\omega`, the length of that iteration's step over its smoothing.
        feasibility_bound: What the violation :math:`\Phi^f` is at most; inf if the step is not
            small enough for the theorem's bounds.
        complementarity_bound: What :math:`\Phi^c` is at most; inf likewise.
    """

    x: Tensor
    y: Tensor
    multiplier: float
    iteration: int
    iterations: int
    omega: float
    feasibility_bound: float
    complementarity_bound: float

    @property
    def name(self) -> str:
        """Which point of the run it is, in words."""
        k = self.iteration - 1
        return f"the theorem's point, iteration {self.iteration} of {self.iterations} (k^ = {k})"

    def __str__(self) -> str:
        if math.isinf(self.feasibility_bound):
            return f"{self.name}; its step is not small enough for the theorem's bounds"
        return (
            f"{self.name}; bounds there: feasibility {self.feasibility_bound:.1e}, complementarity "
            f"{self.complementarity_bound:.1e}"
        )
