r"""The derivative of the projection onto a convex set.

The projection :math:`P_Y` of a box, a ball or a simplex is differentiable at almost every u, where
its derivative is symmetric:

.. math:: P_Y'(u) = \operatorname{diag}(1 + b)^{-1}\, T

T is the orthogonal projection onto the directions in which :math:`P_Y(u)` moves along its face, and
:math:`b \ge 0` is how strongly the face bends: 0 for a flat one. Of a box, T keeps the coordinates
whose bound is not active.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bilevel.core.sets import Ball, Box, ConvexSet, Free, Product, Scaled, Simplex
from lightning_bilevel.core.vectors import dot, norm

__all__ = ["Face", "face_at"]


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
    if isinstance(convex_set, Free):
        return Face(_same)
    if isinstance(convex_set, Box):
        # A point exactly at a bound is projected without a force, so its bound is not active.
        inside = convex_set.project(u) == u
        return Face(lambda v: torch.where(inside, v, 0.0))
    if isinstance(convex_set, Ball):
        return _of_ball(convex_set, u)
    if isinstance(convex_set, Simplex):
        support = convex_set.project(u) > 0.0
        return Face(lambda v: torch.where(support, v - v[support].mean(), 0.0))
    if isinstance(convex_set, Scaled):
        # P(v) = base.project(unit * v) / unit: the two units cancel.
        return face_at(convex_set.base, u * convex_set.unit)
    if isinstance(convex_set, Product):
        return _of_product(convex_set, u)
    raise TypeError(
        f"The derivative of the projection onto {convex_set!r} is not known: hypergradients need a "
        "lower level in a Box, a Ball, a Simplex or a Product of them. Other methods need the "
        "projection alone, such as MEHA."
    )


def _of_ball(ball: Ball, u: Tensor) -> Face:
    offset = u - (ball.center.reshape(-1) if ball.center.ndim else ball.center).to(u)
    length = norm(offset)
    if length <= ball.radius:
        return Face(_same)
    normal = offset / length
    return Face(lambda v: v - dot(normal, v) * normal, length / ball.radius - 1.0)


def _of_product(product: Product, u: Tensor) -> Face:
    faces = [
        face_at(part, block)
        for part, block in zip(product.sets, torch.split(u, product.sizes), strict=True)
    ]
    bends = [
        torch.as_tensor(face.bend, dtype=u.dtype, device=u.device).expand(size)
        for face, size in zip(faces, product.sizes, strict=True)
    ]

    def tangent(v: Tensor) -> Tensor:
        blocks = torch.split(v, product.sizes)
        return torch.cat([face.tangent(b) for face, b in zip(faces, blocks, strict=True)])

    return Face(tangent, torch.cat(bends))


def _same(v: Tensor) -> Tensor:
    return v
