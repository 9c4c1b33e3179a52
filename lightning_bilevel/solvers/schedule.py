r"""Step lengths and penalties that change with the iteration.

A solver takes such an argument as a number or as a :class:`Power` and stores it as the pair
(initial, power): checkpoints load with ``weights_only`` and hold plain numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Power", "is_number", "value_at"]


@dataclass(frozen=True)
class Power:
    r"""The schedule :math:`a_k = a_0 (k + 1)^p`, k from 0.

    In YAML it is ``{initial: 0.7, power: -0.5}``; a plain number is a constant schedule.

    Args:
        initial: :math:`a_0`, positive.
        power: p; 0 is a constant.

    Example:
        >>> step = Power(0.7, power=-0.5)
        >>> step.at(0), step.at(3)
        (0.7, 0.35)
    """

    initial: float
    power: float = 0.0

    def at(self, k: int) -> float:
        r"""Return :math:`a_0 (k + 1)^p`."""
        return value_at((self.initial, self.power), k)


def value_at(pair: Sequence[float], k: int) -> float:
    r"""Return :math:`a_0 (k + 1)^p` of a stored pair :math:`(a_0, p)`."""
    initial, power = pair
    return float(initial * (k + 1) ** power)


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
