"""The constants of a method as a dataclass whose fields carry their own conditions.

The signature of a solver, its YAML and the checkpoint read the same fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields
from inspect import Parameter
from typing import Any, get_type_hints


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


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of a method; a value that breaks the condition of its field is refused."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if "holds" not in f.metadata or (value is None and f.default is None):
                continue
            if not f.metadata["holds"](value):
                words = f.metadata["words"] + (", or None" if f.default is None else "")
                raise ValueError(f"`{self.name}({f.name}={value!r})` must be {words}.")
            object.__setattr__(self, f.name, f.metadata["kept"](value))

    @property
    def name(self) -> str:
        """The name of the solver that has these constants."""
        return type(self).__name__.removesuffix("Method")

    def warn(self) -> None:
        """Warn of constants that the method runs with, but without its guarantee."""

    @classmethod
    def parameters(cls) -> Iterator[Parameter]:
        """Yield the constants as the parameters of a signature."""
        hints = get_type_hints(cls)
        for f in fields(cls):
            hint = float | Power if hints[f.name] is Power else hints[f.name]
            hint = hint | None if f.default is None else hint
            yield Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hint)

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
    words = "a positive whole number" if least else "a whole number of at least 0"
    return _number(default, lambda v: v == int(v) >= least, words, int)


def choice(default: Any, *values: Any) -> Any:
    """Take one of a few values."""
    return _field(default, lambda v: v in values, " or ".join(map(repr, values)))


def schedule(default: float | Power) -> Any:
    """Take a positive number, a :class:`Power` or the pair (initial, power); keep a Power."""

    def holds(value: Any) -> bool:
        given = _power(value)
        return _is_number(given.initial) and given.initial > 0 and _is_number(given.power)

    words = "positive and finite, a `Power`, or the pair (initial, power)"
    return _field(default, holds, words, _power)


def _power(value: Any) -> Power:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        return Power(*value)  # a list in YAML
    return value if isinstance(value, Power) else Power(value)


def _number(
    default: float | None, holds: Callable[[float], bool], words: str, kept: Any = lambda v: v
) -> Any:
    return _field(default, lambda v: _is_number(v) and holds(v), words, kept)


def _field(default: Any, holds: Callable[[Any], bool], words: str, kept: Any = lambda v: v) -> Any:
    return field(default=default, metadata={"holds": holds, "words": words, "kept": kept})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
