"""What holds for every solver of the table."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, Problem, exact_residuals, groups, in_units, point_of
from records import same, timeless
from tables import (
    SOLVERS,
    Solver,
    dtype_of,
    every_pair,
    every_problem,
    every_solver,
    place_of,
    solved,
)
from torch import Tensor

import lightning_bilevel
from lightning_bilevel import BilevelOptimizer, BilevelProblem, Box, Calls, Envelope, certify
from lightning_bilevel.solvers.base import Method, State
from lightning_bilevel.solvers.constants import positive
from lightning_bilevel.solvers.record import PenaltyInfo, StepInfo

by_name = {problem.name: problem for problem in PROBLEMS}
Units = tuple[float, float]


def begun(
    solver: Solver,
    problem: Problem,
    dtype: torch.dtype = torch.float64,
    units: Units = (1.0, 1.0),
) -> BilevelOptimizer:
    return solver.make(problem)(groups(*problem.at(dtype=dtype), units))


def facts(info: StepInfo) -> dict[str, Any]:
    """The record but its time."""
    return {**asdict(info), "optimization_time": None}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read: dict[str, Any] = torch.load(file, weights_only=True)
    return read


def lasting(optimizer: BilevelOptimizer) -> dict[str, Any]:
    """The state of the run but what is evaluated, and warned of, again after a load."""
    again = ("point", "here", "resumed", "warned")
    return {k: v for k, v in vars(optimizer.run).items() if k not in again} if optimizer.run else {}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def counted(problem: Problem, count: dict[str, int], shift: float = 0.0) -> BilevelProblem:
    """The problem, or one next to it, with functions that count how often they are called."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        count["f"] += 1
        return problem.f(x, y) + (shift * x.sum() if shift else 0.0)

    def g(x: Tensor, y: Tensor) -> Tensor:
        count["g"] += 1
        return problem.g(x + shift, y)

    return BilevelProblem(f, g, problem.upper_set, problem.lower_set)


def assert_counted(count: dict[str, int], calls: Calls) -> None:
    below = calls.lower + 2 * calls.gap + calls.products + calls.values
    assert count == {"f": calls.upper, "g": below}


def test_the_table_has_every_solver() -> None:
    """And IVSP twice."""
    public = [value for value in vars(lightning_bilevel).values() if isinstance(value, type)]
    kinds = {
        kind
        for kind in public
        if issubclass(kind, BilevelOptimizer) and kind is not BilevelOptimizer
    }
    assert {solver.kind for solver in SOLVERS.values()} == kinds
    assert [solver.name for solver in SOLVERS.values() if solver.is_ivsp] == ["paper", "own"]


@every_pair
def test_a_run_is_counted_stays_in_the_sets_and_makes_progress(
    solver: Solver, problem: Problem
) -> None:
    """Towards a KKT point of the relaxed problem, whatever the method aims at.

    Its inner variable is in Y too; in a box exactly, whose projection does not round.
    """
    dtype, count = dtype_of(solver, problem), {"f": 0, "g": 0}
    optimizer, built = begun(solver, problem, dtype), counted(problem, count)
    history: list[StepInfo] = []
    for k in range(60):
        count.update(f=0, g=0)
        before = built.calls
        info = optimizer.step(problem=built)
        assert info.calls == built.calls - before
        assert_counted(count, info.calls)
        assert info.calls.passes == (solver.passes or info.calls.passes)
        assert info.iteration == k + 1
        history.append(info)
        x, y = point_of(optimizer)
        inner = [] if solver.kept is None else [getattr(optimizer.run, solver.kept)]
        for convex_set, v in (
            (problem.upper_set, x),
            *((problem.lower_set, v) for v in (y, *inner)),
        ):
            assert v.dtype == dtype
            projected = convex_set.project(v)
            if isinstance(convex_set, Box):
                assert torch.equal(projected, v)
            else:
                assert (projected - v).norm() <= 50 * torch.finfo(dtype).eps * (1 + v.norm())
    progress = optimizer.progress
    assert progress.iterations == 60
    assert progress.inner_iterations == sum(info.inner_iterations for info in history)
    assert progress.passes == sum((info.calls for info in history), Calls()).passes
    assert progress.passes == history[-1].passes
    times = [info.optimization_time for info in history]
    assert times == sorted(times)
    assert 0.0 < times[0] < times[-1] == progress.optimization_time
    # In float64, so that the certificate is exact whatever the run is in.
    last = certify(problem.build(), x.double(), y.double(), problem.envelope).kkt
    assert last < 0.7 * certify(problem.build(), *problem.at(), problem.envelope).kkt


