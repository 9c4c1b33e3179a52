r"""The lower level g(x, .), split into parts that depend on x alone or on y alone.

.. math:: g(x, y) = \sum_{\text{chunks}} \text{loss}(\text{features}(x), \text{outputs}(y))

:class:`LowerLevel` is a handle of x, :class:`LowerPoint` one of y. To evaluate at the same x or y
again, keep its handle: features(x) or outputs(y) are then computed once. A plain tensor keeps
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.chunks import map_tensors
from lightning_bilevel.core.passes import Calls, Gradients, Inputs, Passes, coupled, leaf, or_zeros

# A function of x and y.
Function = Callable[[Any, Any], Tensor]
# A part of g that depends on x alone or on y alone.
Part = Callable[[Tensor], Any]


def unchanged(v: Tensor) -> Tensor:
    """Return the vector itself: the part of a lower level that is not split."""
    return v


@dataclass(frozen=True)
class LowerTerm:
    """g on one chunk of the data: loss(features(x), outputs(y)).

    Attributes:
        loss: The rest of g; without features and outputs it is g itself, a function of x and y.
        features: The part of g that depends on x alone.
        outputs: The part of g that depends on y alone.
    """

    loss: Function
    features: Part = unchanged
    outputs: Part = unchanged

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.features(x), self.outputs(y))

    def weighted(self, weight: float) -> LowerTerm:
        return replace(self, loss=weighted(self.loss, weight))


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


class LowerPoint:
    """A point y that is met more than once: the first evaluation keeps outputs(y) with its graph.

    Several chunks keep nothing: the graphs of all chunks together do not fit into memory.
    """

    def __init__(self, y: Tensor, keeps: bool = True) -> None:
        self.leaf = leaf(y)
        self.keeps = keeps
        self._outputs: Any = None

    def outputs(self, part: Part) -> Any:
        if self._outputs is None:
            with torch.enable_grad():
                self._outputs = part(self.leaf)
        return self._outputs

    def release(self) -> None:
        """Free the graph; a later evaluation computes it again."""
        self._outputs = None


# A tensor is a point that is met once.
At = Tensor | LowerPoint


class LowerLevel:
    """g(x, .) at a fixed x.

    Args:
        terms: g, one term per chunk.
        x: The upper-level variables.
        passes: Sums the terms and counts the evaluations.
    """

    def __init__(self, terms: Sequence[LowerTerm], x: Tensor, passes: Passes) -> None:
        self.x = leaf(x)
        self._terms = terms
        self._passes = passes
        self._shares_outputs = len(terms) == 1 and terms[0].outputs is not unchanged
        # features(x) without a graph, one entry per chunk.
        self._features: list[Any] | None = None
        # The features with their graph, for the first gap at this x; of a single chunk only.
        self._graph: Any = None

    def release(self) -> None:
        """Free the features; a later evaluation computes them again."""
        self._features = self._graph = None

    def value(self, z: At) -> float:
        """Return g(x, z) without a gradient, which counts as a third of a pass."""
        self._passes.calls += Calls(values=1)
        point = _point(z)
        return self._passes.value("g", self._at(point), (self.x, point.leaf))

    def gradient(self, z: At) -> Tensor:
        r"""Return :math:`\nabla_y g(x, z)`."""
        return self.value_and_gradient(z)[1]

    def value_and_gradient(self, z: At) -> tuple[float, Tensor]:
        self._passes.calls += Calls(lower=1)
        point = _point(z)
        (value,), (grad,) = self._passes.differentiate(
            "g", self._at(point), (point.leaf,), retain=self._keeps(point)
        )
        return value, coupled("g", grad)

    def gap(self, y: At, z: At, grad_y: Tensor | None = None) -> Gap:
        """Return g(x, y), g(x, z) and the gradients of their difference, by one backward pass.

        Args:
            y: The point.
            z: The point that is a constant.
            grad_y: The gradient of g(x, .) at y, if it is known: the backward pass goes to x only.
        """
        point = _point(y)
        inputs = (self.x, point.leaf) if grad_y is None else (self.x,)
        (value_y, value_z), (grad_x, *new) = self._difference(point, _point(z), inputs)
        grad_y = coupled("g", new[0]) if grad_y is None else grad_y
        return Gap(value_y, value_z, or_zeros(grad_x, self.x), grad_y)

    def gap_x(self, y: At, z: At) -> tuple[float, Tensor]:
        """Return g(x, y), and the gradient of g(x, y) - g(x, z) in x alone."""
        (value_y, _), (grad,) = self._difference(_point(y), _point(z), (self.x,))
        return value_y, or_zeros(grad, self.x)

    def full_gap(self, y: Tensor, z: Tensor) -> FullGap:
        """Return what :meth:`gap` returns, and the gradient of g(x, .) at z."""
        # Two handles: y and z may be one tensor, and then have a gradient each.
        first, second = _point(y), _point(z)
        inputs = (self.x, first.leaf, second.leaf)
        values, (grad_x, *grads) = self._difference(first, second, inputs)
        grad_y, minus = (coupled("g", grad) for grad in grads)
        return FullGap(values[0], values[1], or_zeros(grad_x, self.x), grad_y, -minus)

    def products(self, y: At, v: Tensor) -> Products:
        """Return the products of the second derivatives of g at (x, y) with v, and the gradient.

        They are computed by double differentiation. No graph is kept.
        """
        point = _point(y)
        value, (grad_y, yy, xy) = self._twice(point, v, (point.leaf, self.x))
        return Products(value, coupled("g", grad_y), or_zeros(yy, v), or_zeros(xy, self.x))

    def curvature(self, y: At, v: Tensor) -> Tensor:
        r"""Return :math:`\nabla^2_{yy} g(x, y)\, v` alone; x is a constant."""
        point = _point(y)
        _, (grad_y, yy) = self._twice(point, v, (point.leaf,))
        coupled("g", grad_y)
        return or_zeros(yy, v)

    def _twice(self, point: LowerPoint, v: Tensor, inputs: Inputs) -> tuple[float, Gradients]:
        """Return g, its gradient in y, and the gradient of <gradient, v> in y, or in y and x."""
        self._passes.calls += Calls(products=1)
        terms = self._at(point, with_x=len(inputs) > 1)
        return self._passes.differentiate_twice("g", terms, point.leaf, v, inputs)

    def _constants(self) -> list[Any]:
        """Return the features of each chunk, without a graph; that of a single chunk is kept."""
        if self._features is None:
            single = len(self._terms) == 1
            with torch.set_grad_enabled(single):
                features = [term.features(self.x) for term in self._terms]
            self._graph = features[0] if single else None
            self._features = [map_tensors(Tensor.detach, part) for part in features]
        return self._features

    def _keeps(self, point: LowerPoint) -> bool:
        return point.keeps and self._shares_outputs

    def _outputs(self, term: LowerTerm, point: LowerPoint, constant: bool = False) -> Any:
        """Return the second argument of a loss; ``constant`` leaves out its graph."""
        if self._keeps(point):
            shared = point.outputs(term.outputs)
            return map_tensors(Tensor.detach, shared) if constant else shared
        return term.outputs(point.leaf.detach() if constant else point.leaf)

    def _at(self, point: LowerPoint, with_x: bool = False) -> list[Callable[[], tuple[Tensor]]]:
        """Return the terms of g at a point; x is a constant unless ``with_x``."""

        def evaluate(term: LowerTerm, features: Any) -> tuple[Tensor]:
            if with_x:
                features = term.features(self.x) if self._graph is None else self._graph
            return (term.loss(features, self._outputs(term, point)),)

        pairs = zip(self._terms, self._constants(), strict=True)
        return [partial(evaluate, *pair) for pair in pairs]

    def _difference(
        self, y: LowerPoint, z: LowerPoint, inputs: Inputs
    ) -> tuple[list[float], Gradients]:
        """Differentiate g(x, y) - g(x, z) in x, in x and y, or in x, y and z."""
        self._passes.calls += Calls(gap=1)
        self._constants()
        # The backward pass uses up the graph of the features.
        graph, self._graph = self._graph, None

        def pair(term: LowerTerm) -> tuple[Tensor, Tensor]:
            features = term.features(self.x) if graph is None else graph
            first = term.loss(features, self._outputs(term, y, constant=len(inputs) < 2))
            return first, term.loss(features, self._outputs(term, z, constant=len(inputs) < 3))

        return self._passes.differentiate(
            "g", [partial(pair, term) for term in self._terms], inputs, retain=self._keeps(y)
        )


def weighted(function: Function, weight: float) -> Function:
    """Return weight * function."""
    return function if weight == 1.0 else lambda x, y: weight * function(x, y)


def nothing(x: Any, y: Tensor) -> Tensor:
    """Return 0, as a function of y: a lower level that is absent, or a process without data."""
    return 0.0 * y.sum()


def _point(y: At) -> LowerPoint:
    return y if isinstance(y, LowerPoint) else LowerPoint(y, keeps=False)


def vector(y: At) -> Tensor:
    """Return the point without a graph."""
    return y.leaf.detach() if isinstance(y, LowerPoint) else y
