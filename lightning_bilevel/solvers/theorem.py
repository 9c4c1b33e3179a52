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

from lightning_bilevel.solvers.record import PenaltyInfo, evolve


@dataclass(frozen=True)
class TheoremPoint:
    r"""The point of a run that a convergence theorem speaks of, in the user's units.

    Attributes:
        x: The upper-level variables.
        y: The lower-level variables.
        multiplier: :math:`\tilde\lambda`, the multiplier that the theorem takes there.
        iteration: The number of the iteration that led there, from 1. The theorem counts from 0:
            its :math:`\hat k` is one less.
        iterations: How many iterations the run has made.
        omega: :math:`\omega`, the length of that iteration's step over its smoothing.
        feasibility_bound: What the violation :math:`\Phi^f` is at most; inf if the step is not
            small enough for the theorem's bounds.
        complementarity_bound: What :math:`\Phi^c` is at most; inf likewise.
    """

    x: Tensor
    y: Tensor
    multiplier: float
    iteration: int
    iterations: int
    omega: float
    feasibility_bound: float
    complementarity_bound: float

    @property
    def name(self) -> str:
        """Which point of the run it is, in words."""
        k = self.iteration - 1
        return f"the theorem's point, iteration {self.iteration} of {self.iterations} (k^ = {k})"

    def __str__(self) -> str:
        if math.isinf(self.feasibility_bound):
            return f"{self.name}; its step is not small enough for the theorem's bounds"
        return (
            f"{self.name}; bounds there: feasibility {self.feasibility_bound:.1e}, complementarity "
            f"{self.complementarity_bound:.1e}"
        )


@dataclass(frozen=True)
class Theorem:
    """What a run keeps for its theorem.

    Attributes:
        began: The iteration from which the theorem counts.
        changed: The last iteration before f, g or the point was changed from outside.
        now: The best point of the current block, if any.
        before: That of the block before.
    """

    began: int = 0
    changed: int = 0
    now: TheoremPoint | None = None
    before: TheoremPoint | None = None

    def keep(self, x: Tensor, y: Tensor, k: int, info: PenaltyInfo) -> Theorem:
        """Keep the new point of iteration k if it is the best of its block."""
        now, before = self.now, self.before
        if begins_block(k - self.began):
            now, before = None, now
        if not info.penalty_updated and info.omega < (math.inf if now is None else now.omega):
            bounds = info.feasibility_bound, info.complementarity_bound
            now = TheoremPoint(x, y, info.multiplier, k, k, info.omega, *bounds)
        return evolve(self, now=now, before=before)

    def restart(self, k: int) -> Theorem:
        """Count anew after iteration k: the run goes on with another problem or unit."""
        return Theorem(began=k, changed=self.changed)

    def best(self, n: int) -> TheoremPoint | None:
        """Return the better point after n iterations; None if all of them updated the penalty."""
        # The blocks {1} and {2} overlap in the proof above: after n = 2 only the latter counts.
        half = self._half(n)
        points = [p for p in (self.now, self.before) if p is not None and p.iteration > half]
        if not points or self.was_changed(n):
            return None
        point = min(points, key=lambda point: point.omega)
        return evolve(point, x=point.x.clone(), y=point.y.clone(), iterations=n)

    def was_changed(self, n: int) -> bool:
        """Whether f, g or the point changed from outside in the second half of n iterations."""
        return self.changed > self._half(n)

    def _half(self, n: int) -> int:
        return self.began + (n - self.began) // 2

    def plain(self) -> dict[str, Any]:
        points = {"now": self.now, "before": self.before}
        kept = {name: None if p is None else dict(vars(p)) for name, p in points.items()}
        return {"began": self.began, "changed": self.changed, **kept}

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Theorem:
        points = {n: saved[n] and TheoremPoint(**saved[n]) for n in ("now", "before")}
        return cls(saved["began"], saved["changed"], **points)


def begins_block(n: int) -> bool:
    r"""Whether n is a :math:`\lceil 2^{j/2} \rceil`: a power of 2 is in :math:`((n-1)^2, n^2]`."""
    return (n * n).bit_length() > ((n - 1) ** 2).bit_length()
