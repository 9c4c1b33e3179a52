"""The units of two levels: norms by hand, and the step that they make longer or shorter."""

from __future__ import annotations

import pytest
import torch
from helpers import PROBLEMS, InUnit, Problem

from lightning_bilevel.core.metric import Metric

W = torch.tensor([3.0, 8.0, -6.0], dtype=torch.float64)


def test_norms_by_hand() -> None:
    """|3| in the unit 3, and |(8, -6)| = 10 in the unit 1/2."""
    metric = Metric(1, 3.0, 0.5)
    assert metric.norm(W) == pytest.approx((1 + 20**2) ** 0.5)
    assert metric.dual_norm(W) == pytest.approx((9**2 + 5**2) ** 0.5)
    assert metric.distance(2 * W, W) == pytest.approx(metric.norm(W))
    assert metric.dots(W, W, 0) == (9.0, 100.0)
    assert metric.dots(W, W, -2) == pytest.approx((1.0, 400.0))
    assert metric.scaled(W, 2).tolist() == [27.0, 2.0, -1.5]


def test_in_units_of_one_nothing_is_computed() -> None:
    metric = Metric(1)
    assert metric.scaled(W, 2) is W
    assert metric.norm(W) == metric.dual_norm(W) == pytest.approx(109**0.5)
    assert metric.distance(2 * W, W) == pytest.approx(109**0.5)


@pytest.mark.parametrize("unit", [4.0, 0.3])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_step_in_a_unit_is_a_longer_step(problem: Problem, unit: float) -> None:
    """P_C(x - t s^2 d) is s times the projected step of x/s with the gradient s d."""
    lower_set, (_, start) = problem.lower_set, problem.at()
    y = lower_set.project(start + 0.3)
    d = torch.cos(5 * y)
    changed = unit * InUnit(lower_set, unit).project(y / unit - 0.125 * unit * d)
    direct = lower_set.project(y - 0.125 * Metric(0, 1.0, unit).scaled(d, 2))
    torch.testing.assert_close(direct, changed, rtol=1e-14, atol=1e-14)
    if unit == 4.0:
        assert torch.equal(direct, changed)
