"""The constants of IVSP: their conditions, and all of them as one object."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, Literal

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.solvers.arguments import checked_arguments
from lightning_bilevel.solvers.ivsp.penalty import SmoothingName

__all__ = [
    "CHOSEN",
    "PAPER",
    "PER_TASK",
    "Constants",
    "checked_constants",
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
_STARTS = ("L_init", "L_min", "L_max", "fixed_L")
_POSITIVE = ("rho", "delta", "mu0", "q", "gamma0", "zeta_bar", "c1", "c2", "theta_low", *_STARTS)


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


def checked_constants(given: dict[str, Any]) -> dict[str, Any]:
    """Return the constants as they are stored; refuse those that the method cannot run with."""
    c = checked_arguments(
        "IVSP",
        given,
        positive=_POSITIVE,
        nonnegative=("sigma", "L_xy", "L_yy", "B_R"),
        whole=("block", "max_trials", "max_inner"),
        optional=(*CHOSEN, "fixed_L", "q"),
        choices={
            "smoothing": ("huber", "softplus"),
            "bb": ("short", "long", None),
            "inner": ("gradient", "accelerated", None),
            "rules": ("paper", "own", None),
        },
    )
    for name, end in (("r", 1), ("theta_hat", 2)):
        if not 0.0 < c[name] < end:
            raise ValueError(f"`IVSP({name}={c[name]!r})` must be between 0 and {end}.")
    missing = missing_constants(c)
    if c["rules"] == "paper" and missing:
        raise ValueError(
            f"`IVSP(rules='paper')` needs {', '.join(missing)} too: with the paper's rules nothing "
            "is chosen. Leave out `rules`, or say `rules='own'`, to let IVSP choose."
        )
    if c["rho"] is not None and c["sigma"] is not None:
        Envelope(rho=c["rho"], sigma=c["sigma"], delta=c["delta"])
    if c["q"] is None:
        c["q"] = 1 / c["r"] + 0.01
    if c["q"] <= 1 / c["r"]:
        warnings.warn(
            f"`IVSP(q={c['q']!r})` is not above 1/r = {1 / c['r']:g}: the method runs, but its "
            "rate is proved only for q > 1/r.",
            stacklevel=4,
        )
    return c
