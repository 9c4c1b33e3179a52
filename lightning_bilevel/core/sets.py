r"""Convex sets, their projections and the derivatives of these.

Every method uses the projection :math:`P_C(v) = \arg\min_{c \in C} \|c - v\|` onto the set
:math:`C`, and the distance :math:`\operatorname{dist}(0, d + N_C(v))` of a gradient :math:`d` from
the normal cone. It is zero exactly where :math:`v` satisfies the first-order condition of
minimising a function with gradient :math:`d` over :math:`C`.

A set may also say whether it is bounded, which the convergence theorem asks for, and return the
face that a point is projected onto, which hypergradients ask for. At almost every u the projection
onto a box, a ball or a simplex has a symmetric derivative:

.. math:: P_C'(u) = \operatorname{diag}(1 + b)^{-1}\, T

T is the orthogonal projection onto the directions in which :math:`P_C(u)` moves along its face, and
:math:`b \ge 0` is the curvature of the face: 0 for a flat one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_bilevel.core.vectors import dot, norm

# A projection lands on the boundary up to rounding, so a point within this many units of rounding
# counts as on the boundary.
_ROUNDING = 8.0


@runtime_checkable
class ConvexSet(Protocol):
    """A closed convex set of flat vectors.

    A set may have an attribute ``bounded``, True or False: without it, whether the set is bounded
    is not known. It may have a method ``face(u)``, which returns a :class:`Face`: methods with
    hypergradients need that of the lower level's set.
    """

    def project(self, v: Tensor) -> Tensor:
        """Return the point of the set nearest to ``v``."""

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        r"""Return :math:`\operatorname{dist}(0, d + N_C(v))` for ``v`` in C and ``gradient`` d."""


def is_bounded(convex_set: ConvexSet) -> bool | None:
    """Return whether a set is bounded; None if it does not say."""
    bounded: bool | None = getattr(convex_set, "bounded", None)
    return bounded


@dataclass(frozen=True)
class Face:
    """The face of a set onto which a point u is projected.

    Attributes:
        tangent: T of the module's formula.
        bend: b of the module's formula, one number or one per coordinate.
    """

    tangent: Callable[[Tensor], Tensor]
    bend: Tensor | float = 0.0

    def differential(self, v: Tensor) -> Tensor:
        """Return the derivative of the projection at u, applied to v."""
        return self.tangent(v) / (1.0 + self.bend)


def face_at(convex_set: ConvexSet, u: Tensor) -> Face:
    """Return the face of a set onto which u is projected.

    Example:
        >>> face = face_at(Box(0.0, 1.0), torch.tensor([-2.0, 0.5]))
        >>> face.differential(torch.tensor([3.0, 4.0]))
        tensor([0., 4.])
    """
    face: Callable[[Tensor], Face] | None = getattr(convex_set, "face", None)
    if face is None:
        raise TypeError(
            f"The derivative of the projection onto {convex_set!r} is not known: hypergradients "
            "need a set with a method `face`, others such as MEHA the projection alone."
        )
    return face(u)


def _rounding(v: Tensor) -> float:
    return _ROUNDING * torch.finfo(v.dtype).eps


def _numbers(given: float | Sequence[float] | Tensor) -> Tensor:
    """Return numbers as a vector, in float64: a bound such as 0.1 is rounded to v's dtype once."""
    return torch.as_tensor(given, dtype=torch.float64, device="cpu").detach().reshape(-1).clone()


def _short(numbers: Tensor) -> str:
    return f"{float(numbers):g}" if numbers.numel() == 1 else f"<{numbers.numel()} bounds>"


class Free:
    """The whole space: no constraint."""

    bounded = False

    def __repr__(self) -> str:
        return "Free()"

    def project(self, v: Tensor) -> Tensor:
        return v

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        return norm(gradient)

    def face(self, u: Tensor) -> Face:
        return Face(lambda v: v)


