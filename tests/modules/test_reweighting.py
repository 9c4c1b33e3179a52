"""Reweighting: the losses are what they say, and the weights find what is wrong."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from running import same_parameters, trainer
from streaming import Resumable, loader
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_bilevel import (
    BOME,
    ClassWeights,
    DatasetCleaning,
    HyperCleaning,
    Numbered,
    Reweighting,
    SampleWeights,
    SourceWeights,
    TableRMS,
    WeightNet,
)
from lightning_bilevel.modules.networks import MLP
from lightning_bilevel.modules.reweighting import detection
from lightning_bilevel.stochastic import F2SA, StreamingIVSP


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points around four corners, which are the classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    return corners[labels] + 0.3 * torch.randn(count, 2, generator=generator), labels


def network() -> MLP:
    torch.manual_seed(0)
    return MLP(2, 16, 4)


def noisy(count: int = 240, share: float = 0.4) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels of which a share is moved to the next class, and which these are."""
    inputs, labels = blobs(count, 1)
    wrong = torch.arange(count) < share * count
    return inputs, torch.where(wrong, (labels + 1) % 4, labels), wrong


def loaders(lower: Dataset[Any], size: int = 40) -> dict[str, DataLoader[Any]]:
    generator = torch.Generator().manual_seed(5)
    return {
        "upper": DataLoader(TensorDataset(*blobs(24, 2)), 24),
        "lower": DataLoader(lower, size, shuffle=True, generator=generator),
    }


def validation() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*blobs(10, 4)), 10)


def learned(tmp_path: Path, weights: Any, lower: Dataset[Any], steps: int, **options: Any) -> Any:
    module = Reweighting(network(), weights, lower_optimizer=partial(AdamW, lr=3e-3), **options)
    torch.manual_seed(1)
    trainer(tmp_path, max_steps=steps).fit(module, loaders(lower), validation())
    return module


# The losses


@pytest.mark.parametrize("kind", ["sample", "source", "class", "net"])
def test_losses_are_the_weighted_and_the_plain_mean(kind: str) -> None:
    weights: Any = {
        "sample": SampleWeights(9),
        "source": SourceWeights(3),
        "class": ClassWeights(4),
        "net": WeightNet(),
    }[kind]
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.normal_()
    module = Reweighting(network(), weights)
    inputs, labels = blobs(5, 3)
    number = torch.tensor([8, 0, 3, 1, 7])
    source = torch.tensor([2, 0, 0, 1, 2])
    losses = cross_entropy(module(inputs), labels, reduction="none").detach()
    key = {"sample": number, "source": source, "class": labels, "net": losses}[kind]
    w = weights(key).tolist()
    expected = sum(a * float(b) for a, b in zip(w, losses, strict=True)) / sum(w)
    batch = inputs, labels, number, source
    found = module.lower_loss(batch, module.lower_outputs(batch))
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5)
    mean = float(losses.mean())
    assert float(module.upper_loss((inputs, labels)).detach()) == pytest.approx(mean, rel=1e-6)


def test_a_batch_of_three_entries_has_the_source_as_its_last() -> None:
    module = Reweighting(network(), SourceWeights(3))
    source = torch.tensor([2, 0])
    assert module.key((torch.rand(2, 2), torch.tensor([0, 1]), source)) is source


def test_it_is_hyper_cleaning_with_the_weighted_mean_bit_for_bit(tmp_path: Path) -> None:
    inputs, labels, _ = noisy(60)
    ends = []
    cosine = partial(CosineAnnealingLR, T_max=12)
    options: Any = {
        "lower_optimizer": partial(AdamW, lr=1e-2),
        "upper_scheduler": cosine,
        "lower_scheduler": cosine,
    }
    for ready in (True, False):
        data = DatasetCleaning(
            TensorDataset(inputs, labels), TensorDataset(*blobs(12, 2)), batch_size=16
        )
        module: Any
        if ready:
            module = HyperCleaning(
                60, classifier=network(), classes=4, weighted_mean=True, upper_bound=8.0, **options
            )
        else:
            module = Reweighting(network(), SampleWeights(60), **options)
        torch.manual_seed(4)
        trainer(tmp_path, max_steps=12).fit(module, datamodule=data)
        ends.append(torch.cat(module.point))
    assert float(ends[0][:60].abs().max()) > 1.0
    assert torch.equal(*ends)


# Runs


