"""The arguments of a solver, checked once, as a checkpoint may hold them."""

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
    choices: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a solver as they are stored, or refuse one that the method cannot run
    with.

    Args:
        solver: The solver's name, for the messages.
        given: The arguments.
        schedules: Those that are a positive number, a :class:`Power`, or its pair as it is stored;
            each becomes its pair.
        positive: Those that are a positive number.
        nonnegative: Those that are a number of at least 0.
        whole: Those that are a whole number of at least 1.
        choices: Those that are one of a few values, with the values.

    Example:
        >>> checked_arguments("MEHA", {"alpha": Power(1.0, -0.6), "beta": 0.02}, schedules=("alpha", "beta"))
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
        # A list is what YAML has for a pair.
        pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
        initial, power = (
            (value.initial, value.power)
            if isinstance(value, Power)
            else value
            if pair
            else (value, 0.0)
        )
        valid = is_number(initial) and initial > 0 and is_number(power)
        require(name, valid, "positive and finite, a `Power`, or the pair (initial, power)")
        result[name] = (float(initial), float(power))
    for name in positive:
        require(name, is_number(given[name]) and given[name] > 0, "positive and finite")
    for name in nonnegative:
        require(name, is_number(given[name]) and given[name] >= 0, "nonnegative and finite")
    for name in whole:
        require(
            name,
            is_number(given[name]) and given[name] == int(given[name]) >= 1,
            "a positive whole number",
        )
        result[name] = int(given[name])
    for name, values in (choices or {}).items():
        require(name, given[name] in values, " or ".join(repr(v) for v in values))
    return result
