r"""A lower level that belongs to the batch: few-shot episodes, and meta-learning in general.

.. math::
    f(x, y) = \text{upper}(\text{features}_U(x), y), \qquad
    g(x, y) = \text{lower}(\text{features}_B(x), y)

The features of a batch are computed once. On them y is solved anew from its start, and x gets its
gradient by one backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.leaves import map_tensors
from lightning_bilevel.core.lower import Function, LowerTerm
from lightning_bilevel.core.passes import Calls, Passes, check_scalar, coupled, leaf, or_zeros
from lightning_bilevel.core.sample import RandomNumbers

__all__ = ["Adaptation", "Episode", "Slope"]


@dataclass(frozen=True)
class Adaptation:
    """How a lower level that belongs to the batch is solved on it.

    Attributes:
        steps: Gradient steps of the inner variable z on g, and then of y from there.
        lr: Their length.

    Example:
        >>> Adaptation(steps=0)
        Traceback (most recent call last):
        ValueError: `Adaptation(steps=0)` must be a whole number of at least 1.
    """

    steps: int = 20
    lr: float = 0.5

    def __post_init__(self) -> None:
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if not whole or self.steps < 1:
            raise ValueError(
                f"`Adaptation(steps={self.steps!r})` must be a whole number of at least 1."
            )
        if isinstance(self.lr, bool) or not 0.0 < self.lr < float("inf"):
            raise ValueError(f"`Adaptation(lr={self.lr!r})` must be positive and finite.")


class Slope(NamedTuple):
    """The values at the end of an adaptation, and the direction of x; all stay on the device.

    Attributes:
        upper: f(x, y).
        lower: g(x, y).
        inner: g(x, z).
        grad_x: The gradient of a f(., y) + b (g(., y) - g(., z)) in x.
    """

    upper: Tensor
    lower: Tensor
    inner: Tensor
    grad_x: Tensor


class Episode:
    """f and g on one batch at a fixed x, with the features of all chunks kept.

    Args:
        passes: Counts the evaluations.
        upper: f, one term per chunk.
        lower: g, one pair of terms per chunk: for y and for z.
        x: The upper-level variables.
    """

    def __init__(
        self,
        passes: Passes,
        upper: Sequence[LowerTerm],
        lower: Sequence[tuple[LowerTerm, LowerTerm]],
        x: Tensor,
    ) -> None:
        self._passes = passes
        self._upper = upper
        self._lower = lower
        self._x = leaf(x)
        with torch.enable_grad():
            self._graphs = (
                [term.features_at(self._x) for term in upper],
                [for_y.features_at(self._x) for for_y, _ in lower],
            )
        self._features = map_tensors(Tensor.detach, self._graphs)
        self._upper_slopes = _slopes(upper)
        # For y and for z.
        self._lower_slopes = (
            _slopes([for_y for for_y, _ in lower]),
            _slopes([for_z for _, for_z in lower]),
        )

    def inner_gradient(self, z: Tensor) -> Tensor:
        """Return the gradient of g(x, .) at z."""
        self._passes.calls += Calls(lower=1)
        slopes = self._lower_slopes[1]
        if slopes is not None:
            return _sum_of(slopes, self._features[1], z)
        z = leaf(z)
        with torch.enable_grad():
            value = self._g(self._features[1], z, inner=True)
        return _gradient("g", value, z)

    def gradient(self, y: Tensor, upper: float, lower: float) -> Tensor:
        """Return the gradient of upper * f + lower * g in y, by one graph or in closed form."""
        self._passes.calls += Calls(upper=1, lower=1)
        of_f = self._upper_slopes
        of_g = self._lower_slopes[0]
        if of_f is not None and of_g is not None:
            f_y = _sum_of(of_f, self._features[0], y)
            return f_y.mul_(upper).add_(_sum_of(of_g, self._features[1], y), alpha=lower)
        y = leaf(y)
        with torch.enable_grad():
            value = upper * self._f(self._features[0], y) + lower * self._g(self._features[1], y)
        return _gradient("g", value, y)

    def slope(self, y: Tensor, z: Tensor, upper: float, gap: float) -> Slope:
        """Return the gradient of upper * f + gap * (g(., y) - g(., z)) in x, for constant y and z.

        This is the one backward pass through the features, and it uses up their graph. g sees the
        same random numbers at y and z.
        """
        self._passes.calls += Calls(upper=1, gap=1)
        y, z = y.detach(), z.detach()
        for_upper, for_lower = self._graphs
        with torch.enable_grad():
            f = self._f(for_upper, y)
            numbers = RandomNumbers(y.device)
            at_y = self._g(for_lower, y)
            numbers.restore()
            at_z = self._g(for_lower, z, inner=True)
            value = upper * f + gap * (at_y - at_z)
        grad = None
        if value.requires_grad:
            (grad,) = torch.autograd.grad(value, self._x, allow_unused=True)
        return Slope(f.detach(), at_y.detach(), at_z.detach(), or_zeros(grad, self._x))

    def _f(self, features: list[Any], y: Tensor) -> Tensor:
        terms = zip(self._upper, features, strict=True)
        return _total("f", [(term.loss, part, term.outputs_at(y)) for term, part in terms])

    def _g(self, features: list[Any], y: Tensor, *, inner: bool = False) -> Tensor:
        pairs = zip(self._lower, features, strict=True)
        terms = [(pair[1] if inner else pair[0], part) for pair, part in pairs]
        return _total("g", [(term.loss, part, term.outputs_at(y)) for term, part in terms])


def _slopes(terms: Sequence[LowerTerm]) -> list[Function] | None:
    """Return the closed forms of all terms; None if one has none."""
    known = [term.slope for term in terms if term.slope is not None]
    return known if len(known) == len(terms) else None


def _sum_of(slopes: list[Function], features: list[Any], y: Tensor) -> Tensor:
    first, *rest = (slope(part, y) for slope, part in zip(slopes, features, strict=True))
    return sum(rest, first)


def _gradient(name: str, value: Tensor, y: Tensor) -> Tensor:
    grad = None
    if value.requires_grad:
        (grad,) = torch.autograd.grad(value, y, allow_unused=True)
    return coupled(name, grad)


def _total(name: str, parts: list[tuple[Function, Any, Any]]) -> Tensor:
    values = [loss(features, y) for loss, features, y in parts]
    for value in values:
        check_scalar(name, value)
    return values[0] if len(values) == 1 else torch.stack(values).sum()
