"""The methods that the paper cites: steps by hand, closed forms, what each refuses, state."""

from __future__ import annotations

import io
import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import CLOSED_FORMS, NX, NY, ClosedForm, H
from helpers import groups, point_of
from torch import Tensor

from lightning_bilevel import (
    F2BA,
    BilevelError,
    BilevelOptimizer,
    BilevelProblem,
    Box,
    Free,
    HJFBiO,
    LuMei,
    NonFiniteError,
    PBGDFree,
    Product,
)
from lightning_bilevel.solvers.hjfbio import _held
from lightning_bilevel.solvers.lumei import Saddle, solve_saddle
from lightning_bilevel.solvers.record import StepInfo

Make = Any
closed_forms = pytest.mark.parametrize("problem", CLOSED_FORMS, ids=str)


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def run(make: Make, problem: BilevelProblem, x: Tensor, y: Tensor, steps: int) -> BilevelOptimizer:
    optimizer: BilevelOptimizer = make(groups(x, y))
    advance(optimizer, problem, steps)
    return optimizer


def advance(optimizer: BilevelOptimizer, problem: BilevelProblem, steps: int) -> None:
    for _ in range(steps):
        optimizer.step(problem=problem)


# --- Steps by hand ---
# f = (x - 2)^2/2 + (y - 1)^2/2, g = (y - x)^2/2: fx = x - 2, fy = y - 1, gx = x - y, gy = y - x.
def simple(**more: Any) -> BilevelProblem:
    return BilevelProblem(
        lambda x, y: ((x - 2) ** 2 + (y - 1) ** 2).sum() / 2,
        lambda x, y: ((y - x) ** 2).sum() / 2,
        **more,
    )


_f2ba = {"eta": 0.1, "tau": 0.5, "sigma": 0.5, "K": 2}
BY_HAND: dict[str, tuple[Make, float, tuple[float, float], dict[str, float]]] = {
    # From (0, 1). z: 1, 1/2, 1/4. y: 1, 1/2, then 1/2 - [(-1/2)/2 + 1/2]/2 = 3/8.
    # d = -2 + 2 (-3/8 + 1/4) = -9/4
    "forward": (partial(F2BA, **_f2ba), 1.0, (0.225, 0.375), {"z": 0.25}),
    # z: 1, 1/2, then 1/2 - [1/2 + (1/2)/2]/2 = 1/8. d = -2 + (-3/8 + 1/8) = -9/4
    "central": (
        partial(F2BA, **_f2ba, difference="central"),
        1.0,
        (0.225, 0.375),
        {"z": 0.125},
    ),
    # Centres at 1. z: 1, 1/2, and there 1/2 + (1/2 - 1) = 0. y: 1, 1/2, and there
    # (-1/2)/2 + 1/2 + (1/2 - 1) = -1/4, so 5/8. d = -2 + 2 (-5/8 + 1/2) = -9/4
    "prox": (partial(F2BA, **_f2ba, rho=1.0), 1.0, (0.225, 0.625), {"z": 0.5}),
    # The centres go half of the way: from 1 to (1 + 1/2)/2 and (1 + 5/8)/2.
    "prox-slow": (
        partial(F2BA, **_f2ba, rho=1.0, beta=0.5),
        1.0,
        (0.225, 0.625),
        {"z": 0.5, "z_center": 0.75, "y_center": 0.8125},
    ),
    # From (0, 3). v = 0, so J = H = 0: x = 0.1 * 2, y = 3 - 3/2, v = 2/2
    "hjfbio": (
        partial(HJFBiO, gamma=0.1, lam=0.5, tau=0.5),
        3.0,
        (0.2, 1.5),
        {"v": 1.0},
    ),
    # From (0, 3). y: 3 - [2/2 + 3]/2 = 1, then 1 - [0 + 1]/2; x: 0.1 * 2
    "pbgd_free": (
        partial(PBGDFree, eta=0.1, alpha=0.5, gamma=2.0, K=2),
        3.0,
        (0.2, 0.5),
        {},
    ),
}


