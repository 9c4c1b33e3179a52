"""The arguments of a solver's constructor: checked, and in the form that a checkpoint may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_bilevel.solvers.schedule import Power, is_number, value_at

__all__ = ["arguments_of", "checked_arguments", "constants_of"]

_OTHERS = ("self", "params", "__class__")
# The kinds of numbers, each with its condition and its words.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "positive": (lambda v: is_number(v) and v > 0, "positive and finite"),
    "nonnegative": (lambda v: is_number(v) and v >= 0, "nonnegative and finite"),
    "whole": (lambda v: is_number(v) and v == int(v) >= 1, "a positive whole number"),
}


def arguments_of(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor from its ``locals()``, but for ``params``."""
    return {name: value for name, value in scope.items() if name not in _OTHERS}


def constants_of(scope: Mapping[str, Any], *, lr: str, **rules: Any) -> dict[str, Any]:
    """Check the arguments of a constructor; return the constants.

    Args:
        scope: The ``locals()`` of the constructor, before it sets others.
        lr: The argument that is the step of x, which loggers show as ``lr``.
        rules: Those of :func:`checked_arguments`.
    """
    constants = checked_arguments(type(scope["self"]).__name__, arguments_of(scope), **rules)
    step = constants[lr]
    rate = value_at(step, 0) if isinstance(step, tuple) else step
    return {"lr": rate, **constants}


def checked_arguments(
    solver: str,
    given: Mapping[str, Any],
    *,
    schedules: Iterable[str] = (),
    positive: Iterable[str] = (),
    nonnegative: Iterable[str] = (),
    whole: Iterable[str] = (),
    optional: Sequence[str] = (),
    choices: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a solver in the form that is stored; refuse invalid ones.

    Args:
        solver: The solver's name, for the messages.
        given: The arguments.
        schedules: Names of arguments that are a positive number, a :class:`Power`, or a stored pair
            (initial, power). Each is stored as a pair.
        positive: Names of arguments that must be a positive number.
        nonnegative: Names of arguments that must be a number of at least 0.
        whole: Names of arguments that must be a whole number of at least 1.
        optional: Names of arguments that may be None as well.
        choices: Names of arguments that must be one of a few values, with these values.

    Example:
        >>> steps = {"alpha": Power(1.0, -0.6), "beta": 0.02}
        >>> checked_arguments("MEHA", steps, schedules=("alpha", "beta"))
        {'alpha': (1.0, -0.6), 'beta': (0.02, 0.0)}
        >>> checked_arguments("MEHA", {"gamma": -1.0}, positive=("gamma",))
        Traceback (most recent call last):
        ValueError: `MEHA(gamma=-1.0)` must be positive and finite.
    """
    result = dict(given)

    def require(name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"`{solver}({name}={given[name]!r})` must be {rule}.")

    for name in schedules:
        value = given[name]
        if isinstance(value, Power):
            initial, power = value.initial, value.power
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
            initial, power = value  # a pair, which is a list in YAML
        else:
            initial, power = value, 0.0
        valid = is_number(initial) and initial > 0 and is_number(power)
        require(name, valid, "positive and finite, a `Power`, or the pair (initial, power)")
        result[name] = (float(initial), float(power))
    named = {"positive": positive, "nonnegative": nonnegative, "whole": whole}
    for kind, (holds, words) in _KINDS.items():
        for name in named[kind]:
            may_be_none = name in optional
            if may_be_none and given[name] is None:
                continue
            require(name, holds(given[name]), f"{words}, or None" if may_be_none else words)
            if kind == "whole":
                result[name] = int(given[name])
    for name, values in (choices or {}).items():
        require(name, given[name] in values, " or ".join(repr(v) for v in values))
    return result
