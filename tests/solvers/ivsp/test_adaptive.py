"""What the adaptive rules do with trials, the penalty, the accuracy and the unit of x."""

import itertools
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import PLAIN, advance, facts, groups, point_of, random_problem
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel import IVSP, BilevelProblem, Box, Envelope, certify
from lightning_bilevel.core.errors import NonFiniteError
from lightning_bilevel.core.moreau import gradient_error
from lightning_bilevel.core.passes import Residuals
from lightning_bilevel.core.problem import Calls
from lightning_bilevel.core.prox import inexact_prox
from lightning_bilevel.core.sets import Free
from lightning_bilevel.solvers.ivsp import adaptive
from lightning_bilevel.solvers.ivsp.adaptive import AdaptiveRules, shortened, zhang_hager
from lightning_bilevel.solvers.ivsp.constants import IVSPConstants
from lightning_bilevel.solvers.ivsp.linesearch import Secant
from lightning_bilevel.solvers.ivsp.penalty import matching_factor
from lightning_bilevel.solvers.ivsp.point import Merit, Point
from lightning_bilevel.solvers.ivsp.rules import PaperRules
from lightning_bilevel.solvers.ivsp.smoothing import Huber, Softplus
from lightning_bilevel.solvers.ivsp.state import State
from lightning_bilevel.solvers.record import PenaltyInfo

DOUBLE = torch.float64


def run(seed: int, steps: int, **constants: float) -> tuple[list[PenaltyInfo], list[Tensor]]:
    """IVSP without constants on a random problem; its records, and the points it was at."""
    problem, _, x, y, _ = random_problem(seed, 3, 5, 5.0)
    solver = IVSP(groups(x, y), **constants)
    history, points = [], []
    for _ in range(steps):
        history.append(solver.step(problem=problem))
        points.append(torch.cat(point_of(solver)))
    return history, points


def rules_at(gamma: float, mu: float = 0.1, **constants: float) -> AdaptiveRules:
    """The rules at the penalty gamma and the smoothing mu, for two variables."""
    zeros = torch.zeros(1, dtype=DOUBLE)
    c = IVSPConstants(**{"gamma0": 1.0, "c2": 1.0, **constants})
    state = State(
        x=zeros, y=zeros, constants=c, estimated=(), own_unit=1.0, gamma=gamma, L_start=1.0
    )
    evaluate: Any = None
    return AdaptiveRules(state, evaluate, Merit(gamma, mu, Huber()), Free())


def point(residual: float, grad_f: Tensor, grad_R: Tensor) -> Point:
    w, none = torch.zeros(2, dtype=DOUBLE), dict.fromkeys(("below", "at_y", "at_z"))
    values: Any = {"f": 1.0, "grad_f": grad_f, "residual": residual, "grad_R": grad_R, **none}
    rest = {"zeta": 0.0, "lower": 0.0, "halvings": 0, "beside": Residuals()}
    return Point(w=w, split=1, z=w[1:], **values, **rest)


