r"""The gradient of the Lagrangian at a point, and the multipliers that make it smallest.

.. math:: \nabla f + \sum_i \lambda_i \nabla r_i

:math:`r_0` is R; others are constraints beside the lower level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_bilevel.core.multiplier import least_squares_multiplier
from lightning_bilevel.core.passes import Residuals
from lightning_bilevel.core.problem import BilevelProblem

__all__ = ["Lagrangian"]

# Multipliers are searched one after another, in so many rounds at most.
_ROUNDS = 100


@dataclass(frozen=True)
class Lagrangian:
    """The gradients at a point w = (x, y)."""

    problem: BilevelProblem
    x: Tensor
    y: Tensor
    grad_f: Tensor
    residuals: Residuals

    def gradient(self, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the gradient in x and in y, for one multiplier per residual."""
        total = self.grad_f
        for weight, gradient in zip(weights, self.residuals.gradients, strict=True):
            total = total + weight * gradient
        return total[: self.x.numel()], total[self.x.numel() :]

    def stationarity(self, weights: Sequence[float]) -> float:
        r"""Return :math:`\Phi^s`, the distance of its negative from the normal cone of C."""
        in_x, in_y = self.gradient(weights)
        return math.hypot(
            self.problem.upper_set.normal_cone_distance(self.x, in_x),
            self.problem.lower_set.normal_cone_distance(self.y, in_y),
        )

    def multipliers(self, first: float | None) -> list[float]:
        r"""Return the multipliers; that of R is ``first``, if it is known.

        The others minimise :math:`(\Phi^s)^2 + \sum_{i > 0} (\lambda_i r_i)^2`, so that a slack
        constraint has none. This is convex and smooth, and minimising along one multiplier after
        the other finds the smallest.
        """
        known = [first or 0.0, *(0.0 for _ in self.residuals.values[1:])]
        free = range(0 if first is None else 1, len(known))
        for _ in range(_ROUNDS):
            before = list(known)
            for i in free:
                known[i] = least_squares_multiplier(
                    lambda value, i=i: self._error([*known[:i], value, *known[i + 1 :]])  # type: ignore[misc]
                )
            if len(free) < 2 or _close(before, known):
                break
        return known

    def _error(self, weights: Sequence[float]) -> float:
        pairs = zip(weights[1:], self.residuals.values[1:], strict=True)
        return math.hypot(self.stationarity(weights), *(weight * value for weight, value in pairs))


def _close(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(p - q) <= 1e-9 * max(1.0, abs(p)) for p, q in zip(a, b, strict=True))
