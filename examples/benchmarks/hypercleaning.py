"""IVSP's outer iteration on hyper-cleaning of MNIST's size against a bare loop that makes the same oracle calls.

5,000 + 5,000 random images of 784 pixels and an MLP 784-32-10. The bare loop is plain torch on flat vectors: as many gradients of
g in y, passes of g(x, y) - g(x, z) and passes of f as IVSP made, and nothing else. Both run in this process, in turns.

Run: python examples/benchmarks/hypercleaning.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from meha import ByHand, network
from torch.nn.functional import cross_entropy

from lightning_bilevel import IVSP, Calls, HyperCleaning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.manual_seed(0)
    count = given.samples
    upper, lower = ((torch.rand(count, 784), torch.randint(10, (count,))) for _ in range(2))
    module = HyperCleaning(n_train=count)
    parameters = list(module.classifier.parameters())
    groups = [{"params": [module.logits], "level": "upper"}, {"params": parameters, "level": "lower"}]
    solver = IVSP(groups, mu0=0.02, block=20, gamma0=10.0, zeta_bar=9.0, rho=0.05, sigma=1.0)  # the paper's for MNIST
    problem = module.bilevel_problem({"upper": upper, "lower": (*lower, torch.arange(count))})
    plain = ByHand(torch.cat([p.detach().reshape(-1) for p in parameters]), upper, lower)
    x, y, z = (v.clone().requires_grad_() for v in (plain.x, plain.y, plain.y))

    def oracle(calls: Calls) -> float:
        began = time.perf_counter()
        for _ in range(calls.lower):
            torch.autograd.grad(plain.g(x.detach(), y), y)
        for _ in range(calls.gap):
            torch.autograd.grad(plain.g(x, y) - plain.g(x, z.detach()), (x, y))
        for _ in range(calls.upper):
            torch.autograd.grad(cross_entropy(network(y, upper[0]), upper[1]), y)
        return time.perf_counter() - began

    ratios, took = [], 0.0
    for number in range(given.rounds + 1):
        calls, began = problem.calls, time.perf_counter()
        for _ in range(given.steps):
            solver.step(problem=problem)
        took = time.perf_counter() - began
        if number:  # the first round warms up
            ratios.append(took / oracle(problem.calls - calls))
    ratio = statistics.median(ratios)
    print(f"IVSP {1e3 * took / given.steps:.1f} ms per outer iteration, {ratio:.3f} times the same oracle calls in a bare loop")


if __name__ == "__main__":
    main()
