r"""The gradient of the Lagrangian at a point, and the multipliers that make it smallest.

.. math:: \nabla f + \lambda \nabla R + \sum_i \nu_i \nabla c_i

The :math:`c_i` are the constraints beside the lower level, if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lightning_bilevel.core.constraints import Limits
from lightning_bilevel.core.moreau import MoreauPoint
from lightning_bilevel.core.multiplier import least_squares_multiplier
from lightning_bilevel.core.problem import BilevelProblem, Upper

__all__ = ["Lagrangian"]

# Multipliers are searched one after another, in so many rounds at most.
_ROUNDS = 100


@dataclass(frozen=True)
class Lagrangian:
    """The gradients at a point.

    Attributes:
        problem: The sets.
        x: The upper-level variables.
        y: The lower-level variables.
        upper: f with its gradients.
        gap: R with its gradients.
        limits: The constraints beside the lower level with their gradients.
    """

    problem: BilevelProblem
    x: Tensor
    y: Tensor
    upper: Upper
    gap: MoreauPoint
    limits: Limits

    def gradient(self, weight: float, others: Sequence[float]) -> tuple[Tensor, Tensor]:
        r"""Return the gradient in x and in y, for :math:`\lambda` and :math:`\nu`."""
        in_x = self.upper.grad_x + weight * self.gap.grad_x
        in_y = self.upper.grad_y + weight * self.gap.grad_y
        split = self.x.numel()
        for other, gradient in zip(others, self.limits.gradients, strict=True):
            in_x = in_x + other * gradient[:split]
            in_y = in_y + other * gradient[split:]
        return in_x, in_y

    def stationarity(self, weight: float, others: Sequence[float]) -> float:
        r"""Return :math:`\Phi^s`, the distance of its negative from the normal cone of C."""
        in_x, in_y = self.gradient(weight, others)
        return math.hypot(
            self.problem.upper_set.normal_cone_distance(self.x, in_x),
            self.problem.lower_set.normal_cone_distance(self.y, in_y),
        )

    def multipliers(
        self, weight: float | None, others: Sequence[float] | None
    ) -> tuple[float, tuple[float, ...]]:
        r"""Return :math:`\lambda` and :math:`\nu`; those that are None minimise :math:`\Phi^s`.

        The square of :math:`\Phi^s` is convex and smooth, so minimising along one multiplier after
        the other finds the smallest.
        """
        count = len(self.limits.values)
        if others is not None and len(others) != count:
            raise ValueError(
                f"`certify(constraint_multipliers={tuple(others)})` has {len(others)} multipliers "
                f"for {count} constraints: give one for each, or None."
            )
        known = [weight or 0.0, *(others or [0.0] * count)]
        free = [0] if weight is None and not self.problem.single_level else []
        free += [] if others is not None else range(1, count + 1)
        for _ in range(_ROUNDS):
            before = list(known)
            for i in free:
                known[i] = least_squares_multiplier(partial(self._along, known, i))
            if len(free) < 2 or _close(before, known):
                break
        return _split(known)

    def _along(self, known: list[float], i: int, value: float) -> float:
        """Return the stationarity with another value of one multiplier."""
        return self.stationarity(*_split([*known[:i], value, *known[i + 1 :]]))


def _split(values: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    return values[0], tuple(values[1:])


def _close(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(p - q) <= 1e-9 * max(1.0, abs(p)) for p, q in zip(a, b, strict=True))
