import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from clocks import Clock
from helpers import PROBLEMS, groups, make_ivsp, paper_constants, point_of

from lightning_bilevel import (
    IVSP,
    BilevelError,
    BilevelOptimizer,
    BilevelProblem,
    Box,
    Envelope,
    certify,
    solve,
)
from lightning_bilevel.solvers.base import Method, State
from lightning_bilevel.solvers.constants import positive
from lightning_bilevel.solvers.ivsp.algorithm import IVSPMethod
from lightning_bilevel.solvers.record import PenaltyInfo, StepInfo

by_name = {problem.name: problem for problem in PROBLEMS}


@dataclass(frozen=True, kw_only=True)
class HalvingMethod(Method[State]):
    rate: float = positive(1.0)

    def step(self, problem: BilevelProblem, s: State) -> tuple[State, StepInfo]:
        upper = problem.upper(s.x, s.y).value
        new = replace(s, x=s.x / 2, y=s.y / 2, k=s.k + 1)
        return new, StepInfo(upper=upper, lower=0.0, inner_iterations=0)


class Halving(BilevelOptimizer):
    """A method without envelope or multiplier: it halves x and y."""

    method_type = HalvingMethod


def test_is_the_loop_around_a_solver() -> None:
    problem = by_name["sine"]
    x0, y0 = problem.at()
    solution = solve(problem.build(), x0, y0, make_ivsp(problem), max_steps=12)
    optimizer, built = make_ivsp(problem)(groups(x0, y0)), problem.build()
    for expected in solution.history:
        info = optimizer.step(problem=built)
        assert (info.iteration, info.upper, info.step, info.calls) == (
            expected.iteration,
            expected.upper,
            expected.step,
            expected.calls,
        )
    assert len(solution.history) == 12
    assert torch.equal(solution.x, point_of(optimizer)[0])
    assert torch.equal(solution.y, point_of(optimizer)[1])
    point = (solution.x, solution.y)
    known = {
        "multiplier": optimizer.multiplier,
        "start": built.check(x0, y0),
        "point": "the last iterate, iteration 12",
    }
    assert solution.certificate == certify(built, *point, problem.envelope, **known)
    assert not solution.x.requires_grad


def test_does_not_change_the_start() -> None:
    problem = by_name["quadratic"]
    x0, y0 = problem.at()
    copies = x0.clone(), y0.clone()
    solve(problem.build(), x0, y0, make_ivsp(problem), max_steps=2)
    assert torch.equal(x0, copies[0])
    assert torch.equal(y0, copies[1])
    assert not x0.requires_grad


def test_a_start_may_be_a_number_a_list_or_a_parameter() -> None:
    problem = BilevelProblem(
        lambda x, y: ((x - 1) ** 2).sum() + (y**2).sum(), lambda x, y: ((y - x) ** 2).sum() / 2
    )
    solver = partial(IVSP, sigma=0.0)
    results = [
        solve(problem, x0, y0, solver, max_steps=3)
        for x0, y0 in (
            (0.5, [0.25]),
            (torch.tensor(0.5), torch.tensor([0.25])),
            (torch.nn.Parameter(torch.tensor([0.5])), [0.25]),
        )
    ]
    for result in results:
        assert result.x.shape == result.y.shape == (1,)
        assert torch.equal(result.x, results[0].x)


def test_ivsp_is_the_default() -> None:
    problem = BilevelProblem(
        lambda x, y: ((x - 1) ** 2).sum() + (y**2).sum(),
        lambda x, y: torch.sin(x + y).sum(),
        Box(-5, 5),
        Box(-5, 5),
    )
    solution = solve(problem, torch.zeros(1), torch.zeros(2), max_steps=3)
    assert solution.certificate is not None
    assert isinstance(solution.history[0], PenaltyInfo)
    assert solution.certificate.delta == 1e-3
    # sin has curvatures up to 1: rho is 1/(4 L_yy), sigma is L_yy.
    assert 0.1 < solution.certificate.sigma <= 1.1
    assert solution.certificate.rho * solution.certificate.sigma == pytest.approx(0.25)


def test_a_solver_without_envelope_has_no_certificate_unless_one_is_named() -> None:
    problem = by_name["quadratic"]
    x0, y0 = problem.at()
    without = solve(problem.build(), x0, y0, Halving, max_steps=2)
    assert without.certificate is None
    assert torch.equal(without.x, x0 / 4)
    named = solve(problem.build(), x0, y0, Halving, max_steps=2, envelope=problem.envelope)
    built = problem.build()
    assert named.certificate == certify(
        built,
        x0 / 4,
        y0 / 4,
        problem.envelope,
        start=built.check(x0, y0),
        point="the last iterate, iteration 2",
    )
    assert named.proved is None
    assert named.reached is None
    assert named.certificate is not None
    assert not named.certificate.own_multiplier


def test_the_named_envelope_and_tolerance_are_those_of_the_certificate() -> None:
    problem = by_name["quadratic"]
    envelope = Envelope(rho=0.3, sigma=0.1, delta=0.2)
    solution = solve(
        problem.build(),
        *problem.at(),
        make_ivsp(problem),
        max_steps=2,
        envelope=envelope,
        tolerance=1e-4,
    )
    certificate = solution.certificate
    assert certificate is not None
    assert (certificate.rho, certificate.sigma, certificate.delta, certificate.tolerance) == (
        0.3,
        0.1,
        0.2,
        1e-4,
    )