def test_weights_per_sample_find_the_wrong_labels(tmp_path: Path) -> None:
    inputs, labels, wrong = noisy()
    weights = SampleWeights(240)
    lower = Numbered(TensorDataset(inputs, labels))
    module = learned(tmp_path, weights, lower, 150)
    values = weights.values()
    assert float(values[wrong].mean()) < 0.1
    assert detection(-values, wrong)["auroc"] > 0.95
    test_inputs, test_labels = blobs(200, 9)
    assert float((module(test_inputs).argmax(1) != test_labels).float().mean()) < 0.1


def test_only_the_weights_of_a_batch_move(tmp_path: Path) -> None:
    inputs, labels, _ = noisy()
    weights = SampleWeights(240)
    lower = TensorDataset(inputs, labels, torch.arange(240))
    subset = torch.utils.data.Subset(lower, list(range(100, 140)))
    module = learned(tmp_path, weights, subset, 3)
    moved = weights.logits.detach() != 0
    assert moved[100:140].all()
    assert int(moved.sum()) == 40
    assert module.last_step.iteration == 3


def test_weights_per_source_follow_its_quality(tmp_path: Path) -> None:
    inputs, labels, _ = noisy(share=0.0)
    source = torch.arange(240) % 3
    # Source 0 is right, half of source 1 is wrong, all of source 2 is.
    wrong = (source == 2) | ((source == 1) & (torch.arange(240) % 2 == 0))
    given = torch.where(wrong, (labels + 1) % 4, labels)
    weights = SourceWeights(3)
    weights.optimizer = partial(AdamW, lr=5e-2, weight_decay=0.0)
    lower = Numbered(TensorDataset(inputs, given), keys=source)
    learned(tmp_path, weights, lower, 200)
    right, half, none = weights.shares().tolist()
    assert right > half > none
    assert none < 0.05


def test_weights_per_class_raise_a_class_that_is_rare(tmp_path: Path) -> None:
    # Two classes that overlap; below one of ten samples is of the second, above they are even.
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(200) >= 180).long()
    inputs = torch.randn(200, 1, generator=generator) + labels.unsqueeze(1)
    even = torch.arange(200) % 2
    trusted = torch.randn(200, 1, generator=generator) + even.unsqueeze(1)
    weights = ClassWeights(2)
    torch.manual_seed(0)
    module = Reweighting(
        nn.Linear(1, 2),
        weights,
        method=F2SA(multiplier=5.0),
        upper_optimizer=partial(AdamW, lr=5e-2, weight_decay=0.0),
        lower_optimizer=partial(AdamW, lr=0.2, weight_decay=0.0),
    )
    data = {
        "upper": DataLoader(TensorDataset(trusted, even), 200),
        "lower": DataLoader(TensorDataset(inputs, labels), 200),
    }
    # An epoch is one step: a validation after each would take most of the time.
    run = trainer(tmp_path, max_steps=300, check_val_every_n_epoch=100)
    run.fit(module, data, data["upper"])
    # 180 : 20 becomes even with weights that are as 1 : 9.
    ratio = float(weights.values()[1] / weights.values()[0])
    assert 7 < ratio < 11


def test_a_weight_net_learns_that_large_losses_are_wrong_labels(tmp_path: Path) -> None:
    inputs, labels, wrong = noisy(share=0.3)
    net = WeightNet()
    module = learned(tmp_path, net, TensorDataset(inputs, labels), 250)
    with torch.no_grad():
        losses = module.lower_outputs((inputs, labels))
        weights = net(losses)
    assert float(losses[wrong].mean()) > float(losses[~wrong].mean())
    assert float(weights[wrong].mean()) < float(weights[~wrong].mean()) - 0.2
    # The same loss has the same weight, wherever it comes from.
    with torch.no_grad():
        low, high = net(torch.tensor([0.0, 3.0])).tolist()
    assert low > high


