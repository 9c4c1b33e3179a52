"""Constraints beside the lower level: their evaluation, and a point's certificate with them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_bilevel import (
    BilevelError,
    BilevelProblem,
    Box,
    Certificate,
    Envelope,
    NonFiniteError,
)
from lightning_bilevel.core.certificate import certify
from lightning_bilevel.core.constraints import Constraints
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


def assert_limits(problem: BilevelProblem, factor: float = 1.0) -> None:
    limits = problem.limits(X, Y)
    assert limits.values == pytest.approx([factor * value for value in VALUES], abs=1e-14)
    for got, expected in zip(limits.gradients, GRADIENTS, strict=True):
        torch.testing.assert_close(got, factor * torch.tensor(expected, dtype=torch.float64))


def test_values_and_gradients_by_hand() -> None:
    assert_limits(made())


def test_each_is_one_pass() -> None:
    problem = made()
    problem.limits(X, Y)
    assert problem.calls == Calls(constraints=2)
    assert problem.calls.passes == 2


def test_none_cost_nothing() -> None:
    problem = BilevelProblem(f, g)
    assert problem.limits(X, Y) == ((), ())
    assert problem.calls == Calls()


def test_in_units_they_follow_the_chain_rule() -> None:
    limits = made().in_units(2.0, 0.5).limits(X / 2.0, Y / 0.5)
    assert limits.values == pytest.approx(VALUES)
    scale = torch.tensor([2.0, 2.0, 0.5, 0.5, 0.5], dtype=torch.float64)
    for got, expected in zip(limits.gradients, GRADIENTS, strict=True):
        torch.testing.assert_close(got, scale * torch.tensor(expected, dtype=torch.float64))


def test_chunks_are_added() -> None:
    halves = [
        lambda x, y, share=share: [share * product(x, y), share * budget(x, y)]
        for share in (0.25, 0.75)
    ]
    assert_limits(made(constraints=Constraints(tuple(halves))))


def test_processes_are_added() -> None:
    """With a process of the same part, of half the data each."""
    assert_limits(made().on_this_rank(0.5, 0.5, lambda tensor: 2 * tensor))


def test_a_process_without_data_takes_part() -> None:
    """The other one has two constraints with these values and gradients."""
    rows = torch.tensor(
        [[value, *row] for value, row in zip(VALUES, GRADIENTS, strict=True)], dtype=torch.float64
    )
    answers = [torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), rows.reshape(-1)]
    sent: list[Tensor] = []

    def reduce(tensor: Tensor) -> Tensor:
        sent.append(tensor)
        return tensor + answers[len(sent) - 1]

    assert_limits(made().on_this_rank(0.0, 0.0, reduce))
    assert [float(tensor.abs().sum()) for tensor in sent] == [0.0, 0.0]


def test_float32_and_constraints_without_a_gradient() -> None:
    problem = made(constraints=[lambda x, y: x.detach().sum(), lambda x, y: y.new_tensor(-3.0)])
    limits = problem.limits(X.float(), Y.float())
    assert limits.values == (-0.5, -3.0)
    for gradient in limits.gradients:
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, torch.zeros(5))


class TestRefused:
    @pytest.mark.parametrize("given", [[], budget, [budget, 1.0]], ids=["none", "bare", "number"])
    def test_no_list_of_functions(self, given: Any) -> None:
        message = (
            f"`BilevelProblem(constraints={given!r})` must be a non-empty list of functions of "
            "(x, y), each of which returns a scalar that is to be at most 0."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            made(constraints=given)

    @pytest.mark.parametrize(
        ("constraint", "got"),
        [(lambda x, y: x, "a tensor of shape (2,)"), (lambda x, y: 1.0, "a float")],
        ids=["vector", "float"],
    )
    def test_a_constraint_that_is_no_scalar(self, constraint: Any, got: str) -> None:
        message = (
            f"A constraint c returned {got}: it must return a scalar tensor, such as a mean or a "
            "sum."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            made(constraints=[budget, constraint]).check(X, Y)

    @pytest.mark.parametrize(
        ("returned", "kind"),
        [(None, "nothing"), ([], "nothing"), (torch.zeros(2), "a Tensor")],
        ids=["None", "empty", "tensor"],
    )
    def test_a_module_s_constraints_that_are_no_list(self, returned: Any, kind: str) -> None:
        message = (
            f"`constraints(batch)` returned {kind}: it must return a list of scalar tensors, one "
            "for each constraint, such as `[unfairness - 0.1]`."
        )
        problem = made(constraints=Constraints((lambda x, y: returned,)))
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            problem.limits(X, Y)

    def test_other_constraints_on_another_part(self) -> None:
        parts = Constraints((lambda x, y: [x.sum()], lambda x, y: [x.sum(), y.sum()]))
        message = (
            "`constraints(batch)` returned 1 constraints on one part of the data and 2 on another: "
            "it must return the same ones for every part."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            made(constraints=parts).limits(X, Y)
        # The other process has two, this one has one.
        seen = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        shared = made(constraints=[budget]).on_this_rank(0.5, 0.5, lambda tensor: tensor + seen)
        with pytest.raises(ValueError, match=r"^`constraints\(batch\)` returned 1 constraints on "):
            shared.limits(X, Y)

    def test_a_value_that_is_not_finite(self) -> None:
        problem = made(constraints=[lambda x, y: x.sum() / 0.0])
        with pytest.raises(NonFiniteError, match=r"^A constraint c returned a value -inf at a "):
            problem.limits(X, Y)

    def test_a_constraint_that_changes(self) -> None:
        count = iter(range(100))
        problem = made(constraints=[lambda x, y: x.sum() + next(count)])
        with pytest.raises(
            BilevelError, match=r"^A constraint c was -0\.5 and then 0\.5 at the same point: "
        ):
            problem.check(X, Y)


class TestSingleLevel:
    def test_there_is_no_lower_level(self) -> None:
        problem = BilevelProblem(f, None, constraints=[budget])
        assert problem.single_level
        assert not made().single_level
        assert problem.check(X, Y).lower_gradient == 0.0

    def test_f_need_not_depend_on_y(self) -> None:
        upper = BilevelProblem(budget, None).upper(X, Y)
        assert torch.equal(upper.grad_x, 2 * X)
        assert torch.equal(upper.grad_y, torch.zeros(3, dtype=torch.float64))

    def test_a_process_without_data_has_none_either(self) -> None:
        assert BilevelProblem(f, None).on_this_rank(0.0, 0.0, lambda t: t).single_level

    def test_parts_of_it_are_refused(self) -> None:
        message = (
            "`BilevelProblem(lower=None)` was given features or outputs: they are parts of a lower "
            "level. Give `lower`, or leave them out."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            BilevelProblem(f, None, features=lambda x: x)


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
        assert c.constraint_multipliers == pytest.approx((1.0,), abs=1e-6)
        assert c.constraints == (0.0,)
        assert c.kkt < 1e-6
        assert c.smallest_kkt <= c.kkt
        assert (c.multiplier, c.gap, c.residual, c.single_level) == (0.0, 0.0, -0.1, True)

    def test_two_multipliers_are_found_together(self) -> None:
        """a - w = nu_1 (1, 1) + nu_2 (1, 0) with both constraints active at w = (1/2, 1/2)."""
        w = torch.tensor([0.5, 0.5], dtype=torch.float64)
        problem = self.problem(lambda x, y: x[0] - 0.5)
        c = certify(problem, w, self.REST, ENVELOPE)
        assert c.constraint_multipliers == pytest.approx((0.5, 1.0), abs=1e-5)
        assert c.kkt < 1e-5

    def test_the_residuals_of_a_given_multiplier_by_hand(self) -> None:
        """At w = (1, 1/2) with nu = 1/2: gradient (-1, -1/2) + (1/2, 1/2), c = 1/2."""
        w = torch.tensor([1.0, 0.5], dtype=torch.float64)
        c = certify(self.problem(), w, self.REST, ENVELOPE, constraint_multipliers=(0.5,))
        assert c.stationarity == pytest.approx(0.5)
        assert c.feasibility == pytest.approx(0.5)
        assert c.complementarity == pytest.approx(0.25)

    def test_beside_a_lower_level_both_count(self) -> None:
        """g = |y - x|^2/2: at x = 0, y = 1, R = H - delta = 1/4 - 1/10, and c = 2."""
        problem = BilevelProblem(
            lambda x, y: (x**2 + y**2).sum(),
            lambda x, y: ((y - x) ** 2).sum() / 2,
            constraints=[lambda x, y: (x + 2 * y).sum()],
        )
        x = torch.zeros(1, dtype=torch.float64)
        c = certify(problem, x, x + 1, ENVELOPE, multiplier=4.0, constraint_multipliers=(3.0,))
        # grad R = (-1/2, 1/2): (0, 2) + 4 (-1/2, 1/2) + 3 (1, 2) = (1, 10)
        assert c.stationarity == pytest.approx(101**0.5)
        assert c.feasibility == pytest.approx(2.0)
        assert c.complementarity == pytest.approx(6.0)
        # The bounds of the lower level are those of R, not of c.
        assert c.distance_bound == pytest.approx(ENVELOPE.distance_bound(0.15))
        assert c.theorem.startswith(
            "does not apply: it knows no constraints beside the lower level"
        )

    def test_it_is_shown_and_saved(self) -> None:
        c = certify(self.problem(), self.SOLUTION, self.REST, ENVELOPE)
        assert Certificate(**json.loads(json.dumps(c.as_dict()))) == c
        rows = dict(c.rows())
        assert re.fullmatch(r"0\.000e\+00 \(multiplier 1\)", rows["constraint 1"])
        assert "Moreau gap H" not in rows
        assert rows["theorem of IVSP"].startswith("does not apply: there is no lower level")

    def test_a_wrong_number_of_multipliers_is_refused(self) -> None:
        message = (
            "`certify(constraint_multipliers=(1.0, 2.0))` has 2 multipliers for 1 constraints: "
            "give one for each, or None."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            certify(
                self.problem(),
                self.SOLUTION,
                self.REST,
                ENVELOPE,
                constraint_multipliers=(1.0, 2.0),
            )

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
