"""What holds for every solver of the table, on every problem."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import asdict, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from helpers import PROBLEMS, Problem, exact_residuals, groups, point_of
from tables import (
    SOLVERS,
    Solver,
    dtype_of,
    every_pair,
    every_problem,
    every_solver,
    solved,
)
from torch import Tensor

import lightning_bilevel
from lightning_bilevel import (
    BilevelOptimizer,
    BilevelProblem,
    Box,
    Calls,
    Envelope,
    IVSPInfo,
    StepInfo,
    certify,
)

by_name = {problem.name: problem for problem in PROBLEMS}


def begun(
    solver: Solver,
    problem: Problem,
    dtype: torch.dtype = torch.float64,
    units: tuple[float, float] = (1.0, 1.0),
) -> BilevelOptimizer:
    return solver.make(problem)(groups(*problem.at(dtype=dtype), units))


def advance(optimizer: BilevelOptimizer, problem: BilevelProblem, steps: int) -> list[StepInfo]:
    return [optimizer.step(problem=problem) for _ in range(steps)]


def facts(history: list[StepInfo]) -> list[dict[str, Any]]:
    """All of the records but their times."""
    return [{**asdict(info), "optimization_time": None} for info in history]


def same_point(a: BilevelOptimizer, b: BilevelOptimizer) -> bool:
    return all(torch.equal(v, w) for v, w in zip(point_of(a), point_of(b), strict=True))


def through_a_file(optimizer: BilevelOptimizer) -> dict[str, Any]:
    """The state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def equal(a: Any, b: Any) -> bool:
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(torch.equal(v, w) if isinstance(v, Tensor) else v == w for v, w in pairs)


