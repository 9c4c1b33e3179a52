"""The linear solvers of a hypergradient, against direct ones."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from lightning_bilevel.solvers.aid import (
    AdjointState,
    AIDMethod,
    SOBAMethod,
    conjugate_gradients,
    fixed_point,
    nonpositive,
)

EPS = 1e-13
Q, _ = torch.linalg.qr(
    torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
)
RIGHT = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def matrix(*eigenvalues: float) -> Tensor:
    return Q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ Q.T


DEFINITE = matrix(0.1, 0.5, 1.0, 2.0, 3.0, 10.0)


class TestConjugateGradients:
    @pytest.mark.parametrize("warm", [False, True])
    def test_solve_in_as_many_steps_as_there_are_coordinates(self, warm: bool) -> None:
        start = torch.ones(6, dtype=torch.float64) if warm else None
        found = conjugate_gradients(lambda v: DEFINITE @ v, RIGHT, start, 8, 1e-14, EPS)
        torch.testing.assert_close(
            found.v, torch.linalg.solve(DEFINITE, RIGHT), rtol=1e-10, atol=1e-10
        )
        assert found.curvature is None

    def test_two_curvatures_take_two_steps(self) -> None:
        A = matrix(1.0, 1.0, 1.0, 4.0, 4.0, 4.0)
        counted: list[Tensor] = []

        def product(v: Tensor) -> Tensor:
            counted.append(v)
            return A @ v

        found = conjugate_gradients(product, RIGHT, None, 6, 1e-10, EPS)
        torch.testing.assert_close(found.v, torch.linalg.solve(A, RIGHT))
        assert len(counted) == 2

    def test_a_start_that_solves_takes_one_product(self) -> None:
        counted: list[Tensor] = []

        def product(v: Tensor) -> Tensor:
            counted.append(v)
            return DEFINITE @ v

        start = torch.linalg.solve(DEFINITE, RIGHT)
        found = conjugate_gradients(product, RIGHT, start, 6, 1e-10, EPS)
        assert torch.equal(found.v, start)
        assert len(counted) == 1

    def test_a_right_hand_side_of_zero_takes_none(self) -> None:
        found = conjugate_gradients(lambda v: 1 / 0, 0 * RIGHT, None, 6, 1e-10, EPS)  # type: ignore[arg-type,return-value]
        assert torch.equal(found.v, 0 * RIGHT)

    def test_the_residual_where_they_stop_is_the_tolerance(self) -> None:
        A = matrix(1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
        found = conjugate_gradients(lambda v: A @ v, RIGHT, None, 6, 1e-2, EPS)
        residual = float((RIGHT - A @ found.v).norm() / RIGHT.norm())
        assert 1e-6 < residual <= 1e-2

    @pytest.mark.parametrize("smallest", [-0.2, 0.0])
    def test_stop_where_the_matrix_is_not_positive_definite(self, smallest: float) -> None:
        """At a point where <v, A v>/2 - <b, v>, which they minimise, is below that of the start."""
        A = matrix(smallest, 0.5, 1.0, 2.0, 3.0, 10.0)
        found = conjugate_gradients(lambda v: A @ v, RIGHT, None, 20, 1e-14, EPS)
        assert found.curvature is not None
        assert found.curvature <= 1e-10
        assert float(found.v @ A @ found.v / 2 - RIGHT @ found.v) < 0.0

    def test_at_once_they_leave_the_start(self) -> None:
        start = torch.ones(6, dtype=torch.float64)
        found = conjugate_gradients(lambda v: -v, RIGHT, start, 5, 1e-10, EPS)
        assert torch.equal(found.v, start)
        assert found.curvature == pytest.approx(-1.0)


class TestFixedPoint:
    def test_from_the_scaled_right_hand_side_it_is_the_neumann_series(self) -> None:
        step, steps = 0.15, 7
        found = fixed_point(lambda v: DEFINITE @ v, RIGHT, step * RIGHT, steps, step, EPS)
        power = torch.eye(6, dtype=torch.float64)
        series = torch.zeros(6, dtype=torch.float64)
        for _ in range(steps + 1):
            series = series + step * power @ RIGHT
            power = power @ (torch.eye(6, dtype=torch.float64) - step * DEFINITE)
        torch.testing.assert_close(found.v, series, rtol=1e-12, atol=1e-12)
        assert found.curvature is None

    def test_comes_to_the_solution_and_stays(self) -> None:
        found = fixed_point(lambda v: DEFINITE @ v, RIGHT, 0 * RIGHT, 3000, 0.15, EPS)
        exact = torch.linalg.solve(DEFINITE, RIGHT)
        torch.testing.assert_close(found.v, exact, rtol=1e-10, atol=1e-10)

    def test_reports_the_smallest_curvature(self) -> None:
        A = matrix(-2.0, 0.5, 1.0, 2.0, 3.0, 10.0)
        found = fixed_point(lambda v: A @ v, RIGHT, 0 * RIGHT, 100, 0.15, EPS)
        assert found.curvature == pytest.approx(-2.0, abs=1e-6)


def test_the_sign_of_a_curvature_below_rounding_does_not_count() -> None:
    p = torch.ones(2, dtype=torch.float64)
    Ap = torch.tensor([1.0, -1.0 + 1e-14], dtype=torch.float64)
    assert nonpositive(p, Ap, EPS) is not None
    assert nonpositive(p, Ap, 1e-16) is None
    assert nonpositive(p, -p, EPS) == pytest.approx(-1.0)
    assert nonpositive(0 * p, 0 * p, EPS) is None


def adjoint(unit: float = 1.0, indefinite: bool = False) -> AdjointState:
    y = torch.zeros(1)
    return AdjointState(x=y, y=y, units=(1.0, unit), indefinite=indefinite)


def test_the_warning_comes_once() -> None:
    method = AIDMethod(damping=0.5)
    with pytest.warns(UserWarning, match="`AID` met the curvature -2 along a direction") as told:
        assert method.warned(adjoint(), -2.0, "It stops.")
    text = str(told[0].message)
    assert "with `damping=0.5`: g(x, .) is not strongly convex" in text
    assert "It stops. A `damping` above 2.5 makes it positive" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert method.warned(adjoint(indefinite=True), -2.0, "It stops.")
        assert not method.warned(adjoint(), None, "It stops.")
        assert method.warned(adjoint(indefinite=True), None, "It stops.")


def test_a_curvature_is_told_in_the_unit_of_y_like_the_damping() -> None:
    with pytest.warns(UserWarning, match=r"the curvature -8 .* A `damping` above 8\.5 makes it"):
        SOBAMethod(damping=0.5).warned(adjoint(unit=2.0), -2.0, "It may diverge.")
