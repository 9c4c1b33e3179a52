from __future__ import annotations

import pytest
import torch

from lightning_bilevel.core import vectors
from lightning_bilevel.core.vectors import dot, norm, squared_distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "size", [1, 1000, vectors._PIECE, vectors._PIECE + 1, 3 * vectors._PIECE + 17]
)
def test_a_sum_in_pieces_is_the_sum(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    u, v = a.double(), b.double()
    # The products and differences are rounded as the vectors are, their sum is not.
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-13)
    assert dot(a, b) == pytest.approx(float(u @ v), abs=tolerance * float(u.abs() @ v.abs()))
    assert norm(a) == pytest.approx(float(u.norm()), rel=tolerance)
    assert squared_distance(a, b) == pytest.approx(float((u - v).square().sum()), rel=4 * tolerance)


def test_one_piece_is_one_sum() -> None:
    a, b = torch.randn(2, vectors._PIECE, generator=torch.Generator().manual_seed(1))
    assert dot(a, b) == float((a * b).sum(dtype=torch.float64))
    assert squared_distance(a, b) == dot(a - b, a - b)


def test_neither_changes_its_vectors() -> None:
    a, b = torch.ones(10), torch.full((10,), 3.0)
    assert squared_distance(a, b) == 40.0
    assert torch.equal(a, torch.ones(10))
    assert torch.equal(b, torch.full((10,), 3.0))


def test_squares_that_float32_does_not_hold() -> None:
    tiny = torch.full((4,), 1e-30)
    assert norm(tiny) == pytest.approx(2e-30, rel=1e-6)
    assert squared_distance(tiny, torch.zeros(4)) == pytest.approx(4e-60, rel=1e-6)
    assert dot(tiny, -tiny) == pytest.approx(-4e-60, rel=1e-6)
