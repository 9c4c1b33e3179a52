"""Learn the regularisation of a logistic regression: one L2 coefficient per feature.

With 60 coefficients a grid search is impossible. Half of the features are shuffled copies of
scikit-learn's breast-cancer data, which say nothing about the diagnosis. The method does not know
which ones they are, and it regularises them more.

Run: python examples/regularisation.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_bilevel import IVSP, BilevelProblem, Box, solve

# x is the logarithm of a coefficient, divided by this unit. Steps of the logarithm become a hundred
# times as long (as with `upper_unit`).
UNIT = 10.0
START = -3.0


def load() -> list[tuple[Tensor, Tensor]]:
    features, labels = (
        torch.tensor(array, dtype=torch.float64) for array in load_breast_cancer(return_X_y=True)
    )
    features = (features - features.mean(0)) / features.std(0)
    shuffled = torch.stack([column[torch.randperm(len(column))] for column in features.T], dim=1)
    order = torch.randperm(len(features))
    both = torch.cat([features, shuffled], dim=1)
    return [(both[part], labels[part]) for part in order.split([150, 210, len(order) - 360])]


def loss(part: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(part[0] @ y[:-1] + y[-1], part[1])


def main(short: bool = False, out: Path = Path("regularisation.png")) -> dict[str, float]:
    torch.manual_seed(0)
    train, validation, test = load()
    problem = BilevelProblem(
        upper=lambda x, y: loss(validation, y),
        lower=lambda x, y: loss(train, y) + 0.5 * ((UNIT * x).exp() * y[:-1] ** 2).sum(),
        upper_set=Box(-6 / UNIT, 1 / UNIT),
        lower_set=Box(-20, 20),
    )
    # g is convex (sigma = 0), so rho may be large. Delta is small: where g is flat, a point with a
    # small gradient may still be far from the solution.
    convex = {
        "rho": 10.0,
        "sigma": 0.0,
        "delta": 1e-5,
        "L_xy": 1.0,
        "L_yy": 4.5,
        "inner": "accelerated",
    }
    solver = partial(
        IVSP, **convex, mu0=2e-4, block=10, gamma0=0.005, zeta_bar=1e5, L_init=1.0, B_R=1.0
    )
    start = torch.full((60,), START / UNIT, dtype=torch.float64)
    equal = torch.zeros(61, dtype=torch.float64)
    for _ in range(2000):  # the usual regression: one coefficient for all features
        equal = equal - problem.at(start).gradient(equal) / 4.5
    solution = solve(problem, start, equal, solver, max_steps=100 if short else 300)
    print(solution.certificate, solution.reading, sep="\n")
    losses = {
        "one coefficient": float(loss(test, equal)),
        "one per feature": float(loss(test, solution.y)),
    }
    logs = UNIT * solution.x
    print(
        f"test loss: {losses}; mean logarithm of real features {logs[:30].mean():.2f}, of shuffled "
        f"ones {logs[30:].mean():.2f}"
    )
    figure = Figure(figsize=(6, 3), layout="constrained")
    axis = figure.subplots()
    axis.bar(range(30), (logs[:30] - START).tolist(), color="#0072B2", label="features")
    axis.bar(range(30, 60), (logs[30:] - START).tolist(), color="#D55E00", label="shuffled copies")
    axis.set(xlabel="feature", ylabel="log coefficient, from the start")
    axis.legend(frameon=False)
    figure.savefig(out, dpi=160)
    return losses | {"real": float(logs[:30].mean()), "shuffled": float(logs[30:].mean())}


if __name__ == "__main__":
    main(short="--short" in sys.argv)
