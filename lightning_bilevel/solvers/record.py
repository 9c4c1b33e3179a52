"""The record of an outer iteration.

Loggers, callbacks and comparisons see of a solver nothing but its records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, TypeVar

from lightning_bilevel.core.problem import Calls

T = TypeVar("T")
# Attributes of a record.
Keys = tuple[str, ...]

# The attributes that are logged under another name than their own.
_TAGS = {"residual": "moreau_gap", "mu": "smoothing", "gamma": "penalty"}


def evolve(frozen: T, **fields: Any) -> T:
    """Do what ``dataclasses.replace`` does, which takes a hundredth of a cheap iteration."""
    made: T = object.__new__(type(frozen))
    vars(made).update(vars(frozen), **fields)
    return made


@cache
def tag_of(attribute: str) -> str:
    """Return the logged name of an attribute of a record."""
    return f"bilevel/{_TAGS.get(attribute, attribute)}"


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    r"""The record of one outer iteration.

    A method fills in the first three fields, and lr if no constant is its step size;
    :class:`~lightning_bilevel.solvers.base.BilevelOptimizer` fills in the rest.

    Attributes:
        upper: f at the last point where the iteration evaluated it (for IVSP the new point; each
            method says which).
        lower: g(x, y), likewise.
        inner_iterations: Gradient steps on the lower level.
        lr: The step size of the upper level, which a LearningRateMonitor shows.
        iteration: The number of the iteration, from 1.
        step: :math:`\|w^{k+1} - w^k\|`, in the units that the solver works in; computed if the
            method leaves it at nan.
        calls: Evaluations of f and g.
        passes: Forward and backward passes since the start of the run. One over a sample of the
            data counts as its share of all data.
        optimization_time: Seconds spent in the solver since the start of the run.
        multiplier: The weight of the gap g(x, y) - g(x, z) in this iteration; nan for a method
            without an inner variable z.
    """

    upper: float
    lower: float
    inner_iterations: int
    multiplier: float = math.nan
    lr: float | None = None
    iteration: int = 0
    step: float = math.nan
    calls: Calls = field(default_factory=Calls)
    passes: float = 0
    optimization_time: float = 0.0

    # The attributes that an ordinary progress bar shows, and those that are logged at the interval.
    SHOWN: ClassVar[Keys] = ("upper", "lower")
    LOGGED: ClassVar[Keys] = (*SHOWN, "step", "multiplier", "inner_iterations", "optimization_time")

    def metrics(self) -> dict[str, float]:
        """Return the numbers that loggers and callbacks see, by tag."""
        return self._known(self.LOGGED)

    def shown(self) -> dict[str, float]:
        """Return the numbers that a progress bar shows, by their short names."""
        return {tag.removeprefix("bilevel/"): v for tag, v in self._known(self.SHOWN).items()}

    def _known(self, attributes: Keys) -> dict[str, float]:
        """Return the numbers by tag; those that the step does not know are left out."""
        numbers = {tag_of(name): float(getattr(self, name)) for name in attributes}
        return {tag: number for tag, number in numbers.items() if not math.isnan(number)}


@dataclass(frozen=True)
class Progress:
    """How far a run has come, over all of its parts if it was resumed.

    Attributes:
        iterations: Outer iterations.
        inner_iterations: Gradient steps on the lower level.
        passes: Forward and backward passes, those over a sample as their share of all data.
        optimization_time: Seconds spent in the solver.
        values: Values of g that are no whole pass yet; three are one.
    """

    iterations: int = 0
    inner_iterations: int = 0
    passes: float = 0
    optimization_time: float = 0.0
    values: int = 0

    def after(
        self, inner: int, spent: Calls, share: tuple[float, float] | None, seconds: float
    ) -> Progress:
        """Add an iteration; ``share`` is that of the upper and the lower level's data."""
        spent += Calls(values=self.values)
        passes: float = spent.passes
        if share is not None:
            passes = share[0] * spent.upper + share[1] * (spent.passes - spent.upper)
        return Progress(
            self.iterations + 1,
            self.inner_iterations + inner,
            self.passes + passes,
            self.optimization_time + seconds,
            spent.values % 3,
        )


