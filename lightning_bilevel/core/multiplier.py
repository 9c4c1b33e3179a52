"""The multiplier of a point that has none: the search along the line of all multipliers."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["least_squares_multiplier", "smallest_residual"]


def least_squares_multiplier(stationarity: Callable[[float], float]) -> float:
    r"""Return the :math:`\lambda \ge 0` that minimises the distance :math:`\Phi^s(\lambda)`.

    The distance to a closed convex cone is convex along the line
    :math:`\nabla f + \lambda \nabla R`. Complementarity has no say in it, so another multiplier may
    have a smaller largest residual: see :func:`smallest_residual`.
    """
    return _minimiser(stationarity)


def smallest_residual(
    stationarity: Callable[[float], float], residual: float, multiplier: float
) -> float:
    r"""Return the smallest largest KKT residual of a point over all multipliers.

    .. math:: \min_{\lambda \ge 0} \max\{\Phi^s(\lambda), [R]_+, \lambda |R|\}

    It is the smallest :math:`\epsilon` for which the point is an :math:`\epsilon`-KKT point. All
    three are convex in :math:`\lambda`, so their maximum is. The search ends at 7e-5 of its
    bracket, so the result is right to some three digits, and never too small.

    Args:
        stationarity: :math:`\Phi^s` as a function of the multiplier.
        residual: R.
        multiplier: A known multiplier, which the result is at least as good as.
    """

    def largest(weight: float) -> float:
        return max(stationarity(weight), residual, weight * abs(residual))

    known = largest(multiplier)
    # No multiplier makes the violation smaller.
    return known if known <= residual else min(known, largest(_minimiser(largest, rounds=20)))


def _minimiser(function: Callable[[float], float], rounds: int = 45) -> float:
    """Return the smallest minimiser of a convex function on the nonnegative numbers.

    Doubling brackets it, and a golden-section search finds it. Each round keeps 0.62 of the
    bracket, so 20 rounds leave 7e-5 of it and 45 rounds 4e-10. In a smaller bracket the compared
    values differ only by rounding.
    """
    high = 1.0
    while function(2 * high) < function(high) and high < 1e12:
        high *= 2
    low = 0.0
    high = 2 * high
    ratio = (math.sqrt(5) - 1) / 2
    left = high - ratio * (high - low)
    right = low + ratio * (high - low)
    at_left = function(left)
    at_right = function(right)
    for _ in range(rounds):
        # Ties go to the left: where the gradient of R is 0, all multipliers are equally good and
        # the smallest is wanted.
        if at_left <= at_right:
            high = right
            right = left
            at_right = at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low = left
            left = right
            at_left = at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    middle = (low + high) / 2
    return 0.0 if function(0.0) <= function(middle) else middle