def by_hand(name: str) -> tuple[BilevelOptimizer, StepInfo]:
    make, y0, _, _ = BY_HAND[name]
    optimizer = make(groups(vector(0.0), vector(y0)))
    return optimizer, optimizer.step(problem=simple())


@pytest.mark.parametrize("name", BY_HAND)
def test_first_step_by_hand(name: str) -> None:
    optimizer, _ = by_hand(name)
    _, _, expected, kept = BY_HAND[name]
    x, y = point_of(optimizer)
    assert (x.item(), y.item()) == pytest.approx(expected)
    state = optimizer.run.plain()
    state["z_center"], state["y_center"] = state.pop("centers", None) or (None, None)
    found = {name: v.item() for name, v in state.items() if isinstance(v, Tensor)}
    assert found == pytest.approx(kept)


def test_second_step_of_hjfbio_by_hand() -> None:
    # At (0.2, 1.5) with v = 1: J = -1, H = 1, fx = -1.8, fy = 0.5, gy = 1.3.
    optimizer, _ = by_hand("hjfbio")
    optimizer.step(problem=simple())
    x, y = point_of(optimizer)
    assert (x.item(), y.item()) == pytest.approx((0.28, 0.85))
    assert optimizer.run.v.item() == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("name", "upper", "lower", "inner"),
    [
        ("forward", (0.0, 0.5), (0.0, 0.375), 2),  # f before the last step of y, g after it
        ("central", (0.0, 0.5), (0.0, 0.375), 2),
        ("hjfbio", (0.0, 3.0), (0.0, 3.0), 1),
        ("pbgd_free", (0.0, 1.0), (0.0, 1.0), 2),  # both before the last step of y
    ],
)
def test_record_holds_the_values_where_they_were_last_evaluated(
    name: str, upper: tuple[float, float], lower: tuple[float, float], inner: int
) -> None:
    _, info = by_hand(name)
    assert info.upper == pytest.approx((upper[0] - 2) ** 2 / 2 + (upper[1] - 1) ** 2 / 2)
    assert info.lower == pytest.approx((lower[1] - lower[0]) ** 2 / 2)
    assert info.inner_iterations == inner


@pytest.mark.parametrize(("name", "weight"), [("forward", 2.0), ("central", 1.0), ("prox", 2.0)])
def test_multiplier_is_the_weight_of_the_gap(name: str, weight: float) -> None:
    _, info = by_hand(name)
    assert isinstance(info, StepInfo)
    assert info.multiplier == weight


@pytest.mark.parametrize(
    ("name", "passes", "saved"),
    [
        ("forward", 3 * 2 + 3, 1),
        ("central", 4 * 2 + 4, 2),
        ("prox", 3 * 2 + 3, 1),
        ("hjfbio", 4, 0),
    ],
)
def test_passes_are_the_stated_ones_and_fewer_without_x(name: str, passes: int, saved: int) -> None:
    assert by_hand(name)[1].calls.passes == passes
    without = BilevelProblem(
        lambda x, y: ((y - 1) ** 2).sum() / 2, lambda x, y: ((y - x) ** 2).sum() / 2
    )
    optimizer = BY_HAND[name][0](groups(vector(0.0), vector(1.0)))
    counts = [optimizer.step(problem=without).calls.passes for _ in range(3)]
    assert counts[1:] == [passes - saved] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BY_HAND)
def test_every_form_resumes_bitwise(name: str, dtype: torch.dtype) -> None:
    """In boxes that x and y touch, with a coordinate that a bound holds."""
    make, y0, _, _ = BY_HAND[name]
    start = (vector(0.0, 0.3).to(dtype), vector(y0, -1.0).to(dtype))
    problem = simple(upper_set=Box(-0.4, 0.4), lower_set=Box([-1.0, -1.0], [3.0, -0.2]))
    straight = make(groups(*start))
    for _ in range(4):
        straight.step(problem=problem)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed = make.func(groups(*point_of(straight)))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        one, other = straight.step(problem=problem), resumed.step(problem=problem)
        assert (one.upper, one.lower, one.step) == (other.upper, other.lower, other.step)
    for mine, theirs in zip(point_of(straight), point_of(resumed), strict=True):
        assert torch.equal(mine, theirs)


