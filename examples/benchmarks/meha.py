"""One iteration of our MEHA against the same passes written out by hand, on hyper-cleaning of MNIST's size.

5,000 training and 5,000 validation samples of 784 pixels (random: only their size matters for time), an MLP 784-32-10. Both loops
are timed in this process, in turns. f does not depend on x here, so neither takes a pass for that gradient.

Run: python examples/benchmarks/meha.py
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from lightning_bilevel import MEHA, BilevelModule

ALPHA, BETA, ETA, GAMMA, C = 9.0, 0.5, 0.05, 5.0, 0.2
SIZES = (32 * 784, 32, 10 * 32, 10)


class Cleaner(BilevelModule):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(count))
        self.classifier = nn.Sequential(nn.Linear(784, 32), nn.Sigmoid(), nn.Linear(32, 10))
        self.declare(upper=self.logits, lower=self.classifier, solver=MEHA)

    def upper_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(self.classifier(batch[0]), batch[1])

    def lower_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.logits.sigmoid() * cross_entropy(self.classifier(batch[0]), batch[1], reduction="none")).mean()


def network(y: Tensor, images: Tensor) -> Tensor:
    a, b, c, d = y.split(SIZES)
    return linear(linear(images, a.view(32, 784), b).sigmoid(), c.view(10, 32), d)


class ByHand:
    """MEHA's updates with torch alone."""

    def __init__(self, y: Tensor, upper: tuple[Tensor, Tensor], lower: tuple[Tensor, Tensor]) -> None:
        self.x, self.y, self.theta = torch.zeros(len(lower[0])), y, y.clone()
        self.upper, self.lower = upper, lower

    def g(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.sigmoid() * cross_entropy(network(y, self.lower[0]), self.lower[1], reduction="none")).mean()

    def step(self) -> None:
        x, y, theta = self.x, self.y, self.theta.requires_grad_()
        (slope,) = torch.autograd.grad(self.g(x, theta), theta)
        theta = (theta - ETA * (slope + (theta - y) / GAMMA)).detach()
        x.requires_grad_()
        (gap,) = torch.autograd.grad(self.g(x, y) - self.g(x, theta), x)
        x = (x - ALPHA * gap).detach()
        y.requires_grad_()
        (f_y,) = torch.autograd.grad(cross_entropy(network(y, self.upper[0]), self.upper[1]), y)
        (g_y,) = torch.autograd.grad(self.g(x, y), y)
        self.y = (y - BETA * (f_y / C + g_y - (y - theta) / GAMMA)).detach()
        self.x, self.theta = x, theta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.manual_seed(0)
    upper, lower = ((torch.rand(given.samples, 784), torch.randint(10, (given.samples,))) for _ in range(2))
    module = Cleaner(given.samples)
    y = torch.cat([p.detach().reshape(-1) for p in module.classifier.parameters()])
    by_hand = ByHand(y.clone(), upper, lower)
    solver = MEHA(
        [{"params": [module.logits], "level": "upper"}, {"params": list(module.classifier.parameters()), "level": "lower"}],
        alpha=ALPHA, beta=BETA, eta=ETA, gamma=GAMMA, c=C,
    )  # fmt: skip
    problem = module.bilevel_problem({"upper": upper, "lower": lower})

    def timed(step: object) -> float:
        began = time.perf_counter()
        for _ in range(given.steps):
            step()  # type: ignore[operator]
        return (time.perf_counter() - began) / given.steps

    pairs = [(timed(by_hand.step), timed(lambda: solver.step(problem=problem))) for _ in range(given.rounds + 1)][1:]
    hand, ours = (min(times) for times in zip(*pairs, strict=True))
    apart = float((torch.cat([p.detach().reshape(-1) for p in module.classifier.parameters()]) - by_hand.y).abs().max())
    print(
        f"by hand {1e3 * hand:.2f} ms, MEHA {1e3 * ours:.2f} ms an iteration: {ours / hand:.3f} times; they differ by {apart:.1e}"
    )


if __name__ == "__main__":
    main()
