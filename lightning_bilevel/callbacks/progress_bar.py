"""A progress bar for steps that take a millisecond."""

from __future__ import annotations

import time
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

from lightning_bilevel.callbacks.certificate_monitor import MoreauGapMonitor
from lightning_bilevel.callbacks.optimization_budget import OptimizationBudget
from lightning_bilevel.module import BilevelMixin

__all__ = ["BilevelProgressBar"]


class BilevelProgressBar(TQDMProgressBar):
    """Shows validation metrics, the last step's f, Moreau gap and penalty, and the budget left.

    If the solver does not know the gap, the bar shows the latest violation of a monitor instead. It
    is drawn at most four times a second: Lightning's own is drawn at every step, which takes a good
    part of a millisecond.
    """

    INTERVAL = 0.25
    _drawn = 0.0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if now - self._drawn >= self.INTERVAL or batch_idx + 1 == trainer.num_training_batches:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self._drawn = now

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        usual = super().get_metrics(trainer, pl_module).items()
        shown = {key: v for key, v in usual if key != "v_num" and not key.startswith("bilevel/")}
        if isinstance(pl_module, BilevelMixin) and pl_module.last_step is not None:
            metrics = pl_module.last_step.metrics()
            for callback in cast(Any, trainer).callbacks:
                if isinstance(callback, MoreauGapMonitor) and callback.latest is not None:
                    metrics.setdefault("bilevel/moreau_gap", callback.latest)
                if isinstance(callback, OptimizationBudget):
                    left = callback.budget - pl_module.last_step.optimization_time
                    shown["left"] = f"{max(left, 0.0):.1f}s"
            for label, name in (("f", "upper"), ("gap", "moreau_gap"), ("gamma", "penalty")):
                if f"bilevel/{name}" in metrics:
                    shown[label] = metrics[f"bilevel/{name}"]
        return {key: f"{v:.3g}" if isinstance(v, float) else v for key, v in shown.items()}
