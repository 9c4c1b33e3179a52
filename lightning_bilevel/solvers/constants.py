"""The constants of a method as a dataclass whose fields carry their own conditions.

The signature of a solver, its YAML and the checkpoint read the same fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

__all__ = [
    "Constants",
    "Power",
    "between",
    "choice",
    "nonnegative",
    "positive",
    "schedule",
    "whole",
]


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
        return float(self.initial * (k + 1) ** self.power)


class _Refused(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of a method; a value that breaks the condition of its field is refused."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if "convert" not in f.metadata or (value is None and f.default is None):
                continue
            try:
                object.__setattr__(self, f.name, f.metadata["convert"](value))
            except _Refused:
                words = f.metadata["words"] + (", or None" if f.default is None else "")
                raise ValueError(f"`{self.name}({f.name}={value!r})` must be {words}.") from None

    @property
    def name(self) -> str:
        """The name of the solver that has these constants."""
        return type(self).__name__.removesuffix("Method")

    def warn(self) -> None:
        """Warn of constants that the method runs with, but without its guarantee."""

    def plain(self) -> dict[str, Any]:
        """Return the constants as plain values, from which a checkpoint makes them again."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: astuple(v) if isinstance(v, Power) else v for k, v in given.items()}


def positive(default: float | None, most: float = math.inf) -> Any:
    """Take a number above 0, and at most ``most``."""
    words = "finite" if most == math.inf else f"at most {most:g}"
    return _number(default, lambda v: 0 < v <= most, f"positive and {words}")


def nonnegative(default: float | None) -> Any:
    """Take a number of at least 0."""
    return _number(default, lambda v: v >= 0, "nonnegative and finite")


def between(default: float, low: float, high: float) -> Any:
    """Take a number of an open interval."""
    return _number(default, lambda v: low < v < high, f"between {low:g} and {high:g}")


def whole(default: int | None, least: int = 1) -> Any:
    """Take a whole number; 2.0 is one too."""

    def convert(value: Any) -> int:
        if not _is_number(value) or not value == int(value) >= least:
            raise _Refused
        return int(value)

    words = "a positive whole number" if least else "a whole number of at least 0"
    return field(default=default, metadata={"convert": convert, "words": words})


def choice(default: Any, *values: Any) -> Any:
    """Take one of a few values."""

    def convert(value: Any) -> Any:
        if value not in values:
            raise _Refused
        return value

    words = " or ".join(repr(value) for value in values)
    return field(default=default, metadata={"convert": convert, "words": words})


def schedule(default: float | Power) -> Any:
    """Take a positive number, a :class:`Power` or the pair (initial, power); keep a Power."""

    def convert(value: Any) -> Power:
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
            value = Power(*value)  # a list in YAML
        power = value if isinstance(value, Power) else Power(value)
        if not (_is_number(power.initial) and power.initial > 0 and _is_number(power.power)):
            raise _Refused
        return Power(float(power.initial), float(power.power))

    words = "positive and finite, a `Power`, or the pair (initial, power)"
    return field(default=default, metadata={"convert": convert, "words": words})


def _number(default: float | None, holds: Callable[[float], bool], words: str) -> Any:
    def convert(value: Any) -> Any:
        if not _is_number(value) or not holds(value):
            raise _Refused
        return value

    return field(default=default, metadata={"convert": convert, "words": words})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
