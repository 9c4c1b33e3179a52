"""Methods on hypergradients on mini-batches: contract, right on average, and where they lead."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from functools import partial
from typing import Any

import finite_sum
import pytest
import torch
from helpers import groups, point_of
from records import same
from tables import BATCHED, Solver, batched_dtype, every_batched_solver, every_optimizer
from torch import Tensor

from lightning_bilevel import (
    AID,
    DARTS,
    SOBA,
    BilevelError,
    BilevelOptimizer,
    BilevelProblem,
    Box,
    HJFBiO,
    Power,
    StreamInfo,
    TableRMS,
)

F64 = torch.float64


def begun(solver: Solver, dtype: torch.dtype = F64, **more: Any) -> BilevelOptimizer:
    return solver.make(**more)(groups(*finite_sum.start(dtype)))


def run(optimizer: BilevelOptimizer, problems: list[BilevelProblem]) -> list[StreamInfo]:
    history = [optimizer.step(problem=problem) for problem in problems]
    assert all(isinstance(info, StreamInfo) for info in history)
    return history  # type: ignore[return-value]


def state_of(optimizer: BilevelOptimizer) -> Any:
    memory = {k: v for k, v in optimizer.memory.items() if k != "optimization_time"}
    return [*point_of(optimizer)], memory


# --- The contract


@every_optimizer
@every_batched_solver
class TestContract:
    def test_resumes_bitwise(self, solver: Solver, optimizers: dict[str, Any]) -> None:
        """Also in the middle of an iteration that takes several batches."""
        dtype = batched_dtype(BATCHED, solver, optimizers)
        problems = finite_sum.batches(9)
        straight = begun(solver, dtype, **optimizers)
        for stop, problem in enumerate(problems):
            file = io.BytesIO()
            torch.save(straight.state_dict(), file)
            file.seek(0)
            resumed = solver.kind(groups(*point_of(straight)), **optimizers)
            resumed.load_state_dict(torch.load(file, weights_only=True))
            run(straight, [problem])
            run(resumed, [problem])
            assert same(state_of(straight), state_of(resumed)), stop

    def test_copies_run_on(self, solver: Solver, optimizers: dict[str, Any]) -> None:
        original = begun(solver, **optimizers)
        run(original, finite_sum.batches(4))
        copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
        more = finite_sum.batches(4, seed=1)
        run(original, more)
        for copied in copies:
            run(copied, more)
            assert same(state_of(copied), state_of(original))

    def test_stays_in_the_sets(self, solver: Solver, optimizers: dict[str, Any]) -> None:
        optimizer = begun(solver, **optimizers)
        for k, problem in enumerate(finite_sum.batches(12)):
            problem.upper_set = problem.lower_set = Box(-0.4, 0.4)
            if k == 0:
                with pytest.warns(UserWarning, match="lies outside"):
                    optimizer.step(problem=problem)
            else:
                optimizer.step(problem=problem)
            for v in point_of(optimizer):
                assert v.abs().max() <= 0.4


@every_batched_solver
def test_the_passes_are_stated_counted_and_real(solver: Solver) -> None:
    count = {"f": 0, "g": 0}

    def f(x: Tensor, y: Tensor) -> Tensor:
        count["f"] += 1
        return finite_sum.upper(x, y, torch.arange(3))

    def g(x: Tensor, y: Tensor) -> Tensor:
        count["g"] += 1
        return finite_sum.lower(x, y, torch.arange(3))

    optimizer = begun(solver)
    passes = []
    for k in range(1, 8):
        count.update(f=0, g=0)
        info = optimizer.step(problem=BilevelProblem(f, g, mini_batch=True))
        evaluations = info.calls.lower + 2 * info.calls.gap + info.calls.products
        assert count == {"f": info.calls.upper, "g": evaluations}
        assert (info.iteration, info.passes) == (k, optimizer.progress.passes)
        passes.append(info.calls.passes)
    if solver.kind is AID:
        # Two steps of y, three products and the gradients of f with the first, the step of x.
        assert passes == [1, 1, 3, 2, 2, 2, 1]
    else:
        assert passes == [solver.passes] * 7


@every_batched_solver
def test_a_batch_that_is_not_finite_leaves_no_trace(solver: Solver) -> None:
    """Also where x would have moved before g turned out to be sick; the tenth in a row ends it."""
    adamw = partial(torch.optim.AdamW, lr=0.02)
    optimizer = begun(solver, upper_optimizer=adamw, lower_optimizer=adamw)
    run(optimizer, finite_sum.batches(7))
    calls = [0]

    def g(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        sick = float("nan") if calls[0] >= last else 1.0
        return sick * finite_sum.lower(x, y, torch.arange(3))

    def f(x: Tensor, y: Tensor) -> Tensor:
        return finite_sum.upper(x, y, torch.arange(3))

    # The last evaluation of the step is the sick one.
    last = {"soba-difference": 3, "darts": 4, "hjfbio": 3}.get(solver.name, 1)
    before = copy.deepcopy(state_of(optimizer))
    for skipped in range(1, 10):
        calls[0] = 0
        info = optimizer.step(problem=BilevelProblem(f, g, mini_batch=True))
        assert isinstance(info, StreamInfo)
        assert not info.taken
        assert info.skipped == skipped
        assert same(state_of(optimizer)[0], before[0])
        counted = {"iteration", "passes", "skipped", "skipped_in_a_row"}
        for name, value in state_of(optimizer)[1].items():
            assert name in counted or same(value, before[1][name]), name
    calls[0] = 0
    with pytest.raises(BilevelError, match="10 mini-batches in a row were not finite"):
        optimizer.step(problem=BilevelProblem(f, g, mini_batch=True))


@pytest.mark.parametrize("name", ["soba", "hjfbio", "darts", "neumann"])
@pytest.mark.parametrize("optimizer", [None, TableRMS], ids=["plain", "table"])
def test_weights_that_no_batch_touches_stay(name: str, optimizer: Any) -> None:
    """One weight per sample: those of the batches alone move."""
    table = torch.full((6,), 0.3, dtype=F64)
    more = {} if optimizer is None else {"upper_optimizer": optimizer}
    solver = BATCHED[name].make(**more)(groups(table, torch.ones(2, dtype=F64)))

    def problem(rows: Tensor) -> BilevelProblem:
        return BilevelProblem(
            lambda x, y: ((y - 2) ** 2).sum(),
            lambda x, y: (x[rows].sigmoid()[:, None] * (y - rows[:, None]) ** 2).mean(),
            mini_batch=True,
            touched=rows,
        )

    for _ in range(14):
        solver.step(problem=problem(torch.tensor([1, 4])))
    moved = point_of(solver)[0] != 0.3
    assert moved.tolist() == [False, True, False, False, True, False]


# --- Right on average. Three samples, each with its own second derivatives.

H_I = torch.tensor([[[2.0, 0.3], [0.3, 1.0]], [[1.0, -0.4], [-0.4, 0.5]], [[0.6, 0.1], [0.1, 3.0]]])
B_I = torch.tensor([[[1.0], [0.2]], [[-0.5], [1.5]], [[0.4], [-1.0]]]).double()
C_I = torch.tensor([[1.0, 0.0], [-2.0, 1.0], [0.3, 0.5]]).double()
A_I = torch.tensor([[0.5, 1.0], [2.0, -1.0], [-1.0, 0.3]]).double()
D_I = torch.tensor([0.3, -0.7, 1.0]).double()
H_I = H_I.double()
ALL = [0, 1, 2]
PAIRS = [[0, 1], [0, 2], [1, 2]]
X0, Y0 = torch.tensor([0.7]).double(), torch.tensor([1.0, -0.5]).double()


def on(upper: list[int], lower: list[int], mini_batch: bool = True) -> BilevelProblem:
    """f_i = |y - a_i|^2/2 + d_i x + x^2/2, g_i = <y, H_i y>/2 - <y, B_i x + c_i>."""
    H, B, C = H_I[lower].mean(0), B_I[lower].mean(0), C_I[lower].mean(0)
    A, d = A_I[upper].mean(0), D_I[upper].mean()
    return BilevelProblem(
        lambda x, y: ((y - A) ** 2).sum() / 2 + (d * x + x**2 / 2).sum(),
        lambda x, y: y @ H @ y / 2 - y @ (B @ x + C),
        mini_batch=mini_batch,
    )


def after(make: Any, problem: BilevelProblem, v: Tensor) -> tuple[Tensor, ...]:
    optimizer = make(groups(X0, Y0))
    optimizer.memory["v"] = v
    optimizer.step(problem=problem)
    return (*point_of(optimizer), optimizer.memory["v"])


@pytest.mark.parametrize(
    "make",
    [
        partial(SOBA, alpha=0.1, beta=0.2),
        partial(SOBA, alpha=0.1, beta=0.2, products="difference"),
        partial(HJFBiO, gamma=0.1, lam=0.2, tau=0.3, r=100.0),
    ],
    ids=["soba", "soba-difference", "hjfbio"],
)
def test_a_step_is_right_on_average_over_all_batches(make: Any) -> None:
    """x, y and v: the mean over all pairs of batches is the step on all data."""
    v = torch.tensor([0.4, -0.8]).double()
    ends = [after(make, on(*pair), v) for pair in itertools.product(PAIRS, PAIRS)]
    assert not torch.allclose(ends[0][0], ends[1][0])
    expected = after(make, on(ALL, ALL, mini_batch=False), v)
    for several, one in zip(zip(*ends, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.stack(several).mean(0), one, rtol=1e-9, atol=1e-9)


def step_of_x(make: Any, batches: list[Any]) -> Tensor:
    optimizer = make(groups(X0, Y0))
    for upper, lower in batches:
        optimizer.step(problem=on(upper, lower))
    return point_of(optimizer)[0] - X0


def test_the_series_is_right_on_average_over_independent_batches() -> None:
    """Over those of f, of the two products and of the mixed one; y has its step on all data.

    Products on one batch would not do: the mean of H_B^2 is not the square of the mean.
    """
    make = partial(AID, alpha=0.1, beta=0.2, T=1, N=2, linear_solver="neumann", eta=0.4)
    means = []
    for independent in (True, False):
        ends = []
        for upper, first, second, last in itertools.product(PAIRS, repeat=4):
            lower = (first, second, last) if independent else (first, first, first)
            batches = zip((ALL, upper, ALL, ALL), (ALL, *lower), strict=True)
            ends.append(step_of_x(make, list(batches)))
        means.append(torch.stack(ends).mean(0))
    whole = make(groups(X0, Y0))
    whole.step(problem=on(ALL, ALL, mini_batch=False))
    expected = point_of(whole)[0] - X0
    # By the formula: y = y0 - 0.2 g_y, v = 0.4 sum_j (I - 0.4 H)^j f_y, d = f_x + B' v.
    H, B, C, A = H_I.mean(0), B_I.mean(0), C_I.mean(0), A_I.mean(0)
    y = Y0 - 0.2 * (H @ Y0 - B @ X0 - C)
    shrink = torch.eye(2).double() - 0.4 * H
    v = 0.4 * (torch.eye(2).double() + shrink + shrink @ shrink) @ (y - A)
    by_hand = -0.1 * (D_I.mean() + X0 + B.T @ v)
    torch.testing.assert_close(expected, by_hand)
    torch.testing.assert_close(means[0], by_hand)
    assert (means[1] - by_hand).norm() > 1e-3 * by_hand.norm()


def test_darts_is_its_formula_on_the_batch() -> None:
    optimizer = DARTS(groups(X0, Y0), alpha=0.1, beta=0.2, xi=0.3)
    optimizer.step(problem=on([0, 1], [1, 2]))
    H, B, C = (t[[1, 2]].mean(0) for t in (H_I, B_I, C_I))
    ahead = Y0 - 0.3 * (H @ Y0 - B @ X0 - C)
    # g_xy p = -B' p
    d = D_I[[0, 1]].mean() + X0 + 0.3 * B.T @ (ahead - A_I[[0, 1]].mean(0))
    x = X0 - 0.1 * d
    got_x, got_y = point_of(optimizer)
    torch.testing.assert_close(got_x, x)
    torch.testing.assert_close(got_y, Y0 - 0.2 * (H @ Y0 - B @ x - C))


def test_differences_compare_the_same_masks() -> None:
    """With dropout, the difference of HJFBiO and of SOBA is the product with those masks."""

    def g(x: Tensor, y: Tensor) -> Tensor:
        kept = (torch.rand(2) < 0.5).to(y)
        return (kept * y**2).sum() + 0.1 * (y**2).sum() - (y * x).sum()

    v = torch.tensor([0.4, -0.8]).double()
    problem = BilevelProblem(lambda x, y: (y * 1.0).sum(), g, mini_batch=True)
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        kept = (torch.rand(2) < 0.5).double()
        expected = v - 0.2 * ((2 * kept + 0.2) * v - 1)
        for make in (
            partial(HJFBiO, lam=0.2, tau=0.2),
            partial(SOBA, beta=0.2, products="difference"),
            partial(SOBA, beta=0.2),
        ):
            torch.manual_seed(seed)
            torch.testing.assert_close(after(make, problem, v)[2], expected, rtol=1e-8, atol=1e-8)
        seen.add(tuple(kept.tolist()))
    assert len(seen) > 2


@pytest.mark.parametrize(
    "make",
    [
        partial(SOBA, alpha=1e-3, beta=0.1),
        partial(AID, alpha=1e-3, beta=0.1, T=1, N=2, linear_solver="neumann"),
    ],
    ids=["soba", "neumann"],
)
def test_curvature_that_is_not_positive_is_said_once(make: Any) -> None:
    problem = BilevelProblem(
        lambda x, y: ((y - 1) ** 2).sum() + (x**2).sum(),
        lambda x, y: (x * y).sum() - (y**2).sum() / 2,
        mini_batch=True,
    )
    optimizer = make(groups(X0, X0))
    with pytest.warns(UserWarning, match="met the curvature -1 along a direction of the") as told:
        run(optimizer, [problem] * 8)
    assert len(told) == 1


# --- Where they lead


def stationary() -> tuple[Tensor, Tensor]:
    """x and y with f_x + B' H^-1 f_y = 0 and H y = B x + c, on all data."""
    H, B, C, A = H_I.mean(0), B_I.mean(0), C_I.mean(0), A_I.mean(0)
    M = torch.linalg.solve(H, B)
    offset = torch.linalg.solve(H, C) - A
    x = -(D_I.mean() + M.T @ offset) / (1 + (M.T @ M).squeeze())
    return x, torch.linalg.solve(H, B @ x + C)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (partial(SOBA, alpha=Power(0.5, -0.7), beta=Power(0.5, -0.6)), 4000),
        (
            partial(
                AID,
                alpha=Power(0.5, -0.7),
                beta=Power(0.5, -0.6),
                T=2,
                N=8,
                linear_solver="neumann",
                eta=0.5,
            ),
            6000,
        ),
    ],
    ids=["soba", "neumann"],
)
def test_decaying_steps_lead_to_the_solution_on_all_data(make: Any, steps: int) -> None:
    """Which is another point than that of any batch."""
    optimizer = make(groups(X0, Y0))
    generator = torch.Generator().manual_seed(0)
    problems = {(i, j): on(PAIRS[i], PAIRS[j]) for i in range(3) for j in range(3)}
    ends = []
    for k, (i, j) in enumerate(torch.randint(3, (steps, 2), generator=generator).tolist()):
        optimizer.step(problem=problems[i, j])
        if k >= steps // 2:
            ends.append(point_of(optimizer)[0])
    x, y = stationary()
    assert (torch.stack(ends).mean(0) - x).abs() < 0.03
    assert (point_of(optimizer)[1] - y).norm() < 0.15
    assert (X0 - x).abs() > 0.3
