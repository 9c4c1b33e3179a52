"""IVSP with constraints beside the lower level, and without a lower level (sESQM)."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import advance, groups, point_of
from lightning.pytorch import Trainer
from modules import Bounded, Weighting, weighting_data
from torch import Tensor

from lightning_bilevel import IVSP, BilevelError, BilevelProblem, Box, Envelope, certify, solve
from lightning_bilevel.callbacks import CertificateReport
from lightning_bilevel.solvers import SolverCallable

RHO = 1.0
NX = NY = 2
B = np.array([[1.0, 0.3], [-0.2, 0.8]])
# The solution, by construction: R = 0, c_1 = 0 and c_2 < 0 there.
X_STAR = np.array([0.6, -0.4])
Y_STAR = np.array([1.1, 0.2])
LAMBDA = 2.0
NU = 1.5
# psi is isotropic, so z is the weighted mean of B x and y.
Z_STAR = (RHO * B @ X_STAR + Y_STAR) / (1 + RHO)
DELTA = float(
    ((Y_STAR - B @ X_STAR) ** 2).sum() / 2
    - ((Z_STAR - B @ X_STAR) ** 2).sum() / 2
    - ((Z_STAR - Y_STAR) ** 2).sum() / (2 * RHO)
)
GRAD_R = np.concatenate([-B.T @ (Y_STAR - Z_STAR), (Y_STAR - B @ X_STAR) - (Y_STAR - Z_STAR) / RHO])
RADIUS = float((X_STAR**2).sum() + (Y_STAR**2).sum())
GRAD_C = 2 * np.concatenate([X_STAR, Y_STAR])
# f = |w - center|^2/2 with grad f + LAMBDA grad R + NU grad c = 0; f, R and c are convex.
CENTER = np.concatenate([X_STAR, Y_STAR]) + LAMBDA * GRAD_R + NU * GRAD_C


def f(x: Tensor, y: Tensor) -> Tensor:
    return ((torch.cat([x, y]) - torch.as_tensor(CENTER)) ** 2).sum() / 2


def g(x: Tensor, y: Tensor) -> Tensor:
    return ((y - torch.as_tensor(B) @ x) ** 2).sum() / 2


def ball(x: Tensor, y: Tensor) -> Tensor:
    return (x**2).sum() + (y**2).sum() - RADIUS


def slack(x: Tensor, y: Tensor) -> Tensor:
    return x.sum() + y.sum() - 50.0


def problem(*constraints: Any, lower: Any = g) -> BilevelProblem:
    return BilevelProblem(
        f, lower, Box(-9.0, 9.0), Box(-9.0, 9.0), constraints=constraints or [ball, slack]
    )


def start() -> tuple[Tensor, Tensor]:
    return torch.zeros(NX, dtype=torch.float64), torch.zeros(NY, dtype=torch.float64)


PAPER: dict[str, Any] = {
    "rho": RHO,
    "sigma": 0.0,
    "delta": DELTA,
    "mu0": 1e-3,
    "block": 20,
    "gamma0": 0.1,
    "zeta_bar": 1.0,
    "L_init": 1.0,
    "L_xy": 1.5,
    "L_yy": 1.0,
}


@pytest.mark.parametrize(
    ("given", "residual", "distance"),
    [
        ({"rho": RHO, "sigma": 0.0, "delta": DELTA, "mu0": 3e-3}, 1e-3, 1e-3),
        # The paper's rules need far more iterations where two constraints are active: the smoothed
        # penalty has curvatures of 7/mu across the ball, and of gamma along it.
        ({**PAPER, "mu0": 3e-3, "block": 5}, 0.1, 5e-3),
    ],
    ids=["own", "paper"],
)
def test_the_known_solution_with_both_multipliers(
    given: dict[str, Any], residual: float, distance: float
) -> None:
    solution = solve(problem(), *start(), partial(IVSP, **given), max_steps=800)
    c = solution.certificate
    assert c is not None
    assert c.kkt < residual
    assert max(c.feasibility, c.complementarity) < 1e-3
    assert c.multiplier == pytest.approx(LAMBDA, rel=1e-2)
    assert c.constraint_multipliers[0] == pytest.approx(NU, rel=1e-2)
    assert c.constraint_multipliers[1] == pytest.approx(0.0, abs=1e-5)
    assert np.abs(solution.x.numpy() - X_STAR).max() < distance
    assert np.abs(solution.y.numpy() - Y_STAR).max() < distance
    assert solution.proved is not None
    assert solution.proved.certificate.constraint_multipliers[0] == pytest.approx(NU, rel=1e-2)


def test_a_constraint_that_is_never_active_changes_no_bit() -> None:
    ivsp = partial(IVSP, **PAPER)
    alone = solve(
        BilevelProblem(f, g, Box(-9.0, 9.0), Box(-9.0, 9.0)), *start(), ivsp, max_steps=60
    )
    beside = solve(problem(slack), *start(), ivsp, max_steps=60)
    assert torch.equal(alone.x, beside.x)
    assert torch.equal(alone.y, beside.y)
    assert [info.L for info in alone.history] == [info.L for info in beside.history]


def huber_slope(t: float, mu: float) -> float:
    return min(max((t + mu / 2) / mu, 0.0), 1.0)


def test_the_first_step_by_hand() -> None:
    """w_L = P_C(w - mu/L [gamma grad f + phi'(R) grad R + phi'(c) grad c])."""
    mu, gamma, L = 0.5, 0.3, 4.0
    x = np.array([0.5, -0.3])
    y = np.array([0.9, 0.4])
    given = {**PAPER, "mu0": mu, "gamma0": gamma, "fixed_L": L, "L_init": None, "zeta_bar": 1e-12}
    radius = float((x**2).sum() + (y**2).sum())

    def near(x: Tensor, y: Tensor) -> Tensor:
        return (x**2).sum() + (y**2).sum() - radius + 0.1

    solution = solve(
        problem(near), torch.tensor(x), torch.tensor(y), partial(IVSP, **given), max_steps=1
    )
    z = (RHO * B @ x + y) / (1 + RHO)
    residual = (
        ((y - B @ x) ** 2).sum() / 2
        - ((z - B @ x) ** 2).sum() / 2
        - ((z - y) ** 2).sum() / (2 * RHO)
        - DELTA
    )
    grad_R = np.concatenate([-B.T @ (y - z), (y - B @ x) - (y - z) / RHO])
    w = np.concatenate([x, y])
    direction = gamma * (w - CENTER)
    direction += huber_slope(float(residual), mu) * grad_R
    direction += huber_slope(0.1, mu) * 2 * w  # (0.1 + 0.25)/0.5
    expected = np.clip(w - mu / L * direction, -9.0, 9.0)
    got = np.concatenate([solution.x.numpy(), solution.y.numpy()])
    assert got == pytest.approx(expected, abs=1e-6)
    (info,) = solution.history
    value = float((expected**2).sum()) - radius + 0.1
    # R is the smaller residual.
    assert info.residual == pytest.approx(value, abs=1e-5)


def test_the_penalty_grows_for_a_constraint_alone() -> None:
    """R is slack, and c violated: only c can ask for a stronger penalty."""
    free = {**PAPER, "delta": 100.0, "gamma0": 2.0, "mu0": 0.05}
    solution = solve(problem(ball), *start(), partial(IVSP, **free), max_steps=200)
    assert solution.certificate is not None
    assert solution.certificate.residual < 0.0
    assert solution.tally.penalty_updates > 0
    assert solution.certificate.constraints[0] < 0.1


def test_passes_are_counted() -> None:
    """Each trial evaluates both constraints once, and so does the start."""
    solution = solve(problem(), *start(), partial(IVSP, **PAPER), max_steps=25)
    trials = solution.tally.trials
    assert solution.tally.calls.upper == 3 * (trials + 1)
    assert solution.history[-1].passes == solution.tally.calls.passes


def test_units_do_not_change_the_solution_nor_the_multipliers() -> None:
    # rho in the unit of y is 4 RHO, so that R is the same function of the user's y.
    optimizer = IVSP(groups(*start(), (2.0, 0.5)), rho=4 * RHO, sigma=0.0, delta=DELTA, mu0=3e-3)
    mine = problem()
    advance(optimizer, mine, 800)
    x, y = point_of(optimizer)
    assert x.numpy() == pytest.approx(X_STAR, abs=2e-3)
    assert y.numpy() == pytest.approx(Y_STAR, abs=2e-3)
    c = certify(mine, x, y, Envelope(RHO, 0.0, DELTA), multiplier=optimizer.multiplier)
    assert c.constraint_multipliers == pytest.approx([NU, 0.0], rel=2e-2, abs=1e-5)


class TestSingleLevel:
    """Without a lower level: min |w - a|^2/2 s.t. |w|^2 <= 1, so w = a/|a| and nu = (|a| - 1)/2."""

    A = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64)
    NU = 1.0

    def problem(self) -> BilevelProblem:
        return BilevelProblem(
            lambda x, y: ((x - self.A) ** 2).sum() / 2,
            None,
            Box(-5.0, 5.0),
            constraints=[lambda x, y: (x**2).sum() - 1.0],
        )

    @pytest.mark.parametrize(
        "solver", [partial(IVSP, delta=1e-4), partial(IVSP, **PAPER)], ids=["own", "paper"]
    )
    def test_the_known_solution_and_multiplier(self, solver: SolverCallable) -> None:
        solution = solve(self.problem(), torch.zeros_like(self.A), solver=solver, max_steps=500)
        assert (solution.x - self.A / 3).abs().max() < 1e-3
        assert torch.equal(solution.y, torch.zeros(1, dtype=torch.float64))
        c = solution.certificate
        assert c is not None
        assert c.kkt < 1e-3
        assert c.constraint_multipliers == pytest.approx([self.NU], rel=1e-2)

    def test_a_bound_and_a_constraint_are_active_together(self) -> None:
        """At (1/2, 1/2): 2 (x - 2) + nu = 0, and 2 (y - 3) + nu < 0 at the upper bound of y."""
        solution = solve(
            BilevelProblem(
                lambda x, y: ((x - 2) ** 2 + (y - 3) ** 2).sum(),
                None,
                lower_set=Box(0.0, 0.5),
                constraints=[lambda x, y: (x + y).sum() - 1, lambda x, y: x.sum() - 5],
            ),
            torch.zeros(1, dtype=torch.float64),
            torch.zeros(1, dtype=torch.float64),
            max_steps=300,
        )
        c = solution.certificate
        assert c is not None
        assert c.kkt < 1e-3
        assert c.constraint_multipliers == pytest.approx([3.0, 0.0], rel=1e-2, abs=1e-5)
        assert (solution.x.item(), solution.y.item()) == pytest.approx((0.5, 0.5), abs=1e-3)

    def test_nothing_is_inexact(self) -> None:
        solution = solve(self.problem(), torch.zeros_like(self.A), max_steps=50)
        for info in solution.history:
            assert info.zeta == 0.0
        assert solution.tally.calls.lower == solution.tally.calls.gap == 0
        assert solution.tally.calls.passes == solution.tally.calls.upper

    def test_each_accepted_step_descends_as_stated(self) -> None:
        """gamma f + phi(c) <= the same before - c1/(2 mu) |dw|^2, with tau = zeta = 0."""
        optimizer = IVSP(groups(torch.zeros_like(self.A), self.A.new_zeros(1)), **PAPER)
        problem = self.problem()

        def merit(w: Tensor, mu: float, gamma: float) -> float:
            t = float((w**2).sum() - 1.0)
            phi = 0.0 if t <= -mu / 2 else t if t >= mu / 2 else (t + mu / 2) ** 2 / (2 * mu)
            return gamma * float(((w - self.A) ** 2).sum() / 2) + phi

        for _ in range(40):
            before = point_of(optimizer)[0]
            info = optimizer.step(problem=problem)
            after, mu, gamma = point_of(optimizer)[0], info.mu, info.gamma
            least = 1e-4 / (2 * mu) * float(((after - before) ** 2).sum())
            assert merit(after, mu, gamma) <= merit(before, mu, gamma) - least + 1e-11

    def test_the_reading_says_that_there_is_no_lower_level(self) -> None:
        words = solve(self.problem(), torch.zeros_like(self.A), max_steps=300).reading
        assert "the theorem does not apply: there is no lower level" in words

    def test_the_variables_may_be_split(self) -> None:
        split = BilevelProblem(
            lambda x, y: ((torch.cat([x, y]) - self.A) ** 2).sum() / 2,
            None,
            constraints=[lambda x, y: (x**2).sum() + (y**2).sum() - 1.0],
        )
        zeros = torch.zeros(3, dtype=torch.float64)
        solution = solve(split, zeros[:1], zeros[1:], partial(IVSP, delta=1e-4), max_steps=500)
        assert (torch.cat([solution.x, solution.y]) - self.A / 3).abs().max() < 1e-3

    def test_a_lower_level_needs_a_start(self) -> None:
        message = "`solve(y0=None)`: the lower level needs a start, a flat vector."
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            solve(problem(), torch.zeros(2, dtype=torch.float64))


class TestRefused:
    @pytest.mark.parametrize("name", ["F2SA", "MEHA", "AID", "LuMei"])
    def test_other_methods_do_not_see_them(self, name: str) -> None:
        import lightning_bilevel

        solver = getattr(lightning_bilevel, name)
        needed = {"L_f": 1.0, "L_g": 1.0, "D": 1.0} if name == "LuMei" else {}
        for wrong, beyond in (
            (problem(), "there are constraints beside the lower level"),
            (problem(lower=None), "there is no lower level"),
        ):
            message = f"{beyond}, and {name} sees f and g alone: use IVSP."
            with pytest.raises(BilevelError, match=f"^{re.escape(message)}$"):
                solve(wrong, *start(), partial(solver, **needed), max_steps=1)


def test_a_module_declares_them(tmp_path: Path) -> None:
    solver = partial(IVSP, delta=1e-3)
    free = Weighting(solver=solver)
    bounded = Bounded(solver=solver)
    options: dict[str, Any] = {
        "max_epochs": 10,
        "default_root_dir": tmp_path,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    Trainer(**options).fit(free, weighting_data())
    report = CertificateReport()
    Trainer(callbacks=[report], **options).fit(bounded, weighting_data())
    assert float(free.logits.detach().sigmoid().mean()) < Bounded.SHARE - 0.05
    assert float(bounded.logits.detach().sigmoid().mean()) > Bounded.SHARE - 0.02
    assert report.certificate is not None
    assert len(report.certificate.constraint_multipliers) == 2
    expected = Bounded.SHARE - float(bounded.logits.detach().sigmoid().mean())
    assert report.certificate.constraints[0] == pytest.approx(expected, abs=1e-6)
    assert report.certificate.constraints[1] == pytest.approx(report.certificate.upper - 0.9)
