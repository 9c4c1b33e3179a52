"""Hyper-cleaning: the model is the paper's, and it cleans."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from modules import MILD
from places import CONFIGS
from running import events, fit, trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_bilevel import BOME, DatasetCleaning, Envelope, HyperCleaning


def blobs(count: int, seed: int) -> TensorDataset:
    """Images of 2 x 2 pixels, the brightest of which is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    images = 0.3 * torch.rand(count, 4, generator=generator)
    images[torch.arange(count), labels] += 0.6
    return TensorDataset(images.view(count, 1, 2, 2), labels)


def data(n_train: int = 60, **options: Any) -> DatasetCleaning:
    return DatasetCleaning(
        blobs(n_train, 1),
        blobs(50, 2),
        blobs(40, 3),
        **{"corruption": 0.4, "epoch_length": 25, **options},
    )


def module(n_train: int = 60, **options: Any) -> HyperCleaning:
    torch.manual_seed(0)
    return HyperCleaning(
        n_train=n_train, inputs=4, hidden=8, classes=4, **{"solver": MILD, **options}
    )


def test_the_papers_sizes_and_start() -> None:
    torch.manual_seed(0)
    paper = HyperCleaning()
    values = torch.cat([p.detach().reshape(-1) for p in paper.classifier.parameters()])
    assert values.numel() == 25_450
    assert paper.logits.numel() == 5_000
    assert float(values.std()) == pytest.approx(0.01, rel=0.05)
    assert torch.equal(paper.weights.values(), torch.full((5000,), 0.5))


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_losses_are_the_papers(chunk_size: int | None) -> None:
    ours, source = module(), data(chunk_size=chunk_size)
    whole = data()
    x, y = torch.randn(60), 0.3 * torch.randn(sum(p.numel() for p in ours.classifier.parameters()))
    problem = ours.bilevel_problem({"upper": source.upper, "lower": source.lower})
    a, b, c, d = y.split([32, 8, 32, 4])

    def network(images: torch.Tensor) -> torch.Tensor:
        return (images.flatten(1) @ a.view(8, 4).T + b).sigmoid() @ c.view(4, 8).T + d

    images, labels, _ = whole.lower
    losses = cross_entropy(network(images), labels, reduction="none")
    assert problem.at(x).value(y) == pytest.approx(
        float((x.sigmoid() * losses).sum() / 60), rel=1e-5
    )
    assert problem.upper(x, y).value == pytest.approx(
        float(cross_entropy(network(whole.upper[0]), whole.upper[1])), rel=1e-5
    )


def test_it_separates_clean_from_corrupted(tmp_path: Any) -> None:
    # BOME's short steps: with the long ones of a line search, so small a problem ends now here and
    # now there.
    ours = module(upper_unit=30.0, solver=partial(BOME, xi=3.0, alpha=1.0, eta=0.5, T=1))
    source = data()
    logger = TensorBoardLogger(tmp_path)
    run = trainer(tmp_path, max_epochs=8, logger=logger, log_every_n_steps=25)
    run.fit(ours, datamodule=source)
    assert float(run.callback_metrics["auroc"]) > 0.95
    assert float(run.callback_metrics["val_loss"]) < 0.7
    assert source.corrupted is not None
    found = ours.suspicious(int(source.corrupted.sum()))
    assert float(source.corrupted[found].float().mean()) > 0.85
    assert "suspicious samples" in events(Path(logger.log_dir)).Tags()["images"]
    axes = ours.suspicious_figure(source.lower, count=10).axes
    shown = [axis for axis in axes if axis.get_images()]
    assert (len(axes), len(shown)) == (16, 10)  # two rows of eight
    worst = ours.suspicious(10)
    given = [int(axis.get_title().split()[0]) for axis in shown]
    assert given == source.lower[1][worst].tolist()
    guesses = [int(axis.get_title().split()[-1]) for axis in shown]
    assert guesses == ours(source.lower[0][worst]).argmax(1).tolist()


