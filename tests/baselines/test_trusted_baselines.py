"""The simple methods beside trusted samples, on points whose classes are known."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_bilevel.baselines.trusted import (
    Found,
    TrustedSamples,
    all_samples,
    cross_validation,
    error,
    oracle,
    probabilities,
    rated_labels,
    rated_sources,
    self_training,
    trusted_alone,
)
from lightning_bilevel.modules.networks import MLP

CORNERS = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])


def points(count: int) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 4
    return CORNERS[labels] + 0.2 * torch.randn(count, 2), labels


def samples(share: float, shift: int | None = 1) -> tuple[TrustedSamples, Tensor]:
    """400 samples, a share of which is wrong: in the next class, or (None) in any other."""
    torch.manual_seed(0)
    inputs, labels = points(400)
    corrupted = torch.rand(400) < share
    other = torch.randint(1, 4, (400,)) if shift is None else torch.full((400,), shift)
    given = torch.where(corrupted, (labels + other) % 4, labels)
    made = TrustedSamples(inputs, given, *points(16), partial(MLP, 2, 16, 4), batch_size=40)
    # An easy problem: with a long step, a third of the usual steps suffices.
    return replace(made, lr=1e-2, fewest_steps=100), corrupted


def test_each_keeps_what_it_says() -> None:
    few, corrupted = samples(0.6)
    assert not trusted_alone(few).kept.any()
    assert all_samples(few).kept.all()
    assert torch.equal(oracle(few, corrupted).kept, ~corrupted)
    assert oracle(few, corrupted).suspicion is None


@pytest.mark.parametrize("strict", [True, False])
def test_self_training_finds_what_trusted_samples_contradict(strict: bool) -> None:
    few, corrupted = samples(0.6)
    found = self_training(few, strict=strict)
    assert float((found.kept == ~corrupted).float().mean()) > 0.97
    assert found.suspicion is not None
    assert float(found.suspicion[corrupted].min()) > float(found.suspicion[~corrupted].median())
    assert error(few.retrain(found.kept), *points(200)) < 0.05


def test_cross_validation_believes_the_majority() -> None:
    many, corrupted = samples(0.3, None)
    assert float((cross_validation(many).kept == ~corrupted).float().mean()) > 0.9
    # Where most labels are in the next class, it believes them.
    few, corrupted = samples(0.7)
    assert float((cross_validation(few).kept == corrupted).float().mean()) > 0.9


def test_an_out_of_sample_probability_belongs_to_its_sample() -> None:
    """Folds are put together in the order of the samples: clean labels are all believed."""
    clean, _ = samples(0.0)
    found = cross_validation(clean)
    assert found.kept.all()
    assert found.suspicion is not None
    assert float(found.suspicion.max()) < -0.5


def test_sources_are_rated_by_how_right_they_are() -> None:
    made, _ = samples(0.0)
    sources = torch.arange(400) // 4 % 4
    # Source 0 is right, 1 is wrong in one of four, 2 in three of four, 3 always.
    rank = torch.arange(400) // 16 % 4
    wrong = rank < torch.tensor([0, 1, 3, 4])[sources]
    made = replace(made, labels=torch.where(wrong, (made.labels + 1) % 4, made.labels))
    found = rated_sources(made, sources)
    assert found.kept.all()
    assert found.suspicion is not None
    assert found.weights is not None
    share = torch.stack([(~wrong[sources == j]).float().mean() for j in range(4)])
    assert torch.allclose(-found.suspicion, share[sources], atol=0.03)
    assert torch.allclose(found.weights, (-found.suspicion / -found.suspicion.min()) ** 8)
    assert error(made.retrain(found.kept, found.weights), *points(200)) < 0.05
    together = rated_labels(made, sources)
    assert together.weights is None
    assert float((together.kept == ~wrong).float().mean()) > 0.97


def test_weights_of_zero_and_one_are_a_choice() -> None:
    """Of 400 samples, two thirds wrong, the weights name the right ones."""
    few, corrupted = samples(0.66)
    everything = torch.ones(400, dtype=torch.bool)
    assert error(few.retrain(everything), *points(200)) > 0.3
    assert error(few.retrain(everything, (~corrupted).float()), *points(200)) < 0.05
    # Equal weights, of whatever size, are no weights: the trusted ones have 1 as well.
    torch.manual_seed(1)
    plain = few.retrain(everything)
    torch.manual_seed(1)
    ones = few.retrain(everything, torch.ones(400))
    for a, b in zip(plain.parameters(), ones.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-3)


def test_probabilities_are_those_of_eval_mode() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5))
    inputs = points(30)[0]
    assert torch.equal(probabilities(network, inputs), network[0](inputs).softmax(1))


def test_a_seed_decides_all() -> None:
    few, _ = samples(0.6)
    found: list[Found] = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(self_training(few))
    assert torch.equal(found[0].kept, found[1].kept)
