"""An outer iteration on hyper-cleaning against the same passes by hand in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks.results import Row, Section
from benchmarks.tasks import Size, cleaning, solver
from benchmarks.timing import in_turns, ratio
from lightning_bilevel import Calls

MEHA = {"alpha": 9.0, "beta": 0.5, "eta": 0.05, "gamma": 5.0, "c": 0.2}


class ByHand:
    """Plain-torch hyper-cleaning: MEHA's updates, and IVSP's evaluations without its arithmetic."""

    def __init__(
        self, y: list[Tensor], upper: tuple[Tensor, ...], lower: tuple[Tensor, ...]
    ) -> None:
        self.shapes, self.sizes = [p.shape for p in y], [p.numel() for p in y]
        self.x, self.y = torch.zeros(len(lower[0])), torch.cat([p.detach().reshape(-1) for p in y])
        self.theta = self.y.clone()
        self.upper, self.lower = (
            (images.flatten(1), labels) for images, labels in (upper[:2], lower[:2])
        )

    def network(self, y: Tensor, images: Tensor) -> Tensor:
        a, b, c, d = (
            part.view(shape) for part, shape in zip(y.split(self.sizes), self.shapes, strict=True)
        )
        return linear(linear(images, a, b).sigmoid(), c, d)

    def f(self, y: Tensor) -> Tensor:
        return cross_entropy(self.network(y, self.upper[0]), self.upper[1])

    def g(self, x: Tensor, y: Tensor) -> Tensor:
        return (
            x.sigmoid()
            * cross_entropy(self.network(y, self.lower[0]), self.lower[1], reduction="none")
        ).mean()

    def meha(self) -> None:
        x, y, theta = self.x, self.y, self.theta.requires_grad_()
        (slope,) = torch.autograd.grad(self.g(x, theta), theta)
        theta = (theta - MEHA["eta"] * (slope + (theta - y) / MEHA["gamma"])).detach()
        x.requires_grad_()
        (gap,) = torch.autograd.grad(self.g(x, y) - self.g(x, theta), x)
        x = (x - MEHA["alpha"] * gap).detach()
        y.requires_grad_()
        (f_y,), (g_y,) = torch.autograd.grad(self.f(y), y), torch.autograd.grad(self.g(x, y), y)
        self.y = (y - MEHA["beta"] * (f_y / MEHA["c"] + g_y - (y - theta) / MEHA["gamma"])).detach()
        self.x, self.theta = x, theta

    def evaluations(self, calls: Calls) -> None:
        x, y, z = (v.detach().requires_grad_() for v in (self.x, self.y, self.theta))
        for _ in range(calls.lower):
            torch.autograd.grad(self.g(x.detach(), y), y)
        for _ in range(calls.upper):
            torch.autograd.grad(self.f(y), y)
        for _ in range(calls.gap):
            torch.autograd.grad(self.g(x, y) - self.g(x, z.detach()), (x, y))


def run(size: Size) -> Section:
    rows = []
    task = cleaning(size)
    method, problem = task.alone()
    plain = ByHand(method.param_groups[1]["params"], task.data.upper, task.data.lower)
    made: list[Calls] = []
    ours, bare = in_turns(
        [
            lambda: made.append(method.step(problem=problem).calls),
            lambda: plain.evaluations(made[-1]),
        ],
        rounds=2 * size.steps,
        warm_up=5,
    )
    note = (
        "as many gradients and gaps in a bare loop; an iteration finds some of its forward passes "
        "known"
    )
    rows.append(
        Row("IVSP's iteration / its evaluations by hand", ratio(ours, bare), at_most=1.1, note=note)
    )
    task = cleaning(size, chosen=solver("mnist/meha", **MEHA))
    meha, posed = task.alone()
    by_hand = ByHand(meha.param_groups[1]["params"], task.data.upper, task.data.lower)
    ours, bare = in_turns(
        [lambda: meha.step(problem=posed), by_hand.meha], rounds=2 * size.steps, warm_up=3
    )
    y = torch.cat([p.detach().reshape(-1) for p in meha.param_groups[1]["params"]])
    note = (
        f"the two differ by {float((y - by_hand.y).abs().max()):.1e} after {2 * size.steps + 3} "
        "iterations"
    )
    rows.append(
        Row("MEHA's iteration / the same by hand", ratio(ours, bare), at_most=1.1, note=note)
    )
    return Section("Against a loop by hand", rows)
