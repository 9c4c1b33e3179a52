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
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.constraints import evaluate, stacked
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.lower import (
    Function,
    LowerLevel,
    LowerTerm,
    Part,
    RecentPoints,
    nothing,
    rescaled,
    weighted,
)
from lightning_bilevel.core.passes import (
    NAMES,
    Calls,
    Passes,
    Reduce,
    Residuals,
    coupled,
    leaf,
    or_zeros,
)
from lightning_bilevel.core.sets import ConvexSet, Face, Free, face_at, is_bounded
from lightning_bilevel.core.vectors import norm

__all__ = ["BilevelProblem", "Calls", "Start", "Upper"]

# Two evaluations at the same point may differ by this many roundings.
_ROUNDINGS = 30.0


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


class Scaled:
    r"""The set :math:`\{u : \text{unit} \cdot u \in C\}` of a variable that is measured in a unit.

    Its normal cone at u is that of C at ``unit * u``, because scaling does not change a cone.
    """

    def __init__(self, base: ConvexSet, unit: float) -> None:
        self.base = base
        self.unit = float(unit)

    def __repr__(self) -> str:
        return f"Scaled({self.base!r}, unit={self.unit:g})"

    @property
    def bounded(self) -> bool | None:
        """Whether the set itself is bounded; None if it does not say."""
        return is_bounded(self.base)

    def project(self, v: Tensor) -> Tensor:
        return self.base.project(v * self.unit) / self.unit

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        return self.base.normal_cone_distance(v * self.unit, gradient)

    def face(self, u: Tensor) -> Face:
        # P(v) = base.project(unit * v) / unit: the two units cancel.
        return face_at(self.base, u * self.unit)


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
            ``lower(x, outputs(y))``. The outputs of the last two points y are kept, also for
            another x. One function per chunk of ``lower``; with several chunks nothing is kept.
            Features and outputs exclude each other.
        reduce: Sums a tensor over the processes that share the data, if there are several.
        constraints: Functions of (x, y) that return scalars, each of which is to be at most 0,
            beside the lower level. IVSP takes them.

    Attributes:
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
        self.residual_terms = [stacked(constraints)] if constraints else []
        self.upper_set = upper_set or Free()
        self.lower_set = lower_set or Free()
        self.share: tuple[float, float] | None = None
        self._passes = Passes(reduce)
        self._recent = RecentPoints()
        # g(x, .) of the last call of `at`.
        self._last: LowerLevel | None = None
        # Whether f depends on x; None before its first gradient in x.
        self._upper_has_x: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy counts its own evaluations, and a graph cannot be copied.
        passes = Passes(self._passes.reduce, self._passes.calls)
        return {**self.__dict__, "_passes": passes, "_recent": RecentPoints(), "_last": None}

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
    def upper_has_x(self) -> bool | None:
        """Whether f depends on x; None before the first gradient of f in x."""
        return self._upper_has_x

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
        self._upper_has_x = whole.upper_has_x

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the evaluations inside, such as those of a check or a certificate."""
        calls = self.calls
        try:
            yield
        finally:
            self.calls = calls

    def forget(self) -> None:
        """Drop everything that was computed at any point, because f or g may have changed."""
        self._recent.forget()
        self._last = None

    def in_units(self, upper: float = 1.0, lower: float = 1.0) -> BilevelProblem:
        """Return the same problem in the variables u, v with x = upper * u and y = lower * v."""
        if upper == lower == 1.0:
            return self
        inner = copy.copy(self)
        inner.upper_terms = [term.in_units(upper, lower) for term in self.upper_terms]
        inner.lower_terms = [term.in_units(upper, lower) for term in self.lower_terms]
        inner.residual_terms = [rescaled(term, upper, lower) for term in self.residual_terms]
        inner.upper_set = Scaled(self.upper_set, upper)
        inner.lower_set = Scaled(self.lower_set, lower)
        inner.calls = Calls()
        return inner

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
        self._upper_has_x = grad_x is not None
        return Upper(value, or_zeros(grad_x, x), slope)

    def upper_x(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of f in x alone.

        Once f is known not to depend on x, this takes no pass.
        """
        if self._upper_has_x is False:
            return torch.zeros_like(x)
        x, y = leaf(x), y.detach()
        _, (grad,) = self._differentiate_upper(x, y, (x,))
        self._upper_has_x = grad is not None
        return or_zeros(grad, x)

    def upper_y(self, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
        """Return f and its gradient in y alone."""
        x, y = x.detach(), leaf(y)
        value, (grad,) = self._differentiate_upper(x, y, (y,))
        return value, coupled("f", grad)

    def residuals(self, x: Tensor, y: Tensor) -> Residuals:
        """Return the constraints beside the lower level and their gradients, if there are any."""
        terms = self.residual_terms
        return evaluate(terms, self._passes, x, y) if terms else Residuals()

    def _differentiate_upper(
        self, x: Tensor, y: Tensor, inputs: tuple[Tensor, ...]
    ) -> tuple[float, list[Tensor | None]]:
        self.calls += Calls(upper=1)
        terms = [partial(term, x, y) for term in self.upper_terms]
        return self._passes.differentiate("f", terms, inputs)

    def at(self, x: Tensor, *, remember: bool = True) -> LowerLevel:
        """Return g(x, .) for a fixed x, to be evaluated at any number of points.

        Args:
            x: The upper-level variables. For the same, unchanged tensor as in the last call, the
                last g(x, .) is returned with its features.
            remember: Whether to keep g(x, .) for the next call. Otherwise the one of an earlier
                call stays.
        """
        if self._last is not None and self._last.is_at(x):
            return self._last
        if remember:
            # The old one is dropped before a new one is computed, so there are never two graphs.
            self._last = None
        passes = Passes() if self.single_level else self._passes
        lower = LowerLevel(self.lower_terms, x, passes, self._recent)
        if remember:
            self._last = lower
        return lower

    def check(self, x: Tensor, y: Tensor) -> Start:
        """Evaluate f and g twice and refuse a problem whose values differ.

        On such a problem a line search would compare different functions.

        Returns:
            The size of the gradients at (x, y).
        """
        x, y = x.detach(), y.detach()
        with self.uncounted():
            f = self.upper(x, y)
            self.check_unchanged(x, y, f.value, self.at(x, remember=False).value(y))
            slope = self.at(x, remember=False).gradient(y)
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
        self.forget()  # remembered results would hide a change
        with self.uncounted():
            again = {"f": self.upper(x, y).value, "g": self.at(x, remember=False).value(y)}
        for name, first in (("f", f), ("g", g)):
            second = again[name]
            # Parallel sums may change the last digits between two evaluations. Dropout changes the
            # first ones.
            largest = max(abs(first), abs(second))
            if abs(first - second) > _ROUNDINGS * torch.finfo(y.dtype).eps * largest:
                raise BilevelError(
                    f"{NAMES[name]} was {first:.9g} and then {second:.9g} at the same point: the "
                    "methods here need a deterministic objective. Switch off dropout and random "
                    "augmentation, or fix their random numbers."
                )


def _terms(losses: Any, features: Any = None, outputs: Any = None) -> list[LowerTerm]:
    """Return one term per chunk, each with its own parts."""
    losses = _as_list(losses)
    parts = [[None] * len(losses) if p is None else _as_list(p) for p in (features, outputs)]
    return [
        loss if isinstance(loss, LowerTerm) else LowerTerm(loss, *own)
        for loss, *own in zip(losses, *parts, strict=True)
    ]


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]


def _weighted(terms: list[LowerTerm], weight: float) -> list[LowerTerm]:
    return [term.weighted(weight) for term in terms] if weight else [LowerTerm(nothing)]
