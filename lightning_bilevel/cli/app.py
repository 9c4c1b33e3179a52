"""LightningCLI for bilevel modules: ``fit``, ``validate``, ``test``, ``certify`` and ``probe``."""

from __future__ import annotations

import sys
from argparse import ArgumentError
from pathlib import Path
from typing import Any, cast

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
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
from lightning_bilevel.callbacks.convergence_plot import ConvergencePlot
from lightning_bilevel.callbacks.last_checkpoint import LastCheckpoint
from lightning_bilevel.callbacks.monitor import PenaltyMonitor, SolverMonitor
from lightning_bilevel.callbacks.optimization_budget import OptimizationBudget
from lightning_bilevel.callbacks.progress_bar import BilevelProgressBar
from lightning_bilevel.cli.messages import own_error
from lightning_bilevel.cli.trainer import WITHOUT_STEPS, BilevelTrainer
from lightning_bilevel.files import write_whole
from lightning_bilevel.plugin.checkpoints import WholeFileIO
from lightning_bilevel.plugin.loggers import log_text, run_folder
from lightning_bilevel.plugin.mixin import BilevelMixin

__all__ = ["BilevelCLI"]

# The commands that neither train nor write files.
_READ_ONLY = ("certify", "probe")


def _only_mps() -> bool:
    """Whether Lightning's automatic choice is a device without float64, which `fit` refuses."""
    return MPSAccelerator.is_available() and not CUDAAccelerator.is_available()


def _first(args: ArgsType) -> Any:
    """Return the first argument: a command, unless a config for several commands stands before."""
    given = sys.argv[1:] if args is None else args
    return given[0] if isinstance(given, list) and given else None


class _SaveConfig(SaveConfigCallback):
    """Saves the resolved config in the folder of the run, and logs it as text."""

    _folder: Path | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer)  # all processes ask
        super().setup(trainer, pl_module, stage)

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        config = self.parser.dump(self.config, skip_none=False)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / self.config_filename, config.encode())
        if stage == "fit":
            log_text(trainer, "config", f"```yaml\n{config}\n```", 0)


class _Parser(LightningArgumentParser):
    """Accepts the mixin as the class of the model; Lightning accepts LightningModules only."""

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
    """LightningCLI for bilevel modules; it adds monitors, and ``fit`` ends with the certificate."""

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        about = (
            "Solve a bilevel problem. Another command, `lightning-bilevel compare --help`, runs "
            "several methods on one task."
        )
        # Parsing errors are raised, so that `main` can print them in one line. Each command has its
        # own parser, which needs the setting too.
        self._asked = None if "parser_kwargs" in kwargs else _first(args)
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
            # Lightning's place for the config is one for all runs of W&B and MLflow.
            save_config_kwargs={"save_to_log_dir": False},
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
    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        if self._asked in self.subcommands() and subcommand != self._asked:
            # The arguments of all commands take half a second, and this command reads its own only.
            self._subcommand_method_arguments[subcommand] = []
            return self.init_parser(**kwargs)
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for action in parser._actions:
            if action.dest == "proved":
                # `--proved` alone is enough; `--proved=false` still works.
                action.nargs = "?"
                action.const = True
        return parser

    @override
    def _parse_ckpt_path(self) -> None:
        """Refuse a file that is no checkpoint with our message: Lightning reads it here first."""
        try:
            super()._parse_ckpt_path()
        except ArgumentError:
            raise
        except Exception:
            WholeFileIO().load_checkpoint(self.config[self.config.subcommand].ckpt_path)
            raise

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # Added as plain classes: Lightning would add a known callback even if the config names
        # another one.
        parser.add_class_arguments(MoreauGapMonitor, "moreau_gap", sub_configs=True)
        parser.add_class_arguments(CertificateReport, "certificate", sub_configs=True)
        parser.add_argument(
            "--budget",
            type=str | None,
            help="end fit after this optimisation time, such as 60s or 10m, instead of after "
            "`max_epochs` and `max_steps`",
        )

    @override
    def before_instantiate_classes(self) -> None:
        if self.subcommand in _READ_ONLY:
            self.save_config_callback = None

    def callbacks(self, named: list[Callback]) -> list[Callback]:
        """Return the callbacks of the Trainer, besides its defaults.

        Args:
            named: The callbacks that the config names. A monitor among them is not added twice. The
                certificate comes last, so that it certifies the final point.
        """
        # A subclass of this CLI may have removed either from its parser, which makes it None.
        configured = [self._settings.get(key) for key in ("moreau_gap", "certificate")]
        if self.subcommand in _READ_ONLY:
            return [callback for callback in configured if isinstance(callback, CertificateReport)]
        if self._budget is not None:
            named = [*named, OptimizationBudget(self._budget)]
        monitors = [PenaltyMonitor(), KKTMonitor(), SolverMonitor(), ConvergencePlot(), *configured]
        skipped = {type(None), *map(type, named)}
        return [*named, *(callback for callback in monitors if type(callback) not in skipped)]

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self._settings["trainer"]["callbacks"] or []
        named = list(given) if isinstance(given, list) else [given]
        if self._budget is not None:
            kwargs |= {"max_epochs": -1, "max_steps": -1}
        if self.subcommand in _READ_ONLY:
            kwargs |= WITHOUT_STEPS
        if self._settings["trainer"]["accelerator"] == "auto" and _only_mps():
            kwargs["accelerator"] = "cpu"
        try:
            trainer = super().instantiate_trainer(**{"callbacks": self.callbacks(named), **kwargs})
            if self.subcommand not in _READ_ONLY:
                Path(trainer.default_root_dir).mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"`Trainer` cannot be made: {own_error(error) or error}"
            ) from error
        # Replace Lightning's default progress bar and checkpoint callback, but not the user's.
        callbacks = cast(Any, trainer).callbacks
        bar = trainer.progress_bar_callback
        if type(bar) in (TQDMProgressBar, RichProgressBar) and bar not in named:
            callbacks[callbacks.index(bar)] = BilevelProgressBar()
        for index, callback in enumerate(callbacks):
            if type(callback) is ModelCheckpoint and callback not in named:
                callbacks[index] = LastCheckpoint(Path(trainer.default_root_dir) / "checkpoints")
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFileIO()
        return trainer

    @property
    def _budget(self) -> str | None:
        """The optimisation time after which fit ends, if one is given."""
        budget: str | None = self._settings.get("budget")
        return budget

    @property
    def _settings(self) -> Any:
        """The config of the command, with its objects instantiated."""
        return self.config_init if self.subcommand is None else self.config_init[self.subcommand]
