"""What IVSP's own rules do with trials, the penalty and the inner loop."""

import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import groups, point_of, random_problem
from lightning_bilevel.solvers.ivsp.change import Change
from lightning_bilevel.solvers.ivsp.merit import Merit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel import (
    IVSP,
    BilevelProblem,
    Box,
    Calls,
    Envelope,
    Free,
    IVSPInfo,
    NonFiniteError,
    certify,
)
from lightning_bilevel.core.prox import inexact_prox
from lightning_bilevel.solvers.ivsp.constants import Constants
from lightning_bilevel.solvers.ivsp.penalty import Huber, Softplus, matching_factor
from lightning_bilevel.solvers.ivsp.point import Point
from lightning_bilevel.solvers.ivsp.rules import Own, Paper

DOUBLE = torch.float64


def run(seed: int, steps: int, **constants: float) -> tuple[list[IVSPInfo], list[Tensor]]:
    """IVSP without constants on a random problem; its records, and the points it was at."""
    problem, _, x, y, _ = random_problem(seed, 3, 5, 5.0)
    solver = IVSP(groups(x, y), **constants)
    history, points = [], []
    for _ in range(steps):
        history.append(solver.step(problem=problem))
        points.append(torch.cat(point_of(solver)))
    return history, points


class TestEarlyRejection:
    @pytest.mark.parametrize("seed", range(4))
    def test_never_changes_the_accepted_path(
        self, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Doubling makes both see the same curvatures: what a trial saw is a bound if it ended
        # early. The first steps are far too long, so that trials are rejected.
        monkeypatch.setattr(Own, "retry", Paper.retry)
        early, points = run(seed, 25, L_init=1e-7)
        monkeypatch.setattr(Own, "rejects_early", property(lambda self: False))
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
        solver.memory["L_start"] = 1e-6 * solver.memory["L_start"]
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
    def own(self) -> Own:
        problem, _, x, y, _ = random_problem(0, 3, 5, 5.0)
        solver = IVSP(groups(x, y))
        solver.step(problem=problem)
        return Own(Constants.read(solver.param_groups[0]))

    @pytest.mark.parametrize(
        ("seen", "expected"), [(0.1, 6.0), (10.0, 10.0), (1e9, 3072.0), (math.inf, 24.0)]
    )
    def test_is_the_curvature_that_was_seen_within_bounds(
        self, seen: float, expected: float
    ) -> None:
        assert self.own().retry(3.0, lambda: seen) == expected

    def test_a_search_on_a_quadratic_needs_two_trials_however_long_its_start(self) -> None:
        problem = BilevelProblem(
            lambda x, y: 0.5 * (x**2).sum() + 0.5 * (y**2).sum(), lambda x, y: 0.5 * (y**2).sum()
        )
        start = torch.ones(2, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
        solver = IVSP(groups(*start))
        solver.step(problem=problem)
        solver.memory["L_start"] /= 500
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

    def history(self, gamma0: float) -> list[IVSPInfo]:
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
        monkeypatch.setattr("lightning_bilevel.solvers.ivsp.rules._MATCHES", 3)
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
        solver = IVSP(groups(x, y))
        units = []
        for _ in range(31):
            solver.step(problem=problem)
            units.append(solver.constants["own_unit"])
        assert units[0] == units[9]
        assert units[10] <= 0.5 * units[9]
        assert all(later <= earlier for earlier, later in itertools.pairwise(units))
        # Only after each ten iterations, and the group measures x in the same unit.
        changes = [k for k in range(1, 31) if units[k] != units[k - 1]]
        assert all(k % 10 == 0 for k in changes)
        assert solver.param_groups[0]["unit"] == units[-1]

    def test_stays_where_both_levels_are_alike(self) -> None:
        problem, x, y = stiff_in_x(1.0, coupling=1.0)
        solver = IVSP(groups(x, y))
        first = solver.step(problem=problem)
        unit = solver.constants["own_unit"]
        for _ in range(40):
            solver.step(problem=problem)
        assert first.step > 0.0
        assert solver.constants["own_unit"] == unit

    def test_is_a_change_of_variables(self) -> None:
        problem, x, y = stiff_in_x(1e4)
        solver = IVSP(groups(x, y))
        for _ in range(10):
            info = solver.step(problem=problem)
        before = point_of(solver)
        factor = 0.25
        solver.memory["stiffness"] = 8.0
        scaled = solver._in_units(problem)
        assert solver.prepare(scaled, *solver._read(scaled)) == factor
        # The user's point and the values there are the same in the new unit.
        solver.param_groups[0]["unit"] *= factor
        scaled = solver._in_units(problem)
        x, y = solver._read(scaled)
        assert torch.equal(x * solver.param_groups[0]["unit"], before[0])
        assert scaled.upper(x, y).value == info.upper

    def test_the_theorem_counts_from_its_last_change(self) -> None:
        problem, x, y = stiff_in_x(1e4)
        solver = IVSP(groups(x, y))
        for _ in range(40):
            solver.step(problem=problem)
        began = solver.memory["began"]
        assert began > 0
        assert began % 10 == 0
        assert solver.proved is not None
        assert solver.proved.iteration > began

    def test_a_fault_in_the_iteration_that_shortens_it_leaves_all_as_it_was(self) -> None:
        """The theorem's point is kept in the unit of its iteration."""
        problem, x, y = stiff_in_x(1e4)
        fails = [False]
        broken = BilevelProblem(
            lambda x, y: problem.upper_terms[0](x, y) * (math.nan if fails[0] else 1.0),
            problem.lower_terms[0],
        )
        solver, healthy = (IVSP(groups(x.clone(), y.clone())) for _ in range(2))
        for _ in range(10):
            solver.step(problem=broken)
            healthy.step(problem=problem)
        before, unit = solver.proved, solver.param_groups[0]["unit"]
        assert before is not None
        fails[0] = True
        with pytest.raises(NonFiniteError):
            solver.step(problem=broken)
        after = solver.proved
        assert solver.param_groups[0]["unit"] == solver.constants["own_unit"] == unit
        assert after is not None
        assert torch.equal(after.x, before.x)
        assert torch.equal(after.y, before.y)
        # The next iteration shortens it, and goes on as a run without a fault.
        fails[0] = False
        for _ in range(3):
            assert solver.step(problem=broken).upper == healthy.step(problem=problem).upper
        assert solver.constants["own_unit"] == healthy.constants["own_unit"] < unit
        assert all(map(torch.equal, point_of(solver), point_of(healthy)))

    def test_changes_at_most_ten_times(self) -> None:
        problem, x, y = stiff_in_x(1.0)
        solver = IVSP(groups(x, y))
        solver.step(problem=problem)
        for _ in range(12):
            solver.memory.update(stiffness=4.0, iteration=20)
            solver.step(problem=problem)
        assert solver.memory["units"] == 10

    @pytest.mark.parametrize("stop", [9, 10, 11, 20])
    def test_a_resumed_run_goes_on_bit_for_bit(self, stop: int) -> None:
        problem, x, y = stiff_in_x(1e4)
        one = IVSP(groups(x.clone(), y.clone()))
        for _ in range(stop):
            one.step(problem=problem)
        two = IVSP(groups(*(level.clone() for level in point_of(one))))
        two.load_state_dict(one.state_dict())
        for _ in range(15):
            first, second = one.step(problem=problem), two.step(problem=problem)
            assert first.passes == second.passes
            assert first.upper == second.upper
        assert all(map(torch.equal, point_of(one), point_of(two)))

    def test_the_stiffness_is_the_ratio_of_the_curvatures(self) -> None:
        change = Change(products=(32.0, 4.0), squares=(2.0, 4.0), dv_dv=9.0)
        assert change.stiffness == pytest.approx(4.0)
        assert (change.dw_dv, change.dw_dw) == (36.0, 6.0)
        # A level that is not convex along the step says nothing.
        assert Change((32.0, -4.0), (2.0, 4.0), 1.0).stiffness is None
        assert Change((1.0, 0.0), (1.0, 1.0), 1.0).stiffness is None
        assert Change((1.0, 1.0), (0.0, 1.0), 1.0).stiffness is None
        tiny = Change((1e-300, 1.0), (1e-320, 1.0), 1.0).stiffness
        assert tiny is not None
        assert math.isfinite(tiny)


class TestTheReference:
    def test_lets_a_merit_rise_but_not_above_the_average(self) -> None:
        # A long valley: Barzilai-Borwein steps are not monotone there.
        spread = torch.logspace(-3, 0, 30, dtype=DOUBLE)
        problem = BilevelProblem(
            lambda x, y: 0.5 * (x**2).sum() + 0.5 * (spread * (y - 1) ** 2).sum(),
            lambda x, y: 0.5 * (spread * (y - x) ** 2).sum(),
        )
        solver = IVSP(groups(torch.ones(30, dtype=DOUBLE), -torch.ones(30, dtype=DOUBLE)))
        rises = 0
        for _ in range(60):
            excess = solver.memory.get("excess", 0.0)
            merit = solver._merit() if solver.constants["chosen"] is not None else None
            before = solver._known
            solver.step(problem=problem)
            after = solver._known
            if merit is None or before is None or after is None:
                continue
            rise = merit.value(after) - merit.value(before)
            # Up to the accuracy of the evaluations.
            assert rise <= excess + before.zeta + after.zeta + 0.1 * merit.mu
            rises += rise > before.zeta + after.zeta
        assert rises > 0

    def test_the_paper_has_none(self) -> None:
        assert Paper(constants=None).memory == 0.0  # type: ignore[arg-type]
        assert 0.0 < Own(constants=None).memory < 1.0  # type: ignore[arg-type]


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
    merit = Merit(gamma, mu=0.1, phi=Huber())
    residual = -0.04  # the slope of the smoothed plus is 0.1 there
    grad_f = torch.tensor([1.0, 0.0], dtype=DOUBLE)
    # gamma grad f + 0.1 grad R is ``left`` times gamma grad f.
    grad_R = (left - 1.0) * gamma / 0.1 * grad_f
    w = torch.zeros(2, dtype=DOUBLE)
    there = Point(w, 1, 1.0, grad_f, w[1:], 0.0, 0.0, (residual,), (grad_R,), 0)
    rules = Own(SimpleNamespace(gamma0=1.0, c2=1.0))  # type: ignore[arg-type]
    assert rules.next_penalty(there, merit, 1.0, 1.0, Free(), 0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gamma", "expected"), [(0.5, 0.25), (sys.float_info.min, sys.float_info.min)]
)
def test_a_violation_after_a_small_step_halves_the_penalty_but_never_to_zero(
    gamma: float, expected: float
) -> None:
    grad, w = torch.ones(2, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
    merit = Merit(gamma, mu=0.1, phi=Huber())
    there = Point(w, 1, 1.0, grad, w[1:], 0.0, 0.0, (0.2,), (grad,), 0)
    rules = Own(SimpleNamespace(gamma0=1.0, c2=1.0))  # type: ignore[arg-type]
    assert rules.next_penalty(there, merit, 0.0, 1.0, Free(), 0) == pytest.approx(expected)