class Box:
    r"""The box :math:`\{v : \text{lower} \le v \le \text{upper}\}`.

    Args:
        lower: The lower bound, one number or one per coordinate (``-inf`` for none).
        upper: The upper bound, likewise.

    Example:
        >>> Box(-1.0, 1.0).project(torch.tensor([-3.0, 0.5]))
        tensor([-1.0000,  0.5000])
    """

    def __init__(
        self, lower: float | Sequence[float] | Tensor, upper: float | Sequence[float] | Tensor
    ) -> None:
        self.lower, self.upper = _numbers(lower), _numbers(upper)
        if not (self.lower <= self.upper).all():
            raise ValueError(f"`{self!r}`: a lower bound must not exceed its upper bound.")
        # The usual case is two numbers, for which torch has a faster clamp.
        single = self.lower.numel() == self.upper.numel() == 1
        self._ends = (float(self.lower), float(self.upper)) if single else None
        # The bounds in the dtype and on the device of the variable, made once for each.
        self._seen: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return f"Box({_short(self.lower)}, {_short(self.upper)})"

    @property
    def bounded(self) -> bool:
        """Whether all bounds are finite."""
        return bool(torch.isfinite(self.lower).all() and torch.isfinite(self.upper).all())

    def _bounds(self, v: Tensor) -> tuple[Tensor, Tensor]:
        key = (v.dtype, v.device)
        if key not in self._seen:
            bad = {self.lower.numel(), self.upper.numel()} - {1, v.numel()}
            if bad:
                raise ValueError(
                    f"`{self!r}` has {bad.pop()} bounds, the variable has {v.numel()} coordinates."
                )
            self._seen[key] = self.lower.to(v), self.upper.to(v)
        return self._seen[key]

    def project(self, v: Tensor) -> Tensor:
        return torch.clamp(v, *(self._ends or self._bounds(v)))

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        (lower, upper), eps = self._bounds(v), _rounding(v)
        # N_C is (-inf, 0] at a lower bound and [0, inf) at an upper bound, so it absorbs a positive
        # gradient at a lower bound and a negative one at an upper bound.
        rest = torch.where(v <= lower + eps * lower.abs(), gradient.clamp(max=0.0), gradient)
        rest = torch.where(v >= upper - eps * upper.abs(), rest.clamp(min=0.0), rest)
        return norm(rest)

    def face(self, u: Tensor) -> Face:
        # A point exactly at a bound is projected without a force, so its bound is not active.
        inside = self.project(u) == u
        return Face(lambda v: torch.where(inside, v, 0.0))


class Ball:
    r"""The Euclidean ball :math:`\{v : \|v - c\| \le r\}`.

    Args:
        radius: r, positive.
        center: c, one number for all coordinates or one per coordinate.
    """

    bounded = True

    def __init__(self, radius: float = 1.0, center: float | Sequence[float] | Tensor = 0.0) -> None:
        if not 0.0 < radius < torch.inf:
            raise ValueError(f"`Ball(radius={radius})` must be positive and finite.")
        self.radius = float(radius)
        self.center = _numbers(center)

    def __repr__(self) -> str:
        return f"Ball(radius={self.radius:g}, center={_short(self.center)})"

    def _offset(self, v: Tensor) -> tuple[Tensor, Tensor, float]:
        center = self.center.to(v)
        offset = v - center
        return center, offset, norm(offset)

    def project(self, v: Tensor) -> Tensor:
        center, offset, length = self._offset(v)
        return v if length <= self.radius else center + offset * (self.radius / length)

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        _, offset, length = self._offset(v)
        # The rounding of a projected point is that of its coordinates, so of |c| + r, not of r.
        scale = self.radius + float(self.center.abs().max())
        if length < self.radius - _rounding(v) * scale:
            return norm(gradient)
        # N_C = {s n : s >= 0} with the outward unit normal n. It absorbs the component of d that
        # points inwards.
        normal = offset / length
        inward = min(dot(gradient, normal), 0.0)
        return norm(gradient - inward * normal)

    def face(self, u: Tensor) -> Face:
        _, offset, length = self._offset(u)
        if length <= self.radius:
            return Face(lambda v: v)
        normal = offset / length
        return Face(lambda v: v - dot(normal, v) * normal, length / self.radius - 1.0)


