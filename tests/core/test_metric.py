"""A unit is a factor of the step and a weight in norms, instead of a change of variables."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_bilevel.core.sets import Ball, Box, ConvexSet, Free, Simplex
from lightning_bilevel.core.vectors import Metric

UNITS = [(4.0, 0.125), (0.3, 7.0)]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("unit", [0.25, 8.0, 0.3])
@pytest.mark.parametrize(
    ("feasible", "in_unit"),
    [
        (Free(), lambda s: Free()),
        (Box(-0.5, 0.7), lambda s: Box(-0.5 / s, 0.7 / s)),
        (Ball(1.5, 0.5), lambda s: Ball(1.5 / s, 0.5 / s)),
        (Simplex(2.0), lambda s: Simplex(2.0 / s)),
    ],
    ids=["free", "box", "ball", "simplex"],
)
def test_a_step_in_u_is_a_step_in_x_of_the_squared_unit(
    feasible: ConvexSet, in_unit: object, unit: float
) -> None:
    """s P_{X/s}(x/s - t s grad f) = P_X(x - t s^2 grad f), exactly for powers of two."""
    x, gradient = draw(2, 6)
    t = 0.375
    of_u = unit * in_unit(unit).project(x / unit - t * (unit * gradient))  # type: ignore[operator]
    metric = Metric(6, x=unit)
    of_x = feasible.project(x - metric.scaled(t * gradient, 2))
    exact = math.log2(unit).is_integer()
    torch.testing.assert_close(of_x, of_u, rtol=0, atol=0.0 if exact else 1e-14)


@pytest.mark.parametrize("units", UNITS)
def test_norms_are_those_of_the_scaled_variables(units: tuple[float, float]) -> None:
    a, b = draw(2, 5)
    metric, s = Metric(2, *units), torch.tensor([units[0]] * 2 + [units[1]] * 3, dtype=a.dtype)
    of_u = [float((a / s).norm()), float((s * a).norm()), float((a / s - b / s).norm())]
    got = [metric.norm(a), metric.dual_norm(a), metric.distance(a, b)]
    assert got == pytest.approx(of_u, rel=1e-14)
    for power in (-2, 0, 2):
        parts = s**power * a * b
        assert metric.dots(a, b, power) == pytest.approx(
            (float(parts[:2].sum()), float(parts[2:].sum())), rel=1e-13
        )
    assert torch.equal(metric.scaled(metric.scaled(a, 1), -1), a) == (units == UNITS[0])


@pytest.mark.parametrize("units", UNITS)
def test_the_norm_of_gradients_is_dual_to_that_of_steps(units: tuple[float, float]) -> None:
    """<g, d> <= |g|_* |d|, with equality for the step d = s^2 g."""
    metric = Metric(2, *units)
    gradient, *steps = draw(20, 5)
    for step in steps:
        assert abs(sum(metric.dots(gradient, step, 0))) <= metric.dual_norm(gradient) * metric.norm(
            step
        )
    steepest = metric.scaled(gradient, 2)
    assert sum(metric.dots(gradient, steepest, 0)) == pytest.approx(
        metric.dual_norm(gradient) * metric.norm(steepest), rel=1e-13
    )


def test_without_units_nothing_is_computed() -> None:
    a, b = draw(2, 5)
    metric = Metric(2)
    assert metric.scaled(a, 2) is a
    assert metric.norm(a) == metric.dual_norm(a) == pytest.approx(float(a.norm()))
    assert metric.distance(a, b) == pytest.approx(float((a - b).norm()))
