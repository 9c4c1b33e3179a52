"""LightningCLI on bilevel modules: what ``lightning-bilevel fit``, ``validate``, ``test``,
``certify`` and ``probe`` run.
"""

from __future__ import annotations

from argparse import ArgumentError
from pathlib import Path
from typing import Any, cast

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from typing_extensions import override

import lightning_bilevel.modules as _modules  # noqa: F401  (its classes can then be named without their module in YAML)
from lightning_bilevel.callbacks.certificate_report import CertificateReport
from lightning_bilevel.callbacks.convergence_plot import ConvergencePlot
from lightning_bilevel.callbacks.kkt_monitor import KKTMonitor
from lightning_bilevel.callbacks.last_checkpoint import LastCheckpoint
from lightning_bilevel.callbacks.moreau_gap_monitor import MoreauGapMonitor
from lightning_bilevel.callbacks.penalty_monitor import PenaltyMonitor
from lightning_bilevel.callbacks.progress_bar import BilevelProgressBar
from lightning_bilevel.callbacks.solver_monitor import SolverMonitor
from lightning_bilevel.callbacks.tensorboard import show_text
from lightning_bilevel.cli.messages import own_error
from lightning_bilevel.cli.trainer import WITHOUT_STEPS, BilevelTrainer
from lightning_bilevel.plugin.checkpoints import WholeFileIO
from lightning_bilevel.plugin.mixin import BilevelMixin

__all__ = ["BilevelCLI"]

# The commands that train nothing and leave no file.
_LOOKING = ("certify", "probe")


class _SaveConfig(SaveConfigCallback):
    """Shows the resolved config in TensorBoard, beside saving it."""

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            show_text(
                trainer,
                "config",
                f"```yaml\n{self.parser.dump(self.config, skip_none=False)}\n```",
                0,
            )


class _Parser(LightningArgumentParser):
    """Takes the mixin as the class of the model, which Lightning's own takes no class for that is
    no LightningModule.
    """

    @override
    def add_lightning_class_args(
        self,
        lightning_class: Any,
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        if lightning_class is BilevelMixin:
            added: list[str] = self.add_subclass_arguments(
                BilevelMixin, nested_key, fail_untyped=False, required=required
            )
            return added
        return super().add_lightning_class_args(
            lightning_class, nested_key, subclass_mode, required
        )


class BilevelCLI(LightningCLI):
    """LightningCLI whose model is any bilevel module and whose fit is watched, and ends with the
    certificate.
    """

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        about = "Solve a bilevel problem. Another command, `lightning-bilevel compare --help`, runs several methods on one task."
        # An error of parsing is raised, so that the command can say it in one line; the commands
        # have parsers of their own.
        common = {"exit_on_error": False}
        commands = {} if kwargs.get("run") is False else dict.fromkeys(self.subcommands(), common)
        kwargs["parser_kwargs"] = {
            "description": about,
            **common,
            **commands,
            **kwargs.get("parser_kwargs", {}),
        }
        super().__init__(
            cast(Any, BilevelMixin),
            LightningDataModule,
            trainer_class=BilevelTrainer,
            parser_class=_Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=_SaveConfig,
            # A second run in the same folder is normal: its config replaces the first one's.
            save_config_kwargs={"overwrite": True},
            args=args,
            **kwargs,
        )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {
            **LightningCLI.subcommands(),
            "certify": {"model", "datamodule"},
            "probe": {"model", "datamodule"},
        }

    @override
    def _parse_ckpt_path(self) -> None:
        """Let a file that is no checkpoint be refused by its sentence: Lightning reads it here,
        before the Trainer does.
        """
        try:
            super()._parse_ckpt_path()
        except ArgumentError:
            raise
        except Exception:
            WholeFileIO().load_checkpoint(self.config[self.config.subcommand].ckpt_path)
            raise

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # As plain classes: what Lightning knows as a callback, it would add even where the config
        # names another one.
        parser.add_class_arguments(MoreauGapMonitor, "moreau_gap", sub_configs=True)
        parser.add_class_arguments(CertificateReport, "certificate", sub_configs=True)

    @override
    def before_instantiate_classes(self) -> None:
        if self.subcommand in _LOOKING:
            self.save_config_callback = None

    def callbacks(self, named: list[Callback]) -> list[Callback]:
        """Return the callbacks of the Trainer, besides its own.

        Args:
            named: Those that the config names. A monitor that is among them is not added; the
                certificate comes last, of the point that remains.
        """
        # A subclass may have left either out of its parser.
        configured = [self._settings.get(key) for key in ("moreau_gap", "certificate")]
        if self.subcommand in _LOOKING:
            return [callback for callback in configured if isinstance(callback, CertificateReport)]
        watching = [PenaltyMonitor(), KKTMonitor(), SolverMonitor(), ConvergencePlot(), *configured]
        kinds = {type(None), *map(type, named)}
        return [*named, *(callback for callback in watching if type(callback) not in kinds)]

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self._settings["trainer"]["callbacks"] or []
        named = list(given) if isinstance(given, list) else [given]
        if self.subcommand in _LOOKING:
            kwargs |= WITHOUT_STEPS
        try:
            trainer = super().instantiate_trainer(**{"callbacks": self.callbacks(named), **kwargs})
            if self.subcommand not in _LOOKING:
                Path(trainer.default_root_dir).mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"`Trainer` cannot be made: {own_error(error) or error}"
            ) from error
        bar, callbacks = trainer.progress_bar_callback, cast(Any, trainer).callbacks
        if (
            type(bar) in (TQDMProgressBar, RichProgressBar) and bar not in named
        ):  # Lightning's default; the user's own stays
            callbacks[callbacks.index(bar)] = BilevelProgressBar()
        for index, callback in enumerate(callbacks):
            if type(callback) is ModelCheckpoint and callback not in named:  # likewise
                callbacks[index] = LastCheckpoint(Path(trainer.default_root_dir) / "checkpoints")
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFileIO()
        return trainer

    @property
    def _settings(self) -> Any:
        """The config of the command, with its objects made."""
        return self.config_init if self.subcommand is None else self.config_init[self.subcommand]