# --- Closed forms ---
def direction(problem: ClosedForm, x: Tensor, **constants: Any) -> Tensor:
    """The direction of F2BA at x, with followers that have converged."""
    optimizer = F2BA(groups(x, torch.zeros(NY).double()), eta=1e-3, tau=0.4, K=100, **constants)
    optimizer.step(problem=problem.build())
    return (x - point_of(optimizer)[0]) / 1e-3


@pytest.mark.parametrize(("difference", "order"), [("forward", 1.0), ("central", 2.0)])
@closed_forms
def test_the_bias_of_f2ba_is_of_the_stated_order(
    problem: ClosedForm, difference: str, order: float
) -> None:
    x = vector(0.3, -0.4, 0.2)
    sigmas = [0.04, 0.02, 0.01]
    errors = [
        (direction(problem, x, sigma=s, difference=difference) - problem.hypergradient(x)).norm()
        for s in sigmas
    ]
    slopes = np.diff(np.log(errors)) / np.diff(np.log(sigmas))
    assert slopes == pytest.approx([order, order], abs=0.1)


@pytest.mark.integration
@closed_forms
def test_the_proximal_term_does_not_move_the_followers_from_where_they_end(
    problem: ClosedForm,
) -> None:
    """At a fixed x the centres end at the minimisers too, so the direction is F2BA's."""
    x = vector(0.3, -0.4, 0.2)
    start = groups(x, torch.zeros(NY).double())
    optimizer = F2BA(start, eta=1e-12, tau=0.3, K=5, sigma=0.1, rho=1.0, beta=0.7)
    built = problem.build()
    for _ in range(80):
        optimizer.step(problem=built)
    y, z = point_of(optimizer)[1], optimizer.run.z
    plain = F2BA(groups(x, torch.zeros(NY).double()), eta=1e-12, tau=0.4, K=100, sigma=0.1)
    plain.step(problem=built)
    torch.testing.assert_close(z, problem.solution(x), rtol=0, atol=1e-7)
    torch.testing.assert_close(y, point_of(plain)[1], rtol=0, atol=1e-7)


@pytest.mark.integration
@pytest.mark.parametrize(("difference", "factor"), [("forward", 2.0), ("central", 4.0)])
def test_f2ba_ends_at_a_stationary_point_up_to_its_bias(difference: str, factor: float) -> None:
    """The last |grad F| of a run, by the closed form: linear in sigma, or quadratic."""
    problem = CLOSED_FORMS[0]
    start = (torch.zeros(NX).double(), torch.zeros(NY).double())
    ends = []
    for sigma in (0.04, 0.02):
        make = partial(F2BA, eta=0.1, tau=0.6, sigma=sigma, K=3, difference=difference)
        x, _ = point_of(run(make, problem.build(), *start, 150))
        ends.append(float(problem.hypergradient(x).norm()))
    assert ends[0] / ends[1] == pytest.approx(factor, rel=0.15)


@pytest.mark.integration
@closed_forms
def test_hjfbio_ends_where_the_hypergradient_is_zero(problem: ClosedForm) -> None:
    start = (torch.zeros(NX).double(), torch.zeros(NY).double())
    gamma = {"quadratic": 0.02, "smooth": 0.01}[problem.name]  # about the longest that is stable
    make = partial(HJFBiO, gamma=gamma, lam=0.6, tau=0.6, r=100.0)
    optimizer = run(make, problem.build(), *start, 1200)
    x, y = point_of(optimizer)
    assert problem.hypergradient(x).norm() < 1e-8
    torch.testing.assert_close(y, problem.solution(x), rtol=0, atol=1e-8)
    torch.testing.assert_close(optimizer.run.v, problem.adjoint(x, y), rtol=0, atol=1e-8)