class TestEarlyRejection:
    @pytest.mark.parametrize("seed", range(4))
    def test_never_changes_the_accepted_path(
        self, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Doubling makes both see the same curvatures: what a trial saw is a bound if it ended
        # early. The first steps are far too long, so that trials are rejected.
        monkeypatch.setattr(AdaptiveRules, "next_L", PaperRules.next_L)
        early, points = run(seed, 25, L_init=1e-7)
        trial = AdaptiveRules.trial
        monkeypatch.setattr(
            AdaptiveRules,
            "trial",
            lambda self, here, w, zeta, exceeds: trial(self, here, w, zeta, lambda low: False),
        )
        whole, same = run(seed, 25, L_init=1e-7)
        assert all(torch.equal(a, b) for a, b in zip(points, same, strict=True))
        assert [info.trials for info in early] == [info.trials for info in whole]
        assert sum(info.trials - 1 for info in whole) > 2

    def test_a_hopeless_trial_costs_two_passes_and_a_value(self) -> None:
        # f is a bowl and g keeps y at 0: a step that is 1e6 times too long is hopeless by f alone.
        problem = BilevelProblem(
            lambda x, y: 0.5 * (x**2).sum() + 0.5 * (y**2).sum(), lambda x, y: 0.5 * (y**2).sum()
        )
        start = torch.ones(2, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
        solver = IVSP(groups(*start))
        solver.step(problem=problem)
        solver.run = replace(solver.run, L_start=1e-6 * solver.run.L_start)
        info = solver.step(problem=problem)
        rejected = info.trials - 1
        assert rejected >= 1
        # The accepted trial, and perhaps a sharper evaluation of the point before.
        assert info.calls.gap <= 2
        assert info.calls.upper == info.calls.values == info.trials
        assert info.calls.lower <= rejected + 10

    def test_three_values_count_as_one_pass(self) -> None:
        assert Calls(upper=1, lower=2, gap=3, values=2).passes == 9
        assert (Calls(values=2) + Calls(values=1)).passes == 1
        history, _ = run(0, 12)
        total = sum((info.calls for info in history), Calls())
        assert history[-1].passes == total.passes


class TestRetry:
    @pytest.mark.parametrize(
        ("seen", "expected"), [(0.1, 6.0), (10.0, 10.0), (1e9, 3072.0), (math.inf, 24.0)]
    )
    def test_is_the_curvature_that_was_seen_within_bounds(
        self, seen: float, expected: float
    ) -> None:
        assert rules_at(0.5).next_L(3.0, lambda: seen) == expected

    def test_a_search_on_a_quadratic_needs_two_trials_however_long_its_start(self) -> None:
        problem = BilevelProblem(
            lambda x, y: 0.5 * (x**2).sum() + 0.5 * (y**2).sum(), lambda x, y: 0.5 * (y**2).sum()
        )
        start = torch.ones(2, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
        solver = IVSP(groups(*start))
        solver.step(problem=problem)
        solver.run = replace(solver.run, L_start=solver.run.L_start / 500)
        assert solver.step(problem=problem).trials == 2


class TestPenalty:
    @pytest.mark.parametrize("phi", [Huber(), Softplus()])
    def test_the_matched_penalty_makes_the_constraint_hold(self, phi: Huber | Softplus) -> None:
        # The multiplier of a solved smoothed problem is phi'/gamma; with the new gamma the same
        # multiplier belongs to phi' = 1/2, which is R = 0.
        for residual in (-0.01, 0.0, 0.02):
            slope, gamma = phi.slope(residual, 0.1), 0.3
            matched = matching_factor(slope) * gamma
            assert slope / gamma * matched == pytest.approx(phi.slope(0.0, 0.1))
        assert matching_factor(1.0) == 0.5
        assert matching_factor(1e-3) == 2.0
        assert matching_factor(0.0) == 1.0

    def history(self, gamma0: float) -> list[PenaltyInfo]:
        # min (y - 1)^2/2 with g = y^2/2: R = 0 at y = sqrt(2 delta (1 + rho)/rho), so the
        # multiplier is known.
        problem = BilevelProblem(
            lambda x, y: 0.5 * ((y - 1) ** 2).sum() + 0.5 * (x**2).sum(),
            lambda x, y: 0.5 * (y**2).sum() + 0 * x.sum(),
        )
        start = torch.zeros(1, dtype=DOUBLE), torch.full((1,), 0.5, dtype=DOUBLE)
        solver = IVSP(groups(*start), delta=1e-2, rho=0.25, sigma=0.0, L_yy=1.0, gamma0=gamma0)
        return [solver.step(problem=problem) for _ in range(60)]

    @pytest.mark.parametrize("times", [1 / 30, 1.0, 30.0])
    def test_is_found_from_either_side(self, times: float) -> None:
        rho, delta = 0.25, 1e-2
        y = math.sqrt(2 * delta * (1 + rho) / rho)
        right = (1 - y) / (rho * y / (1 + rho))
        last = self.history(times / (2 * right))[-1]
        assert last.multiplier == pytest.approx(right, rel=1e-2)
        assert last.gamma == pytest.approx(1 / (2 * right), rel=5e-2)
        assert abs(last.residual) < 0.02 * last.mu

    def test_is_weakened_a_bounded_number_of_times(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adaptive, "_MATCHES", 3)
        gammas = [info.gamma for info in self.history(1e-6)]
        assert sum(a != b for a, b in itertools.pairwise(gammas)) == 3


class TestInnerLoop:
    def problem(self, curvature: Tensor) -> BilevelProblem:
        return BilevelProblem(
            lambda x, y: (y**2).sum() + (x**2).sum(),
            lambda x, y: 0.5 * (curvature * (y - x) ** 2).sum(),
        )

    def test_spectral_steps_keep_the_promise_and_need_fewer_gradients(self) -> None:
        curvature = torch.linspace(0.1, 4.0, 30, dtype=DOUBLE)
        envelope, y = Envelope(rho=1.0, sigma=0.0, delta=1e-3), torch.zeros(30, dtype=DOUBLE)
        x = torch.ones(30, dtype=DOUBLE)
        exact = curvature * x / (curvature + 1)
        counts = []
        for spectral in (False, True):
            problem = self.problem(curvature)
            z, _ = inexact_prox(
                problem.at(x), y, y, 1e-12, envelope, Free(), L_yy=4.0, spectral=spectral
            )
            gap = 0.5 * ((curvature + 1) * (z - exact) ** 2).sum()
            assert gap <= 1e-12
            counts.append(problem.calls.lower)
        assert counts[1] < 0.7 * counts[0]

    def test_a_curvature_far_above_the_given_one_is_seen_at_once(self) -> None:
        curvature = torch.tensor([1.0, 30.0], dtype=DOUBLE)
        problem = self.problem(curvature)
        x, y = torch.ones(2, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
        envelope = Envelope(rho=1.0, sigma=0.0, delta=1e-3)
        z, halvings = inexact_prox(
            problem.at(x), y, y, 1e-10, envelope, Free(), L_yy=1.0, spectral=True
        )
        assert halvings >= 3
        assert problem.calls.lower < 40
        torch.testing.assert_close(z, curvature / (curvature + 1), rtol=0, atol=1e-4)

    def test_a_known_first_gradient_is_not_computed_again(self) -> None:
        problem = self.problem(torch.ones(3, dtype=DOUBLE))
        x, y = torch.ones(3, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE)
        envelope = Envelope(rho=1.0, sigma=0.0, delta=1e-3)
        lower, points = problem.at(x), []
        for first in (None, lower.gradient(y)):
            before = problem.calls.lower
            z, _ = inexact_prox(lower, y, y, 1e-8, envelope, Free(), L_yy=1.0, first=first)
            points.append((z, problem.calls.lower - before))
        assert torch.equal(points[0][0], points[1][0])
        assert points[1][1] == points[0][1] - 1


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["relu", "tanh", "batch norm"])
def test_cleaning_with_a_network_reduces_the_kkt_residual_tenfold(kind: str) -> None:
    """Weights of 60 samples, every other label wrong; a network with the default initialisation."""
    torch.manual_seed(0)
    truth, inputs = torch.randn(8, 3), torch.randn(120, 8)
    labels = (inputs @ truth).argmax(1)
    noisy = labels[:60].clone()
    noisy[::2] = torch.randint(0, 3, (30,))
    layers: list[nn.Module] = [nn.Linear(8, 16), nn.Tanh() if kind == "tanh" else nn.ReLU()]
    if kind == "batch norm":
        layers.insert(1, nn.BatchNorm1d(16, track_running_stats=False))
    net = nn.Sequential(*layers, nn.Linear(16, 3))
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}

    def outputs(y: Tensor, batch: Tensor) -> Tensor:
        parts = y.split([shape.numel() for shape in shapes.values()])
        parameters = {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        return torch.func.functional_call(net, parameters, (batch,))

    def lower(x: Tensor, y: Tensor) -> Tensor:
        losses = cross_entropy(outputs(y, inputs[:60]), noisy, reduction="none")
        return (x.sigmoid() * losses).mean()

    problem = BilevelProblem(
        lambda x, y: cross_entropy(outputs(y, inputs[60:]), labels[60:]),
        lower,
        Box(-5.0, 5.0),
        Box(-100.0, 100.0),
    )
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    solver = IVSP(groups(torch.zeros(60), start))
    residuals = []
    for number in range(120):
        solver.step(problem=problem)
        if number in (0, 119):
            assert solver.envelope is not None
            point = point_of(solver)
            certificate = certify(
                problem, *point, solver.envelope, multiplier=solver.multiplier, tolerance=1e-4
            )
            residuals.append(certificate.kkt)
    assert residuals[1] < residuals[0] / 10


@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_excuses_no_long_step(seed: int) -> None:
    """In float32 the error of the gradient has a floor, which lies above a small mapping."""
    generator = torch.Generator().manual_seed(seed)
    curvature = torch.logspace(-2, 0, 20)
    target = torch.randn(20, generator=generator)
    problem = BilevelProblem(
        lambda x, y: (curvature * (y - target) ** 4).sum(),
        lambda x, y: 1 + 0.5 * (curvature * (y - x) ** 2).sum(),
        upper_set=Box(-9, 9),
        lower_set=Box(-9, 9),
    )
    solver = IVSP(groups(torch.zeros(20), torch.zeros(20)))
    values = [solver.step(problem=problem).upper for _ in range(320)]
    best = list(itertools.accumulate(values, min))
    rises = [then / least for least, then in zip(best, values[1:], strict=False) if least > 1e-9]
    assert values[-1] < 1e-8
    assert max(rises) < 500  # by the L of the step itself: 1e5 and 3e3


def stiff_in_x(factor: float, coupling: float = 0.01) -> tuple[BilevelProblem, Tensor, Tensor]:
    """f is ``factor`` times as curved in x as in y, and the solution of g moves by ``coupling``."""
    spread = torch.linspace(0.5, 2.0, 8, dtype=DOUBLE)
    problem = BilevelProblem(
        lambda x, y: 0.5 * (spread * (factor * (x - 1) ** 2 + (y - 2) ** 2)).sum(),
        lambda x, y: 0.5 * (spread * (y - coupling * x) ** 2).sum(),
    )
    return problem, torch.zeros(8, dtype=DOUBLE), torch.full((8,), 0.3, dtype=DOUBLE)


class TestTheUnitOfX:
    def test_gets_shorter_where_the_merit_is_stiffer_in_x(self) -> None:
        problem, x, y = stiff_in_x(1e4)
        solver = IVSP(groups(x, y, (2.0, 1.0)))
        units = []
        for _ in range(31):
            solver.step(problem=problem)
            units.append(solver.run.own_unit)
        assert units[0] == units[9]
        assert units[10] <= 0.5 * units[9]
        assert all(later <= earlier for earlier, later in itertools.pairwise(units))
        # Only after each ten iterations, beside the unit of the group.
        changes = [k for k in range(1, 31) if units[k] != units[k - 1]]
        assert all(k % 10 == 0 for k in changes)
        assert solver.run.units == (2.0 * units[-1], 1.0)
        assert solver.param_groups[0]["unit"] == 2.0

    def test_stays_where_both_levels_are_alike(self) -> None:
        problem, x, y = stiff_in_x(1.0, coupling=1.0)
        solver = IVSP(groups(x, y))
        first = solver.step(problem=problem)
        unit = solver.run.own_unit
        for _ in range(40):
            solver.step(problem=problem)
        assert first.step > 0.0
        assert solver.run.own_unit == unit

    def test_a_shorter_unit_leaves_the_point(self) -> None:
        problem, x, y = stiff_in_x(1e4)
        solver = IVSP(groups(x, y))
        advance(solver, problem, 10)
        before = replace(solver.run, stiffness=8.0)
        after = shortened(before)
        assert (after.units[0], after.own_unit) == (0.25 * before.units[0], 0.25 * before.own_unit)
        assert after.x is before.x
        assert after.y is before.y
        assert (after.stiffness, after.shortened, after.point) == (0.0, 1, None)
        assert shortened(replace(before, k=11)).units == before.units
        assert shortened(replace(before, stiffness=-8.0)).units == before.units

    def test_the_theorem_counts_from_its_last_change(self) -> None:
        problem, x, y = stiff_in_x(1e4)
        solver = IVSP(groups(x, y))
        for _ in range(40):
            solver.step(problem=problem)
        began = solver.run.theorem.began
        assert began > 0
        assert began % 10 == 0
        assert solver.proved is not None
        assert solver.proved.iteration > began

    def test_a_fault_in_the_iteration_that_shortens_it_leaves_all_as_it_was(self) -> None:
        problem, x, y = stiff_in_x(1e4)
        fails = [False]
        broken = BilevelProblem(
            lambda x, y: problem.upper_terms[0](x, y) * (math.nan if fails[0] else 1.0),
            problem.lower_terms[0],
        )
        solver, healthy = (IVSP(groups(x, y)) for _ in range(2))
        advance(solver, broken, 10)
        advance(healthy, problem, 10)
        run = solver.run
        fails[0] = True
        with pytest.raises(NonFiniteError):
            solver.step(problem=broken)
        assert solver.run is run
        # The next iteration shortens it, and goes on as a run without a fault.
        fails[0] = False
        for got, expected in zip(
            advance(solver, broken, 3), advance(healthy, problem, 3), strict=True
        ):
            assert facts(got) == facts(expected)
        assert solver.run.own_unit == healthy.run.own_unit < run.own_unit
        assert all(map(torch.equal, point_of(solver), point_of(healthy)))

    def test_changes_at_most_ten_times(self) -> None:
        problem, x, y = stiff_in_x(1.0)
        solver = IVSP(groups(x, y))
        solver.step(problem=problem)
        for _ in range(12):
            solver.run = replace(solver.run, stiffness=4.0, k=20)
            solver.step(problem=problem)
        assert solver.run.shortened == 10

    def test_the_stiffness_is_the_ratio_of_the_curvatures(self) -> None:
        def ratio(products: tuple[float, float], squares: tuple[float, float]) -> float | None:
            return Secant(products, squares, dv_dv=9.0).log2_curvature_ratio

        assert ratio((32.0, 4.0), (2.0, 4.0)) == pytest.approx(4.0)
        # A level that is not convex along the step says nothing.
        assert ratio((32.0, -4.0), (2.0, 4.0)) is None
        assert ratio((1.0, 0.0), (1.0, 1.0)) is None
        assert ratio((1.0, 1.0), (0.0, 1.0)) is None
        tiny = ratio((1e-300, 1.0), (1e-320, 1.0))
        assert tiny is not None
        assert math.isfinite(tiny)


class TestTheReference:
    MERITS = (5.0, 4.0, 4.2, 1.0, 3.0, 0.5)  # none is above the average

    def test_is_the_weighted_average_of_the_merits(self) -> None:
        excess, weight = 0.0, 1.0
        for count in range(2, len(self.MERITS) + 1):
            before, new = self.MERITS[count - 2 : count]
            excess, weight = zhang_hager(before + excess - new, weight)
            powers = [0.85**age for age in range(count)]
            terms = zip(powers, reversed(self.MERITS[:count]), strict=True)
            average = sum(power * merit for power, merit in terms) / sum(powers)
            assert weight == pytest.approx(sum(powers))
            assert new + excess == pytest.approx(average)

    def test_is_never_below_the_merit(self) -> None:
        assert zhang_hager(-1e-3, 4.0)[0] == 0.0

    def test_lets_a_merit_rise_but_not_above_the_average(self) -> None:
        # A long valley: Barzilai-Borwein steps are not monotone there.
        spread = torch.logspace(-3, 0, 30, dtype=DOUBLE)
        problem = BilevelProblem(
            lambda x, y: 0.5 * (x**2).sum() + 0.5 * (spread * (y - 1) ** 2).sum(),
            lambda x, y: 0.5 * (spread * (y - x) ** 2).sum(),
        )
        solver = IVSP(groups(torch.ones(30, dtype=DOUBLE), -torch.ones(30, dtype=DOUBLE)))
        solver.step(problem=problem)
        rises = 0
        for _ in range(60):
            run = solver.run
            merit = Merit(run.gamma, run.constants.mu(run.k), run.constants.phi)
            solver.step(problem=problem)
            before, after = run.point, solver.run.point
            if before is None or after is None:
                continue
            rise = merit.value(after) - merit.value(before)
            # Up to the accuracy of the evaluations.
            assert rise <= run.excess + before.zeta + after.zeta + 0.1 * merit.mu
            rises += rise > before.zeta + after.zeta
        assert rises > 0

    def test_the_paper_has_none(self) -> None:
        problem, _, x, y, known = random_problem(0, 3, 5, 5.0)
        given = {"rho": 0.5 / known["sigma"], "sigma": known["sigma"], "rules": "paper"}
        solver = IVSP(groups(x, y), **{**PLAIN, **given})
        for _ in range(20):
            solver.step(problem=problem)
            assert (solver.run.excess, solver.run.weight) == (0.0, 1.0)


def test_the_accuracy_keeps_the_error_below_half_of_the_mapping() -> None:
    envelope = Envelope(rho=0.3, sigma=1.0, delta=1e-3)
    rules = rules_at(1.0, mu=0.02, rho=0.3, sigma=1.0, L_xy=2.0)
    here = point(0.0, *torch.zeros(2, 2, dtype=DOUBLE))
    for mapping in (1e-6, 1e-2, 30.0):
        zeta = rules.accuracy(mapping, here, B_R=5.0)
        error = gradient_error(zeta, 0.02, envelope, L_xy=2.0, b=1.0, B_R=5.0)
        assert 0.25 * mapping <= error <= 0.5 * mapping * (1 + 1e-12)


@pytest.mark.parametrize(
    ("gamma", "left", "expected"),
    [
        # Below gamma0 = 1 it doubles soon; beyond, only where the smoothed problem is solved.
        (0.25, 0.2, 0.5),
        (0.25, 0.6, 0.25),
        (0.75, 0.2, 0.75),
        (0.75, 0.01, 1.5),
    ],
)
def test_a_penalty_that_is_too_strong_returns_to_its_start(
    gamma: float, left: float, expected: float
) -> None:
    residual = -0.04  # the slope of the smoothed plus is 0.1 there
    grad_f = torch.tensor([1.0, 0.0], dtype=DOUBLE)
    # gamma grad f + 0.1 grad R is ``left`` times gamma grad f.
    there = point(residual, grad_f, (left - 1.0) * gamma / 0.1 * grad_f)
    assert rules_at(gamma).next_penalty(there, 1.0, 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gamma", "expected"), [(0.5, 0.25), (sys.float_info.min, sys.float_info.min)]
)
def test_a_violation_after_a_small_step_halves_the_penalty_but_never_to_zero(
    gamma: float, expected: float
) -> None:
    grad = torch.ones(2, dtype=DOUBLE)
    assert rules_at(gamma).next_penalty(point(0.2, grad, grad), 0.0, 1.0) == expected