def test_metrics_are_what_they_say(tmp_path: Any) -> None:
    ours, source = module(), data()
    run = trainer(tmp_path, max_epochs=1)
    run.fit(ours, datamodule=source)
    auroc = float(run.callback_metrics["auroc"])
    missed = float(run.callback_metrics["missed_errors"])
    images, labels = source.test
    error = float((ours(images).argmax(1) != labels).float().mean())
    assert float(run.callback_metrics["test_error"]) == pytest.approx(error, abs=1e-6)
    images, labels = source.validation
    wrong = float((ours(images).argmax(1) != labels).float().mean())
    assert float(run.callback_metrics["val_error"]) == pytest.approx(wrong, abs=1e-6)
    assert run.test(ours, datamodule=source, verbose=False)[0]["test_error"] == pytest.approx(
        error, abs=1e-6
    )
    bad, good = ours.logits[source.corrupted], ours.logits[~source.corrupted]  # type: ignore[operator]
    pairs = (bad[:, None] < good[None]).float() + 0.5 * (bad[:, None] == good[None]).float()
    assert auroc == pytest.approx(float(pairs.mean()), abs=1e-6)
    found = source.corrupted[ours.suspicious(len(bad))].float().mean()  # type: ignore[index]
    assert missed == pytest.approx(1 - float(found), abs=1e-6)


def test_unknown_corruption_has_no_auroc(tmp_path: Any) -> None:
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module(), datamodule=data(corruption=0.0))
    assert "auroc" not in run.callback_metrics
    assert "missed_errors" not in run.callback_metrics


def test_qualification_is_the_papers_corollary(tmp_path: Any) -> None:
    ours = module()
    trainer(tmp_path, max_steps=1).fit(ours, datamodule=data())
    certificate = ours.certify()
    assert certificate is not None
    # (2 * 100 * (8 + 1) + log 4) / (1 + e^100)
    assert certificate.qualification.startswith("holds: delta = 0.001 > 6.7e-41")
    assert certificate.theorem == "applies, if the gradients of f and g are Lipschitz"
    tiny = ours.certify(envelope=Envelope(rho=0.1, sigma=1.0, delta=1e-45))
    assert tiny is not None
    assert tiny.qualification.startswith("not known: delta = 1e-45 <= 6.7e-41")


def test_any_classifier(tmp_path: Any) -> None:
    ours = module(
        classifier=nn.Sequential(nn.Flatten(), nn.Linear(4, 4)),
        solver=BOME,
        envelope=Envelope(0.1, 1.0, 1e-3),
    )
    trainer(tmp_path, max_steps=2).fit(ours, datamodule=data())
    certificate = ours.certify()
    assert certificate is not None
    # 1e-3 (1 + e^100)
    assert certificate.qualification == (
        "not known: it holds if the loss of each sample varies over Y by less than 2.7e+40 = "
        "delta / omega(-100)"
    )
    assert certificate.theorem == "not known: the constraint qualification"


def test_data_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    words = "`HyperCleaning` has the weights of 61 samples and was given 60 training samples"
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, max_steps=1).fit(module(n_train=61), datamodule=data())


@pytest.mark.integration
def test_digits_are_cleaned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer's command, with half of its iterations."""
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    short = "--trainer.max_epochs=5"
    fit(tmp_path, *quiet, short, config=CONFIGS / "digits" / "ivsp_default.yaml")
    # The table of the last iterate comes first, that of the theorem's point follows.
    printed = capsys.readouterr().out.split("theorem's point")[0]
    rows = {
        line.split("  ")[0].strip(): line.split("  ")[-1].strip()
        for line in printed.splitlines()
        if "  " in line
    }
    assert float(rows["auroc"]) >= 0.96
    assert float(rows["test_error"]) <= 0.04
    assert "L_yy" in rows["chosen constants"]
    assert float(rows["KKT feasibility"]) < 1e-3
