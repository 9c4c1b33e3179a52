"""Hypergradients of all methods on problems in which nothing is quadratic, at several scales."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from curved_forms import CurvedForm
from helpers import groups, point_of
from torch import Tensor

from lightning_bilevel import AID, F2BA, ITD, SOBA, Box, HJFBiO

SCALES = [(1.0, 1.0), (1e-4, 1e4), (1e4, 1e-4), (1e4, 1e4)]


def direction(
    make: Any, form: CurvedForm, y: Tensor, rate: str = "alpha", dtype: Any = torch.float64
) -> Tensor:
    """The direction of x in one iteration, relative to the length of the hypergradient."""
    step = 1 / float(form.at_x.hypergradient.norm())
    optimizer = make(groups(form.x.to(dtype), y.to(dtype)), **{rate: step})
    optimizer.step(problem=form.build())
    return (form.x.to(dtype) - point_of(optimizer)[0]).double()


def error(found: Tensor, form: CurvedForm) -> float:
    expected = form.at_x.hypergradient
    return float((found - expected / expected.norm()).norm())


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (50, 50)], ids=str)
def test_conjugate_gradients_are_exact(size: tuple[int, int], scales: tuple[float, float]) -> None:
    form = CurvedForm(*size, *scales)
    make = partial(AID, beta=1 / form.curvature, T=1, N=100)
    y = form.at_x.y
    assert error(direction(make, form, y), form) < 1e-8
    assert error(direction(make, form, y, dtype=torch.float32), form) < 2e-5
    by_differences = partial(make, products="difference")
    assert error(direction(by_differences, form, y), form) < 1e-8


@pytest.mark.parametrize("scales", SCALES[:3], ids=str)
def test_from_elsewhere_y_is_found_first(scales: tuple[float, float]) -> None:
    form = CurvedForm(3, 5, *scales)
    zeros = torch.zeros(5, dtype=torch.float64)
    for make in (
        partial(AID, T=120, N=20),
        partial(AID, T=120, N=120, linear_solver="neumann"),
        partial(ITD, T=240, K=120),
    ):
        found = direction(partial(make, beta=1 / form.curvature), form, zeros)
        assert error(found, form) < 1e-8


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
def test_in_a_box_with_active_bounds(scale: float) -> None:
    form = CurvedForm(3, 6, 1.0, scale, Box(-0.3, 0.25), seed=3)
    active = form.at_x.active
    assert 0 < active.sum() < 6
    zeros = torch.zeros(6, dtype=torch.float64)
    for make in (
        partial(AID, T=120, N=20),
        partial(AID, T=120, N=120, linear_solver="fixed_point"),
        partial(ITD, T=120),
    ):
        found = direction(partial(make, beta=1 / form.curvature), form, zeros)
        assert error(found, form) < 1e-8


@pytest.mark.parametrize(("upper_scale", "lower_scale"), [(1.0, 1.0), (1e3, 1e-2)], ids=str)
@pytest.mark.parametrize(("difference", "order"), [("forward", 1.0), ("central", 2.0)])
def test_the_bias_of_f2ba_is_of_its_order(
    difference: str, order: float, upper_scale: float, lower_scale: float
) -> None:
    form = CurvedForm(3, 5, upper_scale, lower_scale)
    y = form.at_x.y
    make = partial(F2BA, tau=0.9 / form.curvature, K=120, difference=difference)
    first = 0.02 * lower_scale / upper_scale
    errors = [
        error(direction(partial(make, sigma=sigma), form, y, "eta"), form)
        for sigma in (first, first / 2)
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize("box", [None, Box([-0.3, -2.0], [0.1, 2.0])], ids=["free", "box"])
def test_single_loops_end_at_the_same_point(box: Box | None) -> None:
    """Where the hypergradient is 0, also with f and g of different scales."""
    form = CurvedForm(1, 2, 1e-2, 1e2, box)
    step = 1 / form.curvature
    ends = []
    for make in (
        partial(SOBA, alpha=10.0, beta=step),
        partial(HJFBiO, gamma=10.0, lam=step, tau=step, r=1e3),
    ):
        optimizer = make(groups(form.x, torch.zeros(2, dtype=torch.float64)))
        problem = form.build()
        for _ in range(120):
            optimizer.step(problem=problem)
        x, _ = point_of(optimizer)
        exact = form.exact(x)
        assert exact.hypergradient.norm() < 1e-2 * 1e-7
        assert int(exact.active.sum()) == (box is not None)
        ends.append(x)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-7)
