import dataclasses
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from clocks import Clock
from helpers import (
    PLAIN,
    PROBLEMS,
    Problem,
    advance,
    facts,
    groups,
    in_units,
    make_ivsp,
    paper_constants,
    point_of,
    random_problem,
    sine_functions,
)
from tables import every_problem
from torch import Tensor

from lightning_bilevel import IVSP, BilevelProblem, Box, Envelope, certify, solve
from lightning_bilevel.core.errors import (
    BilevelError,
    InnerLoopError,
    LineSearchError,
    NonFiniteError,
)
from lightning_bilevel.core.problem import Calls
from lightning_bilevel.core.prox import precise_prox
from lightning_bilevel.solvers.record import PenaltyInfo

by_name = {problem.name: problem for problem in PROBLEMS}
both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)


# ---------------------------------------------------------------- the same path as the reference


def run_both(
    problem: BilevelProblem,
    functions: reference.Functions,
    x: Tensor,
    y: Tensor,
    settings: reference.Settings,
    steps: int,
) -> tuple[list[PenaltyInfo], list[tuple[Tensor, Tensor, Tensor]], list[reference.Record], int]:
    """IVSP and the reference from the same start: records and points of both."""
    records, inner_at_start = reference.ivsp(functions, x.numpy(), y.numpy(), settings, steps)
    optimizer = IVSP(groups(x, y), **dataclasses.asdict(settings))
    history, points = [], []
    for _ in range(steps):
        history.append(optimizer.step(problem=problem))
        points.append((*point_of(optimizer), optimizer.run.z))
    return history, points, records, inner_at_start


def assert_same_path(run: tuple[Any, Any, list[reference.Record], int], tolerance: float) -> None:
    history, points, records, inner_at_start = run
    for k, (info, point, record) in enumerate(zip(history, points, records, strict=True)):
        counts = (
            info.inner_iterations - (inner_at_start if k == 0 else 0),
            info.trials,
            info.penalty_updates,
        )
        assert counts == (record.inner_iterations, record.trials, record.t), (
            f"counts of iteration {k + 1}"
        )
        for got, expected in zip(point, (record.x, record.y, record.z), strict=True):
            np.testing.assert_allclose(
                got.numpy(), expected, rtol=0, atol=tolerance, err_msg=f"iteration {k + 1}"
            )
        numbers = (info.upper, info.residual, info.step, info.multiplier)
        assert numbers == pytest.approx(
            (record.f, record.R, record.step, record.multiplier), rel=1e-6, abs=10 * tolerance
        )
        assert (info.mu, info.gamma) == pytest.approx((record.mu, record.gamma), rel=1e-14)
        assert (info.L, info.L_start) == pytest.approx((record.L, record.L_start), rel=1e-5)
        assert info.iteration == k + 1


# Settings under which every detail of the Armijo test decides somewhere: a large allowance and a
# narrow range for L; and small ones with many iterations per smoothing.
STRESS = {
    "wide": {
        "mu0": 1.0,
        "block": 1,
        "gamma0": 0.5,
        "delta": 0.05,
        "zeta_bar": 0.05,
        "c1": 1.0,
        "c2": 20.0,
        "B_R": 1.0,
        "L_init": 0.02,
        "L_min": 0.02,
        "L_max": 0.2,
    },
    "narrow": {
        "mu0": 0.1,
        "block": 10,
        "gamma0": 0.2,
        "delta": 0.05,
        "zeta_bar": 1e-4,
        "L_init": 1e-3,
        "B_R": 1.0,
    },
}


def settings_for(constants: dict[str, Any], **more: Any) -> reference.Settings:
    known = {name: constants[name] for name in ("sigma", "L_xy", "L_yy")}
    return reference.Settings(rho=0.5 / constants["sigma"], **known, **more)


WIDE_BOX, NARROW_BOX = (3, 5, 5.0), (4, 8, 0.5)


# Each seed and each box meets both settings, and each box both smoothings.
@pytest.mark.parametrize(
    ("name", "box", "smoothing", "seed"),
    [
        (name, (WIDE_BOX, NARROW_BOX)[(seed + (name == "wide")) % 2], "huber", seed)
        for name in STRESS
        for seed in range(6)
    ]
    + [("wide", WIDE_BOX, "softplus", 0), ("wide", NARROW_BOX, "softplus", 1)],
)
def test_same_path_as_the_reference_with_line_search(
    name: str, box: tuple[int, int, float], smoothing: Any, seed: int
) -> None:
    problem, functions, x, y, constants = random_problem(seed, *box)
    settings = settings_for(constants, smoothing=smoothing, **STRESS[name])
    assert_same_path(run_both(problem, functions, x, y, settings, 30), 1e-8)


