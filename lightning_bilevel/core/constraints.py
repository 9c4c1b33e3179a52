r"""Constraints beside the lower level: :math:`c_i(x, y) \le 0` for a few functions of x and y.

A bound on the fairness of a classifier is one, or a budget for weights. What a projection can do
belongs into the sets X and Y instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.passes import (
    Calls,
    Gradients,
    Passes,
    Reduce,
    check_finite,
    check_scalar,
    leaf,
    or_zeros,
    plus,
)

__all__ = ["ConstraintTerm", "Constraints", "Limits", "weighted_constraints"]

# All constraints on one chunk of the data, as a function of x and y.
ConstraintTerm = Callable[[Tensor, Tensor], Sequence[Tensor]]


class Limits(NamedTuple):
    """The values of the constraints at a point w = (x, y), and the gradient of each in w."""

    values: tuple[float, ...] = ()
    gradients: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Constraints:
    r"""The functions :math:`c_i`, each a sum over the chunks of the data.

    Attributes:
        terms: One function per chunk, which returns a scalar for each constraint; none for a
            process without data.
    """

    terms: tuple[ConstraintTerm, ...]

    @classmethod
    def of(cls, given: Any) -> Constraints:
        """Return what ``BilevelProblem(constraints=...)`` was given."""
        if isinstance(given, Constraints):
            return given
        functions = tuple(given) if isinstance(given, Sequence) else ()
        if not functions or not all(callable(function) for function in functions):
            raise TypeError(
                f"`BilevelProblem(constraints={given!r})` must be a non-empty list of functions of "
                "(x, y), each of which returns a scalar that is to be at most 0."
            )
        return cls((lambda x, y: [function(x, y) for function in functions],))

    def in_units(self, upper: float, lower: float) -> Constraints:
        """Return the same in the variables u, v with x = upper * u and y = lower * v."""
        return Constraints(tuple(_scaled(term, upper, lower) for term in self.terms))

    def weighted(self, weight: float) -> Constraints:
        """Return weight * c: the part of a process, which has no terms if it has no data."""
        if weight == 0.0:
            return Constraints(())
        return Constraints(tuple(weighted_constraints(term, weight) for term in self.terms))

    def at(self, passes: Passes, x: Tensor, y: Tensor) -> Limits:
        """Evaluate the constraints with their gradients; each counts as one pass."""
        w = leaf(torch.cat([x.detach(), y.detach()]))
        values: list[Tensor] = []
        gradients: Gradients = []
        with torch.enable_grad():
            for term in self.terms:
                new_values = _checked(term(w[: x.numel()], w[x.numel() :]))
                if values and len(values) != len(new_values):
                    raise ValueError(_another_number(len(values), len(new_values)))
                new_gradients = [_gradient(value, w) for value in new_values]
                gradients = (
                    [plus(a, b) for a, b in zip(gradients, new_gradients, strict=True)]
                    if values
                    else new_gradients
                )
                doubles = [value.detach().double() for value in new_values]
                values = (
                    [a + b for a, b in zip(values, doubles, strict=True)] if values else doubles
                )
        if passes.reduce is not None:
            values, gradients = _sum_over_processes(passes.reduce, values, gradients, w)
        known = [or_zeros(gradient, w.detach()) for gradient in gradients]
        numbers = torch.stack([*values, *(gradient.sum().double() for gradient in known)]).tolist()
        count = len(values)
        check_finite("c", numbers[:count], numbers[count:], known, (x, y))
        passes.calls += Calls(constraints=count)
        return Limits(tuple(numbers[:count]), tuple(known))


def weighted_constraints(term: ConstraintTerm, weight: float) -> ConstraintTerm:
    """Return weight * the constraints on a chunk."""
    if weight == 1.0:
        return term
    return lambda x, y: [weight * value for value in _checked(term(x, y))]


def _checked(values: Any) -> Sequence[Tensor]:
    if not isinstance(values, (list, tuple)) or not values:
        kind = "nothing" if values is None or values == [] else f"a {type(values).__name__}"
        raise TypeError(
            f"`constraints(batch)` returned {kind}: it must return a list of scalar tensors, one "
            "for each constraint, such as `[unfairness - 0.1]`."
        )
    for value in values:
        check_scalar("c", value)
    return values


def _gradient(value: Tensor, w: Tensor) -> Tensor | None:
    if not value.requires_grad:
        return None
    # The constraints of a chunk may share a part of their graph.
    (gradient,) = torch.autograd.grad(value, (w,), allow_unused=True, retain_graph=True)
    return gradient


def _sum_over_processes(
    reduce: Reduce, values: list[Tensor], gradients: Gradients, w: Tensor
) -> tuple[list[Tensor], Gradients]:
    """Sum values and gradients over the processes; one without data adds nothing."""
    mine = len(values)
    # A process without data learns from the others how many constraints there are.
    having, summed, squares = reduce(
        w.new_tensor([mine > 0, mine, mine * mine], dtype=torch.float64)
    ).tolist()
    count = round(summed / having)
    if squares != having * count * count:
        raise ValueError(_another_number(mine, count))
    zeros = w.detach().new_zeros(w.numel(), dtype=torch.float64)
    rows = [
        torch.cat([value.reshape(1), or_zeros(gradient, w.detach()).double()])
        for value, gradient in zip(values, gradients, strict=True)
    ] or [torch.cat([zeros.new_zeros(1), zeros])] * count
    table = reduce(torch.stack(rows).reshape(-1)).reshape(count, -1)
    return list(table[:, 0]), [row.to(w.dtype) for row in table[:, 1:]]


def _another_number(first: int, second: int) -> str:
    return (
        f"`constraints(batch)` returned {first} constraints on one part of the data and {second} "
        "on another: it must return the same ones for every part."
    )


def _scaled(term: ConstraintTerm, upper: float, lower: float) -> ConstraintTerm:
    return lambda u, v: term(upper * u, lower * v)
