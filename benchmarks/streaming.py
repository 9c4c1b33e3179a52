"""A step on a mini-batch against the same step written by hand with plain torch modules, and
against one step of plain training, on a small network and on two whose step takes 10 ms and more.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.results import Row, Section
from benchmarks.tasks import QUICK, Size
from benchmarks.timing import in_turns, ratio
from lightning_bilevel import F2SA, BilevelOptimizer, BilevelProblem, StreamingIVSP, TableRMS
from lightning_bilevel.plugin.functional import ModuleFunctions

SAMPLES = 4096
BATCH = 256
WARM_UP = 5
# For each of a size's steps, the small network has so many.
ROUNDS = 15
LOWER = partial(torch.optim.AdamW, lr=1e-4)
UPPER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=1.0),
    "TableRMS": TableRMS,
}

Batch = tuple[Tensor, Tensor, Tensor]


def network(width: int, hidden: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(784, width), nn.ReLU()]
    for _ in range(hidden - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def convolutions(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 49, 10),
    )


class Weighted(nn.Module):
    """A network on weighted samples: the weighted mean of the losses."""

    def __init__(self, net: nn.Module, count: int) -> None:
        super().__init__()
        self.net = net
        self.logits = nn.Parameter(torch.zeros(count))

    def upper_loss(self, batch: Batch) -> Tensor:
        images, labels, _ = batch
        return cross_entropy(self.net(images), labels)

    def lower_loss(self, batch: Batch) -> Tensor:
        images, labels, indices = batch
        return weighted(self.logits[indices], self.net(images), labels)


def weighted(logits: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
    weights = logits.sigmoid()
    return (weights * cross_entropy(outputs, labels, reduction="none")).sum() / weights.sum()


class Ours:
    """A solver of the library, with one problem per batch as in a fit."""

    def __init__(
        self, net: nn.Module, make: Callable[..., BilevelOptimizer], count: int = SAMPLES
    ) -> None:
        self.module = Weighted(copy.deepcopy(net), count)
        x, y = [self.module.logits], list(self.module.net.parameters())
        self.functions = ModuleFunctions(self.module, x, y)
        self.solver = make([{"params": x, "level": "upper"}, {"params": y, "level": "lower"}])

    def step(self, upper: Batch, lower: Batch) -> None:
        call = self.functions.call
        self.solver.step(
            problem=BilevelProblem(
                lambda x, y: call("upper_loss", upper, x=x, y=y),
                lambda x, y: call("lower_loss", lower, x=x, y=y),
                mini_batch=True,
                touched=lower[2],
            )
        )


class ByHand:
    """F2SA, or StreamingIVSP with its multiplier, in modules and torch optimisers."""

    def __init__(self, net: nn.Module, upper: Callable[..., torch.optim.Optimizer], ivsp: bool):
        self.y, self.z = copy.deepcopy(net), copy.deepcopy(net)
        self.x = nn.Parameter(torch.zeros(SAMPLES))
        self.optimizers = [LOWER(self.y.parameters()), LOWER(self.z.parameters()), upper([self.x])]
        self.ivsp, self.weight = ivsp, 1.0

    def step(self, upper: Batch, lower: Batch) -> None:
        images, labels, indices = lower
        ys, zs = list(self.y.parameters()), list(self.z.parameters())
        f = cross_entropy(self.y(upper[0]), upper[1])
        at_y = weighted(self.x[indices], self.y(images), labels)
        grads = torch.autograd.grad(f + self.weight * at_y, [*ys, self.x])
        at_z = weighted(self.x[indices], self.z(images), labels)
        inner = torch.autograd.grad(at_z, [*zs, self.x])
        numbers = [f.detach(), at_y.detach(), at_z.detach()]
        if self.ivsp:
            offsets = torch._foreach_sub(
                [p.detach() for p in self.z.parameters()], [p.detach() for p in self.y.parameters()]
            )
            numbers.append(
                torch.stack([torch.linalg.vector_norm(o) for o in offsets]).square().sum()
            )
        values = torch.stack(numbers).tolist()
        for p, grad in zip(ys, grads, strict=False):
            p.grad = grad
        for p, grad in zip(zs, inner, strict=False):
            p.grad = grad
        if self.ivsp:
            pulls = torch._foreach_div(offsets, 10.0)
            torch._foreach_add_([p.grad for p in ys], pulls, alpha=self.weight)
            torch._foreach_div_([p.grad for p in ys], 1 + self.weight)
            torch._foreach_add_([p.grad for p in zs], pulls)
            gap = values[1] - values[2] - values[3] / 20.0 - 1e-3
            self.weight = min(max(gap / 0.05 + 0.5, 0.1), 1.0)
        gap_x = (grads[-1] - self.weight * inner[-1])[indices]
        self.x.grad = torch.sparse_coo_tensor(
            indices[None], gap_x, self.x.shape, is_coalesced=True, check_invariants=False
        )
        for optimizer in self.optimizers:
            optimizer.step()


class Training:
    """Plain training of the network on the lower batch."""

    def __init__(self, net: nn.Module) -> None:
        self.net = copy.deepcopy(net)
        self.optimizer = LOWER(self.net.parameters())

    def step(self, upper: Batch, lower: Batch) -> None:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.net(lower[0]), lower[1])
        loss.backward()
        self.optimizer.step()
        loss.item()


def batches(count: int = 8) -> list[tuple[Batch, Batch]]:
    generator = torch.Generator().manual_seed(0)

    def batch() -> Batch:
        indices = torch.randperm(SAMPLES, generator=generator)[:BATCH].sort().values
        images = torch.randn(BATCH, 784, generator=generator)
        return images, torch.randint(10, (BATCH,), generator=generator), indices

    return [(batch(), batch()) for _ in range(count)]


def run(size: Size) -> Section:
    rows = []
    rounds = 20 if size is QUICK else ROUNDS * size.steps
    for name, net, most, by_hand_most in (
        ("784-128-10", network(128, 1), 4.0, None),
        ("convolutions", convolutions(8), 3.3, 1.1),
        ("784-1024-1024-10", network(1024, 2), 3.3, 1.1),
    ):
        for method, make, upper, ivsp in (
            ("F2SA, SGD", F2SA, "SGD", False),
            ("F2SA, TableRMS", F2SA, "TableRMS", False),
            ("StreamingIVSP, TableRMS", StreamingIVSP, "TableRMS", True),
        ):
            ours = Ours(net, partial(make, upper_optimizer=UPPER[upper], lower_optimizer=LOWER))
            sides = [ours.step, ByHand(net, UPPER[upper], ivsp).step, Training(net).step]
            turns = [cycle(batches()) for _ in sides]
            work = [
                lambda step=step, turn=turn: step(*next(turn))
                for step, turn in zip(sides, turns, strict=True)
            ]
            took = in_turns(work, rounds=rounds if most == 4.0 else rounds // 4, warm_up=WARM_UP)
            plain = 1e3 * statistics.median(took[2])
            rows.append(
                Row(
                    f"{method}, {name} / the same by hand",
                    ratio(took[0], took[1]),
                    at_most=by_hand_most,
                )
            )
            rows.append(
                Row(
                    f"{method}, {name} / a step of plain training",
                    ratio(took[0], took[2]),
                    at_most=most,
                    note=f"which takes {plain:.1f} ms; by hand {ratio(took[1], took[2]):.2f}",
                )
            )
    return Section("Steps on mini-batches", rows)
