"""Stopping by optimisation time."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_bilevel.plugin.mixin import BilevelMixin

__all__ = ["Duration", "OptimizationBudget", "seconds"]

# The types of Lightning's Timer, and numbers of seconds.
Duration: TypeAlias = str | float | timedelta | dict[str, int]

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(duration: Duration) -> float:
    """Read a duration such as ``"1s"``, ``"500ms"``, ``"2m"``, ``"1.5h"``, or a number of seconds.

    The formats of Lightning's ``Timer`` work too: ``"DD:HH:MM:SS"``, a timedelta, or a dict of its
    arguments.

    Example:
        >>> seconds("2m"), seconds("500ms"), seconds(3)
        (120.0, 0.5, 3.0)
        >>> seconds("00:00:01:00"), seconds(timedelta(minutes=1)), seconds({"minutes": 1})
        (60.0, 60.0, 60.0)
    """
    text = str(duration)
    clock = re.fullmatch(r"\s*(\d+):(\d\d):(\d\d):(\d\d)\s*", text)
    try:
        if isinstance(duration, dict):
            value = timedelta(**duration).total_seconds()
        elif isinstance(duration, timedelta):
            value = duration.total_seconds()
        elif clock:
            days, hours, minutes, rest = map(int, clock.groups())
            value = timedelta(days, rest, minutes=minutes, hours=hours).total_seconds()
        else:
            match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([a-z]*)\s*", text)
            value = float(match[1]) * _UNITS[match[2]] if match else math.nan
    except (KeyError, TypeError, ValueError):
        value = math.nan
    if not 0.0 < value < math.inf:
        raise ValueError(
            f"budget {duration!r} is not a duration: write a positive number with ms, s, m or h, "
            "such as 60s."
        )
    return value


class OptimizationBudget(Callback):
    """Stops fit when the solver has spent its time.

    Only the solver's own steps count, inner loops included; loading data, validation, logging and
    plots do not. The time is part of the solver's state, so it goes on counting after a resume.

    Args:
        budget: The optimisation time, such as ``60s``, ``10m`` or a number of seconds; or in a
            format of Lightning's ``Timer``.
    """

    def __init__(self, budget: Duration) -> None:
        self.budget = seconds(budget)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, BilevelMixin):
            raise MisconfigurationException(
                f"`OptimizationBudget` was given a {type(pl_module).__name__}: it needs a bilevel "
                "module, whose solver keeps the time."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.last_step.optimization_time >= self.budget:
            trainer.should_stop = True
