"""Checks at the start of a run: what would fail later, or go wrong without a word."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bilevel.levels import Declaration
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = [
    "check_all_declared",
    "check_automatic",
    "check_optimizer",
    "check_precision",
    "check_trainer",
]


def check_precision(trainer: Any, solver: BilevelOptimizer) -> None:
    """Refuse a precision that does not resolve the differences that an exact solver takes."""
    if trainer.precision not in ("32-true", "64-true"):
        raise MisconfigurationException(
            f"`Trainer(precision={trainer.precision!r})` is not supported with "
            f"{type(solver).__name__} on all data: small differences of large numbers would be "
            "lost. Use 32-true or 64-true."
        )


def check_automatic(module: LightningModule, trainer: Any) -> None:
    """Refuse what works in automatic optimisation only; Lightning would advise to switch to it."""
    clip, accumulated = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    if clip or accumulated != 1:
        raise MisconfigurationException(
            f"`Trainer(gradient_clip_val={clip}, accumulate_grad_batches={accumulated})` does not "
            "reach the steps of a bilevel solver. On mini-batches use "
            "`declare(gradient_clip_val=..., accumulate=...)`; on all data let the loader yield "
            "the larger batch, as `Chunks` if it does not fit into memory."
        )
    averages = any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks)
    if averages and any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        raise MisconfigurationException(
            "`StochasticWeightAveraging` runs another epoch for the statistics of batch "
            "normalisation, in which the solver would go on and leave the average. Use "
            "`WeightAveraging`, or normalise by group or layer."
        )


def check_trainer(trainer: Any) -> None:
    """Refuse strategies and devices that do not work with a bilevel run."""
    strategy = trainer.strategy
    # By type: DeepSpeed's strategy is a DDPStrategy to isinstance.
    if not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy:
        raise MisconfigurationException(
            f"`Trainer(strategy={type(strategy).__name__})` is not supported: a solver needs whole "
            'vectors x and y, which this strategy cuts into pieces. Use `strategy="ddp"`, and '
            "`Chunks` for a batch that is larger than memory."
        )
    if strategy.root_device.type == "mps":
        raise MisconfigurationException(
            "`Trainer(accelerator='mps')` is not supported: norms and gaps are summed in float64, "
            "which this device does not have. Use `accelerator='cpu'`."
        )


def check_all_declared(module: nn.Module, declaration: Declaration) -> None:
    """Refuse parameters of another module, and trainable ones that belong to no level."""
    declared = {id(p) for p in declaration.parameters}
    own = dict(module.named_parameters())
    if not declared <= {id(p) for p in own.values()}:
        raise MisconfigurationException(
            f"`{type(module).__name__}.declare` was given a parameter that is not the module's own."
        )
    forgotten = [name for name, p in own.items() if p.requires_grad and id(p) not in declared]
    if forgotten:
        raise MisconfigurationException(
            f"`{type(module).__name__}.declare` names neither as upper nor as lower: "
            f"{', '.join(forgotten)}. Each trainable parameter belongs to one level; a constant "
            "has `requires_grad=False`."
        )


def check_optimizer(module: LightningModule, optimizer: Any) -> None:
    """Refuse automatic optimisation, and an optimizer (in Lightning's wrapper) of another kind."""
    solver = getattr(optimizer, "optimizer", None)
    if module.automatic_optimization or not isinstance(solver, BilevelOptimizer):
        raise MisconfigurationException(
            f"`{type(module).__name__}` must leave `automatic_optimization` at False, and its "
            "`configure_optimizers` must return the solver of `super().configure_optimizers()`, or "
            "a torch optimiser per level; then an own `configure_callbacks` must add to "
            "`super().configure_callbacks()`."
        )