class Simplex:
    r"""The scaled simplex :math:`\{v \ge 0 : \sum_i v_i = s\}`.

    Args:
        total: s, positive.
    """

    bounded = True

    def __init__(self, total: float = 1.0) -> None:
        if not 0.0 < total < torch.inf:
            raise ValueError(f"`Simplex(total={total})` must be positive and finite.")
        self.total = float(total)

    def __repr__(self) -> str:
        return f"Simplex(total={self.total:g})"

    def project(self, v: Tensor) -> Tensor:
        # P(v) = max(v - theta, 0), where theta makes the coordinates sum to s. The largest
        # coordinates of v are the ones that stay positive.
        ordered = torch.sort(v.double(), descending=True).values
        excess = ordered.cumsum(0) - self.total
        count = torch.arange(1, v.numel() + 1, dtype=torch.float64, device=v.device)
        size = int((ordered * count > excess).sum())
        return (v.double() - excess[size - 1] / size).clamp(min=0.0).to(v.dtype)

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        # N_C(v) = {t 1 - n : n >= 0, n_i = 0 where v_i > 0}, so the squared distance is the minimum
        # over t of
        #   sum over v_i > 0 of (d_i + t)^2  +  sum over v_i = 0 of min(d_i + t, 0)^2.
        # Its minimiser is the mean of -d over the support and those zero coordinates with
        # d_i + t < 0.
        d = gradient.double()
        inside = v > 0.0
        entering = torch.sort(d[~inside]).values
        count = inside.sum() + torch.arange(entering.numel() + 1, device=v.device)
        sums = d[inside].sum() + torch.cat([entering.new_zeros(1), entering.cumsum(0)])
        t = -sums / count
        # The first j for which the next zero coordinate has d_i + t >= 0.
        stays = torch.cat(
            [entering + t[:-1] >= 0.0, torch.ones(1, dtype=torch.bool, device=v.device)]
        )
        shift = t[int(stays.nonzero()[0])]
        return norm(torch.where(inside, d + shift, (d + shift).clamp(max=0.0)))

    def face(self, u: Tensor) -> Face:
        support = self.project(u) > 0.0
        return Face(lambda v: torch.where(support, v - v[support].mean(), 0.0))


class Product:
    """The product of sets over consecutive blocks of a vector, such as the parameters of a level.

    Args:
        sets: One set per block.
        sizes: The number of coordinates of each block.
    """

    def __init__(self, sets: Sequence[ConvexSet], sizes: Sequence[int]) -> None:
        self.sets = list(sets)
        self.sizes = list(sizes)

    def __repr__(self) -> str:
        return f"Product({self.sets!r}, {self.sizes!r})"

    @property
    def bounded(self) -> bool | None:
        """Whether each block is bounded; None if a block does not say."""
        blocks = [is_bounded(block) for block in self.sets]
        if False in blocks:
            return False
        return None if None in blocks else True

    def _blocks(self, *vectors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield each set with its block of every vector."""
        return zip(self.sets, *(torch.split(v, self.sizes) for v in vectors), strict=True)

    def project(self, v: Tensor) -> Tensor:
        return torch.cat([part.project(block) for part, block in self._blocks(v)])

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        blocks = self._blocks(v, gradient)
        return math.hypot(*(part.normal_cone_distance(b, d) for part, b, d in blocks))

    def face(self, u: Tensor) -> Face:
        faces = [(face_at(part, block), block) for part, block in self._blocks(u)]

        def tangent(v: Tensor) -> Tensor:
            blocks = torch.split(v, self.sizes)
            return torch.cat([face.tangent(b) for (face, _), b in zip(faces, blocks, strict=True)])

        return Face(tangent, torch.cat([torch.zeros_like(b) + face.bend for face, b in faces]))
