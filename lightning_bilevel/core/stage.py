"""The stage of a run on a growing sample."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bilevel.core.passes import Calls

__all__ = ["Stage"]


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
