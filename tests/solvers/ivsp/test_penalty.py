import math
from itertools import pairwise

import pytest
import reference

from lightning_bilevel.solvers.ivsp.penalty import (
    Huber,
    Smoothing,
    Softplus,
    inverse_penalty,
    needs_update,
    prox_accuracy,
    smoothing_function,
    smoothing_parameter,
)

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
    assert isinstance(smoothing_function("huber"), Huber)
    assert isinstance(smoothing_function("softplus"), Softplus)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (1, [8.0, 8 / 2 ** (1 / 3), 8 / 3 ** (1 / 3)]),
        (2, [8.0, 8.0, 8 / 2 ** (1 / 3), 8 / 2 ** (1 / 3), 8 / 3 ** (1 / 3)]),
    ],
)
def test_smoothing_parameter(block: int, expected: list[float]) -> None:
    assert [
        smoothing_parameter(k, 8.0, block, 1 / 3) for k in range(len(expected))
    ] == pytest.approx(expected)
    assert smoothing_parameter(7 * block, 8.0, block, 1 / 3) == pytest.approx(4.0)


def test_prox_accuracy() -> None:
    assert prox_accuracy(0.01, 3.0, 2.0) == pytest.approx(3e-4)
    assert prox_accuracy(1.0, 3.0, 3.01) == 3.0


def test_inverse_penalty() -> None:
    assert [inverse_penalty(t, 6.0) for t in (0, 1, 2, 3, 8)] == pytest.approx(
        [6, 6 / math.sqrt(2), 6 / math.sqrt(3), 3, 2]
    )


@pytest.mark.parametrize(
    ("residual", "step", "expected"),
    [
        (0.26, 0.29, True),
        (0.25, 0.29, False),  # R~ = 2 a mu is no violation beyond the smoothing scale
        (0.24, 0.29, False),
        (0.26, 0.30, True),  # a step of exactly c2 mu gamma is small
        (0.26, 0.31, False),
        (-1.0, 0.0, False),
        (0.26, 0.0, True),
    ],
)
def test_penalty_update(residual: float, step: float, expected: bool) -> None:
    # 2 a mu = 2 * 1/8 * 1 = 0.25 and c2 mu gamma = 0.6 * 1 * 0.5 = 0.3
    assert needs_update(residual, step, mu=1.0, gamma=0.5, a=1 / 8, c2=0.6) is expected


def test_penalty_update_scales_with_mu() -> None:
    assert needs_update(0.026, 0.029, mu=0.1, gamma=0.5, a=1 / 8, c2=0.6)
    assert not needs_update(0.026, 0.031, mu=0.1, gamma=0.5, a=1 / 8, c2=0.6)
    assert not needs_update(0.024, 0.029, mu=0.1, gamma=0.5, a=1 / 8, c2=0.6)
