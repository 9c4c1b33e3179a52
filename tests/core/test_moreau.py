import math
import re
from typing import Any

import numpy as np
import pytest
import reference
import torch
from helpers import PROBLEMS, Problem, in_units, random_problem, sine_functions
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, InnerLoopError, NonFiniteError
from lightning_bilevel.core.lower import LowerPoint
from lightning_bilevel.core.moreau import Envelope, evaluate_gap, gradient_error
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.prox import inexact_prox, precise_prox
from lightning_bilevel.core.sets import Ball, Box, ConvexSet, Free

CASES = [(seed, *shape) for seed in range(4) for shape in ((3, 5, 5.0), (4, 8, 0.5))]
random_problems = pytest.mark.parametrize("case", CASES, ids=str)


class Setting:
    """A random weakly convex problem at a random point, with its exact proximal point."""

    def __init__(
        self, case: tuple[int, int, int, float], fraction: float = 0.5, delta: float = 0.05
    ) -> None:
        self.problem, self.functions, self.x, self.y, constants = random_problem(*case)
        self.envelope = Envelope(
            rho=fraction / constants["sigma"], sigma=constants["sigma"], delta=delta
        )
        self.L_yy, self.L_xy = constants["L_yy"], constants["L_xy"]
        self.exact_z = reference.prox(
            self.functions, self.x.numpy(), self.y.numpy(), self.envelope.rho, 1e-10
        )

    def psi(self, z: np.ndarray) -> float:
        offset = z - self.y.numpy()
        return self.functions.g(self.x.numpy(), z) + float(offset @ offset) / (
            2 * self.envelope.rho
        )

    def exact_gap(self, x: np.ndarray, y: np.ndarray) -> float:
        z = reference.prox(self.functions, x, y, self.envelope.rho, 1e-10)
        return reference.gap(self.functions, x, y, z, self.envelope.rho, self.envelope.delta)

    def inexact(self, zeta: float, **more: Any) -> tuple[Tensor, int]:
        options = {"L_yy": self.L_yy, **more}
        lower = self.problem.at(self.x)
        start = options.pop("start", self.y)
        return inexact_prox(
            lower, self.y, start, zeta, self.envelope, self.problem.lower_set, **options
        )


@random_problems
class TestInexactProx:
    @pytest.mark.parametrize("zeta", [1.0, 1e-2, 1e-4, 1e-8])
    @pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
    def test_is_as_accurate_as_promised(self, case: Any, zeta: float, fraction: float) -> None:
        s = Setting(case, fraction)
        z, halvings = s.inexact(zeta)
        excess = s.psi(z.numpy()) - s.psi(s.exact_z)
        assert -1e-12 <= excess <= zeta
        assert halvings == 0

    def test_does_what_the_reference_does(self, case: Any) -> None:
        s = Setting(case)
        settings = reference.Settings(
            rho=s.envelope.rho,
            sigma=s.envelope.sigma,
            mu0=1.0,
            block=1,
            gamma0=1.0,
            zeta_bar=1.0,
            L_init=1.0,
            L_xy=1.0,
            L_yy=s.L_yy,
        )
        z, _, count = reference.moreau(
            s.functions, s.x.numpy(), s.y.numpy(), s.y.numpy(), 1e-6, settings
        )
        got, _ = s.inexact(1e-6)
        np.testing.assert_allclose(got.numpy(), z, rtol=0, atol=1e-12)
        assert s.problem.calls.lower == count

    def test_one_step_from_a_warm_start(self, case: Any) -> None:
        s = Setting(case)
        z, _ = s.inexact(1e-12)
        before = s.problem.calls.lower
        s.inexact(1e-8, start=z)
        assert s.problem.calls.lower == before + 1

    def test_stays_in_the_set(self, case: Any) -> None:
        s = Setting(case)
        z, _ = s.inexact(1e-6)
        assert torch.equal(s.problem.lower_set.project(z), z)

    def test_halves_the_step_when_L_yy_is_too_small(self, case: Any) -> None:
        # An unconstrained lower level with curvature 100 times as large as said.
        s = Setting(case)
        f, g = s.problem.upper_terms[0], s.problem.lower_terms[0]
        problem = BilevelProblem(f, lambda x, y: g(x, y) + 50 * ((y - 1.0) ** 2).sum())
        envelope = Envelope(rho=1.0, sigma=0.0, delta=0.1)
        z, halvings = inexact_prox(problem.at(s.x), s.y, s.y, 1e-10, envelope, Free(), L_yy=1.0)
        right, none = inexact_prox(problem.at(s.x), s.y, s.y, 1e-16, envelope, Free(), L_yy=110.0)
        assert halvings >= 5
        assert none == 0
        torch.testing.assert_close(z, right, rtol=0, atol=2e-5)
        # Once learned, the step is used from the beginning.
        before = problem.calls.lower
        again, same = inexact_prox(
            problem.at(s.x), s.y, s.y, 1e-10, envelope, Free(), L_yy=1.0, halvings=halvings
        )
        assert same == halvings
        torch.testing.assert_close(again, z, rtol=0, atol=1e-12)
        assert problem.calls.lower - before < before


