"""Hyper-cleaning by the hypergradients of higher and TorchOpt.

x takes Adam's steps; y is the result of gradient steps on g.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.tasks import Task


class Hypergradient:
    """An outer iteration: gradient steps on g from the last y, then a step of x.

    x moves along the gradient of f through these steps.

    Args:
        task: Hyper-cleaning.
        steps: The inner steps.
        lr: The step sizes of x and of y.
    """

    def __init__(self, task: Task, steps: int, lr: tuple[float, float]) -> None:
        self.network: nn.Module = task.build().classifier
        self.upper, self.lower = task.data.upper, task.data.lower
        self.x = torch.zeros(len(self.lower[0]), requires_grad=True)
        self.steps, self.lr = steps, lr[1]
        self.optimizer = torch.optim.Adam([self.x], lr=lr[0])

    def f(self, network: Any) -> Tensor:
        return cross_entropy(network(self.upper[0]), self.upper[1])

    def g(self, network: Any, x: Tensor) -> Tensor:
        return (
            x.sigmoid() * cross_entropy(network(self.lower[0]), self.lower[1], reduction="none")
        ).mean()

    def step(self) -> None:
        (self.x.grad,) = torch.autograd.grad(self.differentiable_f(), self.x)
        self.optimizer.step()

    def differentiable_f(self) -> Tensor:
        """Return f after the inner steps, as a function of x, and leave y there."""
        raise NotImplementedError


class Higher(Hypergradient):
    """Unrolled differentiation by higher."""

    def differentiable_f(self) -> Tensor:
        import higher

        optimizer = torch.optim.SGD(self.network.parameters(), lr=self.lr)
        with higher.innerloop_ctx(self.network, optimizer) as (network, differentiable):
            for _ in range(self.steps):
                differentiable.step(self.g(network, self.x))
            value = self.f(network)
            with torch.no_grad():
                for mine, new in zip(self.network.parameters(), network.parameters(), strict=True):
                    mine.copy_(new)
        return value


class TorchOpt(Hypergradient):
    """Unrolled differentiation by TorchOpt."""

    def differentiable_f(self) -> Tensor:
        import torchopt

        optimizer = torchopt.MetaSGD(self.network, lr=self.lr)
        for _ in range(self.steps):
            optimizer.step(self.g(self.network, self.x))
        value = self.f(self.network)
        torchopt.stop_gradient(self.network)
        return value


class ImplicitCG(Hypergradient):
    """Implicit differentiation by conjugate gradients, by TorchOpt."""

    def differentiable_f(self) -> Tensor:
        import torchopt

        names = [name for name, _ in self.network.named_parameters()]

        def at(y: tuple[Tensor, ...]) -> Any:
            return lambda images: torch.func.functional_call(
                self.network, dict(zip(names, y, strict=True)), (images,)
            )

        def slope(y: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
            return torch.func.grad(lambda y: self.g(at(y), x))(y)

        # g is not convex: normal equations, and a ridge.
        solve = torchopt.linear_solve.solve_normal_cg(maxiter=10, ridge=1e-2)

        @torchopt.diff.implicit.custom_root(slope, argnums=1, solve=solve)
        def descend(y: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
            for _ in range(self.steps):
                y = tuple(v - self.lr * d for v, d in zip(y, slope(y, x), strict=True))
            return y

        y = descend(tuple(p.detach() for p in self.network.parameters()), self.x)
        value = self.f(at(y))
        with torch.no_grad():
            for mine, new in zip(self.network.parameters(), y, strict=True):
                mine.copy_(new)
        return value