@dataclass(frozen=True, kw_only=True)
class AdjointInfo(StepInfo):
    """The record of a method that solves a linear system with the second derivative of g.

    Attributes:
        indefinite: Whether the system had a direction of curvature 0 or less in this iteration.
    """

    indefinite: bool


@dataclass(frozen=True, kw_only=True)
class StreamInfo(StepInfo):
    """The record of a step on a mini-batch; f and g are those of the batch, at the old point.

    The length of the step is not measured: it would be another device sync.

    Attributes:
        gap: g(x, y) - g(x, z) on the batch; nan for a method without an inner variable z.
        skipped: How many batches so far were left out because they were not finite.
    """

    gap: float = math.nan
    skipped: int = 0

    LOGGED: ClassVar[Keys] = (*StepInfo.LOGGED, "gap", "skipped")


@dataclass(frozen=True, kw_only=True)
class PenaltyInfo(StepInfo):
    r"""The record of a method with a line search on a smoothed penalty function.

    Its multiplier is :math:`\tilde\lambda_{k+1} = \phi'_{\mu_k}(\tilde R^{k+1}) / \gamma_k`.

    Attributes:
        residual: :math:`\tilde R^{k+1}`, the relaxed Moreau gap at the new point, or a larger
            residual of a constraint beside it.
        mu: :math:`\mu_k`, the smoothing.
        zeta: :math:`\zeta_{k+1}`, the accuracy of the Moreau evaluation at the new point.
        gamma: :math:`\gamma_k`, the inverse penalty.
        penalty_updated: Whether this iteration strengthened the penalty.
        penalty_updates: How often the penalty was strengthened so far, :math:`t_{k+1}`.
        trials: Trials of the line search.
        L: The accepted :math:`L_k`.
        L_start: The first trial's :math:`L_{k,0}`.
        gamma_next: :math:`\gamma_{k+1}`, the inverse penalty of the next iteration.
        threshold: :math:`2 a_\phi \mu_k`. A residual above it strengthens the penalty if the step
            is at most step_bound.
        step_bound: :math:`c_2 \mu_k \gamma_k`.
        halvings: How often the step of the inner loop has been halved.
        capped: Whether the line search used up its trials or ended at L_max.
    """

    residual: float
    mu: float
    zeta: float
    gamma: float
    penalty_updated: bool
    penalty_updates: int
    trials: int
    L: float
    L_start: float
    gamma_next: float
    threshold: float
    step_bound: float
    halvings: int
    capped: bool

    LOGGED: ClassVar[Keys] = (
        *StepInfo.LOGGED,
        "residual",
        "mu",
        "gamma",
        "penalty_updates",
        "trials",
    )
    SHOWN: ClassVar[Keys] = ("upper", "residual", "gamma")

    @property
    def omega(self) -> float:
        r""":math:`\omega_{k+1} = \|w^{k+1} - w^k\| / \mu_k`, which bounds the stationarity."""
        return self.step / self.mu

    @property
    def feasibility_bound(self) -> float:
        r""":math:`2 a_\phi \mu_k + \zeta_{k+1}`, which :math:`\Phi^f` of the new point is at most.

        It holds after a small step without an update of the penalty. Otherwise nothing is known,
        and this is inf.
        """
        if self.penalty_updated or self.step > self.step_bound:
            return math.inf
        return self.threshold + self.zeta

    @property
    def complementarity_bound(self) -> float:
        r""":math:`(2 a_\phi \mu_k + \zeta_{k+1}) / \gamma_k`, the same for :math:`\Phi^c`."""
        return self.feasibility_bound / self.gamma
