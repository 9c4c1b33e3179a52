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
from lightning_bilevel.core.stage import Stage
from lightning_bilevel.solvers.ivsp.constants import Constants
from lightning_bilevel.solvers.ivsp.growth import Noise, corrected, noise_of
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


def test_the_noise_is_that_of_the_formulas() -> None:
    x = torch.tensor([0.1, -0.2, 0.0, 0.3], dtype=torch.float64)
    y, z = torch.tensor([[0.6, 0.1], [0.4, 0.2]], dtype=torch.float64)
    # The four parts together are 80 % of the upper and 20 % of the lower level's data.
    stage = Stage(20, 100, 0.8 / 4, 0.2 / 4)
    residual = 0.05
    noise = noise_of([part(j, stage) for j in range(4)], (x, y, z), ENVELOPE, MERIT, residual, 0.3)

    weight = MERIT.phi.slope(residual, MERIT.mu)
    R = [
        x[j].exp() * ((y - B[j]).square().sum() - (z - B[j]).square().sum()) / 2
        - (y - z).square().sum() / (2 * ENVELOPE.rho)
        - ENVELOPE.delta
        for j in range(4)
    ]
    grad_f = MERIT.gamma * (y - A)
    grad_R = weight * (x.exp().unsqueeze(1) * (y - B) - (y - z) / ENVELOPE.rho)
    errors = math.sqrt(0.2) * grad_f + math.sqrt(0.8) * grad_R
    mean_R = sum(R) / 4
    se_R = math.sqrt(0.8 * float(sum((r - mean_R) ** 2 for r in R)) / (4 * 3))
    se_G = math.sqrt(float((errors - errors.mean(0)).square().sum()) / (4 * 3))
    assert noise.value == pytest.approx(se_R)
    assert noise.gradient == pytest.approx(se_G)
    assert noise.smoothing == MERIT.mu
    # x is no part of the mapping: each of its coordinates belongs to one part.
    assert noise.mapping == pytest.approx(float((grad_f + grad_R).mean(0).norm()))


def test_a_sample_of_all_data_has_no_noise() -> None:
    x = torch.zeros(4, dtype=torch.float64)
    y, z = torch.tensor([[0.6, 0.1], [0.4, 0.2]], dtype=torch.float64)
    parts = [part(j, Stage(100, 100, 1 / 4, 1 / 4)) for j in range(4)]
    noise = noise_of(parts, (x, y, z), ENVELOPE, MERIT, 0.05, 0.3)
    assert noise.value == noise.gradient == 0.0
    assert noise.mapping > 0.1


@pytest.mark.parametrize(
    ("noise", "before", "too_large"),
    [
        (Noise(value=0.01, gradient=0.1, smoothing=0.1, mapping=1.0), 2.0, False),
        # R is as noisy as the smoothing is wide.
        (Noise(value=0.03, gradient=0.1, smoothing=0.1, mapping=1.0), None, True),
        # Solved as far as the noise allows.
        (Noise(value=0.01, gradient=0.2, smoothing=0.1, mapping=0.1), 0.3, True),
        # One look cannot tell it from a saddle, and a mapping that grows is one.
        (Noise(value=0.01, gradient=0.2, smoothing=0.1, mapping=0.1), None, False),
        (Noise(value=0.01, gradient=0.2, smoothing=0.1, mapping=0.1), 0.05, False),
    ],
)
def test_the_rule(noise: Noise, before: float | None, too_large: bool) -> None:
    assert noise.is_too_large(before) is too_large


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
