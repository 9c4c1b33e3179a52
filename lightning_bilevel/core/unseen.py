"""What a stage of a run on a growing sample has not seen."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bilevel.core.problem import BilevelProblem

__all__ = ["Unseen"]


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
