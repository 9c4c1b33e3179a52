"""What the constants of IVSP have to satisfy."""

from __future__ import annotations

import math
import warnings
from typing import Any

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.solvers.ivsp.choose import CHOSEN, PAPER

__all__ = ["check_constants"]


def check_constants(c: dict[str, Any]) -> None:
    """Refuse constants that the method cannot run with."""

    def refuse(name: str, rule: str) -> None:
        raise ValueError(f"`IVSP({name}={c[name]!r})` must be {rule}.")

    def finite(value: Any) -> bool:
        return isinstance(value, (int, float)) and math.isfinite(value)

    given = {name: value for name, value in c.items() if value is not None or name not in CHOSEN}
    for name, value in given.items():
        if name not in ("smoothing", "bb", "inner", "fixed_L", "q") and not finite(value):
            refuse(name, "a finite number" + (", or None for a choice of IVSP's" if name in CHOSEN else ""))
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
        if given.get(name, 1) != int(given.get(name, 1)) or given.get(name, 1) < 1:
            refuse(name, "a positive whole number")
    if not 0.0 < c["r"] < 1.0:
        refuse("r", "between 0 and 1, so that the smoothing vanishes and the steps do not")
    if not 0.0 < c["theta_hat"] < 2.0:
        refuse("theta_hat", "between 0 and 2")
    if c["smoothing"] not in ("huber", "softplus"):
        refuse("smoothing", '"huber" or "softplus"')
    if c["bb"] not in ("short", "long", None):
        refuse("bb", '"short", "long", or None for a choice of IVSP\'s')
    if c["inner"] not in ("gradient", "accelerated"):
        refuse("inner", '"gradient" or "accelerated"')
    if given.get("L_min", 0.0) > given.get("L_max", PAPER["L_max"]):
        refuse("L_min", f"at most L_max={given.get('L_max', PAPER['L_max'])!r}")
    sigma = given.get("sigma", 0.0)
    try:
        Envelope(rho=given.get("rho", 0.5 / max(abs(sigma), 1.0)), sigma=sigma, delta=c["delta"])
    except ValueError as error:
        raise ValueError(f"`IVSP`: {error}") from None
    if c["q"] is not None and c["q"] <= 1 / c["r"]:
        warnings.warn(
            f"`IVSP(q={c['q']!r})` is not above 1/r = {1 / c['r']:g}: the method runs, but its rate is proved only for q > 1/r.",
            stacklevel=4,
        )