@pytest.mark.parametrize(("rise", "trials"), [(5e-13, 1), (2e-12, 2)])
def test_the_armijo_test_forgives_the_paper_s_rounding_error(rise: float, trials: int) -> None:
    # The lower level is idle (y = z = 0, R = -1), tau is 1e-20, and the first trial x = 1 raises f
    # by a known amount.
    problem = BilevelProblem(
        lambda x, y: (-x + (1 + rise) * x**2).sum() + 0 * y.sum(), lambda x, y: (y**2).sum() / 2
    )
    zeros = torch.zeros(1, dtype=torch.float64)
    optimizer = IVSP(
        groups(zeros, zeros),
        **{**PLAIN, "mu0": 1.0, "zeta_bar": 1e-40},
        rho=0.5,
        sigma=0.0,
        delta=1.0,
        c1=1e-300,
    )
    info = optimizer.step(problem=problem)
    assert (info.trials, info.L) == (trials, float(trials))


# Each seed and each shape meets both smoothings.
@pytest.mark.parametrize(
    ("seed", "box", "smoothing"),
    [
        (0, WIDE_BOX, "huber"),
        (0, NARROW_BOX, "softplus"),
        (1, WIDE_BOX, "softplus"),
        (1, NARROW_BOX, "huber"),
    ],
)
def test_same_path_as_the_reference_with_fixed_L(
    seed: int, box: tuple[int, int, float], smoothing: Any
) -> None:
    problem, functions, x, y, constants = random_problem(seed, *box)
    more = {
        "mu0": 0.3,
        "block": 3,
        "gamma0": 0.5,
        "delta": 0.01,
        "zeta_bar": 0.1,
        "c2": 5.0,
        "L_init": 1.0,
    }
    settings = settings_for(constants, fixed_L=2.0, smoothing=smoothing, **more)
    run = run_both(problem, functions, x, y, settings, 220)
    assert_same_path(run, 1e-9)


class TestPaper:
    """The synthetic problem of the paper, n = 1000, with the paper's constants."""

    SETTINGS = reference.Settings(
        rho=0.5,
        sigma=1.0,
        mu0=9e-3,
        block=1,
        gamma0=0.9,
        zeta_bar=3.0,
        L_init=1.0,
        L_xy=math.sqrt(1000.0),
        L_yy=1.0,
    )

    def problem(self) -> BilevelProblem:
        return BilevelProblem(*sine_functions(), Box(-100.0, 100.0), Box(-100.0, 100.0))

    def test_counts(self) -> None:
        functions, x, y = reference.sine(1000)
        run = run_both(
            self.problem(), functions, torch.tensor(x), torch.tensor(y), self.SETTINGS, 56
        )
        history, points, records, _ = run
        early, late = history[:30], history[:56]
        assert sum(info.inner_iterations for info in early) == 161
        assert sum(info.trials for info in early) == 36
        assert early[-1].penalty_updates == 0
        assert sum(info.inner_iterations for info in late) == pytest.approx(215, abs=3)
        assert sum(info.trials for info in late) == 68
        assert late[-1].penalty_updates == 2
        # The Barzilai-Borwein start amplifies rounding: the points agree closely at first and
        # loosely later.
        for k, tolerance in ((0, 1e-12), (10, 1e-7), (55, 1e-3)):
            np.testing.assert_allclose(points[k][0].numpy(), records[k].x, rtol=0, atol=tolerance)
            np.testing.assert_allclose(points[k][1].numpy(), records[k].y, rtol=0, atol=tolerance)

    @both_dtypes
    def test_reaches_the_solution(self, dtype: torch.dtype) -> None:
        _, x, y = reference.sine(1000)
        x_star, y_star = reference.sine_solution(1000)
        constants = dataclasses.asdict(self.SETTINGS)
        optimizer = IVSP(
            groups(torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)), **constants
        )
        problem = self.problem()
        history = [optimizer.step(problem=problem) for _ in range(400)]
        got_x, got_y = (v.double().numpy() for v in point_of(optimizer))
        assert abs(got_x - x_star)[0] / abs(x_star[0]) < 2e-3
        assert np.linalg.norm(got_y - y_star) / np.linalg.norm(y_star) < 2e-3
        # No endless backtracking: the line search mostly accepts its first trial, in float32 as in
        # float64.
        assert sum(info.trials for info in history) < 2 * len(history)
        assert max(info.trials for info in history) <= 10
        assert history[-1].inner_iterations <= 10


# ---------------------------------------------------------------- what a step is and what it costs


def stated_step(
    problem: BilevelProblem, envelope: Envelope, x: Tensor, y: Tensor, z: Tensor, info: PenaltyInfo
) -> list[Tensor]:
    """w+ = P_C(w - (mu/L) [gamma grad f + phi'(R~) grad R~]) by autograd, with the gap at z~."""
    (f,), (g,) = problem.upper_terms, problem.lower_terms
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    gap = g(x, y) - g(x, z) - ((y - z) ** 2).sum() / (2 * envelope.rho) - envelope.delta
    slope = min(max(gap.item() / info.mu + 0.5, 0.0), 1.0)
    gradients = torch.autograd.grad(info.gamma * f(x, y) + slope * gap, (x, y))
    sets = (problem.upper_set, problem.lower_set)
    return [
        s.project(v.detach() - info.mu / info.L * d)
        for s, v, d in zip(sets, (x, y), gradients, strict=True)
    ]