@pytest.mark.parametrize("convex_set", [Free(), Box(-0.5, 0.5)])
def test_acceleration_reaches_the_same_accuracy_in_far_fewer_iterations(
    convex_set: ConvexSet,
) -> None:
    curvatures = torch.logspace(-3, 2, 30, dtype=torch.float64)
    target = torch.linspace(-1, 1, 30, dtype=torch.float64)
    problem = BilevelProblem(
        lambda x, y: y.sum(),
        lambda x, y: (curvatures * (y - target) ** 2).sum() / 2,
        None,
        convex_set,
    )
    y = torch.zeros(30, dtype=torch.float64)
    envelope, zeta = Envelope(rho=10.0, sigma=0.0, delta=0.1), 1e-10
    # The minimiser of psi, coordinate by coordinate.
    exact = convex_set.project(curvatures * target / (curvatures + 0.1))

    def psi(z: Tensor) -> float:
        return problem.at(y).value(z) + float(((z - y) ** 2).sum()) / 20

    counts = []
    for accelerated in (False, True):
        before = problem.calls.lower
        z, halvings = inexact_prox(
            problem.at(y),
            y,
            y,
            zeta,
            envelope,
            convex_set,
            L_yy=100.0,
            accelerated=accelerated,
            max_inner=100_000,
        )
        counts.append(problem.calls.lower - before)
        assert halvings == 0
        assert 0 <= psi(z) - psi(exact) + 1e-14 <= zeta + 1e-14
    assert counts[1] < counts[0] / 5


@pytest.mark.parametrize("start", [0.9, 0.1, -1.0])
@pytest.mark.parametrize("L_yy", [1.0, 20.0, 40.0])
def test_a_too_long_step_is_noticed_also_between_bounds(L_yy: float, start: float) -> None:
    # In a box the residual cannot grow without bound: z jumps from one bound to the other.
    problem = BilevelProblem(
        lambda x, y: y.sum(), lambda x, y: 50 * ((y - x) ** 2).sum(), None, Box(-1.0, 1.0)
    )
    x, y = torch.tensor([0.3, -0.2]).double(), torch.full((2,), start, dtype=torch.float64)
    envelope = Envelope(rho=1.0, sigma=0.0, delta=0.1)
    z, halvings = inexact_prox(
        problem.at(x), y, y, 1e-12, envelope, problem.lower_set, L_yy=L_yy, max_inner=1000
    )
    torch.testing.assert_close(z, (100 * x + y) / 101, rtol=0, atol=2e-6)
    assert halvings >= 1