@every_solver
def test_passes_on_changing_batches_are_counted(solver: Solver) -> None:
    count = {"f": 0, "g": 0}
    optimizer = begun(solver, by_name["ball"])
    for k in range(6):
        count.update(f=0, g=0)
        info = optimizer.step(problem=counted(by_name["ball"], count, shift=1e-3 * k))
        assert_counted(count, info.calls)


@every_solver
def test_the_state_is_plain_data_with_the_same_keys_after_each_step(solver: Solver) -> None:
    problem = by_name["simplex"]
    optimizer, built = begun(solver, problem, torch.float32), problem.build()
    state = optimizer.state_dict()["state"]
    assert list(state) == ["constants", "progress", "run"]
    assert state["run"] is None
    keys = set()
    for _ in range(3):
        optimizer.step(problem=built)
        now = optimizer.state_dict()
        state = now["state"]
        assert list(state) == ["constants", "progress", "run"]
        keys.add((*state["constants"], *state["progress"], *state["run"]))
        tensors = {name for name, value in state["run"].items() if isinstance(value, Tensor)}
        assert tensors >= {name for name in (solver.kept, *solver.also) if name}
        plain = (int, float, bool, str, type(None))
        assert {type(v) for v in leaves([now["param_groups"], state["constants"]])} <= {*plain}
        assert {type(v) for v in leaves(state)} <= {Tensor, *plain}
        assert all(v.dtype == torch.float32 for v in leaves(state) if isinstance(v, Tensor))
    assert len(keys) == 1
    given = {**solver.constants, **solver.given(problem)}
    made = solver.kind.method_type(**given)
    assert {name: state["constants"][name] for name in given} == {
        name: made.plain()[name] for name in given
    }


@every_pair
def test_it_resumes_bitwise_at_every_step(solver: Solver, problem: Problem) -> None:
    """From a file in a new solver, and as a copy: as if it had not been stopped."""
    dtype, steps, more = dtype_of(solver, problem), 12, 2
    units = ((1.0, 1.0), (2.0, 0.5), (0.3, 0.07))[place_of(solver, problem) % 3]
    straight, built = begun(solver, problem, dtype, units), problem.build()
    history: list[StepInfo] = []
    ends: list[tuple[Any, ...]] = []
    going_on: list[tuple[int, BilevelOptimizer, BilevelProblem]] = []
    for k in range(steps + 1):
        ends.append((timeless(straight), lasting(straight), point_of(straight)))
        if k <= steps - more:
            # With other constants and units, which the load replaces.
            resumed = solver.kind(groups(*point_of(straight)))
            resumed.load_state_dict(through_a_file(straight.state_dict()))
            going_on.append((k, resumed, problem.build()))
        if k in (0, 3):
            going_on.append((k, copy.deepcopy(straight), built))
            going_on.append((k, pickle.loads(pickle.dumps(straight)), problem.build()))
        if k < steps:
            history.append(straight.step(problem=built))
    for start, optimizer, its_problem in going_on:
        assert same((timeless(optimizer), lasting(optimizer)), ends[start][:2])
        for k in range(start, start + more):
            info = optimizer.step(problem=its_problem)
            assert same(facts(info), facts(history[k])), (start, k)
            assert same(timeless(optimizer), ends[k + 1][0]), (start, k)
            assert same(point_of(optimizer), ends[k + 1][2]), (start, k)
        assert info.optimization_time > (history[start - 1].optimization_time if start else 0.0)


@pytest.mark.parametrize("name", ["active_box", "sine"])
@every_solver
def test_units_are_a_change_of_variables(solver: Solver, name: str) -> None:
    """A run in units is one of the problem in u and v, x = a u and y = b v, without units."""
    problem = by_name[name]
    for a, b in ((4.0, 0.5), (0.3, 1.7)):
        exact = a == 4.0  # powers of two round nothing
        direct, built = begun(solver, problem, units=(a, b)), problem.build()
        x, y = problem.at()
        changed, other = solver.make(problem)(groups(x / a, y / b)), in_units(problem, a, b)
        for _ in range(8):
            info, expected = direct.step(problem=built), changed.step(problem=other)
            u, v = point_of(changed)
            if exact:
                assert same(point_of(direct), (a * u, b * v))
                assert info.calls == expected.calls
            assert info.step == pytest.approx(expected.step, rel=0.0 if exact else 1e-6)
            torch.testing.assert_close(point_of(direct), (a * u, b * v), rtol=1e-8, atol=1e-8)


