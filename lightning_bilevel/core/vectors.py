"""Scalar products and norms, summed in float64 for vectors of any dtype, and their units."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# On a CPU longer vectors are summed piece by piece. The memory of a longer product comes from the
# system page by page, which takes longer than the sum, while a piece stays in the cache.
_PIECE = 1 << 16
# float32 products below this lose digits, and below 1e-45 they are 0. Such sums are computed again
# in float64.
_SMALL = 1e-30


def dot(a: Tensor, b: Tensor) -> float:
    r"""Return :math:`\langle a, b \rangle`."""
    value = float(_in_pieces(lambda a, b: (a * b).sum(dtype=torch.float64), a, b))
    if abs(value) < _SMALL and a.dtype != torch.float64:
        return float(_in_pieces(lambda a, b: (a.double() * b.double()).sum(), a, b))
    return value


def norm(a: Tensor) -> float:
    r"""Return :math:`\|a\|`."""
    return math.sqrt(dot(a, a))


def squared_distance(a: Tensor, b: Tensor) -> float:
    r"""Return :math:`\|a - b\|^2`."""
    value = float(_in_pieces(lambda a, b: (a - b).square_().sum(dtype=torch.float64), a, b))
    if value < _SMALL and a.dtype != torch.float64:
        return float(_in_pieces(lambda a, b: (a - b).double().square_().sum(), a, b))
    return value


def _in_pieces(summed: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
    if vectors[0].numel() <= _PIECE or vectors[0].device.type != "cpu":
        return summed(*vectors)
    pieces = zip(*(torch.split(v, _PIECE) for v in vectors), strict=True)
    return torch.stack([summed(*piece) for piece in pieces]).sum()


@dataclass(frozen=True)
class Metric:
    r"""The units in which x and y are measured, for vectors w = (x, y).

    A level in the unit s has the variable u with x = s u. The methods work in x all the same:

    .. math::
        s\,P_{X/s}\bigl(x/s - t\,s\,\nabla f\bigr) = P_X(x - t\,s^2\,\nabla f), \qquad
        \|u\| = \|x\|/s, \qquad \|\nabla_u f\| = s\,\|\nabla_x f\|

    so a unit is a factor :math:`s^2` of the step and a weight in norms. Powers of two round
    nothing.

    Attributes:
        split: The length of x.
        x: The unit of x.
        y: The unit of y.
    """

    split: int
    x: float = 1.0
    y: float = 1.0

    def scaled(self, w: Tensor, power: int) -> Tensor:
        """Return w times its units to a power; w itself where the units are 1."""
        if self.x == self.y == 1.0:
            return w
        return torch.cat([self.x**power * w[: self.split], self.y**power * w[self.split :]])

    def distance(self, a: Tensor, b: Tensor) -> float:
        r"""Return :math:`\|a - b\|` in the units."""
        if self.x == self.y == 1.0:
            return math.sqrt(squared_distance(a, b))
        return self.norm(a - b)

    def norm(self, step: Tensor) -> float:
        r"""Return :math:`\sqrt{\|d_x\|^2/s_x^2 + \|d_y\|^2/s_y^2}` of a step."""
        return norm(self.scaled(step, -1))

    def dual_norm(self, gradient: Tensor) -> float:
        r"""Return :math:`\sqrt{s_x^2 \|g_x\|^2 + s_y^2 \|g_y\|^2}` of a gradient."""
        return norm(self.scaled(gradient, 1))

    def dots(self, a: Tensor, b: Tensor, power: int) -> tuple[float, float]:
        r"""Return :math:`s^p \langle a, b \rangle` of each level.

        Each is summed on its own: x may be one number and y a million.
        """
        x, y = slice(self.split), slice(self.split, None)
        return self.x**power * dot(a[x], b[x]), self.y**power * dot(a[y], b[y])
