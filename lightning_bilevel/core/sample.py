r"""What one mini-batch tells about f and g at (x, y) and at an inner variable z.

.. math::
    f(x, y; U), \qquad g(x, y; B), \qquad g(x, z; B)

and f(x, z; U) for a method that needs it. A batch and its random numbers are the same at y and z.
So the gap g(x, y) - g(x, z) is an unbiased estimate of the gap on all data for a z that has
not seen B, and it is exactly 0 for z = y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.lower import LowerTerm
from lightning_bilevel.core.passes import (
    Calls,
    Gradients,
    Passes,
    Reduce,
    check_finite,
    check_scalar,
    coupled,
    leaf,
    or_zeros,
    plus,
)
from lightning_bilevel.core.vectors import squared_distance_on_device

__all__ = ["RandomNumbers", "Sample", "take_sample"]


class Sample(NamedTuple):
    """Values and gradients of f and g on one mini-batch.

    Attributes:
        upper: f(x, y).
        lower: g(x, y).
        inner: g(x, z).
        upper_x: The gradient of f in x.
        upper_y: The gradient of f in y.
        lower_x: The gradient of g(., y) in x.
        lower_y: The gradient of g(x, .) at y.
        inner_x: The gradient of g(., z) in x.
        inner_y: The gradient of g(x, .) at z.
        inner_upper: The gradients of f at (x, z), in x and in y; None if not asked for.
        distance: The squared distance of y and z; 0 if it was not asked for.
        seconds: The time that was handed in, as the mean over the processes.
    """

    upper: float
    lower: float
    inner: float
    upper_x: Tensor
    upper_y: Tensor
    lower_x: Tensor
    lower_y: Tensor
    inner_x: Tensor
    inner_y: Tensor
    inner_upper: tuple[Tensor, Tensor] | None = None
    distance: float = 0.0
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """g(x, y) - g(x, z)."""
        return self.lower - self.inner


class _Function:
    """The sum of a function over chunks and its gradients; all of it stays on the device."""

    def __init__(self, name: str, inputs: tuple[Tensor, Tensor]) -> None:
        self.name = name
        self.inputs = inputs
        self.total: Tensor | None = None
        self.grads: Gradients = [None, None]

    def add(self, value: Tensor, *, retain: bool = False) -> None:
        check_scalar(self.name, value)
        if value.requires_grad:
            grads = torch.autograd.grad(value, self.inputs, allow_unused=True, retain_graph=retain)
            self.grads = [plus(old, new) for old, new in zip(self.grads, grads, strict=True)]
        value = value.detach()
        # float64: the gap is a small difference of large numbers.
        self.total = value if self.total is None else self.total.double() + value

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the value and the gradients in x and in y (or z)."""
        assert self.total is not None
        grad_x, grad_y = self.grads
        return self.total, or_zeros(grad_x, self.inputs[0]), coupled(self.name, grad_y)


def take_sample(
    passes: Passes,
    upper: Sequence[tuple[LowerTerm, LowerTerm]],
    lower: Sequence[tuple[LowerTerm, LowerTerm]],
    point: tuple[Tensor, Tensor, Tensor],
    *,
    upper_at_z: bool,
    distance: bool,
    seconds: float,
) -> Sample:
    """Evaluate f at (x, y) and g at (x, y) and (x, z), by 3 passes and one transfer of numbers.

    Args:
        passes: Sums over the processes and counts.
        upper: f, one pair of terms per chunk: for y and for z.
        lower: g, likewise.
        point: x, y and z.
        upper_at_z: Whether to evaluate f at (x, z) too, by one more pass.
        distance: Whether to measure the squared distance of y and z.
        seconds: A time to be averaged over the processes.
    """
    passes.calls += Calls(upper=2 if upper_at_z else 1, lower=2)
    x, y, z = (leaf(v) for v in point)
    f, at_y, at_z = _Function("f", (x, y)), _Function("g", (x, y)), _Function("g", (x, z))
    f_at_z = _Function("f", (x, z))
    with torch.enable_grad():
        for for_y, for_z in upper:
            numbers = RandomNumbers(x.device) if upper_at_z else None
            f.add(for_y(x, y))
            if numbers is not None:
                numbers.restore()
                f_at_z.add(for_z(x, z))
        for for_y, for_z in lower:
            # y and z share the features, and so the graph behind them.
            shared = for_y.features is not None
            features = for_y.features_at(x)
            numbers = RandomNumbers(x.device)
            at_y.add(for_y.loss(features, for_y.outputs_at(y)), retain=shared)
            numbers.restore()
            at_z.add(for_z.loss(features, for_z.outputs_at(z)))
    functions = (f, at_y, at_z, *((f_at_z,) if upper_at_z else ()))
    results = [function.results() for function in functions]
    values = [value for value, _, _ in results]
    grads = [grad for _, *pair in results for grad in pair]
    if passes.reduce is not None:
        values, grads, seconds_of_all = _sum_over_processes(passes.reduce, values, grads, seconds)
        values = [*values, *seconds_of_all]
    if distance:
        values = [*values, squared_distance_on_device(z.detach(), y.detach())]
    # One stack needs one transfer from the device. A gradient whose sum is finite is finite.
    everything = torch.stack([*values, *(grad.sum() for grad in grads)]).tolist()
    sums = everything[len(values) :]
    for i, function in enumerate(functions):
        mine = slice(2 * i, 2 * i + 2)
        check_finite(function.name, [everything[i]], sums[mine], grads[mine], function.inputs)
    if passes.reduce is not None:
        total, count = everything[len(functions) : len(functions) + 2]
        seconds = total / count
    apart = everything[len(values) - 1] if distance else 0.0
    f_x, f_y, g_x, g_y, inner_x, inner_y = grads[:6]
    upper_value, lower_value, inner_value = everything[:3]
    return Sample(
        upper_value,
        lower_value,
        inner_value,
        f_x,
        f_y,
        g_x,
        g_y,
        inner_x,
        inner_y,
        inner_upper=(grads[6], grads[7]) if upper_at_z else None,
        distance=apart,
        seconds=seconds,
    )


def _sum_over_processes(
    reduce: Reduce, values: list[Tensor], grads: list[Tensor], seconds: float
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Sum values, gradients and times over the processes, all of them in one buffer."""
    like = grads[0]
    numbers = torch.stack([*(value.to(like.dtype) for value in values)])
    times = like.new_tensor([seconds, 1.0])
    buffer = reduce(torch.cat([numbers, times, *grads]))
    sizes = [len(values), 2, *(grad.numel() for grad in grads)]
    summed, shared, *parts = torch.split(buffer, sizes)
    return list(summed.unbind()), parts, list(shared.unbind())


class RandomNumbers:
    """Where torch's random numbers stand, to be drawn a second time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._host_state = torch.get_rng_state()
        self._cuda_state = None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)

    def restore(self) -> None:
        """Go back to the numbers at the start."""
        torch.set_rng_state(self._host_state)
        if self._cuda is not None and self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda)