def test_a_random_objective_is_refused_before_the_first_step() -> None:
    problem = by_name["quadratic"]
    steps = []

    class Watched(Halving):
        def step(self, *args: Any, **kwargs: Any) -> StepInfo:
            steps.append(1)
            return super().step(*args, **kwargs)

    noisy = BilevelProblem(lambda x, y: problem.f(x, y) * torch.rand(()), problem.g)
    with pytest.raises(BilevelError, match="deterministic objective"):
        solve(noisy, *problem.at(), Watched, max_steps=2)
    assert not steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeps_the_dtype_of_the_start(dtype: torch.dtype) -> None:
    problem = by_name["ball"]
    solution = solve(problem.build(), *problem.at(dtype=dtype), make_ivsp(problem), max_steps=3)
    assert solution.x.dtype == solution.y.dtype == dtype


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_steps", 0), ("tolerance", float("nan")), ("epsilon", -1.0)],
)
def test_what_must_be_positive(name: str, value: float) -> None:
    problem = by_name["quadratic"]
    with pytest.raises(ValueError, match=rf"^`solve\({name}={value}\)` must be positive"):
        solve(problem.build(), torch.zeros(3), torch.zeros(3), **{name: value})


def test_the_certificate_knows_the_start_in_the_sets() -> None:
    """y = 5 is projected on 2: there grad f = (-2, 4), and g, which pulls y inwards, has 2 - 0."""
    problem = BilevelProblem(
        lambda x, y: ((x - 1) ** 2).sum() + (y**2).sum(),
        lambda x, y: ((y - x) ** 2).sum() / 2,
        lower_set=Box(-2, 2),
    )
    with pytest.warns(UserWarning, match="The lower-level start lies outside"):
        certificate = solve(problem, [0.0], [5.0], max_steps=1).certificate
    assert certificate is not None
    assert certificate.first_upper_gradient == pytest.approx(20**0.5)
    assert certificate.first_lower_gradient == pytest.approx(2.0)


def test_the_theorem_s_point_is_returned_with_its_certificate() -> None:
    problem = by_name["ball"]
    built = problem.build()
    solution = solve(built, *problem.at(), make_ivsp(problem), max_steps=40)
    proved = solution.proved
    assert proved is not None
    optimizer = make_ivsp(problem)(groups(*problem.at()))
    for _ in range(proved.iteration):
        info = optimizer.step(problem=built)
    assert torch.equal(proved.x, point_of(optimizer)[0])
    assert torch.equal(proved.y, point_of(optimizer)[1])
    assert proved.certificate.multiplier == info.multiplier
    assert proved.certificate.point.startswith(
        f"the theorem's point, iteration {proved.iteration} of 40 (k^ = {proved.iteration - 1}); "
    )
    expected = certify(built, proved.x, proved.y, problem.envelope, multiplier=info.multiplier)
    assert proved.certificate.stationarity == expected.stationarity


class TestEpsilon:
    problem = by_name["sine"]

    def test_the_run_ends_where_it_is_reached(self) -> None:
        start = self.problem.at()
        long = solve(self.problem.build(), *start, make_ivsp(self.problem), max_steps=400)
        assert long.certificate is not None
        assert long.certificate.kkt < 1e-3
        ended = solve(
            self.problem.build(), *start, make_ivsp(self.problem), max_steps=400, epsilon=1e-2
        )
        assert ended.reached is True
        assert ended.certificate is not None
        assert ended.certificate.kkt <= 1e-2
        assert ended.certificate.point == f"the last iterate, iteration {len(ended.history)}"
        assert 1 < len(ended.history) < 400
        assert [info.step for info in ended.history] == [
            info.step for info in long.history[: len(ended.history)]
        ]

    def test_looks_take_a_tenth_of_the_time(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An iteration takes a second and a look four: one at 1, 40 and 80."""
        looks: list[str] = []

        class SlowMethod(IVSPMethod):
            def step(self, *args: Any) -> Any:
                clock.now += 1.0
                return super().step(*args)

        class Slow(IVSP):
            method_type = SlowMethod

        def slow(*args: Any, **kwargs: Any) -> Any:
            looks.append(kwargs["point"])
            clock.now += 4.0
            return certify(*args, **kwargs)

        monkeypatch.setattr("lightning_bilevel.solving.certify", slow)
        solver = partial(Slow, **paper_constants(self.problem))
        solve(self.problem.build(), *self.problem.at(), solver, max_steps=100, epsilon=1e-30)
        # At the end come the last iterate and the point of the theorem.
        assert looks[:-1] == [f"the last iterate, iteration {n}" for n in (1, 40, 80, 100)]
        assert looks[-1].startswith("the theorem's point")

    def test_one_that_is_not_reached_makes_all_iterations(self) -> None:
        got = solve(
            self.problem.build(),
            *self.problem.at(),
            make_ivsp(self.problem),
            max_steps=5,
            epsilon=1e-30,
        )
        assert got.reached is False
        assert len(got.history) == 5

    def test_it_needs_an_envelope(self) -> None:
        message = (
            "`solve(epsilon=0.1)` needs the Moreau envelope of the KKT residuals, and Halving has "
            "none of its own: give `envelope=...` too."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            solve(self.problem.build(), *self.problem.at(), Halving, epsilon=0.1)
