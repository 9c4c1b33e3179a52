"""An end by optimisation time, and a progress bar that shows what is left of it."""

from __future__ import annotations

import math
import re
import time
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

from lightning_bilevel.callbacks.certificate import CertificateMonitor
from lightning_bilevel.module import BilevelMixin

__all__ = ["BilevelProgressBar", "OptimizationBudget", "seconds"]

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
                if isinstance(callback, CertificateMonitor) and callback.latest is not None:
                    metrics.setdefault("bilevel/moreau_gap", callback.latest)
                if isinstance(callback, OptimizationBudget):
                    left = callback.budget - pl_module.last_step.optimization_time
                    shown["left"] = f"{max(left, 0.0):.1f}s"
            for label, name in (("f", "upper"), ("gap", "moreau_gap"), ("gamma", "penalty")):
                if f"bilevel/{name}" in metrics:
                    shown[label] = metrics[f"bilevel/{name}"]
        return {key: f"{v:.3g}" if isinstance(v, float) else v for key, v in shown.items()}
