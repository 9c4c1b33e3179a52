"""What a Lightning user expects of a Trainer holds for bilevel modules."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from modules import MILD, PAPER, Weighting, weighting_data
from records import Recorder
from running import events, same_parameters, trainer

from lightning_bilevel import (
    CertificateReport,
    FullBatchDataModule,
    SineProblem,
)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_steps": 7}, 7),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_epochs": 2}, 20),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 4}, 4),
    ],
)
def test_limits_count_outer_iterations(tmp_path: Any, limits: dict[str, Any], steps: int) -> None:
    module, run = Weighting(), trainer(tmp_path, **limits)
    run.fit(module, datamodule=weighting_data(epoch_length=10))
    assert run.global_step == steps
    assert module.last_step is not None
    assert module.last_step.iteration == steps


@pytest.mark.parametrize("limits", [{"max_steps": 0}, {"max_epochs": 0}])
def test_a_run_of_no_steps_is_one(tmp_path: Any, limits: dict[str, Any]) -> None:
    module, run = Weighting(), trainer(tmp_path, **limits)
    run.fit(module, datamodule=weighting_data())
    assert run.global_step == 0
    assert module.last_step is None


def test_max_time_ends_a_run(tmp_path: Any) -> None:
    run = trainer(tmp_path, max_time={"milliseconds": 200})
    run.fit(Weighting(), datamodule=weighting_data(epoch_length=10))
    assert run.should_stop
    assert 0 < run.global_step < 1_000_000


def test_validation_is_limited_and_logged(tmp_path: Any) -> None:
    run = trainer(tmp_path, max_epochs=2)
    run.fit(Weighting(), datamodule=weighting_data())
    assert "val_loss" in run.callback_metrics
    skipped = trainer(tmp_path, max_epochs=2, limit_val_batches=0)
    skipped.fit(Weighting(), datamodule=weighting_data())
    assert "val_loss" not in skipped.callback_metrics


def test_early_stopping_on_a_quantity_of_the_solver(tmp_path: Any) -> None:
    stop = EarlyStopping(
        "bilevel/upper", stopping_threshold=0.6, check_on_train_epoch_end=True, patience=10_000
    )
    run = trainer(tmp_path, max_epochs=200, callbacks=[stop])
    run.fit(Weighting(), datamodule=weighting_data())
    assert run.should_stop
    assert run.global_step < 2000
    assert float(run.callback_metrics["bilevel/upper"]) < 0.6


def test_checkpoint_monitors_the_current_step(tmp_path: Any) -> None:
    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            seen.append(
                (float(trainer.callback_metrics["bilevel/upper"]), pl_module.last_step.upper)
            )

    seen: list[tuple[float, float]] = []
    keep = ModelCheckpoint(tmp_path, monitor="bilevel/upper", every_n_train_steps=5, save_top_k=1)
    run = trainer(tmp_path, max_steps=20, callbacks=[keep, Watch()], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="every_n_train_steps"):
        run.fit(Weighting(), datamodule=weighting_data())
    assert keep.best_model_path
    assert all(a == pytest.approx(b, rel=1e-6) for a, b in seen)
    saved = min(seen[i][1] for i in (4, 9, 14, 19))
    assert float(keep.best_model_score) == pytest.approx(saved, rel=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("stop", [1, 6, 13])
def test_resume_is_exact(tmp_path: Any, precision: str, stop: int) -> None:
    """After a stop amid an epoch, the rest of the run is the same bit for bit."""

    def start() -> SineProblem:
        return SineProblem(n=30, x0=-5.9, c=1.7, solver=PAPER)

    def run(steps: int, **kwargs: Any) -> tuple[SineProblem, Trainer, list[dict[str, Any]]]:
        recorder, module = Recorder(), start()
        ours = trainer(tmp_path, max_steps=steps, precision=precision, callbacks=[recorder])
        ours.fit(module, datamodule=FullBatchDataModule(epoch_length=10), **kwargs)
        return module, ours, recorder.steps

    whole, _, history = run(20)
    _, stopped, _ = run(stop)
    stopped.save_checkpoint(tmp_path / "stop.ckpt")
    torch.load(tmp_path / "stop.ckpt", weights_only=True)
    resumed, _, rest = run(20, ckpt_path=tmp_path / "stop.ckpt", weights_only=True)
    assert same_parameters(whole, resumed)
    assert rest == history[stop:]


def test_resume_in_units_is_exact(tmp_path: Any) -> None:
    """Dividing a parameter by its unit rounds: the solver's own variables are part of its state."""
    units = {"upper_unit": 300.0, "lower_unit": 0.7}
    whole, first, second = (Weighting(**units) for _ in range(3))
    trainer(tmp_path, max_steps=20).fit(whole, datamodule=weighting_data())
    stopped = trainer(tmp_path, max_steps=7)
    stopped.fit(first, datamodule=weighting_data())
    stopped.save_checkpoint(tmp_path / "stop.ckpt")
    trainer(tmp_path, max_steps=20).fit(
        second, datamodule=weighting_data(), ckpt_path=tmp_path / "stop.ckpt"
    )
    assert same_parameters(whole, second)


