"""LightningCLI for bilevel modules, with their monitors, a budget of time and the certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from typing_extensions import override

# Imported so that YAML can use the short names of its classes.
import lightning_bilevel.modules as _modules  # noqa: F401
from lightning_bilevel.callbacks.certificate_monitor import KKTMonitor, MoreauGapMonitor
from lightning_bilevel.callbacks.certificate_report import CertificateReport
from lightning_bilevel.callbacks.last_checkpoint import LastCheckpoint
from lightning_bilevel.callbacks.monitor import PenaltyMonitor, SolverMonitor
from lightning_bilevel.callbacks.optimization_budget import OptimizationBudget
from lightning_bilevel.callbacks.progress_bar import BilevelProgressBar
from lightning_bilevel.checkpoint import WholeFileIO
from lightning_bilevel.files import write_whole
from lightning_bilevel.logging import run_folder

__all__ = ["BilevelCLI"]


class _SaveConfig(SaveConfigCallback):
    """Saves the resolved config beside the logs of its run.

    Lightning's place is the same for all runs of W&B and MLflow, and of a run without a logger.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = run_folder(trainer)  # a collective call
        if folder is not None and trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            config = self.parser.dump(self.config, skip_none=False)
            write_whole(folder / self.config_filename, config.encode())


class BilevelCLI(LightningCLI):
    """LightningCLI for bilevel modules; it adds monitors, and ``fit`` ends with the certificate."""

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            args=args,
            **{"save_config_callback": _SaveConfig, **kwargs},
        )

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # Raised, because jsonargparse would print the usage, 50 lines, above its message.
        return super().init_parser(**{"exit_on_error": False, **kwargs})

    @override
    def _parse_ckpt_path(self) -> None:
        """Refuse what is no checkpoint by a sentence: Lightning reads the file here first."""
        if self.config.get("subcommand"):
            path = self.config[self.config.subcommand].ckpt_path
            if path and Path(path).is_file():
                WholeFileIO().load_checkpoint(path)
        super()._parse_ckpt_path()

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # Plain classes: Lightning would add a second one of a callback that the config names.
        parser.add_class_arguments(MoreauGapMonitor, "moreau_gap", sub_configs=True)
        parser.add_class_arguments(CertificateReport, "certificate", sub_configs=True)
        parser.add_argument(
            "--budget",
            type=str | None,
            help="end fit after this optimisation time, such as 60s or 10m, instead of after "
            "`max_epochs` and `max_steps`",
        )

    def callbacks(self, named: list[Callback]) -> list[Callback]:
        """Return the callbacks of the Trainer, besides its defaults.

        Args:
            named: The callbacks that the config names. A monitor among them is not added twice. The
                certificate comes last, so that it certifies the final point.
        """
        budget = self._get(self.config_init, "budget")
        monitors = [PenaltyMonitor(), KKTMonitor(), SolverMonitor()]
        configured = [self._get(self.config_init, key) for key in ("moreau_gap", "certificate")]
        budgets = [] if budget is None else [OptimizationBudget(budget)]
        there = set(map(type, named))
        added = (callback for callback in [*monitors, *configured] if type(callback) not in there)
        return [*named, *budgets, *added]

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self._get(self.config_init, "trainer")
        given = settings["callbacks"] or []
        named = given if isinstance(given, list) else [given]
        if self._get(self.config_init, "budget") is not None:
            kwargs |= {"max_epochs": -1, "max_steps": -1}
        if settings["accelerator"] == "auto" and MPSAccelerator.is_available():
            kwargs["accelerator"] = "cpu"  # Apple's GPU has no float64
        trainer = super().instantiate_trainer(**{"callbacks": self.callbacks(named), **kwargs})
        # Replace Lightning's own progress bar and checkpoint callback, but not the user's.
        callbacks = cast(Any, trainer).callbacks
        for index, callback in enumerate(callbacks):
            if type(callback) in (TQDMProgressBar, RichProgressBar) and callback not in named:
                callbacks[index] = BilevelProgressBar()
            elif type(callback) is ModelCheckpoint and callback not in named:
                callbacks[index] = LastCheckpoint(Path(trainer.default_root_dir) / "checkpoints")
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFileIO()
        return trainer
