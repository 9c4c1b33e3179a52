r"""The bilevel problem as a first-order oracle over flat vectors.

.. math:: \min_{x \in X,\, y \in Y} f(x, y) \quad\text{s.t.}\quad y \in \arg\min_{u \in Y} g(x, u)

Every method of the library sees the problem through three evaluations, each one pass: f with its gradients, the gradient of
g(x, .) at some z, and the gap g(x, y) - g(x, z) with its gradients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.sets import ConvexSet, Free, Scaled
from lightning_bilevel.core.vectors import norm

__all__ = ["BilevelProblem", "Calls", "Function", "Gap", "LowerLevel", "Start", "Upper"]

Function = Callable[[Any, Tensor], Tensor]


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


class Upper(NamedTuple):
    """f(x, y) and its gradients."""

    value: float
    grad_x: Tensor
    grad_y: Tensor


class Gap(NamedTuple):
    """g(x, y) and g(x, z), and the gradients of their difference in x and of g(x, y) in y."""

    value_y: float
    value_z: float
    grad_x: Tensor
    grad_y: Tensor


@dataclass(frozen=True)
class Start:
    """How large the gradients are where a run starts: plain numbers, so that a checkpoint can hold them.

    Attributes:
        upper_gradient: The norm of the gradient of f in x and y.
        lower_gradient: How far y is from being stationary for g(x, .): the distance of 0 to the gradient plus the normal cone.
    """

    upper_gradient: float
    lower_gradient: float


class BilevelProblem:
    r"""f and g as functions of flat vectors, with the sets that x and y live in.

    Args:
        upper: f, a function of (x, y) that returns a scalar; or several, which are summed. A full batch larger than memory
            is such a list, one function per chunk with the chunk's weight in it: chunks are evaluated one after another.
        lower: g, likewise.
        upper_set: X.
        lower_set: Y.
        encoder: The part of g that depends on x alone, if there is one: then g(x, y) = ``lower(encoder(x), y)``, and the
            encoder is evaluated once per x, however many points z follow. One per chunk of ``lower``.
        body: The part of g that depends on y alone, if there is one: then g(x, y) = ``lower(x, body(y))``, and the body is
            evaluated once for a y that is asked for again, also at another x. One per chunk of ``lower``; with several chunks
            nothing is kept. Not together with an encoder.
        reduce: The sum of a tensor over the processes that share the data, if there are several.

    Example:
        >>> problem = BilevelProblem(lambda x, y: (x * y).sum(), lambda x, y: ((y - x) ** 2).sum())
        >>> problem.upper(torch.tensor([2.0]), torch.tensor([3.0]))
        Upper(value=6.0, grad_x=tensor([3.]), grad_y=tensor([2.]))
        >>> problem.at(torch.tensor([2.0])).gradient(torch.tensor([3.0]))
        tensor([2.])
        >>> problem.calls
        Calls(upper=1, lower=1, gap=0)
    """

    def __init__(
        self,
        upper: Function | Sequence[Function],
        lower: Function | Sequence[Function],
        upper_set: ConvexSet | None = None,
        lower_set: ConvexSet | None = None,
        *,
        encoder: Callable[[Tensor], Any] | Sequence[Callable[[Tensor], Any]] | None = None,
        body: Callable[[Tensor], Any] | Sequence[Callable[[Tensor], Any]] | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.upper_terms = _terms("upper", upper)
        self.lower_terms = _terms("lower", lower)
        self.encoders = None if encoder is None else _terms("encoder", encoder)
        self.bodies = None if body is None else _terms("body", body)
        for count, parts in (("encoders", self.encoders), ("bodies", self.bodies)):
            if parts is not None and len(parts) != len(self.lower_terms):
                raise ValueError(
                    f"`BilevelProblem` was given {len(parts)} {count} for {len(self.lower_terms)} terms of `lower`: "
                    "each term needs its own."
                )
        if self.encoders is not None and self.bodies is not None:
            raise ValueError("`BilevelProblem` was given an encoder and a body: g may have one or the other.")
        self.upper_set = Free() if upper_set is None else upper_set
        self.lower_set = Free() if lower_set is None else lower_set
        for name, value in (("upper_set", self.upper_set), ("lower_set", self.lower_set)):
            if not isinstance(value, ConvexSet):
                raise TypeError(f"`BilevelProblem({name}={value!r})` must have `project` and `normal_cone_distance`.")
        self.reduce = reduce
        self.units = (1.0, 1.0)
        self._upper_has_x: bool | None = None
        # The points of g(x, .) that were asked for last, with what of g depends on them alone; the newest last.
        self._recent: list[_Point] = []
        self.calls = Calls()

    def __getstate__(self) -> dict[str, Any]:
        # A copy is another problem, and a graph cannot be copied.
        return {**self.__dict__, "_recent": []}

    def in_units(self, upper: float = 1.0, lower: float = 1.0) -> BilevelProblem:
        """Return the same problem in the variables u, v with x = upper * u and y = lower * v."""
        if upper == lower == 1.0:
            return self
        inner = copy.copy(self)
        inner.upper_terms = [_rescaled(term, upper, lower) for term in self.upper_terms]
        inner.lower_terms = [_rescaled(term, 1.0 if self.encoders else upper, lower) for term in self.lower_terms]
        if self.encoders is not None:
            inner.encoders = [lambda u, encode=encode: encode(upper * u) for encode in self.encoders]
        if self.bodies is not None:
            inner.lower_terms = [_rescaled(term, upper, 1.0) for term in self.lower_terms]
            inner.bodies = [lambda v, body=body: body(lower * v) for body in self.bodies]
        inner.upper_set = Scaled(self.upper_set, upper)
        inner.lower_set = Scaled(self.lower_set, lower)
        inner.units = (self.units[0] * upper, self.units[1] * lower)
        inner.calls = Calls()
        return inner

    def spread(self, upper: float, lower: float, reduce: Callable[[Tensor], Tensor]) -> BilevelProblem:
        """Return this process's part of a problem whose data several processes share.

        Args:
            upper: The weight of this process's data in f: its share of all samples, 0 if it has none.
            lower: The weight of this process's data in g.
            reduce: The sum of a tensor over the processes.
        """
        part = copy.copy(self)
        part.upper_terms = [_nothing] if upper == 0.0 else [_weighted(term, upper) for term in self.upper_terms]
        part.lower_terms = [_nothing] if lower == 0.0 else [_weighted(term, lower) for term in self.lower_terms]
        if self.encoders is not None and lower == 0.0:
            part.encoders = [lambda x: None]
        if self.bodies is not None and lower == 0.0:
            part.bodies = [lambda y: y]
        part.reduce = reduce
        part.calls = Calls()
        return part

    def agreed(self, value: float, like: Tensor) -> float:
        """Return the mean of a number over the processes, where each has measured its own; ``like`` is on their device."""
        if self.reduce is None:
            return value
        total, count = self.reduce(like.new_tensor([value, 1.0], dtype=torch.float64)).tolist()
        return float(total / count)

    def upper(self, x: Tensor, y: Tensor) -> Upper:
        """Return f and both its gradients at (x, y)."""
        self.calls = replace(self.calls, upper=self.calls.upper + 1)
        x, y = _leaf(x), _leaf(y)
        values, (grad_x, grad_y) = self._sum("f", [lambda t=t: (t(x, y),) for t in self.upper_terms], (x, y))  # type: ignore[misc]
        if grad_y is None:
            raise ValueError(_UNCOUPLED.format("upper-level function f"))
        self._upper_has_x = grad_x is not None
        return Upper(values[0], torch.zeros_like(x) if grad_x is None else grad_x, grad_y)

    def upper_x(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of f in x alone; where f is known not to depend on x, that takes no pass."""
        if self._upper_has_x is False:
            return torch.zeros_like(x)
        self.calls = replace(self.calls, upper=self.calls.upper + 1)
        x, y = _leaf(x), y.detach()
        _, (grad,) = self._sum("f", [lambda t=t: (t(x, y),) for t in self.upper_terms], (x,))  # type: ignore[misc]
        self._upper_has_x = grad is not None
        return torch.zeros_like(x) if grad is None else grad

    def upper_y(self, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
        """Return f and its gradient in y alone."""
        self.calls = replace(self.calls, upper=self.calls.upper + 1)
        x, y = x.detach(), _leaf(y)
        values, (grad,) = self._sum("f", [lambda t=t: (t(x, y),) for t in self.upper_terms], (y,))  # type: ignore[misc]
        if grad is None:
            raise ValueError(_UNCOUPLED.format("upper-level function f"))
        return values[0], grad

    def at(self, x: Tensor) -> LowerLevel:
        """Return g(x, .) for a fixed x, of which any number of points can be asked."""
        return LowerLevel(self, x)

    def check(self, x: Tensor, y: Tensor) -> Start:
        """Evaluate f and g twice and refuse a problem whose values differ: a line search would compare different functions.

        Returns:
            How large the gradients are at (x, y).
        """
        calls, x, y = self.calls, x.detach(), y.detach()
        f = self.upper(x, y)
        self.check_unchanged(x, y, f.value, self.at(x).value(y))
        slope = self.at(x).gradient(y)
        self.calls = calls
        return Start(math.hypot(norm(f.grad_x), norm(f.grad_y)), self.lower_set.normal_cone_distance(y, slope))

    def check_unchanged(self, x: Tensor, y: Tensor, f: float, g: float) -> None:
        """Evaluate f and g where they were f and g before, and refuse a problem that has changed.

        A change below 30 roundings of the value is not seen: 4e-6 of it in float32, 7e-15 in float64. Nor is randomness that
        leaves both values as they were, or that begins later.
        """
        calls, self._recent = self.calls, []  # what is kept of a point would hide that it changes
        for name, first, second in (("f", f, self.upper(x, y).value), ("g", g, self.at(x).value(y))):
            # Parallel sums may differ in their last digits between two evaluations, dropout differs in the first ones.
            if abs(first - second) > _ROUNDINGS * torch.finfo(y.dtype).eps * max(abs(first), abs(second)):
                raise BilevelError(
                    f"{_NAMES[name]} was {first:.9g} and then {second:.9g} at the same point: the methods here need a "
                    "deterministic objective. Switch off dropout and random augmentation, or fix their random numbers."
                )
        self.calls = calls

    def _point(self, y: Tensor, remember: bool = True) -> _Point:
        """Return y as a leaf, with what of g depends on it alone if that is known or to be remembered."""
        found = next((point for point in self._recent if point.y is y and point.version == y._version), None)
        if self.bodies is None or len(self.bodies) > 1 or (found is None and not remember):
            return _Point(y, y._version, _leaf(y), None)
        # Two points are what a gap needs; the older one goes before a new one is made, so that there are never three graphs.
        self._recent = [point for point in self._recent if point is not found][-1:]
        if found is None:
            leaf = _leaf(y)
            with torch.enable_grad():
                found = _Point(y, y._version, leaf, self.bodies[0](leaf))
        self._recent.append(found)
        return found

    def _lower_term(self, index: int, part: Any, point: _Point, graph: bool = True) -> Tensor:
        """Return a term of g at a point, which is a constant there if there is to be no graph."""
        y: Any = point.leaf if graph else point.leaf.detach()
        if self.bodies is not None:
            kept = point.body is not None
            y = self.bodies[index](y) if not kept else point.body if graph else tree_map_only(Tensor, Tensor.detach, point.body)
        value: Tensor = self.lower_terms[index](part, y)
        return value

    def _sum(
        self, name: str, terms: Sequence[Callable[[], tuple[Tensor, ...]]], inputs: tuple[Tensor, ...], retain: bool = False
    ) -> tuple[list[float], list[Tensor | None]]:
        """Sum the terms' values, and differentiate their first value less their second in the inputs."""
        totals: list[Tensor] = []
        grads: list[Tensor | None] = [None] * len(inputs)
        with torch.enable_grad():
            for term in terms:
                values = term()
                for value in values:
                    _check_scalar(name, value)
                # f or g(x, y); or the gap g(x, y) - g(x, z), differentiated in one backward pass.
                target = values[0] if len(values) == 1 else values[0] - values[1]
                if target.requires_grad:
                    new_grads = torch.autograd.grad(target, inputs, allow_unused=True, retain_graph=retain)
                    grads = [_plus(grad, new) for grad, new in zip(grads, new_grads, strict=True)]
                # float64: the Moreau gap is a small difference of large numbers.
                new = [value.detach() for value in values]
                totals = [a.double() + b for a, b in zip(totals, new, strict=True)] if totals else new
        if self.reduce is not None:
            return self._sum_over_processes(name, totals, grads, inputs)
        # One stack is one transfer from the device.
        known = torch.stack([*totals, *(grad.sum() for grad in grads if grad is not None)]).tolist()
        _check_finite(name, known[: len(totals)], known[len(totals) :], grads, inputs)
        return known[: len(totals)], grads

    def _sum_over_processes(
        self, name: str, totals: list[Tensor], grads: list[Tensor | None], inputs: tuple[Tensor, ...]
    ) -> tuple[list[float], list[Tensor | None]]:
        """Sum values and gradients over the processes, all of them in one buffer: a collective costs more than its numbers."""
        assert self.reduce is not None
        # A process whose part does not depend on an input takes part with zeros; the flags tell whether any part does.
        flags = inputs[0].new_tensor([grad is not None for grad in grads], dtype=torch.float64)
        parts = [v.new_zeros(v.numel()) if grad is None else grad for grad, v in zip(grads, inputs, strict=True)]
        buffer = self.reduce(torch.cat([torch.stack(totals).double(), flags, *(part.double() for part in parts)]))
        numbers, *sums = torch.split(buffer, [len(totals) + len(flags), *(len(part) for part in parts)])
        known = torch.cat([numbers, torch.stack([part.sum() for part in sums])]).tolist()
        values, found, checks = known[: len(totals)], known[len(totals) : -len(sums)], known[-len(sums) :]
        _check_finite(name, values, checks, sums, inputs)
        return values, [part.to(v.dtype) if flag else None for part, flag, v in zip(sums, found, inputs, strict=True)]


class _Point(NamedTuple):
    """A point y of the lower level as a leaf, and what of g depends on it alone, with its graph."""

    y: Tensor
    version: int
    leaf: Tensor
    body: Any


class LowerLevel:
    """g(x, .) at a fixed x; what depends on x alone is computed once."""

    def __init__(self, problem: BilevelProblem, x: Tensor) -> None:
        self.problem = problem
        self.x = _leaf(x)
        # The encoder's output with its graph, for the first gap; with several chunks it is encoded again chunk by
        # chunk, because the graphs of all chunks together are what does not fit into memory.
        self._graph: list[Any] | None = None
        self._features: list[Any]
        # A point whose gradient was to be kept, and the gradient.
        self._kept: tuple[Tensor, int, Tensor] | None = None
        if problem.encoders is None:
            self._features = [self.x.detach()] * len(problem.lower_terms)
        elif len(problem.encoders) == 1:
            with torch.enable_grad():
                self._graph = [problem.encoders[0](self.x)]
            self._features = [tree_map_only(Tensor, Tensor.detach, self._graph[0])]
        else:
            with torch.no_grad():
                self._features = [encode(self.x) for encode in problem.encoders]

    def value(self, z: Tensor) -> float:
        """Return g(x, z); no gradient, and not counted as a pass."""
        point = self.problem._point(z)
        with torch.no_grad():
            values = [self.problem._lower_term(i, part, point) for i, part in enumerate(self._features)]
        for value in values:
            _check_scalar("g", value)
        total = torch.stack(values).double().sum()
        if self.problem.reduce is not None:
            total = self.problem.reduce(total.reshape(1))
        _check_finite("g", [float(total)], [], [], (self.x, z))
        return float(total)

    def gradient(self, z: Tensor, keep: bool = False) -> Tensor:
        """Return the gradient of g(x, .) at z, and keep it if a gap g(x, z) - g(x, .) is to follow, which needs it."""
        return self.value_and_gradient(z, keep)[1]

    def value_and_gradient(self, z: Tensor, keep: bool = False) -> tuple[float, Tensor]:
        """Return g(x, z) and the gradient of g(x, .) at z, and keep it as :meth:`gradient` does."""
        problem = self.problem
        problem.calls = replace(problem.calls, lower=problem.calls.lower + 1)
        # A point on the way of an inner loop is not asked for again.
        point = problem._point(z, keep)
        terms = [lambda i=i, p=p: (problem._lower_term(i, p, point),) for i, p in enumerate(self._features)]
        values, (grad,) = problem._sum("g", terms, (point.leaf,), retain=point.body is not None)
        if grad is None:
            raise ValueError(_UNCOUPLED.format("lower-level function g"))
        if keep:
            self._kept = z, z._version, grad
        return values[0], grad

    def gap(self, y: Tensor, z: Tensor) -> Gap:
        """Return g(x, y) and g(x, z), and the gradients in x and y of their difference, by one backward pass."""
        point, known = self.problem._point(y), None
        if self._kept is not None and self._kept[0] is y and self._kept[1] == y._version:
            known = self._kept[2]  # it is the gradient in y, so the backward pass goes to x only
        inputs = (self.x, point.leaf) if known is None else (self.x,)
        values, (grad_x, *rest) = self._difference(point, z, inputs)
        grad_y = known if known is not None else rest[0]
        if grad_y is None:
            raise ValueError(_UNCOUPLED.format("lower-level function g"))
        return Gap(values[0], values[1], torch.zeros_like(self.x) if grad_x is None else grad_x, grad_y)

    def gap_x(self, y: Tensor, z: Tensor) -> tuple[float, Tensor]:
        """Return g(x, y), and the gradient of g(x, y) - g(x, z) in x alone."""
        values, (grad,) = self._difference(self.problem._point(y), z, (self.x,))
        return values[0], torch.zeros_like(self.x) if grad is None else grad

    def _difference(self, y: _Point, z: Tensor, inputs: tuple[Tensor, ...]) -> tuple[list[float], list[Tensor | None]]:
        problem, x, other = self.problem, self.x, self.problem._point(z)
        problem.calls = replace(problem.calls, gap=problem.calls.gap + 1)
        graph, self._graph = self._graph, None

        def term(index: int) -> tuple[Tensor, Tensor]:
            part = graph[index] if graph else problem.encoders[index](x) if problem.encoders else x
            first = problem._lower_term(index, part, y, graph=len(inputs) > 1)
            return first, problem._lower_term(index, part, other, graph=False)

        terms = [lambda i=i: term(i) for i in range(len(problem.lower_terms))]
        return problem._sum("g", terms, inputs, retain=y.body is not None)


# By how many roundings two evaluations at the same point may differ.
_ROUNDINGS = 30.0
_NAMES = {"f": "The upper-level function f", "g": "The lower-level function g"}
_UNCOUPLED = (
    "The {} does not depend on the lower-level variables y: a bilevel problem needs both functions to. "
    "Look for a `detach()` or a `no_grad()` in it, or for parameters that were declared at the wrong level."
)


def _terms(name: str, functions: Any) -> list[Any]:
    terms = list(functions) if isinstance(functions, Sequence) else [functions]
    if not terms or not all(callable(term) for term in terms):
        raise TypeError(f"`BilevelProblem({name}={functions!r})` must be a function, or a non-empty list of functions.")
    return terms


def _rescaled(term: Function, upper: float, lower: float) -> Function:
    if upper == 1.0:
        return lambda u, v: term(u, lower * v)
    return lambda u, v: term(upper * u, v if lower == 1.0 else lower * v)


def _weighted(term: Function, weight: float) -> Function:
    return term if weight == 1.0 else lambda x, y: weight * term(x, y)


def _nothing(x: Any, y: Tensor) -> Tensor:
    return y.new_zeros(())


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _leaf(v: Tensor) -> Tensor:
    return v.detach().requires_grad_()


def _check_scalar(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.ndim > 0:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(f"{_NAMES[name]} returned {got}: it must return a scalar tensor, such as a mean or a sum.")


def _check_finite(
    name: str, values: list[float], sums: list[float], grads: Sequence[Tensor | None], inputs: tuple[Tensor, ...]
) -> None:
    # x - x is 0 for a finite number and NaN otherwise: one test for all of them. A gradient whose sum is finite is finite.
    if sum(v - v for v in (*values, *sums)) == 0.0:
        return
    wrong = next((f"value {v}" for v in values if v - v != 0.0), None)
    if wrong is None:
        if all(grad is None or bool(grad.isfinite().all()) for grad in grads):
            return  # the sum has overflowed where no entry has
        wrong = "gradient with NaN or infinite entries"
    sizes = ", ".join(f"{norm(v.detach()):.3g}" for v in inputs)
    raise NonFiniteError(f"{_NAMES[name]} returned a {wrong} at a point with norm{'s' if len(inputs) > 1 else ''} {sizes}.")
