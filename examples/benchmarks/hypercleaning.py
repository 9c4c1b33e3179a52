"""IVSP's outer iteration on hyper-cleaning of MNIST's size against a bare loop that makes the same oracle calls.

5,000 + 5,000 random images of 784 pixels and an MLP 784-32-10. The bare loop is plain torch on flat vectors: after each step of
IVSP as many gradients of g in y, passes of f and passes of g(x, y) - g(x, z) as that step made, and nothing else.

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
    parser.add_argument("--steps", type=int, default=200)
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

    def oracle(calls: Calls) -> None:
        for _ in range(calls.lower):
            torch.autograd.grad(plain.g(x.detach(), y), y)
        for _ in range(calls.upper):
            torch.autograd.grad(cross_entropy(network(y, upper[0]), upper[1]), y)
        for _ in range(calls.gap):
            torch.autograd.grad(plain.g(x, y) - plain.g(x, z.detach()), (x, y))

    ours, bare = [], []
    for _ in range(given.steps):
        began = time.perf_counter()
        calls = solver.step(problem=problem).calls
        between = time.perf_counter()
        oracle(calls)
        ours.append(between - began)
        bare.append(time.perf_counter() - between)
    # The first steps warm up; the median does not see what else the machine does.
    ratio = statistics.median(a / b for a, b in zip(ours[10:], bare[10:], strict=True))
    took = 1e3 * statistics.median(ours[10:])
    print(f"IVSP {took:.1f} ms per outer iteration, {ratio:.3f} times the same oracle calls in a bare loop")


if __name__ == "__main__":
    main()