def curved() -> tuple[BilevelProblem, Any]:
    """g is no quadratic, so that the difference quotient has an error; and its hypergradient."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return ((x - 1) ** 2).sum() / 2 + (torch.cosh(y) - y).sum()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (y**2).sum() + (torch.exp(y) - y * torch.sin(x)).sum() + (y[0] * y[1]) ** 2 / 2

    hessian = torch.func.jacrev(torch.func.grad(g, 1), 1)

    def hypergradient(x: Tensor) -> Tensor:
        """By Newton's method and second derivatives."""
        y = torch.zeros(2, dtype=torch.float64)
        for _ in range(50):
            slope = torch.func.grad(g, 1)(x, y)
            y = y - torch.linalg.solve(hessian(x, y), slope)
        fx, fy = torch.func.grad(f, (0, 1))(x, y)
        v = torch.linalg.solve(hessian(x, y), fy)
        mixed = torch.func.jacrev(torch.func.grad(g, 1), 0)(x, y)
        return fx - mixed.T @ v

    return BilevelProblem(f, g), hypergradient


@pytest.mark.parametrize(
    ("dtype", "delta", "error"),
    [
        (torch.float64, None, 1e-8),  # cube root of the rounding, squared: 4e-11
        (torch.float32, None, 1e-3),
        (torch.float64, 0.1, 1e-2),
    ],
)
def test_the_difference_of_hjfbio_is_as_exact_as_stated(
    dtype: torch.dtype, delta: float | None, error: float
) -> None:
    problem, hypergradient = curved()
    zeros = torch.zeros(2, dtype=dtype)
    make = partial(HJFBiO, gamma=0.1, lam=0.2, tau=0.2, delta=delta)
    x, _ = point_of(run(make, problem, zeros, zeros, 200))
    found = float(hypergradient(x.double()).norm())
    assert found < error
    if delta is not None:
        assert found > 1e-6  # a long difference is seen


def test_the_order_of_the_difference_is_two() -> None:
    problem, hypergradient = curved()
    zeros = torch.zeros(2, dtype=torch.float64)
    ends = []
    for delta in (0.2, 0.1):
        make = partial(HJFBiO, gamma=0.1, lam=0.2, tau=0.2, delta=delta)
        ends.append(hypergradient(point_of(run(make, problem, zeros, zeros, 200))[0]).norm())
    assert ends[0] / ends[1] == pytest.approx(4.0, rel=0.1)


def test_hjfbio_keeps_v_zero_where_a_bound_holds_y() -> None:
    # y1 = x1 is free, and y2 = min(x2, 0.5) is held at 0.5, where it does not change with x2:
    # F = (x1 - 1)^2 + x1^2 + (x2 - 2)^2/2 + 1/4.
    problem = BilevelProblem(
        lambda x, y: (x[0] - 1) ** 2 + (x[1] - 2) ** 2 / 2 + (y**2).sum(),
        lambda x, y: ((y - x) ** 2).sum() / 2,
        lower_set=Box([-1.0, -1.0], [2.0, 0.5]),
    )
    make = partial(HJFBiO, gamma=0.1, lam=0.5, tau=0.5)
    optimizer = run(make, problem, vector(0.0, 1.0), vector(0.0, 0.0), 400)
    x, y = point_of(optimizer)
    torch.testing.assert_close(x, vector(0.5, 2.0))
    torch.testing.assert_close(y, vector(0.5, 0.5))
    assert optimizer.run.v[1] == 0.0


