"""Refusals: what would fail later in a run, or go wrong without a word."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from lightning_bilevel.levels import Declaration
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = [
    "check_all_declared",
    "check_automatic",
    "check_batch",
    "check_optimizer",
    "check_trainer",
]


def check_automatic(trainer: Any) -> None:
    """Refuse what works in automatic optimisation only; Lightning would advise to switch to it."""
    clip, accumulated = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    if clip or accumulated != 1:
        raise MisconfigurationException(
            f"`Trainer(gradient_clip_val={clip}, accumulate_grad_batches={accumulated})` does not "
            "reach the steps of a bilevel solver. On mini-batches use "
            "`declare(gradient_clip_val=..., accumulate=...)`; on all data let the loader yield "
            "the larger batch, as `Chunks` if it does not fit into memory."
        )


def check_trainer(trainer: Any, solver: str) -> None:
    """Refuse strategies and precisions that do not work with an exact run."""
    # By type: DeepSpeed's strategy is a DDPStrategy to isinstance.
    strategy = type(trainer.strategy)
    if not issubclass(strategy, SingleDeviceStrategy) and strategy is not DDPStrategy:
        raise MisconfigurationException(
            f"`Trainer(strategy={strategy.__name__})` is not supported: a solver needs whole "
            'vectors x and y, which this strategy cuts into pieces. Use `strategy="ddp"`, and '
            "`Chunks` for a batch that is larger than memory."
        )
    if trainer.precision not in ("32-true", "64-true"):
        raise MisconfigurationException(
            f"`Trainer(precision={trainer.precision!r})` is not supported with {solver} on all "
            "data: small differences of large numbers would be lost. Use 32-true or 64-true."
        )


def check_all_declared(module: nn.Module, declaration: Declaration) -> None:
    """Refuse parameters of another module, and trainable ones that belong to no level."""
    call = f"`{type(module).__name__}.declare`"
    declared, own = set(declaration.parameters), set(module.parameters())
    if not declared <= own:
        raise MisconfigurationException(f"{call} was given a parameter that is not the module's.")
    named = module.named_parameters()
    forgotten = [name for name, p in named if p.requires_grad and p not in declared]
    if forgotten:
        raise MisconfigurationException(
            f"{call} names neither as upper nor as lower: {', '.join(forgotten)}. Each trainable "
            "parameter belongs to one level; a constant has `requires_grad=False`."
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


def check_batch(call: str, batch: Any) -> None:
    """Refuse a training batch without an upper and a lower level."""
    if not isinstance(batch, dict) or not {"upper", "lower"} <= batch.keys():
        raise MisconfigurationException(
            f"`{call}` was given a {type(batch).__name__} as a training batch: it must be "
            '{"upper": ..., "lower": ...}, as a CombinedLoader over two loaders or a '
            "FullBatchDataModule gives it."
        )
