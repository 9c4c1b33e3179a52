"""How well a score finds wrong labels, against values computed by hand."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from lightning_bilevel.modules.reweighting import detection, missed_errors

WRONG = torch.tensor([True, True, True, False, False, False, False])


@pytest.mark.parametrize(
    ("suspicion", "missed", "auroc"),
    [
        # The three most suspicious are the wrong ones: every pair is in order.
        ([7, 6, 5, 4, 3, 2, 1], 0.0, 1.0),
        ([1, 2, 3, 4, 5, 6, 7], 1.0, 0.0),
        # Of 9, 8 and 7, two are wrong. The third, 5, comes after three of the four right ones.
        ([9, 8, 5, 7, 6, 5.5, 1], 1 / 3, (4 + 4 + 1) / 12),
        # No score: any three of seven, so 3/7 of the wrong ones are found.
        ([2, 2, 2, 2, 2, 2, 2], 4 / 7, 0.5),
        # One wrong label above; two places for three tied samples, one of which is wrong.
        ([9, 5, 1, 5, 5, 2, 2], 1 - (1 + 2 / 3) / 3, (4 + (2 * 0.5 + 2) + 0) / 12),
    ],
)
def test_by_hand(suspicion: list[float], missed: float, auroc: float) -> None:
    score = torch.tensor(suspicion, dtype=torch.float32)
    assert missed_errors(score, WRONG) == pytest.approx(missed)
    assert detection(score, WRONG) == pytest.approx({"auroc": auroc, "missed_errors": missed})


def test_ties_are_the_mean_over_all_orders_of_tied_samples() -> None:
    tied = [1, 3, 4]
    score = torch.tensor([9.0, 5, 1, 5, 5, 2, 2])
    shares = []
    for order in permutations(range(3)):
        broken = score.clone()
        for place, index in zip(order, tied, strict=True):
            broken[index] += 0.1 * place
        shares.append(missed_errors(broken, WRONG))
    assert missed_errors(score, WRONG) == pytest.approx(sum(shares) / len(shares))


def test_only_the_order_counts_where_a_sigmoid_would_be_flat() -> None:
    """torchmetrics alone puts such scores through a sigmoid, where 40 and 90 are both 1."""
    score = torch.tensor([90.0, 80, 70, 60, 50, 40, 30])
    assert detection(score, WRONG) == {"auroc": 1.0, "missed_errors": 0.0}