@random_problems
class TestGap:
    @pytest.mark.parametrize("zeta", [1e-1, 1e-3, 1e-6])
    def test_brackets_the_exact_one(self, case: Any, zeta: float) -> None:
        s = Setting(case)
        exact = s.exact_gap(s.x.numpy(), s.y.numpy())
        z, _ = s.inexact(zeta)
        point = evaluate_gap(s.problem.at(s.x), s.y, z, s.envelope)
        assert point.residual <= exact + 1e-12
        assert exact <= point.residual + zeta + 1e-12

    def test_gradient_is_that_of_the_exact_gap(self, case: Any) -> None:
        s = Setting(case)
        point = evaluate_gap(s.problem.at(s.x), s.y, torch.tensor(s.exact_z), s.envelope)
        x, y, h = s.x.numpy(), s.y.numpy(), 1e-5
        for got, size, shift in ((point.grad_x, x.size, (1, 0)), (point.grad_y, y.size, (0, 1))):
            for i in range(size):
                e = h * np.eye(size)[i]
                # The gap is defined (with z in Y) for y outside Y too.
                plus, minus = (
                    s.exact_gap(x + sign * shift[0] * e, y)
                    if shift[0]
                    else s.exact_gap(x, y + sign * e)
                    for sign in (1, -1)
                )
                assert float(got[i]) == pytest.approx((plus - minus) / (2 * h), abs=1e-7)

    def test_fields(self, case: Any) -> None:
        s = Setting(case)
        z, x, y = torch.tensor(s.exact_z), s.x.numpy(), s.y.numpy()
        point = evaluate_gap(s.problem.at(s.x), s.y, z, s.envelope)
        grad_x, grad_y = reference.gap_gradient(s.functions, x, y, s.exact_z, s.envelope.rho)
        np.testing.assert_allclose(point.grad_x.numpy(), grad_x, atol=1e-12)
        np.testing.assert_allclose(point.grad_y.numpy(), grad_y, atol=1e-12)
        assert point.lower == pytest.approx(s.functions.g(x, y), rel=1e-13)
        assert point.residual == pytest.approx(
            reference.gap(s.functions, x, y, s.exact_z, s.envelope.rho, s.envelope.delta), abs=1e-13
        )
        assert torch.equal(point.z, z)
        known = s.problem.at(s.x).gradient(s.y)
        again = evaluate_gap(s.problem.at(s.x), LowerPoint(s.y), LowerPoint(z), s.envelope, known)
        assert all(
            torch.equal(*map(torch.as_tensor, pair))
            for pair in zip(vars(again).values(), vars(point).values(), strict=True)
        )

    def test_error_of_the_gradient_is_within_its_bound(self, case: Any) -> None:
        # E with b = 0 bounds the error of grad R itself.
        s = Setting(case)
        exact = evaluate_gap(s.problem.at(s.x), s.y, torch.tensor(s.exact_z), s.envelope)
        for zeta in (1e-1, 1e-3, 1e-5):
            z, _ = s.inexact(zeta)
            point = evaluate_gap(s.problem.at(s.x), s.y, z, s.envelope)
            error = torch.cat([point.grad_x - exact.grad_x, point.grad_y - exact.grad_y]).norm()
            assert (
                error <= gradient_error(zeta, 1.0, s.envelope, L_xy=s.L_xy, b=0.0, B_R=0.0) + 1e-12
            )

    def test_bounds_at_infeasible_points(self, case: Any) -> None:
        """The bounds of the violation hold at points far from feasible, and those of 0 do not."""
        s = Setting(case, delta=1e-3)
        violation = s.exact_gap(s.x.numpy(), s.y.numpy())
        distance = float(np.linalg.norm(s.y.numpy() - s.exact_z))
        assert s.envelope.distance_bound() < distance <= s.envelope.distance_bound(violation)
        gradient = s.problem.at(s.x).gradient(torch.tensor(s.exact_z))
        stationarity = s.problem.lower_set.normal_cone_distance(torch.tensor(s.exact_z), gradient)
        assert stationarity <= distance / s.envelope.rho + 1e-9
        assert distance / s.envelope.rho <= s.envelope.stationarity_bound(violation)

    def test_bounds_at_feasible_points(self, case: Any) -> None:
        # Descent on the lower level leads to points with R <= 0, where |y - z| and the stationarity
        # of z are bounded.
        s = Setting(case, delta=1e-3)
        envelope, y = s.envelope, s.y.numpy()
        project, found, distances = s.functions.project_y, 0, []
        for _ in range(300):
            y = project(y - 0.3 * s.functions.gy(s.x.numpy(), y))
            if s.exact_gap(s.x.numpy(), y) <= 0.0:
                z = reference.prox(s.functions, s.x.numpy(), y, envelope.rho, 1e-10)
                found, distances = found + 1, [*distances, float(np.linalg.norm(y - z))]
                assert distances[-1] <= envelope.distance_bound()
                assert s.problem.lower_set.normal_cone_distance(
                    torch.tensor(z), s.problem.at(s.x).gradient(torch.tensor(z))
                ) <= (envelope.stationarity_bound() + 1e-9)
                # Back towards the boundary of R <= 0, where the bound is tightest.
                y = project(y + 0.5 * (y - z))
            if found == 20:
                break
        assert found
        assert envelope.stationarity_bound() == pytest.approx(
            envelope.distance_bound() / envelope.rho
        )


