r"""Step lengths and penalties that change with the iteration, and the arguments of a solver as a checkpoint may hold them.

A solver takes such an argument as a number or as a :class:`Power` and stores it as the pair (initial, power): checkpoints
load with ``weights_only`` and hold plain numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Power", "stored", "value_at"]


@dataclass(frozen=True)
class Power:
    r"""The schedule :math:`a_k = a_0 (k + 1)^p`, k from 0.

    In YAML it is ``{initial: 0.7, power: -0.5}``, where a plain number stands for a constant.

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

    def __post_init__(self) -> None:
        if not _is_number(self.initial) or self.initial <= 0:
            raise ValueError(f"`Power(initial={self.initial!r})` must be positive and finite.")
        if not _is_number(self.power):
            raise ValueError(f"`Power(power={self.power!r})` must be a finite number.")

    def at(self, k: int) -> float:
        r"""Return :math:`a_0 (k + 1)^p`."""
        return value_at((self.initial, self.power), k)


def value_at(pair: Sequence[float], k: int) -> float:
    r"""Return :math:`a_0 (k + 1)^p` of a stored pair :math:`(a_0, p)`."""
    initial, power = pair
    return float(initial * (k + 1) ** power)


def stored(
    solver: str,
    given: Mapping[str, Any],
    *,
    schedules: Iterable[str] = (),
    positive: Iterable[str] = (),
    nonnegative: Iterable[str] = (),
    whole: Iterable[str] = (),
    choices: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a solver as they are stored, or refuse one that the method cannot run with.

    Args:
        solver: The solver's name, for the messages.
        given: The arguments.
        schedules: Those that are a positive number, a :class:`Power`, or its pair as it is stored; each becomes its pair.
        positive: Those that are a positive number.
        nonnegative: Those that are a number of at least 0.
        whole: Those that are a whole number of at least 1.
        choices: Those that are one of a few values, with the values.

    Example:
        >>> stored("MEHA", {"alpha": Power(1.0, -0.6), "beta": 0.02}, schedules=("alpha", "beta"))
        {'alpha': (1.0, -0.6), 'beta': (0.02, 0.0)}
        >>> stored("MEHA", {"gamma": -1.0}, positive=("gamma",))
        Traceback (most recent call last):
        ValueError: `MEHA(gamma=-1.0)` must be positive and finite.
    """
    result = dict(given)

    def require(name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"`{solver}({name}={given[name]!r})` must be {rule}.")

    for name in schedules:
        value = given[name]
        # A list is what YAML has for a pair.
        pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
        initial, power = (value.initial, value.power) if isinstance(value, Power) else value if pair else (value, 0.0)
        valid = _is_number(initial) and initial > 0 and _is_number(power)
        require(name, valid, "positive and finite, a `Power`, or the pair (initial, power)")
        result[name] = (float(initial), float(power))
    for name in positive:
        require(name, _is_number(given[name]) and given[name] > 0, "positive and finite")
    for name in nonnegative:
        require(name, _is_number(given[name]) and given[name] >= 0, "nonnegative and finite")
    for name in whole:
        require(name, _is_number(given[name]) and given[name] == int(given[name]) >= 1, "a positive whole number")
        result[name] = int(given[name])
    for name, values in (choices or {}).items():
        require(name, given[name] in values, " or ".join(repr(v) for v in values))
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