@every_problem
class TestStep:
    def test_is_the_stated_formula(self, problem: Problem) -> None:
        built = problem.build()
        optimizer = make_ivsp(problem)(groups(*problem.at()))
        optimizer.step(problem=built)
        for _ in range(10):
            (x, y), z = point_of(optimizer), optimizer.run.z
            info = optimizer.step(problem=built)
            expected = stated_step(built, problem.envelope, x, y, z, info)
            for got, right in zip(point_of(optimizer), expected, strict=True):
                torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10)

    def test_records_what_is_true_of_the_new_point(self, problem: Problem) -> None:
        built, envelope = problem.build(), problem.envelope
        optimizer = make_ivsp(problem)(groups(*problem.at()))
        for _ in range(20):
            before = torch.cat(point_of(optimizer))
            info = optimizer.step(problem=built)
            x, y = point_of(optimizer)
            exact = certify(problem.build(), x, y, envelope, multiplier=1.0)
            assert info.upper == pytest.approx(exact.upper, rel=1e-12)
            assert info.lower == pytest.approx(exact.lower, rel=1e-12)
            assert info.step == pytest.approx(float((torch.cat([x, y]) - before).norm()), abs=1e-12)
            assert info.residual - 1e-12 <= exact.residual <= info.residual + info.zeta + 1e-12
            assert optimizer.multiplier == info.multiplier
            assert all(group["lr"] == info.mu / info.L for group in optimizer.param_groups)

    def test_costs_J_lower_one_gap_and_one_upper_per_trial(self, problem: Problem) -> None:
        count = {"f": 0, "g": 0}

        def counted(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(x: Tensor, y: Tensor) -> Tensor:
                count[name] += 1
                return function(x, y)

            return call

        built = BilevelProblem(
            counted("f", problem.f), counted("g", problem.g), problem.upper_set, problem.lower_set
        )
        optimizer = make_ivsp(problem)(groups(*problem.at()))
        single = 0
        for k in range(30):
            count.update(f=0, g=0)
            info = optimizer.step(problem=built)
            # The first iteration evaluates its start too; after that nothing is evaluated again at
            # an accepted point.
            evaluations = info.trials + (k == 0)
            assert info.calls == Calls(
                upper=evaluations, lower=info.inner_iterations, gap=evaluations
            )
            assert count == {"f": evaluations, "g": info.inner_iterations + 2 * evaluations}
            single += k > 0 and info.calls == Calls(upper=1, lower=info.inner_iterations, gap=1)
        assert single > 10

    def test_penalty_updates_are_counted(self, problem: Problem) -> None:
        optimizer = make_ivsp(problem)(groups(*problem.at()))
        history = advance(optimizer, problem.build(), 10)
        assert [info.penalty_updates for info in history] == list(
            np.cumsum([info.penalty_updated for info in history])
        )


def test_metrics_have_the_names_that_loggers_see() -> None:
    problem = by_name["quadratic"]
    optimizer = make_ivsp(problem)(groups(*problem.at()))
    info = optimizer.step(problem=problem.build())
    metrics = info.metrics()
    names = "upper lower moreau_gap smoothing penalty penalty_updates multiplier step trials"
    names += " inner_iterations optimization_time"
    assert set(metrics) == {f"bilevel/{name}" for name in names.split()}
    assert all(type(value) is float for value in metrics.values())
    assert metrics["bilevel/moreau_gap"] == info.residual
    assert metrics["bilevel/penalty"] == info.gamma


def test_the_closure_is_called_once_with_gradients_enabled() -> None:
    problem, enabled = by_name["quadratic"], []
    optimizer = make_ivsp(problem)(groups(*problem.at()))
    optimizer.step(lambda: enabled.append(torch.is_grad_enabled()), problem=problem.build())
    assert enabled == [True]


def test_a_slow_closure_is_no_optimisation_time(clock: Clock) -> None:
    problem = by_name["quadratic"]
    optimizer = make_ivsp(problem)(groups(*problem.at()))

    def closure() -> None:
        clock.now += 0.5

    assert optimizer.step(closure, problem=problem.build()).optimization_time == 0.0


def test_parameters_of_any_shape_and_number() -> None:
    problem, flat = by_name["active_box"], None
    x, y = problem.at()
    runs = []
    for parameters in (
        ([x], [y]),
        ([x[:1], x[1:]], [y[:2].reshape(2, 1), y[2]]),
        ([x.reshape(1, 3, 1)], [y[:0], y]),
    ):
        upper, lower = ([v.clone().requires_grad_() for v in level] for level in parameters)
        optimizer = make_ivsp(problem)(
            [{"params": iter(lower), "level": "lower"}, {"params": upper, "level": "upper"}]
        )
        built = problem.build()
        for _ in range(10):
            optimizer.step(problem=built)
        assert [p.shape for p in upper] == [v.shape for v in parameters[0]]
        runs.append(torch.cat([p.detach().reshape(-1) for p in (*upper, *lower)]))
        flat = runs[0] if flat is None else flat
        assert torch.equal(runs[-1], flat)


# Powers of two round nothing: the path is that of the scaled problem bit for bit.
@pytest.mark.parametrize(
    ("name", "units", "tolerance", "rules"),
    [
        (name, units, 0.0, rules)
        for rules in ("paper", "own")
        for name, units in (
            ("active_box", (2.0, 1.0)),
            ("ball", (1.0, 0.25)),
            ("simplex", (8.0, 0.5)),
            ("sine", (0.25, 4.0)),
        )
    ]
    + [("active_box", (1.0, 0.1), 1e-9, "paper"), ("active_box", (3.0, 7.0), 1e-6, "own")],
)
def test_units_are_a_change_of_variables(
    name: str, units: tuple[float, float], tolerance: float, rules: str
) -> None:
    problem = by_name[name]
    a, b = units
    x, y = problem.at()
    # Constants are given in the units.
    mine = paper_constants(problem)
    mine |= {"L_xy": a * b * mine["L_xy"], "L_yy": b**2 * mine["L_yy"], "rho": mine["rho"] / b**2}
    mine |= {"sigma": b**2 * mine["sigma"]}
    given = mine if rules == "paper" else {"delta": mine["delta"]}
    one, two = IVSP(groups(x, y, units), **given), IVSP(groups(x / a, y / b), **given)
    built, by_hand = problem.build(), in_units(problem, a, b)
    for _ in range(25):
        info, other = one.step(problem=built), two.step(problem=by_hand)
        assert info.calls == other.calls
        assert info.step == pytest.approx(other.step, rel=max(tolerance, 1e-15))
        assert info.residual == pytest.approx(other.residual, rel=tolerance, abs=tolerance)
        for unit, got, expected in zip(units, point_of(one), point_of(two), strict=True):
            torch.testing.assert_close(got, unit * expected, rtol=tolerance, atol=tolerance)
    proved = one.proved, two.proved
    assert (proved[0] is None) == (proved[1] is None)
    if proved[0] is not None and proved[1] is not None:
        torch.testing.assert_close(proved[0].y, b * proved[1].y, rtol=tolerance, atol=tolerance)
    assert one.envelope is not None
    assert one.envelope.rho == pytest.approx(b**2 * two.envelope.rho)


# ---------------------------------------------------------------- where a run ends


@pytest.mark.parametrize("smoothing", ["huber", "softplus"])
def test_both_smoothings_end_at_the_solution(smoothing: str) -> None:
    problem = by_name["ball"]
    solution = solve(problem.build(), *problem.at(), make_ivsp(problem, smoothing=smoothing), 200)
    assert (torch.cat([solution.x, solution.y]) - torch.cat(problem.at("solution"))).norm() < 5e-3


def test_fixed_L_accepts_whatever_comes() -> None:
    problem = by_name["quadratic"]
    before = problem.build().upper(*problem.at()).value
    optimizer = make_ivsp(problem, fixed_L=1e-6)(groups(*problem.at()))
    with pytest.warns(UserWarning, match="is too small"):
        info = optimizer.step(problem=problem.build())
    assert (info.trials, info.L) == (1, 1e-6)
    assert info.upper > 100 * before


def test_fixed_L_makes_one_trial_and_ends_at_the_solution() -> None:
    problem = by_name["ball"]
    solution = solve(problem.build(), *problem.at(), make_ivsp(problem, fixed_L=0.2), 500)
    assert {info.trials for info in solution.history} == {1}
    assert {info.L for info in solution.history} == {0.2}
    assert solution.certificate.kkt < 1e-3


# ---------------------------------------------------------------- what changes from outside


class TestOutsideChanges:
    problem = by_name["ball"]

    def moved(self) -> BilevelProblem:
        f, g = self.problem.f, self.problem.g
        sets = (self.problem.upper_set, self.problem.lower_set)
        return BilevelProblem(lambda x, y: f(x, y) + 3 * x.sum(), lambda x, y: g(x + 0.1, y), *sets)

    def test_another_problem_is_evaluated_anew(self) -> None:
        optimizer = make_ivsp(self.problem)(groups(*self.problem.at()))
        advance(optimizer, self.problem.build(), 5)
        x, y = point_of(optimizer)
        moved = self.moved()
        info = optimizer.step(problem=moved)
        assert info.calls == Calls(
            upper=info.trials + 1, lower=info.inner_iterations, gap=info.trials + 1
        )
        # The inner loop is exact on this lower level after one step, so the step can be predicted.
        z = precise_prox(
            moved.at(x), y, self.problem.envelope.rho, moved.lower_set, tolerance=1e-12
        )
        expected = stated_step(moved, self.problem.envelope, x, y, z, info)
        for got, right in zip(point_of(optimizer), expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10)

    def test_an_equal_problem_continues_the_run(self) -> None:
        """Such as a full batch collated anew: one look at f and the gap shows that it is equal."""
        one, two = (make_ivsp(self.problem)(groups(*self.problem.at())) for _ in range(2))
        built = self.problem.build()
        for number in range(10):
            expected, got = one.step(problem=built), two.step(problem=self.problem.build())
            look = Calls(upper=1, gap=1) if number else Calls()
            assert got.calls == expected.calls + look
            assert facts(
                dataclasses.replace(got, calls=expected.calls, passes=expected.passes)
            ) == facts(expected)
        assert all(torch.equal(a, b) for a, b in zip(point_of(one), point_of(two), strict=True))

    @pytest.mark.parametrize(
        ("level", "change"),
        [
            (0, lambda p: p.add_(0.1)),
            (1, lambda p: p.copy_(0.9 * p)),
            (0, lambda p: p.detach().mul_(0.9)),
            (1, lambda p: torch.nn.utils.vector_to_parameters(0.9 * p.detach(), [p])),
            (0, lambda p: torch.nn.ParameterList([p]).load_state_dict({"0": 0.9 * p.detach()})),
            (1, lambda p: setattr(p, "data", 0.9 * p.detach())),
        ],
        ids=["add_", "copy_", "detach", "vector_to_parameters", "load_state_dict", "data ="],
    )
    def test_parameters_changed_by_hand_are_noticed(
        self, level: int, change: Callable[[Any], Any]
    ) -> None:
        built = self.problem.build()
        x, y = self.problem.at()
        optimizer = make_ivsp(self.problem)(
            [
                {"params": [torch.nn.Parameter(x)], "level": "upper"},
                {"params": [torch.nn.Parameter(y)], "level": "lower"},
            ]
        )
        advance(optimizer, built, 5)
        with torch.no_grad():
            change(optimizer.param_groups[level]["params"][0])
        x, y = point_of(optimizer)
        info = optimizer.step(problem=built)
        step = torch.cat(point_of(optimizer)) - torch.cat([x, y])
        # The step starts where the parameters were put.
        assert float(step.norm()) == pytest.approx(info.step, rel=1e-6)
        assert info.calls.upper == info.trials + 1

    def test_memory_that_was_swapped_twice_does_not_return(self) -> None:
        """Its address tells whether the parameter is still that of the last step."""
        optimizer = IVSP(groups(torch.zeros(1), torch.zeros(10_000)))
        problem = BilevelProblem(lambda x, y: ((y - 1) ** 2).sum(), lambda x, y: (y**2).sum() / 2)
        advance(optimizer, problem, 1)
        (p,) = optimizer.param_groups[1]["params"]
        address = p.data_ptr()
        for _ in range(100):
            p.data = p.detach() + 1.0
            assert p.data_ptr() != address

    def test_writes_through_data_are_refused_at_every_hundredth_step(self) -> None:
        """Torch counts no version for them, so until then the point of the run stands."""
        built = self.problem.build()
        one, two = (make_ivsp(self.problem)(groups(*self.problem.at())) for _ in range(2))
        advance(one, built, 99)
        advance(two, built, 99)
        one.param_groups[0]["params"][0].data.mul_(0.9)
        assert facts(one.step(problem=built)) == facts(two.step(problem=built))
        assert all(map(torch.equal, point_of(one), point_of(two)))
        parameter = one.param_groups[1]["params"][0]
        kept, run = parameter.detach().clone(), one.run
        parameter.data.mul_(0.9)
        message = (
            "IVSP stopped in outer iteration 101: parameters were written through `.data`, which "
            "the solver does not notice: write by `with torch.no_grad(): parameter.copy_(...)`."
        )
        for _ in range(2):
            with pytest.raises(BilevelError, match=f"^{re.escape(message)}$"):
                one.step(problem=built)
            assert one.run is run
        parameter.data.copy_(kept)
        assert facts(one.step(problem=built)) == facts(two.step(problem=built))

    def test_a_start_outside_the_set_is_projected_with_a_warning(self) -> None:
        x, y = torch.tensor([3.0, -2.0]), torch.tensor([0.0, 5.0])
        problem = BilevelProblem(self.problem.f, self.problem.g, Box(-1.0, 1.0), Box(-1.0, 2.0))
        optimizer = IVSP(groups(x, y), **{**PLAIN, "gamma0": 1e-9, "mu0": 1e-9}, rho=0.5, sigma=0.0)
        with pytest.warns(UserWarning, match="start lies outside") as caught:
            optimizer.step(problem=problem)
        assert [str(w.message) for w in caught] == [
            (
                "The upper-level start lies outside Box(-1, 1): "
                "it was projected, which moved it by 2.24."
            ),
            "The lower-level start lies outside Box(-1, 2): it was projected, which moved it by 3.",
        ]
        got = torch.cat(point_of(optimizer))
        torch.testing.assert_close(got, torch.tensor([1.0, -1.0, 0.0, 2.0]), rtol=0, atol=1e-3)
        advance(optimizer, problem, 1)  # and does not warn again

    def test_the_warning_speaks_of_the_parameters_own_units(self) -> None:
        problem = BilevelProblem(self.problem.f, self.problem.g, Box(-1.0, 1.0))
        optimizer = IVSP(groups(torch.tensor([3.0, 0.0]), torch.zeros(2), (10.0, 1.0)), sigma=0.0)
        with pytest.warns(UserWarning, match=r"it was projected, which moved it by 2\.$"):
            optimizer.step(problem=problem)

    def test_a_start_on_the_boundary_does_not_warn(self) -> None:
        for dtype in (torch.float32, torch.float64):
            x, y = self.problem.at("solution", dtype)
            advance(make_ivsp(self.problem)(groups(x, y)), self.problem.build(), 3)


# ---------------------------------------------------------------- errors


def fenced(problem: Problem, where: str, limit: float) -> BilevelProblem:
    """The problem with f NaN where x is beyond the limit, or g where x or y is."""

    def fence(name: str, v: Tensor) -> Tensor | float:
        return 0.0 * torch.sqrt(limit - v).sum() if where == name else 0.0

    return BilevelProblem(
        lambda x, y: problem.f(x, y) + fence("f in x", x),
        lambda x, y: problem.g(x, y) + fence("g in x", x) + fence("g in y", y),
        problem.upper_set,
        problem.lower_set,
    )


class TestNonFinite:
    problem = by_name["quadratic"]
    start = (torch.tensor([-0.5, -2.0, -2.0]).double(), torch.tensor([-1.0, 0.0, -1.0]).double())

    @pytest.mark.parametrize("where", ["f in x", "g in x", "g in y"])
    def test_a_far_trial_is_rejected_and_the_run_goes_on(self, where: str) -> None:
        solver = make_ivsp(self.problem, L_init=1e-5, max_inner=1000)
        optimizer = solver(groups(*self.start))
        problem = fenced(self.problem, where, 1.5)
        first = advance(optimizer, problem, 1)[0]
        assert first.trials > 3
        advance(optimizer, problem, 399)
        for got, expected in zip(point_of(optimizer), self.problem.at("solution"), strict=True):
            assert (got - expected).norm() < 2e-2

    def test_with_fixed_L_it_is_an_error(self) -> None:
        optimizer = make_ivsp(self.problem, fixed_L=1e-5)(groups(*self.start))
        with pytest.raises(
            NonFiniteError,
            match=(
                r"^IVSP stopped in outer iteration 1: "
                r"The upper-level function f returned a value nan"
            ),
        ):
            optimizer.step(problem=fenced(self.problem, "f in x", 1.5))

    @pytest.mark.parametrize("name", ["f", "g"])
    def test_everywhere_it_is_an_error_that_names_function_and_iteration(self, name: str) -> None:
        def wrong(x: Tensor, y: Tensor) -> Tensor:
            return (x.sum() + y.sum()) * float("nan")

        optimizer = make_ivsp(self.problem)(groups(*self.start))
        advance(optimizer, self.problem.build(), 3)
        before = point_of(optimizer)
        problem = BilevelProblem(
            wrong if name == "f" else self.problem.f, wrong if name == "g" else self.problem.g
        )
        level = {"f": "The upper-level function f", "g": "The lower-level function g"}[name]
        with pytest.raises(
            NonFiniteError, match=f"^IVSP stopped in outer iteration 4: {level} returned a"
        ):
            optimizer.step(problem=problem)
        # The iterate is untouched and the run can go on.
        assert all(torch.equal(a, b) for a, b in zip(point_of(optimizer), before, strict=True))
        assert optimizer.step(problem=self.problem.build()).iteration == 4

    def test_at_the_start(self) -> None:
        optimizer = make_ivsp(self.problem)(groups(*self.start))
        with pytest.raises(
            NonFiniteError,
            match=(
                r"^IVSP stopped in outer iteration 1: "
                r"The upper-level function f returned a value nan"
            ),
        ):
            optimizer.step(problem=fenced(self.problem, "f in x", -1.0))


class TestCaps:
    problem = by_name["quadratic"]

    def test_line_search(self) -> None:
        optimizer = make_ivsp(self.problem, L_init=1e-8, max_trials=2)(groups(*self.problem.at()))
        with pytest.raises(LineSearchError) as caught:
            optimizer.step(problem=self.problem.build())
        assert re.fullmatch(
            r"IVSP stopped in outer iteration 1: "
            r"the line search made 2 trials, up to L = 2e-08, and accepted none: "
            r"the last trial has merit \S+, to be at most \S+, after a step of \S+\.",
            str(caught.value),
        )

    def test_line_search_in_a_later_iteration(self) -> None:
        optimizer = make_ivsp(self.problem, max_trials=1)(groups(*self.problem.at()))
        with pytest.raises(
            LineSearchError,
            match=r"^IVSP stopped in outer iteration (?!1:)\d+: the line search made 1 trials",
        ):
            advance(optimizer, self.problem.build(), 200)

    def test_inner_loop(self) -> None:
        problem = by_name["sine"]
        optimizer = make_ivsp(problem, zeta_bar=1e-12, max_inner=3)(groups(*problem.at()))
        with pytest.raises(
            InnerLoopError,
            match=r"^IVSP stopped in outer iteration 1: the inner loop made 3 iterations",
        ):
            optimizer.step(problem=problem.build())

    def test_a_too_small_L_yy_warns_once_and_still_solves(self) -> None:
        problem = BilevelProblem(self.problem.f, lambda x, y: 50 * self.problem.g(x, y))
        optimizer = make_ivsp(self.problem, L_yy=1.0, L_xy=50.0)(groups(*self.problem.at()))
        with pytest.warns(
            UserWarning, match=r"The inner loop diverged with its step 1/\(L_yy \+ 1/rho\), L_yy=1:"
        ) as caught:
            history = advance(optimizer, problem, 30)
        assert len(caught) == 1
        assert optimizer.run.halvings >= 4
        assert history[-1].residual < history[0].residual

    @pytest.mark.parametrize("L_init", [1e-3, 1e-4, 1e-5])
    @pytest.mark.filterwarnings("ignore:The inner loop diverged")
    def test_a_rejected_trial_where_g_is_steeper_does_not_slow_the_run_down(
        self, L_init: float
    ) -> None:
        # At the first trials |y - x| is 10 to 1000 and g curved accordingly; where the run goes
        # L_yy = 4 is right.
        zeros = torch.zeros(2, dtype=torch.float64)
        problem = BilevelProblem(
            lambda x, y: ((x - 1) ** 2).sum() + ((y + 1) ** 2).sum(),
            lambda x, y: ((y - x) ** 2 / 2 + (y - x) ** 4 / 4).sum(),
        )
        constants = {
            "rho": 1.0,
            "sigma": 0.0,
            "delta": 1e-2,
            "mu0": 1e-2,
            "gamma0": 0.2,
            "L_yy": 4.0,
            "L_xy": 4.0,
        }
        optimizer = IVSP(groups(zeros, zeros), L_init=L_init, max_inner=1000, **constants)
        history = advance(optimizer, problem, 100)
        assert optimizer.run.halvings == 0
        assert max(info.inner_iterations for info in history[1:]) < 200
        usual = advance(IVSP(groups(zeros, zeros), **constants), problem, 100)
        assert history[-1].upper == pytest.approx(usual[-1].upper, rel=1e-2)


class TestConstants:
    def make(self, **constants: Any) -> IVSP:
        return IVSP(groups(torch.zeros(1), torch.zeros(2)), **constants)

    @pytest.mark.parametrize(
        ("constants", "rule"),
        [
            ({"mu0": 0.0}, "positive and finite, or None"),
            ({"rho": math.inf}, "positive and finite, or None"),
            ({"fixed_L": "1"}, "positive and finite, or None"),
            ({"q": math.nan}, "positive and finite, or None"),
            ({"delta": None}, "positive and finite"),
            ({"theta_low": -1.0}, "positive and finite"),
            ({"L_xy": -0.1}, "nonnegative and finite, or None"),
            ({"block": 1.5}, "a positive whole number, or None"),
            ({"max_inner": 0}, "a positive whole number"),
            ({"r": 1.0}, "between 0 and 1"),
            ({"theta_hat": 2.0}, "between 0 and 2"),
            ({"smoothing": "abs"}, "'huber' or 'softplus'"),
            ({"inner": "newton"}, "'gradient' or 'accelerated', or None"),
        ],
        ids=str,
    )
    def test_sentences(self, constants: dict[str, Any], rule: str) -> None:
        ((name, value),) = constants.items()
        message = f"`IVSP({name}={value!r})` must be {rule}."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            self.make(**constants)

    @pytest.mark.parametrize("rho", [1.0, 2.0])
    def test_rho_times_sigma_is_below_one(self, rho: float) -> None:
        with pytest.raises(ValueError, match=f"^`rho={rho}` must be smaller than 1/sigma = 1: "):
            self.make(rho=rho, sigma=1.0)

    def test_zero_is_a_lipschitz_constant(self) -> None:
        assert self.make(L_xy=0.0, L_yy=0.0, B_R=0.0).constants.B_R == 0.0

    @pytest.mark.parametrize("q", [2.0, 3.0])
    def test_q_not_above_1_over_r_warns(self, q: float) -> None:
        message = (
            f"`IVSP(q={q})` is not above 1/r = 3: the method runs, but its rate is proved only for "
            "q > 1/r."
        )
        with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
            self.make(q=q)

    def test_q_follows_r(self) -> None:
        assert self.make(r=0.5).constants.q == pytest.approx(2.01)
        assert self.make().constants.q == pytest.approx(3.01)

    def test_the_paper_s_rules_need_all_constants_of_a_task(self) -> None:
        message = (
            "`IVSP(rules='paper')` needs mu0, block too: with the paper's rules nothing is chosen."
        )
        given = {name: value for name, value in PLAIN.items() if name not in ("mu0", "block")}
        with pytest.raises(ValueError, match=re.escape(message)):
            self.make(rules="paper", rho=0.5, sigma=1.0, **given)
        assert (
            self.make(rules="paper", rho=0.5, sigma=1.0, **PLAIN).hyper_parameters["rules"]
            == "paper"
        )

    def test_a_chosen_start_is_within_the_bounds_that_are_given(self) -> None:
        problem = by_name["sine"]
        for bounds in ({"L_min": 1e3}, {"L_max": 1e-9}):
            optimizer = IVSP(groups(*problem.at()), **bounds)
            info = optimizer.step(problem=problem.build())
            assert [info.L_start] == list(bounds.values())

    def test_a_fixed_L_needs_no_start(self) -> None:
        given = {name: value for name, value in PLAIN.items() if name != "L_init"}
        one = self.make(rules="paper", rho=0.5, sigma=1.0, fixed_L=40.0, **given)
        two = self.make(rho=0.5, sigma=1.0, fixed_L=40.0, **PLAIN)
        problem = BilevelProblem(
            lambda x, y: (x**2).sum() + (y**2).sum(), lambda x, y: ((y - x) ** 2).sum()
        )
        for _ in range(5):
            assert one.step(problem=problem).upper == two.step(problem=problem).upper

    def test_defaults_are_the_paper_s_common_settings(self) -> None:
        optimizer = self.make(rho=0.5, sigma=1.0, **PLAIN)
        optimizer.step(
            problem=BilevelProblem(
                lambda x, y: (x**2).sum() + (y**2).sum(), lambda x, y: ((y - x) ** 2).sum()
            )
        )
        constants = optimizer.constants
        assert (constants.bb, constants.rules) == ("short", "paper")
        assert optimizer.run.own_unit == 1.0
        paper = reference.Settings(
            rho=0.5,
            sigma=1.0,
            mu0=1.0,
            block=1,
            gamma0=1.0,
            zeta_bar=1.0,
            L_init=1.0,
            L_xy=1.0,
            L_yy=1.0,
        )
        common = "delta r q c1 c2 L_min L_max B_R theta_low theta_hat smoothing fixed_L"
        for name in common.split():
            assert getattr(constants, name) == getattr(paper, name), name

    def test_envelope(self) -> None:
        envelope = self.make(rho=0.25, sigma=2.0, delta=0.1).envelope
        assert (envelope.rho, envelope.sigma, envelope.delta) == (0.25, 2.0, 0.1)


class TestLevels:
    RULE = 'two groups, [{"params": [...], "level": "upper"}, {"params": [...], "level": "lower"}]'

    @pytest.mark.parametrize(
        "levels",
        [
            [],
            ["upper"],
            ["upper", "upper"],
            ["upper", "middle"],
            ["upper", "lower", "lower"],
            [None, None],
        ],
        ids=str,
    )
    def test_one_group_each(self, levels: list[str | None]) -> None:
        params = [
            {"params": [torch.zeros(1)], **({"level": level} if level else {})} for level in levels
        ]
        message = f"`IVSP(params)` was given levels {levels}: it needs {self.RULE}."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            IVSP(params)

    @pytest.mark.parametrize(
        "dtypes",
        [
            (torch.float32, torch.float64),
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.bfloat16),
        ],
        ids=str,
    )
    def test_dtypes(self, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        x, y = (torch.zeros(1, dtype=dtype) for dtype in dtypes)
        with pytest.raises(ValueError, match="only float32 and float64 are supported, in one"):
            IVSP(groups(x, y))

    def test_a_parameter_in_both(self) -> None:
        shared = torch.zeros(1)
        with pytest.raises(ValueError, match="parameters appear in more than one parameter group"):
            IVSP([{"params": [shared], "level": level} for level in ("upper", "lower")])

    def test_a_single_tensor_is_a_level(self) -> None:
        x, y = torch.zeros(1, requires_grad=True), torch.zeros(2, requires_grad=True)
        optimizer = IVSP([{"params": x, "level": "upper"}, {"params": y, "level": "lower"}])
        assert [
            group["params"][0] is p for group, p in zip(optimizer.param_groups, (x, y), strict=True)
        ] == [True, True]


def test_large_constants_in_f_do_not_stop_the_run() -> None:
    # The merit is then known to 1e-8 only, far above the paper's slack of 1e-12.
    problem = by_name["sine"]
    built = BilevelProblem(
        lambda x, y: problem.f(x, y) + 1e8, problem.g, problem.upper_set, problem.lower_set
    )
    optimizer = make_ivsp(problem)(groups(*problem.at()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advance(optimizer, built, 300)
    for got, expected in zip(point_of(optimizer), problem.at("solution"), strict=True):
        assert (got - expected).norm() < 1e-2
