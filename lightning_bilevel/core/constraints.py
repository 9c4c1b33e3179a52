r"""Constraints beside the lower level: :math:`c_i(x, y) \le 0` for a few functions of x and y.

A bound on the fairness of a classifier is one, or a budget for weights. What a projection can do
belongs into the sets X and Y instead. A method with a smoothed penalty adds them to its merit as
further residuals beside R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bilevel.core.lower import Function
from lightning_bilevel.core.passes import Calls, Passes, Residuals, check_finite, check_scalar, leaf

__all__ = ["evaluate", "stacked"]

_NAME = "A constraint c"


def stacked(functions: Sequence[Function]) -> Function:
    """Return functions of (x, y), each of which returns a scalar, as one that returns a vector."""
    return lambda x, y: torch.stack([function(x, y) for function in functions])


def evaluate(terms: Sequence[Function], passes: Passes, x: Tensor, y: Tensor) -> Residuals:
    """Sum the constraints over chunks and processes; each counts as one pass of f.

    Args:
        terms: All constraints on a chunk of the data, as one function that returns a vector.
        passes: Sums over the processes, and counts.
        x: The upper-level variables.
        y: The lower-level variables.
    """
    w = leaf(torch.cat([x.detach(), y.detach()]))
    table = torch.stack([_rows(term, w, x.numel()) for term in terms]).sum(0)
    if passes.reduce is not None:
        table = passes.reduce(table)
    values, gradients = table[:, 0].tolist(), tuple(table[:, 1:].to(w.dtype))
    check_finite(_NAME, values, table[:, 1:].sum(1).tolist(), gradients, (x, y))
    passes.calls += Calls(upper=len(values))
    return Residuals(tuple(values), gradients)


def _rows(term: Function, w: Tensor, split: int) -> Tensor:
    """Return a row for each constraint: its value and its gradient, in float64."""
    rows = []
    with torch.enable_grad():
        for value in term(w[:split], w[split:]):
            check_scalar(_NAME, value)
            # The constraints of a chunk may share a part of their graph.
            (grad,) = (
                torch.autograd.grad(value, w, retain_graph=True, materialize_grads=True)
                if value.requires_grad
                else (torch.zeros_like(w),)
            )
            rows.append(torch.cat([value.detach().reshape(1).double(), grad.double()]))
    return torch.stack(rows)