def test_which_coordinates_a_bound_holds() -> None:
    y, slope = vector(0.0, 1.0, 0.5, 0.0, 1.0), vector(1.0, -1.0, 1e-20, -1.0, 0.0)
    held = [True, True, False, False, False]
    box = Box(0.0, 1.0)
    for lower_set in (box, Product([box, box], [2, 3])):
        found = _held(lower_set, y, slope)
        assert found is not None
        assert found.tolist() == held
    mixed = _held(Product([Free(), Box(0.0, torch.inf)], [2, 3]), y, slope)
    assert mixed is not None
    assert mixed.tolist() == [False, False, False, False, False]
    assert _held(Free(), y, slope) is None


def test_hjfbio_says_once_that_v_is_on_its_sphere() -> None:
    optimizer = HJFBiO(groups(vector(0.0), vector(3.0)), lam=0.01, tau=0.5, r=0.4)
    with pytest.warns(UserWarning, match=r"v has reached the surface of its ball, `r=0.4`, in out"):
        optimizer.step(problem=simple())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(problem=simple())
    assert optimizer.run.v.norm() <= 0.4 * (1 + 1e-12)


# --- PBGD-Free ---
@pytest.mark.integration
def test_pbgd_free_stops_away_from_the_solution_where_f_is_not_flat() -> None:
    # y = x - 1 gives F = x^2 + 10 x - 10, whose minimiser is x = -5. The method ends at fx = 0.
    problem = BilevelProblem(
        lambda x, y: (x**2 + 10 * y).sum(), lambda x, y: ((y - x + 1) ** 2).sum()
    )
    start = (vector(3.0), vector(0.0))
    free = run(partial(PBGDFree, eta=0.1, alpha=0.2, K=5), problem, *start, 100)
    assert point_of(free)[0].item() == pytest.approx(0.0, abs=1e-6)
    full = run(partial(F2BA, eta=0.1, tau=0.2, sigma=0.1, K=20), problem, *start, 100)
    assert point_of(full)[0].item() == pytest.approx(-5.0, abs=1e-6)


def test_pbgd_free_solves_where_f_is_flat() -> None:
    # f does not change with y: F = f.
    problem = BilevelProblem(
        lambda x, y: ((x - 1) ** 2).sum() + 0.0 * y.sum(), lambda x, y: ((y - x) ** 2).sum()
    )
    optimizer = run(partial(PBGDFree, eta=0.1, alpha=0.2), problem, vector(3.0), vector(0.0), 200)
    assert point_of(optimizer)[0].item() == pytest.approx(1.0)
    assert point_of(optimizer)[1].item() == pytest.approx(1.0)


def test_pbgd_free_refuses_an_upper_level_without_x() -> None:
    problem = BilevelProblem(lambda x, y: (y**2).sum(), lambda x, y: ((y - x) ** 2).sum())
    optimizer = PBGDFree(groups(vector(1.0), vector(0.0)))
    with pytest.raises(
        BilevelError, match=r"f does not depend on x, so PBGDFree would never move x"
    ) as e:
        optimizer.step(problem=problem)
    assert str(e.value).startswith("PBGDFree stopped in ")
    assert "such as F2BA or VPBGD, or add a term in x to f" in str(e.value)
    assert [v.item() for v in point_of(optimizer)] == [1.0, 0.0]


def test_pbgd_free_takes_an_f_whose_gradient_in_x_is_zero_at_the_start() -> None:
    problem = BilevelProblem(lambda x, y: (x * y).sum(), lambda x, y: ((y - x - 1) ** 2).sum())
    optimizer = run(partial(PBGDFree, alpha=0.1), problem, vector(0.0), vector(0.0), 2)
    assert point_of(optimizer)[0].item() != 0.0


