r"""The point of IVSP's convergence theorem, found while the run goes on.

After n iterations the theorem promises an iteration in the second half,
:math:`\{\lfloor n/2 \rfloor + 1, \dots, n\}`, whose new point has small KKT residuals. (The paper
counts from 0: K = n - 1, and :math:`\hat k` is in :math:`[\lceil K/2 \rceil, K]`.) Its proof says
which one it is: one that does not update the penalty, with

.. math:: \omega_{k+1}^2 \le \sum_j \mu_j \omega_{j+1}^2 \Big/ \sum_j \mu_j

where j runs over the iterations of the second half without an update. The smallest
:math:`\omega` of these is such a one.

n is not known beforehand. The smallest of every possible second half could need a copy of every
point, so this file keeps two. The iterations are cut into blocks, which begin at
:math:`b_j = \lceil 2^{j/2} \rceil`, and the best point of the current block and of the one before
are kept. Let :math:`b_j \le n < b_{j+1}`: the two are the best of the iterations from
:math:`b_{j-1}` to n.

- They are of the second half: :math:`b_{j+1} = \lceil 2 \cdot 2^{(j-1)/2} \rceil \le 2 b_{j-1}`, so
  :math:`n \le 2 b_{j-1} - 1` and :math:`\lfloor n/2 \rfloor + 1 \le b_{j-1}`.
- They are the last :math:`n - b_{j-1} + 1` of its :math:`\lceil n/2 \rceil` iterations: up to
  rounding a share of at least :math:`2 - \sqrt 2`, or 58 %, and all for
  :math:`n = 2 b_{j-1} - 1`.
- The theorem's rates hold for them. In its proof the sum of :math:`\mu_j \omega_{j+1}^2` over fewer
  iterations is bounded by the same constant, and the sum of their :math:`\mu_j` is smaller by a
  bounded factor only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_bilevel.solvers.record import PenaltyInfo

__all__ = ["Kept", "begins_block", "best", "forget", "keep"]

# The kept points: that of the current block and that of the block before.
_NOW = "proved"
_BEFORE = "before"


@dataclass(frozen=True)
class Kept:
    """A kept point.

    :class:`~lightning_bilevel.solvers.proved.ProvedPoint` documents what is not listed here.

    Attributes:
        w: The point (x, y) in the solver's units; empty if the block has none.
        omega: inf if the block has none.
    """

    w: Tensor
    iteration: int
    omega: float
    multiplier: float
    feasibility_bound: float
    complementarity_bound: float

    @classmethod
    def load(cls, memory: dict[str, Any], name: str) -> Kept:
        """Read it from the state of a run."""
        saved = {field: memory.get(f"{name}_{field}") for field in _FIELDS}
        return cls(**{field: value for field, value in saved.items() if value is not None})

    def save(self, memory: dict[str, Any], name: str) -> None:
        """Write it into the state of a run, as tensors and numbers."""
        memory.update({f"{name}_{field}": value for field, value in vars(self).items()})


_FIELDS = tuple(Kept.__dataclass_fields__)


def begins_block(n: int) -> bool:
    r"""Tell whether n is a :math:`\lceil 2^{j/2} \rceil`: whether a power of 2 is in
    :math:`((n-1)^2, n^2]`.
    """
    return (n * n).bit_length() > ((n - 1) ** 2).bit_length()


def keep(memory: dict[str, Any], n: int, w: Tensor, info: PenaltyInfo) -> None:
    """Keep the new point of iteration n if it is the best of its block.

    Args:
        memory: The state of the run.
        n: The number of the iteration, from 1.
        w: The new point. It is kept as it is, without a copy: nothing writes into it.
        info: The record of the iteration.
    """
    if f"{_NOW}_w" not in memory:
        for name in (_NOW, _BEFORE):
            _nothing(w).save(memory, name)
    if begins_block(n):
        Kept.load(memory, _NOW).save(memory, _BEFORE)
        _nothing(w).save(memory, _NOW)
    if not info.penalty_updated and info.omega < memory[f"{_NOW}_omega"]:
        kept = Kept(
            w,
            n,
            info.omega,
            info.multiplier,
            info.feasibility_bound,
            info.complementarity_bound,
        )
        kept.save(memory, _NOW)


def forget(memory: dict[str, Any]) -> None:
    """Drop the kept points, because the run goes on with another problem."""
    for name in (_NOW, _BEFORE):
        for field in _FIELDS:
            memory.pop(f"{name}_{field}", None)


def best(memory: dict[str, Any], n: int) -> Kept | None:
    """Return the better of the kept points after n iterations; None if there is none.

    There is none if all of their iterations updated the penalty.
    """
    if f"{_NOW}_w" not in memory:
        return None
    points = [Kept.load(memory, name) for name in (_NOW, _BEFORE)]
    # The blocks {1} and {2} overlap in the proof above: after n = 2 only the latter counts.
    points = [kept for kept in points if kept.iteration > n // 2]
    return min(points, key=lambda kept: kept.omega, default=None)


def _nothing(w: Tensor) -> Kept:
    return Kept(w.new_empty(0), 0, math.inf, 0.0, math.inf, math.inf)
