import contextlib
import copy
import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from graphs import CountedPart
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.lower import LowerPoint
from lightning_bilevel.core.problem import BilevelProblem, Calls, Start
from lightning_bilevel.core.sets import Box, Free

both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)
NX, NY = 3, 4
W = torch.randn(NY, NX, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def f(x: Tensor, y: Tensor) -> Tensor:
    return (x**2).sum() * y.sum() + torch.sin(y).sum()


def g(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(torch.tanh(W.to(x) @ x) * y).sum()


def features(x: Tensor) -> Tensor:
    return torch.tanh(W.to(x) @ x)


def loss_of_features(features: Tensor, y: Tensor) -> Tensor:
    return torch.exp(features * y).sum()


def point(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(
        torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for n in (NX, NY, NY)
    )


def by_autograd(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [v.clone().requires_grad_() for v in inputs]
    value = function(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


def assert_same(got: Any, expected: Any, dtype: torch.dtype = torch.float64) -> None:
    for a, b in zip(got, expected, strict=True):
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        a, b = (torch.as_tensor(v, dtype=dtype) for v in (a, b))
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_equal(got: Any, expected: Any) -> None:
    """Bit for bit."""
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@both_dtypes
class TestOracles:
    def test_upper(self, dtype: torch.dtype) -> None:
        x, y, _ = point(dtype)
        got = BilevelProblem(f, g).upper(x, y)
        assert_same(got, by_autograd(f, x, y), dtype)
        assert isinstance(got.value, float)
        assert got.grad_x.dtype == got.grad_y.dtype == dtype

    def test_lower(self, dtype: torch.dtype) -> None:
        x, _, z = point(dtype)
        lower = BilevelProblem(f, g).at(x)
        value, _, grad = by_autograd(g, x, z)
        assert_same(lower.value_and_gradient(z), (value, grad), dtype)
        assert_same((lower.value(z), lower.gradient(z)), (value, grad), dtype)

    def test_gap(self, dtype: torch.dtype) -> None:
        x, y, z = point(dtype)
        got = BilevelProblem(f, g).at(x).gap(y, z)
        value_y, x_at_y, grad_y = by_autograd(g, x, y)
        value_z, x_at_z, _ = by_autograd(g, x, z)
        assert_same(got, (value_y, value_z, x_at_y - x_at_z, grad_y), dtype)

    def test_partial_oracles_agree_with_the_full_ones(self, dtype: torch.dtype) -> None:
        x, y, z = point(dtype)
        problem = BilevelProblem(f, g)
        upper, gap = problem.upper(x, y), problem.at(x).gap(y, z)
        assert_same([problem.upper_x(x, y)], [upper.grad_x], dtype)
        assert_same(
            problem.upper_y(x, y), (torch.tensor(upper.value, dtype=dtype), upper.grad_y), dtype
        )
        assert_same(
            problem.at(x).gap_x(y, z), (torch.tensor(gap.value_y, dtype=dtype), gap.grad_x), dtype
        )


def test_works_under_no_grad_and_on_parameters_without_touching_them() -> None:
    x, y, z = point()
    parameters = [v.clone().requires_grad_() for v in (x, y, z)]
    problem = BilevelProblem(f, g)
    with torch.no_grad():
        upper, gap = problem.upper(*parameters[:2]), problem.at(parameters[0]).gap(*parameters[1:])
    assert_same(upper, by_autograd(f, x, y))
    assert not any(v.requires_grad for v in (upper.grad_x, upper.grad_y, gap.grad_x, gap.grad_y))
    assert all(p.grad is None for p in parameters)
    assert all(torch.equal(p, v) for p, v in zip(parameters, (x, y, z), strict=True))


def test_values_are_summed_in_float64() -> None:
    # 1e8 + 1 - 1e8 is 0 in float32.
    terms = [lambda x, y, c=c: 0.0 * (x.sum() + y.sum()) + c for c in (1e8, 1.0, -1e8)]
    problem = BilevelProblem(terms, terms)
    x, y = torch.ones(1), torch.ones(1)
    assert problem.upper(x, y).value == 1.0
    assert problem.at(x).value(y) == 1.0
    assert problem.at(x).gap(y, y).value_y == 1.0


class TestChunks:
    def data(self) -> tuple[BilevelProblem, BilevelProblem]:
        rows = torch.randn(9, NY, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        weight = torch.randn(9, NX, generator=torch.Generator().manual_seed(8), dtype=torch.float64)

        def lower(index: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
            return lambda x, y: (
                torch.sigmoid(weight[index] @ x) * torch.sin(rows[index] @ y)
            ).sum()

        def upper(index: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
            return lambda x, y: (torch.cos(rows[index] @ y) * (weight[index] @ x)).sum()

        chunks, whole = [[0, 1, 2, 3], [4], [5, 6, 7, 8]], list(range(9))
        return (
            BilevelProblem([upper(c) for c in chunks], [lower(c) for c in chunks]),
            BilevelProblem(upper(whole), lower(whole)),
        )

    def test_equal_the_sum(self) -> None:
        x, y, z = point()
        chunked, whole = self.data()
        tensors = whole.upper(x, y)
        assert_same(chunked.upper(x, y), tensors)
        assert_same(
            chunked.at(x).gap(y, z),
            whole.at(x).gap(y, z),
        )
        assert_same([chunked.at(x).gradient(z)], [whole.at(x).gradient(z)])
        assert chunked.at(x).value(z) == pytest.approx(whole.at(x).value(z), rel=1e-13)

    def test_count_as_one_evaluation(self) -> None:
        x, y, z = point()
        chunked, _ = self.data()
        chunked.upper(x, y)
        chunked.at(x).gradient(z)
        chunked.at(x).gap(y, z)
        assert chunked.calls == Calls(upper=1, lower=1, gap=1)

    def test_a_chunk_without_x_adds_nothing_to_its_gradient(self) -> None:
        x, y, _ = point()
        problem = BilevelProblem([f, lambda x, y: (y**2).sum()], g)
        value, grad_x, grad_y = by_autograd(lambda x, y: f(x, y) + (y**2).sum(), x, y)
        assert_same(problem.upper(x, y), (value, grad_x, grad_y))


@dataclass
class Made:
    it: Tensor


class TestFeatures:
    @both_dtypes
    def test_equals_the_plain_function(self, dtype: torch.dtype) -> None:
        x, y, z = point(dtype)
        plain, split = BilevelProblem(f, g), BilevelProblem(f, loss_of_features, features=features)
        expected = plain.at(x).gap(y, z)
        assert_same(split.at(x).gap(y, z), expected, dtype)
        assert_same([split.at(x).gradient(z)], [plain.at(x).gradient(z)], dtype)
        assert split.at(x).value(z) == pytest.approx(plain.at(x).value(z), rel=1e-6)
        lower = split.at(x)
        lower.gap(z, y)
        # A second gap, for which the features' graph is made again.
        assert_same(lower.gap(y, z), expected, dtype)

    def test_is_evaluated_once_per_x_for_the_inner_loop_and_the_gap(self) -> None:
        x, y, z = point()
        seen = []
        problem = BilevelProblem(
            f, loss_of_features, features=lambda x: seen.append(x) or features(x)
        )
        lower = problem.at(x)
        for _ in range(5):
            lower.gradient(z)
        lower.value(z)
        lower.gap(y, z)
        assert len(seen) == 1
        lower.gradient(y)
        assert len(seen) == 1
        problem.at(x + 1.0).gradient(z)
        assert len(seen) == 2

    def test_may_return_a_structure(self) -> None:
        x, y, z = point()

        def structured(x: Tensor) -> dict[str, Any]:
            return {"features": Made(features(x)), "more": (x.sum(), "a word")}

        def lower(parts: dict[str, Any], y: Tensor) -> Tensor:
            return loss_of_features(parts["features"].it, y) * parts["more"][0]

        split = BilevelProblem(f, lower, features=structured)
        plain = BilevelProblem(f, lambda x, y: g(x, y) * x.sum())
        assert_same(
            split.at(x).gap(y, z),
            plain.at(x).gap(y, z),
        )
        assert_same([split.at(x).gradient(z)], [plain.at(x).gradient(z)])

    def test_one_per_chunk(self) -> None:
        x, y, z = point()
        count = [0, 0]

        def part(index: int) -> Callable[[Tensor], Tensor]:
            def evaluate(x: Tensor) -> Tensor:
                count[index] += 1
                return features((index + 1) * x)

            return evaluate

        chunked = BilevelProblem(
            f, [loss_of_features, loss_of_features], features=[part(0), part(1)]
        )
        plain = BilevelProblem(f, lambda x, y: g(x, y) + g(2 * x, y))
        lower = chunked.at(x)
        assert_same(
            [lower.gradient(z), lower.gradient(y)],
            [plain.at(x).gradient(z), plain.at(x).gradient(y)],
        )
        assert count == [1, 1]
        assert_same(
            lower.gap(y, z),
            plain.at(x).gap(y, z),
        )
        assert count == [2, 2]


def outputs(y: Tensor) -> Tensor:
    return torch.exp(W.T.to(y) @ y)


def loss_of_outputs(x: Tensor, outputs: Tensor) -> Tensor:
    return (torch.tanh(x) * outputs).sum()


def weighted(x: Tensor, y: Tensor) -> Tensor:
    return loss_of_outputs(x, outputs(y))


def counted(part: Callable[[Tensor], Any]) -> tuple[Callable[[Tensor], Any], list[Tensor]]:
    """A part of g, and the points at which it was computed."""
    seen: list[Tensor] = []

    def evaluate(v: Tensor) -> Any:
        seen.append(v)
        return part(v)

    return evaluate, seen


class TestOutputs:
    @both_dtypes
    def test_equals_the_plain_function_bit_for_bit(self, dtype: torch.dtype) -> None:
        """At points that are met once, and at handles, which the second x finds known."""
        x, y, z = point(dtype)
        plain = BilevelProblem(f, weighted)
        split = BilevelProblem(f, loss_of_outputs, outputs=outputs)
        for at_y, at_z in ((y, z), (LowerPoint(y), LowerPoint(z))):
            for point_x in (x, x + 1.0):
                lower, expected = split.at(point_x), plain.at(point_x)
                assert_equal(lower.gap(at_y, at_z), expected.gap(y, z))
                assert_equal(lower.gap(at_z, at_y), expected.gap(z, y))
                assert_equal(lower.gap(at_y, at_y), expected.gap(y, y))
                assert_equal(lower.value_and_gradient(at_z), expected.value_and_gradient(z))
                assert_equal(lower.gap_x(at_y, at_z), expected.gap_x(y, z))
                assert lower.value(at_z) == expected.value(z)

    def test_are_computed_once_per_handle_for_any_x(self) -> None:
        x, y, z = point()
        part, seen = counted(outputs)
        problem = BilevelProblem(f, loss_of_outputs, outputs=part)
        at_y, at_z = LowerPoint(y), LowerPoint(z)
        problem.at(x).gap(at_y, at_z)
        problem.at(x + 1.0).gradient(at_z)
        problem.at(x + 2.0).gap_x(at_z, at_y)
        problem.at(x).value(at_y)
        problem.at(x).curvature(at_y, z)
        assert len(seen) == 2
        at_y.release()
        problem.at(x).gap(at_y, at_z)
        assert len(seen) == 3
        # A tensor is met once: nothing is kept of it.
        problem.at(x).gradient(y)
        problem.at(x).gradient(y)
        assert len(seen) == 5

    def test_of_several_chunks_are_not_kept(self) -> None:
        x, y, z = point()
        part, seen = counted(outputs)
        problem = BilevelProblem(f, [loss_of_outputs] * 2, outputs=[part, lambda y: outputs(2 * y)])
        plain = BilevelProblem(f, lambda x, y: weighted(x, y) + weighted(x, 2 * y))
        at_y, at_z = LowerPoint(y), LowerPoint(z)
        for _ in range(2):
            assert_same(problem.at(x).gap(at_y, at_z), plain.at(x).gap(y, z))
        assert len(seen) == 4

    @pytest.mark.parametrize("share", [0.0, 0.25])
    def test_in_a_part_of_the_data(self, share: float) -> None:
        x, _, z = point()
        part = BilevelProblem(f, loss_of_outputs, outputs=outputs).on_this_rank(
            1.0, share, lambda tensor: tensor + 0.0
        )
        if share == 0.0:
            assert part.at(x).value(LowerPoint(z)) == 0.0
        else:
            got = part.at(x).gradient(LowerPoint(z))
            assert_same([got], [share * by_autograd(weighted, x, z)[2]])

    def test_may_return_a_structure(self) -> None:
        x, y, z = point()
        split = BilevelProblem(
            f, lambda x, out: loss_of_outputs(x, out["it"]), outputs=lambda y: {"it": outputs(y)}
        )
        got = split.at(x).gap(LowerPoint(y), LowerPoint(z))
        assert_same(got, BilevelProblem(f, weighted).at(x).gap(y, z))

    def test_do_not_hide_that_g_is_random(self) -> None:
        x, y, _ = point()
        problem = BilevelProblem(f, loss_of_outputs, outputs=lambda y: torch.rand(()) * outputs(y))
        with pytest.raises(
            BilevelError, match=r"The lower-level function g was .* and then .* at the same point"
        ):
            problem.check(x, y)


@pytest.mark.parametrize("handle", [lambda v: v, LowerPoint], ids=["tensor", "handle"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: BilevelProblem(f, weighted),
        lambda: BilevelProblem(f, loss_of_outputs, outputs=outputs),
    ],
    ids=["plain", "outputs"],
)
def test_a_gap_takes_a_gradient_that_is_known(
    build: Callable[[], BilevelProblem], handle: Callable[[Tensor], Any]
) -> None:
    x, y, z = point()
    lower = build().at(x)
    known = lower.gradient(handle(y))
    gap = lower.gap(handle(y), handle(z), grad_y=known)
    assert gap.grad_y is known
    assert_equal(gap, build().at(x).gap(y, z))


class TestHandles:
    """A handle holds what was computed at its x or y until it is released or dropped."""

    @pytest.fixture(autouse=True)
    def _at_once(self) -> Iterator[None]:
        """Without the garbage collector."""
        gc.disable()
        yield
        gc.enable()

    def test_of_x_holds_features_until_it_is_released(self) -> None:
        x, y, z = point()
        part = CountedPart(features)
        lower = BilevelProblem(f, loss_of_features, features=part).at(x)
        assert (part.calls, part.alive) == (0, 0)
        lower.gradient(z)
        assert (part.calls, part.alive) == (1, 1)
        first = lower.gap(y, z)  # uses up the graph
        assert (part.calls, part.alive) == (1, 0)
        lower.gradient(z)
        assert part.calls == 1
        lower.release()
        lower.gradient(z)
        assert (part.calls, part.alive) == (2, 1)
        lower.release()
        assert part.alive == 0
        assert_equal(lower.gap(y, z), first)

    def test_of_y_holds_outputs_until_it_is_released(self) -> None:
        x, y, z = point()
        part = CountedPart(outputs)
        problem = BilevelProblem(f, loss_of_outputs, outputs=part)
        at_y, at_z = LowerPoint(y), LowerPoint(z)
        first = problem.at(x).gap(at_y, at_z)
        assert part.alive == 2
        at_y.release()
        assert part.alive == 1
        assert_equal(problem.at(x).gap(at_y, at_z), first)
        del at_y, at_z
        assert part.alive == 0
        problem.at(x).gap(y, z)  # tensors: nothing is kept
        assert part.alive == 0

    def test_die_with_their_holder_and_not_with_their_problem(self) -> None:
        x, _, z = point()
        problem = BilevelProblem(f, loss_of_features, features=features)
        lower = problem.at(x)
        expected = lower.gradient(z)
        references = weakref.ref(problem), weakref.ref(lower)
        del problem
        assert references[0]() is None
        assert torch.equal(lower.gradient(z), expected)
        del lower
        assert references[1]() is None

    def test_two_at_one_x_know_nothing_of_each_other(self) -> None:
        """A handle shares the memory of x, and has the features of the x that it was asked at."""
        x, y, z = point()
        part, seen = counted(features)
        problem = BilevelProblem(f, loss_of_features, features=part)
        problem.at(x).gradient(z)
        x += 1.0
        got = problem.at(x).gap(y, z)
        assert len(seen) == 2
        assert_same(got, BilevelProblem(f, g).at(x).gap(y, z))

    def test_a_copy_of_the_problem_computes_its_own(self) -> None:
        x, y, z = point()
        problem = BilevelProblem(f, loss_of_features, features=features)
        expected = problem.at(x).gap(y, z)
        for other in (copy.copy(problem), copy.deepcopy(problem)):
            assert_equal(other.at(x).gap(y, z), expected)


class TestReduce:
    """Two ranks, as two threads that meet in `reduce` and leave with the sum."""

    def run(self, work: Callable[[int, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
        meeting, parts, results = threading.Barrier(2, timeout=5), [None, None], [None, None]

        def reduce(rank: int, tensor: Tensor) -> Tensor:
            parts[rank] = tensor
            meeting.wait()
            total = parts[0] + parts[1]
            meeting.wait()
            return total

        def target(rank: int) -> None:
            try:
                results[rank] = work(rank, lambda tensor: reduce(rank, tensor))
            except BaseException as error:
                results[rank] = error
                meeting.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def test_every_oracle_sums_over_the_ranks(self) -> None:
        x, y, z = point()

        def work(rank: int, reduce: Any) -> Any:
            def lower(x: Tensor, y: Tensor) -> Tensor:
                return g((rank + 1) * x, y)

            def upper(x: Tensor, y: Tensor) -> Tensor:
                return f(x, (rank + 1) * y)

            problem = BilevelProblem(upper, lower, reduce=reduce)
            level = problem.at(x)
            return (
                *problem.upper(x, y),
                problem.upper_x(x, y),
                *problem.upper_y(x, y),
                level.value(z),
                level.gradient(z),
                *level.gap(y, z),
                *level.gap_x(y, z),
            )

        first, second = self.run(work)
        whole = BilevelProblem([f, lambda x, y: f(x, 2 * y)], [g, lambda x, y: g(2 * x, y)])
        level = whole.at(x)
        expected = (
            *whole.upper(x, y),
            whole.upper_x(x, y),
            *whole.upper_y(x, y),
            level.value(z),
            level.gradient(z),
            *level.gap(y, z),
            *level.gap_x(y, z),
        )
        for got in (first, second):
            assert_same(got, expected)

    def test_a_rank_without_x_still_takes_part(self) -> None:
        # Otherwise the ranks call `reduce` a different number of times, and wait for each other for
        # ever.
        x, y, _ = point()

        def work(rank: int, reduce: Any) -> Any:
            return BilevelProblem(f if rank else lambda x, y: (y**2).sum(), g, reduce=reduce).upper(
                x, y
            )

        expected = by_autograd(lambda x, y: f(x, y) + (y**2).sum(), x, y)
        for got in self.run(work):
            assert_same(got, expected)

    def test_a_function_without_y_is_refused_here_too(self) -> None:
        x, y, z = point()
        problem = BilevelProblem(
            lambda x, y: (x**2).sum(), lambda x, y: (x**2).sum(), reduce=lambda tensor: 2 * tensor
        )
        with pytest.raises(
            ValueError,
            match="upper-level function f does not depend on the lower-level variables y",
        ):
            problem.upper(x, y)
        with pytest.raises(
            ValueError,
            match="lower-level function g does not depend on the lower-level variables y",
        ):
            problem.at(x).gradient(z)

    def test_a_function_without_x_takes_no_pass_here_either(self) -> None:
        x, y, _ = point()
        problem = BilevelProblem(lambda x, y: (y**2).sum(), g, reduce=lambda tensor: 2 * tensor)
        for _ in range(3):
            assert torch.equal(problem.upper_x(x, y), torch.zeros_like(x))
        assert problem.calls.upper == 1

    def test_a_non_finite_value_on_one_rank_is_an_error_on_both(self) -> None:
        x, y, _ = point()

        def work(rank: int, reduce: Any) -> Any:
            upper = f if rank else lambda x, y: f(x, y) * float("nan")
            with pytest.raises(NonFiniteError):
                BilevelProblem(upper, g, reduce=reduce).upper(x, y)
            return "refused"

        assert self.run(work) == ["refused", "refused"]


class TestCalls:
    def test_are_counted(self) -> None:
        x, y, z = point()
        problem = BilevelProblem(f, g)
        assert problem.calls == Calls(0, 0, 0)
        lower = problem.at(x)
        lower.value(z)
        assert problem.calls == Calls(values=1)
        problem.upper(x, y)
        problem.upper_x(x, y)
        problem.upper_y(x, y)
        assert problem.calls == Calls(upper=3, values=1)
        lower.gradient(z)
        lower.value_and_gradient(z)
        assert problem.calls == Calls(upper=3, lower=2, values=1)
        lower.gap(y, z)
        lower.gap_x(y, z)
        assert problem.calls == Calls(upper=3, lower=2, gap=2, values=1)
        assert [Calls(values=count).passes for count in range(7)] == [0, 0, 0, 1, 1, 1, 2]

    def test_are_not_counted_where_they_are_no_part_of_a_run(self) -> None:
        x, y, z = point()
        problem = BilevelProblem(f, g)
        problem.upper(x, y)
        with contextlib.suppress(KeyError), problem.uncounted():
            problem.upper(x, y)
            problem.at(x).gap(y, z)
            raise KeyError
        assert problem.calls == Calls(upper=1)

    def test_of_a_copy_are_its_own(self) -> None:
        x, y, _ = point()
        problem = BilevelProblem(f, g)
        problem.upper(x, y)
        other = copy.copy(problem)
        other.upper(x, y)
        assert (problem.calls.upper, other.calls.upper) == (1, 2)

    def test_add_and_subtract(self) -> None:
        assert Calls(1, 2, 3) + Calls(10, 20, 30) == Calls(11, 22, 33)
        assert Calls(11, 22, 33) - Calls(1, 2, 3) == Calls(10, 20, 30)
        assert Calls(1, 10, 100).passes == 211

    def test_an_upper_level_without_x_takes_no_pass_after_the_first(self) -> None:
        x, y, _ = point()
        evaluated = []
        problem = BilevelProblem(lambda x, y: evaluated.append(1) or (y**2).sum(), g)
        for _ in range(3):
            assert torch.equal(problem.upper_x(x, y), torch.zeros(NX, dtype=torch.float64))
        assert (len(evaluated), problem.calls.upper) == (1, 1)
        upper = problem.upper(x, y)
        assert torch.equal(upper.grad_x, torch.zeros_like(x))
        assert_same([upper.grad_y], [2 * y])

    def test_an_upper_level_with_x_takes_a_pass_every_time(self) -> None:
        x, y, _ = point()
        problem = BilevelProblem(f, g)
        for _ in range(3):
            problem.upper_x(x, y)
        assert problem.calls.upper == 3

    def test_a_lower_level_without_x_has_a_zero_gradient_in_it(self) -> None:
        x, y, z = point()
        gap = BilevelProblem(f, lambda x, y: (y**2).sum()).at(x).gap(y, z)
        assert torch.equal(gap.grad_x, torch.zeros_like(x))
        assert torch.equal(
            BilevelProblem(f, lambda x, y: (y**2).sum()).at(x).gap_x(y, z)[1], torch.zeros_like(x)
        )


class TestCheck:
    def test_is_not_counted(self) -> None:
        problem = BilevelProblem(f, g)
        problem.check(*point()[:2])
        assert problem.calls == Calls()

    @both_dtypes
    @pytest.mark.parametrize("name", ["f", "g"])
    def test_catches_a_random_objective(self, name: str, dtype: torch.dtype) -> None:
        def noisy(x: Tensor, y: Tensor) -> Tensor:
            return f(x, y) + 0.01 * torch.rand((), dtype=x.dtype)

        problem = BilevelProblem(noisy, g) if name == "f" else BilevelProblem(f, noisy)
        level = {"f": "The upper-level function f", "g": "The lower-level function g"}[name]
        with pytest.raises(
            BilevelError,
            match=rf"^{level} was \S+ and then \S+ at the same point: .*deterministic objective",
        ):
            problem.check(*point(dtype)[:2])

    def test_catches_a_drift(self) -> None:
        count = iter(range(100))
        drifting = BilevelProblem(lambda x, y: f(x, y) * (1.0 + 1e-4 * next(count)), g)
        with pytest.raises(
            BilevelError, match=r"^The upper-level function f was .* deterministic objective"
        ):
            drifting.check(*point(torch.float32)[:2])

    @pytest.mark.parametrize(("change", "seen"), [(25, False), (35, True)])
    @both_dtypes
    def test_sees_a_change_of_more_than_30_roundings(
        self, dtype: torch.dtype, change: int, seen: bool
    ) -> None:
        problem, (x, y, _) = BilevelProblem(f, g), point(dtype)
        value = problem.upper(x, y).value
        context = (
            pytest.raises(BilevelError, match="deterministic") if seen else contextlib.nullcontext()
        )
        with context:
            problem.check_unchanged(
                x, y, value * (1.0 + change * torch.finfo(dtype).eps), problem.at(x).value(y)
            )

    def test_returns_the_gradients_at_the_start(self) -> None:
        """f = 2 x + 3 y, g = (y - x)^2 / 2, x = 1, y = 3: an upper bound of 3 does not hold y.

        g pulls y down.
        """
        x, y = torch.tensor([1.0]), torch.tensor([3.0])
        for box, expected in ((Box(-3, 3), 2.0), (Box(3, 5), 0.0), (None, 2.0)):
            problem = BilevelProblem(
                lambda x, y: 2 * x.sum() + 3 * y.sum(),
                lambda x, y: ((y - x) ** 2).sum() / 2,
                lower_set=box,
            )
            found = problem.check(x, y)
            assert found == Start(pytest.approx(13**0.5), expected)  # type: ignore[arg-type]

    def test_allows_the_last_digits_to_differ(self) -> None:
        count = iter(range(100))

        def rounded(x: Tensor, y: Tensor) -> Tensor:
            return f(x, y) * (1.0 + 1e-15 * next(count))

        BilevelProblem(rounded, g).check(*point()[:2])

    def test_finds_a_lower_level_without_y(self) -> None:
        with pytest.raises(
            ValueError,
            match="lower-level function g does not depend on the lower-level variables y",
        ):
            BilevelProblem(f, lambda x, y: (x**2).sum()).check(*point()[:2])


class TestErrors:
    X, Y = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0])

    @pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
    def test_non_finite_value(self, bad: str) -> None:
        def wrong(x: Tensor, y: Tensor) -> Tensor:
            return (x.sum() + y.sum()) * 0.0 + float(bad)

        problem = BilevelProblem(wrong, wrong)
        message = f"returned a value {bad} at a point with norms 5, 1."
        with pytest.raises(
            NonFiniteError, match=f"^The upper-level function f {re.escape(message)}$"
        ):
            problem.upper(self.X, self.Y)
        with pytest.raises(
            NonFiniteError, match=f"^The lower-level function g {re.escape(message)}$"
        ):
            problem.at(self.X).value(self.Y)
        with pytest.raises(
            NonFiniteError,
            match=f"^The lower-level function g returned a value {bad} at a point with norm 1",
        ):
            problem.at(self.X).gradient(self.Y)

    def test_non_finite_gradient(self) -> None:
        def root(x: Tensor, y: Tensor) -> Tensor:
            return torch.sqrt(y).sum() + x.sum()  # its slope at 0 is infinite

        problem = BilevelProblem(root, root)
        message = "returned a gradient with NaN or infinite entries at a point with norm"
        with pytest.raises(NonFiniteError, match=f"^The upper-level function f {message}s 5, 1"):
            problem.upper(self.X, self.Y)
        with pytest.raises(NonFiniteError, match=f"^The upper-level function f {message} 1"):
            problem.upper_y(self.X, self.Y)
        with pytest.raises(NonFiniteError, match=f"^The lower-level function g {message} 1"):
            problem.at(self.X).gradient(self.Y)
        with pytest.raises(NonFiniteError, match=f"^The lower-level function g {message}s 5, 1"):
            problem.at(self.X).gap(self.Y, self.Y + 1.0)

    def test_infinite_gradients_that_cancel_are_found(self) -> None:
        def roots(x: Tensor, y: Tensor) -> Tensor:
            return torch.sqrt(y[0]) - torch.sqrt(y[1]) + x.sum()

        with pytest.raises(NonFiniteError, match="gradient"):
            BilevelProblem(roots, g).upper(self.X, torch.zeros(2))

    def test_large_finite_float32_gradients_pass(self) -> None:
        # Their sum overflows in float32.
        large = BilevelProblem(lambda x, y: 3e38 * (y[0] + y[1]), g)
        assert torch.equal(large.upper(self.X, torch.zeros(2)).grad_y, torch.tensor([3e38, 3e38]))

    @pytest.mark.parametrize(
        ("value", "got"),
        [
            (lambda x, y: y * 1.0, "a tensor of shape (2,)"),
            (lambda x, y: y.sum().reshape(1), "a tensor of shape (1,)"),
            (lambda x, y: 3.0, "a float"),
            (lambda x, y: None, "a NoneType"),
            (lambda x, y: (y.sum(),), "a tuple"),
        ],
    )
    def test_not_a_scalar_tensor(self, value: Any, got: str) -> None:
        problem = BilevelProblem(value, value)
        rule = "it must return a scalar tensor, such as a mean or a sum."
        with pytest.raises(
            TypeError, match=re.escape(f"The upper-level function f returned {got}: {rule}")
        ):
            problem.upper(self.X, self.Y)
        with pytest.raises(
            TypeError, match=re.escape(f"The lower-level function g returned {got}: {rule}")
        ):
            problem.at(self.X).gradient(self.Y)
        with pytest.raises(
            TypeError, match=re.escape(f"The lower-level function g returned {got}: {rule}")
        ):
            problem.at(self.X).value(self.Y)

    @pytest.mark.parametrize(
        "wrong",
        [lambda x, y: (x**2).sum(), lambda x, y: (y.detach() ** 2).sum()],
        ids=["x only", "detached"],
    )
    def test_independent_of_y(self, wrong: Any) -> None:
        problem = BilevelProblem(wrong, wrong)
        rule = (
            "does not depend on the lower-level variables y: a bilevel problem needs both "
            "functions to. Look for a `detach"
        )
        for call in (problem.upper, problem.upper_y):
            with pytest.raises(ValueError, match=f"^The upper-level function f {rule}"):
                call(self.X, self.Y)
        with pytest.raises(ValueError, match=f"^The lower-level function g {rule}"):
            problem.at(self.X).gradient(self.Y)
        with pytest.raises(ValueError, match=f"^The lower-level function g {rule}"):
            problem.at(self.X).gap(self.Y, self.Y + 1.0)

    def test_features_and_outputs_exclude_each_other(self) -> None:
        with pytest.raises(
            ValueError, match="was given features and outputs: g may have one or the other"
        ):
            BilevelProblem(f, loss_of_outputs, features=features, outputs=outputs)


def test_sets_default_to_the_whole_space() -> None:
    problem = BilevelProblem(f, g)
    assert isinstance(problem.upper_set, Free)
    assert isinstance(problem.lower_set, Free)
