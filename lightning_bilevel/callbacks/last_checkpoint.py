"""The last state of a run, in a file from which the same command goes on."""

from __future__ import annotations

import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_bilevel.callbacks.budget import seconds
from lightning_bilevel.checkpoint import WholeFileIO
from lightning_bilevel.core.errors import BilevelError, CheckpointError
from lightning_bilevel.distributed import any_of

__all__ = ["LastCheckpoint", "write_whole_files"]


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
    second signal ends the run at once, with the state that was saved before. So does the first
    signal if it comes before the first iteration or after the last, when there is no iteration to
    finish. An error also saves the last point that was reached.

    Lightning's own callbacks do not suffice in manual optimisation: ``train_time_interval`` of
    ``ModelCheckpoint`` has no effect there, and ``OnExceptionCheckpoint`` saves amid a step, before
    the run has begun, and where other processes do not take part.

    Args:
        dirpath: The folder.
        interval: The time between two saves, such as ``30s`` or ``5m``.
    """

    def __init__(self, dirpath: str | Path, interval: str | float = "30s") -> None:
        super().__init__(dirpath, save_top_k=0, save_last=True)
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
        self._received = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._receive)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_sanity_check_start(trainer, pl_module)
        self._saved_at = time.monotonic()
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
        if _is_ending(trainer):
            # Other callbacks come before this one in `on_train_end` and may take long.
            self._save_if_due(trainer, final=True)
            self._saved_at = None
        elif trainer.num_training_batches == 1:
            # A run that resumes from here counts one batch too many on the loggers' axis of
            # validations. So it is saved here only if there is no other place.
            self._save_if_due(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save nothing: the next batch comes at once."""

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # This step is already saved, but the other callbacks have finished since: save it again.
        self._save(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # A Ctrl-C may come in the middle of a step, and another process may be gone: only an error
        # of the solver is sure to reach all processes, and to come between two points.
        whole = isinstance(exception, BilevelError) or (
            isinstance(exception, Exception) and trainer.world_size == 1
        )
        underway, self._saved_at = self._saved_at is not None, None
        new = self._last_global_step_saved != trainer.global_step
        if underway and new and whole and not isinstance(exception, CheckpointError):
            self._save(trainer)

    def _save_if_due(self, trainer: Trainer, final: bool = False) -> None:
        assert self._saved_at is not None
        due = final or time.monotonic() - self._saved_at >= self.interval
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
        if trainer.fast_dev_run:
            return
        try:
            self._save_last_checkpoint(trainer, {})
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {self.last_model_path} could not be written ({error}): the file "
                "from before is unchanged."
            ) from error

    def _receive(self, number: int, frame: Any) -> None:
        if self._saved_at is None or self._received is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SIGTERMException
        self._received = number


def _is_ending(trainer: Any) -> bool:
    """Compare steps and epochs with their limits; `fit_loop.done` would also print and count."""
    epochs = trainer.fit_loop.epoch_progress.current.processed
    limits = ((trainer.global_step, trainer.max_steps), (epochs, trainer.max_epochs))
    return trainer.should_stop or any(0 <= limit <= reached for reached, limit in limits)