def test_gradient_error_by_hand() -> None:
    # sqrt(3^2 + 4^2) sqrt(2 * 0.02 / (4 - 0)) + 0.5 * 10 * 0.02 / 0.1
    envelope = Envelope(rho=0.25, sigma=0.0, delta=1.0)
    assert gradient_error(0.02, 0.1, envelope, L_xy=3.0, b=0.5, B_R=10.0) == pytest.approx(
        5 * 0.1 + 1.0
    )


class TestInnerLoopError:
    def problem(self) -> BilevelProblem:
        return BilevelProblem(lambda x, y: y.sum(), lambda x, y: ((y - x) ** 2).sum() / 2)

    def lower(self) -> Any:
        return self.problem().at(torch.ones(3, dtype=torch.float64))

    def test_the_cap_is_a_named_error(self) -> None:
        y, envelope = torch.zeros(3, dtype=torch.float64), Envelope(rho=1.0, sigma=0.0, delta=1.0)
        with pytest.raises(InnerLoopError) as caught:
            inexact_prox(self.lower(), y, y, 1e-12, envelope, Free(), L_yy=1e6, max_inner=7)
        message = str(caught.value)
        assert (
            "the inner loop made 7 iterations and its residual is 1.73, above 1.41e-06 (accuracy "
            "zeta=1e-12" in message
        )
        assert (
            "If L_yy=1e+06 is far larger than the curvature of the lower level, make it smaller"
            in message
        )
        assert (
            "kink near its minimiser (ReLU, absolute value, max) has no such curvature: smooth it"
            in message
        )
        assert "batch normalisation makes g another function at every step" in message
        assert isinstance(caught.value, BilevelError)

    def test_exactly_at_the_cap_it_is_no_error(self) -> None:
        y, envelope = torch.zeros(3, dtype=torch.float64), Envelope(rho=1.0, sigma=0.0, delta=1.0)
        problem = self.problem()
        x = torch.ones(3, dtype=torch.float64)
        inexact_prox(problem.at(x), y, y, 1e-6, envelope, Free(), L_yy=2.0)
        needed = problem.calls.lower
        inexact_prox(problem.at(x), y, y, 1e-6, envelope, Free(), L_yy=2.0, max_inner=needed)
        with pytest.raises(InnerLoopError):
            inexact_prox(
                problem.at(x), y, y, 1e-6, envelope, Free(), L_yy=2.0, max_inner=needed - 1
            )

    def test_non_finite_at_the_start_is_an_error(self) -> None:
        lower = BilevelProblem(lambda x, y: y.sum(), lambda x, y: torch.log(y).sum()).at(
            torch.ones(1)
        )
        y, envelope = -torch.ones(3), Envelope(rho=1.0, sigma=0.0, delta=1.0)
        with pytest.raises(NonFiniteError, match="lower-level function g"):
            inexact_prox(lower, y, y, 1e-3, envelope, Free(), L_yy=1.0)

    def test_non_finite_on_the_way_halves_the_step(self) -> None:
        # -log y + y^2/2 + (y - c)^2/2 has its minimiser inside y > 0; a full step from 0.01 jumps
        # out of the domain.
        problem = BilevelProblem(
            lambda x, y: y.sum(), lambda x, y: (-torch.log(y) + y**2 / 2).sum()
        )
        y = torch.full((1,), 3.0, dtype=torch.float64)
        envelope = Envelope(rho=1.0, sigma=0.0, delta=1.0)
        z, halvings = inexact_prox(problem.at(y), y, y, 1e-16, envelope, Free(), L_yy=-0.8)
        # -1/z + z + z - 3 = 0
        assert float(z) == pytest.approx((3 + math.sqrt(17)) / 4, abs=1e-7)
        assert halvings >= 1


