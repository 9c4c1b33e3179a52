r"""The bilevel problem as a first-order oracle over flat vectors.

.. math:: \min_{x \in X,\, y \in Y} f(x, y) \quad\text{s.t.}\quad y \in \arg\min_{u \in Y} g(x, u)

A first-order method uses three evaluations: f with its gradients, the gradient of g(x, .) at some
z, and the gap g(x, y) - g(x, z) with its gradients. A hypergradient uses a fourth: products of the
second derivatives of g with a vector. :class:`Calls` says how many passes each of them is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.lower import Function, LowerLevel, LowerTerm, Part, nothing, weighted
from lightning_bilevel.core.passes import (
    NAMES,
    Gradients,
    Inputs,
    Passes,
    Reduce,
    Residuals,
    check_finite,
    check_scalar,
    coupled,
    leaf,
    or_zeros,
)
from lightning_bilevel.core.passes import (
    Calls as Calls,
)
from lightning_bilevel.core.sets import ConvexSet, Free
from lightning_bilevel.core.vectors import norm

# Two evaluations at the same point may differ by this many roundings.
_ROUNDINGS = 30.0
_CONSTRAINT = "A constraint c"


class Upper(NamedTuple):
    """f(x, y) and its gradients."""

    value: float
    grad_x: Tensor
    grad_y: Tensor


@dataclass(frozen=True)
class Start:
    """The size of the gradients at the start of a run, as plain numbers for a checkpoint.

    Attributes:
        upper_gradient: The norm of the gradient of f in x and y.
        lower_gradient: How far y is from being stationary for g(x, .): the distance of 0 to the
            gradient plus the normal cone.
    """

    upper_gradient: float
    lower_gradient: float


class BilevelProblem:
    r"""f and g as functions of flat vectors, with the sets of x and y.

    Args:
        upper: f, a function of (x, y) that returns a scalar; or a list of functions, whose sum is
            f. A full batch larger than memory needs such a list: one function per chunk, which
            includes the chunk's weight. The chunks are evaluated one after another.
        lower: g, likewise; None for a problem with a single level, whose variables are x and y
            together. g is then 0 and costs no pass.
        upper_set: X.
        lower_set: Y.
        features: The part of g that depends on x alone, if there is one: then g(x, y) =
            ``lower(features(x), y)``. The features are computed once per x, for any number of
            points z. One function per chunk of ``lower``.
        outputs: The part of g that depends on y alone, if there is one: then g(x, y) =
            ``lower(x, outputs(y))``. A solver that meets y again, also at another x, does not
            compute them again. One function per chunk of ``lower``; with several chunks they are
            not kept. Features and outputs exclude each other.
        reduce: Sums a tensor over the processes that share the data, if there are several.
        constraints: Functions of (x, y) that return scalars, each of which is to be at most 0,
            beside the lower level. IVSP takes them.

    Attributes:
        upper_has_x: Whether f depends on x; None before the first gradient of f in x.
        share: The shares of the upper and lower level's data that f and g are of, if the data are
            a sample; None for all data.

    Example:
        >>> problem = BilevelProblem(lambda x, y: (x * y).sum(), lambda x, y: ((y - x) ** 2).sum())
        >>> problem.upper(torch.tensor([2.0]), torch.tensor([3.0]))
        Upper(value=6.0, grad_x=tensor([3.]), grad_y=tensor([2.]))
        >>> problem.at(torch.tensor([2.0])).gradient(torch.tensor([3.0]))
        tensor([2.])
        >>> problem.calls
        Calls(upper=1, lower=1, gap=0, products=0, values=0)
    """

    def __init__(
        self,
        upper: Function | Sequence[Function],
        lower: Function | Sequence[Function] | None,
        upper_set: ConvexSet | None = None,
        lower_set: ConvexSet | None = None,
        *,
        features: Part | Sequence[Part] | None = None,
        outputs: Part | Sequence[Part] | None = None,
        reduce: Reduce | None = None,
        constraints: Sequence[Function] | None = None,
    ) -> None:
        if features is not None and outputs is not None:
            raise ValueError(
                "`BilevelProblem` was given features and outputs: g may have one or the other."
            )
        self.upper_terms = _terms(upper)
        self.single_level = lower is None
        self.lower_terms = _terms(nothing if lower is None else lower, features, outputs)
        # All constraints on one chunk of the data, as a function that returns a vector.
        self.residual_terms = [_stacked(constraints)] if constraints else []
        self.upper_set = upper_set or Free()
        self.lower_set = lower_set or Free()
        self.share: tuple[float, float] | None = None
        self.upper_has_x: bool | None = None
        self._passes = Passes(reduce)

    def __getstate__(self) -> dict[str, Any]:
        # A copy counts its own evaluations.
        return {**self.__dict__, "_passes": copy.copy(self._passes)}

    @property
    def calls(self) -> Calls:
        """How often each evaluation was made so far."""
        return self._passes.calls

    @calls.setter
    def calls(self, calls: Calls) -> None:
        self._passes.calls = calls

    @property
    def reduce(self) -> Reduce | None:
        """Sums a tensor over the processes that share the data; None for a single process."""
        return self._passes.reduce

    @property
    def beyond(self) -> str:
        """What the problem is beside f and g over two sets, in words; empty for nothing."""
        if self.single_level:
            return "there is no lower level"
        return "there are constraints beside the lower level" if self.residual_terms else ""

    def sampled_from(self, whole: BilevelProblem, share: tuple[float, float] | None) -> None:
        """Say that f and g are those of a sample of the data of another problem.

        Whether f depends on x is then known, if the other problem knows it.
        """
        self.share = share
        self.upper_has_x = whole.upper_has_x

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the evaluations inside, such as those of a check or a certificate."""
        calls = self.calls
        try:
            yield
        finally:
            self.calls = calls

    def on_this_rank(self, upper: float, lower: float, reduce: Reduce) -> BilevelProblem:
        """Return this process's part of a problem whose data several processes share.

        Args:
            upper: The weight of this process's data in f: its share of all samples, 0 without data.
            lower: The weight of this process's data in g.
            reduce: Sums a tensor over the processes.
        """
        part = copy.copy(self)
        part.upper_terms = _weighted(self.upper_terms, upper)
        part.lower_terms = _weighted(self.lower_terms, lower)
        # A process without data learns from the whole batch how many constraints there are.
        part.residual_terms = [weighted(term, upper) for term in self.residual_terms]
        part._passes = Passes(reduce)
        return part

    def mean_over_ranks(self, value: float, like: Tensor) -> float:
        """Return the mean of the numbers that the processes have measured.

        The sum is computed on the device of ``like``.
        """
        if self.reduce is None:
            return value
        total, count = self.reduce(like.new_tensor([value, 1.0], dtype=torch.float64)).tolist()
        return float(total / count)

    def upper(self, x: Tensor, y: Tensor) -> Upper:
        """Return f and both its gradients at (x, y)."""
        x, y = leaf(x), leaf(y)
        value, (grad_x, grad_y) = self._differentiate_upper(x, y, (x, y))
        slope = or_zeros(grad_y, y) if self.single_level else coupled("f", grad_y)
        self.upper_has_x = grad_x is not None
        return Upper(value, or_zeros(grad_x, x), slope)

    def upper_x(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of f in x alone.

        Once f is known not to depend on x, this takes no pass.
        """
        if self.upper_has_x is False:
            return torch.zeros_like(x)
        x = leaf(x)
        _, (grad,) = self._differentiate_upper(x, y.detach(), (x,))
        self.upper_has_x = grad is not None
        return or_zeros(grad, x)

    def upper_y(self, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
        """Return f and its gradient in y alone."""
        y = leaf(y)
        value, (grad,) = self._differentiate_upper(x.detach(), y, (y,))
        return value, coupled("f", grad)

    def residuals(self, x: Tensor, y: Tensor) -> Residuals:
        """Return the constraints and their gradients; each counts as one pass of f."""
        if not self.residual_terms:
            return Residuals()
        w = leaf(torch.cat([x.detach(), y.detach()]))
        table = torch.stack([_rows(term, w, x.numel()) for term in self.residual_terms]).sum(0)
        if self.reduce is not None:
            table = self.reduce(table)
        values, gradients = table[:, 0].tolist(), tuple(table[:, 1:].to(w.dtype))
        check_finite(_CONSTRAINT, values, table[:, 1:].sum(1).tolist(), gradients, (x, y))
        self.calls += Calls(upper=len(values))
        return Residuals(tuple(values), gradients)

    def _differentiate_upper(self, x: Tensor, y: Tensor, inputs: Inputs) -> tuple[float, Gradients]:
        self.calls += Calls(upper=1)
        terms = [partial(lambda term: (term(x, y),), term) for term in self.upper_terms]
        (value,), grads = self._passes.differentiate("f", terms, inputs)
        return value, grads

    def at(self, x: Tensor) -> LowerLevel:
        """Return g(x, .) for a fixed x, to be evaluated at any number of points."""
        return LowerLevel(self.lower_terms, x, Passes() if self.single_level else self._passes)

    def check(self, x: Tensor, y: Tensor) -> Start:
        """Evaluate f and g twice and refuse a problem whose values differ.

        On such a problem a line search would compare different functions.

        Returns:
            The size of the gradients at (x, y).
        """
        x, y = x.detach(), y.detach()
        with self.uncounted():
            f = self.upper(x, y)
            self.check_unchanged(x, y, f.value, self.at(x).value(y))
            slope = self.at(x).gradient(y)
        return Start(
            math.hypot(norm(f.grad_x), norm(f.grad_y)),
            self.lower_set.normal_cone_distance(y, slope),
        )

    def check_unchanged(self, x: Tensor, y: Tensor, f: float, g: float) -> None:
        """Evaluate at (x, y) again, and refuse a problem that no longer has the values f and g.

        A change below 30 roundings of the value is not seen: 4e-6 of it in float32, 7e-15 in
        float64. Randomness that leaves both values as they were, or that begins later, is not seen
        either.
        """
        with self.uncounted():
            again = self.upper(x, y).value, self.at(x).value(y)
        for name, first, second in zip(NAMES.values(), (f, g), again, strict=True):
            # Parallel sums may change the last digits between two evaluations. Dropout changes the
            # first ones.
            largest = max(abs(first), abs(second))
            if abs(first - second) > _ROUNDINGS * torch.finfo(y.dtype).eps * largest:
                raise BilevelError(
                    f"{name} was {first:.9g} and then {second:.9g} at the same point: the methods "
                    "here need a deterministic objective, without dropout or random augmentation."
                )


def _terms(losses: Any, features: Any = None, outputs: Any = None) -> list[LowerTerm]:
    """Return one term per chunk, each with its own part."""
    terms = [LowerTerm(loss) for loss in _as_list(losses)]
    if features is not None:
        return [replace(t, features=p) for t, p in zip(terms, _as_list(features), strict=True)]
    if outputs is not None:
        return [replace(t, outputs=p) for t, p in zip(terms, _as_list(outputs), strict=True)]
    return terms


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]


def _weighted(terms: list[LowerTerm], weight: float) -> list[LowerTerm]:
    return [term.weighted(weight) for term in terms] if weight else [LowerTerm(nothing)]


def _stacked(functions: Sequence[Function]) -> Function:
    """Return functions of (x, y), each of which returns a scalar, as one that returns a vector."""
    return lambda x, y: torch.stack([function(x, y) for function in functions])


def _rows(term: Function, w: Tensor, split: int) -> Tensor:
    """Return a row for each constraint: its value and its gradient, in float64."""
    rows = []
    with torch.enable_grad():
        for value in term(w[:split], w[split:]):
            slope = torch.zeros_like(w)
            if check_scalar(_CONSTRAINT, value).requires_grad:
                # The constraints of a chunk may share a part of their graph.
                (slope,) = torch.autograd.grad(value, w, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([value.detach().reshape(1).double(), slope.double()]))
    return torch.stack(rows)
