"""Your own solver in 40 lines: a penalty method with momentum.

You write `advance`, one outer iteration on flat vectors. The solver then works with every problem
and module of the library, and is logged, certified and compared like the others. It resumes bit for
bit, because its state is in `self.memory`.

Run: python examples/own_solver.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lightning_bilevel import MEHA, BilevelOptimizer, BilevelProblem, Box, Envelope, StepInfo, solve


class HeavyBall(BilevelOptimizer):
    """Momentum steps on f + penalty * (g(x, y) - g(x, z)), where z descends on g(x, .)."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float = 0.02,
        momentum: float = 0.9,
        penalty: float = 20.0,
        inner: int = 5,
    ) -> None:
        # Hyper-parameters are stored in param_groups, which checkpoints contain.
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "penalty": penalty, "inner": inner}
        )

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        c = self.constants
        memory = self.memory
        lower = problem.at(x)
        z = memory.get("z", y)
        for _ in range(c["inner"]):
            z = problem.lower_set.project(z - c["lr"] * lower.gradient(z))
        f = problem.upper(x, y)  # the value and both gradients, in one pass
        gap = lower.gap(y, z)  # likewise
        penalty = c["penalty"]
        step = c["lr"] / (1 + penalty)
        old_x = memory.get("speed_x", torch.zeros_like(x))
        old_y = memory.get("speed_y", torch.zeros_like(y))
        speed_x = c["momentum"] * old_x - step * (f.grad_x + penalty * gap.grad_x)
        speed_y = c["momentum"] * old_y - step * (f.grad_y + penalty * gap.grad_y)
        new_x = problem.upper_set.project(x + speed_x)
        new_y = problem.lower_set.project(y + speed_y)
        # The state may have tensors and plain numbers only.
        memory.update(z=z, speed_x=speed_x, speed_y=speed_y)
        return new_x, new_y, StepInfo(upper=f.value, lower=gap.value_y, inner_iterations=c["inner"])


def main(short: bool = False, out: Path = Path("own_solver.png")) -> dict[str, float]:
    # The lower level is solved by y = x, so f is (x - a)^2 + x^2 there: the solution is x = a/2.
    a = torch.linspace(-1, 1, 20, dtype=torch.float64)
    boxes = {"upper_set": Box(-2, 2), "lower_set": Box(-2, 2)}
    problem = BilevelProblem(
        lambda x, y: ((x - a) ** 2 + y**2).sum(), lambda x, y: ((y - x) ** 2).sum(), **boxes
    )
    solvers = {
        "HeavyBall": HeavyBall,
        "HeavyBall without momentum": partial(HeavyBall, momentum=0.0),
        "MEHA": partial(MEHA, alpha=0.02, beta=0.02, eta=0.02, gamma=1.0, c=10.0),
    }
    errors = {}
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    start = torch.zeros(20, dtype=torch.float64)
    envelope = Envelope(rho=0.5, sigma=0.0, delta=1e-3)
    steps = 200 if short else 1000
    for name, solver in solvers.items():
        solution = solve(problem, start, start, solver, max_steps=steps, envelope=envelope)
        errors[name] = float((solution.x - a / 2).norm())
        print(f"{name}: |x - x*| = {errors[name]:.2e}. {solution.reading}")
        axis.plot([info.upper for info in solution.history], label=name)
    axis.set_xlabel("outer iteration")
    axis.set_ylabel("upper level f")
    axis.legend(frameon=False)
    figure.savefig(out, dpi=160)
    return errors


if __name__ == "__main__":
    main(short="--short" in sys.argv)
