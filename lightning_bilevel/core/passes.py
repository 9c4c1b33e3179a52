"""One pass of a function: its sum over chunks and processes, and the gradients of the sum.

A value or gradient that is not finite raises an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, autograd

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.vectors import norm

Reduce = Callable[[Tensor], Tensor]
# One gradient per input; None where the function does not depend on it.
Gradients = Sequence[Tensor | None]
Inputs = tuple[Tensor, ...]
# One chunk of a function: its value, or the two values of a difference.
Term = Callable[[], tuple[Tensor, ...]]

NAMES = {"f": "The upper-level function f", "g": "The lower-level function g"}


@dataclass(frozen=True)
class Calls:
    """How often each evaluation was made.

    Attributes:
        upper: Evaluations of f, or of a further residual, with its gradients.
        lower: Evaluations of the gradient of g(x, .).
        gap: Evaluations of g(x, y) - g(x, z) with its gradients.
        products: Products of second derivatives of g with a vector, by double differentiation.
            Each counts as two passes: one forward and backward through g, and one through the graph
            of its gradient. A product by a central difference of gradients counts as a gap.
        values: Evaluations of g without a gradient. A backward pass takes about twice the time of a
            forward one, so three values count as one pass.
    """

    upper: int = 0
    lower: int = 0
    gap: int = 0
    products: int = 0
    values: int = 0

    @property
    def passes(self) -> int:
        """Forward and backward passes; a gap and a product are two passes each, a value a third."""
        return self.upper + self.lower + 2 * (self.gap + self.products) + self.values // 3

    def __add__(self, other: Calls) -> Calls:
        return Calls(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Calls) -> Calls:
        return Calls(*map(operator.sub, vars(self).values(), vars(other).values()))


class Residuals(NamedTuple):
    """The values of some functions at a point w = (x, y), and the gradient of each in w."""

    values: tuple[float, ...] = ()
    gradients: tuple[Tensor, ...] = ()


class Passes:
    """The passes of one problem: its sum over the processes, and the count of its evaluations.

    A function is a list of terms, one per chunk. The terms are evaluated and differentiated one
    after another, because the graphs of all chunks together do not fit into memory.

    Args:
        reduce: Sums a tensor over the processes that share the data; None for a single process.

    Attributes:
        calls: How often each evaluation was made so far.
    """

    def __init__(self, reduce: Reduce | None = None) -> None:
        self.reduce = reduce
        self.calls = Calls()
        # Whether a function has been differentiated twice, so that it need not be checked again.
        self._differentiable = False

    def value(self, name: str, terms: Sequence[Term], inputs: Inputs) -> float:
        """Return the sum of the terms without a gradient; only an error message uses the inputs."""
        with torch.no_grad():
            values = [check_scalar(name, value) for term in terms for value in term()]
        total = torch.stack(values).double().sum()
        number = float(total if self.reduce is None else self.reduce(total.reshape(1)))
        check_finite(name, [number], [], [], inputs)
        return number

    def differentiate(
        self,
        name: str,
        terms: Sequence[Term],
        inputs: Inputs,
        *,
        retain: bool = False,
        by: Callable[[Tensor], Gradients] | None = None,
    ) -> tuple[list[float], Gradients]:
        """Sum the values of the terms, and differentiate the value, or first - second of a pair.

        The gradients are those in the inputs, or what ``by`` returns: a vector for each input.
        """
        by = by or partial(autograd.grad, inputs=inputs, allow_unused=True, retain_graph=retain)
        totals: list[Tensor] = []
        grads: Gradients = [None] * len(inputs)
        with torch.enable_grad():
            for term in terms:
                values = [check_scalar(name, value) for value in term()]
                target = values[0] if len(values) == 1 else values[0] - values[1]
                if target.requires_grad:
                    grads = [_plus(*pair) for pair in zip(grads, by(target), strict=True)]
                found = [value.detach() for value in values]
                # float64: the Moreau gap is a small difference of large numbers.
                pairs = zip(totals, found, strict=True)
                totals = [a.double() + b for a, b in pairs] if totals else found
        if self.reduce is not None:
            return _sum_over_processes(self.reduce, name, totals, grads, inputs)
        # One stack needs one device sync.
        sums = [grad.sum() for grad in grads if grad is not None]
        numbers = torch.stack([*totals, *sums]).tolist()
        results = numbers[: len(totals)]
        check_finite(name, results, numbers[len(totals) :], grads, inputs)
        return results, grads

    def differentiate_twice(
        self, name: str, terms: Sequence[Term], y: Tensor, v: Tensor, inputs: Inputs
    ) -> tuple[float, Gradients]:
        """Return the sum of the terms, its gradient in y, and that of <gradient, v> in the inputs.

        No graph that the terms share is used up.
        """

        def twice(value: Tensor) -> Gradients:
            (slope,) = autograd.grad(value, (y,), create_graph=True, allow_unused=True)
            if slope is None or not slope.requires_grad:
                return [slope, *(None for _ in inputs)]
            if not (self._differentiable or _twice_differentiable(slope)):
                raise _no_second(name, "a function in it is marked once_differentiable")
            try:
                second = autograd.grad(slope, inputs, v, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                if "is not implemented" not in str(error):
                    raise
                raise _no_second(name, str(error)) from error
            return [slope.detach(), *second]

        (value,), grads = self.differentiate(name, terms, (y, *inputs), by=twice)
        self._differentiable = True
        return value, grads


def _sum_over_processes(
    reduce: Reduce, name: str, totals: list[Tensor], grads: Gradients, inputs: Inputs
) -> tuple[list[float], Gradients]:
    """Sum values and gradients over the processes.

    All of them go into one buffer, because each collective call costs more than its numbers.
    """
    # A process whose part does not depend on an input contributes zeros. The flags tell whether the
    # part of any process depends on it.
    flags = inputs[0].new_tensor([grad is not None for grad in grads], dtype=torch.float64)
    parts = [or_zeros(grad, v) for grad, v in zip(grads, inputs, strict=True)]
    buffer = reduce(
        torch.cat([torch.stack(totals).double(), flags, *(part.double() for part in parts)])
    )
    numbers, *sums = torch.split(buffer, [len(totals) + len(flags), *map(len, parts)])
    everything = torch.cat([numbers, torch.stack([part.sum() for part in sums])]).tolist()
    values, checks = everything[: len(totals)], everything[-len(sums) :]
    check_finite(name, values, checks, sums, inputs)
    present = everything[len(totals) : -len(sums)]
    return values, [
        part.to(v.dtype) if flag else None
        for part, flag, v in zip(sums, present, inputs, strict=True)
    ]


def leaf(v: Tensor) -> Tensor:
    """Return a vector that gradients can be taken in; it shares the memory of ``v``."""
    return v.detach().requires_grad_()


def or_zeros(grad: Tensor | None, v: Tensor) -> Tensor:
    """Return the gradient in v; it is 0 if the function does not depend on v."""
    return torch.zeros_like(v) if grad is None else grad


def coupled(name: str, grad: Tensor | None) -> Tensor:
    """Return the gradient in y, and refuse a function that does not depend on y."""
    if grad is None:
        raise ValueError(
            f"{NAMES[name]} does not depend on the lower-level variables y: a bilevel problem "
            "needs both functions to. Look for a `detach()`, a `no_grad()`, or a wrong level."
        )
    return grad


def _no_second(name: str, told: str) -> BilevelError:
    return BilevelError(
        f"{NAMES[name]} has no second derivatives here ({told}): take them as differences of "
        'gradients, `products="difference"` of the solver.'
    )


def _twice_differentiable(slope: Tensor) -> bool:
    """Return whether no function marked ``once_differentiable`` has computed a gradient.

    torch marks its result by a node that raises an error. That node has no inputs, so a backward
    pass to chosen inputs never comes there: it would take the result for a constant.
    """
    waiting, seen = [slope.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            if node.name().endswith("Error"):
                return False
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return True


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients; None is 0."""
    if a is None:
        return b
    return a if b is None else a + b


