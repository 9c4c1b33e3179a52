"""A solver of your own in 40 lines: a penalty method with momentum, on the library's contracts.

`advance` does one outer iteration on flat vectors. In return the method runs on every problem and
module of the library, is logged, certified and compared like the others, and resumes bit for bit,
because its state lives in `self.memory`.

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
    """Steps with momentum on f + penalty * (g(x, y) - g(x, z)), while z follows the lower level by
    gradient steps.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float = 0.02,
        momentum: float = 0.9,
        penalty: float = 20.0,
        inner: int = 5,
    ) -> None:
        # Hyper-parameters live in param_groups, where a checkpoint finds them.
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "penalty": penalty, "inner": inner}
        )

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        c, memory, lower = self.constants, self.memory, problem.at(x)
        z = memory.get("z", y)
        for _ in range(c["inner"]):
            z = problem.lower_set.project(z - c["lr"] * lower.gradient(z))
        f, gap = problem.upper(x, y), lower.gap(y, z)  # one pass each, with both gradients
        step, penalty = c["lr"] / (1 + c["penalty"]), c["penalty"]
        speed_x = c["momentum"] * memory.get("speed_x", torch.zeros_like(x)) - step * (
            f.grad_x + penalty * gap.grad_x
        )
        speed_y = c["momentum"] * memory.get("speed_y", torch.zeros_like(y)) - step * (
            f.grad_y + penalty * gap.grad_y
        )
        new_x, new_y = (
            problem.upper_set.project(x + speed_x),
            problem.lower_set.project(y + speed_y),
        )
        # State: tensors and plain numbers only.
        memory.update(z=z, speed_x=speed_x, speed_y=speed_y)
        return new_x, new_y, StepInfo(upper=f.value, lower=gap.value_y, inner_iterations=c["inner"])


def main(short: bool = False, out: Path = Path("own_solver.png")) -> dict[str, float]:
    # Ridge regression below, its target above; the solution is y = x, and x = a/2 coordinate by
    # coordinate.
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
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis, errors, start = figure.subplots(), {}, torch.zeros(20, dtype=torch.float64)
    for name, solver in solvers.items():
        envelope, steps = Envelope(rho=0.5, sigma=0.0, delta=1e-3), 200 if short else 1000
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
