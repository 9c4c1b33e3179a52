"""Nested samples: a permutation, each beginning of which is drawn and stratified."""

from __future__ import annotations

import pytest
import torch

from lightning_bilevel.core.nested import nested_order
from lightning_bilevel.core.passes import Calls
from lightning_bilevel.core.stage import Stage

CLASSES = torch.tensor([0] * 60 + [1] * 30 + [7] * 10)


@pytest.mark.parametrize("classes", [None, CLASSES])
def test_each_sample_comes_once_and_the_seed_alone_decides(classes: torch.Tensor | None) -> None:
    state = torch.get_rng_state()
    first = nested_order(100, 3, classes)
    torch.rand(5)
    assert torch.equal(first, nested_order(100, 3, classes))
    assert first.sort().values.tolist() == list(range(100))
    assert not torch.equal(first, nested_order(100, 4, classes))
    torch.set_rng_state(state)
    nested_order(100, 3, classes)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", range(5))
def test_every_beginning_has_each_class_by_its_share(seed: int) -> None:
    order = nested_order(100, seed, CLASSES)
    for size in range(1, 101):
        taken = CLASSES[order[:size]]
        for label, share in ((0, 0.6), (1, 0.3), (7, 0.1)):
            assert abs(int((taken == label).sum()) - share * size) < 2, (size, label)


def test_within_a_class_every_sample_may_come_first() -> None:
    first = {int(nested_order(100, seed, CLASSES)[0]) for seed in range(200)}
    assert len(first) > 40


def test_a_class_of_one_sample_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"class 5 has one of the 3 samples alone: .* at least two of each class"
    ):
        nested_order(3, 0, torch.tensor([2, 5, 2]))


def test_passes_over_a_sample_count_by_their_share() -> None:
    stage = Stage(samples=100, total=400, upper=0.5, lower=0.25)
    assert stage.passes(Calls(upper=2, lower=3, gap=1, products=1, constraints=1)) == pytest.approx(
        0.5 * (2 + 1) + 0.25 * (3 + 2 + 2)
    )
    assert not stage.is_last
    assert str(stage) == "a sample of 100 of 400 samples"
    assert Stage(400, 400, 1.0, 1.0).is_last
