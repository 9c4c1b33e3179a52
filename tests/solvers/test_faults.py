"""Numerical faults: a run recovers, or stops with a sentence at its last good point."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, groups, make_ivsp, point_of
from records import same, timeless
from tables import SOLVERS, Solver, every_solver
from torch import Tensor

from lightning_bilevel import (
    IVSP,
    BilevelError,
    BilevelProblem,
    Envelope,
    InnerLoopError,
    NonFiniteError,
    certify,
    solve,
)

by_name = {problem.name: problem for problem in PROBLEMS}
LEVELS = {"f": "The upper-level function f", "g": "The lower-level function g"}


class WrongGradient(torch.autograd.Function):
    """The identity, with a derivative that is not a number."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        return slope * float("nan")


def interrupted(value: Tensor) -> Tensor:
    raise KeyboardInterrupt


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda value: value * float("nan"),
    "inf": lambda value: value + float("inf"),
    "-inf": lambda value: value - float("inf"),
    "gradient": WrongGradient.apply,  # type: ignore[dict-item]
    "interrupt": interrupted,
}


def faulty(
    name: str, where: str, fault: str, when: Callable[[int], bool], calls: list[int] | None = None
) -> BilevelProblem:
    """A problem of the table whose f or g has a fault in the evaluations that `when` names.

    They are numbered from 1; ``calls`` has the last number.
    """
    problem = by_name[name]
    counted = [0] if calls is None else calls

    def wrap(level: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(x: Tensor, y: Tensor) -> Tensor:
            counted[0] += 1
            value = function(x, y)
            return FAULTS[fault](value) if when(counted[0]) else value

        return called if level == where else function

    return BilevelProblem(
        wrap("f", problem.f), wrap("g", problem.g), problem.upper_set, problem.lower_set
    )


class TestAFaultLeavesStateAndParameters:
    """As they were: on a healthy problem the run goes on as if the fault had not been."""

    problem = by_name["ball"]

    def begun(self, solver: Solver) -> Any:
        optimizer = solver.make(self.problem)(groups(*self.problem.at()))
        healthy = self.problem.build()
        for _ in range(3):
            optimizer.step(problem=healthy)
        return optimizer

    def assert_untouched(self, bad: Any, good: Any) -> None:
        assert same(point_of(bad), point_of(good))
        assert same(timeless(bad), timeless(good))
        assert same([g["lr"] for g in bad.param_groups], [g["lr"] for g in good.param_groups])

    @pytest.mark.parametrize("fault", list(FAULTS))
    @every_solver
    def test_that_stays(self, solver: Solver, fault: str) -> None:
        # They alternate: every solver and every fault meets both.
        place = list(SOLVERS.values()).index(solver) + list(FAULTS).index(fault)
        where = "fg"[place % 2]
        good, bad = self.begun(solver), self.begun(solver)
        broken = faulty("ball", where, fault, lambda n: True)
        expected = KeyboardInterrupt if fault == "interrupt" else NonFiniteError
        with pytest.raises(expected) as caught:
            bad.step(problem=broken)
        if expected is NonFiniteError:
            told = str(caught.value)
            assert f"{type(bad).__name__} stopped in outer iteration 4: " in told
            assert f"{LEVELS[where]} returned a " in told
            assert ("gradient with NaN" if fault == "gradient" else "value ") in told
            assert "at a point with norm" in told
        self.assert_untouched(bad, good)
        other = self.problem.build()
        for optimizer in (bad, good):
            optimizer.step(problem=other)
        self.assert_untouched(bad, good)

    # The inner loop takes a point where g is not defined for too long a step.
    @pytest.mark.filterwarnings("ignore:The inner loop diverged")
    @every_solver
    def test_at_each_evaluation_of_an_iteration_in_turn(self, solver: Solver) -> None:
        """IVSP may recover from a trial or an inner step that could not be evaluated."""
        for where in "fg":
            calls, good = [0], self.begun(solver)
            good.step(problem=faulty("ball", where, "nan", lambda n: False, calls))
            assert calls[0]
            for moment in range(1, calls[0] + 1):
                bad, untouched = self.begun(solver), self.begun(solver)
                broken = faulty("ball", where, "nan", lambda n, moment=moment: n == moment)
                _, error = attempt(bad, broken, 1)
                if error is None:
                    assert solver.is_ivsp, (where, moment)
                    assert all(bool(v.isfinite().all()) for v in point_of(bad))
                    continue
                assert f"{LEVELS[where]} returned a value nan" in str(error)
                self.assert_untouched(bad, untouched)
                bad.step(problem=broken)
                self.assert_untouched(bad, good)


def attempt(
    optimizer: Any, problem: BilevelProblem, steps: int
) -> tuple[list[Any], BilevelError | None]:
    """The records of the steps that were made, and what stopped them."""
    history: list[Any] = []
    try:
        history.extend(optimizer.step(problem=problem) for _ in range(steps))
    except BilevelError as error:
        return history, error
    return history, None


# The inner loop takes a point where g is not defined for too long a step.
@pytest.mark.filterwarnings("ignore:The inner loop diverged")
@pytest.mark.parametrize("where", ["f", "g"])
def test_a_single_fault_of_ivsp_is_recovered_from_or_named(where: str) -> None:
    """At each evaluation of two outer iterations in turn, also in trials and the inner loop."""
    outcomes = []
    for moment in range(30):
        calls = [0]
        optimizer = make_ivsp(by_name["sine"], L_init=0.05)(groups(*by_name["sine"].at()))
        problem = faulty("sine", where, "nan", lambda n, moment=moment: n == moment + 1, calls)
        history, error = attempt(optimizer, problem, 6)
        outcomes.append("named" if error else "recovered" if calls[0] > moment else "not met")
        assert error is None or f"{LEVELS[where]} returned a" in str(error)
        assert all(
            math.isfinite(v) for info in history for v in (info.upper, info.lower, info.residual)
        )
        assert all(bool(vector.isfinite().all()) for vector in point_of(optimizer))
    assert outcomes[0] == "named"  # at the start there is nothing to go back to
    assert outcomes.count("recovered") >= 5


def test_where_no_step_can_be_evaluated_the_run_does_not_stand_still() -> None:
    """f is defined at the current point only: the steps shrink to length 0."""
    problem, start = by_name["ball"], by_name["ball"].at()
    walled = BilevelProblem(
        lambda x, y: (
            problem.f(x, y) if torch.equal(x, start[0]) else problem.f(x, y) * float("nan")
        ),
        problem.g,
    )
    with pytest.raises(
        NonFiniteError,
        match=(
            r"iteration 1: in each of \d+ trials of the line search, in the last: The upper-level"
        ),
    ):
        make_ivsp(problem)(groups(*start)).step(problem=walled)


@pytest.mark.parametrize("where", ["f", "g"])
def test_an_objective_that_changes_on_the_way_is_told(where: str) -> None:
    calls, problem = [0], by_name["ball"]

    def drift(level: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drifting(x: Tensor, y: Tensor) -> Tensor:
            calls[0] += level == where
            slope = y.sum() if level == "g" else 1.0
            return function(x, y) + (calls[0] if level == where and calls[0] > 40 else 0.0) * slope

        return drifting

    changing = BilevelProblem(
        drift("f", problem.f), drift("g", problem.g), problem.upper_set, problem.lower_set
    )
    with pytest.raises(
        BilevelError,
        match=f"{LEVELS[where]} was .* and then .* at the same point: .* deterministic",
    ):
        solve(
            changing,
            *problem.at(),
            make_ivsp(problem, gamma0=10.0 if where == "f" else 0.1),
            max_steps=200,
        )


@pytest.mark.parametrize("after", [60, 300])
def test_randomness_that_begins_later_is_told_soon(after: int) -> None:
    """The inner loop fails then, and further trials of the line search would fail likewise."""
    calls, generator = [0], torch.Generator().manual_seed(0)

    def g(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        noise = (
            0.1 * torch.rand((), generator=generator, dtype=y.dtype) if calls[0] > after else 0.0
        )
        return ((y - x) ** 2).sum() / 2 * (1 + noise)

    problem = BilevelProblem(lambda x, y: ((x - 1) ** 2).sum() + (y**2).sum(), g)
    start = torch.tensor([3.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    with pytest.raises(BilevelError, match=f"{LEVELS['g']} was .* and then .* at the same point"):
        solve(problem, *start, max_steps=500)
    assert calls[0] < after + 5000


def test_an_inner_loop_that_fails_on_a_kink_names_it() -> None:
    problem = BilevelProblem(
        lambda x, y: ((x - 1) ** 2).sum() + (y**2).sum(),
        lambda x, y: torch.relu(y - x).sum() + 0.1 * (y**2).sum(),
    )
    start = torch.tensor([0.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    with pytest.raises(
        InnerLoopError,
        match=r"stopped in outer iteration 1: the inner loop .* kink near its minimiser \(ReLU",
    ):
        solve(problem, *start, max_steps=5)


def test_a_step_to_infinity_is_not_taken() -> None:
    """In float32 y overflows although f, g and their gradients do not."""
    problem = BilevelProblem(
        lambda x, y: 1e30 * (x.sum() + y.sum()), lambda x, y: 1e-3 * (y - x).sum()
    )
    optimizer = SOLVERS["bome"].make(xi=1e20)(groups(torch.zeros(1), torch.zeros(2)))
    with pytest.raises(NonFiniteError, match="in outer iteration 1: the step has the length inf"):
        optimizer.step(problem=problem)
    assert all(bool(vector.isfinite().all()) for vector in point_of(optimizer))


SCALES = [1e-8, 1e-4, 1.0, 1e4, 1e8]


def scaled(name: str, f_scale: float, g_scale: float) -> BilevelProblem:
    p = by_name[name]
    return BilevelProblem(
        lambda x, y: f_scale * p.f(x, y), lambda x, y: g_scale * p.g(x, y), p.upper_set, p.lower_set
    )


# IVSP meets every pair of scales, the paper's more of them; the others each scale of f and of g.
SCALED = [
    (solver, f_scale, g_scale)
    for place, solver in enumerate(SOLVERS.values())
    for i, f_scale in enumerate(SCALES)
    for j, g_scale in enumerate(SCALES)
    if solver.name == "paper"
    or not (i % 2 or j % 2 or (not solver.is_ivsp and (i + j + 2 * place) % 3))
]


# The dtypes alternate: every solver meets both.
@pytest.mark.parametrize(
    ("solver", "f_scale", "g_scale", "dtype"),
    [
        pytest.param(*case, dtype, id="{}-{:g}-{:g}-{}".format(*case, str(dtype)[6:]))
        for case, dtype in zip(SCALED, cycle([torch.float32, torch.float64]), strict=False)
    ],
)
def test_any_scale_ends(solver: Solver, f_scale: float, g_scale: float, dtype: torch.dtype) -> None:
    """The run makes its steps at a bounded cost, or stops with a sentence: it never stalls."""
    make = solver.make(
        by_name["quadratic"], **({"max_inner": 60} if solver.name == "paper" else {})
    )
    optimizer = make(groups(*by_name["quadratic"].at(dtype=dtype)))
    problem = scaled("quadratic", f_scale, g_scale)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history, error = attempt(optimizer, problem, 12)
    assert error is None or f"{type(optimizer).__name__} stopped in outer iteration" in str(error)
    assert problem.calls.passes < 12 * 100 * 70
    assert all(bool(vector.isfinite().all()) for vector in point_of(optimizer))
    still = [info for info in history if info.step == 0.0]
    if solver.name == "paper" and len(still) > 5 and not (told or error):
        x, y = point_of(optimizer)
        assert certify(
            problem, x, y, optimizer.envelope, tolerance=1e-3 * g_scale
        ).stationarity <= 1e-3 * (f_scale + g_scale)


class TestEdges:
    problem = by_name["sine"]

    @pytest.mark.parametrize("gap", [1e-2, 1e-6, 1e-10, 1e-15])
    @pytest.mark.parametrize("sigma", [1.0, 3.0, 7.0])
    def test_rho_near_its_bound(self, sigma: float, gap: float) -> None:
        rho = (1 - gap) / sigma
        constants = {**self.problem.ivsp, "rho": rho, "sigma": sigma, "max_inner": 2000}
        self.ends(IVSP(groups(*self.problem.at()), **constants), 10)

    def test_rho_at_its_bound_up_to_rounding(self) -> None:
        rho, sigma = 0.014929937177814963, 66.97951827191497
        assert rho * sigma < 1.0  # and yet 1/rho - sigma is not positive
        with pytest.raises(ValueError, match="must be smaller than 1/sigma"):
            Envelope(rho=rho, sigma=sigma, delta=1e-3)

    @pytest.mark.parametrize("delta", [1e-3, 1e-12, 1e-16, 1e-100, 5e-324])
    def test_delta_near_rounding(self, delta: float) -> None:
        constants = {**self.problem.ivsp, "rho": 0.5, "delta": delta, "max_inner": 2000}
        self.ends(IVSP(groups(*self.problem.at()), **constants), 20)

    @pytest.mark.parametrize("k", [0, 10**6, 10**12, 10**18])
    def test_mu_after_very_many_iterations(self, k: int) -> None:
        for i, mu0 in enumerate([1e-2, 1e-8, 1e-30, 1e-200, 1e-310, 5e-324]):
            # They alternate: every mu0 and every iteration meets both.
            smoothing: Any = ("huber", "softplus")[(i + len(str(k))) % 2]
            make = make_ivsp(self.problem, mu0=mu0, smoothing=smoothing, max_inner=2000)
            x, y = self.problem.at()
            optimizer = make(groups(x, y))
            start = optimizer.method.start(self.problem.build(), x, y, (1.0, 1.0))
            optimizer.run = replace(start, k=k)
            self.ends(optimizer, 5)

    def ends(self, optimizer: Any, steps: int) -> None:
        problem, before = self.problem.build(), point_of(optimizer)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            history, error = attempt(optimizer, problem, steps)
        if error is not None:
            assert "IVSP stopped in outer iteration" in str(error)
            return
        assert all(math.isfinite(info.upper) and math.isfinite(info.residual) for info in history)
        moved = any(not torch.equal(a, b) for a, b in zip(point_of(optimizer), before, strict=True))
        assert moved or any("IVSP does not move any more" in str(w.message) for w in told)
