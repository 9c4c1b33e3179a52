"""The derivative of the projection onto each set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_bilevel import Ball, Box, ConvexSet, Free, Product, Simplex
from lightning_bilevel.core.faces import face_at
from lightning_bilevel.core.sets import Scaled

SETS: list[ConvexSet] = [
    Free(),
    Box(-0.4, 0.7),
    Box([-0.5, -0.1, 0.0, 0.2, -torch.inf], [0.5, 0.4, 0.3, 0.9, 0.0]),
    Box(0.0, torch.inf),
    Ball(1.0),
    Ball(0.7, [0.1, -0.2, 0.3, 0.0, 0.5]),
    Ball(100.0),
    Simplex(),
    Simplex(3.0),
    Product([Ball(0.5), Box(-0.3, 0.3)], [3, 2]),
    Product([Simplex(), Free()], [3, 2]),
    Scaled(Ball(1.0), 2.0),
    Scaled(Box(-0.4, 0.7), 0.3),
]


@pytest.mark.parametrize("convex_set", SETS, ids=repr)
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_limit_of_difference_quotients(convex_set: ConvexSet, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    u, v, w = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    face = face_at(convex_set, u)
    t = 1e-6
    quotient = (convex_set.project(u + t * v) - convex_set.project(u - t * v)) / (2 * t)
    torch.testing.assert_close(face.differential(v), quotient, rtol=1e-7, atol=1e-8)
    # T is an orthogonal projection.
    torch.testing.assert_close(face.tangent(face.tangent(v)), face.tangent(v))
    assert float(w @ face.tangent(v)) == pytest.approx(float(v @ face.tangent(w)), abs=1e-12)


def test_a_point_at_a_bound_without_a_force_is_free() -> None:
    face = face_at(Box(0.0, 1.0), torch.tensor([0.0, 1.0, -1e-9, 2.0]))
    assert face.tangent(torch.ones(4)).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_another_set_is_refused() -> None:
    class Half:
        def project(self, v: Tensor) -> Tensor:
            return v

        def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
            return 0.0

        def __repr__(self) -> str:
            return "Half()"

    with pytest.raises(TypeError, match=r"projection onto Half\(\) is not known: hypergradients"):
        face_at(Half(), torch.zeros(2))
