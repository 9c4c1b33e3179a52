r"""The best multipliers of a point: those that make the gradient of the Lagrangian smallest.

.. math:: \nabla f + \sum_i \lambda_i \nabla r_i, \qquad \lambda_i \ge 0

:math:`r_0` is R; others are constraints beside the lower level. The distance to a closed convex
cone is convex along the line of a multiplier, so each is found by a search along a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lightning_bilevel.core.passes import Residuals
from lightning_bilevel.core.sets import ConvexSet

__all__ = ["Lagrangian", "minimiser"]

# Multipliers are searched one after another, in so many rounds at most.
_ROUNDS = 100


@dataclass(frozen=True)
class Lagrangian:
    """The gradients at a point w = (x, y) of the set C."""

    feasible: ConvexSet
    w: Tensor
    grad_f: Tensor
    residuals: Residuals

    def stationarity(self, multipliers: Sequence[float]) -> float:
        r"""Return :math:`\Phi^s`, the distance of the negative gradient from the normal cone."""
        total = self.grad_f
        for multiplier, gradient in zip(multipliers, self.residuals.gradients, strict=True):
            total = total + multiplier * gradient
        return self.feasible.normal_cone_distance(self.w, total)

    def best_multipliers(self, first: float | None) -> list[float]:
        r"""Return the multipliers; that of R is ``first``, if it is known.

        Without constraints beside it, that of R minimises :math:`\Phi^s`. Complementarity has no
        say in it, so another one may have a smaller largest residual: see
        :meth:`smallest_kkt`. With constraints they minimise
        :math:`(\Phi^s)^2 + \sum_{i > 0} (\lambda_i r_i)^2`, so that a slack one has none. This is
        convex and smooth, and minimising along one multiplier after the other finds the smallest.
        """
        best = [0.0] * len(self.residuals.values)
        if first is not None:
            best[0] = first
        free = range(0 if first is None else 1, len(best))
        for _ in range(_ROUNDS if len(free) > 1 else 1):
            before = list(best)
            for i in free:
                best[i] = minimiser(partial(self._error, best, i))
            if all(map(partial(math.isclose, abs_tol=1e-9), before, best)):
                break
        return best

    def smallest_kkt(self, multipliers: Sequence[float]) -> float:
        r"""Return the smallest KKT residual over all multipliers of R, with the others fixed.

        .. math:: \min_{\lambda \ge 0} \max\{\Phi^s(\lambda), [R]_+, \lambda |R|\}

        It is the smallest :math:`\epsilon` for which the point is an :math:`\epsilon`-KKT point.
        All three are convex in :math:`\lambda`, so their maximum is. The search ends at 7e-5 of
        its bracket, so the result is right to some three digits, and never too small. It is at
        least as good as the given multipliers.
        """
        weight, *others = multipliers
        residual, *beside = self.residuals.values

        def largest(weight: float) -> float:
            return max(self.stationarity([weight, *others]), residual, weight * abs(residual))

        smallest = largest(weight)
        # No multiplier makes the violation smaller.
        if smallest > residual:
            smallest = min(smallest, largest(minimiser(largest, rounds=20)))
        products = (abs(weight * value) for weight, value in zip(others, beside, strict=True))
        return max([smallest, *beside, *products])

    def _error(self, multipliers: Sequence[float], i: int, value: float) -> float:
        changed = [*multipliers[:i], value, *multipliers[i + 1 :]]
        beside = zip(changed[1:], self.residuals.values[1:], strict=True)
        return math.hypot(self.stationarity(changed), *(weight * r for weight, r in beside))


def minimiser(function: Callable[[float], float], rounds: int = 45) -> float:
    """Return the smallest minimiser of a convex function on the nonnegative numbers.

    Doubling brackets it, and a golden-section search finds it. Each round keeps 0.62 of the
    bracket, so 20 rounds leave 7e-5 of it and 45 rounds 4e-10. In a smaller bracket the compared
    values differ only by rounding.
    """
    low, high = 0.0, 2.0
    while function(high) < function(high / 2) and high < 2e12:
        high *= 2
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(rounds):
        # Ties go to the left: where the gradient of R is 0, all multipliers are equally good and
        # the smallest is wanted.
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    middle = (low + high) / 2
    return 0.0 if function(0.0) <= function(middle) else middle
