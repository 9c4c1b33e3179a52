"""The six rivals of IVSP: steps by hand and by NumPy, passes, figures, arguments, state."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonargparse
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from places import SYNTHETIC
from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import Box
from lightning_bilevel.solvers.base import BilevelOptimizer, SolverCallable
from lightning_bilevel.solvers.bome import BOME
from lightning_bilevel.solvers.constants import Power
from lightning_bilevel.solvers.f2sa import F2SA
from lightning_bilevel.solvers.meha import MEHA, PNGBiO
from lightning_bilevel.solvers.pbgd import VPBGD
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.slm import SLM

Array = NDArray[np.float64]
Solver = type[BilevelOptimizer]


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def start(
    solver: Callable[..., BilevelOptimizer], x: Tensor, y: Tensor, **arguments: Any
) -> tuple[BilevelOptimizer, Tensor, Tensor]:
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    return (
        solver([{"params": [x], "level": "upper"}, {"params": [y], "level": "lower"}], **arguments),
        x,
        y,
    )


# --- Steps by hand ---
# f = (x - 2)^2/2 + (y - 1)^2/2, g = (y - x)^2/2, x0 = 0, y0 = 1: fx = -2, fy = 0, gx(x, u) = x - u,
# gy(x, u) = u - x, so that the first inner step of length 1/2 leads from 1 to 1/2, with gx(x, y) -
# gx(x, 1/2) = -1/2 and gy(x, y) = 1.
ROOT = math.sqrt(2.5)
BY_HAND: dict[str, tuple[Solver, dict[str, Any], float, float]] = {
    # d_x = -2/2 - 1/2 = -1.5; at x+ = 0.15: d_y = 0/2 + 0.85 - (1 - 0.5)/1 = 0.35
    "meha": (MEHA, {"alpha": 0.1, "beta": 0.1, "eta": 0.5, "gamma": 1.0, "c": 2.0}, 0.15, 0.965),
    # both directions have one coordinate: only their signs count
    "pngbio": (PNGBiO, {"alpha": 0.1, "beta": 0.1, "eta": 0.5, "gamma": 1.0, "c": 2.0}, 0.1, 0.9),
    # d = (-1.5, 0.5) has the norm sqrt(2.5)
    "pngbio-joint": (
        PNGBiO,
        {"alpha": 0.1, "beta": 0.1, "eta": 0.5, "gamma": 1.0, "c": 2.0, "norms": "joint"},
        0.15 / ROOT,
        1 - 0.05 / ROOT,
    ),
    # x: -2 + 2 (-1/2) = -3; y: 0 + 2 * 1 = 2
    "vpbgd": (VPBGD, {"alpha": 0.1, "beta": 0.5, "gamma": 2.0, "T": 1}, 0.3, 0.8),
    # <grad f, grad q> = 1, |grad q|^2 = 1.25: lambda = (0.5 * 1.25 - 1)/1.25 < 0, hence 0
    "bome-slack": (BOME, {"xi": 0.1, "alpha": 0.5, "eta": 0.5, "T": 1}, 0.2, 1.0),
    # lambda = (2 * 1.25 - 1)/1.25 = 1.2
    "bome": (BOME, {"xi": 0.1, "alpha": 0.5, "eta": 2.0, "T": 1}, 0.26, 0.88),
    # q = 1/2 - 1/8 = 0.375, lambda = (4 * 0.375 - 1)/1.25 = 0.4
    "bome-value": (
        BOME,
        {"xi": 0.1, "alpha": 0.5, "eta": 4.0, "T": 1, "barrier": "value"},
        0.22,
        0.96,
    ),
    # y+ = 1 - 0.1 (0 + 2 * 1) = 0.8; x: -2 + 2 (-0.8 + 0.5) = -2.6
    "f2sa": (F2SA, {"alpha": 0.1, "gamma": 0.5, "lambda0": 2.0, "T": 1}, 0.26, 0.8),
    "f2sa-ratio": (
        F2SA,
        {"alpha": 0.1, "gamma": 0.5, "xi": 0.5, "lambda0": 2.0, "T": 1},
        0.13,
        0.8,
    ),
    # x: -2 + 2 (-1/2) = -3; y: 2 * 1 = 2
    "slm": (
        SLM,
        {"eta": 0.1, "alpha": 0.2, "gamma": 0.5, "tau": 0.5, "T": 1, "delta": 0.0, "lambda0": 2.0},
        0.3,
        0.6,
    ),
    # z = 1 - 0.2 = 0.8; x: -2 + 2 (-0.2) = -2.4
    "slm-damped": (
        SLM,
        {
            "eta": 0.1,
            "alpha": 0.2,
            "gamma": 0.5,
            "tau": 0.5,
            "T": 1,
            "delta": 0.0,
            "lambda0": 2.0,
            "dual": "damped",
        },
        0.24,
        0.6,
    ),
}


def by_hand(name: str) -> tuple[BilevelOptimizer, Tensor, Tensor, StepInfo]:
    solver, arguments, _, _ = BY_HAND[name]
    problem = BilevelProblem(
        lambda x, y: ((x - 2) ** 2 + (y - 1) ** 2).sum() / 2, lambda x, y: ((y - x) ** 2).sum() / 2
    )
    optimizer, x, y = start(solver, vector(0.0), vector(1.0), **arguments)
    return optimizer, x, y, optimizer.step(problem=problem)


@pytest.mark.parametrize("name", BY_HAND)
def test_first_step_by_hand(name: str) -> None:
    _, x, y, info = by_hand(name)
    # BOME's guard of 1e-8 in the denominator is left out of the hand's numbers.
    assert x.item() == pytest.approx(BY_HAND[name][2], abs=1e-8)
    assert y.item() == pytest.approx(BY_HAND[name][3], abs=1e-8)
    assert info.step == pytest.approx(math.hypot(x.item(), y.item() - 1))
    assert (info.iteration, info.inner_iterations) == (1, 1)


def test_multiplier_of_slm_by_hand() -> None:
    # 2 + 0.5 [(0.6 - 0.3)^2/2 - (0.5 - 0.3)^2/2] = 2.0125, and (1 - 0.5) 2 + 0.5 [(0.36)^2/2 -
    # (0.56)^2/2] = 0.954
    assert by_hand("slm")[0].run.multiplier == pytest.approx(2.0125)
    assert by_hand("slm-damped")[0].run.multiplier == pytest.approx(0.954)


@pytest.mark.parametrize("dual", ["ascent", "damped"])
def test_multiplier_of_slm_stays_nonnegative(dual: str) -> None:
    optimizer, _, _ = start(
        SLM, vector(0.0), vector(0.0), delta=10.0, lambda0=0.01, tau=0.1, gamma=0.1, dual=dual
    )
    problem = BilevelProblem(
        lambda x, y: ((x - 1) ** 2 + y**2).sum(), lambda x, y: ((y - x) ** 2).sum()
    )
    for _ in range(3):
        optimizer.step(problem=problem)
        assert optimizer.run.multiplier == 0.0


@pytest.mark.parametrize(
    ("name", "upper", "lower"),
    [
        ("meha", (0.15, 1.0), (0.15, 1.0)),  # (x+, y)
        ("pngbio", (0.1, 1.0), (0.1, 1.0)),  # (x+, y)
        ("pngbio-joint", (0.0, 1.0), (0.0, 1.0)),  # (x, y)
        ("vpbgd", (0.0, 1.0), (0.0, 1.0)),  # (x, y)
        ("bome", (0.0, 1.0), (0.0, 1.0)),  # (x, y)
        ("f2sa", (0.0, 1.0), (0.0, 0.8)),  # f before the last step of y, g after it
        ("slm", (0.0, 1.0), (0.3, 0.6)),  # f at (x, y), g at (x+, y+)
    ],
)
def test_record_holds_the_values_where_they_were_last_evaluated(
    name: str, upper: tuple[float, float], lower: tuple[float, float]
) -> None:
    info = by_hand(name)[3]
    assert info.upper == pytest.approx((upper[0] - 2) ** 2 / 2 + (upper[1] - 1) ** 2 / 2)
    assert info.lower == pytest.approx((lower[1] - lower[0]) ** 2 / 2)


@pytest.mark.parametrize(
    ("name", "multiplier"),
    [("vpbgd", 2.0), ("bome", 1.2), ("bome-slack", 0.0), ("f2sa", 2.0), ("slm", 2.0)],
)
def test_multiplier_is_logged_and_left_out_of_the_certificate(name: str, multiplier: float) -> None:
    optimizer, _, _, info = by_hand(name)
    assert isinstance(info, StepInfo)
    assert info.metrics()["bilevel/multiplier"] == pytest.approx(multiplier, rel=1e-7)
    # The certificate's multiplier is one of the Moreau gap, these are of the value-function gap.
    assert optimizer.multiplier is None
    assert optimizer.envelope is None


# --- Many steps by NumPy ---
# f = |x - a|^2/2 + |y - b|^2/2 + x'My, g = y'Ay/2 - y'Bx + 3 |x|^2/2, boxes for x and y.
A = np.array([[1.5, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 1.1]])
B = np.array([[1.0, -0.5], [0.4, 0.9], [-0.7, 0.2]])
M = np.array([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]])
a, b = np.array([1.2, -0.9]), np.array([-0.8, 1.1, 0.6])
X0, Y0 = np.array([0.4, -0.2]), np.array([0.2, -0.05, -0.05])
# The narrow boxes are touched by x, by y and by the inner variable; the wide ones never.
BOXES = {"wide": ((-100.0, 100.0), (-100.0, 100.0)), "narrow": ((-0.25, 0.7), (-0.15, 0.25))}


@dataclass
class Quadratic:
    x_bounds: tuple[float, float]
    y_bounds: tuple[float, float]

    def fx(self, x: Array, y: Array) -> Array:
        return x - a + M @ y

    def fy(self, x: Array, y: Array) -> Array:
        return y - b + M.T @ x

    def g(self, x: Array, y: Array) -> float:
        return float(y @ A @ y / 2 - y @ B @ x + 3 * x @ x / 2)

    def gx(self, x: Array, y: Array) -> Array:
        return 3 * x - B.T @ y

    def gy(self, x: Array, y: Array) -> Array:
        return A @ y - B @ x

    def px(self, v: Array) -> Array:
        return np.clip(v, *self.x_bounds)

    def py(self, v: Array) -> Array:
        return np.clip(v, *self.y_bounds)

    def torch(
        self, has_x: bool = True, encoded: bool = False, count: dict[str, int] | None = None
    ) -> BilevelProblem:
        tA, tB, tM, ta, tb = (torch.from_numpy(v) for v in (A, B, M, a, b))
        count = {} if count is None else count

        def f(x: Tensor, y: Tensor) -> Tensor:
            own = ((y - tb.to(y)) ** 2).sum() / 2
            return own + ((x - ta.to(y)) ** 2).sum() / 2 + x @ tM.to(y) @ y if has_x else own

        def encode(x: Tensor) -> tuple[Tensor, Tensor]:
            count["features"] = count.get("features", 0) + 1
            return tB.to(x) @ x, 3 * (x @ x) / 2

        def g(part: Any, y: Tensor) -> Tensor:
            count["g"] = count.get("g", 0) + 1
            Bx, own = part if encoded else (tB.to(y) @ part, 3 * (part @ part) / 2)
            return y @ tA.to(y) @ y / 2 - y @ Bx + own

        return BilevelProblem(
            f, g, Box(*self.x_bounds), Box(*self.y_bounds), features=encode if encoded else None
        )


Iterates = list[tuple[Array, Array, Array]]
Pair = tuple[float, float]


def power(pair: Pair, k: int) -> float:
    return pair[0] * (k + 1.0) ** pair[1]


def numpy_meha(
    p: Quadratic,
    x: Array,
    y: Array,
    steps: int,
    *,
    alpha: Pair,
    beta: Pair,
    eta: Pair,
    gamma: float,
    c: Pair,
    normal: str = "",
) -> Iterates:
    theta, out = y, []
    for k in range(steps):
        theta = p.py(theta - power(eta, k) * (p.gy(x, theta) + (theta - y) / gamma))
        dx = p.fx(x, y) / power(c, k) + p.gx(x, y) - p.gx(x, theta)
        if normal == "joint":
            dy = p.fy(x, y) / power(c, k) + p.gy(x, y) - (y - theta) / gamma
            size = np.sqrt(dx @ dx + dy @ dy)
            dx, dy = dx / size, dy / size
            x = p.px(x - power(alpha, k) * dx)
        else:
            x = p.px(x - power(alpha, k) * (dx / np.linalg.norm(dx) if normal else dx))
            dy = p.fy(x, y) / power(c, k) + p.gy(x, y) - (y - theta) / gamma
            dy = dy / np.linalg.norm(dy) if normal else dy
        y = p.py(y - power(beta, k) * dy)
        out.append((x, y, theta))
    return out


def numpy_pngbio(
    p: Quadratic, x: Array, y: Array, steps: int, *, norms: str = "separate", **settings: Any
) -> Iterates:
    return numpy_meha(p, x, y, steps, normal=norms, **settings)


def numpy_slm(
    p: Quadratic,
    x: Array,
    y: Array,
    steps: int,
    *,
    eta: float,
    alpha: float,
    gamma: float,
    tau: float,
    T: int,
    delta: float,
    lambda0: float = 0.0,
    restart: bool = True,
    dual: str = "ascent",
) -> Iterates:
    weight, z, out = lambda0, y, []
    for _ in range(steps):
        z = y if restart else z
        for _ in range(T):
            z = p.py(z - (gamma if dual == "ascent" else alpha) * p.gy(x, z))
        dx = p.fx(x, y) + weight * (p.gx(x, y) - p.gx(x, z))
        dy = p.fy(x, y) + weight * p.gy(x, y)
        x, y = p.px(x - eta * dx), p.py(y - alpha * dy)
        slack = p.g(x, y) - p.g(x, z) - delta
        weight = max(
            0.0, weight + tau * slack if dual == "ascent" else (1 - tau) * weight + gamma * slack
        )
        out.append((x, y, z))
    return out


def numpy_f2sa(
    p: Quadratic,
    x: Array,
    y: Array,
    steps: int,
    *,
    alpha: Pair,
    gamma: Pair,
    lambda0: float,
    T: int,
    xi: float = 1.0,
    multiplier: str = "growing",
) -> Iterates:
    z, out = y, []
    for k in range(steps):
        step = power(alpha, k)
        weight = lambda0 * alpha[0] / step if multiplier == "growing" else lambda0
        for _ in range(T):
            z = p.py(z - power(gamma, k) * p.gy(x, z))
            y = p.py(y - step * (p.fy(x, y) + weight * p.gy(x, y)))
        x = p.px(x - xi * step * (p.fx(x, y) + weight * (p.gx(x, y) - p.gx(x, z))))
        out.append((x, y, z))
    return out


def numpy_vpbgd(
    p: Quadratic,
    x: Array,
    y: Array,
    steps: int,
    *,
    alpha: float,
    beta: float,
    gamma: Pair,
    T: int,
    restart: bool = True,
) -> Iterates:
    w, out = y, []
    for k in range(steps):
        w = y if restart else w
        for _ in range(T):
            w = p.py(w - beta * p.gy(x, w))
        dx = p.fx(x, y) + power(gamma, k) * (p.gx(x, y) - p.gx(x, w))
        dy = p.fy(x, y) + power(gamma, k) * p.gy(x, y)
        x, y = p.px(x - alpha * dx), p.py(y - alpha * dy)
        out.append((x, y, w))
    return out


def numpy_bome(
    p: Quadratic,
    x: Array,
    y: Array,
    steps: int,
    *,
    xi: float,
    alpha: float,
    eta: float,
    T: int,
    barrier: str = "gradient",
) -> Iterates:
    out = []
    for _ in range(steps):
        z = y
        for _ in range(T):
            z = p.py(z - alpha * p.gy(x, z))
        q = np.concatenate((p.gx(x, y) - p.gx(x, z), p.gy(x, y)))
        f = np.concatenate((p.fx(x, y), p.fy(x, y)))
        phi = eta * float(q @ q) if barrier == "gradient" else eta * (p.g(x, y) - p.g(x, z))
        d = f + max(0.0, (phi - float(f @ q)) / (float(q @ q) + 1e-8)) * q
        x, y = p.px(x - xi * d[:2]), p.py(y - xi * d[2:])
        out.append((x, y, z))
    return out


@dataclass(frozen=True)
class Case:
    solver: Solver
    numpy: Callable[..., Iterates]
    settings: dict[str, Any]  # a pair is a schedule
    passes: int  # of an iteration, as the class's docstring states them
    forwards: int  # of g, in an iteration
    kept: str | None = None  # the inner variable in the state
    skips: bool = False  # one pass less where f does not depend on x

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            name: Power(*value) if isinstance(value, tuple) else value
            for name, value in self.settings.items()
        }

    def start(self, dtype: torch.dtype = torch.float64) -> tuple[BilevelOptimizer, Tensor, Tensor]:
        return start(
            self.solver,
            torch.from_numpy(X0).to(dtype),
            torch.from_numpy(Y0).to(dtype),
            **self.arguments,
        )


_meha = {
    "alpha": (0.3, -0.4),
    "beta": (0.5, -0.1),
    "eta": (0.6, -0.05),
    "gamma": 0.7,
    "c": (0.3, 0.2),
}
_pngbio = {
    "alpha": (0.2, -0.4),
    "beta": (0.3, -0.3),
    "eta": (0.6, -0.05),
    "gamma": 0.7,
    "c": (0.3, 0.2),
}
_slm = {"eta": 0.2, "alpha": 0.15, "gamma": 0.4, "tau": 0.3, "T": 3, "delta": 1e-2}
_f2sa = {"alpha": (0.3, -0.3), "gamma": (0.5, -0.1), "lambda0": 0.4, "T": 2, "xi": 0.7}
_vpbgd = {"alpha": 0.15, "beta": 0.5, "gamma": (0.3, 0.3), "T": 2}
_bome = {"xi": 0.25, "alpha": 0.5, "eta": 0.6, "T": 2}
CASES = {
    "meha": Case(MEHA, numpy_meha, _meha, 6, 4, "theta", skips=True),
    "pngbio": Case(PNGBiO, numpy_pngbio, _pngbio, 6, 4, "theta", skips=True),
    "pngbio-joint": Case(PNGBiO, numpy_pngbio, {**_pngbio, "norms": "joint"}, 4, 3, "theta"),
    "slm": Case(SLM, numpy_slm, _slm, 3 + 3, 3 + 2 + 2),
    "slm-keep": Case(
        SLM, numpy_slm, {**_slm, "restart": False, "lambda0": 0.2}, 3 + 3, 3 + 2 + 2, "z"
    ),
    "slm-damped": Case(
        SLM, numpy_slm, {**_slm, "dual": "damped", "lambda0": 0.5}, 3 + 3, 3 + 2 + 2
    ),
    "f2sa": Case(F2SA, numpy_f2sa, _f2sa, 3 * 2 + 3, 2 * 2 + 2, "z", skips=True),
    "f2sa-constant": Case(
        F2SA, numpy_f2sa, {**_f2sa, "multiplier": "constant"}, 3 * 2 + 3, 2 * 2 + 2, "z", skips=True
    ),
    "vpbgd": Case(VPBGD, numpy_vpbgd, _vpbgd, 2 + 3, 2 + 2),
    "vpbgd-keep": Case(VPBGD, numpy_vpbgd, {**_vpbgd, "restart": False}, 2 + 3, 2 + 2, "w"),
    "bome": Case(BOME, numpy_bome, _bome, 2 + 3, 2 + 2),
    "bome-value": Case(BOME, numpy_bome, {**_bome, "barrier": "value", "eta": 1.5}, 2 + 3, 2 + 2),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def touches(v: Array, bounds: tuple[float, float]) -> bool:
    return bool(np.any((v == bounds[0]) | (v == bounds[1])))


@pytest.mark.parametrize("box", BOXES)
@each_case
def test_steps_are_those_of_the_formulas(case: Case, box: str) -> None:
    quadratic = Quadratic(*BOXES[box])
    optimizer, x, y = case.start()
    problem, expected = quadratic.torch(), case.numpy(quadratic, X0, Y0, 15, **case.settings)
    for x_k, y_k, inner in expected:
        optimizer.step(problem=problem)
        np.testing.assert_allclose(x.detach(), x_k, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(y.detach(), y_k, rtol=1e-10, atol=1e-13)
        if case.kept is not None:
            np.testing.assert_allclose(
                getattr(optimizer.run, case.kept), inner, rtol=1e-10, atol=1e-13
            )
    for index, bounds in ((0, BOXES[box][0]), (1, BOXES[box][1]), (2, BOXES[box][1])):
        assert any(touches(point[index], bounds) for point in expected) == (box == "narrow")


@pytest.mark.parametrize(
    "pair",
    [
        ("slm", "slm-keep"),
        ("slm", "slm-damped"),
        ("f2sa", "f2sa-constant"),
        ("vpbgd", "vpbgd-keep"),
    ],
)
def test_switches_make_a_difference(pair: tuple[str, str]) -> None:
    quadratic = Quadratic(*BOXES["wide"])
    ends = [CASES[name].numpy(quadratic, X0, Y0, 5, **CASES[name].settings)[-1][0] for name in pair]
    assert np.abs(ends[0] - ends[1]).max() > 1e-4


# --- What an iteration costs ---
@each_case
def test_passes_are_the_stated_ones(case: Case) -> None:
    count: dict[str, int] = {}
    problem = Quadratic(*BOXES["wide"]).torch(count=count)
    optimizer, _, _ = case.start()
    for k in range(1, 4):
        info = optimizer.step(problem=problem)
        assert info.calls.passes == case.passes
        # Values without a gradient are no passes: SLM's two are seen here.
        assert count["g"] == k * case.forwards
    assert optimizer.progress.inner_iterations == 3 * case.settings.get("T", 1)


@each_case
def test_no_pass_for_an_upper_level_without_x(case: Case) -> None:
    problem = Quadratic(*BOXES["wide"]).torch(has_x=False)
    optimizer, _, _ = case.start()
    passes = [optimizer.step(problem=problem).calls.passes for _ in range(3)]
    assert passes[1:] == [case.passes - case.skips] * 2


@each_case
def test_features_are_computed_once_per_x(case: Case) -> None:
    count: dict[str, int] = {}
    quadratic = Quadratic(*BOXES["narrow"])
    plain, encoded = quadratic.torch(), quadratic.torch(encoded=True, count=count)
    (one, x, y), (other, u, v) = case.start(), case.start()
    for _ in range(5):
        one.step(problem=plain)
        other.step(problem=encoded)
    # Five iterations see five points x, and those that move y or measure the gap at the new x a
    # sixth.
    assert count["features"] == (
        6 if case.solver is SLM or (case.skips and case.solver is not F2SA) else 5
    )
    torch.testing.assert_close(u, x)
    torch.testing.assert_close(v, y)


@each_case
def test_point_or_problem_that_changed_is_evaluated_anew(case: Case) -> None:
    problem = Quadratic(*BOXES["wide"]).torch(encoded=True)
    other = Quadratic(*BOXES["narrow"]).torch(encoded=True)
    optimizer, x, y = case.start()
    optimizer.step(problem=problem)
    for next_problem, shift in ((problem, 0.1), (other, 0.0)):
        with torch.no_grad():
            x.copy_((x + shift).clamp(*BOXES["narrow"][0]))
            y.copy_(y.clamp(*BOXES["narrow"][1]))
        fresh, u, v = start(case.solver, x.detach(), y.detach(), **case.arguments)
        fresh.load_state_dict(optimizer.state_dict())
        optimizer.step(problem=next_problem)
        fresh.step(problem=next_problem)
        assert torch.equal(u, x)
        assert torch.equal(v, y)


# --- Figures ---
def from_yaml(name: str) -> SolverCallable:
    """The solver of a published configuration, made as LightningCLI makes it."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--solver", type=SolverCallable)
    config = yaml.safe_load((SYNTHETIC / f"{name}.yaml").read_text())
    parsed = parser.parse_object({"solver": config["model"]["init_args"]["solver"]})
    # jsonargparse renamed `instantiate_classes` in 4.49.
    instantiate: Callable[[Any], Any] = (
        getattr(parser, "instantiate", None) or parser.instantiate_classes
    )
    solver: SolverCallable = instantiate(parsed).solver
    return solver


