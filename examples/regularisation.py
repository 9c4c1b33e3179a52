"""Learning regularisation: one L2 coefficient per feature of a logistic regression, chosen by validation data.

With 60 coefficients there is no grid to search. Half of the features of scikit-learn's breast-cancer data are shuffled copies that
say nothing about the diagnosis; nobody tells the method which, and it regularises them more.

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


def load() -> tuple[Tensor, Tensor]:
    features, labels = (torch.tensor(array, dtype=torch.float64) for array in load_breast_cancer(return_X_y=True))
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    features, labels = (features - features.mean(0)) / features.std(0), labels
    shuffled = torch.stack([column[torch.randperm(len(column))] for column in features.T], dim=1)
    return torch.cat([features, shuffled], dim=1)[order], labels[order]


def main(short: bool = False, out: Path = Path("regularisation.png")) -> dict[str, float]:
    torch.manual_seed(0)
    features, labels = load()
    train, validation, test = slice(0, 120), slice(120, 320), slice(320, None)

    def loss(part: slice, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(features[part] @ y[:-1] + y[-1], labels[part])

    def lower(x: Tensor, y: Tensor) -> Tensor:  # x: the logarithm of each coefficient
        return loss(train, y) + 0.5 * (x.exp() * y[:-1] ** 2).sum()

    problem = BilevelProblem(upper=lambda x, y: loss(validation, y), lower=lower, upper_set=Box(-8, 2), lower_set=Box(-20, 20))
    start = torch.full((features.shape[1],), -4.0, dtype=torch.float64)
    # A convex lower level (sigma = 0) whose curvature is below a quarter of that of the data plus the largest coefficient.
    L_yy = float(torch.linalg.eigvalsh(features[train].T @ features[train] / 120).max()) / 4 + 1.0
    solver = partial(IVSP, rho=1.0, sigma=0.0, delta=1e-4, L_yy=L_yy, L_xy=1.0, mu0=0.01, gamma0=0.1, zeta_bar=1.0, inner="accelerated")
    solution = solve(problem, start, torch.zeros(len(start) + 1, dtype=torch.float64), solver, max_steps=100 if short else 1000)
    print(solution.certificate, solution.reading, sep="\n")

    coefficients = solution.x.exp()
    real, shuffled = solution.x[:30], solution.x[30:]
    losses = {"learned": float(loss(test, solution.y))}
    for name, level in (("one coefficient, the start", -4.0),):
        problem_at = problem.at(torch.full_like(start, level))
        y = torch.zeros_like(solution.y)
        for _ in range(3000):
            y = y - problem_at.gradient(y) / L_yy
        losses[name] = float(loss(test, y))
    print(losses, float(real.mean()), float(shuffled.mean()))
    figure = Figure(figsize=(6, 3), layout="constrained")
    axis = figure.subplots()
    axis.bar(range(30), coefficients[:30].tolist(), color="#0072B2", label="features")
    axis.bar(range(30, 60), coefficients[30:].tolist(), color="#D55E00", label="shuffled copies")
    axis.set_yscale("log")
    figure.savefig(out, dpi=160)
    return losses


if __name__ == "__main__":
    main(short="--short" in sys.argv)
