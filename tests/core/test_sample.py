"""One evaluation on a mini-batch: values, gradients, random numbers, counts, processes, errors."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import finite_sum
import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

from lightning_bilevel import BilevelProblem, Calls, NonFiniteError
from lightning_bilevel.core import sample as module
from lightning_bilevel.core.lower import LowerTerm
from lightning_bilevel.core.sample import Sample

GRADIENTS = ("upper_x", "upper_y", "lower_x", "lower_y", "inner_x", "inner_y")
VALUES = ("upper", "lower", "inner")


def point() -> tuple[Tensor, Tensor, Tensor]:
    x, y = finite_sum.start()
    return x, y, torch.tensor([0.3, -0.2, 0.7], dtype=torch.float64)


def noisy(x: Tensor, y: Tensor) -> Tensor:
    return dropout((y - x) ** 2, 0.5).sum()


def same(a: Sample, b: Sample, tolerance: float = 0.0) -> None:
    for name in VALUES:
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=tolerance, abs=tolerance)
    for name in GRADIENTS:
        torch.testing.assert_close(
            getattr(a, name), getattr(b, name), rtol=tolerance, atol=tolerance, msg=name
        )


def test_it_is_f_and_g_with_all_gradients() -> None:
    x, y, z = (v.requires_grad_() for v in point())
    rows = torch.tensor([1, 4, 7])
    got = finite_sum.on(rows).sample(x, y, z, distance=True)
    f, g, inner = (
        finite_sum.upper(x, y, rows),
        finite_sum.lower(x, y, rows),
        finite_sum.lower(x, z, rows),
    )
    expected = Sample(
        f.item(),
        g.item(),
        inner.item(),
        *torch.autograd.grad(f, (x, y)),
        *torch.autograd.grad(g, (x, y)),
        *torch.autograd.grad(inner, (x, z)),
    )
    same(got, expected, 1e-14)
    assert got.gap == pytest.approx(g.item() - inner.item())
    assert got.distance == pytest.approx(((z - y) ** 2).sum().item())


class TestRandomNumbers:
    problem = BilevelProblem(lambda x, y: (x * y).sum(), noisy, mini_batch=True)

    def test_are_the_same_at_y_and_z(self) -> None:
        x, y = torch.randn(50), torch.randn(50)
        for _ in range(3):
            sample = self.problem.sample(x, y, y.clone())
            assert sample.gap == 0.0
            assert torch.equal(sample.lower_x, sample.inner_x)
            assert torch.equal(sample.lower_y, sample.inner_y)

    def test_would_not_be_without_the_restore(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.RandomNumbers, "restore", lambda self: None)
        x, y = torch.randn(50), torch.randn(50)
        assert self.problem.sample(x, y, y.clone()).gap != 0.0

    def test_are_new_ones_in_the_next_sample(self) -> None:
        x, y = torch.randn(50), torch.randn(50)
        first, second = (self.problem.sample(x, y, y) for _ in range(2))
        assert first.lower != second.lower

    def test_are_the_same_for_each_chunk(self) -> None:
        chunks = BilevelProblem(lambda x, y: (x * y).sum(), [noisy, noisy], mini_batch=True)
        x, y = torch.randn(50), torch.randn(50)
        sample = chunks.sample(x, y, y.clone())
        assert sample.gap == 0.0
        mask = sample.lower_y / (2 * (y - x))
        # The two chunks have their own masks: dropout doubles what it keeps.
        assert {round(v) for v in mask.tolist()} == {0, 2, 4}


def test_its_mean_over_all_batches_is_that_of_all_data() -> None:
    """For a fixed z: values, gap and gradients."""
    x, y, z = point()
    pairs = list(combinations(range(finite_sum.SAMPLES), 2))
    samples = [finite_sum.on(torch.tensor(pair)).sample(x, y, z) for pair in pairs]
    whole = finite_sum.on(torch.arange(finite_sum.SAMPLES)).sample(x, y, z)
    means: dict[str, Any] = {
        name: sum(getattr(sample, name) for sample in samples) / len(samples)
        for name in (*VALUES, "gap")
    }
    for name, mean in means.items():
        assert mean == pytest.approx(getattr(whole, name), abs=1e-12), name
    for name in GRADIENTS:
        mean = torch.stack([getattr(sample, name) for sample in samples]).mean(0)
        assert (mean - getattr(whole, name)).abs().max() < 1e-12, name
    # A test that cannot fail is none: single batches are far off.
    assert max(abs(sample.gap - whole.gap) for sample in samples) > 0.1


def test_it_takes_three_passes_and_counts_them() -> None:
    count = {"f": 0, "g": 0}

    def f(x: Tensor, y: Tensor) -> Tensor:
        count["f"] += 1
        return (x * y).sum()

    def g(x: Tensor, y: Tensor) -> Tensor:
        count["g"] += 1
        return ((y - x) ** 2).sum()

    problem = BilevelProblem(f, g, mini_batch=True)
    problem.sample(torch.ones(2), torch.zeros(2), torch.ones(2))
    assert count == {"f": 1, "g": 2}
    assert problem.calls == Calls(upper=1, lower=2)


def test_chunks_add_up() -> None:
    x, y, z = point()
    rows = torch.arange(6)
    f, g = finite_sum.upper, finite_sum.lower
    parts = BilevelProblem(
        [lambda x, y, r=r: f(x, y, r) / 2 for r in (rows[:3], rows[3:])],
        [lambda x, y, r=r: g(x, y, r) / 2 for r in (rows[:3], rows[3:])],
        mini_batch=True,
    )
    same(parts.sample(x, y, z), finite_sum.on(rows).sample(x, y, z), 1e-14)


@pytest.mark.parametrize("part", ["features", "outputs"])
def test_parts_of_g_do_not_change_it(part: str) -> None:
    """The features are computed once for y and z."""
    seen: list[Tensor] = []

    def halved(v: Tensor) -> Tensor:
        seen.append(v)
        return v**2 / 2

    def g(x: Tensor, y: Tensor) -> Tensor:
        return ((y - x) ** 2).sum()

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum()

    def whole(x: Tensor, y: Tensor) -> Tensor:
        return g(x**2 / 2, y) if part == "features" else g(x, y**2 / 2)

    x, y, z = torch.randn(4), torch.randn(4), torch.randn(4)
    given: dict[str, Any] = {part: halved}
    same(
        BilevelProblem(f, g, mini_batch=True, **given).sample(x, y, z),
        BilevelProblem(f, whole, mini_batch=True).sample(x, y, z),
        1e-6,
    )
    assert len(seen) == (1 if part == "features" else 2)


class TestInner:
    """z has its own functions, where there are any."""

    @staticmethod
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum()

    @pytest.mark.parametrize("as_term", [False, True], ids=["function", "term"])
    def test_is_evaluated_at_z_alone(self, as_term: bool) -> None:
        seen: list[tuple[str, float]] = []

        def noted(name: str) -> Any:
            def g(x: Tensor, y: Tensor) -> Tensor:
                seen.append((name, y[0].item()))
                return ((y - x) ** 2).sum()

            return g

        inner = LowerTerm(noted("inner")) if as_term else noted("inner")
        problem = BilevelProblem(self.f, noted("lower"), inner=inner, mini_batch=True)
        x, y, z = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
        problem.sample(x, y, z)
        assert seen == [("lower", 1.0), ("inner", 2.0)]
        # Exact evaluations do not know it.
        problem.at(x).gap(y, z)
        assert {name for name, _ in seen[2:]} == {"lower"}

    def test_takes_the_features_too(self) -> None:
        def g(features: Tensor, y: Tensor) -> Tensor:
            return ((y - features) ** 2).sum()

        problem = BilevelProblem(
            self.f, g, features=lambda x: 2 * x, inner=lambda u, z: g(u, z), mini_batch=True
        )
        x, y = torch.ones(2), torch.randn(2)
        assert problem.sample(x, y, y.clone()).gap == 0.0

    def test_follows_the_share_of_a_process_and_units(self) -> None:
        x, y, z = point()
        rows = torch.arange(4)
        problem = finite_sum.on(rows, inner=lambda x, y: finite_sum.lower(x, y, rows))
        half = problem.on_this_rank(0.5, 0.5, lambda buffer: buffer)
        assert half.sample(x, y, z).inner == pytest.approx(problem.sample(x, y, z).inner / 2)
        scaled = problem.in_units(2.0, 4.0)
        assert scaled.sample(x / 2, y / 4, z / 4).inner == pytest.approx(
            problem.sample(x, y, z).inner
        )


def test_processes_share_everything_in_one_sum() -> None:
    """Two processes with a half of the batch each have the sample of the whole batch."""
    x, y, z = point()
    rows = torch.arange(8)
    buffers: list[Tensor] = []

    def kept(buffer: Tensor) -> Tensor:
        buffers.append(buffer)
        return buffer

    halves = [finite_sum.on(half).on_this_rank(0.5, 0.5, kept) for half in (rows[:4], rows[4:])]
    for half, seconds in zip(halves, (1.0, 2.0), strict=True):
        half.sample(x, y, z, seconds=seconds)
    first, second = buffers
    summed = halves[0].on_this_rank(1.0, 1.0, lambda buffer: first + second)
    got = summed.sample(x, y, z, distance=True, seconds=1.0)
    same(got, finite_sum.on(rows).sample(x, y, z), 1e-13)
    assert got.seconds == 1.5
    assert got.distance == pytest.approx(float(((z - y) ** 2).sum()))


class TestErrors:
    @pytest.mark.parametrize(
        ("where", "what"),
        [("f", "upper-level function f"), ("y", "lower-level function g"), ("z", "function g")],
    )
    @pytest.mark.parametrize("slope", [False, True], ids=["value", "gradient"])
    def test_a_number_that_is_not_finite_is_named(self, where: str, what: str, slope: bool) -> None:
        def bad(v: Tensor) -> Tensor:
            # The root has the value 0 and an infinite slope at 0.
            return (v * 0).abs().sqrt().sum() if slope else (v * torch.inf).sum()

        def f(x: Tensor, y: Tensor) -> Tensor:
            return (x * y).sum() + (bad(y) if where == "f" else 0.0)

        def g(x: Tensor, y: Tensor) -> Tensor:
            return ((y - x) ** 2).sum() + (bad(y) if y[0] == {"y": 1.0, "z": 2.0}.get(where) else 0)

        problem = BilevelProblem(f, g, mini_batch=True)
        x, y, z = torch.ones(2), torch.ones(2), torch.full((2,), 2.0)
        with pytest.raises(NonFiniteError, match=what):
            problem.sample(x, y, z)

    def test_a_sum_that_overflows_is_no_error(self) -> None:
        huge = 3e38
        problem = BilevelProblem(
            lambda x, y: (x * y).sum(), lambda x, y: (huge * (y - x)).sum(), mini_batch=True
        )
        zeros = torch.zeros(3)
        assert problem.sample(zeros, zeros, zeros).lower_y.tolist() == [pytest.approx(huge)] * 3

    def test_a_function_without_y(self) -> None:
        problem = BilevelProblem(lambda x, y: x.sum(), lambda x, y: y.sum(), mini_batch=True)
        with pytest.raises(ValueError, match="f does not depend on the lower-level variables y"):
            problem.sample(torch.ones(1), torch.ones(1), torch.ones(1))

    def test_a_function_that_is_no_scalar(self) -> None:
        problem = BilevelProblem(lambda x, y: y, lambda x, y: y.sum(), mini_batch=True)
        with pytest.raises(TypeError, match="must return a scalar tensor"):
            problem.sample(torch.ones(1), torch.ones(1), torch.ones(1))
