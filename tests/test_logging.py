"""Numbers, texts, figures and hyper-parameters in every logger; and loggers that fail."""

from __future__ import annotations

import csv
import errno
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers import WandbLogger as Wandb
from lightning_utilities.core.imports import RequirementCache
from matplotlib.figure import Figure
from modules import Weighting, weighting_data
from places import SYNTHETIC
from running import events, trainer

from lightning_bilevel import CertificateReport, LastCheckpoint
from lightning_bilevel.__main__ import main
from lightning_bilevel.logging import log_figure, run_folder

pytestmark = pytest.mark.compatibility
UPPER = "bilevel/upper"
KINDS = ("csv", "tensorboard", "wandb", "mlflow")


class Saved(Weighting):
    """With a figure and hyper-parameters of its own, one of them named as one of the solver's."""

    def __init__(self, delta: str = "mine") -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_train_end(self) -> None:
        log_figure(self.trainer, "weights", drawn, self.trainer.global_step)


def drawn() -> Figure:
    figure = Figure(figsize=(1.0, 1.0))
    figure.add_subplot().plot([1, 2])
    return figure


def made(folder: Path) -> dict[str, Any]:
    """A logger of each kind whose package is there."""
    found: dict[str, Any] = {
        "csv": CSVLogger(folder / "csv"),
        "tensorboard": TensorBoardLogger(folder / "tensorboard"),
    }
    if importlib.util.find_spec("wandb"):
        found["wandb"] = Wandb(save_dir=folder, offline=True, project="tests")
    if importlib.util.find_spec("mlflow"):
        found["mlflow"] = MLFlowLogger(save_dir=str(folder / "mlruns"))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    """One run with all loggers at once: folder, loggers, last step, and the summary of W&B."""
    folder = tmp_path_factory.mktemp("loggers")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_MODE", "offline")
        loggers = made(folder)
        module = Saved()
        trainer(
            folder,
            max_steps=6,
            log_every_n_steps=2,
            logger=list(loggers.values()),
            callbacks=[CertificateReport()],
        ).fit(module, datamodule=weighting_data())
        summary = {}
        if "wandb" in loggers:
            wandb = loggers["wandb"].experiment
            summary = {name: wandb.summary[name] for name in ("trainer/global_step", UPPER)}
            wandb.finish()  # its process writes the files
        yield folder, loggers, module.last_step, summary


