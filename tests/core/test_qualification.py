"""What the theorem asks for: conditions against examples where R is known, and the verdict."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import gap_at
from torch import Tensor

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.qualification import (
    Condition,
    ConstantAffineSegments,
    Reweighted,
    ReweightedSigmoidNetwork,
    StrictlyConvex,
    cross_entropy_bound,
    theorem,
)
from lightning_bilevel.core.sets import Ball, Box, ConvexSet, Free, Product

HUNDRED = Box(-100, 100)
PAPER = Envelope(rho=0.5, sigma=1.0, delta=1e-3)


def with_delta(delta: float) -> Envelope:
    return Envelope(rho=0.5, sigma=1.0, delta=delta)


class TestConvexity:
    @pytest.mark.parametrize(
        ("condition", "words"),
        [
            (StrictlyConvex(), "holds: for each delta > 0, because g is strictly convex in y"),
            (
                ConstantAffineSegments("softmax heads"),
                "holds: for each delta > 0, because g is convex in y and constant along its affine "
                "segments (softmax heads)",
            ),
        ],
    )
    def test_holds_for_each_delta_and_set(self, condition: Condition, words: str) -> None:
        for delta in (1e-300, 1e-3, 1e3):
            for sets in ((HUNDRED, HUNDRED), (Free(), Box(0.0, torch.inf))):
                assert condition(with_delta(delta), *sets) == words

    def test_convexity_alone_is_no_reason(self) -> None:
        """g = y is convex, and R is stationary at a point of the interior that violates it."""
        problem = BilevelProblem(
            lambda x, y: y.sum(),
            lambda x, y: y.sum() + 0 * x.sum(),
            upper_set=Box(-1, 1),
            lower_set=Box(-1, 1),
        )
        x = torch.zeros(1, dtype=torch.float64)
        y = torch.full((1,), 0.5, dtype=torch.float64)
        point = gap_at(problem, x, y, PAPER)
        # z = y - rho = 0, so R = 0.5 - 0.5^2 / (2 * 0.5) - delta.
        assert point.residual == pytest.approx(0.249)
        assert point.grad_x.tolist() == [0.0]
        assert point.grad_y.tolist() == pytest.approx([0.0], abs=1e-12)

    def test_where_the_qualification_holds_a_violated_constraint_has_a_gradient(self) -> None:
        """Softmax heads: the norm of the normal-cone residual is positive wherever R >= 0."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(6, 2, generator=generator, dtype=torch.float64)
        labels = torch.tensor([0, 1, 2, 0, 1, 2])

        def lower(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy((x * inputs) @ y.reshape(2, 3), labels)

        problem = BilevelProblem(
            lambda x, y: y.sum(), lower, upper_set=Box(-2, 2), lower_set=Box(-5, 5)
        )
        envelope = Envelope(rho=1.0, sigma=0.0, delta=1e-2)
        seen = 0
        for _ in range(40):
            x = problem.upper_set.project(
                2 * torch.randn(2, generator=generator, dtype=torch.float64)
            )
            y = problem.lower_set.project(
                3 * torch.randn(6, generator=generator, dtype=torch.float64)
            )
            point = gap_at(problem, x, y, envelope)
            if point.residual >= 0.0:
                seen += 1
                assert problem.lower_set.normal_cone_distance(y, point.grad_y) > 1e-4
        assert seen > 20


class TestReweighted:
    def test_the_papers_example(self) -> None:
        verdict = ReweightedSigmoidNetwork(hidden=32, classes=10)(PAPER, HUNDRED, HUNDRED)
        assert verdict.startswith("holds")
        assert verdict.startswith("holds: delta = 0.001 > 2.5e-40 = omega(-100) D")
        spread = cross_entropy_bound(classes=10, features=32, weight=100.0)
        threshold = (2 * 100 * 33 + math.log(10)) / (1 + math.exp(100))
        assert threshold == pytest.approx(2.456e-40, rel=1e-3)
        for condition in (ReweightedSigmoidNetwork(32, 10), Reweighted(spread)):
            above = condition(with_delta(1.0001 * threshold), HUNDRED, HUNDRED)
            below = condition(with_delta(0.9999 * threshold), HUNDRED, HUNDRED)
            assert above.startswith("holds")
            assert below.startswith("not known")

    def test_delta_must_be_strictly_larger(self) -> None:
        # omega(0) = 1/2
        condition = Reweighted(spread=2.0)
        assert condition(with_delta(1.0), HUNDRED, Box(0, 1)).startswith("not known")
        assert condition(with_delta(1.0001), HUNDRED, Box(0, 1)).startswith("holds")

    @pytest.mark.parametrize(
        ("lower_set", "upper_set", "delta", "words"),
        [
            (Free(), HUNDRED, 1e-3, "the losses must be bounded on Y, which Free() does not tell"),
            (
                Box(0.0, torch.inf),
                HUNDRED,
                1e-3,
                "the losses must be bounded on Y, which Box(0, inf) does not tell",
            ),
            (HUNDRED, Free(), 1e-3, "x must lie in a bounded box, and lies in Free()"),
            (
                HUNDRED,
                Ball(3.0),
                1e-3,
                "x must lie in a bounded box, and lies in Ball(radius=3, center=0)",
            ),
            (
                HUNDRED,
                Box(-10, 10),
                1e-5,
                "delta = 1e-05 <= 0.00023 = omega(-10) D, where the losses vary over Y by at most "
                "D = 5",
            ),
        ],
    )
    def test_numbers_that_do_not_do(
        self, lower_set: ConvexSet, upper_set: ConvexSet, delta: float, words: str
    ) -> None:
        verdict = Reweighted(spread=5.0)(with_delta(delta), lower_set, upper_set)
        assert verdict == f"not known: {words}"

    def test_a_bounded_set_of_y_of_any_shape_does(self) -> None:
        assert Reweighted(5.0)(PAPER, Ball(2.0), HUNDRED).startswith("holds")

    def test_the_sigmoid_network_needs_a_box_of_y(self) -> None:
        verdict = ReweightedSigmoidNetwork(4, 3)(PAPER, Ball(2.0), HUNDRED)
        assert verdict == (
            "not known: y must lie in a bounded box, and lies in Ball(radius=2, center=0)"
        )

    def test_without_a_spread_it_says_how_large_it_may_be(self) -> None:
        verdict = Reweighted()(PAPER, HUNDRED, Box(-10, 10))
        assert verdict.startswith("not known")
        # 1e-3 (1 + e^10) = 22.03
        assert verdict == (
            "not known: it holds if the loss of each sample varies over Y by less than 22 = "
            "delta / omega(-10)"
        )
        assert Reweighted(22.0)(PAPER, HUNDRED, Box(-10, 10)).startswith("holds")
        assert Reweighted(22.1)(PAPER, HUNDRED, Box(-10, 10)).startswith("not known")

    def test_the_worst_of_several_boxes_counts(self) -> None:
        parts = Product([Box(-100, 100), Box([-3.0, -5.0], 100.0)], [4, 2])
        one = Box(-3, 100)
        envelope = with_delta(0.2)
        assert Reweighted(2.0)(envelope, HUNDRED, parts) == Reweighted(2.0)(envelope, HUNDRED, one)
        mixed = Product([Box(-100, 100), Free()], [4, 2])
        assert "x must lie in a bounded box" in Reweighted(2.0)(envelope, HUNDRED, mixed)

    def test_far_bounds_do_not_overflow(self) -> None:
        wide = Box(-5000, 5000)
        assert Reweighted(1e300)(PAPER, HUNDRED, wide).startswith("holds")
        assert "less than inf = " in Reweighted()(PAPER, HUNDRED, wide)

    def test_below_the_threshold_the_qualification_may_fail(self) -> None:
        """One sample, whose loss is y: at x = -M the weighted loss is linear, and R stationary."""
        problem = BilevelProblem(
            lambda x, y: y.sum(),
            lambda x, y: (x.sigmoid() * y).mean(),
            upper_set=Box(-1, 1),
            lower_set=Box(0, 3),
        )
        x = torch.full((1,), -1.0, dtype=torch.float64)
        y = torch.full((1,), 2.0, dtype=torch.float64)
        weight = 1 / (1 + math.e)
        envelope = Envelope(rho=1.0, sigma=0.0, delta=weight**2 / 2)
        point = gap_at(problem, x, y, envelope)
        assert point.residual == pytest.approx(0.0, abs=1e-15)
        assert problem.upper_set.normal_cone_distance(x, point.grad_x) == 0.0
        assert problem.lower_set.normal_cone_distance(y, point.grad_y) < 1e-9
        assert Reweighted(3.0)(envelope, problem.lower_set, problem.upper_set).startswith(
            "not known"
        )
        large = Envelope(rho=1.0, sigma=0.0, delta=3.01 * weight)
        assert Reweighted(3.0)(large, problem.lower_set, problem.upper_set).startswith("holds")


class TestCrossEntropyBound:
    def test_it_bounds_random_classifiers(self) -> None:
        generator = torch.Generator().manual_seed(0)
        bound = cross_entropy_bound(classes=4, features=3, weight=2.0, feature=5.0)
        assert bound == pytest.approx(2 * 2 * 16 + math.log(4))
        labels = torch.randint(4, (200,), generator=generator)
        for _ in range(20):
            weight = 2 * (2 * torch.rand(4, 3, generator=generator) - 1).sign()
            bias = 2 * (2 * torch.rand(4, generator=generator) - 1).sign()
            features = 5 * (2 * torch.rand(200, 3, generator=generator) - 1).sign()
            losses = torch.nn.functional.cross_entropy(
                features @ weight.T + bias, labels, reduction="none"
            )
            assert float(losses.max()) <= bound

    def test_it_is_attained_up_to_the_logarithm(self) -> None:
        """All logits but one at the top: the loss is 2 S + log(m - 1)."""
        weight = torch.full((4, 3), 2.0)
        weight[0] = -2.0
        bias = torch.tensor([-2.0, 2.0, 2.0, 2.0])
        logits = (5 * torch.ones(3)) @ weight.T + bias
        loss = torch.nn.functional.cross_entropy(logits[None], torch.tensor([0]))
        bound = cross_entropy_bound(classes=4, features=3, weight=2.0, feature=5.0)
        assert float(loss) == pytest.approx(bound - math.log(4) + math.log(3), rel=1e-6)


HOLDS = "holds: because"
FAILS = "fails: because"
UNKNOWN = "not known"


class Line:
    """A user's set that does not say whether it is bounded."""

    def project(self, v: Tensor) -> Tensor:
        return v.clamp(0.0, 1.0)

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        return float(torch.linalg.vector_norm(gradient))


@pytest.mark.parametrize(
    ("verdict", "upper_set", "lower_set", "kinks", "words"),
    [
        (HOLDS, Box(0, 1), Ball(), [], "applies, if the gradients of f and g are Lipschitz"),
        (UNKNOWN, Box(0, 1), Ball(), [], "not known: the constraint qualification"),
        (FAILS, Box(0, 1), Ball(), [], "does not apply: the constraint qualification fails"),
        (HOLDS, Box(0, 1), Free(), [], "does not apply: Y is unbounded"),
        (HOLDS, Box(0.0, torch.inf), Ball(), [], "does not apply: X is unbounded"),
        (HOLDS, Free(), Free(), [], "does not apply: X and Y are unbounded"),
        (UNKNOWN, Ball(), Free(), [], "does not apply: Y is unbounded"),
        (HOLDS, Ball(), Ball(), ["ReLU"], "does not apply: ReLU is not differentiable"),
        (
            HOLDS,
            Ball(),
            Ball(),
            ["ReLU", "max-pooling"],
            "does not apply: ReLU and max-pooling are not differentiable",
        ),
        (
            FAILS,
            Free(),
            Ball(),
            ["ReLU"],
            "does not apply: X is unbounded, ReLU is not differentiable, the constraint "
            "qualification fails",
        ),
        (HOLDS, Box(0, 1), Line(), [], "not known: whether Y is bounded"),
        (
            UNKNOWN,
            Line(),
            Ball(),
            [],
            "not known: whether X is bounded, the constraint qualification",
        ),
        (HOLDS, Line(), Free(), [], "does not apply: Y is unbounded"),
    ],
)
def test_theorem(
    verdict: str, upper_set: ConvexSet, lower_set: ConvexSet, kinks: list[str], words: str
) -> None:
    assert isinstance(Line(), ConvexSet)
    assert theorem(verdict, upper_set, lower_set, kinks) == words