def test_any_model_and_any_loss(tmp_path: Path) -> None:
    """A LightningModule, regression, and batches that are dicts."""

    class Line(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.slope * inputs

    class Dicts(Reweighting):
        def split(self, batch: Any) -> tuple[Any, Any]:
            return batch["input"], batch["target"]

        def key(self, batch: Any) -> Any:
            return batch["number"]

    inputs = torch.linspace(-1, 1, 40)
    wrong = torch.arange(40) % 2 == 0
    targets = torch.where(wrong, -2 * inputs, 2 * inputs)
    samples: Any = [{"input": a, "target": b} for a, b in zip(inputs, targets, strict=True)]
    trusted: Any = [{"input": a, "target": 2 * a} for a in torch.linspace(-1, 1, 8)]
    weights = SampleWeights(40)
    loss = partial(mse_loss, reduction="none")
    adamw = partial(AdamW, lr=5e-2)
    module = Dicts(Line(), weights, loss, F2SA(multiplier=1.0), lower_optimizer=adamw)
    data = {"upper": DataLoader(trusted, 8), "lower": DataLoader(Numbered(samples), 20)}
    run = trainer(tmp_path, max_steps=200)
    run.fit(module, data, DataLoader(trusted, 8))
    assert module.point[1].item() == pytest.approx(2.0, abs=0.2)
    # Points near zero say little of the slope.
    outer = inputs.abs() > 0.8
    assert (weights.values()[outer & wrong] < 0.1).all()
    assert (weights.values()[outer & ~wrong] > 0.9).all()
    assert float(run.callback_metrics["val_loss"]) < 0.05
    assert "val_error" not in run.callback_metrics


@pytest.mark.parametrize(
    ("weights", "kind", "rate"), [(SourceWeights(2), AdamW, 1e-2), (SampleWeights(40), TableRMS, 3)]
)
def test_without_a_word_the_optimiser_is_that_of_the_weights(
    tmp_path: Path, weights: nn.Module, kind: Any, rate: float
) -> None:
    module = Reweighting(network(), weights)
    lower = Numbered(TensorDataset(*blobs(40, 1)), keys=torch.arange(40) % 2)
    run = trainer(tmp_path, max_steps=1)
    if kind is TableRMS:
        lower = Numbered(TensorDataset(*blobs(40, 1)))
    run.fit(module, loaders(lower), validation())
    upper, below = run.optimizers
    assert (type(upper), type(below)) == (kind, AdamW)
    assert [o.param_groups[0]["lr"] for o in (upper, below)] == [rate, 1e-4]
    assert module.mini_batches is not None
    assert module.mini_batches.step is not None
    assert module.mini_batches.step.method == StreamingIVSP()


def test_with_a_solver_it_is_exact(tmp_path: Path) -> None:
    module = Reweighting(network(), SampleWeights(60), solver=BOME)
    data = data_module(batch_size=None)
    run = trainer(tmp_path, max_steps=2)
    run.fit(module, datamodule=data)
    assert type(run.optimizers[0]) is BOME
    assert module.mini_batches is None
    with pytest.raises(ValueError, match="give one of the two"):
        Reweighting(network(), SampleWeights(3), solver=BOME, method=F2SA())
    with pytest.raises(ValueError, match="arguments of a run on mini-batches: give one of the two"):
        Reweighting(network(), SampleWeights(3), solver=BOME, accumulate=2)


def test_clipping_and_accumulation_reach_the_step(tmp_path: Path) -> None:
    module = Reweighting(network(), SampleWeights(240), gradient_clip_val=(None, 0.5), accumulate=2)
    lower = Numbered(TensorDataset(*noisy()[:2]))
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, loaders(lower), validation())
    assert run.global_step == 3
    assert module.mini_batches is not None
    assert module.mini_batches.step is not None
    assert module.mini_batches.step.options.clip == (None, 0.5)