def counted(problem: Problem, count: dict[str, int], shift: float = 0.0) -> BilevelProblem:
    """The problem, or one next to it, with functions that count how often they are called."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        count["f"] += 1
        return problem.f(x, y) + (shift * x.sum() if shift else 0.0)

    def g(x: Tensor, y: Tensor) -> Tensor:
        count["g"] += 1
        return problem.g(x + shift, y)

    return BilevelProblem(f, g, problem.upper_set, problem.lower_set)


class Step(NamedTuple):
    """An iteration: its record, what was spent on it, the calls of f and g, and the point after it.

    The point is x, and then y and the inner variable, which are in the lower set.
    """

    info: StepInfo
    spent: Calls
    called: dict[str, int]
    x: Tensor
    lower: list[Tensor]


@cache
def run_of(solver: Solver, problem: Problem) -> tuple[list[Step], BilevelOptimizer]:
    """60 iterations, made once for all that is true of them, and the solver after them."""
    count: dict[str, int] = {}
    optimizer, built = begun(solver, problem, dtype_of(solver, problem)), counted(problem, count)
    steps = []
    for _ in range(60):
        count.update(f=0, g=0)
        before = built.calls
        info = optimizer.step(problem=built)
        x, y = point_of(optimizer)
        inner = [] if solver.kept is None else [optimizer.memory[solver.kept].clone()]
        steps.append(Step(info, built.calls - before, dict(count), x, [y, *inner]))
    return steps, optimizer


@cache
def first_residual(problem: Problem) -> float:
    """How far the start is from a KKT point of the relaxed problem."""
    return certify(problem.build(), *problem.at(), problem.envelope).kkt


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
class TestContract:
    def test_makes_progress(self, solver: Solver, problem: Problem) -> None:
        """Towards a KKT point of the relaxed problem, whatever the method aims at."""
        steps, optimizer = run_of(solver, problem)
        history = [step.info for step in steps]
        # In float64, so that the certificate is exact whatever the run is in.
        end = [v.double() for v in (steps[-1].x, steps[-1].lower[0])]
        last = certify(problem.build(), *end, problem.envelope).kkt
        assert last < 0.7 * first_residual(problem)
        assert [info.iteration for info in history] == list(range(1, 61))
        assert optimizer.memory["iteration"] == 60
        assert optimizer.memory["inner_iterations"] == sum(
            info.inner_iterations for info in history
        )
        total = sum((info.calls for info in history), Calls())
        assert optimizer.memory["passes"] == total.passes
        times = [info.optimization_time for info in history]
        assert times == sorted(times)
        assert 0.0 < times[0] < times[-1]

    def test_stays_in_the_sets(self, solver: Solver, problem: Problem) -> None:
        """With its inner variable; exactly in a box, whose projection does not round."""
        dtype = dtype_of(solver, problem)
        rounding = 50 * torch.finfo(dtype).eps
        for step in run_of(solver, problem)[0]:
            for convex_set, v in (
                (problem.upper_set, step.x),
                *((problem.lower_set, v) for v in step.lower),
            ):
                assert v.dtype == dtype
                projected = convex_set.project(v)
                if isinstance(convex_set, Box):
                    assert torch.equal(projected, v)
                else:
                    assert (projected - v).norm() <= rounding * (1 + v.norm())

    def test_the_passes_are_stated_counted_and_real(self, solver: Solver, problem: Problem) -> None:
        for k, (info, spent, called, *_) in enumerate(run_of(solver, problem)[0], 1):
            assert info.calls == spent, k
            assert called == {
                "f": info.calls.upper,
                "g": info.calls.lower
                + 2 * info.calls.gap
                + info.calls.products
                + info.calls.values,
            }, k
            assert info.calls.passes == (solver.passes or info.calls.passes), k

    def test_so_are_those_on_changing_batches(self, solver: Solver, problem: Problem) -> None:
        count = {"f": 0, "g": 0}
        optimizer = begun(solver, problem)
        for k in range(6):
            count.update(f=0, g=0)
            info = optimizer.step(problem=counted(problem, count, shift=1e-3 * k))
            assert count == {
                "f": info.calls.upper,
                "g": info.calls.lower
                + 2 * info.calls.gap
                + info.calls.products
                + info.calls.values,
            }, k

    def test_keeps_the_keys_and_types_of_its_state(self, solver: Solver, problem: Problem) -> None:
        """Which are plain, and the inner variable is there where the method has one."""
        optimizer, built = begun(solver, problem, torch.float32), problem.build()
        kinds, constants = [], []
        for _ in range(3):
            optimizer.step(problem=built)
            state = optimizer.state_dict()
            assert list(state["state"]) == [0]
            kinds.append({name: type(value) for name, value in state["state"][0].items()})
            constants.append(
                {name: type(value) for name, value in state["param_groups"][0].items()}
            )
            assert all(
                type(leaf) in (int, float, bool, str, type(None))
                for leaf in leaves(state["param_groups"])
            )
            tensors = {
                name for name, value in state["state"][0].items() if isinstance(value, Tensor)
            }
            kept = {solver.kept, *solver.also} - {None}
            assert tensors == kept
            assert all(state["state"][0][name].dtype == torch.float32 for name in tensors)
        assert kinds[0] == kinds[1] == kinds[2]
        assert constants[0] == constants[1] == constants[2]
        # A tuple is the theorem's points: two dictionaries of tensors and numbers.
        assert set(kinds[0].values()) <= {Tensor, int, float, bool, tuple}
        assert {type(leaf) for leaf in leaves(state["state"][0])} <= {Tensor, int, float, bool}

    def test_resumes_bitwise_at_every_step(self, solver: Solver, problem: Problem) -> None:
        check_resume(solver, problem, dtype_of(solver, problem), range(6))

    def test_copies_run_on(self, solver: Solver, problem: Problem) -> None:
        """Each for itself."""
        optimizer, built = begun(solver, problem), problem.build()
        advance(optimizer, built, 3)
        straight = copy.deepcopy(optimizer)
        expected = facts(advance(straight, built, 3))
        for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
            assert facts(advance(copied, built, 3)) == expected
            assert same_point(copied, straight)
        got = facts(advance(optimizer, built, 3))
        # The original knows what it has evaluated; a copy looks once more.
        assert [{**info, "calls": None} for info in got] == [
            {**info, "calls": None} for info in expected
        ]
        assert same_point(optimizer, straight)


def check_resume(
    solver: Solver,
    problem: Problem,
    dtype: torch.dtype,
    stops: range,
    units: tuple[float, float] = (1.0, 1.0),
    more: int = 4,
) -> None:
    """A run that is stopped and resumed from a file goes on as if it had not been stopped.

    It is stopped before each of the steps `stops`.
    """
    straight, built = begun(solver, problem, dtype, units), problem.build()
    states, history = {}, []
    for k in range(stops.stop + more):
        if k in stops or k - more in stops:
            states[k] = through_a_file(straight), point_of(straight)
        if k < stops.stop + more - 1:
            history += advance(straight, built, 1)
    for stop in stops:
        state, point = states[stop]
        # With other constants and units, which the load replaces.
        resumed = solver.kind(groups(*point))
        resumed.load_state_dict(state)
        got = advance(resumed, problem.build(), more)
        assert facts(got) == facts(history[stop : stop + more]), stop
        expected = states[stop + more]
        assert all(
            torch.equal(a, b) for a, b in zip(point_of(resumed), expected[1], strict=True)
        ), stop
        for name, value in expected[0]["state"][0].items():
            if name != "optimization_time":
                assert equal(resumed.memory[name], value), (stop, name)
        if stop:
            assert got[0].optimization_time > history[stop - 1].optimization_time


@pytest.mark.parametrize("name", ["active_box", "ball", "simplex"])
@every_solver
def test_resumes_bitwise_in_units_too(solver: Solver, name: str) -> None:
    problem = by_name[name]
    dtype = dtype_of(solver, problem)
    units = (2.0, 0.5) if dtype == torch.float32 else (0.3, 0.07)
    check_resume(solver, problem, dtype, range(3, 5), units)


@every_problem
@pytest.mark.parametrize(
    "solver", [solver for solver in SOLVERS.values() if solver.is_ivsp], ids=str
)
def test_ivsp_ends_at_a_kkt_point(solver: Solver, problem: Problem) -> None:
    """Of the relaxed problem; the smoothed penalty allows half of mu beyond the constraint."""
    solution = solved(solver, problem)
    certificate, last = solution.certificate, solution.history[-1]
    assert certificate is not None
    assert isinstance(last, IVSPInfo)
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


def test_a_constant_called_lr_stays_what_it_is() -> None:
    """A method that reports no step size keeps its own; one that does is shown with it."""

    class Slow(BilevelOptimizer):
        def __init__(self, params: Any, report: float | None) -> None:
            super().__init__(params, {"lr": 0.5, "report": report})

        def advance(
            self, problem: BilevelProblem, x: Tensor, y: Tensor
        ) -> tuple[Tensor, Tensor, StepInfo]:
            f = problem.upper(x, y)
            return (
                x,
                y,
                StepInfo(upper=f.value, lower=0.0, inner_iterations=0, lr=self.constants["report"]),
            )

    problem = by_name["quadratic"]
    for report, shown in ((None, 0.5), (0.1, 0.1)):
        solver = Slow(groups(*problem.at()), report)
        solver.step(problem=problem.build())
        assert [group["lr"] for group in solver.param_groups] == [shown, shown]
