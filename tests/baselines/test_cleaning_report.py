"""The end of a cleaning run: its own row, simple methods below it, a contact sheet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from modules import MILD
from running import trainer
from torch.utils.data import TensorDataset

from lightning_bilevel import (
    CleaningData,
    CleaningReport,
    FullBatchDataModule,
    HyperCleaning,
    SineProblem,
    cleaning_baselines,
)
from lightning_bilevel.baselines import cleaning


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train for a few steps: it does not matter what is learned."""
    monkeypatch.setattr(cleaning, "_FEWEST_STEPS", 1)
    monkeypatch.setattr(cleaning, "_EPOCHS", 1)
    monkeypatch.setattr(cleaning, "find_spec", lambda name: None)


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 2, 2, generator=generator)
    return TensorDataset(images, torch.randint(3, (count,), generator=generator))


def data(**options: Any) -> CleaningData:
    given: dict[str, Any] = {"test": samples(15, 3), "corruption": 0.4, "epoch_length": 2}
    return CleaningData.from_datasets(samples(20, 1), samples(12, 2), **given | options)


def module() -> HyperCleaning:
    torch.manual_seed(0)
    return HyperCleaning(n_train=20, inputs=4, hidden=3, classes=3, solver=MILD)


def test_the_run_stands_above_the_simple_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, ours, source = CleaningReport(count=5), module(), data(chunk_size=7, seed=3)
    run = trainer(tmp_path, max_epochs=1, callbacks=[report])
    run.fit(ours, datamodule=source)
    first, *others = report.rows
    assert first.name == "IVSP"
    assert first.metrics == {
        name: float(run.callback_metrics[name]) for name in ("test_error", "auroc", "missed_errors")
    }
    assert ours.last_step is not None
    assert first.seconds == ours.last_step.optimization_time
    again = cleaning_baselines(source, 3, ours.fresh_classifier)
    assert [(row.name, row.metrics) for row in others] == [(row.name, row.metrics) for row in again]
    printed = capsys.readouterr().out
    for row in report.rows:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{row.name} ")]
        assert f"{row.metrics['test_error']:.3f}" in line
    assert "AUROC: how well a method ranks the wrong labels" in printed
    assert source.corrupted is not None
    wrong = int(source.corrupted[ours.suspicious(5)].sum())
    sheet = tmp_path / "suspicious.png"
    assert sheet.read_bytes().startswith(b"\x89PNG")
    assert (
        f"The 5 samples of lowest weight, {wrong} of which have a wrong label: {sheet}" in printed
    )


def test_what_is_not_known_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = CleaningReport()
    run = trainer(tmp_path, max_epochs=1, callbacks=[report])
    run.fit(module(), datamodule=data(corruption=0.0))
    assert [list(row.metrics) for row in report.rows] == [["test_error"]] * 7
    printed = capsys.readouterr().out
    assert "AUROC" not in printed
    assert "The 20 samples of lowest weight: " in printed


def test_a_trial_run_has_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = CleaningReport()
    trainer(tmp_path, fast_dev_run=True, callbacks=[report]).fit(module(), datamodule=data())
    assert report.rows == []
    assert list(tmp_path.rglob("*.png")) == []


@pytest.mark.parametrize(
    ("ours", "source", "error", "message"),
    [
        (
            lambda: SineProblem(n=2),
            lambda: FullBatchDataModule(epoch_length=1),
            MisconfigurationException,
            "`CleaningReport` was given SineProblem and FullBatchDataModule: it is for a "
            "`HyperCleaning` on a `CleaningData`, so leave it out here",
        ),
        (
            module,
            lambda: data(test=None, corruption=0.0),
            ValueError,
            "there is nothing to measure, so give it `test` or `corrupted`",
        ),
    ],
)
def test_what_it_cannot_report_on_is_refused_before_the_run(
    tmp_path: Path, ours: Any, source: Any, error: type[Exception], message: str
) -> None:
    run = trainer(tmp_path, max_epochs=1, callbacks=[CleaningReport()])
    with pytest.raises(error, match=message):
        run.fit(ours(), datamodule=source())
    assert run.global_step == 0


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`CleaningReport\(count=0\)` must be at least 1"):
        CleaningReport(count=0)