def run_synthetic(name: str, iterations: int) -> tuple[float, float, Tensor, Tensor]:
    n, lower = 1000, -math.pi / 2 + 2 * math.pi
    x_star = ((1 - n) * 2 + n * lower) / (1 + n)
    y_star = lower + 2 - x_star
    problem = BilevelProblem(
        lambda x, y: ((x - 2) ** 2).sum() + ((y - 4) ** 2).sum(),
        lambda x, y: torch.sin(x + y - 2).sum(),
        Box(-100, 100),
        Box(-100, 100),
    )
    optimizer, x, y = start(from_yaml(name), vector(-6.0), torch.zeros(n, dtype=torch.float64))
    for _ in range(iterations):
        optimizer.step(problem=problem)
    x, y = x.detach(), y.detach()
    return (
        abs(x.item() - x_star) / x_star,
        float((y - y_star).norm()) / (math.sqrt(n) * y_star),
        x,
        y,
    )


# The errors in x and y that an independent implementation reached with the paper's settings. In the
# basin of the solution the x error is below 0.1; 4.6 and 2.1 are other basins, and 1.1 is the lower
# level's maximum.
@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "iterations", "x_error", "y_error"),
    [
        ("pngbio", 908, 5.5e-2, 1.9e-4),
        ("slm", 1563, 5.1e-2, 3.2e-5),
        ("f2sa", 991, 2.4e-2, 1.7e-5),
        ("vpbgd", 1268, 5.2e-2, 2.7e-3),
        ("bome", 1568, 5.0e-3, 3.3e-3),
    ],
)
def test_synthetic_problem(name: str, iterations: int, x_error: float, y_error: float) -> None:
    x, y, _, _ = run_synthetic(name, iterations)
    assert x_error / 3 < x < 3 * x_error
    assert y_error / 10 < y < 10 * y_error


