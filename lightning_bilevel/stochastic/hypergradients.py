r"""Hypergradients on mini-batches: second derivatives as central differences of gradients.

.. math::
    \nabla^2 g(x, y)\, v \approx \frac{\nabla g(x, y + e v) - \nabla g(x, y - e v)}{2 e}

Gradients alone work with every strategy, with gradient checkpointing and with fused kernels; double
differentiation does not. The points have the same batch and the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_bilevel.stochastic.shadow import exchanged
from lightning_bilevel.stochastic.step import Method, Numbers, Step

# The length |e v| of the difference, as in the code of DARTS.
_LENGTH = 0.01


@dataclass(frozen=True)
class SOBA(Method):
    r"""Implicit differentiation in a single loop, all variables from the old point.

    v follows the solution of :math:`\nabla^2_{yy} g\, v = \nabla_y f`; the optimiser of v is a copy
    of y's, without weight decay:

    .. math::
        d_x = \nabla_x f - \nabla^2_{xy} g\, v, \qquad d_y = \nabla_y g, \qquad
          d_v = \nabla^2_{yy} g\, v - \nabla_y f

    Cost of a step: four passes.

    References:
        Dagréou, Ablin, Vaiter, Moreau: A Framework for Bilevel Optimization that Enables Stochastic
            and Global Variance Reduction Algorithms. NeurIPS 2022.
    """

    decays_shadow: ClassVar[bool] = False  # v solves a linear system

    def start(self, step: Step) -> None:
        for v in step.shadow.z:
            v.data.zero_()

    def add_gradients(self, step: Step, lower: Any, upper: Any) -> Numbers:
        x, y, v = step.variables
        with step.same_draws():
            f = step.upper_loss(upper)
            step.backward(f)
        f_y = step.take(y)
        _subtract_product(step, lower, v)
        d_x = step.take(x)
        for terms in (step.take(y), f_y):
            step.add(v, terms, -1.0)
        g = step.lower_loss(lower)
        step.backward(g)
        step.take(x)
        step.add(x, d_x)
        return Numbers(f.detach(), g.detach(), g.detach(), 0.0)


@dataclass(frozen=True)
class DARTS(Method):
    r"""Differentiable architecture search: f is differentiated through one step on g.

    .. math::
        z &= y - \xi \nabla_y g(x, y), \qquad p = \nabla_y f(x, z) \\
        d_x &= \nabla_x f(x, z) - \xi \nabla^2_{xy} g(x, y)\, p, \qquad d_y = \nabla_y g(x, y)

    Both variables move from the old point. Cost of a step: four passes; with :math:`\xi = 0`, the
    first-order form, two.

    Args:
        xi: The step that is differentiated; about the rate of y.

    References:
        Liu, Simonyan, Yang: DARTS: Differentiable Architecture Search. ICLR 2019.
    """

    xi: float = 0.01

    def add_gradients(self, step: Step, lower: Any, upper: Any) -> Numbers:
        x, y, z = step.variables
        # The gradients are those over the number of batches in a step.
        xi = self.xi * step.options.accumulate
        with step.same_draws():
            g = step.lower_loss(lower)
            step.backward(g)
        step.take(x)
        g_y = step.take(y)
        with torch.no_grad():
            for own, ahead, slope in zip(y, z, g_y, strict=True):
                ahead.copy_(own if slope is None else own.add(slope, alpha=-xi))
        # The last evaluation draws for good.
        with step.same_draws() if self.xi > 0 else nullcontext(), step.shadow.exchanged():
            f = step.upper_loss(upper)
            step.backward(f)
        p = step.take(y)
        if self.xi > 0:
            _subtract_product(step, lower, p, xi, last=True)
            step.take(y)
        step.add(y, g_y)
        return Numbers(f.detach(), g.detach(), g.detach(), 0.0)


def _subtract_product(
    step: Step, batch: Any, v: Sequence[Tensor | None], factor: float = 1.0, last: bool = False
) -> None:
    """Subtract the second derivatives of g in xy and yy, times v, from the gradients of x and y."""
    y = step.shadow.parameters
    length = torch.stack([w.detach().square().sum() for w in v if w is not None]).sum().sqrt()
    e = _LENGTH / torch.where(length > 0, length, _LENGTH)
    for sign in (1.0, -1.0):
        with torch.no_grad():
            moved = [p if w is None else p + sign * e * w for p, w in zip(y, v, strict=True)]
        again = nullcontext() if last and sign < 0 else step.same_draws()
        with again, exchanged(y, moved):
            step.backward(-sign * factor / (2 * e) * step.lower_loss(batch))