@pytest.mark.parametrize("kind", ["sample", "source", "net"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path, kind: str) -> None:
    def make() -> Reweighting:
        weights: Any = {
            "sample": SampleWeights(30),
            "source": SourceWeights(30),
            "net": WeightNet(4),
        }[kind]
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        cosine = partial(CosineAnnealingLR, T_max=12)
        return Reweighting(model, weights, upper_scheduler=cosine, lower_scheduler=cosine)

    def run(module: Reweighting, checkpoint: Path | None = None) -> Reweighting:
        torch.manual_seed(5 if checkpoint is None else 99)
        saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        fit = trainer(
            tmp_path,
            max_epochs=3,
            num_sanity_val_steps=0,
            enable_checkpointing=True,
            callbacks=[saving],
        )
        data = {"upper": Resumable(20, 1, 5), "lower": Resumable(30, 2, 10)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            fit.fit(module, data, loader(20, 3, 20), ckpt_path=checkpoint)
        return module

    whole = run(make())
    resumed = run(make(), tmp_path / "step=6.ckpt")
    assert same_parameters(whole, resumed)
    assert not same_parameters(whole, make())


# What is logged


def data_module(**options: Any) -> DatasetCleaning:
    return DatasetCleaning(
        TensorDataset(*blobs(60, 1)),
        TensorDataset(*blobs(30, 2)),
        TensorDataset(*blobs(50, 3)),
        **{"corruption": 0.4, "batch_size": 20, **options},
    )


def test_metrics_are_what_they_say(tmp_path: Path) -> None:
    data = data_module()
    weights = SampleWeights(60)
    module = Reweighting(network(), weights)
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, datamodule=data)
    inputs, labels = data.validation
    logits = module(inputs)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    assert metrics["val_loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)
    wrong = float((logits.argmax(1) != labels).float().mean())
    assert metrics["val_error"] == pytest.approx(wrong, abs=1e-6)
    test_inputs, test_labels = data.test
    wrong = float((module(test_inputs).argmax(1) != test_labels).float().mean())
    assert metrics["test_error"] == pytest.approx(wrong, abs=1e-6)
    tested = run.test(module, datamodule=data, verbose=False)[0]
    assert tested["test_error"] == pytest.approx(wrong, abs=1e-6)
    assert data.corrupted is not None
    bad = weights.logits[data.corrupted]
    good = weights.logits[~data.corrupted]
    pairs = (bad[:, None] < good[None]).float() + 0.5 * (bad[:, None] == good[None]).float()
    assert metrics["auroc"] == pytest.approx(float(pairs.mean()), abs=1e-6)
    predicted: Any = run.predict(module, DataLoader(TensorDataset(inputs, labels), batch_size=30))
    assert torch.equal(predicted[0], logits)


def test_the_weights_of_sources_are_logged_by_their_numbers(tmp_path: Path) -> None:
    weights = SourceWeights(3)
    lower = Numbered(TensorDataset(*noisy()[:2]), keys=torch.arange(240) % 3)
    run = trainer(tmp_path, max_epochs=1)
    run.fit(Reweighting(network(), weights), loaders(lower), validation())
    logged = [float(run.callback_metrics[f"weight/{i}"]) for i in range(3)]
    assert logged == weights.values().tolist() != [1.0, 1.0, 1.0]


def test_chunks_have_the_same_metrics(tmp_path: Path) -> None:
    found = []
    for chunk_size in (None, 7):
        module = Reweighting(network(), SampleWeights(60))
        with torch.no_grad():
            module.weights.logits.copy_(torch.linspace(-1, 1, 60))  # type: ignore[union-attr,operator]
        run = trainer(tmp_path)
        data = data_module(chunk_size=chunk_size)
        found.append(run.validate(module, datamodule=data, verbose=False)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# What is refused


def refused(tmp_path: Path, module: Reweighting, lower: Dataset[Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        trainer(tmp_path, max_steps=1).fit(module, loaders(lower), validation())


def test_a_loss_that_is_not_per_sample(tmp_path: Path) -> None:
    module = Reweighting(network(), SampleWeights(240), cross_entropy)
    lower = Numbered(TensorDataset(*noisy()[:2]))
    words = r"`Reweighting\(loss=...\)` returned a tensor of shape \(\): .* one loss per sample"
    refused(tmp_path, module, lower, words)


def test_samples_that_have_no_weight(tmp_path: Path) -> None:
    lower = Numbered(TensorDataset(*noisy()[:2]))
    words = "index out of range"
    refused(tmp_path, Reweighting(network(), SampleWeights(30)), lower, words)
    sources = Numbered(TensorDataset(*noisy()[:2]), keys=torch.arange(240) % 5)
    refused(tmp_path, Reweighting(network(), SourceWeights(3)), sources, words)


@pytest.mark.parametrize("weights", [SampleWeights(240), SourceWeights(3)])
def test_samples_that_do_not_carry_a_number(tmp_path: Path, weights: nn.Module) -> None:
    lower = TensorDataset(*noisy()[:2])
    words = r"lower batch of 2 entries: its \w+ needs .*as `Numbered\(dataset\)` makes them"
    refused(tmp_path, Reweighting(network(), weights), lower, words)


def test_batches_of_another_form(tmp_path: Path) -> None:
    samples: Any = [{"input": 1.0}] * 40
    words = r"was given a dict as a batch, not .*override `split\(batch\)`"
    refused(tmp_path, Reweighting(network(), WeightNet()), samples, words)


def test_a_data_module_of_another_size(tmp_path: Path) -> None:
    module = Reweighting(network(), SampleWeights(59))
    words = "`Reweighting` has the weights of 59 samples and was given 60 training samples"
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, max_steps=1).fit(module, datamodule=data_module())
