"""Stopping by optimisation time."""

from __future__ import annotations

import math
import re
from typing import Any

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

__all__ = ["OptimizationBudget", "seconds"]

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
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = pl_module.last_step
        if step is not None and step.optimization_time >= self.budget:
            trainer.should_stop = True