class TestFloat32:
    @pytest.mark.parametrize("zeta", [1e-10, 1e-20, 1e-40])
    @random_problems
    def test_stops_at_its_resolution(self, case: Any, zeta: float) -> None:
        s = Setting(case)
        x, y = s.x.float(), s.y.float()
        z, halvings = inexact_prox(
            s.problem.at(x), y, y, zeta, s.envelope, s.problem.lower_set, L_yy=s.L_yy
        )
        assert z.dtype == torch.float32
        np.testing.assert_allclose(z.double().numpy(), s.exact_z, rtol=0, atol=1e-5)
        assert halvings == 0
        assert s.problem.calls.lower < 1000

    @pytest.mark.parametrize("seed", range(3))
    def test_stops_where_large_terms_cancel(self, seed: int) -> None:
        # g' = z - x and (z - y)/rho are both near 1000 and cancel at z near 0: the gradient's
        # rounding, not z's, is the floor.
        problem, x, y = self.cancelling(seed)
        z, _ = inexact_prox(
            problem.at(x),
            y,
            y,
            1e-10,
            Envelope(rho=0.7, sigma=0.0, delta=1e-3),
            Free(),
            L_yy=1.3,
            max_inner=1000,
        )
        assert z.norm() < 1e-2

    @pytest.mark.parametrize("seed", range(3))
    def test_precise_prox_stops_there_too(self, seed: int) -> None:
        problem, x, y = self.cancelling(seed)
        assert (
            precise_prox(problem.at(x), y, 0.7, Free(), tolerance=1e-5, max_iterations=1000).norm()
            < 1e-2
        )

    @pytest.mark.parametrize("count", [0, -1])
    @pytest.mark.parametrize("best_effort", [False, True])
    def test_precise_prox_needs_an_iteration(self, count: int, best_effort: bool) -> None:
        problem, x, y = self.cancelling(0)
        message = rf"`precise_prox\(max_iterations={count}\)` must be at least 1: without an "
        with pytest.raises(ValueError, match=message):
            precise_prox(
                problem.at(x), y, 0.7, Free(), max_iterations=count, best_effort=best_effort
            )

    def test_one_iteration_that_does_not_suffice_is_an_error_with_its_residual(self) -> None:
        problem, x, y = self.cancelling(0)
        with pytest.raises(
            InnerLoopError, match=r"made 1 iterations with rho=0\.7 and its gradient"
        ):
            precise_prox(problem.at(x), y, 0.7, Free(), tolerance=1e-5, max_iterations=1)

    def cancelling(self, seed: int) -> tuple[BilevelProblem, Tensor, Tensor]:
        x = 1000 * torch.randn(20, generator=torch.Generator().manual_seed(seed))
        return (
            BilevelProblem(lambda x, y: y.sum(), lambda x, y: ((y - x) ** 2).sum() / 2),
            x,
            -0.7 * x,
        )

    def test_stops_for_the_paper_s_problem(self) -> None:
        n = 1000
        problem = BilevelProblem(*sine_functions(), Box(-100.0, 100.0), Box(-100.0, 100.0))
        x, y = torch.tensor([-6.0]), torch.linspace(-6.0, 6.0, n)
        z, _ = inexact_prox(
            problem.at(x),
            y,
            y,
            1e-30,
            Envelope(rho=0.5, sigma=1.0, delta=1e-3),
            problem.lower_set,
            L_yy=1.0,
        )
        exact = reference.prox(
            reference.sine(n)[0], x.double().numpy(), y.double().numpy(), 0.5, 1e-8
        )
        np.testing.assert_allclose(z.double().numpy(), exact, rtol=0, atol=1e-5)


class TestPreciseProx:
    @pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-6, 1e-9])
    @pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
    @random_problems
    def test_meets_its_tolerance(self, case: Any, fraction: float, tolerance: float) -> None:
        s = Setting(case, fraction)
        rho = s.envelope.rho
        z = precise_prox(s.problem.at(s.x), s.y, rho, s.problem.lower_set, tolerance=tolerance)
        # |z - z*| <= (1 + eta L)/m |gradient mapping| for every step eta, and eta <= rho here.
        bound = (1 + rho * (s.L_yy + 1 / rho)) / s.envelope.modulus * tolerance
        assert np.linalg.norm(z.numpy() - s.exact_z) <= bound + 1e-9
        assert s.psi(z.numpy()) <= s.psi(s.y.numpy())
        assert torch.equal(s.problem.lower_set.project(z), z)

    @pytest.mark.parametrize("problem", PROBLEMS, ids=str)
    def test_knows_no_constant(self, problem: Problem) -> None:
        # The same lower level in units that make it 1e4 times as curved.
        x, y = problem.at("solution")
        built = problem.build()
        z = precise_prox(built.at(x), y, problem.envelope.rho, built.lower_set, tolerance=1e-10)
        scaled = in_units(problem, 1.0, 100.0)
        again = precise_prox(
            scaled.at(x), y / 100.0, problem.envelope.rho / 1e4, scaled.lower_set, tolerance=1e-8
        )
        torch.testing.assert_close(again * 100.0, z, rtol=0, atol=1e-8)

    @pytest.mark.parametrize("scale", [1.0, 1e10, 1e20, 1e40])
    @pytest.mark.parametrize("lower_set", [Box(-1.0, 1.0), Ball(1.0)], ids=["box", "ball"])
    def test_a_step_that_the_set_cuts_off_is_no_rounding(
        self, scale: float, lower_set: ConvexSet
    ) -> None:
        target = torch.tensor([0.3, -0.4], dtype=torch.float64)
        problem = BilevelProblem(
            lambda x, y: x.sum() + y.sum(),
            lambda x, y: scale * ((y - target) ** 2).sum(),
            lower_set=lower_set,
        )
        y = torch.tensor([0.6, 0.7], dtype=torch.float64)
        z = precise_prox(problem.at(torch.zeros(1, dtype=torch.float64)), y, 1.0, lower_set)
        exact = (2 * scale * target + y) / (2 * scale + 1)
        torch.testing.assert_close(z, exact, rtol=0.0, atol=1e-3)

    def test_the_cap_is_a_named_error(self) -> None:
        problem = BilevelProblem(lambda x, y: y.sum(), lambda x, y: ((y - 1) ** 2).sum() * 5e3)
        y = torch.zeros(3, dtype=torch.float64)
        with pytest.raises(
            InnerLoopError,
            match=(
                r"^the evaluation of the Moreau gap made 5 iterations with rho=1 and its gradient"
            ),
        ):
            precise_prox(problem.at(y), y, 1.0, Free(), tolerance=1e-9, max_iterations=5)


