"""The stage of a run on a growing sample, and what it has not seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_bilevel.core.passes import Calls

if TYPE_CHECKING:
    from lightning_bilevel.core.problem import BilevelProblem

__all__ = ["Stage", "Unseen"]


@dataclass(frozen=True)
class Stage:
    """How much of all data a problem is of.

    Attributes:
        samples: The number of samples, of the level that has more of them.
        total: That of all data.
        upper: The share of the upper level's samples that f is of.
        lower: The share of the lower level's samples that g is of.
    """

    samples: int
    total: int
    upper: float
    lower: float

    @property
    def is_last(self) -> bool:
        """Whether these are all data."""
        return self.samples == self.total

    def passes(self, calls: Calls) -> float:
        """Return how many passes over all data take as long as these calls."""
        above = calls.upper + calls.constraints
        return self.upper * above + self.lower * (calls.passes - above)

    def __str__(self) -> str:
        return f"a sample of {self.samples:,} of {self.total:,} samples"


@dataclass(frozen=True)
class Unseen:
    """Samples that a stage has not seen, for a test of what it has reached.

    Attributes:
        problem: f and g on them, as the solver's user measures x and y.
        upper: f on them; None if the stage has seen all samples of f.
        has_gap: Whether R on them tells anything: not where the stage has seen all samples of g,
            nor where y was solved for them alone.
        growth: How many times as many samples the next stage has.
    """

    problem: BilevelProblem
    upper: float | None
    has_gap: bool
    growth: float
