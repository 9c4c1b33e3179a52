"""What the tests of compatibility run over two processes.

As a script, it makes fits with one list of callbacks after another.

    python two_processes.py FOLDER

prints the names of the lists that were done, each after a test of the module. Lightning starts the
second process itself.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from modules import MILD, Weighting, samples
from torch import nn

from lightning_bilevel import (
    Box,
    CertificateMonitor,
    CertificateReport,
    FullBatchDataModule,
    LastCheckpoint,
    OptimizationBudget,
    PenaltyMonitor,
    SolverMonitor,
)


class Terminate(Callback):
    """Sends SIGTERM to the first process at a moment of the run.

    Args:
        hook: The hook that it comes in.
        step: From which outer iteration on.
    """

    def __init__(self, hook: str, step: int = 0) -> None:
        self.step = step
        setattr(self, hook, self._send)

    def setup(self, *args: Any, **kwargs: Any) -> None:
        print(f"process {os.getpid()}", file=sys.stderr, flush=True)

    def _send(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero and trainer.global_step >= self.step:
            self.step = sys.maxsize
            os.kill(os.getpid(), signal.SIGTERM)


class Normed(Weighting):
    """A classifier with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Sequential(
            nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Sigmoid(), nn.Linear(8, 3)
        )
        self.declare(
            upper=self.logits,
            lower=self.classifier,
            upper_set=Box(-5, 5),
            lower_set=Box(-5, 5),
            solver=MILD,
        )


class Tested(Weighting):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.upper_loss(batch), batch_size=len(batch[0]), sync_dist=True)


def lists(folder: Path) -> dict[str, dict[str, Any]]:
    """The callbacks and loggers of each fit."""
    checkpoints = {"enable_checkpointing": True}
    return {
        "report": {"callbacks": [CertificateReport()]},
        "csv": {"callbacks": [CertificateReport()], "logger": CSVLogger(folder)},
        "model checkpoint": {
            "callbacks": [CertificateReport(), ModelCheckpoint(folder / "model")],
            **checkpoints,
        },
        "early stopping": {
            "callbacks": [
                CertificateMonitor(),
                EarlyStopping("bilevel/kkt_residual", patience=2),
                CertificateReport(),
            ]
        },
        "last checkpoint": {
            "callbacks": [CertificateReport(), LastCheckpoint(folder / "last", "10ms")],
            **checkpoints,
        },
        "all": {
            "callbacks": [
                CertificateMonitor(every_n_steps=2, restore_best=True),
                PenaltyMonitor(),
                SolverMonitor(),
                OptimizationBudget("20s"),
                LearningRateMonitor(),
                TQDMProgressBar(refresh_rate=10),
                CertificateReport(),
                LastCheckpoint(folder / "all"),
            ],
            "logger": [TensorBoardLogger(folder), CSVLogger(folder)],
            "enable_progress_bar": True,
            **checkpoints,
        },
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data = FullBatchDataModule(
        samples(21, 1), samples(30, 2), samples(20, 3), samples(20, 4), epoch_length=4
    )
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    for name, options in lists(folder).items():
        limits = {"max_epochs": 3, "log_every_n_steps": 2, "default_root_dir": folder / name}
        trainer = Trainer(
            accelerator="cpu", strategy="ddp", devices=2, **{**quiet, **limits, **options}
        )
        module = Tested()
        trainer.fit(module, datamodule=data)
        trainer.test(module, datamodule=data, verbose=False)
        if trainer.is_global_zero:
            print(f"done: {name}", flush=True)
    module = Normed()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        **{**quiet, "max_epochs": 5, "default_root_dir": folder},
    )
    trainer.fit(module, datamodule=data)
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, module.state_dict())
    if trainer.is_global_zero:
        torch.save(everywhere, folder / "normed.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