class TestEnvelope:
    def test_constants_by_hand(self) -> None:
        envelope = Envelope(rho=0.5, sigma=1.0, delta=0.02)
        assert envelope.modulus == pytest.approx(1.0)
        assert envelope.distance_bound() == pytest.approx(math.sqrt(2 * 0.5 * 0.02 / 0.5))
        assert envelope.stationarity_bound() == pytest.approx(math.sqrt(2 * 0.02 / (0.5 * 0.5)))
        assert envelope.distance_bound(0.03) == pytest.approx(math.sqrt(2 * 0.5 * 0.05 / 0.5))
        assert envelope.stationarity_bound(0.03) == pytest.approx(math.sqrt(2 * 0.05 / (0.5 * 0.5)))

    @pytest.mark.parametrize("unit", [0.5, 3.0])
    def test_in_a_unit_the_proximal_term_and_the_bounds_are_those_of_it(self, unit: float) -> None:
        envelope = Envelope(rho=0.5, sigma=1.0, delta=0.02)
        other = envelope.in_unit(unit)
        step = 0.7  # of v, and unit * step of y
        assert (unit * step) ** 2 / other.rho == pytest.approx(step**2 / envelope.rho)
        assert other.rho * other.sigma == pytest.approx(0.5)
        assert other.distance_bound(0.03) == pytest.approx(unit * envelope.distance_bound(0.03))
        assert other.delta == 0.02

    def test_bounds_of_the_synthetic_problem(self) -> None:
        """After 300 iterations it is violated by 2.65e-4, and |y - z| is 0.0290."""
        envelope = Envelope(rho=0.5, sigma=1.0, delta=1e-3)
        assert envelope.distance_bound() == pytest.approx(0.0447, abs=5e-5)
        assert envelope.distance_bound(2.65e-4) == pytest.approx(0.0503, abs=5e-5)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"rho": 0.0}, "`rho=0.0` must be positive and finite."),
            ({"rho": -1.0}, "`rho=-1.0` must be positive and finite."),
            ({"rho": math.inf}, "`rho=inf` must be positive and finite."),
            ({"rho": math.nan}, "`rho=nan` must be positive and finite."),
            ({"delta": 0.0}, "`delta=0.0` must be positive and finite."),
            (
                {"sigma": -0.1},
                "`sigma=-0.1` must be nonnegative and finite (0 for a convex lower level).",
            ),
            (
                {"sigma": math.nan},
                "`sigma=nan` must be nonnegative and finite (0 for a convex lower level).",
            ),
            (
                {"rho": 0.5, "sigma": 2.0},
                (
                    "`rho=0.5` must be smaller than 1/sigma = 0.5: otherwise the Moreau subproblem "
                    "is not strongly convex."
                ),
            ),
        ],
    )
    def test_errors(self, values: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Envelope(**{"rho": 0.5, "sigma": 1.0, "delta": 0.1, **values})
