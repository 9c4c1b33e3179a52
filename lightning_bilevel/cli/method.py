"""One method of a comparison: its model, data and Trainer, and the point where it starts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_bilevel.baselines.cleaning_report import CleaningReport
from lightning_bilevel.callbacks.certificate_report import CertificateReport
from lightning_bilevel.callbacks.monitor import Monitor, usual_tolerance
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.cli.configs import MethodConfig
from lightning_bilevel.cli.recorder import NEVER, evaluation
from lightning_bilevel.cli.trainer import WITHOUT_STEPS, BilevelTrainer
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.data.fullbatch import FullBatchDataModule, NoValidation

__all__ = ["Method", "start_row", "warm_up"]


class Method(BilevelCLI):
    """Model, data and Trainer of a config, always from the same seed.

    The Trainer has the callbacks of the comparison, but no monitors, checkpoints or progress bar of
    the config.

    Args:
        out: The folder of the comparison.
        config: The config.
        added: The callbacks of the comparison.
        options: Arguments of the Trainer; they take precedence over the defaults of a comparison.
    """

    def __init__(
        self, out: Path, config: MethodConfig, added: Sequence[Callback] = (), **options: Any
    ) -> None:
        self.added = added
        options = {
            "max_epochs": -1,
            "max_steps": -1,
            "check_val_every_n_epoch": "null",
            "val_check_interval": NEVER,
            "logger": "false",
            "enable_progress_bar": "false",
            "enable_model_summary": "false",
            "num_sanity_val_steps": 0,
            "default_root_dir": str(out),
            "enable_checkpointing": "true" if added else "false",
            **options,
        }
        args = [
            "--config",
            str(out / config.name / "config.yaml"),
            "--budget=null",  # that of the comparison counts
            *(f"--trainer.{name}={value}" for name, value in options.items()),
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().__init__(args, run=False)

    @override
    def before_instantiate_classes(self) -> None:
        self.save_config_callback = None  # the folder of the method already has the config

    @override
    def callbacks(self, named: list[Callback]) -> list[Callback]:
        removed = (CertificateReport, Checkpoint, CleaningReport, Monitor, ProgressBar)
        return [*(callback for callback in named if not isinstance(callback, removed)), *self.added]


def warm_up(out: Path, config: MethodConfig) -> None:
    """Run the first evaluations of the process, which are slow, before any time is measured."""
    method = Method(out, config, max_steps=2, limit_val_batches=0)
    method.trainer.fit(method.model, datamodule=method.datamodule)


def start_row(out: Path, config: MethodConfig, envelope: Envelope | None) -> dict[str, float]:
    """Evaluate the start of a method as a comparison evaluates its later points.

    Args:
        out: The folder of the comparison.
        config: The config.
        envelope: The Moreau envelope of the evaluation; None takes that of the module.
    """
    method = Method(out, config, **WITHOUT_STEPS)
    trainer = cast(BilevelTrainer, method.trainer)
    trainer.restore(method.model, method.datamodule)
    options = {"envelope": envelope, "tolerance": usual_tolerance(trainer)}
    certificate = trainer.look(method.model, method.datamodule, **options)
    if _validates(method):
        trainer.validate(method.model, datamodule=method.datamodule, verbose=False)
    counts = {"iteration": 0, "optimization_time": 0.0, "passes": 0}
    return counts | evaluation(trainer.callback_metrics, certificate)


def _validates(method: Method) -> bool:
    """Whether there is something to validate, and data for it, as ``Trainer.fit`` sees it."""
    data = method.datamodule
    if not is_overridden("validation_step", method.model):
        return False
    if isinstance(data, FullBatchDataModule):
        return not isinstance(data.val_dataloader(), NoValidation)
    return is_overridden("val_dataloader", data)
