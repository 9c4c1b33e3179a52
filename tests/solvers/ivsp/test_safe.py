"""The curvature above which every step descends."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from helpers import PLAIN, PROBLEMS, gap_at, groups, make_ivsp

from lightning_bilevel import IVSP, Envelope
from lightning_bilevel.core.moreau import gap_lipschitz
from lightning_bilevel.solvers.ivsp.constants import IVSPConstants, safe_L
from lightning_bilevel.solvers.ivsp.smoothing import Huber

by_name = {problem.name: problem for problem in PROBLEMS}


def test_the_formula_of_the_paper() -> None:
    """(c1 + gamma0 mu0 L_f + b B_R^2 + mu0 L_R) / (2 - theta_hat), or theta_low / theta_hat."""
    given = {**PLAIN, "gamma0": 0.5, "mu0": 0.25, "c1": 0.125, "theta_low": 1.0}
    one = IVSPConstants(rho=1.0, sigma=0.0, **given, B_R=3.0)
    two = IVSPConstants(rho=1.0, sigma=0.0, **given, B_R=6.0, smoothing="softplus")
    for c in (one, two):
        # b B_R^2 is 1 * 9 and 36 / 4: (0.125 + 0.5 + 9 + 0.25 * 8) / 1.5 = 7.75
        assert safe_L(c, L_f=4.0, L_R=8.0, theta_hat=0.5) == 7.75
        assert safe_L(c, L_f=4.0, L_R=8.0, theta_hat=0.0625) == 16.0
    measured = IVSPConstants(rho=1.0, sigma=0.0, **given, theta_hat=0.5)
    assert safe_L(measured, 3.0, L_f=4.0, L_R=8.0) == 7.75
    # Nothing has been seen: the paper's 1,000.
    assert safe_L(measured, L_f=4.0, L_R=8.0) == (0.125 + 0.5 + 1e6 + 2.0) / 1.5


def test_the_gradient_of_the_gap_is_as_lipschitz_as_the_formula_says() -> None:
    """sum_i sin(x + y_i) with three y: the largest eigenvalue of its Hessian is at most 4."""
    problem = by_name["sine"].build()
    envelope = Envelope(rho=0.5, sigma=1.0, delta=1e-3)
    generator = torch.Generator().manual_seed(0)
    gradients = []
    for _ in range(40):
        w = 3 * torch.randn(4, generator=generator, dtype=torch.float64)
        w = w if not gradients or len(gradients) % 2 else gradients[-1][0] + 1e-3 * w
        gap = gap_at(problem, w[:1], w[1:], envelope)
        gradients.append((w, torch.cat([gap.grad_x, gap.grad_y])))
    ratios = [float((b[1] - a[1]).norm() / (b[0] - a[0]).norm()) for a, b in pairwise(gradients)]
    assert 1.0 < max(ratios) <= gap_lipschitz(4.0, envelope)


class TestFixedL:
    """On f = |w - c|^2 / 2 and g = |y - x|^2 / 2 with rho = 1: R = |y - x|^2 / 4 - delta."""

    problem = by_name["quadratic"]

    def bound(self) -> float:
        """|grad R| = |y - x| / sqrt(2) is at most 10 on the way."""
        optimizer = make_ivsp(self.problem, B_R=10.0)(groups(*self.problem.at()))
        return optimizer.safe_L(L_f=1.0, L_R=1.0, theta_hat=1.0)

    def test_it_descends_from_the_safe_one_on(self) -> None:
        """No warning: each step passes the test of the line search."""
        safe = self.bound()
        c = make_ivsp(self.problem)(groups(*self.problem.at())).constants
        assert safe == pytest.approx(1e-4 + c.gamma0 * c.mu0 + Huber.b * 100 + c.mu0)
        for factor in (1.0, 10.0):
            optimizer = make_ivsp(self.problem, B_R=10.0, fixed_L=factor * safe)(
                groups(*self.problem.at())
            )
            built = self.problem.build()
            values = [optimizer.step(problem=built) for _ in range(50)]
            assert {info.L for info in values} == {factor * safe}
            assert values[-1].upper < values[0].upper

    def test_a_step_that_rises_is_taken_with_one_warning(self) -> None:
        optimizer = make_ivsp(self.problem, fixed_L=1e-6)(groups(*self.problem.at()))
        built = self.problem.build()
        message = (
            r"^`IVSP\(fixed_L=1e-06\)` is too small: in outer iteration 1 the merit became "
            r"[0-9.e+]+, where a line search asks for at most [-0-9.e+]+\. Descent is proved only "
            r"above L_safe, which is 1e\+08 or more here: make fixed_L larger, or leave it out for "
            r"the line search\.$"
        )
        with pytest.warns(UserWarning, match=message):
            optimizer.step(problem=built)
        optimizer.step(problem=built)

    def test_constants_that_are_not_chosen_yet(self) -> None:
        optimizer = IVSP(groups(*self.problem.at()), rho=1.0, sigma=0.0, fixed_L=1e3)
        message = (
            "`IVSP.safe_L()` needs mu0, block, gamma0, zeta_bar, L_xy, L_yy, which IVSP chooses at "
            "its first step: call it after that, or give all constants of the task."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            optimizer.safe_L()
        optimizer.step(problem=self.problem.build())
        c = optimizer.constants
        expected = (c.c1 + optimizer.run.B_R**2) / (2 - c.theta_hat)
        assert optimizer.safe_L() == pytest.approx(expected)