def test_meha_is_stable_on_the_synthetic_problem() -> None:
    # The run is chaotic (a start moved by 1e-9 may end in another basin): where it ends is no test.
    _, _, x, y = run_synthetic("meha", 300)
    assert -10 < x.item() < 10
    assert y.abs().max() < 10
    assert y.std() < 1e-9  # all coordinates are alike, and stay so


KNOWN: dict[str, tuple[Solver, dict[str, Any]]] = {
    "meha": (MEHA, {"alpha": 0.3, "beta": 0.3, "eta": 0.3, "gamma": 1.0, "c": Power(5.0, 0.5)}),
    "pngbio": (
        PNGBiO,
        {
            "alpha": Power(0.5, -1.0),
            "beta": Power(0.5, -1.0),
            "eta": 0.3,
            "gamma": 1.0,
            "c": Power(5.0, 0.5),
        },
    ),
    "pngbio-joint": (
        PNGBiO,
        {
            "alpha": Power(0.5, -1.0),
            "beta": Power(0.5, -1.0),
            "eta": 0.3,
            "gamma": 1.0,
            "c": Power(5.0, 0.5),
            "norms": "joint",
        },
    ),
    "slm": (SLM, {"eta": 0.02, "alpha": 0.02, "gamma": 0.5, "tau": 1.0, "T": 10, "lambda0": 20.0}),
    "f2sa": (F2SA, {"alpha": Power(0.1, -1 / 3), "gamma": 0.5, "lambda0": 5.0, "T": 3, "xi": 0.5}),
    "vpbgd": (VPBGD, {"alpha": 0.01, "beta": 0.5, "gamma": 50.0, "T": 5}),
    "bome": (BOME, {"xi": 0.02, "alpha": 0.5, "eta": 0.5, "T": 5}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_solution(name: str) -> None:
    # min (x - 1)^2 + y^2 s.t. y = argmin (y - x)^2/2: x = y = 1/2. A penalty of p leaves a bias of
    # about 1/(2 p) in each, and the relaxation of SLM one of sqrt(delta/2) = 0.022.
    solver, arguments = KNOWN[name]
    problem = BilevelProblem(
        lambda x, y: ((x - 1) ** 2 + y**2).sum(),
        lambda x, y: ((y - x) ** 2).sum() / 2,
        Box(-2, 2),
        Box(-2, 2),
    )
    optimizer, x, y = start(solver, vector(-1.0), vector(1.5), **arguments)
    for _ in range(400):
        optimizer.step(problem=problem)
    assert x.item() == pytest.approx(0.5, abs=4e-2)
    assert y.item() == pytest.approx(0.5, abs=4e-2)


# --- Arguments ---
SOLVERS: list[Solver] = [MEHA, PNGBiO, SLM, F2SA, VPBGD, BOME]
PUBLISHED = {"meha": MEHA, "pngbio": PNGBiO, "slm": SLM, "f2sa": F2SA, "vpbgd": VPBGD, "bome": BOME}


@pytest.mark.parametrize(
    ("solver", "arguments", "message"),
    [
        (
            MEHA,
            {"alpha": 0.0},
            r"`MEHA\(alpha=0.0\)` must be positive and finite, a `Power`, or the pair",
        ),
        (
            MEHA,
            {"alpha": [0.0, 0.0]},
            r"`MEHA\(alpha=\[0.0, 0.0\]\)` must be positive and finite, a `Power`, or the pair",
        ),
        (
            MEHA,
            {"alpha": [0.1, "a"]},
            r"`MEHA\(alpha=\[0.1, 'a'\]\)` must be positive and finite, a `Power`, or the pair",
        ),
        (
            MEHA,
            {"alpha": [0.1]},
            r"`MEHA\(alpha=\[0.1\]\)` must be positive and finite, a `Power`, or the pair",
        ),
        (
            MEHA,
            {"alpha": "ab"},
            r"`MEHA\(alpha='ab'\)` must be positive and finite, a `Power`, or the pair",
        ),
        (MEHA, {"gamma": math.inf}, r"`MEHA\(gamma=inf\)` must be positive and finite."),
        (
            MEHA,
            {"c": "large"},
            r"`MEHA\(c='large'\)` must be positive and finite, a `Power`, or the pair",
        ),
        (
            PNGBiO,
            {"beta": math.nan},
            r"`PNGBiO\(beta=nan\)` must be positive and finite, a `Power`, or the pair",
        ),
        (PNGBiO, {"norms": "both"}, r"`PNGBiO\(norms='both'\)` must be 'separate' or 'joint'."),
        (SLM, {"tau": -1e-8}, r"`SLM\(tau=-1e-08\)` must be positive and finite."),
        (SLM, {"delta": -1.0}, r"`SLM\(delta=-1.0\)` must be nonnegative and finite."),
        (SLM, {"lambda0": -1.0}, r"`SLM\(lambda0=-1.0\)` must be nonnegative and finite."),
        (SLM, {"T": 0}, r"`SLM\(T=0\)` must be a positive whole number."),
        (SLM, {"dual": "descent"}, r"`SLM\(dual='descent'\)` must be 'ascent' or 'damped'."),
        (
            SLM,
            {"dual": "damped", "tau": 2.0},
            r"`SLM\(tau=2.0, dual='damped'\)` must be at most 1",
        ),
        (F2SA, {"lambda0": 0.0}, r"`F2SA\(lambda0=0.0\)` must be positive and finite."),
        (F2SA, {"xi": True}, r"`F2SA\(xi=True\)` must be positive and finite."),
        (F2SA, {"T": 1.5}, r"`F2SA\(T=1.5\)` must be a positive whole number."),
        (
            F2SA,
            {"multiplier": "linear"},
            r"`F2SA\(multiplier='linear'\)` must be 'growing' or 'constant'.",
        ),
        (
            VPBGD,
            {"gamma": -1.0},
            r"`VPBGD\(gamma=-1.0\)` must be positive and finite, a `Power`, or the pair",
        ),
        (BOME, {"eta": 0}, r"`BOME\(eta=0\)` must be positive and finite."),
        (BOME, {"barrier": "norm"}, r"`BOME\(barrier='norm'\)` must be 'gradient' or 'value'."),
    ],
)
def test_bad_argument_is_refused(solver: Solver, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(solver, vector(0.0), vector(0.0), **arguments)


@pytest.mark.parametrize("pair", [[0.02, -0.5], (0.02, -0.5)])
def test_a_schedule_may_be_given_as_it_is_stored(pair: Any) -> None:
    given, meant = (
        start(MEHA, vector(0.0), vector(0.0), alpha=alpha)[0] for alpha in (pair, Power(0.02, -0.5))
    )
    assert given.constants == meant.constants
    assert given.hyper_parameters["alpha"] == (0.02, -0.5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_defaults_run(solver: Solver) -> None:
    problem = BilevelProblem(
        lambda x, y: ((x - 1) ** 2 + y**2).sum(), lambda x, y: ((y - x) ** 2).sum() / 2
    )
    optimizer, x, _ = start(solver, vector(0.0), vector(0.0))
    upper = [optimizer.step(problem=problem).upper for _ in range(20)]
    assert upper[-1] < upper[0]
    assert x.item() > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_differ_from_ivsp_in_the_solver_only(name: str) -> None:
    config, ivsp = (yaml.safe_load((SYNTHETIC / f"{n}.yaml").read_text()) for n in (name, "ivsp"))
    optimizer, _, _ = start(from_yaml(name), vector(0.0), vector(0.0))
    assert type(optimizer) is PUBLISHED[name]
    for each in (config, ivsp):
        del each["model"]["init_args"]["solver"]
    assert config == ivsp


# --- Schedules ---
def test_power_schedule() -> None:
    assert [Power(0.7, -0.5).at(k) for k in (0, 3, 99)] == pytest.approx([0.7, 0.35, 0.07])
    assert Power(3.0).at(10) == 3.0
    assert [Power(0.2, 0.25).at(k) for k in (0, 15)] == pytest.approx([0.2, 0.4])


def test_numbers_are_taken_as_they_are_meant() -> None:
    optimizer, _, _ = start(VPBGD, vector(0.0), vector(0.0), gamma=2, T=3.0, alpha=1)
    expected = {"alpha": 1, "beta": 0.01, "gamma": (2.0, 0.0), "T": 3, "restart": True}
    assert optimizer.hyper_parameters == expected
    assert isinstance(optimizer.hyper_parameters["T"], int)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("meha", 0.3, 0.3 * 2**-0.4),
        ("pngbio", 0.2, 0.2 * 2**-0.4),
        ("f2sa", 0.7 * 0.3, 0.7 * 0.3 * 2**-0.3),
        ("slm", 0.2, 0.2),
        ("vpbgd", 0.15, 0.15),
        ("bome", 0.25, 0.25),
    ],
)
def test_learning_rate_is_the_step_of_x(name: str, first: float, second: float) -> None:
    optimizer, _, _ = CASES[name].start()
    problem = Quadratic(*BOXES["wide"]).torch()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(first)
    for expected in (first, second):
        optimizer.step(problem=problem)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected] * 2)


