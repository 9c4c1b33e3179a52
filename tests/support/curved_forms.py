"""Random problems in which nothing is quadratic, and their hypergradients by dense derivatives.

g is strongly convex, and its second derivative changes with x and with y. f and g may be scaled,
and y may lie in a box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev

from lightning_bilevel import BilevelProblem, Box


class Exact(NamedTuple):
    """The solution of the lower level, the hypergradient there, and which bounds are active."""

    y: Tensor
    hypergradient: Tensor
    active: Tensor


@dataclass(eq=False)
class CurvedForm:
    """f and g of some size, times two factors."""

    nx: int
    ny: int
    upper_scale: float = 1.0
    lower_scale: float = 1.0
    box: Box | None = None
    seed: int = 0
    made: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed + 100 * self.nx + self.ny)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        M = normal(self.ny, self.ny)
        self.made = {
            "A": torch.eye(self.ny, dtype=torch.float64) / 2 + M @ M.T / (2 * self.ny),
            "B": normal(self.ny, self.nx) / math.sqrt(self.nx),
            "E": normal(self.ny, self.nx) / math.sqrt(self.nx),
            "c": normal(self.ny),
            "a": normal(self.ny),
            "x": normal(self.nx),
        }

    def lower(self, x: Tensor, y: Tensor) -> Tensor:
        A, B, E, c = (self.made[name].to(y) for name in "ABEc")
        stretch = torch.exp(0.3 * torch.tanh(E @ x))
        value = y @ A @ y / 2 - y @ (B @ x + c) + (stretch * y**2).sum() / 2
        return self.lower_scale * (value + torch.log(torch.cosh(y - E @ x)).sum())

    def upper(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.made["a"].to(y)
        value = torch.log(torch.cosh(y - a)).sum() + torch.log1p(x**2).sum() + (x**2).sum() / 4
        return self.upper_scale * (value + torch.sin(x).sum() * torch.tanh(y).sum() / len(y))

    @property
    def x(self) -> Tensor:
        return self.made["x"]

    @property
    def curvature(self) -> float:
        """An upper bound on the curvature of g(x, .)."""
        largest = float(torch.linalg.eigvalsh(self.made["A"])[-1])
        return self.lower_scale * (largest + math.exp(0.3) + 1)

    def build(self) -> BilevelProblem:
        return BilevelProblem(self.upper, self.lower, None, self.box)

    @cached_property
    def at_x(self) -> Exact:
        """What is exact at the start."""
        return self.exact(self.x)

    def exact(self, x: Tensor) -> Exact:
        """By Newton's method, or projected gradients in a box, and a linear system."""
        y = torch.zeros(self.ny, dtype=torch.float64)
        for _ in range(30 if self.box is None else 400):
            slope = grad(self.lower, 1)(x, y)
            if self.box is None:
                y = y - torch.linalg.solve(self._second(x, y), slope)
            else:
                y = self.box.project(y - slope / self.curvature)
        ahead = y - grad(self.lower, 1)(x, y) / self.curvature
        active = torch.zeros(self.ny, dtype=torch.bool)
        if self.box is not None:
            active = self.box.project(ahead) != ahead
        fx, fy = grad(self.upper, (0, 1))(x, y)
        free = ~active
        v = torch.zeros_like(y)
        v[free] = torch.linalg.solve(self._second(x, y)[free][:, free], fy[free])
        mixed = jacrev(grad(self.lower, 1), 0)(x, y)
        return Exact(y, fx - mixed.T @ v, active)

    def _second(self, x: Tensor, y: Tensor) -> Tensor:
        second: Tensor = jacrev(grad(self.lower, 1), 1)(x, y)
        return second
