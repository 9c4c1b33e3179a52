"""Steps on batches that own their lower level: the formula, its cost, faults and resume."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import groups, point_of
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_bilevel import (
    F2SA,
    MEHA,
    VPBGD,
    Adaptation,
    BilevelError,
    BilevelOptimizer,
    BilevelProblem,
    Box,
    PNGBiO,
    Power,
    StreamInfo,
    StreamingIVSP,
)

STEPS = 4
LR = 0.7
ADAM = partial(torch.optim.Adam, lr=0.05)
# The weights of f and of the gap, and the proximal parameter.
METHODS: dict[str, tuple[Callable[..., BilevelOptimizer], tuple[float, float, float | None]]] = {
    "f2sa": (partial(F2SA, alpha=0.1, xi=2.0, lambda0=1.5), (1.0, 1.5, None)),
    "vpbgd": (partial(VPBGD, alpha=0.2, gamma=1.5), (1.0, 1.5, None)),
    "meha": (partial(MEHA, alpha=0.2, gamma=3.0, c=4.0), (0.25, 1.0, 3.0)),
    "streaming-ivsp": (partial(StreamingIVSP, alpha=0.2, rho=3.0, gamma=0.5), (0.5, 1.0, 3.0)),
}
every_method = pytest.mark.parametrize("name", METHODS)


class Batch:
    """A linear classifier on features tanh(images x), one batch per seed."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        torch.manual_seed(seed)
        self.query, self.support = (torch.randn(6, 5, dtype=torch.float64) for _ in range(2))
        self.labels = torch.randint(3, (6,))
        self.scale = scale
        self.runs = 0
        self.backward = 0

    def features(self, inputs: Tensor, x: Tensor) -> Tensor:
        values = torch.tanh(inputs @ x.view(5, 2))
        self.runs += 1

        def count(grad: Tensor) -> None:
            self.backward += 1

        if values.requires_grad:
            values.register_hook(count)
        return values

    def loss(self, values: Tensor, y: Tensor) -> Tensor:
        return self.scale * cross_entropy(values @ y.view(2, 3), self.labels)

    def f(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.features(self.query, x), y)

    def g(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.features(self.support, x), y)

    def problem(self, **options: Any) -> BilevelProblem:
        given = {
            "upper_features": partial(self.features, self.query),
            "features": partial(self.features, self.support),
            "lower_set": Box(-0.4, 0.4),
            "mini_batch": True,
            "adaptation": Adaptation(STEPS, LR),
            **options,
        }
        return BilevelProblem(self.loss, self.loss, **given)


def start() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(10, dtype=torch.float64), 0.1 * torch.randn(6, dtype=torch.float64)


def begun(name: str, **options: Any) -> BilevelOptimizer:
    return METHODS[name][0](groups(*start()), **options)


def steps(optimizer: BilevelOptimizer, seeds: range) -> list[StreamInfo]:
    return [optimizer.step(problem=Batch(seed).problem()) for seed in seeds]  # type: ignore[misc]


