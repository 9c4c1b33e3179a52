"""How a run ends: by a budget of time, or by a signal or error with its last state in a file."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_bilevel.checkpoint import WholeFileIO
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.distributed import any_of

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(duration: str | float) -> float:
    """Read a duration such as ``"1s"``, ``"500ms"``, ``"2m"``, ``"1.5h"``, or a number of seconds.

    Example:
        >>> seconds("2m"), seconds("500ms"), seconds(3)
        (120.0, 0.5, 3.0)
    """
    match = re.fullmatch(r"(\d*\.?\d+(?:e[+-]?\d+)?) *(ms|s|m|min|h|)", str(duration).strip())
    value = float(match[1]) * _UNITS[match[2]] if match else math.nan
    if not 0.0 < value < math.inf:
        raise ValueError(
            f"budget {duration!r} is not a duration: write a positive number of seconds, or "
            "one with ms, s, m or h, such as 10m."
        )
    return value


class OptimizationBudget(Callback):
    """Stops fit when the solver has spent its time.

    Only the solver's own steps count, inner loops included; loading data, validation, logging and
    plots do not. The time is part of the solver's state, so it goes on counting after a resume.

    Args:
        budget: The optimisation time, such as ``60s``, ``10m`` or a number of seconds.
    """

    def __init__(self, budget: str | float) -> None:
        self.budget = seconds(budget)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        step = pl_module.last_step
        if step is not None and step.optimization_time >= self.budget:
            trainer.should_stop = True


def write_whole_files(trainer: Trainer) -> None:
    """Write checkpoints as whole files, where Lightning would write them otherwise."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeFileIO()


class LastCheckpoint(ModelCheckpoint):
    """Saves the run to ``last.ckpt`` at intervals, when it ends, and when a signal ends it.

    ``trainer.fit(module, ckpt_path="last")`` goes on from this file, or starts a new run if there
    is none. So a run that was killed only needs the same call again. A new run in the same folder
    leaves the older file alone and writes ``last-v1.ckpt``; ``"last"`` is the latest of them.

    At SIGTERM and at the first Ctrl-C, the run finishes its iteration, saves its state and ends. A
    second signal ends the run at once, with the state that was saved before. An error also saves
    the last point that was reached.

    Lightning's own callbacks do not suffice in manual optimisation: ``train_time_interval`` of
    ``ModelCheckpoint`` has no effect there, and ``OnExceptionCheckpoint`` saves amid a step, before
    the run has begun, and where other processes do not take part.

    Args:
        dirpath: The folder.
        interval: The time between two saves, such as ``30s`` or ``5m``.
    """

    def __init__(self, dirpath: str | Path, interval: str | float = "30s") -> None:
        super().__init__(dirpath, save_top_k=0, save_last=True, save_on_train_epoch_end=True)
        self.interval = seconds(interval)
        # The time of the last save; None before the first iteration and after the last.
        self._saved_at: float | None = None
        self._received: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        write_whole_files(trainer)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's handler of SIGTERM waits for the other processes. After the run Lightning puts
        # back the handlers from before it.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._receive)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_sanity_check_start(trainer, pl_module)  # there may have been none
        self._saved_at, self._received = time.monotonic(), None
        # The state of a loaded checkpoint need not be saved again.
        self._last_global_step_saved = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning skips the validation of a run that resumes between a batch and its validation.
        if not trainer.is_last_batch and (batch_idx + 1) % (trainer.val_check_batch or math.inf):
            self._save_if_due(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that resumes from here counts one batch too many on the loggers' axis of
        # validations. So it is saved here only if there is no other place.
        if trainer.num_training_batches == 1:
            self._save_if_due(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The other callbacks have finished since the last step: it is saved even if it was before.
        self._save(trainer)
        self._saved_at = None

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # A Ctrl-C may come in the middle of a step, and another process may be gone: only an error
        # of the solver is sure to reach all processes, and to come between two points.
        alone = isinstance(exception, Exception) and trainer.world_size == 1
        underway, self._saved_at = self._saved_at is not None, None
        new = self._last_global_step_saved != trainer.global_step
        if underway and new and (alone or isinstance(exception, BilevelError)):
            self._save(trainer)

    def _save_if_due(self, trainer: Trainer) -> None:
        assert self._saved_at is not None
        due = time.monotonic() - self._saved_at >= self.interval
        flags = [due, self._received == signal.SIGINT, self._received == signal.SIGTERM]
        if trainer.world_size > 1:
            flags = any_of(flags, trainer.strategy.root_device)
        if any(flags) and self._last_global_step_saved != trainer.global_step:
            self._save(trainer)
            self._saved_at = time.monotonic()
        _, interrupted, terminated = flags
        if interrupted:
            raise KeyboardInterrupt
        if terminated:
            raise SIGTERMException

    def _save(self, trainer: Any) -> None:
        if not trainer.fast_dev_run:
            self._save_last_checkpoint(trainer, {})

    def _receive(self, number: int, frame: Any) -> None:
        if self._saved_at is None or self._received is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SIGTERMException
        self._received = number
