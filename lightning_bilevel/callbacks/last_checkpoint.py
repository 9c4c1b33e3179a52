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

from lightning_bilevel.callbacks.optimization_budget import seconds
from lightning_bilevel.checkpoint import WholeFileIO
from lightning_bilevel.core.errors import BilevelError, CheckpointError
from lightning_bilevel.distributed import any_of

__all__ = ["LastCheckpoint"]


class LastCheckpoint(ModelCheckpoint):
    """Saves the run to ``last.ckpt`` at intervals, when it ends, and when a signal ends it.

    ``trainer.fit(module, ckpt_path="last")`` goes on from this file, or starts a new run if there
    is none. So a run that was killed only needs the same call again. A new run in the same folder
    leaves the older file alone and writes ``last-v1.ckpt``; ``"last"`` is the latest of them.

    At SIGTERM and at the first Ctrl-C, the run finishes its iteration, saves its state and ends. A
    second signal ends the run at once, with the state that was saved before. So does the first
    signal if it comes before the first iteration or after the last, when there is no iteration to
    finish. An error also saves the last point that was reached.

    Args:
        dirpath: The folder.
        interval: The time between two saves, such as ``30s`` or ``5m``.
    """

    def __init__(self, dirpath: str | Path, interval: str | float = "30s") -> None:
        super().__init__(dirpath, save_top_k=0, save_last=True)
        self.interval = seconds(interval)
        self._saved_at: float | None = None
        self._received: int | None = None
        self._iterating = False
        self._handlers: dict[int, Any] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert self.dirpath is not None
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFileIO()

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        self._saved_at = time.monotonic()
        self._received = None
        # The state of a loaded checkpoint need not be saved again.
        self._last_global_step_saved = trainer.global_step

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._iterating = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning skips the validation of a run that resumes between a batch and its validation.
        if not trainer.is_last_batch and (batch_idx + 1) % (trainer.val_check_batch or math.inf):
            self._save_if_due(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_ending(trainer):
            # Other callbacks come before this one in `on_train_end` and may take long. The save
            # here loses nothing if the run is killed there.
            self._save_if_due(trainer, final=True)
            self._iterating = False
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
        self._last_global_step_saved = -1
        self._save(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        began = self._saved_at is not None
        self._saved_at = None
        self._iterating = False
        self._release()
        # A run that has not begun has nothing to save. A Ctrl-C may come in the middle of a step,
        # and another process may be gone: only an error of the solver is sure to reach all
        # processes, and to come between two points.
        whole = isinstance(exception, Exception) and (
            trainer.world_size == 1 or isinstance(exception, BilevelError)
        )
        if began and whole and not isinstance(exception, CheckpointError):
            self._save(trainer)

    def _save_if_due(self, trainer: Trainer, final: bool = False) -> None:
        assert self._saved_at is not None
        due = final or time.monotonic() - self._saved_at >= self.interval
        interrupted = self._received == signal.SIGINT
        terminated = self._received == signal.SIGTERM
        if trainer.world_size > 1:
            due, interrupted, terminated = any_of(
                (due, interrupted, terminated), trainer.strategy.root_device
            )
        if due or interrupted or terminated:
            self._save(trainer)
        if interrupted:
            raise KeyboardInterrupt
        if terminated:
            raise SIGTERMException

    def _save(self, trainer: Trainer) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        try:
            self._save_last_checkpoint(trainer, {})
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {self.last_model_path} could not be written ({error}): the file "
                "from before is unchanged."
            ) from error
        self._saved_at = time.monotonic()

    def _listen(self) -> None:
        """Take over SIGINT and SIGTERM: Lightning's own handler waits for the other processes."""
        if not self._handlers and threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: signal.signal(number, self._receive)
                for number in (signal.SIGINT, signal.SIGTERM)
            }

    def _receive(self, number: int, frame: Any) -> None:
        if not self._iterating or self._received is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SIGTERMException
        self._received = number

    def _release(self) -> None:
        for number, handler in self._handlers.items():
            # After a run, Lightning has already put back the handler from before the run.
            if signal.getsignal(number) == self._receive:
                # None is a handler that was not set from Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}


def _is_ending(trainer: Any) -> bool:
    """Compare steps and epochs with their limits; `fit_loop.done` would also print and count."""
    steps = trainer.global_step
    epochs = trainer.fit_loop.epoch_progress.current.processed
    limits = ((steps, trainer.max_steps), (epochs, trainer.max_epochs))
    return trainer.should_stop or any(
        0 <= limit <= reached for reached, limit in limits if limit is not None
    )
