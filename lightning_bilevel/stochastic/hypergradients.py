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

__all__ = ["DARTS", "SOBA"]

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
        with torch.no_grad():
            for v in step.shadow.z:
                v.zero_()

    def add_gradients(self, step: Step, lower: Any, upper: Any) -> Numbers:
        x, y, v = step.upper, step.shadow.parameters, step.shadow.z
        kept = step.take([*x, *y])
        with step.same_draws():
            f = step.upper_loss(upper)
            step.backward(f)
        f_x, f_y = step.take(x), step.take(y)
        g_x, g_v = _product(step, lower, v)
        g = step.lower_loss(lower)
        step.backward(g)
        step.take(x)
        for parameters, terms, factor in (
            (x, f_x, 1.0),
            (x, g_x, -1.0),
            (v, g_v, 1.0),
            (v, f_y, -1.0),
        ):
            step.add(parameters, terms, factor)
        step.add([*x, *y], kept)
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
        x, y, z = step.upper, step.shadow.parameters, step.shadow.z
        kept = step.take([*x, *y])
        with step.same_draws():
            g = step.lower_loss(lower)
            step.backward(g)
        step.take(x)
        g_y = step.take(y)
        with torch.no_grad():
            for own, ahead in zip(y, z, strict=True):
                ahead.copy_(own)
        _add_to(z, g_y, -self.xi * step.options.accumulate)
        # The last evaluation draws for good.
        again = step.same_draws() if self.xi > 0 else nullcontext()
        with again, step.shadow.exchanged():
            f = step.upper_loss(upper)
            step.backward(f)
        f_x, p = step.take(x), step.take(y)
        g_x, _ = _product(step, lower, p, last=True) if self.xi > 0 else ([None] * len(x), [])
        step.add(x, f_x)
        # p is the gradient of f over the number of batches in a step.
        step.add(x, g_x, -self.xi * step.options.accumulate)
        step.add(y, g_y)
        step.add([*x, *y], kept)
        return Numbers(f.detach(), g.detach(), g.detach(), 0.0)


def _product(
    step: Step, batch: Any, v: Sequence[Tensor | None], last: bool = False
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the products of the second derivatives of g in xy and yy with v."""
    x, y = step.upper, step.shadow.parameters
    with torch.no_grad():
        known = [torch.zeros_like(p) if w is None else w for p, w in zip(y, v, strict=True)]
        length = torch.stack([w.square().sum() for w in known]).sum().sqrt()
        e = _LENGTH / torch.where(length > 0, length, _LENGTH)
    for sign in (1.0, -1.0):
        with torch.no_grad():
            moved = [p + sign * e * w for p, w in zip(y, known, strict=True)]
        again = nullcontext() if last and sign < 0 else step.same_draws()
        with again, exchanged(y, moved):
            step.backward(sign * step.lower_loss(batch))
    products = step.take([*x, *y])
    for product in products:
        if product is not None:
            product.div_(2 * e)
    return products[: len(x)], products[len(x) :]


@torch.no_grad()
def _add_to(values: Sequence[Tensor], terms: Sequence[Tensor | None], factor: float) -> None:
    for value, term in zip(values, terms, strict=True):
        if term is not None:
            value.add_(term, alpha=factor)
