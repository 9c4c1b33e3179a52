r"""The lower level g(x, .), split into parts that depend on x alone or on y alone.

.. math:: g(x, y) = \sum_{\text{chunks}} \text{loss}(\text{features}(x), \text{outputs}(y))

Features are computed once per x. The outputs of the last two points y are kept for later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.chunks import map_tensors
from lightning_bilevel.core.passes import Calls, Passes, coupled, leaf, or_zeros
from lightning_bilevel.core.stamp import Stamp

__all__ = [
    "FullGap",
    "Function",
    "Gap",
    "LowerLevel",
    "LowerTerm",
    "Part",
    "Products",
    "RecentPoints",
    "nothing",
    "rescaled",
    "weighted",
]

# A function of x and y.
Function = Callable[[Any, Any], Tensor]
# A part of g that depends on x alone or on y alone.
Part = Callable[[Tensor], Any]


@dataclass(frozen=True)
class LowerTerm:
    """g on one chunk of the data: loss(features(x), outputs(y)).

    Attributes:
        loss: The rest of g; without features and outputs it is g itself, a function of x and y.
        features: The part of g that depends on x alone; None passes x itself to the loss.
        outputs: The part of g that depends on y alone; None passes y itself to the loss.
    """

    loss: Function
    features: Part | None = None
    outputs: Part | None = None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.features_at(x), self.outputs_at(y))

    def features_at(self, x: Tensor) -> Any:
        """Return features(x)."""
        return x if self.features is None else self.features(x)

    def outputs_at(self, y: Tensor) -> Any:
        """Return outputs(y)."""
        return y if self.outputs is None else self.outputs(y)

    def in_units(self, upper: float, lower: float) -> LowerTerm:
        """Return the same in the variables u, v with x = upper * u and y = lower * v."""
        # The unit belongs to the function that takes the variable: the part, or else the loss.
        loss = rescaled(
            self.loss,
            upper if self.features is None else 1.0,
            lower if self.outputs is None else 1.0,
        )
        return LowerTerm(
            loss, _part_in_unit(self.features, upper), _part_in_unit(self.outputs, lower)
        )

    def weighted(self, weight: float) -> LowerTerm:
        """Return weight * g."""
        return LowerTerm(weighted(self.loss, weight), self.features, self.outputs)


class Gap(NamedTuple):
    """g(x, y) and g(x, z), and the gradients of their difference in x and of g(x, y) in y."""

    value_y: float
    value_z: float
    grad_x: Tensor
    grad_y: Tensor


class FullGap(NamedTuple):
    """g(x, y) and g(x, z), the gradient of their difference in x, and each in its own point."""

    value_y: float
    value_z: float
    grad_x: Tensor
    grad_y: Tensor
    grad_z: Tensor


class Products(NamedTuple):
    r"""Products of the second derivatives of g with a vector v, with the value and the gradient.

    Attributes:
        value: g(x, y).
        grad_y: :math:`\nabla_y g(x, y)`.
        yy: :math:`\nabla^2_{yy} g(x, y)\, v`.
        xy: :math:`\nabla_x \langle \nabla_y g(x, y), v \rangle`.
    """

    value: float
    grad_y: Tensor
    yy: Tensor
    xy: Tensor


class _Point(NamedTuple):
    """A point y as a leaf, and outputs(y) with its graph if several passes share it."""

    stamp: Stamp
    leaf: Tensor
    shared: Any = None

    def outputs(self, term: LowerTerm, *, constant: bool = False) -> Any:
        """Return the loss's second argument; ``constant`` leaves out its graph."""
        if self.shared is not None:
            return map_tensors(Tensor.detach, self.shared) if constant else self.shared
        return term.outputs_at(self.leaf.detach() if constant else self.leaf)


class RecentPoints:
    """The last two points y, for any x, each with outputs(y) and its graph; the newest is last."""

    def __init__(self) -> None:
        self._points: list[_Point] = []

    def at(self, y: Tensor, outputs: Part | None, remember: bool) -> _Point:
        """Return y as a leaf; with outputs(y) if y is among the points or is to be remembered."""
        found = next((point for point in self._points if point.stamp.is_still(y)), None)
        if outputs is None or (found is None and not remember):
            return _Point(Stamp(y), leaf(y))
        # A gap needs two points. The older one is dropped before a new one is computed, so there
        # are never three graphs.
        self._points = [point for point in self._points if point is not found][-1:]
        if found is None:
            new = leaf(y)
            with torch.enable_grad():
                found = _Point(Stamp(y), new, outputs(new))
        self._points.append(found)
        return found

    def forget(self) -> None:
        """Drop all points."""
        self._points = []


