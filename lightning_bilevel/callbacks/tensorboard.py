"""The groups of curves in TensorBoard."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_bilevel.plugin.streaming import has_changing_batches
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.names import NAMES

__all__ = ["layout", "show_layout"]


def layout(
    solver: BilevelOptimizer, *, mini_batches: bool = False
) -> dict[str, dict[str, list[Any]]]:
    """Return the groups of TensorBoard's custom scalars for what a solver logs."""
    groups: dict[str, dict[str, list[Any]]] = {}
    for name in NAMES:
        group, title = name.chart
        known = (solver.penalised or not name.penalised) and (mini_batches or not name.mini_batch)
        if title and known:
            charts = groups.setdefault(group, {})
            _, tags = charts.setdefault(title, ["Multiline", []])
            # Tags are regular expressions: without `$`, penalty would also draw penalty_updates.
            tags.append(f"^{name.tag}$")
    return groups


def show_layout(trainer: Trainer, solver: BilevelOptimizer) -> None:
    """Group the curves under "Custom Scalars"."""
    mini_batches = solver.takes_mini_batches and has_changing_batches(trainer)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
            logger.experiment.add_custom_scalars(layout(solver, mini_batches=mini_batches))
