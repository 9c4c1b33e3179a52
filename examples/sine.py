"""The sine problem: two functions, a solver and a certificate.

min (x - 2)^2 + (y - 4)^2  such that  y minimises sin(x + y - 2). The lower level has infinitely
many solutions, which form parallel valleys. We look for the best point of the best valley, and
start two valleys away.

Run: python examples/sine.py
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy
import torch
from matplotlib.figure import Figure

from lightning_bilevel import IVSP, BilevelProblem, Box, certify


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x - 2) ** 2).sum() + ((y - 4) ** 2).sum()


def g(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sin(x + y - 2).sum()


def main(short: bool = False, out: Path = Path("sine.png")) -> tuple[float, float]:
    # `solve(problem, x, y, solver, max_steps)` has the same loop; we write it out to keep the path.
    problem = BilevelProblem(upper=f, lower=g, upper_set=Box(-100, 100), lower_set=Box(-100, 100))
    x, y = (torch.tensor([start], dtype=torch.float64, requires_grad=True) for start in (-6.0, 0.0))
    groups = [{"params": [x], "level": "upper"}, {"params": [y], "level": "lower"}]
    solver = IVSP(
        groups,
        rho=0.5,
        sigma=1.0,
        delta=1e-3,
        mu0=9e-3,
        gamma0=0.9,
        zeta_bar=3.0,
        L_init=1.0,
        L_xy=1.0,
        L_yy=1.0,
    )
    path = [(x.item(), y.item())]
    for _ in range(200 if short else 1000):
        solver.step(problem=problem)
        path.append((x.item(), y.item()))
    print(certify(problem, x, y, solver.envelope, multiplier=solver.multiplier))

    valley = 3 * math.pi / 2 + 2  # x + y in the valley of the solution: x + y - 2 = -pi/2 + 2 pi
    print(
        f"x = {x.item():.4f}, y = {y.item():.4f}; for delta to 0 the solution is "
        f"({valley / 2 - 1:.4f}, {valley / 2 + 1:.4f})"
    )
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axis = figure.subplots()
    grid_x, grid_y = numpy.meshgrid(numpy.linspace(-8, 6, 300), numpy.linspace(-3, 9, 300))
    axis.pcolormesh(
        grid_x, grid_y, numpy.sin(grid_x + grid_y - 2), cmap="Blues_r", alpha=0.7, rasterized=True
    )
    axis.contour(
        grid_x,
        grid_y,
        (grid_x - 2) ** 2 + (grid_y - 4) ** 2,
        levels=8,
        colors="black",
        linewidths=0.4,
    )
    axis.plot(
        *zip(*path, strict=True),
        color="#D55E00",
        marker=".",
        markersize=4,
        linewidth=1,
        label="IVSP",
    )
    axis.plot(valley / 2 - 1, valley / 2 + 1, "*", color="black", markersize=13, label="solution")
    axis.set_xlabel("x, upper level")
    axis.set_ylabel("y, lower level")
    axis.set_title("valleys: solutions of the lower level; circles: f", fontsize=9)
    axis.legend(loc="upper right")
    figure.savefig(out, dpi=160)
    return path[-1]


if __name__ == "__main__":
    main(short="--short" in sys.argv)
