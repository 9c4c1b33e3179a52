"""LightningCLI on bilevel modules: what ``lightning-bilevel fit``, ``validate`` and ``test`` run."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, cast

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

import lightning_bilevel.modules as _modules  # noqa: F401  (its classes can then be named without their module in YAML)
from lightning_bilevel.callbacks.certificate import CertificateReport
from lightning_bilevel.callbacks.last import LastCheckpoint
from lightning_bilevel.callbacks.moreau_gap import MoreauGapMonitor
from lightning_bilevel.callbacks.progress import BilevelProgressBar
from lightning_bilevel.checkpoints import WholeFileIO
from lightning_bilevel.mixin import BilevelModule

__all__ = ["BilevelCLI", "own_error"]


class BilevelCLI(LightningCLI):
    """LightningCLI whose model is any bilevel module and whose fit ends with the certificate."""

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        about = "Solve a bilevel problem. Another command, `lightning-bilevel compare --help`, runs several methods on one task."
        kwargs["parser_kwargs"] = {"description": about, **kwargs.get("parser_kwargs", {})}
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
        trainer = super().instantiate_trainer(**kwargs)
        bar, callbacks = trainer.progress_bar_callback, cast(Any, trainer).callbacks
        if type(bar) in (TQDMProgressBar, RichProgressBar):  # Lightning's default; a bar of the user's own stays
            callbacks[callbacks.index(bar)] = BilevelProgressBar()
        given = self._get(self.config_init, "trainer.callbacks") or []
        for index, callback in enumerate(callbacks):
            if type(callback) is ModelCheckpoint and callback not in given:  # likewise
                callbacks[index] = LastCheckpoint(Path(trainer.default_root_dir) / "checkpoints")
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFileIO()
        return trainer

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(CertificateReport, "certificate")
        parser.add_lightning_class_args(MoreauGapMonitor, "moreau_gap")


def own_error(error: BaseException | None) -> BaseException | None:
    """Return the error of this package's own behind what was raised (jsonargparse wraps what a constructor raises).

    An error from a user's module is none of these: it keeps its traceback, which shows where it comes from.
    """
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and Path(frames[-1].filename).is_relative_to(Path(__file__).parent):
            return error
        error = error.__cause__ or error.__context__
    return None
