"""Products of the second derivatives of g with a vector, by both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_bilevel.core.curvature import difference_curvature, difference_products
from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.lower import LowerLevel, LowerPoint
from lightning_bilevel.core.problem import BilevelProblem, Calls

NX, NY = 3, 4
GENERATOR = torch.Generator().manual_seed(3)
W = torch.randn(NY, NX, generator=GENERATOR, dtype=torch.float64)
X, Y, V = (torch.randn(n, generator=GENERATOR, dtype=torch.float64) for n in (NX, NY, NY))
both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)


def f(x: Tensor, y: Tensor) -> Tensor:
    return (y**2).sum()


def features(x: Tensor) -> Tensor:
    return torch.tanh(W.to(x) @ x)


def of_features(features: Tensor, y: Tensor) -> Tensor:
    return torch.exp(features * y).sum() + torch.cos(y[:-1] * y[1:]).sum()


def outputs(y: Tensor) -> Tensor:
    return torch.sin(y) + y**2


def of_outputs(x: Tensor, outputs: Tensor) -> Tensor:
    return torch.exp(features(x) * outputs).sum()


def g(x: Tensor, y: Tensor) -> Tensor:
    return of_features(features(x), y)


def through(x: Tensor, y: Tensor) -> Tensor:
    return of_outputs(x, outputs(y))


def expected(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor = X, y: Tensor = Y, v: Tensor = V
) -> tuple[Tensor, Tensor]:
    """Both products from whole matrices of second derivatives."""
    hessian = torch.autograd.functional.hessian(function, (x, y))
    return hessian[1][1] @ v, hessian[0][1] @ v


def curvature_of(lower: LowerLevel) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, v: lower.curvature(LowerPoint(y), v)


def at(function: Any = g, **more: Any) -> LowerLevel:
    return BilevelProblem(f, function, **more).at(X)


BUILDS: dict[str, tuple[Callable[[], LowerLevel], Callable[[Tensor, Tensor], Tensor]]] = {
    "plain": (lambda: at(g), g),
    "chunks": (lambda: at([lambda x, y: 0.3 * g(x, y), lambda x, y: 0.7 * g(x, y)]), g),
    "features": (lambda: at(of_features, features=features), g),
    "features of chunks": (
        lambda: at([lambda a, y: of_features(a, y) / 2] * 2, features=[features, features]),
        g,
    ),
    "outputs": (lambda: at(of_outputs, outputs=outputs), through),
    "outputs of chunks": (
        lambda: at([lambda x, o: of_outputs(x, o) / 2] * 2, outputs=[outputs, outputs]),
        through,
    ),
}
every_build = pytest.mark.parametrize("name", list(BUILDS))


@every_build
def test_double_differentiation_equals_the_whole_matrices(name: str) -> None:
    build, function = BUILDS[name]
    lower = build()
    yy, xy = expected(function)
    y = Y.clone().requires_grad_()
    value = function(X, y)
    (slope,) = torch.autograd.grad(value, y)
    # A second call, and calls of the others between: none uses up what another needs.
    for _ in range(2):
        got = lower.products(Y, V)
        assert got.value == pytest.approx(value.item(), rel=1e-14)
        torch.testing.assert_close(got.grad_y, slope, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.yy, yy, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.xy, xy, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lower.curvature(LowerPoint(Y), V), yy, rtol=1e-12, atol=1e-12)
        lower.gap(Y, V)
        torch.testing.assert_close(lower.gradient(Y), slope, rtol=1e-12, atol=1e-12)


@every_build
def test_a_difference_comes_close_to_them(name: str) -> None:
    build, function = BUILDS[name]
    yy, xy = expected(function)
    got_yy, got_xy = difference_products(build(), Y, V)
    torch.testing.assert_close(got_yy, yy, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(got_xy, xy, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(difference_curvature(build(), Y, V), yy, rtol=1e-7, atol=1e-7)


def test_the_error_of_a_difference_is_of_second_order() -> None:
    """A tenth of the step leaves a hundredth of the error."""
    exact = expected(g)

    def errors(step: float) -> list[float]:
        got = difference_products(at(), Y, V, step)
        alone = difference_curvature(at(), Y, V, step)
        return [
            float((a - b).norm()) for a, b in zip((*got, alone), (*exact, exact[0]), strict=True)
        ]

    for coarse, fine in zip(errors(1e-2), errors(1e-3), strict=True):
        assert coarse / fine == pytest.approx(100, rel=0.02)


def test_of_a_quadratic_it_is_exact_for_any_step() -> None:
    def quadratic(x: Tensor, y: Tensor) -> Tensor:
        return (y**2).sum() * 1.5 + y @ (W @ x)

    yy, xy = difference_products(at(quadratic), Y, V, 0.7)
    torch.testing.assert_close(yy, 3.0 * V, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(xy, W.T @ V, rtol=1e-12, atol=1e-12)


@both_dtypes
def test_the_usual_step_has_the_accuracy_of_the_dtype(dtype: torch.dtype) -> None:
    """About eps^(2/3), and for a tiny or a huge v as well."""
    exact = expected(g)
    tolerance = 1e3 * torch.finfo(dtype).eps ** (2 / 3)
    for size in (1.0, 1e-12, 1e12):
        lower = BilevelProblem(f, g).at(X.to(dtype))
        got = difference_products(lower, Y.to(dtype), size * V.to(dtype))
        for a, b in zip(got, exact, strict=True):
            assert a.dtype == dtype
            assert float((a / size - b).norm() / b.norm()) < tolerance


def test_of_no_vector_they_are_zero() -> None:
    zero = torch.zeros(NY, dtype=torch.float64)
    for got in (at().products(Y, zero)[2:], difference_products(at(), Y, zero)):
        assert [float(v.norm()) for v in got] == [0.0, 0.0]
    assert float(difference_curvature(at(), Y, zero).norm()) == 0.0


def test_of_a_linear_function_they_are_zero() -> None:
    lower = at(lambda x, y: y.sum() + x.sum())
    assert float(lower.products(Y, V).yy.norm()) == 0.0
    assert float(lower.products(Y, V).xy.norm()) == 0.0
    assert float(lower.curvature(LowerPoint(Y), V).norm()) == 0.0
    # Chunks of which one alone is curved.
    mixed = at([lambda x, y: y.sum(), lambda x, y: (y**2).sum()])
    torch.testing.assert_close(mixed.curvature(LowerPoint(Y), V), 2 * V)


def test_each_is_two_passes_and_says_of_what() -> None:
    problem = BilevelProblem(f, g)
    lower = problem.at(X)
    for call, calls in (
        (lambda: lower.products(Y, V), Calls(products=1)),
        (lambda: lower.curvature(LowerPoint(Y), V), Calls(products=1)),
        (lambda: difference_products(lower, Y, V), Calls(gap=1)),
        (lambda: difference_curvature(lower, Y, V), Calls(lower=2)),
    ):
        before = problem.calls
        call()
        assert problem.calls - before == calls
        assert (problem.calls - before).passes == 2
    assert Calls(products=2) + Calls(1, 2, 3, 4) == Calls(1, 2, 3, 6)


def test_features_are_computed_once_per_x_and_outputs_once_per_y() -> None:
    counted = {"features": 0, "outputs": 0}

    def counting(name: str, part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def wrapped(v: Tensor) -> Tensor:
            counted[name] += 1
            return part(v)

        return wrapped

    lower = at(of_features, features=counting("features", features))
    for number in range(3):
        lower.products(Y + number, V)
        lower.curvature(LowerPoint(Y + number), V)
    assert counted["features"] == 1
    lower = at(of_outputs, outputs=counting("outputs", outputs))
    point = LowerPoint(Y)
    lower.gradient(point)
    for _ in range(3):
        lower.curvature(point, V)
    assert counted["outputs"] == 1
    lower.products(Y, V)  # at a point that is met once
    assert counted["outputs"] == 2


def test_they_are_summed_over_processes() -> None:
    """With a process of the same part: everything is doubled, once."""
    lower = at(g, reduce=lambda tensor: 2 * tensor)
    yy, xy = expected(g)
    got = lower.products(Y, V)
    torch.testing.assert_close(got.yy, 2 * yy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.xy, 2 * xy, rtol=1e-12, atol=1e-12)
    assert got.value == pytest.approx(2 * g(X, Y).item())
    torch.testing.assert_close(lower.curvature(LowerPoint(Y), V), 2 * yy, rtol=1e-12, atol=1e-12)
    assert float((difference_products(lower, Y, V)[1] - 2 * xy).norm()) < 1e-7


def test_a_process_without_data_takes_part() -> None:
    reduced: list[int] = []

    def reduce(tensor: Tensor) -> Tensor:
        reduced.append(tensor.numel())
        # The other process has 1 in every number, the flags included.
        return tensor + 1.0

    problem = BilevelProblem(f, g).on_this_rank(0.0, 0.0, reduce)
    got = problem.at(X).products(Y, V)
    assert reduced == [1 + 3 + NY + NY + NX]
    assert torch.equal(got.yy, torch.ones(NY, dtype=torch.float64))
    assert torch.equal(got.xy, torch.ones(NX, dtype=torch.float64))


def test_second_derivatives_that_are_not_finite_are_an_error() -> None:
    """Those of |y|^1.5 at 0, where value and gradient are finite."""
    y = torch.zeros(NY, dtype=torch.float64)
    lower = at(lambda x, y: (y.abs() ** 1.5).sum() + x.sum())
    lower.gradient(y)
    for call in (lower.products, curvature_of(lower)):
        with pytest.raises(NonFiniteError, match="lower-level function g returned a gradient with"):
            call(y, V)


class Cube(torch.autograd.Function):
    """y^3, whose gradient cannot be differentiated."""

    @staticmethod
    def forward(context: Any, y: Tensor) -> Tensor:
        context.save_for_backward(y)
        return y**3

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> Tensor:
        (y,) = context.saved_tensors
        return 3 * y**2 * grad


def test_a_model_without_second_derivatives_is_sent_to_differences() -> None:
    lower = at(lambda x, y: (Cube.apply(y) ** 2).sum() + (y**2).sum() + y @ (W @ x))
    for call in (lower.products, curvature_of(lower)):
        with pytest.raises(BilevelError, match="g has no second derivatives here") as caught:
            call(Y, V)
        assert "a function in it is marked once_differentiable" in str(caught.value)
        assert 'products="difference"' in str(caught.value)
    yy, xy = difference_products(lower, Y, V)
    torch.testing.assert_close(yy, (30 * Y**4 + 2) * V, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(xy, W.T @ V, rtol=1e-7, atol=1e-7)


def test_so_is_an_operation_of_torch_without_them() -> None:
    def ctc(x: Tensor, y: Tensor) -> Tensor:
        scores = torch.outer(y, W[0, :2]).reshape(NY, 1, 2).log_softmax(2)
        lengths = torch.tensor([NY]), torch.tensor([1])
        return torch.nn.functional.ctc_loss(scores, torch.tensor([[1]]), *lengths) + x.sum()

    with pytest.raises(BilevelError, match=r"derivatives here \(derivative for aten::_ctc_loss_b"):
        at(ctc).curvature(LowerPoint(Y), V)


def test_any_other_error_of_the_second_derivative_stays_what_it_is() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, y: Tensor) -> Tensor:
            context.save_for_backward(y)
            return y**2

        @staticmethod
        def backward(context: Any, grad: Tensor) -> Tensor:
            (y,) = context.saved_tensors
            return Twice.apply(y) * grad

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, y: Tensor) -> Tensor:
            return 2 * y

        @staticmethod
        def backward(context: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("out of paper")

    with pytest.raises(RuntimeError, match=r"^out of paper$"):
        at(lambda x, y: Broken.apply(y).sum()).curvature(LowerPoint(Y), V)


def test_a_lower_level_without_y_is_refused() -> None:
    lower = at(lambda x, y: (x**2).sum())
    for call in (lower.products, curvature_of(lower)):
        with pytest.raises(ValueError, match="g does not depend on the lower-level variables y"):
            call(Y, V)


def test_all_gradients_of_a_gap_are_there_even_at_one_point() -> None:
    lower = at()
    z = Y + 0.5
    full = lower.full_gap(Y, z)
    gap = lower.gap(Y, z)
    torch.testing.assert_close(full.grad_x, gap.grad_x)
    torch.testing.assert_close(full.grad_y, gap.grad_y)
    torch.testing.assert_close(full.grad_z, lower.gradient(z))
    assert (full.value_y, full.value_z) == pytest.approx((gap.value_y, gap.value_z))
    same = lower.full_gap(Y, Y)
    torch.testing.assert_close(same.grad_y, same.grad_z)
    assert float(same.grad_x.norm()) == 0.0
