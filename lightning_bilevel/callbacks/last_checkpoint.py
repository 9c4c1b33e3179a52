"""The last state of a run, kept in a file from which the same command goes on."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_bilevel.callbacks.optimization_budget import Duration, seconds
from lightning_bilevel.core.errors import BilevelError, CheckpointError
from lightning_bilevel.plugin.checkpoints import WholeFileIO
from lightning_bilevel.plugin.processes import any_of

__all__ = ["LastCheckpoint"]


class LastCheckpoint(ModelCheckpoint):
    """Saves the run to ``last.ckpt`` every so often, when it ends, and when it is told to end.

    ``trainer.fit(module, ckpt_path="last")`` starts anew where there is no such file and otherwise
    goes on from it, so a run that was killed needs the same call and nothing else. A run that
    starts anew in the same folder leaves the file of the other one and writes ``last-v1.ckpt``; the
    latest is the last.

    At SIGTERM and at the first Ctrl-C the iteration is finished, the state saved and the run ended.
    A second signal ends the run at once, with the state that was saved before. So does the first
    one before the first iteration and after the last, where there is no iteration to finish. An
    error also saves the last point that was reached.

    Args:
        dirpath: The folder.
        interval: The time between two saves, such as ``30s`` or ``5m``.
    """

    def __init__(self, dirpath: str | Path, interval: Duration = "30s") -> None:
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
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            try:
                os.makedirs(self.dirpath, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.dirpath):
                    pass
            except OSError as error:
                raise CheckpointError(
                    f"no checkpoint can be written to {self.dirpath} ({error}): name another "
                    "folder."
                ) from error

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        self._saved_at, self._received = time.monotonic(), None
        # What a loaded checkpoint holds need not be saved again.
        self._last_global_step_saved = trainer.global_step

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._iterating = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Resumed from between a batch and its validation, Lightning leaves the validation out.
        if not trainer.is_last_batch and (batch_idx + 1) % (trainer.val_check_batch or math.inf):
            self._save_if_due(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_ending(trainer):
            # Other callbacks may take long in `on_train_end`, which comes before ours: what happens
            # there loses nothing.
            self._save_if_due(trainer, final=True)
            self._iterating = False
        # Resumed from here, Lightning counts a batch too many on the loggers' axis of validations:
        # only where there is no other place.
        elif trainer.num_training_batches == 1:
            self._save_if_due(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save nothing: the next batch comes at once."""

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The step is that of the save before, but the other callbacks have come to their end since.
        self._last_global_step_saved = -1
        self._save(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        began, self._saved_at, self._iterating = self._saved_at is not None, None, False
        self._release()
        # Of a run that has not begun there is nothing to save over what is there. A Ctrl-C may come
        # in the middle of a step, and another process may be gone: only an error of the solver is
        # sure to come to all of them, and between two points.
        whole = isinstance(exception, Exception) and (
            trainer.world_size == 1 or isinstance(exception, BilevelError)
        )
        if began and whole and not isinstance(exception, CheckpointError):
            self._save(trainer)

    def _save_if_due(self, trainer: Trainer, final: bool = False) -> None:
        assert self._saved_at is not None
        due = final or time.monotonic() - self._saved_at >= self.interval
        interrupted, terminated = self._received == signal.SIGINT, self._received == signal.SIGTERM
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
        before = self._last_global_step_saved
        try:
            self._save_last_checkpoint(trainer, {})
        except OSError as error:
            kept = (
                f"the one before, of iteration {before}, is still there"
                if before
                else "there is none from before"
            )
            raise CheckpointError(
                f"the checkpoint {self.last_model_path} could not be written ({error}): {kept}."
            ) from error
        self._saved_at = time.monotonic()

    def _listen(self) -> None:
        """Take SIGINT and SIGTERM over from Lightning, whose own handler waits for the other
        processes.
        """
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
            if (
                signal.getsignal(number) == self._receive
            ):  # after a run, Lightning has put back what was there before it
                signal.signal(
                    number, signal.SIG_DFL if handler is None else handler
                )  # None: not set from Python
        self._handlers = {}


def _is_ending(trainer: Any) -> bool:
    """Tell at the end of an epoch whether the run ends with it; Lightning's own `fit_loop.done`
    prints and counts as well.
    """
    steps, epochs = trainer.global_step, trainer.fit_loop.epoch_progress.current.processed
    limits = ((steps, trainer.max_steps), (epochs, trainer.max_epochs))
    return trainer.should_stop or any(
        0 <= limit <= reached for reached, limit in limits if limit is not None
    )