def check_scalar(name: str, value: object) -> Tensor:
    """Return what a function returned; refuse anything but a scalar tensor."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value
    got = type(value).__name__
    if isinstance(value, Tensor):
        got = f"tensor of shape {tuple(value.shape)}"
    raise TypeError(
        f"{NAMES.get(name, name)} returned a {got}: it must return a scalar tensor, such as a mean "
        "or a sum."
    )


def check_finite(
    name: str, values: list[float], sums: list[float], grads: Gradients, inputs: Inputs
) -> None:
    """Raise an error if a value or a gradient is not finite; ``sums`` are the gradients' sums."""
    # v - v is 0 for a finite number and NaN otherwise, so one sum tests all numbers. A gradient
    # whose sum is finite is finite.
    if sum(v - v for v in (*values, *sums)) == 0.0:
        return
    wrong = next((f"value {v}" for v in values if v - v != 0.0), None)
    if wrong is None:
        if all(grad is None or bool(grad.isfinite().all()) for grad in grads):
            return  # the sum has overflowed where no entry has
        wrong = "gradient with NaN or infinite entries"
    sizes = ", ".join(f"{norm(v.detach()):.3g}" for v in inputs)
    many = "s" if len(inputs) > 1 else ""
    raise NonFiniteError(
        f"{NAMES.get(name, name)} returned a {wrong} at a point with norm{many} {sizes}."
    )
