"""The synthetic problem and its closed form."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_bilevel import SineProblem


@pytest.mark.parametrize(
    ("n", "a", "c"), [(1, 2.0, 2.0), (1000, 2.0, 2.0), (7, -3.0, 0.4), (3, 1.0, [0.1, 2.0, -1.0])]
)
def test_solution_is_lower_level_optimal_and_stationary_on_it(
    n: int, a: float, c: float | list[float]
) -> None:
    module = SineProblem(n=n, a=a, c=c).double()
    problem = module.bilevel_problem({"upper": None, "lower": None})
    x, y = torch.tensor([module.x_star], dtype=torch.float64), module.y_star
    # every sine is at its minimum -1
    assert problem.at(x).value(y) == pytest.approx(-n)
    # along the solutions y = C + c - x of the lower level, f is stationary: f_x - sum f_y = 0
    upper = problem.upper(x, y)
    assert float(upper.grad_x - upper.grad_y.sum()) == pytest.approx(0.0, abs=1e-9)
    # and the next basins are worse
    for k in (-1, 1):
        shifted = y + 2 * math.pi * k
        best = x + (shifted.sub(y).mean() * n / (1 + n))
        assert problem.upper(best, shifted - (best - x)).value > upper.value


def test_paper_figure() -> None:
    module = SineProblem()
    assert module.x_star == pytest.approx(2.711677, abs=1e-6)
    assert float(module.y_star[0]) == pytest.approx(4.000712, abs=1e-6)
    assert module.errors()["x_error"] == pytest.approx(3.21, abs=5e-3)
    assert module.errors()["y_error"] == pytest.approx(1.0)


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match=r"`SineProblem\(n=0\)` must be at least 1"):
        SineProblem(n=0)
    with pytest.raises(ValueError, match=r"`SineProblem\(c=...\)` has 2 entries: it must have n=3"):
        SineProblem(n=3, c=[1.0, 2.0])
