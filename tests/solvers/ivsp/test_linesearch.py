import math
from dataclasses import dataclass

import pytest

from lightning_bilevel.core.errors import BilevelError, LineSearchError
from lightning_bilevel.solvers.ivsp.linesearch import allowance, barzilai_borwein, next_excess
from lightning_bilevel.solvers.ivsp.search import backtrack


@dataclass
class Guess:
    L: float
    accepted: bool
    factor: float = 2.0

    @property
    def retry(self) -> float:
        return self.factor * self.L

    def __str__(self) -> str:
        return f"tried {self.L:g}"


class TestBacktrack:
    @pytest.mark.parametrize(
        ("threshold", "L", "count"),
        [(0.0, 0.5, 1), (0.5, 0.5, 1), (0.6, 1.0, 2), (100.0, 128.0, 9)],
    )
    def test_tries_again_with_what_the_trial_asks_for(
        self, threshold: float, L: float, count: int
    ) -> None:
        tried = []

        def trial(curvature: float) -> Guess:
            tried.append(curvature)
            return Guess(curvature, curvature >= threshold)

        assert backtrack(trial, 0.5, 100) == (Guess(L, True), L, count)
        assert tried == [0.5 * 2**i for i in range(count)]

    def test_accepts_in_the_last_trial(self) -> None:
        assert backtrack(lambda L: Guess(L, L >= 4.0), 1.0, 3)[1:] == (4.0, 3)

    def test_gives_up_at_the_cap_and_says_where(self) -> None:
        message = "^the line search made 3 trials, up to L = 4, and accepted none: tried 4$"
        with pytest.raises(LineSearchError, match=message):
            backtrack(lambda L: Guess(L, False), 1.0, 3)

    def test_its_error_is_a_bilevel_error(self) -> None:
        assert issubclass(LineSearchError, BilevelError)


class TestBarzilaiBorwein:
    def test_finds_the_curvature_of_a_quadratic(self) -> None:
        # v = (h / mu) w, the gradient of a merit with curvature h/mu, has L = mu |dv|^2 / |<dw,
        # dv>| = h.
        h, mu, dw = 7.0, 0.01, 3.0
        dv = h / mu * dw
        assert barzilai_borwein(dw * dv, dv**2, mu, 1.0, 1e-11, 1e11) == pytest.approx(mu * h / mu)
        assert barzilai_borwein(dw * dv, dv**2, mu, 1.0, 1e-11, 1e11, dw_dw=dw**2) == pytest.approx(
            mu * h / mu
        )

    def test_the_long_step_is_the_longer_one(self) -> None:
        # dv = diag(1, 100) dw: short weighs the stiff direction, long does not; both lie between
        # the two curvatures.
        dw, dv = (1.0, 0.1), (1.0, 10.0)
        product, square, length = (
            sum(a * b for a, b in zip(*pair, strict=True))
            for pair in ((dw, dv), (dv, dv), (dw, dw))
        )
        short = barzilai_borwein(product, square, 1.0, 1.0, 1e-11, 1e11)
        long = barzilai_borwein(product, square, 1.0, 1.0, 1e-11, 1e11, dw_dw=length)
        assert long == pytest.approx(2.0 / 1.01)
        assert short == pytest.approx(101.0 / 2.0)

    @pytest.mark.parametrize("sign", [-1.0, 1.0])
    def test_takes_the_modulus_of_the_product(self, sign: float) -> None:
        assert barzilai_borwein(sign * 2.0, 10.0, 0.1, 1.0, 1e-11, 1e11) == pytest.approx(0.5)

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
        assert barzilai_borwein(product, square, 1.0, previous, 1.0, 100.0) == pytest.approx(
            expected
        )


class TestAllowance:
    # theta = max(min(mu E / step, theta_hat L), theta_low), allowance = mu E^2 / (2 theta)
    @pytest.mark.parametrize(
        ("step", "L", "theta"),
        [(4.0, 100.0, 0.05), (0.1, 1.0, 1.5), (0.0, 1.0, 1.5), (1e9, 1.0, 1e-3)],
        ids=["ratio", "cap", "zero step", "floor"],
    )
    def test_by_hand(self, step: float, L: float, theta: float) -> None:
        got = allowance(step, L, 0.1, 2.0, theta_low=1e-3, theta_hat=1.5)
        assert got == pytest.approx(0.1 * 2.0**2 / (2 * theta))

    def test_is_half_of_error_times_step_where_the_ratio_rules(self) -> None:
        # mu E^2 / (2 mu E / step) = E step / 2
        assert allowance(0.3, 1e9, 0.1, 2.0, theta_low=1e-24, theta_hat=1.99) == pytest.approx(
            2.0 * 0.3 / 2
        )

    def test_vanishes_with_the_error(self) -> None:
        values = [
            allowance(0.3, 1.0, 0.1, error, theta_low=1e-24, theta_hat=1.99)
            for error in (1.0, 1e-3, 1e-6, 0.0)
        ]
        assert values == sorted(values, reverse=True)
        assert values[-1] == 0.0
        assert all(math.isfinite(value) for value in values)


class TestTheReferenceOfTheLineSearch:
    MERITS = (5.0, 4.0, 4.5, 1.0, 3.0, 0.5)

    @pytest.mark.parametrize("share", [0.0, 0.5, 0.85])
    def test_is_the_weighted_average_of_the_merits(self, share: float) -> None:
        excess, weight = 0.0, 1.0
        for count in range(2, len(self.MERITS) + 1):
            before, new = self.MERITS[count - 2 : count]
            excess, weight = next_excess(before + excess - new, weight, share)
            powers = [share**age for age in range(count)]
            terms = zip(powers, reversed(self.MERITS[:count]), strict=True)
            average = sum(power * merit for power, merit in terms) / sum(powers)
            assert weight == pytest.approx(sum(powers))
            assert new + excess == pytest.approx(max(average, new))
            if average < new:  # the average starts again at a merit above it
                break

    def test_of_the_paper_is_the_merit(self) -> None:
        assert next_excess(3.0, 1.0, 0.0) == (0.0, 1.0)

    def test_is_never_below_the_merit(self) -> None:
        assert next_excess(-1e-3, 4.0, 0.85)[0] == 0.0
