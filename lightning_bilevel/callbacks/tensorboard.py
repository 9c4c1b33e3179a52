"""TensorBoard besides the curves: their groups, hyper-parameters, texts and figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_bilevel.plugin.streaming import has_changing_batches
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.names import NAMES

__all__ = [
    "layout",
    "show_figure",
    "show_hyperparameters",
    "show_layout",
    "show_pixels",
    "show_text",
]


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


def _writers(trainer: Trainer) -> list[Any]:
    if not trainer.is_global_zero:
        return []
    return [
        logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)
    ]


def show_layout(trainer: Trainer, solver: BilevelOptimizer) -> None:
    """Group the curves under "Custom Scalars"."""
    mini_batches = solver.takes_mini_batches and has_changing_batches(trainer)
    for writer in _writers(trainer):
        writer.add_custom_scalars(layout(solver, mini_batches=mini_batches))


def show_text(trainer: Trainer, tag: str, text: str, iteration: int) -> None:
    """Show Markdown under "Text"."""
    for writer in _writers(trainer):
        writer.add_text(tag, text, iteration)


def show_pixels(trainer: Trainer, tag: str, pixels: Any, iteration: int) -> None:
    """Show an array of pixels (height, width, channel) under "Images"."""
    for writer in _writers(trainer):
        writer.add_image(tag, pixels, iteration, dataformats="HWC")


def show_figure(trainer: Trainer, tag: str, draw: Callable[[], Any], iteration: int) -> None:
    """Show a matplotlib figure under "Images"; without TensorBoard it is not even drawn."""
    for writer in _writers(trainer):
        writer.add_figure(tag, draw(), iteration)


def show_hyperparameters(
    trainer: Trainer, parameters: dict[str, Any], metrics: dict[str, float], iteration: int
) -> None:
    """Show a run as one line of the "HParams" table, with its final numbers."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(parameters, metrics, step=iteration)
