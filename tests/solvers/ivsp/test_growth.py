"""When a sample is too small for IVSP: the noise by hand, the rule, and what a growth changes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from helpers import PLAIN, groups
from torch import Tensor

from lightning_bilevel import IVSP, BilevelProblem, Envelope
from lightning_bilevel.core.passes import Calls
from lightning_bilevel.core.stage import Stage
from lightning_bilevel.core.unseen import Unseen
from lightning_bilevel.solvers.ivsp.constants import Constants
from lightning_bilevel.solvers.ivsp.growth import Noise, carries_over, corrected, noise_of
from lightning_bilevel.solvers.ivsp.penalty import smoothing_function
from lightning_bilevel.solvers.ivsp.search import Merit

ENVELOPE = Envelope(rho=0.5, sigma=0.0, delta=1e-3)
MERIT = Merit(0.7, 0.2, smoothing_function("huber"))
A = torch.tensor([[1.0, 0.0], [0.5, 2.0], [-1.0, 1.0], [0.2, 0.3]], dtype=torch.float64)
B = torch.tensor([[0.0, 1.0], [1.5, -1.0], [0.4, 0.4], [2.0, 0.0]], dtype=torch.float64)


def part(j: int, stage: Stage | None = None) -> BilevelProblem:
    """f = |y - a_j|^2/2 and g = exp(x_j) |y - b_j|^2/2: x_j belongs to this part alone."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (y - A[j]).square().sum()

    def g(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * x[j].exp() * (y - B[j]).square().sum()

    problem = BilevelProblem(f, g)
    problem.stage = stage
    return problem


X = torch.tensor([0.1, -0.2, 0.0, 0.3], dtype=torch.float64)
Y, Z = torch.tensor([[0.6, 0.1], [0.4, 0.2]], dtype=torch.float64)


def residual_on(j: int) -> float:
    """R on part j, by hand."""
    gap = X[j].exp() * ((Y - B[j]).square().sum() - (Z - B[j]).square().sum()) / 2
    return float(gap - (Y - Z).square().sum() / (2 * ENVELOPE.rho) - ENVELOPE.delta)


def test_the_noise_is_that_of_the_formulas() -> None:
    # The four parts together are 80 % of the upper and 20 % of the lower level's data.
    stage = Stage(20, 100, 0.8 / 4, 0.2 / 4)
    residual = 0.05
    parts = [part(j, stage) for j in range(4)]
    noise = noise_of(parts, (X, Y, Z), ENVELOPE, MERIT, residual, 0.3, None)

    weight = MERIT.phi.slope(residual, MERIT.mu)
    R = [residual_on(j) for j in range(4)]
    grad_f = MERIT.gamma * (Y - A)
    curvature = X.exp().unsqueeze(1)
    # The gradient of g at y less that at z, of the same samples.
    paired = weight * curvature * (Y - Z)
    errors = math.sqrt(0.2) * grad_f + math.sqrt(0.8) * paired
    se_R = math.sqrt(0.8 * sum((r - sum(R) / 4) ** 2 for r in R) / (4 * 3))
    se_G = math.sqrt(float((errors - errors.mean(0)).square().sum()) / (4 * 3))
    off = [abs(MERIT.phi.slope(residual + s * se_R, MERIT.mu) - weight) for s in (-1, 1)]
    assert noise.weight == pytest.approx(max(off))
    assert noise.gradient == pytest.approx(se_G)
    # x is no part of the mapping: each of its coordinates belongs to one part.
    grad_R = weight * (curvature * (Y - B) - (Y - Z) / ENVELOPE.rho)
    assert noise.mapping == pytest.approx(float((grad_f + grad_R).mean(0).norm()))


def test_unseen_samples_tell_what_R_weighs_on_all_data() -> None:
    # Two equal parts have no spread, and are a quarter of the data.
    parts = [part(0, Stage(1, 4, 0.125, 0.125)) for _ in range(2)]
    residual = residual_on(0)
    unseen = part(1, Stage(1, 4, 0.5, 0.5))

    def weight(other: BilevelProblem | None) -> float:
        return noise_of(parts, (X, Y, Z), ENVELOPE, MERIT, residual, 0.3, other).weight

    assert weight(None) == 0.0
    on_all = residual + 0.75 * (residual_on(1) - residual)
    slopes = [MERIT.phi.slope(r, MERIT.mu) for r in (on_all, residual)]
    off = abs(slopes[0] - slopes[1])
    assert off > 0.1
    assert weight(unseen) == pytest.approx(off)
    # Two values of g, and no gradient.
    assert (unseen.calls.values, unseen.calls.passes) == (2, 0)


def test_a_sample_of_all_data_has_no_noise() -> None:
    parts = [part(j, Stage(100, 100, 1 / 4, 1 / 4)) for j in range(4)]
    noise = noise_of(parts, (X, Y, Z), ENVELOPE, MERIT, 0.05, 0.3, None)
    assert noise.weight == noise.gradient == 0.0
    assert noise.mapping > 0.1


@pytest.mark.parametrize(
    ("noise", "before", "too_large"),
    [
        (Noise(weight=0.01, gradient=0.1, mapping=1.0), (2.0,), False),
        # R weighs another amount on all data.
        (Noise(weight=0.3, gradient=0.1, mapping=1.0), (), True),
        # Solved as far as the noise allows.
        (Noise(weight=0.01, gradient=0.2, mapping=0.1), (0.05, 0.3), True),
        # One look cannot tell it from a saddle, and a mapping that grows is one.
        (Noise(weight=0.01, gradient=0.2, mapping=0.1), (), False),
        (Noise(weight=0.01, gradient=0.2, mapping=0.1), (0.3, 0.05), False),
        # The smallest mapping is of ten looks ago, of nine, or of now.
        (Noise(weight=0.0, gradient=0.0, mapping=1.0), (0.5, *[1.0] * 9), True),
        (Noise(weight=0.0, gradient=0.0, mapping=1.0), (0.5, *[1.0] * 8), False),
        (Noise(weight=0.0, gradient=0.0, mapping=0.4), (0.5, *[1.0] * 9), False),
    ],
)
def test_the_rule(noise: Noise, before: tuple[float, ...], too_large: bool) -> None:
    assert noise.is_too_large(before) is too_large


@pytest.mark.parametrize(
    ("now", "carries"),
    [
        ((0.6, 1.0), True),  # all of the fall of 0.4 is seen outside
        ((0.6, 1.3), True),  # a quarter of it, and a bit
        ((0.6, 1.31), False),
        ((0.6, 1.5), False),
        ((1.1, 1.5), True),  # f has not fallen: nothing had to carry over
    ],
)
def test_a_gain_in_the_sample_must_be_seen_outside(now: tuple[float, float], carries: bool) -> None:
    assert carries_over((1.0, 1.4001), now, growth=4.0) is carries


def solver(**options: Any) -> IVSP:
    x = torch.zeros(4, dtype=torch.float64)
    y = torch.tensor([0.6, 0.1], dtype=torch.float64)
    constants = {**PLAIN, "rho": 0.5, "sigma": 0.0, **options}
    return IVSP(groups(x, y, (10.0, 1.0)), **constants)


def test_after_a_growth_the_point_is_evaluated_anew_and_smoothing_and_penalty_go_on() -> None:
    small, large = part(0, Stage(1, 2, 0.5, 0.5)), part(1, Stage(2, 2, 1.0, 1.0))
    method = solver()
    before = [method.step(problem=small) for _ in range(4)]
    assert before[-1].calls.upper == before[-1].trials  # type: ignore[attr-defined]
    assert method.proved is None
    assert "still on a sample of 1 samples" in method.unproved
    after = [method.step(problem=large) for _ in range(6)]
    # One more evaluation of f: the point is known on the small sample only.
    assert after[0].calls.upper == after[0].trials + 1  # type: ignore[attr-defined]
    assert [info.samples for info in before + after] == [1] * 4 + [2] * 6
    mu = [info.mu for info in before + after]  # type: ignore[attr-defined]
    assert mu == [PLAIN["mu0"] * (1 + k) ** (-1 / 3) for k in range(10)]
    kept = method.proved
    assert kept is not None
    # The last stage has six iterations, and the point is of its second half.
    assert 4 + 3 < kept.iteration <= 10
    assert kept.iterations == 10


def test_looks_are_counted_by_their_share() -> None:
    stage = Stage(20, 100, 0.2 / 4, 0.4 / 4)
    parts = [part(j, stage) for j in range(4)]
    method = solver()
    assert method.look(parts) is None  # nothing is known before the first step
    method.step(problem=part(0, Stage(20, 100, 0.2, 0.4)))
    passes = method.progress.passes
    assert method.look(parts) is True  # R is noisier than the smoothing of 0.01
    assert method.progress.passes - passes == pytest.approx(0.2 + 2 * 0.4)


@pytest.mark.parametrize("unit", [1.0, 2.0])
def test_unseen_samples_are_counted_and_compared_with_the_last_look(unit: float) -> None:
    parts = [part(0, Stage(1, 4, 0.125, 0.125)) for _ in range(2)]
    method = solver(c2=1e-9)
    method.param_groups[0]["unit"] = unit
    outside = part(0, Stage(1, 4, 0.3, 0.3))
    values = iter([5.0, 6.0])

    def unseen() -> Unseen:
        outside.calls = Calls()
        outside.upper(X, Y)
        return Unseen(outside, next(values), has_gap=True, growth=4.0)

    inside = part(0, Stage(1, 4, 0.25, 0.25))
    for answer in (False, True):  # f falls in the sample, and rises outside of it
        method.step(problem=inside)
        passes = method.progress.passes
        assert method.look(parts, unseen) is answer
        spent = 0.25 + 2 * 0.25 + 0.3
        assert method.progress.passes - passes == pytest.approx(spent, abs=0.31)
        assert method.progress.passes - passes >= spent - 1e-9
    # In a larger sample both values are others.
    method.step(problem=part(0, Stage(2, 4, 0.5, 0.5)))
    assert "values_looked_at" not in method.memory
    assert "mappings" not in method.memory


def constants(**changes: Any) -> Constants:
    x = torch.zeros(4, dtype=torch.float64)
    y = torch.tensor([0.6, 0.1], dtype=torch.float64)
    method = IVSP(groups(x, y))
    method.step(problem=part(0))
    return Constants.read({**method.param_groups[0], **changes})


@pytest.mark.parametrize(
    ("coupling", "factor"), [(0.8, 1.0), (0.05, 4.0), (0.2, 2.0), (40.0, 1.0), (0.0, 1.0)]
)
def test_the_unit_of_x_follows_its_coupling(coupling: float, factor: float) -> None:
    c = constants(L_xy=0.1, own_unit=8.0)
    changed, found = corrected(c, coupling)
    assert found == factor
    if coupling:
        assert changed == {"L_xy": pytest.approx(coupling / 8.0), "own_unit": 8.0 * factor}
    else:
        assert changed == {}


def test_own_constants_are_measured_again_on_a_larger_sample() -> None:
    x = torch.zeros(4, dtype=torch.float64)
    y = torch.tensor([0.6, 0.1], dtype=torch.float64)
    method = IVSP(groups(x, y))
    stages = partial(Stage, total=2, upper=1.0, lower=1.0)
    method.step(problem=part(0, stages(1)))
    first = method.constants
    method.step(problem=part(1, stages(2)))
    second = method.constants
    assert second["L_xy"] != first["L_xy"]
    assert all(second[name] == first[name] for name in ("mu0", "block", "gamma0", "zeta_bar"))
    method.step(problem=part(1, stages(2)))
    assert method.constants["L_xy"] == second["L_xy"]