class LowerLevel:
    """g(x, .) at a fixed x; features(x) is computed once.

    Args:
        terms: g, one term per chunk.
        x: The upper-level variables.
        passes: Sums the terms and counts the evaluations.
        recent: The last points y, possibly from another x.
    """

    def __init__(
        self, terms: Sequence[LowerTerm], x: Tensor, passes: Passes, recent: RecentPoints
    ) -> None:
        self.x = leaf(x)
        self._stamp = Stamp(x)
        self._terms = terms
        self._passes = passes
        self._recent = recent
        # With several chunks no outputs are shared: the graphs of all chunks together do not fit
        # into memory.
        self._outputs = terms[0].outputs if len(terms) == 1 else None
        # The features with their graph, for the first gap. With several chunks they are computed
        # again chunk by chunk, for the same reason.
        self._graph: Any = None
        self._features: list[Any]
        # The point of the last call with ``keep``, and the gradient of g there.
        self._kept: tuple[Stamp, Tensor] | None = None
        if len(terms) == 1 and terms[0].features is not None:
            with torch.enable_grad():
                self._graph = terms[0].features(self.x)
            self._features = [map_tensors(Tensor.detach, self._graph)]
        else:
            with torch.no_grad():
                self._features = [
                    map_tensors(Tensor.detach, term.features_at(self.x)) for term in terms
                ]

    def is_at(self, x: Tensor) -> bool:
        """Tell whether this is g(x, .): x is the same tensor, and unchanged."""
        return self._stamp.is_still(x)

    def value(self, z: Tensor) -> float:
        """Return g(x, z) without a gradient, which counts as a third of a pass."""
        self._passes.calls += Calls(values=1)
        return self._passes.value("g", self._at(self._point(z)), (self.x, z))

    def gradient(self, z: Tensor, keep: bool = False) -> Tensor:
        """Return the gradient of g(x, .) at z.

        ``keep`` saves it for a gap g(x, z) - g(x, .) that follows and needs it.
        """
        return self.value_and_gradient(z, keep)[1]

    def value_and_gradient(self, z: Tensor, keep: bool = False) -> tuple[float, Tensor]:
        """Return g(x, z) and the gradient of g(x, .) at z; ``keep`` is that of :meth:`gradient`."""
        self._passes.calls += Calls(lower=1)
        # Points inside an inner loop are visited once, so they are not remembered.
        point = self._point(z, remember=keep)
        retain = point.shared is not None
        value, (grad,) = self._passes.differentiate(
            "g", self._at(point), (point.leaf,), retain=retain
        )
        slope = coupled("g", grad)
        if keep:
            self._kept = point.stamp, slope
        return value, slope

    def gap(self, y: Tensor, z: Tensor) -> Gap:
        """Return g(x, y), g(x, z) and the gradients of their difference, by one backward pass."""
        point = self._point(y)
        if self._kept is not None and self._kept[0].is_still(y):
            # The gradient in y was kept, so the backward pass goes to x only.
            (value_y, value_z), (grad_x,) = self._difference(point, z, (self.x,))
            grad_y = self._kept[1]
        else:
            (value_y, value_z), (grad_x, new) = self._difference(point, z, (self.x, point.leaf))
            grad_y = coupled("g", new)
        return Gap(value_y, value_z, or_zeros(grad_x, self.x), grad_y)

    def gap_x(self, y: Tensor, z: Tensor) -> tuple[float, Tensor]:
        """Return g(x, y), and the gradient of g(x, y) - g(x, z) in x alone."""
        (value_y, _), (grad,) = self._difference(self._point(y), z, (self.x,))
        return value_y, or_zeros(grad, self.x)

    def full_gap(self, y: Tensor, z: Tensor) -> FullGap:
        """Return what :meth:`gap` returns, and the gradient of g(x, .) at z.

        This too is one backward pass. Nothing is remembered: such points are visited once.
        """
        # Two points of their own: y and z may be one tensor, and then have a gradient each.
        first = _Point(Stamp(y), leaf(y))
        second = _Point(Stamp(z), leaf(z))
        inputs = (self.x, first.leaf, second.leaf)
        (value_y, value_z), (grad_x, grad_y, minus_grad_z) = self._differentiate_pair(
            first, second, inputs
        )
        return FullGap(
            value_y,
            value_z,
            or_zeros(grad_x, self.x),
            coupled("g", grad_y),
            -coupled("g", minus_grad_z),
        )

    def products(self, y: Tensor, v: Tensor) -> Products:
        """Return the products of the second derivatives of g at (x, y) with v, and the gradient.

        They are computed by double differentiation. No graph is kept.
        """
        point = self._point(y, remember=False)
        value, (grad_y, yy, xy) = self._twice(point, v, (point.leaf, self.x))
        return Products(value, coupled("g", grad_y), or_zeros(yy, y), or_zeros(xy, self.x))

    def curvature(self, y: Tensor, v: Tensor) -> Tensor:
        """Return the product of the second derivative of g in y with v alone; x is a constant."""
        point = self._point(y)
        _, (grad_y, yy) = self._twice(point, v, (point.leaf,))
        coupled("g", grad_y)
        return or_zeros(yy, y)

    def _twice(
        self, point: _Point, v: Tensor, inputs: tuple[Tensor, ...]
    ) -> tuple[float, list[Tensor | None]]:
        """Return g, its gradient in y, and the gradient of <gradient, v> in y, or in y and x."""
        self._passes.calls += Calls(products=1)
        in_y_alone = len(inputs) == 1

        def evaluate(term: LowerTerm, constant: Any) -> Tensor:
            if in_y_alone:
                features = constant
            elif self._graph is not None:
                features = self._graph
            else:
                features = term.features_at(self.x)
            return term.loss(features, point.outputs(term))

        terms = [
            partial(evaluate, term, constant)
            for term, constant in zip(self._terms, self._features, strict=True)
        ]
        return self._passes.differentiate_twice("g", terms, point.leaf, v, inputs)

    def _point(self, y: Tensor, remember: bool = True) -> _Point:
        return self._recent.at(y, self._outputs, remember)

    def _at(self, point: _Point) -> list[Callable[[], Tensor]]:
        """Return the terms of g at a point, with x as a constant."""

        def evaluate(term: LowerTerm, features: Any) -> Tensor:
            return term.loss(features, point.outputs(term))

        return [
            partial(evaluate, term, features)
            for term, features in zip(self._terms, self._features, strict=True)
        ]

    def _difference(
        self, y: _Point, z: Tensor, inputs: tuple[Tensor, ...]
    ) -> tuple[tuple[float, float], list[Tensor | None]]:
        """Differentiate g(x, y) - g(x, z) in x, or in x and y; z is a constant."""
        return self._differentiate_pair(y, self._point(z), inputs)

    def _differentiate_pair(
        self, y: _Point, z: _Point, inputs: tuple[Tensor, ...]
    ) -> tuple[tuple[float, float], list[Tensor | None]]:
        """Differentiate g(x, y) - g(x, z) in x, in x and y, or in x, y and z."""
        self._passes.calls += Calls(gap=1)
        # The backward pass uses up the graph of the features.
        graph = self._graph
        self._graph = None

        def pair(term: LowerTerm) -> tuple[Tensor, Tensor]:
            features = term.features_at(self.x) if graph is None else graph
            first = term.loss(features, y.outputs(term, constant=len(inputs) < 2))
            return first, term.loss(features, z.outputs(term, constant=len(inputs) < 3))

        pairs = [partial(pair, term) for term in self._terms]
        return self._passes.differentiate_difference(
            "g", pairs, inputs, retain=y.shared is not None
        )


def rescaled(function: Function, upper: float, lower: float) -> Function:
    """Return (u, v) -> function(upper * u, lower * v)."""
    if upper == lower == 1.0:
        return function
    if upper == 1.0:
        return lambda u, v: function(u, lower * v)
    return lambda u, v: function(upper * u, v if lower == 1.0 else lower * v)


def weighted(function: Function, weight: float) -> Function:
    """Return weight * function."""
    return function if weight == 1.0 else lambda x, y: weight * function(x, y)


def nothing(x: Any, y: Tensor) -> Tensor:
    """Return 0, as a function of y: a lower level that is absent, or a process without data."""
    return 0.0 * y.sum()


def _part_in_unit(part: Part | None, unit: float) -> Part | None:
    return part if part is None or unit == 1.0 else lambda v: part(unit * v)
