"""How a level steps: by the paper's rule, by a torch optimiser, clipped, at touched coordinates.

And TableRMS.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import finite_sum
import numpy as np
import pytest
import torch
from helpers import groups, point_of
from tables import SOLVERS
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from lightning_bilevel import (
    BOME,
    F2SA,
    MEHA,
    SLM,
    VPBGD,
    BilevelOptimizer,
    BilevelProblem,
    Box,
    Free,
    NonFiniteError,
    PNGBiO,
    StreamingIVSP,
    TableRMS,
)
from lightning_bilevel.solvers import torch_rule
from lightning_bilevel.solvers.torch_rule import TorchRule

EXACT: list[type[BilevelOptimizer]] = [F2SA, MEHA, PNGBiO, VPBGD, SLM, BOME]
MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(SGD, lr=0.03),
    "momentum": partial(SGD, lr=0.03, momentum=0.9),
    "adamw": partial(AdamW, lr=0.03),
    "nadam": partial(torch.optim.NAdam, lr=0.03),
}


def whole(feasible: Any = finite_sum.BOX) -> BilevelProblem:
    problem = finite_sum.on(torch.arange(finite_sum.SAMPLES), mini_batch=False)
    problem.upper_set = problem.lower_set = feasible
    return problem


def both(make: Any) -> dict[str, Any]:
    return {"upper_optimizer": make, "lower_optimizer": make}


# --- By a torch optimiser

# The rates of the paper with which each method's x, y and z step by 0.03.
EQUAL: dict[type[BilevelOptimizer], dict[str, Any]] = {
    F2SA: {"alpha": 0.03, "gamma": 0.03, "T": 3},
    MEHA: {"alpha": 0.03, "beta": 0.03, "eta": 0.03},
    PNGBiO: {"alpha": 0.03, "beta": 0.03, "eta": 0.03},
    VPBGD: {"alpha": 0.03, "beta": 0.03, "T": 3},
    SLM: {"eta": 0.03, "alpha": 0.03, "gamma": 0.03, "T": 3, "lambda0": 1.0},
    BOME: {"xi": 0.03, "alpha": 0.03, "T": 3},
    StreamingIVSP: {"alpha": 0.03, "beta": 0.03, "eta": 0.03},
}


@pytest.mark.parametrize("feasible", [Free(), Box(-0.9, 0.9)], ids=repr)
@pytest.mark.parametrize("mini_batch", [False, True], ids=["exact", "streaming"])
@pytest.mark.parametrize("kind", EQUAL, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:.*lies outside")
def test_sgd_is_the_step_of_the_paper(
    kind: type[BilevelOptimizer], mini_batch: bool, feasible: Any
) -> None:
    if mini_batch and not kind.stochastic:
        pytest.skip("has no steps on mini-batches")
    paper = kind(groups(*finite_sum.start()), **EQUAL[kind])
    by_torch = kind(groups(*finite_sum.start()), **EQUAL[kind], **both(MADE["sgd"]))
    for k in range(15):
        problem = whole(feasible)
        problem.mini_batch = mini_batch
        first, second = (solver.step(problem=problem) for solver in (paper, by_torch))
        assert first.calls == second.calls
        assert second.lr == 0.03
        for a, b in zip(point_of(paper), point_of(by_torch), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=f"step {k}")
    assert not torch.equal(point_of(paper)[0], finite_sum.start()[0])


@pytest.mark.parametrize("make", [MADE["adamw"], partial(AdamW, lr=0.03, fused=True)])
def test_adamw_on_the_flat_vector_is_adamw_on_the_parameters(make: Any) -> None:
    """Two parameters below, with the same gradients by hand."""
    rows = torch.arange(5)
    x, y = finite_sum.start()
    parts = [nn.Parameter(y[:1].clone().reshape(1, 1)), nn.Parameter(y[1:].clone())]
    params = [
        {"params": [nn.Parameter(x.clone())], "level": "upper"},
        {"params": parts, "level": "lower"},
    ]
    solver = VPBGD(params, gamma=2.0, **both(make))
    by_hand = [nn.Parameter(p.detach().clone()) for p in (x, *parts)]
    upper, lower = make(by_hand[:1]), make(by_hand[1:])
    z = nn.Parameter(y.clone())
    inner = make([z])
    for _ in range(5):
        hand_x, hand_y = by_hand[0], torch.cat([p.reshape(-1) for p in by_hand[1:]])
        f = finite_sum.upper(hand_x, hand_y, rows)
        g = finite_sum.lower(hand_x, hand_y, rows)
        at_z = finite_sum.lower(hand_x, z, rows)
        grads = torch.autograd.grad(f + 2.0 * (g - at_z.detach()), by_hand)
        gx, z.grad = torch.autograd.grad(at_z, (hand_x, z))
        for parameter, grad in zip(by_hand, grads, strict=True):
            parameter.grad = grad
        assert hand_x.grad is not None
        hand_x.grad = hand_x.grad - 2.0 * gx
        for optimizer in (upper, lower, inner):
            optimizer.step()
        solver.step(problem=finite_sum.on(rows))
        for a, b in zip([params[0]["params"][0], *parts], by_hand, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["momentum", "adamw", "nadam", "rprop"])
def test_pieces_of_a_long_vector_step_as_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State, too: it is that of one vector, bit for bit."""
    make = {**MADE, "rprop": torch.optim.Rprop}[kind]
    results = []
    for piece in (100, 3):
        monkeypatch.setattr(torch_rule, "_PIECE", piece)
        torch.manual_seed(0)
        rule, v, state = TorchRule(make, "made here"), torch.randn(8), {}
        for _ in range(4):
            rule.step_(v, torch.randn(8), 0.1, state)
        results.append((v, state))
    (v, state), (pieced, pieced_state) = results
    torch.testing.assert_close(v, pieced, rtol=1e-6, atol=1e-7)
    assert state.keys() == pieced_state.keys()
    for name, item in state.items():
        torch.testing.assert_close(item, pieced_state[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("made", ["momentum", "adamw", "nadam"])
@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_advance_with_optimisers_resumes_bitwise(kind: type[BilevelOptimizer], made: str) -> None:
    straight = kind(groups(*finite_sum.start()), **both(MADE[made]))
    for _ in range(3):
        straight.step(problem=whole())
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed = kind(groups(*point_of(straight)), **both(MADE[made]))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    copies = [resumed, copy.deepcopy(straight), pickle.loads(pickle.dumps(straight))]
    for _ in range(3):
        info = straight.step(problem=whole())
        for other in copies:
            again = other.step(problem=whole())
            assert (again.upper, again.lower, again.step) == (info.upper, info.lower, info.step)
    for other in copies:
        assert all(map(torch.equal, point_of(other), point_of(straight)))
        for name in ("upper_optimizer", "lower_optimizer", "inner_optimizer"):
            for key, value in straight.memory[name].items():
                assert torch.equal(other.memory[name][key], value)
                assert other.memory[name][key].dtype == value.dtype


def test_a_failed_iteration_takes_the_optimisers_back() -> None:
    """y and z have stepped when f turns out not to be finite in x."""
    solver = F2SA(groups(*finite_sum.start()), T=2, **both(MADE["adamw"]))
    for _ in range(2):
        solver.step(problem=whole())
    before, point = copy.deepcopy(solver.memory), point_of(solver)
    calls = [0]

    def f(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return finite_sum.upper(x, y, torch.arange(4)) * (torch.nan if calls[0] == 2 else 1.0)

    broken = BilevelProblem(f, lambda x, y: finite_sum.lower(x, y, torch.arange(4)))
    with pytest.raises(NonFiniteError):
        solver.step(problem=broken)
    assert calls == [2]
    assert all(map(torch.equal, point_of(solver), point))
    for name in ("lower_optimizer", "inner_optimizer"):
        for key, value in before[name].items():
            assert torch.equal(solver.memory[name][key], value), (name, key)


def test_where_the_inner_variable_restarts_its_optimiser_does() -> None:
    """So one iteration from a point is the same whatever came before."""
    first = BOME(groups(*finite_sum.start()), lower_optimizer=MADE["momentum"])
    first.step(problem=whole())
    second = BOME(groups(*point_of(first)), lower_optimizer=MADE["momentum"])
    first.step(problem=whole())
    second.step(problem=whole())
    assert first.memory["inner_optimizer"]["momentum_buffer"].equal(
        second.memory["inner_optimizer"]["momentum_buffer"]
    )


# --- Rates and schedulers


def test_rates_stand_in_the_groups() -> None:
    solver = F2SA(
        groups(*finite_sum.start()),
        upper_optimizer=partial(SGD, lr=0.2),
        lower_optimizer=partial(AdamW, lr=0.1),
    )
    assert [group["lr"] for group in solver.param_groups] == [0.2, 0.1]
    assert [group["initial_lr"] for group in solver.param_groups] == [0.2, 0.1]
    assert solver.scheduled_levels == ("upper", "lower")
    assert F2SA(groups(*finite_sum.start())).scheduled_levels == ()
    assert "initial_lr" not in solver.constants
    # One level by torch, the other by the paper.
    mixed = F2SA(groups(*finite_sum.start()), alpha=0.05, lower_optimizer=partial(SGD, lr=0.1))
    for problem in (whole(), finite_sum.on(torch.arange(4))):
        assert mixed.step(problem=problem).lr == 0.05
        assert [group["lr"] for group in mixed.param_groups] == [0.05, 0.1]
    assert mixed.scheduled_levels == ("lower",)


@pytest.mark.parametrize("mini_batch", [False, True], ids=["exact", "streaming"])
def test_schedulers_drive_each_level(mini_batch: bool) -> None:
    """And the inner variable with the lower one, in the ratio of their first rates."""
    optimizers: dict[str, Any] = {
        "upper_optimizer": partial(SGD, lr=0.2),
        "lower_optimizer": partial(SGD, lr=0.1),
        "inner_optimizer": partial(SGD, lr=0.05),
    }
    solver = VPBGD(groups(*finite_sum.start()), gamma=2.0, T=1, restart=False, **optimizers)
    scheduler = LambdaLR(solver, [lambda k: 0.5**k, lambda k: 0.25**k])
    assert all("initial_lr" in group for group in solver.param_groups)
    problem = whole(Free())
    problem.mini_batch = mini_batch
    for k in range(4):
        x, y = point_of(solver)
        w = solver.memory.get("w", y).clone()  # a step on a mini-batch changes it in place
        sample = problem.sample(x, y, w)
        solver.step(problem=problem)
        scheduler.step()
        new_y = point_of(solver)[1]
        d_y = sample.upper_y + 2.0 * sample.lower_y
        torch.testing.assert_close(new_y, y - 0.1 * 0.25**k * d_y, rtol=1e-12, atol=1e-14)
        new_w = w - 0.05 * 0.25**k * sample.inner_y
        torch.testing.assert_close(solver.memory["w"], new_w, rtol=1e-12, atol=1e-14)
        assert [group["lr"] for group in solver.param_groups] == pytest.approx(
            [0.2 * 0.5 ** (k + 1), 0.1 * 0.25 ** (k + 1)]
        )


def test_a_cosine_ends_at_rest() -> None:
    solver = StreamingIVSP(groups(*finite_sum.start()), **both(partial(SGD, lr=0.1)))
    scheduler = CosineAnnealingLR(solver, T_max=4)
    rates = []
    for problem in finite_sum.batches(4):
        solver.step(problem=problem)
        scheduler.step()
        rates.append([group["lr"] for group in solver.param_groups])
    assert rates[1] == pytest.approx([0.05, 0.05])
    assert rates[3] == pytest.approx([0.0, 0.0])
    before = point_of(solver)
    solver.step(problem=finite_sum.batches(1)[0])
    for a, b in zip(before, point_of(solver), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-15)


# --- What is refused


class Shared(torch.optim.Optimizer):
    """Steps by the sign of the sum: no coordinate alone."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad.sum().sign())


class Rateless(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


REFUSED: dict[str, tuple[Any, str]] = {
    "shared": (Shared, "Shared does not act on each coordinate alone"),
    "rateless": (Rateless, "Rateless has lr = None: it needs one positive number"),
    "still": (partial(SGD, lr=0.0), "SGD has lr = 0.0"),
    "tensor": (
        partial(Adam, lr=torch.tensor(0.1), capturable=False, foreach=False),
        "Adam has lr = a tensor 0.1",
    ),
}
if hasattr(torch.optim, "Adafactor"):
    REFUSED["adafactor"] = (torch.optim.Adafactor, "Adafactor")


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimiser_that_does_not_fit_is_refused(name: str, level: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^`F2SA\({level}_optimizer=\.\.\.\)`") as error:
        F2SA(groups(*finite_sum.start()), **{f"{level}_optimizer": make})
    assert message in str(error.value)


def test_an_inner_optimiser_alone_is_refused() -> None:
    start = groups(*finite_sum.start())
    with pytest.raises(ValueError, match=r"`F2SA\(inner_optimizer=...\)` needs a `lower_optim"):
        F2SA(start, inner_optimizer=SGD)


@pytest.mark.parametrize("kind", [*EXACT, StreamingIVSP], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf"), "1"])
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_a_bound_must_be_positive(kind: Any, bound: Any, level: str) -> None:
    with pytest.raises(ValueError, match=rf"`{kind.__name__}\({level}_clip=.*must be positive"):
        kind(groups(*finite_sum.start()), **{f"{level}_clip": bound})


def test_a_state_of_another_optimiser_is_refused() -> None:
    saved = F2SA(groups(*finite_sum.start()), **both(MADE["adamw"]))
    saved.step(problem=whole())
    state = saved.state_dict()
    with pytest.raises(ValueError, match=r"the saved state has .*exp_avg.* and SGD keeps"):
        F2SA(groups(*finite_sum.start()), **both(MADE["momentum"])).load_state_dict(state)
    with pytest.raises(ValueError, match="and the solver has none: make it with the `upper_opt"):
        F2SA(groups(*finite_sum.start())).load_state_dict(state)


# --- Exact clipping


@pytest.mark.parametrize("kind", [F2SA, VPBGD, SLM, BOME], ids=lambda kind: kind.__name__)
def test_clipping_bounds_exact_steps(kind: type[BilevelOptimizer]) -> None:
    table = {solver.kind: solver for solver in SOLVERS.values()}[kind]
    constants = {**table.constants, "T": 1}
    free = kind(groups(*finite_sum.start()), **constants)
    wide = kind(groups(*finite_sum.start()), **constants, upper_clip=1e6, lower_clip=1e6)
    tight = kind(groups(*finite_sum.start()), **constants, upper_clip=1e-3, lower_clip=1e-3)
    steps = [solver.step(problem=whole(Free())).step for solver in (free, wide, tight)]
    assert steps[1] == pytest.approx(steps[0], rel=1e-6)
    rate = {F2SA: 0.01, VPBGD: 0.005, SLM: 0.01, BOME: 0.02}[kind]
    assert steps[2] == pytest.approx(2**0.5 * rate * 1e-3, rel=2e-3)


# --- Touched coordinates and TableRMS


@pytest.mark.parametrize(
    ("make", "sparse", "dense"),
    [
        (SGD, True, True),
        (MADE["momentum"], False, True),
        (partial(SGD, lr=0.1, weight_decay=0.1), False, True),
        (AdamW, False, True),
        (SparseAdam, True, False),
        (TableRMS, True, True),
        (torch.optim.Adagrad, True, True),
    ],
    ids=["sgd", "momentum", "decay", "adamw", "sparse-adam", "table", "adagrad"],
)
def test_who_takes_sparse_gradients(make: Any, sparse: bool, dense: bool) -> None:
    rule = TorchRule(make, "made here")
    assert (rule.sparse, rule.dense) == (sparse, dense)
    # Whoever takes them or not, the untouched gradient does not count.
    v, state = torch.zeros(3), {}
    rule.step_(v, torch.tensor([1.0, 5.0, 1.0]), 0.1, state, torch.tensor([0, 2]))
    assert v[1] == 0.0
    assert v[0] == v[2] < 0.0
    # And without touched coordinates all of it does.
    rule.step_(v, torch.tensor([1.0, 5.0, 1.0]), 0.1, {}, None)
    assert v[1] < 0.0


def table_by_hand(steps: list[dict[int, float]], lr: float) -> np.ndarray[Any, Any]:
    """The equations of the docstring; a step names the touched entries with their gradients."""
    x, square, rms = np.zeros(5), 0.0, 0.0
    for t, gradients in enumerate(steps, 1):
        square = 0.99 * square + 0.01 * np.mean([g**2 for g in gradients.values()])
        rms = max(rms, np.sqrt(square / (1 - 0.99**t)))
        for i, g in gradients.items():
            if rms > 0:
                x[i] -= lr * np.clip(g / rms, -3, 3)
    return x


STEPS: list[dict[int, float]] = [
    {0: 0.0, 1: 0.0},
    {0: 1.0, 1: -2.0},
    {1: 0.5, 3: 0.0},
    {0: 50.0, 2: 0.01, 3: 0.02, 4: 0.0},
    {4: 1e-3},
]


def given(gradients: dict[int, float], dense: bool) -> Tensor:
    indices = torch.tensor(list(gradients))
    values = torch.tensor(list(gradients.values()), dtype=torch.float64)
    if dense:
        return torch.zeros(5, dtype=torch.float64).index_copy_(0, indices, values)
    return torch.sparse_coo_tensor(
        indices[None], values, (5,), is_coalesced=True, check_invariants=False
    )


class TestTableRMS:
    def test_is_its_equations(self) -> None:
        """A touched entry without a gradient counts in the mean."""
        x = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        optimizer = TableRMS([x], lr=2.0)
        for gradients in STEPS:
            x.grad = given(gradients, dense=False)
            optimizer.step()
        np.testing.assert_allclose(x.detach().numpy(), table_by_hand(STEPS, 2.0), rtol=1e-12)
        without = [{i: g for i, g in step.items() if g != 0.0} or step for step in STEPS]
        assert abs(table_by_hand(without, 2.0) - x.detach().numpy()).max() > 1e-4

    def test_a_dense_gradient_touches_all(self) -> None:
        x = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        optimizer = TableRMS([x])
        for gradients in STEPS:
            x.grad = given(gradients, dense=True)
            optimizer.step()
        everything = [{i: step.get(i, 0.0) for i in range(5)} for step in STEPS]
        np.testing.assert_allclose(x.detach().numpy(), table_by_hand(everything, 3.0), rtol=1e-12)

    def test_rows_and_entries_of_a_matrix(self) -> None:
        """Rows as of an embedding, whose sparse gradient may name a row twice."""
        x = nn.Parameter(torch.zeros(4, 2))
        optimizer = TableRMS([x], lr=1.0)
        nn.functional.embedding(torch.tensor([1, 1, 3]), x, sparse=True).sum().backward()
        optimizer.step()
        rms = ((4.0 * 2 + 1.0 * 2) / 4) ** 0.5
        expected = torch.tensor([[0.0] * 2, [-2 / rms] * 2, [0.0] * 2, [-1 / rms] * 2])
        torch.testing.assert_close(x.detach(), expected)
        y = nn.Parameter(torch.zeros(2, 2))
        y.grad = torch.eye(2).to_sparse()
        TableRMS([y], lr=1.0).step()
        torch.testing.assert_close(y.detach(), -torch.eye(2))

    def test_an_empty_batch_and_a_closure(self) -> None:
        x = nn.Parameter(torch.ones(5, dtype=torch.float64))
        optimizer = TableRMS([x])
        x.grad = given({}, dense=False)
        assert optimizer.step(lambda: 7.0) == 7.0
        assert torch.equal(x.detach(), torch.ones(5, dtype=torch.float64))
        assert not optimizer.state[x]
