"""What TensorBoard shows beside the curves: how they are grouped, hyper-parameters, texts and figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.ivsp.solver import IVSP

__all__ = ["layout", "show_figure", "show_hyperparameters", "show_layout", "show_pixels", "show_text"]

_EVERY = {
    "1 objective": {"upper level f": ["upper"], "lower level g": ["lower"], "step": ["step"]},
    "2 feasibility": {
        "violation [R]+": ["violation"],
        "|y - z| and its bound where R <= 0": ["prox_distance", "prox_distance_bound"],
    },
    "3 KKT": {
        "residuals": ["kkt_stationarity", "kkt_feasibility", "kkt_complementarity"],
        "their maximum, and the best so far": ["kkt_residual", "kkt_best"],
        "multiplier": ["kkt_multiplier", "multiplier"],
    },
    "6 cost": {
        "oracle calls": ["calls_upper", "calls_lower", "calls_gap"],
        "inner iterations per outer iteration": ["mean_inner_iterations"],
        "optimisation time (s)": ["optimization_time"],
    },
}
_PENALTY = {
    "2 feasibility": {
        "violation [R]+": ["violation"],
        "Moreau gap R as the solver sees it": ["moreau_gap"],
        "|y - z| and its bound where R <= 0": ["prox_distance", "prox_distance_bound"],
    },
    "4 penalty": {
        "inverse penalty gamma, and its updates": ["penalty", "penalty_at_update"],
        "iterations since the last update": ["penalty_constant_for"],
        "smoothing mu": ["smoothing"],
        "accuracy zeta": ["accuracy"],
    },
    "5 line search": {
        "trials per iteration": ["mean_trials"],
        "L and its start": ["curvature", "curvature_start"],
    },
}


def layout(solver: BilevelOptimizer) -> dict[str, dict[str, list[Any]]]:
    """Return the groups of TensorBoard's custom scalars for what a solver logs."""
    groups = dict(sorted({**_EVERY, **(_PENALTY if isinstance(solver, IVSP) else {})}.items()))
    return {
        # Tags are regular expressions there: `$` keeps penalty from drawing penalty_updates too.
        group.split(" ", 1)[1]: {title: ["Multiline", [f"^bilevel/{tag}$" for tag in tags]] for title, tags in charts.items()}
        for group, charts in groups.items()
    }


def _writers(trainer: Trainer) -> list[Any]:
    return (
        [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if trainer.is_global_zero
        else []
    )


def show_layout(trainer: Trainer, solver: BilevelOptimizer) -> None:
    """Group the curves under "Custom Scalars"."""
    for writer in _writers(trainer):
        writer.add_custom_scalars(layout(solver))


def show_text(trainer: Trainer, tag: str, text: str, iteration: int) -> None:
    """Show Markdown under "Text"."""
    for writer in _writers(trainer):
        writer.add_text(tag, text, iteration)


def show_pixels(trainer: Trainer, tag: str, pixels: Any, iteration: int) -> None:
    """Show an array of pixels (height, width, channel) under "Images"."""
    for writer in _writers(trainer):
        writer.add_image(tag, pixels, iteration, dataformats="HWC")


def show_figure(trainer: Trainer, tag: str, draw: Callable[[], Any], iteration: int) -> None:
    """Show a figure of matplotlib's under "Images"; without TensorBoard it is not even drawn."""
    for writer in _writers(trainer):
        writer.add_figure(tag, draw(), iteration)


def show_hyperparameters(trainer: Trainer, parameters: dict[str, Any], metrics: dict[str, float], iteration: int) -> None:
    """Show a run as one line of the "HParams" table, with what it ended with."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(parameters, metrics, step=iteration)
