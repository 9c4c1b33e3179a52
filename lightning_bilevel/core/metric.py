r"""The units in which the two levels are measured.

A level in the unit s has the variable u with x = s u. The methods work in x all the same:

.. math::
    s\,P_{X/s}\bigl(x/s - t\,s\,\nabla f\bigr) = P_X(x - t\,s^2\,\nabla f), \qquad
    \|u\| = \|x\|/s, \qquad \|\nabla_u f\| = s\,\|\nabla_x f\|

so a unit is a factor :math:`s^2` of the step and a weight in norms. Powers of two round nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bilevel.core.vectors import dot, norm, squared_distance

__all__ = ["Metric"]


@dataclass(frozen=True)
class Metric:
    """The units of x and y, for vectors w = (x, y).

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
