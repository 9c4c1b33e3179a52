"""An envelope that a few passes reach, on quadratics whose curvature is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_bilevel import BilevelProblem, Envelope, certify
from lightning_bilevel.core.curvature import reachable_envelope

CURVATURES = torch.logspace(-2, 2, 30, dtype=torch.float64)


def problem(curvatures: Tensor = CURVATURES) -> BilevelProblem:
    """g = y'Dy/2, whose proximal point is y/(1 + rho D)."""
    return BilevelProblem(
        lambda x, y: (x * y[:1]).sum() + y.sum(), lambda x, y: 0.5 * (curvatures * y).dot(y)
    )


def start() -> tuple[Tensor, Tensor]:
    return torch.ones(1, dtype=torch.float64), torch.ones(30, dtype=torch.float64)


def test_rho_is_from_the_largest_curvature() -> None:
    wanted = Envelope(rho=10.0, sigma=0.0, delta=2e-3)
    built = problem()
    found = reachable_envelope(built, *start(), wanted)
    assert found.rho == pytest.approx(1 / 400, rel=0.02)
    assert found.sigma == pytest.approx(100, rel=0.02)
    # A feasible point has the same bound on the stationarity of z.
    assert found.stationarity_bound() == pytest.approx(wanted.stationarity_bound(), rel=1e-12)
    assert found.delta < 1e-5
    assert built.calls.passes == 6


def test_the_sign_of_the_curvature_does_not_matter() -> None:
    """Along -100 psi is convex only for rho below 1/100, which the new one is."""
    signed = CURVATURES.clone()
    signed[-1] = -100.0
    found = reachable_envelope(problem(signed), *start(), Envelope(10.0, 0.0, 1e-3))
    assert found.rho == pytest.approx(1 / 400, rel=0.02)
    assert found.modulus == pytest.approx(300, rel=0.02)


@pytest.mark.parametrize("rho", [1e-4, 0.97 / 400])
def test_one_that_is_within_reach_stays(rho: float) -> None:
    wanted = Envelope(rho=rho, sigma=3.0, delta=1e-3)
    assert reachable_envelope(problem(), *start(), wanted) is wanted


def test_a_flat_lower_level_leaves_it_alone() -> None:
    wanted = Envelope(rho=10.0, sigma=0.0, delta=1e-3)
    assert reachable_envelope(problem(0 * CURVATURES), *start(), wanted) is wanted


def test_twenty_passes_reach_its_proximal_point_and_not_the_other() -> None:
    built, (x, y) = problem(), start()
    wanted = Envelope(rho=10.0, sigma=0.0, delta=1e-3)
    far = certify(built, x, y, wanted, tolerance=1e-3, passes=20)
    assert far.tolerance > 0.1
    found = reachable_envelope(built, x, y, wanted)
    near = certify(built, x, y, found, tolerance=1e-3, passes=20)
    assert near.tolerance == 1e-3
    # psi has curvatures from 1/rho to 1/rho + L, so the minimum is known.
    z = y / (1 + found.rho * CURVATURES)
    exact = float(0.5 * (CURVATURES * y).dot(y) - 0.5 * (CURVATURES * z).dot(z))
    exact -= float((y - z).dot(y - z)) / (2 * found.rho) + found.delta
    assert near.residual == pytest.approx(exact, abs=1e-6 / (2 * found.modulus))
    assert near.passes < far.passes


def test_a_certificate_counts_its_passes() -> None:
    """f, the gradients of the proximal point, one at y, and two for the gap."""
    count = 0

    def lower(x: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return 0.5 * (CURVATURES * y).dot(y)

    built = BilevelProblem(lambda x, y: (x * y[:1]).sum() + y.sum(), lower)
    found = certify(built, *start(), Envelope(1 / 400, 100.0, 1e-3), tolerance=1e-3)
    assert found.passes == 1 + count
    assert built.calls.passes == 0
    assert not math.isnan(found.kkt)
