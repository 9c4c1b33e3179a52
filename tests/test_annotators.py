"""Annotators of different reliability."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.annotators import annotated, annotated_labels, error_rates
from lightning_bilevel import DigitsCleaning, HyperCleaning


@pytest.mark.parametrize("corruption", [0.3, 0.5, 0.6, 0.8])
def test_each_annotator_errs_at_their_own_rate(corruption: float) -> None:
    n = 20 * 500
    labels = torch.arange(n) % 7
    generator = torch.Generator().manual_seed(0)
    noisy, corrupted, annotator = annotated_labels(labels, 7, corruption, generator=generator)
    assert torch.equal(noisy != labels, corrupted)
    assert torch.equal(noisy[corrupted], (labels[corrupted] + 1) % 7)
    assert torch.bincount(annotator).tolist() == [500] * 20
    shares = torch.bincount(annotator, weights=corrupted.double()) / 500
    assert torch.allclose(shares.sort().values, error_rates(corruption), atol=1e-3)
    assert float(shares.mean()) == pytest.approx(corruption, abs=0.01)
    # Nobody can tell from the number of an annotator how reliable they are.
    assert not torch.equal(shares, shares.sort().values)


def test_rates_at_the_ends() -> None:
    assert torch.equal(error_rates(0.0), torch.zeros(20, dtype=torch.float64))
    assert torch.equal(error_rates(1.0), torch.ones(20, dtype=torch.float64))
    assert error_rates(0.5, 4).tolist() == [0.125, 0.375, 0.625, 0.875]


def data(**options: int) -> Any:
    made = annotated(DigitsCleaning)(400, 50, corruption=0.6, **options)
    made.setup()
    return made


def test_the_number_of_the_annotator_travels_with_the_sample() -> None:
    made = data(batch_size=64)
    images, noisy, number, annotator = made.lower
    assert torch.equal(annotator, made.annotators)
    for batch in made.train_dataloader()["lower"]:
        assert torch.equal(batch[3], annotator[batch[2]])
        assert torch.equal(batch[1], noisy[batch[2]])
        assert torch.equal(batch[0], images[batch[2]])
    assert torch.equal(number, torch.arange(400))
    other = data()
    assert torch.equal(other.lower[1], noisy)


def test_weights_per_sample_take_these_data_as_well() -> None:
    made = data()
    module = HyperCleaning(400, 64)
    problem = module.bilevel_problem({"upper": made.upper, "lower": made.lower})
    x, y = module.point
    assert problem.at(x).value(y) > 0
