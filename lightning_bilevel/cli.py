"""LightningCLI on bilevel modules: what ``lightning-bilevel fit``, ``validate`` and ``test`` run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

import lightning_bilevel.modules as _modules  # noqa: F401  (its classes can then be named without their module in YAML)
from lightning_bilevel.callbacks.certificate import CertificateReport
from lightning_bilevel.callbacks.last import LastCheckpoint
from lightning_bilevel.callbacks.moreau_gap import MoreauGapMonitor
from lightning_bilevel.callbacks.progress import BilevelProgressBar
from lightning_bilevel.checkpoints import WholeFileIO
from lightning_bilevel.messages import own_error
from lightning_bilevel.mixin import BilevelModule

__all__ = ["BilevelCLI"]


class BilevelCLI(LightningCLI):
    """LightningCLI whose model is any bilevel module and whose fit ends with the certificate."""

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        about = "Solve a bilevel problem. Another command, `lightning-bilevel compare --help`, runs several methods on one task."
        # An error of parsing is raised, so that the command can say it in one line; the commands have parsers of their own.
        common = {"exit_on_error": False}
        commands = {} if kwargs.get("run") is False else dict.fromkeys(self.subcommands(), common)
        kwargs["parser_kwargs"] = {"description": about, **common, **commands, **kwargs.get("parser_kwargs", {})}
        super().__init__(
            BilevelModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            # A second run in the same folder is normal: its config replaces the first one's.
            save_config_kwargs={"overwrite": True},
            args=args,
            **kwargs,
        )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        named = self._get(self.config_init, "trainer.callbacks") or []
        given = list(named) if isinstance(named, list) else [named]  # a copy: the Trainer adds its own to the list
        try:
            trainer = super().instantiate_trainer(**kwargs)
            Path(trainer.default_root_dir).mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError, ValueError) as error:
            raise MisconfigurationException(f"`Trainer` cannot be made: {own_error(error) or error}") from error
        bar, callbacks = trainer.progress_bar_callback, cast(Any, trainer).callbacks
        if type(bar) in (TQDMProgressBar, RichProgressBar):  # Lightning's default; a bar of the user's own stays
            callbacks[callbacks.index(bar)] = BilevelProgressBar()
        for index, callback in enumerate(callbacks):
            if type(callback) is ModelCheckpoint and callback not in given:  # likewise
                callbacks[index] = LastCheckpoint(Path(trainer.default_root_dir) / "checkpoints")
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFileIO()
        return trainer

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(CertificateReport, "certificate")
        parser.add_lightning_class_args(MoreauGapMonitor, "moreau_gap")
