"""What solvers hold of a point that they meet again: each part of g is computed once there."""

from __future__ import annotations

from typing import Any

import torch
from graphs import CountedPart
from helpers import groups
from tables import SOLVERS, Solver, each, every_solver
from torch import Tensor

from lightning_bilevel import BilevelOptimizer, BilevelProblem

W = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3
IVSPS = [solver for solver in SOLVERS.values() if solver.is_ivsp]


def part() -> CountedPart:
    return CountedPart(lambda v: torch.tanh(W @ v) + v)


def upper(x: Tensor, y: Tensor) -> Tensor:
    return ((y - 1) ** 2).sum() + (x**2).sum()


def of_features(features: Tensor, y: Tensor) -> Tensor:
    return ((y - features) ** 2).sum() / 2


def of_outputs(x: Tensor, outputs: Tensor) -> Tensor:
    return ((outputs - x) ** 2).sum() / 8


def begun(solver: Solver) -> BilevelOptimizer:
    constants: dict[str, Any] = {"rho": 0.1, "L_yy": 3.0} if solver.name == "paper" else {}
    x, y = torch.linspace(-1, 1, 6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    return solver.make(**constants)(groups(x, y))


@every_solver
def test_features_are_computed_once_per_x(solver: Solver) -> None:
    """An iteration leads to one new x, or one per trial; LuMei's has ten."""
    features = part()
    problem = BilevelProblem(upper, of_features, features=features)
    optimizer = begun(solver)
    optimizer.step(problem=problem)
    for _ in range(8):
        before = features.calls
        info = optimizer.step(problem=problem)
        points = 10 if solver.name == "lumei" else 1
        if solver.is_ivsp:
            # A second gap at an x, of a refined z, needs the graph once more.
            points = max(info.trials, info.calls.gap)
        assert features.calls - before == points
    assert features.most == 1
    del optimizer
    assert features.alive == 0


@each(IVSPS)
def test_ivsp_computes_outputs_once_per_point(solver: Solver) -> None:
    """As often as when a point was known again by its identity, or less often."""
    outputs = part()
    problem = BilevelProblem(upper, of_outputs, outputs=outputs)
    optimizer = begun(solver)
    optimizer.step(problem=problem)
    per_step = []
    for _ in range(8):
        before = outputs.calls
        calls = optimizer.step(problem=problem).calls
        per_step.append(outputs.calls - before)
        if solver.name == "paper":
            # Each inner point, y and z; the first inner point is the old z.
            assert per_step[-1] == calls.lower + 2 * calls.gap - 1
        else:
            # y is met twice, for its value and in the gap.
            assert per_step[-1] == calls.lower + calls.gap + calls.values
    assert per_step[:3] == ([4, 2, 2] if solver.name == "paper" else [5, 5, 5])


@every_solver
def test_graphs_of_outputs_are_freed(solver: Solver) -> None:
    """Two at most are alive at once, those of a gap; between steps only IVSP holds its point."""
    outputs = part()
    problem = BilevelProblem(upper, of_outputs, outputs=outputs)
    optimizer = begun(solver)
    for _ in range(12):
        optimizer.step(problem=problem)
        assert outputs.alive <= (2 if solver.is_ivsp else 0)
    assert outputs.most <= 2
    del optimizer
    assert outputs.alive == 0
