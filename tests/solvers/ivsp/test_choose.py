"""IVSP with nothing but delta: what it estimates, and that the units of f and g do not matter."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PLAIN, groups, point_of
from places import SYNTHETIC
from torch import Tensor

from benchmarks.outcomes import solve
from benchmarks.random_problems import draw
from lightning_bilevel import IVSP, BilevelProblem, Box, Simplex, certify
from lightning_bilevel.__main__ import main
from lightning_bilevel.core.curvature import coupling, lower_curvature, upper_curvature
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.vectors import Metric
from lightning_bilevel.solvers.ivsp.constants import PER_TASK, IVSPConstants

DOUBLE = torch.float64
CURVATURES = torch.tensor([0.1, 2.0, -0.5, 1.0], dtype=DOUBLE)


def quadratic(f_scale: float = 1.0, g_scale: float = 1.0) -> BilevelProblem:
    """g has the curvatures above in y, and its gradient in x changes by 3 per unit of y."""
    return BilevelProblem(
        lambda x, y: f_scale * (((x - 1) ** 2).sum() + 2 * ((y - 2) ** 2).sum()),
        lambda x, y: g_scale * (0.5 * (CURVATURES * y**2).sum() - 3 * (x * y).sum()),
        Box(-1.0, 1.0),
        Box(-4.0, 4.0),
    )


def start() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, dtype=DOUBLE), torch.full((4,), 0.5, dtype=DOUBLE)


def test_the_power_iteration_finds_the_largest_curvature() -> None:
    x, y = start()
    assert lower_curvature(quadratic(), x, y, steps=40) == pytest.approx(2.0, rel=1e-5)
    assert 1.5 < lower_curvature(quadratic(), x, y) <= 2.0 + 1e-6
    assert upper_curvature(quadratic(), x, y, Metric(4), steps=40) == pytest.approx(4.0, rel=1e-5)


def test_curvatures_in_units_are_those_of_the_scaled_functions() -> None:
    """f is curved by 2 s_x^2 and 4 s_y^2, g by 2 s_y^2."""
    x, y = start()
    assert lower_curvature(quadratic(), x, y, steps=40, unit=0.5) == pytest.approx(0.5, rel=1e-5)
    for units, expected in (((1.0, 0.5), 2.0), ((4.0, 0.5), 32.0), ((1.0, 2.0), 16.0)):
        found = upper_curvature(quadratic(), x, y, Metric(4, *units), steps=60)
        assert found == pytest.approx(expected, rel=1e-2)


def test_the_coupling_is_the_change_of_the_gradient_in_x() -> None:
    x, y = start()
    assert coupling(quadratic(), x, y, y + 1) == pytest.approx(3.0)
    assert coupling(quadratic(), x, y, y) == 0.0


def test_the_probe_stays_in_the_set() -> None:
    seen: list[Tensor] = []

    def lower(x: Tensor, y: Tensor) -> Tensor:
        seen.append(y.detach().clone())
        return (y**2).sum() + (x * y).sum()

    problem = BilevelProblem(lambda x, y: (y**2).sum(), lower, lower_set=Simplex())
    y = torch.full((5,), 0.2, dtype=DOUBLE)
    assert lower_curvature(problem, torch.zeros(5, dtype=DOUBLE), y) == pytest.approx(2.0, rel=1e-6)
    assert all(bool((v >= 0).all()) and float(v.sum()) == pytest.approx(1.0) for v in seen)


def test_what_is_chosen_follows_from_what_is_measured() -> None:
    x, y = start()
    solver = IVSP(groups(x, y), delta=1e-2)
    assert solver.envelope is None
    assert solver.chosen == []
    solver.step(problem=quadratic())
    c = solver.constants
    assert solver.run.estimated == PER_TASK
    assert 1.5 < c.L_yy <= 2.0 + 1e-6
    assert (c.rho, c.sigma) == pytest.approx((1 / (4 * c.L_yy), c.L_yy))
    assert (c.mu0, c.block) == (0.05, 5)
    assert c.zeta_bar * c.mu0**c.q == pytest.approx(1e-3)
    assert c.L_xy == pytest.approx(3.0)
    assert (c.c1, c.L_min, c.L_max) == pytest.approx(
        (1e-4 * c.L_init, 1e-11 * c.L_init, 1e11 * c.L_init)
    )
    unit = math.log2(solver.run.own_unit)
    assert unit == round(unit)
    assert [name for name, _ in solver.chosen] == [
        *sorted(PER_TASK, key=[n for n, _ in solver.chosen].index),
        "unit of x",
    ]


def test_what_is_given_stays() -> None:
    given: dict[str, Any] = {"rho": 0.1, "mu0": 0.3, "L_init": 7.0, "c2": 0.5, "bb": "short"}
    given["B_R"] = 11.0
    solver = IVSP(groups(*start()), **given)
    solver.step(problem=quadratic())
    assert {name: getattr(solver.constants, name) for name in given} == given
    assert solver.constants.sigma == pytest.approx(min(solver.constants.L_yy, 5.0))
    assert solver.run.B_R == 0.0  # nothing is measured


def test_a_convex_lower_level_may_have_a_larger_rho() -> None:
    solver = IVSP(groups(*start()), sigma=0.0)
    solver.step(problem=quadratic())
    assert solver.constants.rho == pytest.approx(1 / solver.constants.L_yy)


def test_a_point_of_inflection_does_not_deceive() -> None:
    # sin has no curvature at 0, and curvature 1 where the lower level goes from there.
    problem = BilevelProblem(
        lambda x, y: ((y - 1) ** 2).sum(),
        lambda x, y: torch.sin(x + y).sum(),
        Box(-5, 5),
        Box(-5, 5),
    )
    solver = IVSP(groups(torch.zeros(1, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)))
    solver.step(problem=problem)
    assert 0.1 < solver.constants.L_yy < 4.0


def test_with_everything_given_nothing_is_chosen() -> None:
    solver = IVSP(groups(*start()), rho=0.4, sigma=1.0, **PLAIN)
    problem = quadratic()
    info = solver.step(problem=problem)
    assert solver.chosen == []
    assert solver.run.own_unit == 1.0
    c = solver.constants
    assert (c.c1, c.c2, c.B_R) == (1e-4, 1.0, 1e3)
    assert info.calls.lower == info.inner_iterations


@pytest.mark.parametrize(
    ("f_scale", "g_scale"),
    [(2.0**13, 1.0), (2.0**-13, 1.0), (1.0, 2.0**13), (1.0, 2.0**-13), (0.125, 64.0)],
)
def test_the_units_of_f_and_g_do_not_matter(f_scale: float, g_scale: float) -> None:
    # Powers of two only move exponents, so the paths agree to what logarithms and powers round.
    delta, runs = 2.0**-10, []
    for scales in ((1.0, 1.0), (f_scale, g_scale)):
        solver, problem = IVSP(groups(*start()), delta=delta * scales[1]), quadratic(*scales)
        runs.append(([solver.step(problem=problem) for _ in range(40)], point_of(solver)))
    (plain, where), (scaled, there) = runs
    assert [info.trials for info in scaled] == [info.trials for info in plain]
    for a, b in zip(where, there, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert scaled[-1].upper == pytest.approx(f_scale * plain[-1].upper, rel=1e-6)


def test_the_unit_of_x_wakes_up_a_level_that_hardly_moves() -> None:
    # The gradient in x is ten thousand times smaller than that in y.
    problem = BilevelProblem(
        lambda x, y: ((y - 1) ** 2).sum(),
        lambda x, y: ((y - 1e-4 * x) ** 2).sum() / 2,
        Box(-1e5, 1e5),
    )
    x, y = torch.zeros(3, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE)
    solver = IVSP(groups(x, y))
    for _ in range(300):
        solver.step(problem=problem)
    assert solver.run.own_unit >= 64.0
    assert float(point_of(solver)[0].min()) > 1e3


def test_f_never_rises_above_its_start_by_much_and_the_residuals_fall() -> None:
    problem, (x, y) = quadratic(), start()
    solver = IVSP(groups(x, y))
    first = certify(problem, x, y, Envelope(rho=0.125, sigma=2.0, delta=1e-3))
    values = [first.upper, *(solver.step(problem=problem).upper for _ in range(300))]
    assert solver.envelope is not None
    last = certify(problem, *point_of(solver), solver.envelope, multiplier=solver.multiplier)
    assert max(values) <= 10 * abs(values[0])
    assert last.stationarity < 1e-2 * first.stationarity
    assert last.feasibility < 1e-2 * first.feasibility


def test_a_lower_level_that_becomes_more_curved_is_noticed_without_a_warning() -> None:
    # The curvature 1 + 50 x^2 grows a hundredfold as f pulls x away from 0.
    problem = BilevelProblem(
        lambda x, y: ((x - 2) ** 2).sum() + ((y - 1) ** 2).sum(),
        lambda x, y: 0.5 * ((1 + 50 * x**2) * (y - 1) ** 2).sum() + 0.05 * (y**2).sum(),
        Box(-3.0, 3.0),
        Box(-3.0, 3.0),
    )
    solver = IVSP(groups(torch.zeros(1, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE)))
    for _ in range(60):
        info = solver.step(problem=problem)
    assert solver.constants.L_yy > 5.0
    assert solver.constants.rho * solver.constants.L_yy == pytest.approx(0.25)
    assert info.upper < 1.0


def test_corrected_changes_what_was_estimated_alone() -> None:
    c = IVSPConstants(L_yy=2.0, rho=0.125, sigma=2.0)
    assert c.more_curved(4, ("L_yy", "rho", "sigma")) == {
        "L_yy": 8.0,
        "rho": 0.03125,
        "sigma": 8.0,
    }
    assert c.more_curved(4, ("L_yy",)) == {"L_yy": 8.0}
    assert c.more_curved(4, ("L_yy", "sigma")) == {"L_yy": 8.0, "sigma": 4.0}


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 6, 8, 11, 15, 18, 27])
def test_random_problems_are_solved_without_a_constant(number: int) -> None:
    outcome, words = solve(draw(number), steps=400)
    assert outcome.solved, words


@pytest.mark.parametrize(("config", "given"), [("ivsp", "given: 0.5"), ("meha", "")])
def test_probe_says_what_would_be_chosen_and_what_is_given(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    given: str,
) -> None:
    # LightningCLI warns of arguments from two sides, pytest's being one.
    monkeypatch.setattr("sys.argv", ["lightning-bilevel"])
    file = SYNTHETIC / f"{config}.yaml"
    main(
        [
            "probe",
            "--config",
            str(file),
            "--model.init_args.n=10",
            f"--trainer.default_root_dir={tmp_path}",
        ]
    )
    told = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in told.splitlines()}
    # sin(x + y - 2) has the curvature |sin(-8)| = 0.99 at the start.
    assert 0.9 < float(rows["L_yy"].split()[1]) < 1.1
    assert given in rows["rho"]
    assert ("given" in told) == bool(given)
    assert list(tmp_path.iterdir()) == []