# --- State ---
def saved(optimizer: BilevelOptimizer) -> dict[str, Any]:
    """The state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@each_case
def test_resumed_run_is_bitwise_the_same_with_every_switch_and_an_encoder(
    case: Case, dtype: torch.dtype
) -> None:
    problem = Quadratic(*BOXES["narrow"]).torch(encoded=True)
    straight, x, y = case.start(dtype)
    for _ in range(4):
        straight.step(problem=problem)
    state = saved(straight)
    # Other arguments: those of the checkpoint count.
    resumed, u, v = start(case.solver, x.detach(), y.detach())
    resumed.load_state_dict(state)
    for _ in range(6):
        one, other = straight.step(problem=problem), resumed.step(problem=problem)
        assert u.dtype == x.dtype == dtype
        assert torch.equal(u, x)
        assert torch.equal(v, y)
        assert (one.upper, one.lower, one.step, one.iteration) == (
            other.upper,
            other.lower,
            other.step,
            other.iteration,
        )


@each_case
def test_what_has_no_part_in_the_method_is_not_kept(case: Case) -> None:
    """A method that restarts its inner variable has none in its state."""
    optimizer, _, _ = case.start()
    optimizer.step(problem=Quadratic(*BOXES["narrow"]).torch())
    kept = {name for name, value in optimizer.run.plain().items() if isinstance(value, Tensor)}
    assert kept == ({case.kept} if case.kept else set())