def by_hand(
    batch: Batch, x: Tensor, y: Tensor, a: float, b: float, rho: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The direction of x with y and z: autograd through the whole function each time."""

    def slope(function: Callable[[Tensor, Tensor], Tensor], v: Tensor) -> Tensor:
        v = v.detach().requires_grad_()
        return torch.autograd.grad(function(x, v), v)[0]

    z = y
    for _ in range(STEPS):
        z = (z - LR * slope(batch.g, z)).clamp(-0.4, 0.4)
    y = z
    for _ in range(STEPS):
        pull = torch.zeros_like(y) if rho is None else (z - y) / rho
        new_z = z if rho is None else (z - LR * (slope(batch.g, z) + pull)).clamp(-0.4, 0.4)
        d_y = (a * slope(batch.f, y) + b * (slope(batch.g, y) + pull)) / (a + b)
        y = (y - LR * d_y).clamp(-0.4, 0.4)
        z = new_z
    at = x.detach().requires_grad_()
    value = a * batch.f(at, y) + b * (batch.g(at, y) - batch.g(at, z))
    return torch.autograd.grad(value, at)[0], y, z


@every_method
def test_a_step_is_the_formula(name: str) -> None:
    batch = Batch(1)
    x, y = start()
    d_x, y_end, z_end = by_hand(batch, x, y, *METHODS[name][1])
    optimizer = begun(name)
    info = optimizer.step(problem=batch.problem())
    new_x, new_y = point_of(optimizer)
    assert torch.allclose(new_x, x - 0.2 * d_x, rtol=0, atol=1e-10)
    assert torch.equal(new_y, y)
    assert float((new_x - x).norm()) > 1e-4
    assert isinstance(info, StreamInfo)
    assert info.upper == pytest.approx(batch.f(x, y_end).item(), rel=1e-10)
    assert info.lower == pytest.approx(batch.g(x, y_end).item(), rel=1e-10)
    gap = (batch.g(x, y_end) - batch.g(x, z_end)).item()
    assert info.gap == pytest.approx(gap, abs=1e-10)
    # The set is active, so the projections of the inner steps are seen.
    assert float(y_end.abs().max()) == 0.4


@every_method
def test_the_features_run_once_and_back_once(name: str) -> None:
    batch = Batch(1)
    optimizer = begun(name)
    info = optimizer.step(problem=batch.problem())
    # Those of f and those of g.
    assert (batch.runs, batch.backward) == (2, 2)
    proximal = METHODS[name][1][2] is not None
    assert info.calls.upper == STEPS + 1
    assert info.calls.lower == (3 if proximal else 2) * STEPS
    assert info.calls.gap == 1
    assert info.inner_iterations == 2 * STEPS


@every_method
def test_numbers_are_read_from_the_device_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = begun(name, upper_optimizer=ADAM)
    steps(optimizer, range(1))  # the start is projected, which reads numbers
    problem = Batch(1).problem()
    read: list[str] = []
    for method in ("item", "tolist", "__float__", "__bool__", "__int__", "__index__", "equal"):
        original = getattr(Tensor, method)

        def noted(self: Tensor, *args: Any, of: str = method, call: Any = original) -> Any:
            # torch's count of steps is on the host on purpose.
            if self.ndim:
                read.append(of)
            return call(self, *args)

        monkeypatch.setattr(Tensor, method, noted)
    optimizer.step(problem=problem)
    assert read == ["tolist"]


def test_streaming_ivsp_weighs_a_batch_by_the_gaps_before() -> None:
    optimizer = begun("streaming-ivsp", mu=10.0)
    first, second = steps(optimizer, range(2))
    assert first.multiplier == pytest.approx(1 / 0.5)  # the largest phi, at the first batch
    batch = Batch(0)
    x, y = start()
    _, y_end, z_end = by_hand(batch, x, y, 0.5, 1.0, 3.0)
    distance = float((y_end - z_end).square().sum())
    relaxed = first.gap - distance / 6.0 - 1e-3
    assert second.multiplier == pytest.approx((relaxed / 10.0 + 0.5) / 0.5, rel=1e-10)


def test_schedules_of_the_papers_go_on() -> None:
    optimizer = F2SA(groups(*start()), alpha=Power(0.2, -0.5), lambda0=1.0)
    infos = steps(optimizer, range(3))
    assert [info.multiplier for info in infos] == pytest.approx([1.0, 2**0.5, 3**0.5])
    assert [info.lr for info in infos] == pytest.approx([0.2, 0.2 / 2**0.5, 0.2 / 3**0.5])


@pytest.mark.parametrize("options", [{}, {"upper_optimizer": ADAM}], ids=["plain", "adam"])
@every_method
def test_a_resumed_run_is_the_same_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    whole = begun(name, **options)
    history = steps(whole, range(6))
    first = begun(name, **options)
    steps(first, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    second = METHODS[name][0](groups(*(v.clone() for v in point_of(first))), **options)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    rest = steps(second, range(3, 6))
    assert torch.equal(point_of(second)[0], point_of(whole)[0])
    assert [i.upper for i in rest] == [i.upper for i in history[3:]]
    assert [i.multiplier for i in rest] == [i.multiplier for i in history[3:]]


@every_method
def test_a_batch_that_is_not_finite_is_left_out(name: str) -> None:
    optimizer = begun(name, upper_optimizer=ADAM)
    steps(optimizer, range(2))
    point = [v.clone() for v in point_of(optimizer)]
    memory = copy.deepcopy(optimizer.memory["upper_optimizer"])
    multiplier = optimizer.memory.get("multiplier")
    info = optimizer.step(problem=Batch(2, scale=float("nan")).problem())
    assert isinstance(info, StreamInfo)
    assert (info.taken, info.skipped) == (False, 1)
    assert all(torch.equal(a, b) for a, b in zip(point, point_of(optimizer), strict=True))
    assert all(torch.equal(memory[k], optimizer.memory["upper_optimizer"][k]) for k in memory)
    assert optimizer.memory.get("multiplier") == multiplier
    assert steps(optimizer, range(1))[0].taken


def test_a_gradient_that_is_not_finite_is_seen_too() -> None:
    batch = Batch(1)

    def endless(x: Tensor) -> Tensor:
        # The value is finite, and its gradient at 0 is not.
        return batch.features(batch.query, x) + (x * 0).sum().sqrt()

    optimizer = begun("f2sa")
    before = point_of(optimizer)[0].clone()
    info = optimizer.step(problem=batch.problem(upper_features=endless))
    assert isinstance(info, StreamInfo)
    assert not info.taken
    assert torch.equal(point_of(optimizer)[0], before)


def test_too_many_in_a_row_end_the_run() -> None:
    optimizer = begun("f2sa")
    wrong = Batch(2, scale=float("nan")).problem()
    for _ in range(optimizer.patience - 1):
        optimizer.step(problem=wrong)
    with pytest.raises(BilevelError, match="10 mini-batches in a row were not finite"):
        optimizer.step(problem=wrong)


def test_x_waits_for_the_warm_up() -> None:
    optimizer = begun("f2sa", warmup=2)
    x = start()[0]
    moved = []
    for seed in range(3):
        steps(optimizer, range(seed, seed + 1))
        moved.append(not torch.equal(point_of(optimizer)[0], x))
    assert moved == [False, False, True]


def test_processes_have_the_mean_of_their_directions() -> None:
    """Two processes are played one after another: the other's share is added by hand."""
    x, y = start()
    mine, other = Batch(1), Batch(2)
    directions = [by_hand(batch, x, y, 1.0, 1.5, None) for batch in (mine, other)]
    values = torch.stack(
        [
            other.f(x, directions[1][1]),
            other.g(x, directions[1][1]),
            other.g(x, directions[1][2]),
            (directions[1][1] - directions[1][2]).square().sum(),
            torch.tensor(4.0, dtype=torch.float64),
            torch.tensor(1.0, dtype=torch.float64),
        ]
    )
    calls = 0

    def reduce(buffer: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return buffer + torch.cat([values, directions[1][0]])

    optimizer = begun("f2sa")
    optimizer.step(problem=mine.problem().on_this_rank(1.0, 1.0, reduce))
    mean = (directions[0][0] + directions[1][0]) / 2
    assert torch.allclose(point_of(optimizer)[0], x - 0.2 * mean, rtol=0, atol=1e-10)
    assert calls == 1
    assert optimizer.progress.optimization_time == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"lower_optimizer": ADAM}, "lower_optimizer"), ({"lower_clip": 1.0}, "lower_clip")],
)
def test_nothing_else_steps_the_lower_level(options: dict[str, Any], name: str) -> None:
    message = rf"^`F2SA\({name}=\.\.\.\)` has nothing to step: .* Leave `{name}` out\.$"
    with pytest.raises(ValueError, match=message):
        begun("f2sa", **options).step(problem=Batch(0).problem())


def test_a_method_without_such_a_step_says_which_have_one() -> None:
    with pytest.raises(
        BilevelError,
        match=r"^PNGBiO stopped in step 1: the lower level belongs to the mini-batch .* PNGBiO has "
        r"no step for that\. Use F2SA, VPBGD, MEHA or StreamingIVSP\.$",
    ):
        PNGBiO(groups(*start())).step(problem=Batch(0).problem())
