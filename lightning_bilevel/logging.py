"""What a run gives to its loggers: numbers and hyper-parameters; texts and figures to TensorBoard.

Lightning's loggers share only numbers and hyper-parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_bilevel.solvers.record import StepInfo


def is_logged(trainer: Any, iteration: int) -> bool:
    """Return whether the record of an iteration goes to the loggers."""
    every = trainer.log_every_n_steps  # 0 is never
    return bool(every > 0 and (iteration % every == 0 or iteration == 1))


def publish_step(trainer: Any, info: StepInfo, *, logged: bool) -> None:
    """Give the record of a step to callbacks and progress bar, and to loggers if it is logged."""
    trainer.progress_bar_metrics.update(info.shown())
    publish(trainer, info.metrics(), info.iteration, logged)


def publish(trainer: Any, numbers: dict[str, float], iteration: int, logged: bool = True) -> None:
    """Give numbers to callbacks (``trainer.callback_metrics``) and loggers.

    `self.log_dict` takes two milliseconds for the numbers of a step, and this a hundredth of that.
    """
    tensors = torch.tensor(list(numbers.values()), device="cpu").unbind()
    values = dict(zip(numbers, tensors, strict=True))
    trainer.callback_metrics.update(values)
    if logged:
        trainer.logged_metrics.update(values)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(dict(numbers), step=iteration)


def log_text(trainer: Any, tag: str, text: str, step: int) -> None:
    """Show Markdown in TensorBoard."""
    _give(trainer, tag, lambda to: to.experiment.add_text(tag, text, step), TensorBoardLogger)


def log_figure(trainer: Any, tag: str, draw: Callable[[], Any], step: int) -> None:
    """Show a matplotlib figure in TensorBoard; without it the figure is not drawn."""
    _give(trainer, tag, lambda to: to.experiment.add_figure(tag, draw(), step), TensorBoardLogger)


def log_hyperparameters(trainer: Any, values: dict[str, Any], **table: Any) -> None:
    """Log hyper-parameters; the table of TensorBoard also has final ``metrics``, at a ``step``."""

    def give(logger: Any) -> None:
        logger.log_hyperparams(values, **table if isinstance(logger, TensorBoardLogger) else {})

    _give(trainer, "hyper-parameters", give)


def _give(trainer: Any, what: str, give: Callable[[Any], object], kind: Any = Logger) -> None:
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, kind):
            try:
                give(logger)
            except Exception as error:  # a picture is not worth a run
                rank_zero_warn(f"`{type(logger).__name__}` did not take {what!r} ({error!r}).")


def run_folder(trainer: Any) -> Path | None:
    """Return the folder of a run's files; None for a trial run of a few steps, which leaves none.

    It is that of the first logger, where Lightning puts the checkpoints too. Without one, or if it
    logs to a server, it is the Trainer's ``default_root_dir``. All processes must call this.
    """
    folder, logger = trainer.log_dir, trainer.logger
    if trainer.fast_dev_run:
        return None
    if folder and logger and not isinstance(logger, (TensorBoardLogger, CSVLogger)):
        folder = Path(folder, str(logger.name), str(logger.version))  # others keep all runs there
    return Path(folder or trainer.default_root_dir)
