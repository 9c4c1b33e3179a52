"""TableRMS: its equations, sparse gradients, entries that no batch touches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_bilevel import TableRMS


def table_by_hand(steps: list[dict[int, float]], lr: float) -> np.ndarray[Any, Any]:
    """The equations of the docstring; a step names some entries with their gradients."""
    x, square, rms = np.zeros(5), 0.0, 0.0
    for t, gradients in enumerate(steps, 1):
        touched = [g**2 for g in gradients.values() if g != 0.0]
        square = 0.99 * square + 0.01 * (np.mean(touched) if touched else 0.0)
        rms = max(rms, np.sqrt(square / (1 - 0.99**t)))
        for i, g in gradients.items():
            if rms > 0:
                x[i] -= lr * np.clip(g / rms, -3, 3)
    return x


STEPS: list[dict[int, float]] = [
    {0: 0.0, 1: 0.0},
    {0: 1.0, 1: -2.0},
    {1: 0.5, 3: 0.0},
    {0: 50.0, 2: 0.01, 3: 0.02, 4: 0.0},
    {4: 1e-3},
]


def given(gradients: dict[int, float], dense: bool) -> Tensor:
    indices = torch.tensor(list(gradients))
    values = torch.tensor(list(gradients.values()), dtype=torch.float64)
    if dense:
        return torch.zeros(5, dtype=torch.float64).index_copy_(0, indices, values)
    return torch.sparse_coo_tensor(
        indices[None], values, (5,), is_coalesced=True, check_invariants=False
    )


class TestTableRMS:
    @pytest.mark.parametrize("dense", [False, True])
    def test_is_its_equations(self, dense: bool) -> None:
        """An entry whose gradient is 0 does not count."""
        x = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        optimizer = TableRMS([x], lr=2.0)
        for gradients in STEPS:
            x.grad = given(gradients, dense)
            optimizer.step()
        np.testing.assert_allclose(x.detach().numpy(), table_by_hand(STEPS, 2.0), rtol=1e-12)

    def test_rows_and_entries_of_a_matrix(self) -> None:
        """Rows as of an embedding, whose sparse gradient may name a row twice."""
        x = nn.Parameter(torch.zeros(4, 2))
        optimizer = TableRMS([x], lr=1.0)
        nn.functional.embedding(torch.tensor([1, 1, 3]), x, sparse=True).sum().backward()
        optimizer.step()
        rms = ((4.0 * 2 + 1.0 * 2) / 4) ** 0.5
        expected = torch.tensor([[0.0] * 2, [-2 / rms] * 2, [0.0] * 2, [-1 / rms] * 2])
        torch.testing.assert_close(x.detach(), expected)
        y = nn.Parameter(torch.zeros(2, 2))
        y.grad = torch.eye(2).to_sparse()
        TableRMS([y], lr=1.0).step()
        torch.testing.assert_close(y.detach(), -torch.eye(2))

    def test_an_empty_batch_and_a_closure(self) -> None:
        x = nn.Parameter(torch.ones(5, dtype=torch.float64))
        optimizer = TableRMS([x])
        x.grad = given({}, dense=False)
        assert optimizer.step(lambda: 7.0) == 7.0
        assert torch.equal(x.detach(), torch.ones(5, dtype=torch.float64))


def test_untouched_entries_stay_bit_for_bit() -> None:
    x = nn.Parameter(torch.linspace(-1, 1, 50))
    start = x.detach().clone()
    optimizer = TableRMS([x])
    for k in range(5):
        x.grad = None
        (3.0 * x[[k, k + 10]]).sin().sum().backward()
        optimizer.step()
    moved = x.detach() != start
    assert moved.nonzero().reshape(-1).tolist() == [*range(5), *range(10, 15)]
