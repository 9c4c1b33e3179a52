"""Two problems whose hypergradient has a closed form, derived without the library.

The lower level is g = <y, H y>/2 - <y, B x + c> with a positive definite H, so that y*(x) = H^-1 (B
x + c), and the gradient of F(x) = f(x, y*(x)) is fx + B^T H^-1 fy. The upper levels are a quadratic
and a function that is none; both couple x and y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel import BilevelProblem, ConvexSet

NX, NY = 3, 4


def _random(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


_Q, _ = torch.linalg.qr(_random(NY, NY, seed=1))
CURVATURES = torch.tensor([0.5, 0.8, 1.5, 2.0], dtype=torch.float64)
H = _Q @ torch.diag(CURVATURES) @ _Q.T
H = (H + H.T) / 2
B = _random(NY, NX, seed=2)
C = _random(NY, seed=3)
A_X = _random(NX, seed=4)
A_Y = _random(NY, seed=5)


def lower(x: Tensor, y: Tensor) -> Tensor:
    return y @ H.to(y) @ y / 2 - y @ (B.to(x) @ x + C.to(x))


def quadratic_upper(x: Tensor, y: Tensor) -> Tensor:
    return ((x - A_X.to(x)) ** 2).sum() / 2 + ((y - A_Y.to(y)) ** 2).sum() / 2 + x.sum() * y[0]


def smooth_upper(x: Tensor, y: Tensor) -> Tensor:
    """No quadratic: log cosh, a logarithm, and a product of both."""
    return (
        torch.log(torch.cosh(y - A_Y.to(y))).sum()
        + torch.log1p(x**2).sum()
        + torch.sin(x).sum() * torch.tanh(y).sum()
        + (x**2).sum() / 4
    )


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """A problem and its hypergradient."""

    name: str
    upper: Callable[[Tensor, Tensor], Tensor]

    def __str__(self) -> str:
        return self.name

    def build(self, lower_set: ConvexSet | None = None, **more: Any) -> BilevelProblem:
        return BilevelProblem(self.upper, lower, None, lower_set, **more)

    def solution(self, x: Tensor) -> Tensor:
        """y*(x)."""
        return torch.linalg.solve(H, B @ x + C)

    def adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        """H^-1 fy at (x, y)."""
        return torch.linalg.solve(H, self.gradients(x, y)[1])

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """fx and fy."""
        x, y = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
        with torch.enable_grad():
            fx, fy = torch.autograd.grad(self.upper(x, y), (x, y))
        return fx, fy

    def hypergradient(self, x: Tensor) -> Tensor:
        """The gradient of F at x."""
        y = self.solution(x)
        return self.gradients(x, y)[0] + B.T @ self.adjoint(x, y)


CLOSED_FORMS = [ClosedForm("quadratic", quadratic_upper), ClosedForm("smooth", smooth_upper)]
