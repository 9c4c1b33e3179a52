import math
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_bilevel.core.errors import BilevelError, LineSearchError
from lightning_bilevel.solvers.ivsp.constants import IVSPConstants
from lightning_bilevel.solvers.ivsp.linesearch import (
    Search,
    Secant,
    Trial,
    allowance,
    barzilai_borwein,
)


class Scripted(Search):
    """A search whose trials are accepted from a curvature on, and double it otherwise."""

    def __init__(self, threshold: float, most: int) -> None:
        self.threshold = threshold
        self.rules: Any = SimpleNamespace(constants=IVSPConstants(max_trials=most))
        self.here: Any = SimpleNamespace(release=lambda: None)
        self.failures = []
        self.tried: list[float] = []

    def trial(self, L: float) -> Trial:
        self.tried.append(L)
        return Trial(self.threshold <= L, 2.0, 1.0, 0.5, None, 2 * L)


class TestBacktrack:
    @pytest.mark.parametrize(
        ("threshold", "L", "count"),
        [(0.0, 0.5, 1), (0.5, 0.5, 1), (0.6, 1.0, 2), (100.0, 128.0, 9)],
    )
    def test_tries_again_with_what_the_trial_asks_for(
        self, threshold: float, L: float, count: int
    ) -> None:
        search = Scripted(threshold, count)  # it may be the last trial
        trial, *found = search.backtrack(0.5)
        assert trial.accepted
        assert found == [L, count]
        assert search.tried == [0.5 * 2**i for i in range(count)]

    def test_gives_up_at_the_cap_and_says_where(self) -> None:
        message = (
            r"^the line search made 3 trials, up to L = 4, and accepted none: the last trial has "
            r"merit 2, to be at most 1, after a step of 0\.5\.$"
        )
        with pytest.raises(LineSearchError, match=message) as caught:
            Scripted(math.inf, 3).backtrack(1.0)
        assert isinstance(caught.value, BilevelError)


def start(
    product: float, square: float, mu: float = 1.0, previous: float = 1.0, **more: Any
) -> float:
    """The curvature for <dw, dv> and |dv|^2, of which y has a part."""
    bounds = {name: more.pop(name, value) for name, value in (("L_min", 1e-11), ("L_max", 1e11))}
    length, long = more.pop("length", 1.0), more.pop("long", False)
    change = Secant((0.25 * product, 0.75 * product), (0.0, length), square)
    return barzilai_borwein(change, mu, previous, IVSPConstants(**bounds), long)


class TestBarzilaiBorwein:
    def test_finds_the_curvature_of_a_quadratic(self) -> None:
        # v = (h / mu) w, the gradient of a merit with curvature h/mu, has L = mu |dv|^2 / |<dw,
        # dv>| = h.
        h, mu, dw = 7.0, 0.01, 3.0
        dv = h / mu * dw
        assert start(dw * dv, dv**2, mu) == pytest.approx(h)
        assert start(dw * dv, dv**2, mu, length=dw**2, long=True) == pytest.approx(h)

    def test_the_long_step_is_the_longer_one(self) -> None:
        # dv = diag(1, 100) dw: short weighs the stiff direction, long does not; both lie between
        # the two curvatures. dw = (1, 0.1) and dv = (1, 10).
        assert start(2.0, 101.0, length=1.01, long=True) == pytest.approx(2.0 / 1.01)
        assert start(2.0, 101.0, length=1.01) == pytest.approx(101.0 / 2.0)

    @pytest.mark.parametrize("sign", [-1.0, 1.0])
    def test_takes_the_modulus_of_the_product(self, sign: float) -> None:
        assert start(sign * 2.0, 10.0, 0.1) == pytest.approx(0.5)

    @pytest.mark.parametrize(
        ("product", "square", "previous", "expected"),
        [
            (1e-24, 1e-24, 8.0, 4.0),  # counts as zero
            (1.01e-24, 1.01e-23, 8.0, 10.0),  # does not
            (0.0, 0.0, 8.0, 4.0),
            (1.0, 101.0, 8.0, 4.0),  # above L_max: half the previous start
            (1.0, 100.0, 8.0, 100.0),  # at it
            (1.0, 0.99, 8.0, 4.0),  # below L_min
            (1.0, 1.0, 8.0, 1.0),  # at it
            (1.0, 0.0, 1.5, 1.0),  # half the previous start is clipped from below
            (1.0, 0.0, 900.0, 100.0),  # and from above
        ],
    )
    def test_safeguards(
        self, product: float, square: float, previous: float, expected: float
    ) -> None:
        found = start(product, square, previous=previous, L_min=1.0, L_max=100.0)
        assert found == pytest.approx(expected)


class TestAllowance:
    # theta = max(min(mu E / step, theta_hat L), theta_low), allowance = mu E^2 / (2 theta)
    @pytest.mark.parametrize(
        ("step", "L", "theta"),
        [(4.0, 100.0, 0.05), (0.1, 1.0, 1.5), (0.0, 1.0, 1.5), (1e9, 1.0, 1e-3)],
        ids=["ratio", "cap", "zero step", "floor"],
    )
    def test_by_hand(self, step: float, L: float, theta: float) -> None:
        c = IVSPConstants(theta_low=1e-3, theta_hat=1.5)
        got = allowance(step, L, 0.1, 2.0, c)
        assert got == pytest.approx(0.1 * 2.0**2 / (2 * theta))

    def test_is_half_of_error_times_step_where_the_ratio_rules(self) -> None:
        # mu E^2 / (2 mu E / step) = E step / 2
        assert allowance(0.3, 1e9, 0.1, 2.0, IVSPConstants()) == pytest.approx(2.0 * 0.3 / 2)

    def test_vanishes_with_the_error(self) -> None:
        errors = (1.0, 1e-3, 1e-6, 0.0)
        values = [allowance(0.3, 1.0, 0.1, error, IVSPConstants()) for error in errors]
        assert values == sorted(values, reverse=True)
        assert values[-1] == 0.0
        assert all(math.isfinite(value) for value in values)
