"""Your own solver in 50 lines: a penalty method with momentum.

You write `step`, one outer iteration on flat vectors: a function of the problem and the state. The
solver then works with every problem and module of the library, and is logged, certified and
compared like the others. It resumes bit for bit, because all that it remembers is in its state.

Run: python examples/own_solver.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lightning_bilevel import MEHA, BilevelOptimizer, BilevelProblem, Box, Envelope, StepInfo, solve
from lightning_bilevel.solvers.base import Method, State, Units
from lightning_bilevel.solvers.constants import nonnegative, positive, whole


@dataclass(frozen=True, kw_only=True)
class Moving(State):
    """x, y and their units are in a State; these are its own: tensors and plain values."""

    z: Tensor
    speed_x: Tensor
    speed_y: Tensor


@dataclass(frozen=True, kw_only=True)
class HeavyBallMethod(Method[Moving]):
    """The constants, each with its condition, and the step. The first one is the step size of x."""

    lr: float = positive(0.02)
    momentum: float = nonnegative(0.9)
    penalty: float = positive(20.0)
    inner: int = whole(5)

    def start(self, problem: BilevelProblem, x: Tensor, y: Tensor, units: Units) -> Moving:
        return Moving(
            x=x, y=y, units=units, z=y, speed_x=torch.zeros_like(x), speed_y=torch.zeros_like(y)
        )

    def step(self, problem: BilevelProblem, s: Moving) -> tuple[Moving, StepInfo]:
        lower, z = problem.at(s.x), s.z
        for _ in range(self.inner):
            z = problem.lower_set.project(z - s.rate_y(self.lr) * lower.gradient(z))
        f = problem.upper(s.x, s.y)  # the value and both gradients, in one pass
        gap = lower.gap(s.y, z)  # likewise
        rate = self.lr / (1 + self.penalty)
        d_x, d_y = f.grad_x + self.penalty * gap.grad_x, f.grad_y + self.penalty * gap.grad_y
        # A level may be measured in a unit: `rate_x` and `rate_y` know it.
        speed_x = self.momentum * s.speed_x - s.rate_x(rate) * d_x
        speed_y = self.momentum * s.speed_y - s.rate_y(rate) * d_y
        x = problem.upper_set.project(s.x + speed_x)
        y = problem.lower_set.project(s.y + speed_y)
        info = StepInfo(upper=f.value, lower=gap.value_y, inner_iterations=self.inner)
        return s.after(x, y, z=z, speed_x=speed_x, speed_y=speed_y), info


class HeavyBall(BilevelOptimizer):
    """Momentum steps on f + penalty * (g(x, y) - g(x, z)), where z descends on g(x, .)."""

    method_type = HeavyBallMethod


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
