"""The constants of IVSP: their conditions, and all of them as one object."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, Literal

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.solvers.ivsp.penalty import SmoothingName

__all__ = [
    "CHOSEN",
    "PAPER",
    "PER_TASK",
    "Constants",
    "check_constants",
    "missing_constants",
    "values_of",
]

# The constants that the paper sets per task. If all of them are given, IVSP is the paper's
# algorithm.
PER_TASK = ("rho", "sigma", "mu0", "block", "gamma0", "zeta_bar", "L_init", "L_xy", "L_yy")
# The constants that are the same for all tasks of the paper. Where IVSP chooses, it scales c1,
# L_min and L_max by L_init.
PAPER: dict[str, Any] = {
    "c1": 1e-4,
    "c2": 1.0,
    "L_min": 1e-11,
    "L_max": 1e11,
    "B_R": 1e3,
    "bb": "short",
    "inner": "gradient",
}
# The constants that may be None.
CHOSEN = (*PER_TASK, "c1", "c2", "L_min", "L_max", "B_R", "bb", "inner")


def missing_constants(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the constants per task that are None; L_init is not needed with a fixed L."""
    needed = (name for name in PER_TASK if name != "L_init" or given["fixed_L"] is None)
    return tuple(name for name in needed if given[name] is None)


@dataclass(frozen=True)
class Constants:
    r"""All constants of a run.

    :class:`~lightning_bilevel.solvers.ivsp.solver.IVSP` documents those that are not listed here.

    Attributes:
        rules: ``"paper"`` or ``"own"``.
        chosen: The names of the constants that IVSP has chosen itself.
        own_unit: The factor by which IVSP has multiplied the unit of x; a power of two.
        B_R: None means the largest norm seen so far.
        bb: None means the long step as long as it is accepted at once.
        fixed_L: None means a line search.
    """

    rules: Literal["paper", "own"]
    chosen: tuple[str, ...]
    own_unit: float
    rho: float
    sigma: float
    delta: float
    mu0: float
    block: int
    r: float
    q: float
    gamma0: float
    zeta_bar: float
    c1: float
    c2: float
    L_init: float
    bb: Literal["short", "long"] | None
    L_min: float
    L_max: float
    L_xy: float
    L_yy: float
    inner: Literal["gradient", "accelerated"] | None
    B_R: float | None
    theta_low: float
    theta_hat: float
    smoothing: SmoothingName
    fixed_L: float | None
    max_trials: int
    max_inner: int
    keep_proved: bool

    @classmethod
    def read(cls, group: dict[str, Any]) -> Constants:
        """Read them from a parameter group."""
        values = dict(zip(_NAMES, values_of(group), strict=True))
        return cls(**{**values, "chosen": tuple(values["chosen"])})

    @property
    def envelope(self) -> Envelope:
        """The Moreau envelope, in the solver's own units."""
        return Envelope(rho=self.rho, sigma=self.sigma, delta=self.delta)

    @property
    def scaled_L_xy(self) -> float:
        """L_xy in the unit that x is measured in."""
        return float(self.own_unit * self.L_xy)

    def more_curved(self, factor: float) -> dict[str, float]:
        """Return the constants that change if the curvature is ``factor`` times L_yy."""
        L_yy = factor * self.L_yy
        changed = {"L_yy": L_yy}
        if "rho" in self.chosen:
            changed["rho"] = self.rho / factor
        if "sigma" in self.chosen:
            changed["sigma"] = min(L_yy, 0.5 / changed.get("rho", self.rho))
        return changed


_NAMES = tuple(field.name for field in fields(Constants))
# The values of the constants in a parameter group, in the order of the fields.
values_of: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*_NAMES)


def check_constants(c: dict[str, Any]) -> None:
    """Refuse constants that the method cannot run with."""

    def refuse(name: str, rule: str) -> None:
        raise ValueError(f"`IVSP({name}={c[name]!r})` must be {rule}.")

    def finite(value: Any) -> bool:
        return isinstance(value, (int, float)) and math.isfinite(value)

    given = {name: value for name, value in c.items() if value is not None or name not in CHOSEN}
    for name, value in given.items():
        if name not in ("rules", "smoothing", "bb", "inner", "fixed_L", "q") and not finite(value):
            alternative = ", or None for a choice of IVSP's" if name in CHOSEN else ""
            refuse(name, "a finite number" + alternative)
    for name, otherwise in (("fixed_L", "the line search"), ("q", "1/r + 0.01")):
        if c[name] is not None and not (finite(c[name]) and c[name] > 0):
            refuse(name, f"positive and finite, or None for {otherwise}")
    for name in ("mu0", "gamma0", "zeta_bar", "c1", "c2", "L_init", "L_min", "L_max", "theta_low"):
        if given.get(name, 1.0) <= 0:
            refuse(name, "positive")
    for name in ("L_xy", "L_yy", "B_R"):
        if given.get(name, 0.0) < 0:
            refuse(name, "nonnegative")
    for name in ("block", "max_trials", "max_inner"):
        number = given.get(name, 1)
        if number != int(number) or number < 1:
            refuse(name, "a positive whole number")
    if not 0.0 < c["r"] < 1.0:
        refuse("r", "between 0 and 1, so that the smoothing vanishes and the steps do not")
    if not 0.0 < c["theta_hat"] < 2.0:
        refuse("theta_hat", "between 0 and 2")
    if c["smoothing"] not in ("huber", "softplus"):
        refuse("smoothing", '"huber" or "softplus"')
    if c["bb"] not in ("short", "long", None):
        refuse("bb", '"short", "long", or None for a choice of IVSP\'s')
    if c["inner"] not in ("gradient", "accelerated", None):
        refuse("inner", '"gradient", "accelerated", or None for a choice of IVSP\'s')
    if c["rules"] not in ("paper", "own", None):
        refuse(
            "rules",
            '"paper", "own", or None for the paper\'s where all constants of a task are given',
        )
    if not isinstance(c["keep_proved"], bool):
        refuse("keep_proved", "True or False")
    missing = missing_constants(c)
    if c["rules"] == "paper" and missing:
        raise ValueError(
            f"`IVSP(rules='paper')` needs {', '.join(missing)} too: with the paper's rules nothing "
            "is chosen. Leave out `rules`, or say `rules='own'`, to let IVSP choose."
        )
    L_max = given.get("L_max", PAPER["L_max"])
    if given.get("L_min", 0.0) > L_max:
        refuse("L_min", f"at most L_max={L_max!r}")
    if c["fixed_L"] is None and "L_init" in given:
        # Bounds that IVSP chooses are multiples of L_init.
        others = {} if missing else PAPER
        low = given.get("L_min", others.get("L_min", 0.0))
        high = given.get("L_max", others.get("L_max", math.inf))
        if not low <= given["L_init"] <= high:
            refuse(
                "L_init",
                f"between L_min={low!r} and L_max={high!r}, as every start of a line search: "
                "change one of them",
            )
    sigma = given.get("sigma", 0.0)
    try:
        Envelope(rho=given.get("rho", 0.5 / max(abs(sigma), 1.0)), sigma=sigma, delta=c["delta"])
    except ValueError as error:
        raise ValueError(f"`IVSP`: {error}") from None
    if c["q"] is not None and c["q"] <= 1 / c["r"]:
        warnings.warn(
            f"`IVSP(q={c['q']!r})` is not above 1/r = {1 / c['r']:g}: the method runs, but its "
            "rate is proved only for q > 1/r.",
            stacklevel=4,
        )
