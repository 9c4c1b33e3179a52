r"""When the sample of a run of IVSP is too small for its next step.

The sample is cut into k parts. On each of them R and the direction of the step are evaluated at the
current point (x, y) and its proximal point z:

.. math::
    G_j = \gamma \nabla f_j + \phi'_\mu(R)\,[\nabla g_j(x, y) - \nabla g_j(x, z)],
    \qquad j = 1, \dots, k

The gradient of R in y is :math:`\nabla_y g(x, y) - (y - z)/\rho`, but z follows the sample: at the
proximal point :math:`(y - z)/\rho = \nabla_y g(x, z)`, and of the same samples most of the noise of
both terms is the same. Without that pairing the noise of the direction came out sixty times too
large on 6,248 images.

Their spread tells how far values and gradients of the sample are from those of all data. With the
share s of all data that the sample is (of f or g, whichever it comes from), the standard errors are

.. math::
    \mathrm{se}_R = \sqrt{\frac{1 - s}{k(k-1)} \sum_j (R_j - \bar R)^2}, \qquad
    \mathrm{se}_G = \sqrt{\frac{1 - s}{k(k-1)} \sum_j \|G_j - \bar G\|^2}

Spread is not all: the weights of the samples, and features, are fitted to the sample. So f and R
are looked at on samples that the stage has not seen, :math:`f_U` and :math:`R_U`, too. The stage
ends if one of four things is so.

- **R weighs another amount on all data.** For an R' among :math:`R \pm \mathrm{se}_R` and
  :math:`s R + (1 - s) R_U`, :math:`|\phi'_\mu(R') - \phi'_\mu(R)|` is above :math:`c_R`.
- **The sampled problem is solved as far as its noise allows.** :math:`\mathrm{se}_G > \theta\,M`
  with the gradient mapping M of the step, and M has not grown since the last look. It does grow
  where the run leaves a saddle, as at the start of a network: the direction is small there, but not
  because anything is solved.
- **The sampled problem is solved as far as the run can.** Ten looks have found no smaller M.
- **What is gained does not carry over.** Since the last look f has fallen on the sample, and
  :math:`f_U` by less than 1/q of that, where the next stage has q times as many samples. Then an
  iteration of the next stage, q times as expensive, is the better use of the time.

Constants that IVSP has chosen on the first sample are corrected on each larger one. L_xy is
measured anew. The unit of x follows it, because it was chosen by the gradient of R in x, which at
the boundary of the constraint is a multiple of L_xy: with one weight per sample it falls as one
over the root of the number of samples. As at the start, the unit only grows, in powers of two. L_yy
needs no measurement: the inner loop corrects it where it diverges.

Only coordinates that several parts move count in :math:`\mathrm{se}_G` and M. The weight of a
sample, or the head of a few-shot task, belongs to one part: its spread is no noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import Product
from lightning_bilevel.core.vectors import norm, squared_distance
from lightning_bilevel.solvers.ivsp.constants import Constants
from lightning_bilevel.solvers.ivsp.search import Merit

__all__ = ["Noise", "carries_over", "corrected", "noise_of"]

# c_R and theta. They were chosen on MNIST.
_WEIGHT = 0.25
_GRADIENT = 1.5
# So many looks without a smaller mapping end a stage.
_PATIENCE = 10


class Noise(NamedTuple):
    """How far a sample is from all data, next to what the run needs.

    Attributes:
        weight: The error of the weight of R in the direction.
        gradient: The standard error of the direction.
        mapping: M.
    """

    weight: float
    gradient: float
    mapping: float

    def is_too_large(self, before: Sequence[float]) -> bool:
        """Tell whether the sample is too small.

        Args:
            before: The mappings at the earlier looks at this sample.
        """
        if self.weight > _WEIGHT:
            return True
        recent = (*before[1 - _PATIENCE :], self.mapping)
        earlier = before[: 1 - _PATIENCE]
        if earlier and min(recent) >= min(earlier):
            return True
        solved = self.gradient > _GRADIENT * self.mapping
        return solved and len(before) > 0 and self.mapping <= before[-1]


def carries_over(before: Sequence[float], now: Sequence[float], growth: float) -> bool:
    """Tell whether what f has fallen by in the sample is seen outside of it.

    Args:
        before: f on the sample, and f on samples that the stage has not seen, at the last look.
        now: The same now.
        growth: How many times as many samples the next stage has.
    """
    inside, outside = (then - value for then, value in zip(before, now, strict=True))
    return inside <= 0.0 or outside >= inside / growth


def noise_of(
    parts: Sequence[BilevelProblem],
    point: tuple[Tensor, Tensor, Tensor],
    envelope: Envelope,
    merit: Merit,
    residual: float,
    length: float,
    unseen: BilevelProblem | None,
) -> Noise:
    """Measure the noise of a sample.

    Args:
        parts: f and g on disjoint parts of the sample.
        point: x, y and z.
        envelope: The Moreau envelope.
        merit: The smoothed penalty function of the step.
        residual: R on the whole sample.
        length: The factor of the direction in the step.
        unseen: f and g on samples that the stage has not seen; None if that tells nothing.
    """
    x, y, z = point
    stage = parts[0].stage
    assert stage is not None
    count = len(parts)
    weight = merit.phi.slope(residual, merit.mu)
    # The share of a part, times the number of parts, is that of the sample.
    rest_upper, rest_lower = (
        math.sqrt(max(1.0 - count * share, 0.0)) for share in (stage.upper, stage.lower)
    )
    pull = (y - z) / envelope.rho
    values = []
    directions = []
    errors = []
    for part in parts:
        gap = part.at(x, remember=False).full_gap(y, z)
        upper = part.upper(x, y)
        f = merit.gamma * torch.cat([upper.grad_x, upper.grad_y])
        values.append(gap.value_y - gap.value_z)
        directions.append(f + weight * torch.cat([gap.grad_x, gap.grad_y - pull]))
        R = weight * torch.cat([gap.grad_x, gap.grad_y - gap.grad_z])
        errors.append(rest_upper * f + rest_lower * R)
    moved = torch.stack(directions)
    shared = (moved != 0).sum(0) > 1
    feasible = Product([parts[0].upper_set, parts[0].lower_set], [x.numel(), y.numel()])
    w = torch.cat([x, y])
    step = w - feasible.project(w - length * moved.mean(0))
    error = rest_lower * statistics.stdev(values) / math.sqrt(count)
    others = [residual - error, residual + error]
    if unseen is not None:
        others.append(residual + rest_lower**2 * (_gap_on(unseen, point, envelope) - residual))
    return Noise(
        weight=max(abs(merit.phi.slope(other, merit.mu) - weight) for other in others),
        gradient=norm(torch.stack(errors).std(0)[shared]) / math.sqrt(count),
        mapping=norm(step[shared]) / length,
    )


def _gap_on(
    problem: BilevelProblem, point: tuple[Tensor, Tensor, Tensor], envelope: Envelope
) -> float:
    """Return R on some samples, at the proximal point of others: it is at least that."""
    x, y, z = point
    lower = problem.at(x, remember=False)
    fallen = lower.value(y) - lower.value(z)
    return fallen - squared_distance(y, z) / (2 * envelope.rho) - envelope.delta


def corrected(c: Constants, coupling: float) -> tuple[dict[str, float], float]:
    """Return the constants of a larger sample that change, and the factor of the unit of x.

    Args:
        c: The constants so far.
        coupling: L_xy of the larger sample, in the unit that x is measured in.
    """
    if coupling == 0.0:
        return {}, 1.0
    shrunk = c.scaled_L_xy / coupling
    factor = 2.0 ** max(round(0.5 * math.log2(shrunk)), 0) if shrunk > 0.0 else 1.0
    return {"L_xy": coupling / c.own_unit, "own_unit": factor * c.own_unit}, factor
