import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import reference

from lightning_bilevel.solvers.ivsp.constants import IVSPConstants
from lightning_bilevel.solvers.ivsp.penalty import inverse_penalty, must_update
from lightning_bilevel.solvers.ivsp.point import Merit
from lightning_bilevel.solvers.ivsp.smoothing import Huber, Smoothing, Softplus

smoothings = pytest.mark.parametrize("phi", [Huber(), Softplus()], ids=["huber", "softplus"])
widths = pytest.mark.parametrize("mu", [1e-6, 1e-2, 1.0, 50.0])


def grid(mu: float) -> list[float]:
    """Points on both sides of the kink, at the joints of the Huber function, and far away."""
    return [
        s * mu * v
        for s in (-1, 1)
        for v in (0.0, 0.01, 0.3, 0.499, 0.5, 0.501, 1.0, 3.0, 40.0, 1e6)
    ]


@widths
@smoothings
class TestSmoothing:
    def test_is_within_a_mu_of_the_plus_function(self, phi: Smoothing, mu: float) -> None:
        for t in grid(mu):
            assert abs(phi.value(t, mu) - max(t, 0.0)) <= phi.a * mu * (1 + 1e-12)

    def test_attains_that_distance_at_zero(self, phi: Smoothing, mu: float) -> None:
        assert phi.value(0.0, mu) == pytest.approx(phi.a * mu)

    def test_slope_is_the_derivative(self, phi: Smoothing, mu: float) -> None:
        h = 1e-5 * mu
        for t in grid(mu)[:-1]:
            difference = (phi.value(t + h, mu) - phi.value(t - h, mu)) / (2 * h)
            # Cancellation in the difference grows with |t| / h.
            assert phi.slope(t, mu) == pytest.approx(difference, abs=1e-5 + 1e-15 * abs(t) / h)

    def test_slope_is_monotone_between_0_and_1_and_lipschitz(
        self, phi: Smoothing, mu: float
    ) -> None:
        points = sorted(grid(mu))
        for s, t in pairwise(points):
            assert 0.0 <= phi.slope(s, mu) <= phi.slope(t, mu) <= 1.0
            assert phi.slope(t, mu) - phi.slope(s, mu) <= phi.b / mu * (t - s) * (1 + 1e-9)

    def test_lipschitz_constant_is_attained_at_zero(self, phi: Smoothing, mu: float) -> None:
        h = 1e-4 * mu
        assert (phi.slope(h, mu) - phi.slope(-h, mu)) / (2 * h) == pytest.approx(
            phi.b / mu, rel=1e-6
        )

    def test_far_away_it_is_the_plus_function(self, phi: Smoothing, mu: float) -> None:
        for t in (1e6 * mu, 1e300):
            assert (phi.value(t, mu), phi.slope(t, mu)) == (t, 1.0)
            assert (phi.value(-t, mu), phi.slope(-t, mu)) == (0.0, 0.0)

    def test_equals_the_reference(self, phi: Smoothing, mu: float) -> None:
        name = type(phi).__name__.lower()
        assert (phi.a, phi.b) == reference.SMOOTHING_CONSTANTS[name]
        for t in grid(mu):
            assert (phi.value(t, mu), phi.slope(t, mu)) == pytest.approx(
                reference.smoothed_plus(t, mu, name), rel=1e-13
            )


def test_smoothing_function_by_name() -> None:
    assert isinstance(IVSPConstants(smoothing="huber").phi, Huber)
    assert isinstance(IVSPConstants(smoothing="softplus").phi, Softplus)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (1, [8.0, 8 / 2 ** (1 / 3), 8 / 3 ** (1 / 3)]),
        (2, [8.0, 8.0, 8 / 2 ** (1 / 3), 8 / 2 ** (1 / 3), 8 / 3 ** (1 / 3)]),
    ],
)
def test_smoothing_parameter(block: int, expected: list[float]) -> None:
    c = IVSPConstants(mu0=8.0, block=block)
    assert [c.mu(k) for k in range(len(expected))] == pytest.approx(expected)
    assert c.mu(7 * block) == pytest.approx(4.0)


def test_prox_accuracy() -> None:
    assert IVSPConstants(mu0=0.01, zeta_bar=3.0, block=1, r=0.6, q=2.0).zeta(0) == pytest.approx(
        3e-4
    )
    assert IVSPConstants(mu0=1.0, zeta_bar=3.0, block=1, q=3.01).zeta(0) == 3.0
    # mu falls to a half after 7 blocks.
    assert IVSPConstants(mu0=1.0, zeta_bar=3.0, block=2, q=4.0).zeta(14) == pytest.approx(3 / 16)


def test_inverse_penalty() -> None:
    assert [inverse_penalty(t, 6.0) for t in (0, 1, 2, 3, 8)] == pytest.approx(
        [6, 6 / math.sqrt(2), 6 / math.sqrt(3), 3, 2]
    )


@pytest.mark.parametrize(
    ("mu", "residual", "step", "expected"),
    [
        (1.0, 0.26, 0.29, True),
        (1.0, 0.25, 0.29, False),  # R~ = 2 a mu is no violation beyond the smoothing scale
        (1.0, 0.24, 0.29, False),
        (1.0, 0.26, 0.30, True),  # a step of exactly c2 mu gamma is small
        (1.0, 0.26, 0.31, False),
        (1.0, -1.0, 0.0, False),
        (1.0, 0.26, 0.0, True),
        # Both bounds scale with mu.
        (0.1, 0.026, 0.029, True),
        (0.1, 0.026, 0.031, False),
        (0.1, 0.024, 0.029, False),
    ],
)
def test_penalty_update(mu: float, residual: float, step: float, expected: bool) -> None:
    # 2 a mu = 2 * 1/8 * 1 = 0.25 and c2 mu gamma = 0.6 * 1 * 0.5 = 0.3
    there: Any = SimpleNamespace(worst=residual)
    assert must_update(there, step, Merit(0.5, mu, Huber()), 0.6) is expected
