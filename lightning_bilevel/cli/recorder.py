"""What a comparison takes down of each method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_bilevel.callbacks.monitor import usual_tolerance
from lightning_bilevel.cli.results import MethodResult
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.files import write_whole
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["Recorder"]


class Recorder(Callback):
    """Evaluates every method alike, takes it down, and saves the run so that it can go on from there."""

    SAVE_EVERY = 10.0

    def __init__(self, result: MethodResult, folder: Path, shown: Callable[[float], None], envelope: Envelope | None) -> None:
        self.result, self.folder, self.shown, self.envelope = result, folder, shown, envelope
        self.saved = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        state = self.folder / "state.pt"
        if state.exists():
            saved = torch.load(state, weights_only=True)
            pl_module.load_state_dict(saved["model"])
            trainer.optimizers[0].load_state_dict(saved["optimizer"])
            self.result.rows = saved["rows"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.shown(pl_module.last_step.optimization_time)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Evaluate after the validation, which there is none of without validation data or a ``validation_step``."""
        if pl_module.last_step is None:
            return
        solver = trainer.optimizers[0]
        assert isinstance(solver, BilevelOptimizer)
        row = {
            "iteration": solver.memory["iteration"],
            "optimization_time": solver.memory["optimization_time"],
            "passes": solver.memory["passes"],
        }
        row |= {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("bilevel/")}
        certificate = pl_module.certify(envelope=self.envelope, tolerance=usual_tolerance(trainer))
        if certificate is not None:
            row |= {"violation": certificate.feasibility, "kkt_residual": certificate.kkt}
        self.result.rows.append(row)
        if trainer.is_global_zero and row["optimization_time"] - self.saved >= self.SAVE_EVERY:
            state = {"model": pl_module.state_dict(), "optimizer": solver.state_dict(), "rows": self.result.rows}
            write_whole(self.folder / "state.pt", lambda file: torch.save(state, file))
            self.saved = row["optimization_time"]