# --- F2BA: what it refuses ---
@pytest.mark.parametrize("steep", [2.0, 1e200], ids=["far", "overflow"])
def test_central_difference_of_an_unbounded_function_is_named(steep: float) -> None:
    # -sigma f + g = (1 - sigma * steep) y^2/2 - ..., with sigma = 1
    problem = BilevelProblem(
        lambda x, y: (x**2).sum() + steep * (y**2).sum() / 2,
        lambda x, y: ((y - x) ** 2).sum() / 2,
    )
    optimizer = F2BA(groups(vector(1.0), vector(1.0)), sigma=1.0, difference="central", tau=0.3)
    with pytest.raises(BilevelError) as caught:
        advance(optimizer, problem, 200)
    told = str(caught.value)
    assert "The central difference with sigma=1 seems to minimise a function -sigma f + g" in told
    assert 'unbounded below: make `sigma` smaller, Y bounded, or take difference="fo' in told
    assert isinstance(caught.value, NonFiniteError) == (steep > 2)
    assert all(bool(v.isfinite().all()) for v in point_of(optimizer))


def test_central_difference_on_a_bounded_set_runs() -> None:
    problem = BilevelProblem(
        lambda x, y: (x**2).sum() + (y**2).sum(),
        lambda x, y: ((y - x) ** 2).sum() / 2,
        lower_set=Box(-1.0, 1.0),
    )
    make = partial(F2BA, sigma=1.0, difference="central", tau=0.3)
    optimizer = run(make, problem, vector(1.0), vector(1.0), 50)
    assert optimizer.run.z.abs().item() == 1.0  # at the bound


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(F2BA, sigma=0.0), r"`F2BA\(sigma=0.0\)` must be positive and finite."),
        (partial(F2BA, K=0), r"`F2BA\(K=0\)` must be a positive whole number."),
        (
            partial(F2BA, difference="backward"),
            r"`F2BA\(difference='backward'\)` must be 'forward' or 'central'.",
        ),
        (partial(F2BA, rho=-1.0), r"`F2BA\(rho=-1.0\)` must be positive and finite."),
        (
            partial(F2BA, beta=1.5),
            r"`F2BA\(beta=1.5\)` must be positive and at most 1.",
        ),
        (partial(HJFBiO, delta=0.0), r"`HJFBiO\(delta=0.0\)` must be positive and finite."),
        (partial(HJFBiO, r=math.inf), r"`HJFBiO\(r=inf\)` must be positive and finite."),
        (partial(PBGDFree, gamma=0.0), r"`PBGDFree\(gamma=0.0\)` must be positive and finite."),
        (partial(LuMei, eps=0.0), r"`LuMei\(eps=0.0\)` must be positive and finite."),
        (partial(LuMei, D=math.nan), r"`LuMei\(D=nan\)` must be positive and finite."),
        (partial(LuMei, max_inner=0), r"`LuMei\(max_inner=0\)` must be a positive whole number."),
    ],
)
def test_bad_argument_is_refused(make: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(groups(vector(0.0), vector(0.0)))


# --- Lu-Mei ---
def saddle_problem(seed: int = 3) -> Saddle:
    """A random strongly-convex-strongly-concave quadratic of 4 + 4 variables in a box."""
    generator = torch.Generator().manual_seed(seed)
    M, N, C = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    a = 3 * torch.randn(8, generator=generator, dtype=torch.float64)
    of_u = M @ M.T + torch.eye(4, dtype=torch.float64)
    of_z = N @ N.T + torch.eye(4, dtype=torch.float64)
    K = torch.cat([torch.cat([of_u, C], 1), torch.cat([-C.T, of_z], 1)])
    return Saddle(
        F=lambda w: K @ w - a,
        project=lambda w: w.clamp(-0.5, 0.5),
        size_u=4,
        s_u=float(torch.linalg.eigvalsh(of_u)[0]),
        s_z=float(torch.linalg.eigvalsh(of_z)[0]),
        L=float(torch.linalg.matrix_norm(K, 2)),
    )


def test_the_saddle_point_solver_reaches_its_residual() -> None:
    """2e-7 within 51 outer steps, as an independent transcription did, and then on."""
    saddle = saddle_problem()
    evaluations = []

    def counted(w: Tensor) -> Tensor:
        evaluations.append(w)
        return saddle.F(w)

    start = torch.zeros(8, dtype=torch.float64)
    found, residual, steps = solve_saddle(saddle._replace(F=counted), start, 2e-7, 100_000)
    assert residual <= 2e-7
    # An extragradient step evaluates F twice, an outer step four times more.
    assert len(evaluations) - 2 * steps <= 4 * 51
    exact, residual, _ = solve_saddle(saddle, start, 1e-10, 100_000)
    assert residual <= 1e-10
    # By other means: w is a fixed point of a projected step, and on the boundary somewhere.
    moved = saddle.project(exact - 1e-3 * saddle.F(exact)) - exact
    assert moved.norm() / 1e-3 <= 1e-9
    assert (exact.abs() == 0.5).any()
    assert (exact.abs() < 0.5).any()
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)


