r"""When the sample of a run of IVSP is too small for its next step.

The sample is cut into k parts. On each of them R and the direction of the step are evaluated at the
current point (x, y) and its proximal point z:

.. math:: G_j = \gamma \nabla f_j + \phi'_\mu(R) \nabla R_j, \qquad j = 1, \dots, k

Their spread tells how far values and gradients of the sample are from those of all data. With the
share s of all data that the sample is (of f or g, whichever it comes from), the standard errors are

.. math::
    \mathrm{se}_R = \sqrt{\frac{1 - s}{k(k-1)} \sum_j (R_j - \bar R)^2}, \qquad
    \mathrm{se}_G = \sqrt{\frac{1 - s}{k(k-1)} \sum_j \|G_j - \bar G\|^2}

The sample is too small if :math:`\mathrm{se}_R > c_R\,\mu`, because :math:`\phi'_\mu` then takes
the noise of R for a violation; or if :math:`\mathrm{se}_G > \theta\,M` with the gradient mapping M
of the step, because the sampled problem is then solved as far as its noise allows, and M has not
grown since the last look. It does grow where the run leaves a saddle, as at the start of a network:
the direction is small there, but not because anything is solved.

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

from lightning_bilevel.core.moreau import Envelope, evaluate_gap
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import Product
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.ivsp.constants import Constants
from lightning_bilevel.solvers.ivsp.search import Merit

__all__ = ["Noise", "corrected", "noise_of"]

# c_R and theta. They were chosen on MNIST.
_VALUE = 0.25
_GRADIENT = 1.5


class Noise(NamedTuple):
    """How far a sample is from all data, next to what the run needs.

    Attributes:
        value: The standard error of R.
        gradient: The standard error of the direction.
        smoothing: mu.
        mapping: M.
    """

    value: float
    gradient: float
    smoothing: float
    mapping: float

    def is_too_large(self, before: float | None) -> bool:
        """Tell whether the sample is too small.

        Args:
            before: The mapping at the last look at this sample, if there was one.
        """
        if self.value > _VALUE * self.smoothing:
            return True
        solved = self.gradient > _GRADIENT * self.mapping
        return solved and before is not None and self.mapping <= before


def noise_of(
    parts: Sequence[BilevelProblem],
    point: tuple[Tensor, Tensor, Tensor],
    envelope: Envelope,
    merit: Merit,
    residual: float,
    length: float,
) -> Noise:
    """Measure the noise of a sample.

    Args:
        parts: f and g on disjoint parts of the sample.
        point: x, y and z.
        envelope: The Moreau envelope.
        merit: The smoothed penalty function of the step.
        residual: R on the whole sample.
        length: The factor of the direction in the step.
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
    values = []
    directions = []
    errors = []
    for part in parts:
        gap = evaluate_gap(part.at(x, remember=False), y, z, envelope)
        upper = part.upper(x, y)
        f = merit.gamma * torch.cat([upper.grad_x, upper.grad_y])
        R = weight * torch.cat([gap.grad_x, gap.grad_y])
        values.append(rest_lower * gap.residual)
        directions.append(f + R)
        errors.append(rest_upper * f + rest_lower * R)
    moved = torch.stack(directions)
    shared = (moved != 0).sum(0) > 1
    feasible = Product([parts[0].upper_set, parts[0].lower_set], [x.numel(), y.numel()])
    w = torch.cat([x, y])
    step = w - feasible.project(w - length * moved.mean(0))
    return Noise(
        value=statistics.stdev(values) / math.sqrt(count),
        gradient=norm(torch.stack(errors).std(0)[shared]) / math.sqrt(count),
        smoothing=merit.mu,
        mapping=norm(step[shared]) / length,
    )


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
