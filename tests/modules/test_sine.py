"""The synthetic problem and its closed form."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import gap_at

from lightning_bilevel import BOME, Envelope, SineProblem


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


class TestQualification:
    """The gap has maxima in the interior, where R > 0 and its gradient is 0."""

    @pytest.fixture
    def module(self) -> SineProblem:
        module = SineProblem(n=1000, solver=BOME).double()
        # 2 t = rho cos t
        t = 0.242675
        for _ in range(5):
            t -= (2 * t - 0.5 * math.cos(t)) / (2 + 0.5 * math.sin(t))
        assert t == pytest.approx(0.242675, abs=1e-6)
        module.point = (
            torch.ones(1, dtype=torch.float64),
            torch.full((1000,), 1 + t, dtype=torch.float64),
        )
        return module

    def test_r_is_stationary_at_a_point_that_violates_it(self, module: SineProblem) -> None:
        problem = module.bilevel_problem({"upper": None, "lower": None})
        envelope = Envelope(rho=0.5, sigma=1.0, delta=1e-3)
        point = gap_at(problem, *module.point, envelope)
        assert point.residual == pytest.approx(245.03, abs=5e-3)
        assert float(point.grad_x.abs().max()) < 1e-9
        assert float(point.grad_y.norm()) < 1e-9

    def test_the_certificate_says_so(self, module: SineProblem) -> None:
        certificate = module.certify(batch={"upper": None, "lower": None})
        assert certificate is not None
        assert certificate.qualification == (
            "fails: the gap is periodic and has interior maxima, which are stationary points with "
            "R of at least 229.4"
        )
        assert certificate.theorem == "does not apply: the constraint qualification fails"

    def test_the_bound_of_a_feasible_point_does_not_hold_here(self, module: SineProblem) -> None:
        certificate = module.certify(batch={"upper": None, "lower": None})
        assert certificate is not None
        envelope = Envelope(rho=0.5, sigma=1.0, delta=1e-3)
        assert certificate.prox_distance == pytest.approx(2 * 0.242675 * math.sqrt(1000), rel=1e-5)
        assert envelope.distance_bound() < certificate.prox_distance <= certificate.distance_bound
        assert certificate.prox_stationarity <= certificate.stationarity_bound

    @pytest.mark.parametrize(
        ("envelope", "words"),
        [
            (Envelope(rho=0.5, sigma=1.0, delta=0.45), "fails: the gap is periodic"),
            # Above the bound; and where the proximal point need not be unique.
            (Envelope(rho=0.5, sigma=1.0, delta=0.46), "not known: for rho = 0.5 and delta = 0."),
            (Envelope(rho=1.0, sigma=0.9, delta=1e-3), "not known: for rho = 1 and delta = 0.001"),
        ],
    )
    def test_it_is_known_below_a_bound_of_the_gap(self, envelope: Envelope, words: str) -> None:
        module = SineProblem(n=2, solver=BOME).double()
        certificate = module.certify(batch={"upper": None, "lower": None}, envelope=envelope)
        assert certificate is not None
        assert certificate.qualification.startswith(words)

    @pytest.mark.parametrize("rho", [0.1, 0.5, 0.9])
    def test_a_point_has_at_least_the_gap_of_the_bound(self, rho: float) -> None:
        problem = (
            SineProblem(n=1, solver=BOME).double().bilevel_problem({"upper": None, "lower": None})
        )
        envelope = Envelope(rho=rho, sigma=1.0, delta=1.0)
        gaps = [
            gap_at(problem, torch.zeros(1).double(), torch.tensor([s]).double(), envelope).residual
            + 1
            for s in torch.linspace(0.0, 2 * math.pi, 101).tolist()
        ]
        assert max(gaps) >= math.sin(rho) - rho / 2 > 0