def test_a_capped_saddle_point_is_never_worse_than_the_start() -> None:
    saddle = saddle_problem()
    start, _, _ = solve_saddle(saddle, torch.zeros(8, dtype=torch.float64), 1e-6, 100_000)
    for cap in (1, 3, 10):
        _, residual, steps = solve_saddle(saddle, start, 1e-30, cap)
        assert 1e-30 < residual <= 1e-5
        assert steps == cap


def minimax(problem: ClosedForm, u_k: Tensor, z_0: Tensor, eps: float, L_h: float, D: float) -> Any:
    """The objective of Lu and Mei's iteration, written down once more."""
    f, g = problem.build().upper_terms[0], problem.build().lower_terms[0]

    def h(w: Tensor) -> Tensor:
        x, y, z = torch.split(w, [NX, NY, NY])
        gap = g(x, y) - g(x, z)
        near = L_h * ((w[: NX + NY] - u_k) ** 2).sum()
        return f(x, y) + gap / eps - eps / (4 * D) * ((z - z_0) ** 2).sum() + near

    return h


def test_an_iteration_of_lumei_solves_its_saddle_point_problem() -> None:
    """All is quadratic, so the saddle point is the solution of a linear system."""
    problem, eps, D = CLOSED_FORMS[0], 2.0, 1.0
    constants = {"eps": eps, "L_f": 3.0, "L_g": 5.0, "D": D}
    start = (vector(0.3, -0.4, 0.2), torch.zeros(NY).double())
    optimizer = LuMei(groups(*start), **constants, max_inner=200_000)
    built = problem.build()
    optimizer.step(problem=built)
    u_1, z_0 = torch.cat(point_of(optimizer)), optimizer.run.z_first
    # y moved to a solution of the lower level up to eps, before all else.
    excess = (z_0 - problem.solution(start[0])) @ H @ (z_0 - problem.solution(start[0])) / 2
    assert float(excess) <= eps
    optimizer.step(problem=built)
    h = minimax(problem, u_1, z_0, eps, L_h := 3.0 + 2 * 5.0 / eps, D)
    zero = torch.zeros(NX + 2 * NY, dtype=torch.float64)
    slope = torch.func.grad(h)
    expected = torch.linalg.solve(torch.func.jacrev(slope)(zero), -slope(zero))
    got = torch.cat([*point_of(optimizer), optimizer.run.z])
    # The residual is at most eps^1.5/2; h is strongly monotone with the smaller of the moduli.
    modulus = min(L_h, eps / (2 * D))
    assert (got - expected).norm() <= eps**1.5 / 2 / modulus
    signs = torch.cat([torch.ones(NX + NY), -torch.ones(NY)]).double()
    assert (signs * slope(got)).norm() <= 1.01 * eps**1.5 / 2


def flat_lower_level() -> BilevelProblem:
    """g is convex and not strongly: every y with y1 + y2 = x is a solution."""
    return BilevelProblem(
        lambda x, y: ((x - 1) ** 2).sum() / 2 + (y[0] - 1) ** 2 / 2 + y[1] ** 2 / 2,
        lambda x, y: (y.sum() - x.sum()) ** 2 / 2,
        Box(-2.0, 2.0),
        Box(-1.0, 1.0),
    )


