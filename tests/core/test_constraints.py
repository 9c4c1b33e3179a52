"""Constraints beside the lower level: their evaluation, and a point's certificate with them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_bilevel import (
    BilevelProblem,
    Box,
    Envelope,
    NonFiniteError,
)
from lightning_bilevel.core.certificate import certify
from lightning_bilevel.core.problem import Calls

X = torch.tensor([0.5, -1.0], dtype=torch.float64)
Y = torch.tensor([2.0, 0.25, -0.5], dtype=torch.float64)


def f(x: Tensor, y: Tensor) -> Tensor:
    return (x**2).sum() + (y**2).sum()


def g(x: Tensor, y: Tensor) -> Tensor:
    return ((y - x.sum()) ** 2).sum() / 2


def product(x: Tensor, y: Tensor) -> Tensor:
    return x[0] * y[1] - 1.0


def budget(x: Tensor, y: Tensor) -> Tensor:
    return (x**2).sum() - 0.5


def made(**more: Any) -> BilevelProblem:
    return BilevelProblem(f, g, **{"constraints": [product, budget], **more})


# By hand: x0 y1 - 1 and its gradient (y1, 0 | 0, x0, 0); |x|^2 - 1/2 and (2 x | 0).
VALUES = (-0.875, 0.75)
GRADIENTS = ([0.25, 0.0, 0.0, 0.5, 0.0], [1.0, -2.0, 0.0, 0.0, 0.0])


def assert_residuals(problem: BilevelProblem, factor: float = 1.0) -> None:
    residuals = problem.residuals(X, Y)
    assert residuals.values == pytest.approx([factor * value for value in VALUES], abs=1e-14)
    for got, expected in zip(residuals.gradients, GRADIENTS, strict=True):
        torch.testing.assert_close(got, factor * torch.tensor(expected, dtype=torch.float64))


def test_values_and_gradients_by_hand() -> None:
    assert_residuals(made())


def test_each_is_one_pass() -> None:
    problem = made()
    problem.residuals(X, Y)
    assert problem.calls == Calls(upper=2)
    assert problem.calls.passes == 2


def test_none_cost_nothing() -> None:
    problem = BilevelProblem(f, g)
    assert problem.residuals(X, Y) == ((), ())
    assert problem.calls == Calls()


def test_chunks_are_added() -> None:
    halves = [
        lambda x, y, share=share: torch.stack([share * product(x, y), share * budget(x, y)])
        for share in (0.25, 0.75)
    ]
    problem = made()
    problem.residual_terms = halves
    assert_residuals(problem)


def test_processes_are_added() -> None:
    """With a process of the same part, of half the data each."""
    assert_residuals(made().on_this_rank(0.5, 0.5, lambda tensor: 2 * tensor))


def test_a_process_without_data_takes_part() -> None:
    """The other one has two constraints with these values and gradients."""
    rows = torch.tensor(
        [[value, *row] for value, row in zip(VALUES, GRADIENTS, strict=True)], dtype=torch.float64
    )
    sent: list[Tensor] = []

    def reduce(tensor: Tensor) -> Tensor:
        sent.append(tensor)
        return tensor + rows

    assert_residuals(made().on_this_rank(0.0, 0.0, reduce))
    assert float(sent[0].abs().sum()) == 0.0


def test_float32_and_constraints_without_a_gradient() -> None:
    problem = made(constraints=[lambda x, y: x.detach().sum(), lambda x, y: y.new_tensor(-3.0)])
    residuals = problem.residuals(X.float(), Y.float())
    assert residuals.values == (-0.5, -3.0)
    for gradient in residuals.gradients:
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, torch.zeros(5))


def test_a_value_that_is_not_finite() -> None:
    problem = made(constraints=[lambda x, y: x.sum() / 0.0])
    with pytest.raises(NonFiniteError, match=r"^A constraint c returned a value -inf at a "):
        problem.residuals(X, Y)


def test_a_value_that_is_no_scalar() -> None:
    problem = made(constraints=[lambda x, y: y[:1]])
    message = r"^A constraint c returned a tensor of shape \(1,\): it must return a scalar"
    with pytest.raises(TypeError, match=message):
        problem.residuals(X, Y)


class TestSingleLevel:
    def test_there_is_no_lower_level(self) -> None:
        problem = BilevelProblem(f, None, constraints=[budget])
        assert problem.single_level
        assert not made().single_level
        assert problem.check(X, Y).lower_gradient == 0.0
        assert torch.equal(problem.at(X).gradient(Y), torch.zeros_like(Y))
        assert problem.calls == Calls()

    def test_f_need_not_depend_on_y(self) -> None:
        upper = BilevelProblem(budget, None).upper(X, Y)
        assert torch.equal(upper.grad_x, 2 * X)
        assert torch.equal(upper.grad_y, torch.zeros(3, dtype=torch.float64))

    def test_a_process_without_data_has_none_either(self) -> None:
        assert BilevelProblem(f, None).on_this_rank(0.0, 0.0, lambda t: t).single_level


ENVELOPE = Envelope(rho=1.0, sigma=0.0, delta=0.1)


class TestCertificate:
    """f = |w - a|^2/2 and c = w_0 + w_1 - 1 <= 0 without a lower level: w = P(a), nu known."""

    A = torch.tensor([2.0, 1.0], dtype=torch.float64)

    def problem(self, *more: Any) -> BilevelProblem:
        return BilevelProblem(
            lambda x, y: ((x - self.A) ** 2).sum() / 2 + (y**2).sum() / 2,
            None,
            constraints=[lambda x, y: x.sum() - 1.0, *more],
        )

    SOLUTION = torch.tensor([1.0, 0.0], dtype=torch.float64)  # a - nu (1, 1) with nu = 1
    REST = torch.zeros(1, dtype=torch.float64)

    def test_the_known_multiplier_is_found(self) -> None:
        c = certify(self.problem(), self.SOLUTION, self.REST, ENVELOPE)
        assert c.constraint_multipliers == pytest.approx([1.0], abs=1e-6)
        assert c.constraints == [0.0]
        assert c.kkt < 1e-6
        assert c.smallest_kkt <= c.kkt
        assert (c.multiplier, c.gap, c.residual) == (0.0, 0.0, -0.1)

    def test_two_multipliers_are_found_together(self) -> None:
        """a - w = nu_1 (1, 1) + nu_2 (1, 0) with both constraints active at w = (1/2, 1/2)."""
        w = torch.tensor([0.5, 0.5], dtype=torch.float64)
        problem = self.problem(lambda x, y: x[0] - 0.5)
        c = certify(problem, w, self.REST, ENVELOPE)
        assert c.constraint_multipliers == pytest.approx([0.5, 1.0], abs=1e-5)
        assert c.kkt < 1e-5

    def test_the_residuals_of_a_violated_constraint_by_hand(self) -> None:
        """At w = (1, 1/2): gradient (-1, -1/2) + nu (1, 1), c = 1/2.

        (nu - 1)^2 + (nu - 1/2)^2 + (nu/2)^2 is smallest at nu = 2/3.
        """
        w = torch.tensor([1.0, 0.5], dtype=torch.float64)
        c = certify(self.problem(), w, self.REST, ENVELOPE)
        assert c.constraint_multipliers == pytest.approx([2 / 3])
        assert c.stationarity == pytest.approx(5**0.5 / 6)
        assert c.feasibility == pytest.approx(0.5)
        assert c.complementarity == pytest.approx(1 / 3)

    def test_beside_a_lower_level_both_count(self) -> None:
        """g = |y - x|^2/2: at x = 0, y = 1, R = H - delta = 1/4 - 1/10, and c = 2."""
        problem = BilevelProblem(
            lambda x, y: (x**2 + y**2).sum(),
            lambda x, y: ((y - x) ** 2).sum() / 2,
            constraints=[lambda x, y: (3 + x - y).sum()],
        )
        x = torch.zeros(1, dtype=torch.float64)
        c = certify(problem, x, x + 1, ENVELOPE, multiplier=4.0)
        # grad R = (-1/2, 1/2): (0, 2) + 4 (-1/2, 1/2) + nu (1, -1) = (nu - 2, 4 - nu), and
        # (nu - 2)^2 + (4 - nu)^2 + (2 nu)^2 is smallest at nu = 1.
        assert c.constraint_multipliers == pytest.approx([1.0])
        assert c.stationarity == pytest.approx(10**0.5)
        assert c.feasibility == pytest.approx(2.0)
        assert c.complementarity == pytest.approx(2.0)
        # The bounds of the lower level are those of R, not of c.
        assert c.distance_bound == pytest.approx(ENVELOPE.distance_bound(0.15))
        assert c.theorem.startswith("does not apply: there are constraints beside the lower level")

    def test_it_is_shown_and_saved(self) -> None:
        c = certify(self.problem(), self.SOLUTION, self.REST, ENVELOPE)
        saved = json.loads(json.dumps(c.as_dict()))
        assert saved["constraints"] == c.constraints
        assert saved["constraint_multipliers"] == c.constraint_multipliers
        rows = dict(c.rows())
        assert re.fullmatch(r"0\.000e\+00 \(multiplier 1\)", rows["constraint 1"])
        assert rows["theorem of IVSP"].startswith("does not apply: there is no lower level")

    def test_sets_hold_what_they_can(self) -> None:
        """A bound on x is no constraint: the normal cone absorbs its force."""
        problem = BilevelProblem(
            lambda x, y: ((x - self.A) ** 2).sum() / 2,
            None,
            Box(-1.0, [1.0, 0.5]),
            constraints=[lambda x, y: x.sum() - 9.0],
        )
        w = torch.tensor([1.0, 0.5], dtype=torch.float64)
        assert certify(problem, w, self.REST, ENVELOPE).kkt < 1e-9
