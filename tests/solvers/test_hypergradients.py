"""AID, ITD, SOBA and DARTS: steps by hand, closed forms, faces, curvature, arguments, state."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from itertools import pairwise
from typing import Any

import closed_forms
import pytest
import torch
from closed_forms import CLOSED_FORMS, ClosedForm
from helpers import groups, point_of
from torch import Tensor

from lightning_bilevel import (
    AID,
    DARTS,
    ITD,
    SOBA,
    Ball,
    BilevelError,
    BilevelProblem,
    Box,
    Calls,
    ConvexSet,
    Product,
    Simplex,
)
from lightning_bilevel.solvers.record import AdjointInfo

every_form = pytest.mark.parametrize("form", CLOSED_FORMS, ids=str)
both_ways = pytest.mark.parametrize("way", ["autograd", "difference"])
X = torch.tensor([0.3, -0.7, 0.5], dtype=torch.float64)


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def direction(solver: Any, problem: BilevelProblem, x: Tensor, y: Tensor, steps: int = 1) -> Tensor:
    """The direction of x in the last of some iterations, at alpha = 1 and x put back after each."""
    optimizer = solver(groups(x, y), alpha=1.0)
    for _ in range(steps):
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].copy_(x)
        optimizer.step(problem=problem)
    return x - point_of(optimizer)[0]


# --- One step by hand ---
# f = (x - 2)^2/2 + (y - 1)^2, g = (y - x)^2, x0 = 0, y0 = 1: fx = -2, fy = 2 (y - 1), gy = 2 (y -
# x), g_yy = 2, g_xy = -2. With beta = 1/4 a step of y halves its distance from x.
BY_HAND: dict[str, tuple[Any, dict[str, Any], float, float, float | None]] = {
    # y = 1/2, fy = -1, v = fy/2 = -1/2: d = -2 + 2 v = -3
    "aid": (AID, {"alpha": 0.1, "beta": 0.25, "T": 1, "N": 1}, 0.3, 0.5, -0.5),
    # y = 1/4, fy = -3/2, v = -3/4
    "aid-two": (AID, {"alpha": 0.1, "beta": 0.25, "T": 2, "N": 1}, 0.35, 0.25, -0.75),
    # (2 + 2) v = -1
    "aid-damped": (
        AID,
        {"alpha": 0.1, "beta": 0.25, "T": 1, "N": 1, "damping": 2.0},
        0.25,
        0.5,
        -0.25,
    ),
    # v = 0 - 1/4 (0 + 1) = -1/4, then -1/4 - 1/4 (-1/2 + 1) = -3/8
    "aid-fixed": (
        AID,
        {"alpha": 0.1, "beta": 0.25, "T": 1, "N": 2, "linear_solver": "fixed_point"},
        0.275,
        0.5,
        -0.375,
    ),
    # v = 1/8 (-1) = -1/8, then -1/8 - 1/8 (-1/4 + 1) = -7/32
    "aid-neumann": (
        AID,
        {"alpha": 0.1, "beta": 0.25, "T": 1, "N": 1, "linear_solver": "neumann", "eta": 0.125},
        0.24375,
        0.5,
        None,
    ),
    # T1-T2: v = beta fy = -1/4
    "aid-none": (
        AID,
        {"alpha": 0.1, "beta": 0.25, "T": 1, "N": 0, "linear_solver": "neumann"},
        0.25,
        0.5,
        None,
    ),
    # y1 = 1/2, y2 = 1/4, p = -3/2: d = -2 + 1/2 p = -2.75; p = -3/2 (1 - 1/2) = -3/4; d = -3.125
    "itd": (ITD, {"alpha": 0.1, "beta": 0.25, "T": 2}, 0.3125, 0.25, None),
    "itd-truncated": (ITD, {"alpha": 0.1, "beta": 0.25, "T": 2, "K": 1}, 0.275, 0.25, None),
    # at the old point fy = 0, so v stays at 0
    "soba": (SOBA, {"alpha": 0.1, "beta": 0.25}, 0.2, 0.5, 0.0),
    # y' = 1 - 1/8 * 2 = 3/4, p = -1/2: d = -2 - 1/8 (-2)(-1/2) = -2.125; at x = 0.2125: gy = 1.575
    "darts": (DARTS, {"alpha": 0.1, "beta": 0.1, "xi": 0.125}, 0.2125, 0.8425, None),
    # d = fx = -2; at x = 0.2: gy = 1.6
    "darts-first": (DARTS, {"alpha": 0.1, "beta": 0.1, "xi": 0.0}, 0.2, 0.84, None),
}


def hand_problem() -> BilevelProblem:
    return BilevelProblem(
        lambda x, y: ((x - 2) ** 2).sum() / 2 + ((y - 1) ** 2).sum(),
        lambda x, y: ((y - x) ** 2).sum(),
    )


@pytest.mark.parametrize("name", list(BY_HAND))
def test_one_step_by_hand(name: str) -> None:
    kind, arguments, x, y, v = BY_HAND[name]
    optimizer = kind(groups(vector(0.0), vector(1.0)), **arguments)
    info = optimizer.step(problem=hand_problem())
    got_x, got_y = point_of(optimizer)
    assert (float(got_x), float(got_y)) == pytest.approx((x, y), abs=1e-12)
    assert (getattr(optimizer.run, "v", None) is not None) == (v is not None)
    if v is not None:
        assert float(optimizer.run.v) == pytest.approx(v, abs=1e-12)
    assert info.lr == 0.1


@pytest.mark.parametrize(
    ("name", "upper", "lower"),
    [
        # f at (0, 1/2), g at (0, 1)
        ("aid", 2.25, 1.0),
        # f at (0, 1/4), g at (0, 1/2)
        ("itd", 2.5625, 0.25),
        # both at (0, 1)
        ("soba", 2.0, 1.0),
        # f at (0, 3/4), g at (0.2125, 1)
        ("darts", 2.0625, 0.7875**2),
    ],
)
def test_the_record_is_of_the_points_that_are_stated(name: str, upper: float, lower: float) -> None:
    kind, arguments, *_ = BY_HAND[name]
    info = kind(groups(vector(0.0), vector(1.0)), **arguments).step(problem=hand_problem())
    assert (info.upper, info.lower) == pytest.approx((upper, lower))


def test_a_second_step_of_soba_by_hand() -> None:
    """At (0.2, 0.5, 0): fx = -1.8, fy = -1, gy = 0.6, so v = 0.25 (-1)."""
    optimizer = SOBA(groups(vector(0.0), vector(1.0)), alpha=0.1, beta=0.25)
    problem = hand_problem()
    optimizer.step(problem=problem)
    optimizer.step(problem=problem)
    assert [float(v) for v in point_of(optimizer)] == pytest.approx([0.38, 0.35])
    assert float(optimizer.run.v) == pytest.approx(-0.25)
    # At (0.38, 0.35, -0.25): d = -1.62 + 2 (-0.25), and v - 0.25 (2 v - fy), fy = -1.3.
    optimizer.step(problem=problem)
    assert float(point_of(optimizer)[0]) == pytest.approx(0.38 + 0.212)
    assert float(optimizer.run.v) == pytest.approx(-0.25 - 0.25 * (-0.5 + 1.3))


# --- Closed forms ---


@every_form
class TestClosedForms:
    def test_aid_by_conjugate_gradients_is_exact(self, form: ClosedForm) -> None:
        y = torch.zeros(closed_forms.NY, dtype=torch.float64)
        solver = partial(AID, beta=0.6, T=120, N=6)
        got = direction(solver, form.build(), X, y)
        exact = form.hypergradient(X)
        assert float((got - exact).norm()) < 1e-8 * float(exact.norm())

    @pytest.mark.parametrize("linear_solver", ["neumann", "fixed_point"])
    def test_the_other_linear_solvers_come_to_it(
        self, form: ClosedForm, linear_solver: Any
    ) -> None:
        """At the rate of their largest factor, (1 - eta/2)^N."""
        solver = partial(AID, beta=0.6, T=120, linear_solver=linear_solver)
        exact = form.hypergradient(X)

        def error(N: int) -> float:
            got = direction(partial(solver, N=N), form.build(), X, form.solution(X))
            return float((got - exact).norm())

        assert error(90) < 1e-8
        assert error(60) / error(50) == pytest.approx(0.7**10, rel=1e-2)

    def test_a_warm_start_adds_up_over_iterations(self, form: ClosedForm) -> None:
        """Of N = 1 steps each; a cold start stays where it is."""
        y = form.solution(X)
        exact = form.hypergradient(X)
        for linear_solver in ("fixed_point", "cg"):
            solver = partial(AID, beta=0.6, T=1, N=1, linear_solver=linear_solver)
            warm = direction(solver, form.build(), X, y, 100)
            assert float((warm - exact).norm()) < 1e-8
            cold = direction(partial(solver, warm_start=False), form.build(), X, y, 100)
            once = direction(solver, form.build(), X, y, 1)
            torch.testing.assert_close(cold, once, rtol=1e-9, atol=1e-9)
            assert float((cold - exact).norm()) > 1e-2

    def test_the_error_of_itd_falls_geometrically_in_K(self, form: ClosedForm) -> None:
        """By the slowest factor, 1 - beta mu = 1 - 0.6/2."""
        exact = form.hypergradient(X)
        y = form.solution(X)

        def error(K: int) -> float:
            got = direction(partial(ITD, beta=0.6, T=60, K=K), form.build(), X, y)
            return float((got - exact).norm())

        errors = [error(K) for K in (10, 20, 30, 40, 50)]
        for far, near in pairwise(errors):
            assert near / far == pytest.approx(0.7**10, rel=0.05)
        assert error(60) < 1e-7

    def test_itd_is_the_gradient_through_a_graph_of_all_steps(self, form: ClosedForm) -> None:
        """Within rounding, for few steps and a start that is no solution, in a box too."""
        y = torch.ones(closed_forms.NY, dtype=torch.float64)
        bounds = (-0.5, 0.9)
        for lower_set in (None, Box(*bounds)):
            start = y if lower_set is None else y.clamp(*bounds)
            x = X.clone().requires_grad_()
            z = start
            for _ in range(7):
                slope = closed_forms.H @ z - closed_forms.B @ x - closed_forms.C
                z = z - 0.3 * slope
                if lower_set is not None:
                    z = torch.clamp(z, *bounds)
            (expected,) = torch.autograd.grad(form.upper(x, z), x)
            got = direction(partial(ITD, beta=0.3, T=7), form.build(lower_set), X, start)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.integration
    @both_ways
    def test_soba_comes_to_the_same_fixed_point(self, form: ClosedForm, way: Any) -> None:
        """Where the closed form of the hypergradient is 0."""
        y = torch.zeros(closed_forms.NY, dtype=torch.float64)
        optimizer = SOBA(groups(X, y), alpha=0.02, beta=0.6, products=way)
        problem = form.build()
        for _ in range(1000):
            optimizer.step(problem=problem)
        got_x, got_y = point_of(optimizer)
        assert float(form.hypergradient(got_x).norm()) < 1e-7
        exact = form.solution(got_x)
        assert float((got_y - exact).norm()) < 1e-7
        assert float((optimizer.run.v - form.adjoint(got_x, exact)).norm()) < 1e-7

    @pytest.mark.integration
    @pytest.mark.parametrize(
        "solver",
        [
            partial(AID, beta=0.6, T=5, N=4),
            partial(AID, beta=0.6, T=5, N=4, linear_solver="fixed_point"),
            partial(AID, beta=0.6, T=5, N=25, linear_solver="neumann"),
            partial(ITD, beta=0.6, T=25),
        ],
        ids=["cg", "fixed_point", "neumann", "itd"],
    )
    def test_the_double_loops_come_to_it(self, form: ClosedForm, solver: Any) -> None:
        y = torch.zeros(closed_forms.NY, dtype=torch.float64)
        optimizer = solver(groups(X, y), alpha=0.07)
        problem = form.build()
        for _ in range(60):
            optimizer.step(problem=problem)
        first = float(form.hypergradient(X).norm())
        assert float(form.hypergradient(point_of(optimizer)[0]).norm()) < 3e-3 * first

    def test_differences_do_the_same_as_double_differentiation(self, form: ClosedForm) -> None:
        """g is quadratic, so that a difference is exact but for rounding."""
        y = torch.ones(closed_forms.NY, dtype=torch.float64)
        for solver in (
            partial(AID, beta=0.3, T=3, N=3),
            partial(AID, beta=0.3, T=3, N=3, linear_solver="neumann"),
            partial(ITD, beta=0.3, T=4, K=3),
            partial(SOBA, beta=0.3),
        ):
            one, other = (
                direction(partial(solver, products=way), form.build(), X, y, 3)
                for way in ("autograd", "difference")
            )
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)

    def test_darts_has_xi_in_place_of_the_inverse(self, form: ClosedForm) -> None:
        """So that it ends elsewhere, as the documentation says."""
        y = form.solution(X)
        got = direction(partial(DARTS, beta=0.3, xi=0.3), form.build(), X, y)
        # y solves the lower level, so that y' = y.
        fx, fy = form.gradients(X, y)
        torch.testing.assert_close(got, fx + 0.3 * closed_forms.B.T @ fy, rtol=1e-9, atol=1e-9)
        assert float((got - form.hypergradient(X)).norm()) > 0.1
        first = direction(partial(DARTS, beta=0.3, xi=0.0), form.build(), X, y)
        torch.testing.assert_close(first, fx)


# --- Sets ---


def constrained_solution(lower_set: ConvexSet, x: Tensor) -> Tensor:
    """y*(x) in a set, by many projected steps."""
    y = lower_set.project(torch.zeros(closed_forms.NY, dtype=torch.float64))
    for _ in range(100):
        y = lower_set.project(y - 0.6 * (closed_forms.H @ y - closed_forms.B @ x - closed_forms.C))
    return y


@every_form
@pytest.mark.parametrize(
    "lower_set",
    [
        Box(-0.3, 0.4),
        Box([-9.0, 0.2, -0.1, -9.0], [9.0, 9.0, 0.1, 9.0]),
        Ball(0.6),
        Simplex(),
        Product([Ball(0.3), Box(-0.2, 0.2)], [2, 2]),
    ],
    ids=repr,
)
def test_on_a_face_the_hypergradient_is_the_derivative_of_F(
    form: ClosedForm, lower_set: ConvexSet
) -> None:
    """Which is computed as central differences of f(x, y*(x)), with y* by other means."""

    def F(x: Tensor) -> float:
        return float(form.upper(x, constrained_solution(lower_set, x)))

    t = 1e-5
    expected = torch.stack(
        [
            torch.tensor((F(X + t * e) - F(X - t * e)) / (2 * t), dtype=torch.float64)
            for e in torch.eye(closed_forms.NX, dtype=torch.float64)
        ]
    )
    y = constrained_solution(lower_set, X)
    problem = form.build(lower_set)
    for solver in (
        partial(AID, beta=0.4, T=20, N=8),
        partial(AID, beta=0.4, T=20, N=100, linear_solver="neumann"),
        partial(ITD, beta=0.4, T=100),
    ):
        got = direction(solver, problem, X, y)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    # x is held, so that y and v of the single loop have come to rest.
    got = direction(partial(SOBA, beta=0.4), problem, X, y, 120)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_the_adjoint_is_zero_at_active_bounds() -> None:
    lower_set = Box(-0.3, 0.4)
    y = constrained_solution(lower_set, X)
    active = (y == -0.3) | (y == 0.4)
    assert bool(active.any())
    for kind, more in ((AID, {"T": 5}), (SOBA, {})):
        optimizer = kind(groups(X, y), beta=0.4, **more)
        optimizer.step(problem=CLOSED_FORMS[0].build(lower_set))
        assert torch.equal(optimizer.run.v == 0.0, active)


# --- Curvature ---


def bent(*curvatures: float) -> BilevelProblem:
    """g = sum of c_i (y_i - x)^2/2, which is not convex where a curvature is negative."""
    c = vector(*curvatures)
    return BilevelProblem(
        lambda x, y: (x**2).sum() + (y * vector(1.0, 2.0)).sum(),
        lambda x, y: (c * (y - x.sum()) ** 2).sum() / 2,
    )


class TestCurvature:
    @pytest.mark.parametrize("second", [-0.5, 0.0])
    def test_aid_stops_conjugate_gradients_and_says_so(self, second: float) -> None:
        optimizer = AID(groups(vector(1.0), vector(1.0, 2.0)), T=1, N=5)
        with pytest.warns(UserWarning, match="`AID` met the curvature") as told:
            info = optimizer.step(problem=bent(1.0, second))
        assert "Conjugate gradients stop there, with the v so far." in str(told[0].message)
        assert isinstance(info, AdjointInfo)
        assert info.indefinite
        assert all(bool(v.isfinite().all()) for v in point_of(optimizer))

    @pytest.mark.parametrize("linear_solver", ["neumann", "fixed_point"])
    def test_its_other_solvers_say_so_too(self, linear_solver: Any) -> None:
        optimizer = AID(
            groups(vector(1.0), vector(1.0, 2.0)), T=1, N=9, linear_solver=linear_solver, eta=0.5
        )
        with pytest.warns(UserWarning, match=r"The steps of v may diverge\."):
            assert optimizer.step(problem=bent(1.0, -0.5)).indefinite  # type: ignore[attr-defined]

    @both_ways
    def test_soba_says_so(self, way: Any) -> None:
        optimizer = SOBA(groups(vector(1.0), vector(1.0, 2.0)), beta=0.5, products=way)
        problem = bent(1.0, -0.5)
        # v is 0 at first, and has no curvature then.
        assert not optimizer.step(problem=problem).indefinite  # type: ignore[attr-defined]
        with pytest.warns(UserWarning, match=r"`SOBA` met the curvature -0\.\d+ along"):
            assert optimizer.step(problem=problem).indefinite  # type: ignore[attr-defined]

    @pytest.mark.parametrize("kind", [AID, SOBA])
    def test_it_is_said_once_a_run_even_if_that_is_resumed(self, kind: Any) -> None:
        problem = bent(1.0, -0.5)
        optimizer = kind(groups(vector(1.0), vector(1.0, 2.0)))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(4):
                optimizer.step(problem=problem)
        assert len(told) == 1
        resumed = kind(groups(*point_of(optimizer)))
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert resumed.step(problem=problem).indefinite  # warnings are errors here

    @pytest.mark.parametrize("kind", [AID, SOBA])
    def test_damping_above_it_is_the_way_out_that_the_sentence_names(self, kind: Any) -> None:
        optimizer = kind(groups(vector(1.0), vector(1.0, 2.0)), damping=0.6)
        problem = bent(1.0, -0.5)
        assert not any(optimizer.step(problem=problem).indefinite for _ in range(4))

    @both_ways
    def test_float32_and_many_steps_raise_no_false_alarm(self, way: Any) -> None:
        form = CLOSED_FORMS[1]
        y = torch.zeros(closed_forms.NY, dtype=torch.float32)
        optimizer = AID(groups(X.float(), y), beta=0.4, T=5, N=30, alpha=0.05, products=way)
        problem = form.build()
        for _ in range(200):
            assert not optimizer.step(problem=problem).indefinite  # type: ignore[attr-defined]


# --- Cost ---


@pytest.mark.parametrize(
    ("solver", "calls"),
    [
        # The first iteration starts at 0 and saves a product.
        (partial(AID, T=3, N=2), Calls(upper=1, lower=3, products=2 + 2)),
        (partial(AID, T=3, N=2, warm_start=False), Calls(upper=1, lower=3, products=2 + 1)),
        (
            partial(AID, T=3, N=2, linear_solver="neumann"),
            Calls(upper=1, lower=3, products=2 + 1),
        ),
        (
            partial(AID, T=3, N=2, warm_start=False, products="difference"),
            Calls(upper=1, lower=3 + 2 * 2, gap=1),
        ),
        (partial(ITD, T=5, K=2), Calls(upper=1, lower=5, products=2)),
        (partial(ITD, T=5, products="difference"), Calls(upper=1, lower=5, gap=5)),
        (SOBA, Calls(upper=1, products=1)),
        (partial(SOBA, products="difference"), Calls(upper=1, lower=1, gap=1)),
        (DARTS, Calls(upper=1, lower=2, gap=1)),
        (partial(DARTS, xi=0.0), Calls(upper=1, lower=1)),
    ],
)
def test_an_iteration_costs_what_the_docstring_states(solver: Any, calls: Calls) -> None:
    optimizer = solver(groups(X, torch.ones(closed_forms.NY, dtype=torch.float64)))
    problem = CLOSED_FORMS[1].build()
    optimizer.step(problem=problem)
    assert optimizer.step(problem=problem).calls == calls


# --- Arguments ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(ITD, K=0), r"`ITD\(K=0\)` must be a positive whole number"),
        (partial(ITD, T=0), r"`ITD\(T=0\)` must be a positive whole number"),
        (partial(ITD, products="fast"), r"`ITD\(products='fast'\)` must be 'autograd' or 'differ"),
        (
            partial(AID, N=0),
            r"`AID\(N=0, linear_solver='cg'\)` makes no step on v: N must be",
        ),
        (partial(AID, N=1.5), r"`AID\(N=1.5\)` must be a whole number of at least 0"),
        (partial(AID, linear_solver="lu"), r"`AID\(linear_solver='lu'\)` must be 'cg' or 'neum"),
        (partial(AID, damping=-1.0), r"`AID\(damping=-1.0\)` must be nonnegative and finite"),
        (partial(AID, tolerance=0.0), r"`AID\(tolerance=0.0\)` must be positive and finite"),
        (partial(AID, eta=-0.1), r"`AID\(eta=-0.1\)` must be positive and finite"),
        (partial(AID, beta=0.0), r"`AID\(beta=0.0\)` must be positive and finite, a `Power`"),
        (partial(SOBA, damping=-1.0), r"`SOBA\(damping=-1.0\)` must be nonnegative and finite"),
        (partial(SOBA, products="fast"), r"`SOBA\(products='fast'\)` must be 'autograd' or"),
        (partial(SOBA, alpha=-1.0), r"`SOBA\(alpha=-1.0\)` must be positive and finite"),
        (partial(DARTS, xi=-0.1), r"`DARTS\(xi=-0.1\)` must be nonnegative and finite"),
    ],
)
def test_arguments_that_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(groups(vector(0.0), vector(0.0)))


def test_first_order_darts_is_refused_where_f_has_no_x() -> None:
    problem = BilevelProblem(lambda x, y: (y**2).sum(), lambda x, y: ((y - x) ** 2).sum())
    optimizer = DARTS(groups(vector(0.0), vector(1.0)), xi=0.0)
    with pytest.raises(
        BilevelError, match=r"f does not depend on x, so `DARTS\(xi=0.0\)` would never move x"
    ) as e:
        optimizer.step(problem=problem)
    assert "DARTS stopped in outer iteration 1" in str(e.value)
    assert "A positive `xi` differentiates" in str(e.value)
    # The second order moves x there, and so does the first where f has x, even if fx is 0.
    moving = DARTS(groups(vector(0.0), vector(1.0)), xi=0.1)
    moving.step(problem=problem)
    assert float(point_of(moving)[0]) != 0.0
    flat = BilevelProblem(lambda x, y: (x**2 + y**2).sum(), lambda x, y: ((y - x) ** 2).sum())
    DARTS(groups(vector(0.0), vector(1.0)), xi=0.0).step(problem=flat)


def test_darts_with_no_slope_of_f_moves_x_along_f_alone() -> None:
    problem = BilevelProblem(
        lambda x, y: (x**2).sum() + 0.0 * y.sum(), lambda x, y: ((y - x) ** 2).sum()
    )
    got = direction(DARTS, problem, vector(1.0), vector(3.0))
    assert float(got) == 2.0