def test_lumei_ends_at_an_epsilon_kkt_point_of_a_convex_problem() -> None:
    """Which is not strongly convex; the gradients of the penalty problem are computed here."""
    eps, problem = 1.0, flat_lower_level()
    optimizer = LuMei(
        groups(vector(0.6), vector(0.9, 0.2)),
        eps=eps,
        L_f=1.0,
        L_g=3.0,
        D=math.sqrt(8.0),
        max_inner=100_000,
    )
    history = []
    short = eps / (4 * (1.0 + 2 * 3.0 / eps))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no iteration ends at its cap
        while not history or history[-1].step > short:
            history.append(optimizer.step(problem=problem))
    assert len(history) <= 30
    last = history[-1]
    x, y = point_of(optimizer)
    z = optimizer.run.z
    assert (last.upper, last.lower) == pytest.approx(
        (problem.upper(x, y).value, problem.at(x).value(y))
    )
    at_y, at_z = y.sum() - x, z.sum() - x
    of_x = (x - 1) + (at_z - at_y) / eps
    of_y = (y - vector(1.0, 0.0)) + at_y / eps
    stationarity = math.hypot(
        problem.upper_set.normal_cone_distance(x, of_x),
        problem.lower_set.normal_cone_distance(y, of_y),
    )
    assert stationarity <= eps
    assert problem.lower_set.normal_cone_distance(z, (at_z / eps).expand(2)) <= eps


def test_a_capped_lumei_says_so() -> None:
    optimizer = LuMei(groups(vector(-1.0), vector(0.0, 0.0)), eps=0.01, max_inner=3)
    with pytest.warns(UserWarning, match=r"LuMei ended outer iterations at `max_inner=3`"):
        optimizer.step(problem=flat_lower_level())
    with pytest.warns(UserWarning, match="LuMei"):
        info = optimizer.step(problem=flat_lower_level())
    assert info.inner_iterations == 3


# --- The call that HJFBiO and Lu-Mei need ---
@pytest.mark.parametrize("parts", ["plain", "features", "outputs", "chunks"])
def test_a_full_gap_is_a_gap_with_the_gradient_at_z(parts: str) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() * y**3).sum() + (x * y).sum() ** 2

    def rest(x: Tensor, y: Tensor) -> Tensor:
        return 3 * loss(x, y) / 4

    problems = {
        "plain": BilevelProblem(loss, loss),
        "features": BilevelProblem(loss, loss, features=lambda x: x * 1.0),
        "outputs": BilevelProblem(loss, loss, outputs=lambda y: y * 1.0),
        "chunks": BilevelProblem(loss, [lambda x, y: loss(x, y) / 4, rest]),
    }
    problem = problems[parts]
    x, y, z = vector(0.3, -1.0), vector(1.0, 2.0), vector(-0.5, 0.7)
    lower = problem.at(x)
    found = lower.full_gap(y, z)
    assert problem.calls.gap == 1
    assert problem.calls.passes == 2
    expected = problem.at(x.clone()).gap(y, z)
    for got, want in zip(found, (*expected, problem.at(x.clone()).gradient(z)), strict=True):
        torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want))
    same = lower.full_gap(y, y)
    torch.testing.assert_close(same.grad_y, same.grad_z)
    torch.testing.assert_close(same.grad_y, problem.at(x.clone()).gradient(y))
    assert same.grad_x.abs().max() < 1e-12


def test_whether_f_depends_on_x() -> None:
    with_x, without = simple(), BilevelProblem(lambda x, y: y.sum(), lambda x, y: (y**2).sum())
    assert with_x.upper_has_x is without.upper_has_x is None
    for problem in (with_x, without):
        problem.upper(vector(0.0), vector(0.0))
    assert (with_x.upper_has_x, without.upper_has_x) == (True, False)
