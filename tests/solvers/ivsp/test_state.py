"""The state of a run of IVSP: a fault leaves it, a checkpoint holds it, a copy goes on from it."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from clocks import Clock
from helpers import PROBLEMS, Problem, advance, facts, groups, paper_constants, point_of
from torch import Tensor

from lightning_bilevel import IVSP, BilevelProblem
from lightning_bilevel.core.errors import NonFiniteError
from lightning_bilevel.solvers.ivsp.state import State

pytestmark = pytest.mark.filterwarnings("ignore:The inner loop diverged")
by_name = {problem.name: problem for problem in PROBLEMS}
STEPS = 24


def stiff() -> BilevelProblem:
    """x is so stiff that the unit of x gets shorter after 10 iterations."""
    spread = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)
    return BilevelProblem(
        lambda x, y: 0.5 * (spread * (1e4 * (x - 1) ** 2 + (y - 2) ** 2)).sum(),
        lambda x, y: 0.5 * (spread * (y - 0.01 * x) ** 2).sum(),
    )


def beside() -> BilevelProblem:
    problem = by_name["ball"]
    constraint = lambda x, y: (x**2).sum() + (y**2).sum() - 1.5  # noqa: E731
    return BilevelProblem(
        problem.f, problem.g, problem.upper_set, problem.lower_set, constraints=[constraint]
    )


def too_curved() -> BilevelProblem:
    """g becomes a hundred times as curved on the way: L_yy is corrected."""
    return BilevelProblem(
        lambda x, y: ((x - 2) ** 2).sum() + ((y - 1) ** 2).sum(),
        lambda x, y: 0.5 * ((1 + 50 * x**2) * (y - 1) ** 2).sum() + 0.05 * (y**2).sum(),
    )


def zeros(nx: int, ny: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(nx, dtype=torch.float64), torch.full((ny,), 0.3, dtype=torch.float64)


def own(problem: Problem) -> dict[str, Any]:
    return {"delta": problem.envelope.delta}


Case = tuple[Callable[[], BilevelProblem], tuple[Tensor, Tensor], dict[str, Any]]
CASES: dict[str, Case] = {
    "paper": (by_name["ball"].build, by_name["ball"].at(), paper_constants(by_name["ball"])),
    "paper, updates": (
        by_name["simplex"].build,
        by_name["simplex"].at(dtype=torch.float32),
        paper_constants(by_name["simplex"]),
    ),
    "fixed L": (
        by_name["ball"].build,
        by_name["ball"].at(),
        {**paper_constants(by_name["ball"]), "fixed_L": 0.2, "L_init": None},
    ),
    "too small L_yy": (
        by_name["ball"].build,
        by_name["ball"].at(),
        {**paper_constants(by_name["ball"]), "L_yy": 1e-3, "rho": 100.0},
    ),
    "own": (by_name["sine"].build, by_name["sine"].at(), own(by_name["sine"])),
    "own, float32": (by_name["flat"].build, by_name["flat"].at(dtype=torch.float32), {}),
    "unit of x": (stiff, zeros(8, 8), {}),
    "L_yy corrected": (too_curved, zeros(1, 1), {}),
    "constraints": (beside, by_name["ball"].at(), {}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(case: Case, units: tuple[float, float] = (1.0, 1.0)) -> tuple[IVSP, BilevelProblem]:
    build, point, constants = case
    return IVSP(groups(*point, units), **constants), build()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, of one type, down to the tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def of_run(solver: IVSP) -> list[Any]:
    return [point_of(solver), solver.state_dict(), solver.proved, solver.chosen, solver.multiplier]


# ---------------------------------------------------------------- faults


class Breakable:
    """A problem whose functions raise, or are nan, from an evaluation on."""

    def __init__(self, problem: BilevelProblem) -> None:
        self.seen, self.at, self.fault = 0, math.inf, BaseException()

        def watched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(x: Tensor, y: Tensor) -> Tensor:
                self.seen += 1
                if self.seen < self.at:
                    return function(x, y)
                if isinstance(self.fault, NonFiniteError):
                    return float("nan") * function(x, y)
                raise self.fault

            return call

        (f,), (g,) = problem.upper_terms, problem.lower_terms
        self.problem = BilevelProblem(watched(f), watched(g), problem.upper_set, problem.lower_set)


@pytest.mark.parametrize(
    ("name", "before", "fault"),
    [
        ("paper", 0, KeyboardInterrupt()),
        ("paper", 3, RuntimeError("out of memory")),
        ("fixed L", 3, NonFiniteError()),
        ("own", 2, NonFiniteError()),
        ("own", 0, RuntimeError("out of memory")),
        ("own", 4, KeyboardInterrupt()),
        ("unit of x", 10, KeyboardInterrupt()),
        ("L_yy corrected", 5, RuntimeError("out of memory")),
    ],
    ids=str,
)
def test_a_fault_in_any_evaluation_leaves_the_run(
    name: str, before: int, fault: BaseException, clock: Clock
) -> None:
    """Of an iteration: state, parameters and counts stay, and the run goes on as a healthy one."""
    healthy, problem = made(CASES[name])
    watch = Breakable(problem)
    advance(healthy, watch.problem, before)
    watch.seen = 0
    expected = facts(healthy.step(problem=watch.problem))
    last = watch.seen
    later = [facts(info) for info in advance(healthy, watch.problem, 3)]
    solver, problem = made(CASES[name])
    broken = Breakable(problem)
    broken.fault = fault
    advance(solver, broken.problem, before)
    run, state, point = solver.run, copy.deepcopy(solver.state_dict()), point_of(solver)
    versions = [p._version for group in solver.param_groups for p in group["params"]]
    for number in sorted({*range(1, min(last, 20) + 1), last}):
        broken.seen, broken.at = 0, number
        with pytest.raises(type(fault)):
            solver.step(problem=broken.problem)
        assert solver.run is run
        assert [p._version for group in solver.param_groups for p in group["params"]] == versions
        assert same(solver.state_dict(), state)
        assert same(point_of(solver), point)
    broken.at = math.inf
    assert facts(solver.step(problem=broken.problem)) == expected
    assert [facts(info) for info in advance(solver, broken.problem, 3)] == later
    assert same(of_run(solver), of_run(healthy))


# ---------------------------------------------------------------- checkpoints and copies


@every_case
def test_a_checkpoint_is_plain_data_and_the_same_after_a_load(case: Case) -> None:
    solver, problem = made(case, (2.0, 0.5))
    for steps in (0, 1, 12):
        advance(solver, problem, steps)
        saved = through_a_file(solver.state_dict())
        assert same(saved, solver.state_dict())
        other, _ = made(case)
        for mine, theirs in zip(other.param_groups, point_of(solver), strict=True):
            with torch.no_grad():
                mine["params"][0].copy_(theirs)
        other.load_state_dict(saved)
        assert same(of_run(other), of_run(solver))
        for field in fields(State) if steps else ():
            if field.name not in State.UNSAVED:
                values = (getattr(run, field.name) for run in (other.run, solver.run))
                assert same(*values), field.name
        assert other.envelope == solver.envelope
        assert other.hyper_parameters == solver.hyper_parameters


def test_the_constants_of_a_checkpoint_win() -> None:
    problem = by_name["ball"]
    one = IVSP(groups(*problem.at()), **paper_constants(problem))
    two = IVSP(groups(*problem.at()), delta=7.0)
    two.load_state_dict(one.state_dict())
    assert two.hyper_parameters == one.hyper_parameters
    assert two.envelope == problem.envelope


@every_case
def test_a_run_resumed_at_any_step_is_the_same_bit_for_bit(case: Case) -> None:
    through, problem = made(case)
    states, points, records = [], [], []
    for _ in range(STEPS):
        states.append(through_a_file(through.state_dict()))
        points.append(point_of(through))
        records.append(facts(through.step(problem=problem)))
    for stop in range(STEPS):
        resumed = IVSP(groups(*points[stop]))
        resumed.load_state_dict(states[stop])
        left = STEPS if stop in (0, 9, 10, 11, 20) else min(stop + 2, STEPS)
        got = [facts(info) for info in advance(resumed, problem, left - stop)]
        assert got == records[stop:left], stop
        assert same(point_of(resumed), (*points, point_of(through))[left]), stop
        expected = states[left] if left < STEPS else through.state_dict()
        assert same(resumed.state_dict()["state"]["run"], expected["state"]["run"]), stop


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda solver: pickle.loads(pickle.dumps(solver))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("name", ["paper", "own", "unit of x", "constraints"])
def test_a_copy_goes_on_bit_for_bit(name: str, copied: Callable[[IVSP], IVSP]) -> None:
    one, problem = made(CASES[name], (2.0, 0.5))
    for steps in (0, 1, 9):
        advance(one, problem, steps)
        two = copied(one)
        assert type(two) is IVSP
        assert same(of_run(two), of_run(one))
        (p,), (q,) = (solver.param_groups[0]["params"] for solver in (one, two))
        assert p.data_ptr() != q.data_ptr()
        three = copied(one)
        expected = [facts(info) for info in advance(three, problem, 4)]
        # The first copy did not move along.
        assert same(of_run(two), of_run(one))
        assert [facts(info) for info in advance(two, problem, 4)] == expected
    assert [facts(info) for info in advance(one, problem, 4)] == expected


@pytest.mark.parametrize("changed", ["f", "g"])
def test_a_loaded_state_on_other_data_is_evaluated_anew(changed: str) -> None:
    problem = by_name["ball"]
    one, built = made(CASES["paper"])
    advance(one, built, 3)
    two = IVSP(groups(*point_of(one)))
    two.load_state_dict(through_a_file(one.state_dict()))
    other = BilevelProblem(
        (lambda x, y: problem.f(2 * x, y)) if changed == "f" else problem.f,
        (lambda x, y: problem.g(2 * x, y)) if changed == "g" else problem.g,
        problem.upper_set,
        problem.lower_set,
    )
    info = two.step(problem=other)
    assert info.calls.upper == info.trials + 1
    # Where f is the same, the gap shows the change.
    assert info.calls.gap == info.trials + (1 if changed == "f" else 2)


def test_the_parameters_may_be_written_after_a_load() -> None:
    """A checkpoint of Lightning restores the module first; a script may do it last."""
    one, problem = made(CASES["own"])
    advance(one, problem, 5)
    two, _ = made(CASES["own"])
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        for group, value in zip(two.param_groups, point_of(one), strict=True):
            group["params"][0].copy_(value)
    expected = [facts(info) for info in advance(one, problem, 3)]
    assert [facts(info) for info in advance(two, problem, 3)] == expected