def test_a_resumed_run_is_certified_with_the_checkpoints_constants(tmp_path: Any) -> None:
    stopped = trainer(tmp_path, max_steps=3)
    stopped.fit(Weighting(), datamodule=weighting_data())
    stopped.save_checkpoint(tmp_path / "stop.ckpt")
    other = Weighting(solver=partial(MILD, rho=0.05))
    trainer(tmp_path, max_steps=5).fit(
        other, datamodule=weighting_data(), ckpt_path=tmp_path / "stop.ckpt"
    )
    certificate = other.certify()
    assert certificate is not None
    assert certificate.rho == 0.1


def test_tensorboard_and_csv_have_the_documented_names(tmp_path: Any) -> None:
    loggers = [TensorBoardLogger(tmp_path, "tb"), CSVLogger(tmp_path, "csv")]
    run = trainer(
        tmp_path, max_steps=20, logger=loggers, log_every_n_steps=5, callbacks=[CertificateReport()]
    )
    run.fit(Weighting(), datamodule=weighting_data())
    found = events(Path(loggers[0].log_dir))
    words = """upper lower moreau_gap violation prox_distance smoothing penalty penalty_updates
    multiplier step trials inner_iterations optimization_time kkt_stationarity kkt_feasibility
    kkt_complementarity"""
    names = {f"bilevel/{word}" for word in words.split()}
    assert names <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Scalars("bilevel/upper")] == [1, 5, 10, 15, 20]
    assert "bilevel/upper" in (Path(loggers[1].log_dir) / "metrics.csv").read_text().splitlines()[0]


def test_learning_rate_monitor_sees_the_step(tmp_path: Any) -> None:
    monitor, module = LearningRateMonitor(logging_interval="step"), Weighting()
    run = trainer(
        tmp_path, max_steps=3, logger=CSVLogger(tmp_path), callbacks=[monitor], log_every_n_steps=1
    )
    run.fit(module, datamodule=weighting_data())
    assert module.last_step is not None
    assert run.optimizers[0].param_groups[0]["lr"] == module.last_step.mu / module.last_step.L  # type: ignore[attr-defined]
    assert len(monitor.lrs) == 2


def test_certificate_report_prints_and_publishes(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report, module = CertificateReport(), Weighting()
    run = trainer(tmp_path, max_epochs=2, callbacks=[report])
    run.fit(module, datamodule=weighting_data())
    printed = capsys.readouterr().out
    for row in (
        "val_loss",
        "KKT stationarity",
        "multiplier",
        "outer iterations",
        "optimisation time",
    ):
        assert row in printed
    certificate = module.certify()
    assert report.certificate == certificate
    assert certificate is not None
    assert float(run.callback_metrics["bilevel/kkt_stationarity"]) == pytest.approx(
        certificate.stationarity
    )
    assert json.loads(json.dumps(certificate.as_dict()))["delta"] == 1e-3


def test_progress_bar_shows_the_solver(tmp_path: Any) -> None:
    bar, module = TQDMProgressBar(refresh_rate=10), Weighting()
    run = trainer(tmp_path, max_epochs=2, callbacks=[bar], enable_progress_bar=True)
    run.fit(module, datamodule=weighting_data())
    assert module.last_step is not None
    shown = bar.get_metrics(run, module)
    assert shown["upper"] == module.last_step.upper
    assert {"moreau_gap", "penalty"} <= shown.keys()
