"""Check the arguments of a solver and turn them into what a checkpoint may hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_bilevel.solvers.schedule import Power, is_number

__all__ = ["checked_arguments"]


def checked_arguments(
    solver: str,
    given: Mapping[str, Any],
    *,
    schedules: Iterable[str] = (),
    positive: Iterable[str] = (),
    nonnegative: Iterable[str] = (),
    whole: Iterable[str] = (),
    counts: Iterable[str] = (),
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
        counts: Names of arguments that must be a whole number of at least 0.
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
    for name in positive:
        require(name, is_number(given[name]) and given[name] > 0, "positive and finite")
    for name in nonnegative:
        require(name, is_number(given[name]) and given[name] >= 0, "nonnegative and finite")
    for name in whole:
        is_whole = is_number(given[name]) and given[name] == int(given[name]) >= 1
        require(name, is_whole, "a positive whole number")
        result[name] = int(given[name])
    for name in counts:
        is_count = is_number(given[name]) and given[name] == int(given[name]) >= 0
        require(name, is_count, "a whole number of at least 0")
        result[name] = int(given[name])
    for name, values in (choices or {}).items():
        require(name, given[name] in values, " or ".join(repr(v) for v in values))
    return result
