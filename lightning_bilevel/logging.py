"""What a run gives to its loggers: numbers, texts, figures and hyper-parameters.

Lightning's loggers share only numbers and hyper-parameters. Texts and figures go to those that show
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.utilities import rank_zero_warn

from lightning_bilevel.solvers.record import StepInfo

__all__ = [
    "is_logged",
    "log_figure",
    "log_hyperparameters",
    "log_text",
    "publish",
    "publish_step",
    "run_folder",
]


def is_logged(trainer: Any, iteration: int) -> bool:
    """Return whether the record of an iteration goes to the loggers."""
    every = trainer.log_every_n_steps  # 0 is never
    return bool(every > 0 and (iteration % every == 0 or iteration == 1))


def publish_step(trainer: Any, info: StepInfo, *, logged: bool) -> None:
    """Give the record of a step to callbacks and progress bar, and to loggers if it is logged."""
    trainer.progress_bar_metrics.update(info.shown())
    values = publish(trainer, info.metrics(), info.iteration, logged)
    if logged:
        trainer.logged_metrics.update(values)


def publish(
    trainer: Any, numbers: dict[str, float], iteration: int, logged: bool = True
) -> dict[str, torch.Tensor]:
    """Give numbers to callbacks (``trainer.callback_metrics``) and loggers.

    `self.log_dict` takes two milliseconds for the numbers of a step, and this a hundredth of that.
    """
    tensors = torch.tensor(list(numbers.values()), device="cpu").unbind()
    values = dict(zip(numbers, tensors, strict=True))
    trainer.callback_metrics.update(values)
    if logged and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(numbers), step=iteration)
    return values


def log_text(trainer: Any, tag: str, text: str, iteration: int) -> None:
    """Log Markdown."""
    _give(trainer, _TEXT, tag, lambda: text, iteration)


def log_figure(trainer: Any, tag: str, draw: Callable[[], Any], iteration: int) -> None:
    """Log a matplotlib figure; it is drawn only for a logger that takes it."""
    _give(trainer, _FIGURE, tag, draw, iteration)


def log_hyperparameters(
    trainer: Any, values: Mapping[str, Any], final: dict[str, float], iteration: int
) -> None:
    """Log the hyper-parameters of a run when it ends; TensorBoard shows them with final numbers."""
    # Plain YAML has lists and no tuples.
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
    _give(trainer, _HYPERPARAMETERS, "hyper-parameters", lambda: (plain, final), iteration)


def run_folder(trainer: Any) -> Path | None:
    """Return the folder of a run's files; None for a trial run of a few steps, which leaves none.

    It is that of the first logger, where Lightning puts the checkpoints too. Without one, or if it
    logs to a server, it is the Trainer's ``default_root_dir``. All processes must call this.
    """
    if trainer.fast_dev_run:
        return None
    folder, logger = trainer.log_dir, trainer.logger
    if folder is None or logger is None or isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return Path(folder or trainer.default_root_dir)
    # Others keep the files of all runs there.
    return Path(folder, str(logger.name), str(logger.version))


# How loggers take something: logger, tag, content, iteration.
_Ways = dict[Any, Callable[[Any, str, Any, int], None]]
_TEXT: _Ways = {
    TensorBoardLogger: lambda to, tag, text, k: to.experiment.add_text(tag, text, k),
    WandbLogger: lambda to, tag, text, k: to.log_text(tag, ["text"], [[text]], step=k),
    MLFlowLogger: lambda to, tag, text, _: to.experiment.log_text(to.run_id, text, f"{tag}.md"),
}
_FIGURE: _Ways = {
    TensorBoardLogger: lambda to, tag, drawn, k: to.experiment.add_figure(tag, drawn, k),
    WandbLogger: lambda to, tag, drawn, k: to.log_image(tag, [drawn], step=k),
    MLFlowLogger: lambda to, tag, drawn, _: to.experiment.log_figure(
        to.run_id, drawn, f"{tag}.png"
    ),
}
_HYPERPARAMETERS: _Ways = {
    TensorBoardLogger: lambda to, _, given, k: to.log_hyperparams(*given, step=k),
    Logger: lambda to, _, given, k: to.log_hyperparams(given[0]),
}


def _give(trainer: Any, ways: _Ways, tag: str, make: Callable[[], Any], iteration: int) -> None:
    for logger in trainer.loggers if trainer.is_global_zero else ():
        way = next((way for kind, way in ways.items() if isinstance(logger, kind)), None)
        if way is None:
            continue
        try:
            way(logger, tag, make(), iteration)
        except Exception as error:
            rank_zero_warn(
                f"`{type(logger).__name__}` did not take {tag!r} ({type(error).__name__}: "
                f"{error}): the run goes on without it."
            )
