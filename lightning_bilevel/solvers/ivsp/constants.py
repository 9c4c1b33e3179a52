"""The constants of IVSP: conditions, schedules, and the reason of an estimated one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.solvers.constants import (
    Constants,
    between,
    choice,
    nonnegative,
    positive,
    whole,
)
from lightning_bilevel.solvers.ivsp.smoothing import (
    Huber,
    Smoothing,
    SmoothingName,
    Softplus,
    prox_accuracy,
    smoothing_parameter,
)

# The constants that the paper sets per task. If all of them are given, IVSP is the paper's
# algorithm.
PER_TASK = ("rho", "sigma", "mu0", "block", "gamma0", "zeta_bar", "L_init", "L_xy", "L_yy")
# The constants that are the same for all tasks of the paper. The adaptive rules scale c1, L_min and
# L_max by L_init.
PAPER: dict[str, Any] = {
    "c1": 1e-4,
    "c2": 1.0,
    "L_min": 1e-11,
    "L_max": 1e11,
    "B_R": 1e3,
    "bb": "short",
    "inner": "gradient",
}
# Why an estimated constant has its value.
_REASONS = {
    "L_yy": "curvature of the lower level",
    "sigma": "as nonconvex as that curvature allows",
    "rho": "1/(4 L_yy), or 1/L_yy for a convex lower level",
    "mu0": "5 delta",
    "block": "iterations per smoothing",
    "zeta_bar": "first accuracy delta/10, then half of what a step promises",
    "gamma0": "f and the gap pull alike at the start",
    "L_init": "curvature of the penalty function",
    "L_xy": "how the lower level's gradient in x changes with y",
}


@dataclass(frozen=True, kw_only=True)
class IVSPConstants(Constants):
    """All constants; :class:`~lightning_bilevel.solvers.ivsp.solver.IVSP` says what they are.

    One that is None is estimated at the first step, but for B_R, bb and inner of the adaptive
    rules, where None is a rule of its own.
    """

    rho: float = positive(None)
    sigma: float = nonnegative(None)
    delta: float = positive(1e-3)
    mu0: float = positive(None)
    block: int = whole(None)
    r: float = between(1 / 3, 0, 1)
    q: float = positive(None)
    gamma0: float = positive(None)
    zeta_bar: float = positive(None)
    c1: float = positive(None)
    c2: float = positive(None)
    L_init: float = positive(None)
    bb: Literal["short", "long"] = choice(None, "short", "long")
    L_min: float = positive(None)
    L_max: float = positive(None)
    L_xy: float = nonnegative(None)
    L_yy: float = nonnegative(None)
    inner: Literal["gradient", "accelerated"] = choice(None, "gradient", "accelerated")
    B_R: float = nonnegative(None)
    theta_low: float = positive(1e-24)
    theta_hat: float = between(1.99, 0, 2)
    smoothing: SmoothingName = choice("huber", "huber", "softplus")
    fixed_L: float = positive(None)
    max_trials: int = whole(100)
    max_inner: int = whole(10_000)
    rules: Literal["paper", "own"] = choice(None, "paper", "own")
    keep_proved: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rules == "paper" and self.missing:
            raise ValueError(
                f"`IVSP(rules='paper')` needs {', '.join(self.missing)} too: with the paper's "
                "rules nothing is chosen. Leave out `rules`, or say `rules='own'`, to let IVSP "
                "choose."
            )
        if self.rho is not None and self.sigma is not None:
            Envelope(rho=self.rho, sigma=self.sigma, delta=self.delta)
        if self.q is None:
            object.__setattr__(self, "q", 1 / self.r + 0.01)

    @property
    def name(self) -> str:
        return "IVSP"

    def warn(self) -> None:
        if self.q <= 1 / self.r:
            warnings.warn(
                f"`IVSP(q={self.q!r})` is not above 1/r = {1 / self.r:g}: the method runs, but its "
                "rate is proved only for q > 1/r.",
                stacklevel=5,
            )

    @property
    def missing(self) -> tuple[str, ...]:
        """The constants per task that are None; L_init is not needed with a fixed L."""
        needed = (name for name in PER_TASK if name != "L_init" or self.fixed_L is None)
        return tuple(name for name in needed if getattr(self, name) is None)

    @property
    def envelope(self) -> Envelope:
        """The Moreau envelope, in the unit of y."""
        return Envelope(rho=self.rho, sigma=self.sigma, delta=self.delta)

    @property
    def phi(self) -> Smoothing:
        """The smoothed plus function."""
        return Softplus() if self.smoothing == "softplus" else Huber()

    def mu(self, k: int) -> float:
        """Return the smoothing of iteration k."""
        return smoothing_parameter(k, self.mu0, self.block, self.r)

    def zeta(self, k: int) -> float:
        """Return the scheduled accuracy of iteration k."""
        return prox_accuracy(self.mu(k), self.zeta_bar, self.q)

    def more_curved(self, factor: float, estimated: Iterable[str]) -> dict[str, float]:
        """Return the estimated constants that change if the curvature is ``factor`` times L_yy."""
        L_yy = factor * self.L_yy
        changed = {"L_yy": L_yy}
        if "rho" in estimated:
            changed["rho"] = self.rho / factor
        if "sigma" in estimated:
            changed["sigma"] = min(L_yy, 0.5 / changed.get("rho", self.rho))
        return changed


def explain(c: IVSPConstants, estimated: Iterable[str], unit: float) -> list[tuple[str, str]]:
    """Return each estimated constant with its value and the reason, in words."""
    names = set(estimated)
    rows = [(n, f"{getattr(c, n):.4g} ({why})") for n, why in _REASONS.items() if n in names]
    return (
        [*rows, ("unit of x", f"{unit:g} (from the gradients of the gap in x and y)")]
        if rows
        else []
    )


def safe_L(
    c: IVSPConstants,
    seen: float = 0.0,
    L_f: float = 0.0,
    L_R: float = 0.0,
    theta_hat: float | None = None,
) -> float:
    r"""Return the curvature above which every step descends: what a fixed L has to be.

    With a fixed L (the paper's Strategy I) no trial is tested. The paper proves the descent of its
    merit function for

    .. math::
        L \ge L_{\text{safe}} = \max\Bigl\{\frac{\underline\vartheta}{\hat\vartheta},\;
          \frac{c_1 + \gamma_0 \mu_0 L_f + L_G}{2 - \hat\vartheta}\Bigr\}, \qquad
        L_G = b_\phi B_R^2 + \mu_0 L_R

    where :math:`L_f` and :math:`L_R` are Lipschitz constants of the gradients of f and R, and
    :math:`B_R` bounds the gradient of R. A smaller L may descend too, but nothing is proved for it.

    Args:
        c: The constants of a run.
        seen: The largest norm of the gradient of R so far, which counts if B_R is None.
        L_f: Lipschitz constant of the gradient of f on C.
        L_R: Lipschitz constant of the gradient of R on C, see
            :func:`~lightning_bilevel.core.moreau.gap_lipschitz`.
        theta_hat: :math:`\hat\vartheta`, in (0, 2); None is that of the constants. Only the line
            search uses it. For a fixed L it is a constant of the proof alone, and 1 instead of the
            paper's 1.99 makes :math:`L_{\text{safe}}` a hundred times smaller.
    """
    if c.missing:
        raise ValueError(
            f"`IVSP.safe_L()` needs {', '.join(c.missing)}, which IVSP chooses at its first step: "
            "call it after that, or give all constants of the task."
        )
    B_R = c.B_R if c.B_R is not None else seen or PAPER["B_R"]
    c1 = PAPER["c1"] if c.c1 is None else c.c1
    theta = c.theta_hat if theta_hat is None else theta_hat
    L_G = c.phi.b * B_R**2 + c.mu0 * L_R
    return max(c.theta_low / theta, (c1 + c.gamma0 * c.mu0 * L_f + L_G) / (2 - theta))
