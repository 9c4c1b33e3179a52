"""Simple ways to cope with wrong labels: their figures are those of an independent computation."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.functional.classification import binary_auroc

from lightning_bilevel import (
    Baseline,
    CleaningData,
    FullBatchDataModule,
    Splits,
    cleaning_baselines,
    missed_errors,
)
from lightning_bilevel.baselines import cleaning

NAMES = [
    "clean samples alone",
    "4-fold cross-validation",
    "self-training, strict",
    "self-training, lenient",
    "all noisy samples",
    "all noisy and clean samples",
    "oracle (true labels)",
]


@pytest.fixture(autouse=True)
def _without_cleanlab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "find_spec", lambda name: None)


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train for a few steps, where it does not matter what is learned."""
    monkeypatch.setattr(cleaning, "_FEWEST_STEPS", 1)
    monkeypatch.setattr(cleaning, "_ROUNDS", 1)


def samples(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes that a small network tells apart: a bright row of an image of 3 x 3."""
    labels = torch.randint(3, (count,), generator=generator)
    images = 0.3 * torch.rand(count, 1, 3, 3, generator=generator)
    images[torch.arange(count), 0, labels] += 1.0
    return images, labels


class Rows(CleaningData):
    classes = 3

    def load(self, generator: torch.Generator) -> Splits:
        return Splits(*(samples(n, generator) for n in (self.n_train, self.n_validation, 200)))


def rows_data(**options: Any) -> Rows:
    data = Rows(**{"n_train": 300, "n_validation": 60, "corruption": 0.4, **options})
    data.setup()
    return data


def by_name(found: list[Baseline]) -> dict[str, Baseline]:
    return {row.name: row for row in found}


def test_every_method_has_its_row_and_the_figures_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cleaning, "_FEWEST_STEPS", 100)
    found = cleaning_baselines(rows_data())
    assert [row.name for row in found] == NAMES
    for row in found[:-1]:
        assert list(row.metrics) == ["test_error", "auroc", "missed_errors"]
        assert row.seconds > 0
    assert list(found[-1].metrics) == ["test_error"]
    named = by_name(found)
    # An easy problem: a clean set alone solves it, and so does what filters.
    for name in NAMES[:4]:
        assert named[name].metrics["auroc"] > 0.99
        assert named[name].metrics["missed_errors"] < 0.05
        assert named[name].metrics["test_error"] < 0.02
    assert named["oracle (true labels)"].metrics["test_error"] < 0.02


def test_clean_samples_alone_is_a_classifier_of_the_validation_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trained here by other lines, with the same random numbers."""
    monkeypatch.setattr(cleaning, "_FEWEST_STEPS", 30)
    data = rows_data()
    torch.manual_seed(7)
    network = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-4)
    images, labels = data.validation
    for _ in range(30):  # one batch of 60 is an epoch, and there are at least 30 steps
        order = torch.randperm(60)
        loss = nn.functional.cross_entropy(network(images[order]), labels[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    noisy_images, noisy, _ = data.lower
    suspicion = -network(noisy_images).softmax(1)[torch.arange(300), noisy].detach()
    test_images, test_labels = data.test
    wrong = data.corrupted
    assert wrong is not None
    found = by_name(
        cleaning_baselines(data, 7, lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3)))
    )
    assert found["clean samples alone"].metrics == pytest.approx(
        {
            "test_error": float((network(test_images).argmax(1) != test_labels).float().mean()),
            "auroc": float(binary_auroc(1 + suspicion, wrong.int())),
            "missed_errors": missed_errors(suspicion, wrong),
        },
        abs=1e-6,
    )


def test_no_sample_is_judged_by_a_network_that_has_seen_it() -> None:
    methods = cleaning._Methods(rows_data(n_train=42), lambda: nn.Linear(1, 3))
    seen: list[set[int]] = []

    class Remembers(nn.Module):
        """Says 1 for a sample of its training, and 0 for any other."""

        def __init__(self, images: torch.Tensor) -> None:
            super().__init__()
            self.mine = {tuple(image.flatten().tolist()) for image in images}

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            known = [tuple(image.flatten().tolist()) in self.mine for image in images]
            return 100.0 * torch.tensor(known).float().unsqueeze(1) * torch.tensor([1.0, 0.0, 0.0])

    def train(images: torch.Tensor, labels: torch.Tensor, epochs: int) -> nn.Module:
        seen.append(set(range(len(images))))
        return Remembers(images)

    methods._train = train  # type: ignore[method-assign]
    p = methods._out_of_sample()
    assert torch.allclose(p, torch.full((42, 3), 1 / 3))
    assert [len(part) for part in seen] == [31, 31, 32, 32]


@pytest.mark.usefixtures("briefly")
def test_rows_depend_on_the_seed_alone() -> None:
    data = rows_data()
    before = torch.get_rng_state()
    first = [row.metrics for row in cleaning_baselines(data, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert [row.metrics for row in cleaning_baselines(data, 1)] == first
    assert [row.metrics for row in cleaning_baselines(data, 2)] != first
    chunked = rows_data(chunk_size=47)
    assert [row.metrics for row in cleaning_baselines(chunked, 1)] == first


def own_data(test: bool, corrupted: bool) -> CleaningData:
    generator = torch.Generator().manual_seed(0)
    sets = [TensorDataset(*samples(n, generator)) for n in (50, 30, 20)]
    mask = torch.arange(50) < 10
    return CleaningData.from_datasets(
        *sets[:2], sets[2] if test else None, mask if corrupted else None
    )


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize(
    ("test", "corrupted", "metrics"),
    [(True, False, ["test_error"]), (False, True, ["auroc", "missed_errors"])],
)
def test_data_that_know_less_have_fewer_figures(
    test: bool, corrupted: bool, metrics: list[str]
) -> None:
    found = cleaning_baselines(own_data(test, corrupted))
    assert [row.name for row in found] == NAMES[:-1]  # nobody knows the true labels
    assert all(list(row.metrics) == metrics for row in found)


def test_data_with_nothing_to_measure() -> None:
    with pytest.raises(
        ValueError,
        match=r"without a test set and without knowing which labels are wrong: there is nothing",
    ):
        cleaning_baselines(own_data(test=False, corrupted=False))


def test_data_that_are_not_there_or_not_of_this_kind() -> None:
    with pytest.raises(ValueError, match=r"a Rows that has no data yet: call its `prepare_data"):
        cleaning_baselines(Rows())
    with pytest.raises(TypeError, match=r"was given a FullBatchDataModule: it must be a `Cleaning"):
        cleaning_baselines(FullBatchDataModule())  # type: ignore[arg-type]


@pytest.mark.usefixtures("briefly")
def test_cleanlab_ranks_by_the_same_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cleanlab")
    monkeypatch.setattr(cleaning, "find_spec", lambda name: sys.modules.get(name))
    found = by_name(cleaning_baselines(rows_data(), 3))
    assert list(found)[2] == "cleanlab"
    ours = found["4-fold cross-validation"].metrics
    theirs = found["cleanlab"].metrics
    assert theirs["auroc"] == pytest.approx(ours["auroc"], abs=1e-6)
    assert theirs["missed_errors"] == pytest.approx(ours["missed_errors"], abs=1e-6)
    assert 0 <= theirs["test_error"] <= 1