def logger_of(run: Any, kind: str) -> Any:
    if kind not in run[1]:
        pytest.skip(f"{kind} is in the extra `loggers`")
    return run[1][kind]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers(run: Any, kind: str) -> None:
    logger, last = logger_of(run, kind), run[2]
    if kind == "csv":
        with Path(logger.log_dir, "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row[UPPER]]
        found = {int(row["step"]): float(row[UPPER]) for row in rows}
    elif kind == "tensorboard":
        found = {e.step: e.value for e in events(Path(logger.log_dir)).Scalars(UPPER)}
    elif kind == "mlflow":
        history = logger.experiment.get_metric_history(logger.run_id, UPPER)
        found = {point.step: point.value for point in history}
    else:
        summary = run[3]
        found = {1: 0, 2: 0, 4: 0, summary["trainer/global_step"]: summary[UPPER]}
    assert sorted(found) == [1, 2, 4, 6]
    assert found[6] == pytest.approx(last.upper, rel=1e-6)


def test_texts_and_figures(run: Any) -> None:
    """They are for TensorBoard; other loggers have no common way to take them."""
    shown = events(Path(run[1]["tensorboard"].log_dir))
    text = shown.Tensors("certificate/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "KKT stationarity" in text
    assert shown.Images("weights")[0].encoded_image_string.startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["csv", "wandb", "mlflow"])
def test_hyperparameters(run: Any, kind: str) -> None:
    """Those of the module keep their names, and the solver's have a place of their own.

    The table of TensorBoard has a test of its own, in ``tests/callbacks``.
    """
    logger = logger_of(run, kind)
    if kind == "csv":
        names = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
    elif kind == "mlflow":
        names = logger.experiment.get_run(logger.run_id).data.params
    else:
        names = dict(logger.experiment.config)
    assert names["delta"] == "mine"
    assert names["bilevel/solver"] == "IVSP"
    assert float(names["bilevel/delta"]) > 0


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_run_has_a_folder_of_its_own(run: Any, kind: str) -> None:
    logger = logger_of(run, kind)
    found = run_folder(trainer(run[0], logger=logger))
    assert found == Path(logger.save_dir, str(logger.name), str(logger.version))


class Failing(Logger):
    """A logger of the user's that fails in one of its methods, from an iteration on."""

    def __init__(self, method: str, since: int = 0) -> None:
        super().__init__()
        self.method = method
        self.since = since
        self.seen: list[str] = []

    name = version = "failing"

    def _called(self, method: str, step: int | None = None) -> None:
        self.seen.append(method)
        if method == self.method and (step or 0) >= self.since:
            raise ConnectionError("the server is gone")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._called("log_metrics", step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if params:
            self._called("log_hyperparams")


def test_what_a_logger_does_not_take_is_said_and_the_run_ends_well(tmp_path: Path) -> None:
    words = r"`Failing` did not take 'hyper-parameters' \(ConnectionError\('the server is gone'"
    with pytest.warns(UserWarning, match=words):
        trainer(
            tmp_path,
            max_steps=3,
            log_every_n_steps=10,
            logger=Failing("log_hyperparams"),
            callbacks=[CertificateReport()],
        ).fit(Weighting(), datamodule=weighting_data())
    assert (tmp_path / "certificate.json").is_file()


def test_a_figure_that_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    class Drawn(Weighting):
        def on_train_end(self) -> None:
            log_figure(self.trainer, "weights", lambda: self.logits.reshape(7, 3), 3)

    with pytest.warns(UserWarning, match=r"did not take 'weights' \(RuntimeError\(\W+sha"):
        trainer(
            tmp_path, max_steps=3, log_every_n_steps=10, logger=TensorBoardLogger(tmp_path)
        ).fit(Drawn(), datamodule=weighting_data())


def test_a_trial_run_draws_no_figure(tmp_path: Path) -> None:
    """Lightning gives it a logger that throws everything away."""
    drawn: list[int] = []

    class Drawn(Weighting):
        def on_train_end(self) -> None:
            log_figure(self.trainer, "weights", lambda: drawn.append(1), 1)

    run = trainer(tmp_path, fast_dev_run=True, logger=TensorBoardLogger(tmp_path))
    run.fit(Drawn(), datamodule=weighting_data())
    assert len(run.loggers) == 1
    assert not drawn


def test_a_logger_that_fails_at_the_end_takes_nothing_with_it(tmp_path: Path) -> None:
    """Numbers that are not logged end a run, as Lightning has it. All else is saved before."""
    callbacks = [CertificateReport(), LastCheckpoint(tmp_path)]
    logger = Failing("log_metrics", since=3)
    with pytest.raises(ConnectionError, match="the server is gone"):
        trainer(
            tmp_path,
            max_steps=3,
            log_every_n_steps=10,
            logger=logger,
            callbacks=callbacks,
            enable_checkpointing=True,
            limit_val_batches=0,
        ).fit(Weighting(), datamodule=weighting_data())
    assert (tmp_path / "certificate.json").is_file()
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3


def test_files_that_cannot_be_written_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lightning_bilevel.callbacks.certificate.write_whole", full)
    report = CertificateReport()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer(tmp_path, max_steps=3, callbacks=[report]).fit(
            Weighting(), datamodule=weighting_data()
        )
    sentences = "\n".join(str(warning.message) for warning in said)
    assert "certificate.json could not be written ([Errno 28] No space left" in sentences
    assert report.certificate is not None


class TestTheCommandLine:
    """Another logger than the usual one, by its name in the config."""

    @pytest.fixture(autouse=True)
    def _command_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])

    def fit(self, folder: Path, *args: str) -> None:
        config = ["--config", str(SYNTHETIC / "ivsp.yaml"), "--model.init_args.n=10"]
        quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
        limits = ["--trainer.max_steps=5", f"--trainer.default_root_dir={folder}"]
        main(["fit", *config, *quiet, *limits, *args])

    def test_mlflow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("mlflow", reason="it is in the extra `loggers`")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        store = tmp_path / "mlruns"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.fit(
                tmp_path, "--trainer.logger=MLFlowLogger", f"--trainer.logger.save_dir={store}"
            )
        (saved,) = store.glob("*/*/config.yaml")
        assert yaml.safe_load(saved.read_text())["model"]["init_args"]["n"] == 10
        assert not (store / "config.yaml").exists()

    @pytest.mark.skipif(
        jsonargparse.__version__.startswith("4.43."), reason="it raises a ValueError of its own"
    )
    def test_a_package_that_is_missing_is_named_in_a_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from lightning.pytorch.loggers import wandb

        monkeypatch.setattr(wandb, "_WANDB_AVAILABLE", RequirementCache("wandb>=999"))
        with pytest.raises(SystemExit) as stop:
            self.fit(tmp_path, "--trainer.logger=WandbLogger")
        error = capsys.readouterr().err
        assert stop.value.code != 0
        assert "Requirement 'wandb>=999' not met" in error
        assert "pip install" in error
        assert "Traceback" not in error
