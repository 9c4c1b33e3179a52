"""One pass: a function summed over chunks and processes, differentiated once, and refused where a
number is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bilevel.core.errors import NonFiniteError
from lightning_bilevel.core.vectors import norm

__all__ = ["NAMES", "Calls", "Passes", "Reduce", "coupled", "leaf", "or_zeros"]

Reduce = Callable[[Tensor], Tensor]
# One gradient per input; None where the function does not depend on it.
Gradients = list[Tensor | None]

NAMES = {"f": "The upper-level function f", "g": "The lower-level function g"}


@dataclass(frozen=True)
class Calls:
    """How often each evaluation was made.

    Attributes:
        upper: Evaluations of f with its gradients.
        lower: Evaluations of the gradient of g(x, .).
        gap: Evaluations of g(x, y) - g(x, z) with its gradients.
    """

    upper: int = 0
    lower: int = 0
    gap: int = 0

    @property
    def passes(self) -> int:
        """Forward and backward passes of f or g; the gap goes forward through g twice."""
        return self.upper + self.lower + 2 * self.gap

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.upper + other.upper, self.lower + other.lower, self.gap + other.gap)

    def __sub__(self, other: Calls) -> Calls:
        return Calls(self.upper - other.upper, self.lower - other.lower, self.gap - other.gap)


class Passes:
    """The passes of one problem: its sum over the processes, and the count of its evaluations.

    A function is given as terms, one per chunk, which are evaluated and differentiated one after
    another: the graphs of all chunks together are what does not fit into memory.

    Args:
        reduce: The sum of a tensor over the processes that share the data; None if there is one
            process.
        calls: What has been counted so far; None is nothing.
    """

    def __init__(self, reduce: Reduce | None = None, calls: Calls | None = None) -> None:
        self.reduce = reduce
        self.calls = Calls() if calls is None else calls

    def value(
        self, name: str, terms: Sequence[Callable[[], Tensor]], inputs: tuple[Tensor, ...]
    ) -> float:
        """Return the sum of the terms, without a gradient; the inputs are for the error message."""
        with torch.no_grad():
            values = [term() for term in terms]
        for value in values:
            _check_scalar(name, value)
        total = torch.stack(values).double().sum()
        if self.reduce is not None:
            total = self.reduce(total.reshape(1))
        number = float(total)
        _check_finite(name, [number], [], [], inputs)
        return number

    def differentiate(
        self,
        name: str,
        terms: Sequence[Callable[[], Tensor]],
        inputs: tuple[Tensor, ...],
        *,
        retain: bool = False,
    ) -> tuple[float, Gradients]:
        """Return the sum of the terms, and its gradients in the inputs."""
        (value,), grads = self._sum(name, [_alone(term) for term in terms], _itself, inputs, retain)
        return value, grads

    def differentiate_difference(
        self,
        name: str,
        pairs: Sequence[Callable[[], tuple[Tensor, Tensor]]],
        inputs: tuple[Tensor, ...],
        *,
        retain: bool = False,
    ) -> tuple[tuple[float, float], Gradients]:
        """Return the sums of both terms of the pairs, and the gradients of first less second, by
        one backward pass.
        """
        (first, second), grads = self._sum(name, pairs, torch.sub, inputs, retain)
        return (first, second), grads

    def _sum(
        self,
        name: str,
        terms: Sequence[Callable[[], tuple[Tensor, ...]]],
        target: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        retain: bool,
    ) -> tuple[list[float], Gradients]:
        """Sum the terms' values, and differentiate what ``target`` makes of each term's values."""
        totals: list[Tensor] = []
        grads: Gradients = [None] * len(inputs)
        with torch.enable_grad():
            for term in terms:
                values = term()
                for value in values:
                    _check_scalar(name, value)
                differentiated = target(*values)
                if differentiated.requires_grad:
                    new_grads = torch.autograd.grad(
                        differentiated, inputs, allow_unused=True, retain_graph=retain
                    )
                    grads = [_plus(grad, new) for grad, new in zip(grads, new_grads, strict=True)]
                # float64: the Moreau gap is a small difference of large numbers.
                new = [value.detach() for value in values]
                totals = (
                    [a.double() + b for a, b in zip(totals, new, strict=True)] if totals else new
                )
        if self.reduce is not None:
            return _sum_over_processes(self.reduce, name, totals, grads, inputs)
        # One stack is one transfer from the device.
        known = torch.stack([*totals, *(grad.sum() for grad in grads if grad is not None)]).tolist()
        _check_finite(name, known[: len(totals)], known[len(totals) :], grads, inputs)
        return known[: len(totals)], grads


def _sum_over_processes(
    reduce: Reduce, name: str, totals: list[Tensor], grads: Gradients, inputs: tuple[Tensor, ...]
) -> tuple[list[float], Gradients]:
    """Sum values and gradients over the processes, all of them in one buffer: a collective costs
    more than its numbers.
    """
    # A process whose part does not depend on an input takes part with zeros; the flags tell whether
    # any part does.
    flags = inputs[0].new_tensor([grad is not None for grad in grads], dtype=torch.float64)
    parts = [
        v.new_zeros(v.numel()) if grad is None else grad
        for grad, v in zip(grads, inputs, strict=True)
    ]
    buffer = reduce(
        torch.cat([torch.stack(totals).double(), flags, *(part.double() for part in parts)])
    )
    numbers, *sums = torch.split(buffer, [len(totals) + len(flags), *(len(part) for part in parts)])
    known = torch.cat([numbers, torch.stack([part.sum() for part in sums])]).tolist()
    values, found, checks = (
        known[: len(totals)],
        known[len(totals) : -len(sums)],
        known[-len(sums) :],
    )
    _check_finite(name, values, checks, sums, inputs)
    return values, [
        part.to(v.dtype) if flag else None
        for part, flag, v in zip(sums, found, inputs, strict=True)
    ]


def leaf(v: Tensor) -> Tensor:
    """Return a vector as something to differentiate in; it shares the memory of the given one."""
    return v.detach().requires_grad_()


def or_zeros(grad: Tensor | None, v: Tensor) -> Tensor:
    """Return the gradient in v, which is 0 for a function that does not depend on it."""
    return torch.zeros_like(v) if grad is None else grad


def coupled(name: str, grad: Tensor | None) -> Tensor:
    """Return the gradient in y, on which both functions have to depend."""
    if grad is None:
        raise ValueError(
            f"{NAMES[name]} does not depend on the lower-level variables y: a bilevel problem "
            "needs both functions to. Look for a `detach()` or a `no_grad()` in it, or for "
            "parameters that were declared at the wrong level."
        )
    return grad


def _alone(term: Callable[[], Tensor]) -> Callable[[], tuple[Tensor]]:
    return lambda: (term(),)


def _itself(value: Tensor) -> Tensor:
    return value


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _check_scalar(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.ndim > 0:
        got = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"a {type(value).__name__}"
        )
        raise TypeError(
            f"{NAMES[name]} returned {got}: it must return a scalar tensor, such as a mean or a "
            "sum."
        )


def _check_finite(
    name: str,
    values: list[float],
    sums: list[float],
    grads: Sequence[Tensor | None],
    inputs: tuple[Tensor, ...],
) -> None:
    # x - x is 0 for a finite number and NaN otherwise: one test for all of them. A gradient whose
    # sum is finite is finite.
    if sum(v - v for v in (*values, *sums)) == 0.0:
        return
    wrong = next((f"value {v}" for v in values if v - v != 0.0), None)
    if wrong is None:
        if all(grad is None or bool(grad.isfinite().all()) for grad in grads):
            return  # the sum has overflowed where no entry has
        wrong = "gradient with NaN or infinite entries"
    sizes = ", ".join(f"{norm(v.detach()):.3g}" for v in inputs)
    raise NonFiniteError(
        f"{NAMES[name]} returned a {wrong} at a point with norm{'s' if len(inputs) > 1 else ''} "
        f"{sizes}."
    )