class TestOutsideWrites:
    """A write to the parameters from outside is noticed by torch's count of their versions."""

    @every_solver
    def test_the_run_goes_on_from_there(self, solver: Solver) -> None:
        problem = by_name["simplex"]
        optimizer, built = begun(solver, problem), problem.build()
        optimizer.step(problem=built)
        state = through_a_file(optimizer.state_dict())
        x, y = problem.at("solution")
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].copy_(x)
            optimizer.param_groups[1]["params"][0].copy_(y)
        optimizer.step(problem=built)
        fresh = solver.kind(groups(x, y))
        fresh.load_state_dict(state)
        fresh.step(problem=problem.build())
        assert same(point_of(optimizer), point_of(fresh))

    def test_one_out_of_the_set_is_projected(self) -> None:
        problem = by_name["active_box"]
        optimizer, built = begun(SOLVERS["paper"], problem), problem.build()
        optimizer.step(problem=built)
        with torch.no_grad():
            optimizer.param_groups[1]["params"][0].fill_(5.0)
        with pytest.warns(UserWarning, match="The lower-level start lies outside"):
            optimizer.step(problem=built)

    def test_one_through_data_is_refused_at_the_hundredth_step(self) -> None:
        problem = by_name["quadratic"]
        optimizer, built = begun(SOLVERS["bome"], problem), problem.build()
        for _ in range(100):
            optimizer.step(problem=built)
        optimizer.param_groups[0]["params"][0].data.add_(1.0)
        before = timeless(optimizer)
        with pytest.raises(
            lightning_bilevel.BilevelError,
            match=r"stopped in outer iteration 101: parameters were written through `\.data`",
        ):
            optimizer.step(problem=built)
        assert same(timeless(optimizer), before)


@every_problem
@pytest.mark.parametrize(
    "solver", [solver for solver in SOLVERS.values() if solver.is_ivsp], ids=str
)
def test_ivsp_ends_at_a_kkt_point(solver: Solver, problem: Problem) -> None:
    """Of the relaxed problem; the smoothed penalty allows half of mu beyond the constraint."""
    solution = solved(solver, problem)
    certificate, last = solution.certificate, solution.history[-1]
    assert certificate is not None
    assert isinstance(last, PenaltyInfo)
    assert certificate.stationarity < 1e-3
    assert certificate.multiplier == 0 or abs(certificate.residual) <= last.mu / 2 + last.zeta
    assert certificate.own_multiplier
    relaxed = replace(
        problem,
        envelope=Envelope(rho=certificate.rho, sigma=certificate.sigma, delta=certificate.delta),
    )
    by_other_means = exact_residuals(relaxed, solution.x, solution.y, certificate.multiplier)
    got = (certificate.stationarity, certificate.feasibility, certificate.complementarity)
    assert got == pytest.approx(by_other_means, rel=1e-3, abs=1e-6)
    if solver.name == "own":
        assert certificate.stationarity < 1e-5
        return
    # The relaxed problem of the table, whose solution is known.
    assert certificate.kkt < 1e-3
    for got_point, expected in zip((solution.x, solution.y), problem.at("solution"), strict=True):
        assert (got_point - expected).norm() < 2e-3
    assert certificate.multiplier == pytest.approx(problem.multiplier, rel=1e-2, abs=1e-3)


@dataclass(frozen=True, kw_only=True)
class SlowMethod(Method[State]):
    rate: float = positive(0.5)
    report: float | None = None

    def step(self, problem: BilevelProblem, s: State) -> tuple[State, StepInfo]:
        f = problem.upper(s.x, s.y)
        return s, StepInfo(upper=f.value, lower=0.0, inner_iterations=0, lr=self.report)


class Slow(BilevelOptimizer):
    method_type = SlowMethod


@pytest.mark.parametrize(("report", "shown"), [(None, 0.5), (0.1, 0.1)])
def test_the_shown_step_size_is_the_reported_one_or_the_constant(
    report: float | None, shown: float
) -> None:
    problem = by_name["quadratic"]
    solver = Slow(groups(*problem.at()), report=report)
    assert [group["lr"] for group in solver.param_groups] == [0.5, 0.5]
    solver.step(problem=problem.build())
    assert [group["lr"] for group in solver.param_groups] == [shown, shown]
