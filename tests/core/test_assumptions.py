"""Which assumptions of the theorem a problem meets, as far as they can be seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_bilevel.core.assumptions import theorem
from lightning_bilevel.core.sets import Ball, Box, ConvexSet, Free

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
