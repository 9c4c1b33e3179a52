"""Where the record of an outer iteration goes: callbacks, progress bar and loggers."""

from __future__ import annotations

from typing import Any

import torch

from lightning_bilevel.plugin.loggers import log_numbers
from lightning_bilevel.solvers.record import StepInfo

__all__ = ["is_logged", "publish_step"]


def is_logged(trainer: Any, iteration: int) -> bool:
    """Tell whether the record of an iteration goes to the loggers."""
    every = trainer.log_every_n_steps  # 0 is never
    return bool(every > 0 and (iteration % every == 0 or iteration == 1))


def publish_step(trainer: Any, info: StepInfo) -> None:
    """Give the record of a step to callbacks and progress bar, and to loggers at their interval."""
    metrics = info.metrics()
    # `self.log` would take milliseconds for this.
    numbers = torch.tensor(list(metrics.values()), device="cpu")
    values = dict(zip(metrics, numbers.unbind(), strict=True))
    trainer.callback_metrics.update(values)
    trainer.progress_bar_metrics.update(info.shown())
    if is_logged(trainer, info.iteration):
        trainer.logged_metrics.update(values)
        log_numbers(trainer, metrics, info.iteration)
