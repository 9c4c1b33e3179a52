"""Refusals: what would fail later in a run, or go wrong without a word."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bilevel.levels import Declaration
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = [
    "ON_MINI_BATCHES",
    "check_all_declared",
    "check_automatic",
    "check_batch",
    "check_epoch",
    "check_optimizer",
    "check_trainer",
    "other_data",
    "warn_of_sample",
]

# How to run on mini-batches, for messages of exact runs.
ON_MINI_BATCHES = (
    "return two torch optimisers, one per level, from `configure_optimizers`, and say `method=` in "
    "place of `solver=`"
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


def check_trainer(trainer: Any, solver: str) -> None:
    """Refuse precisions, strategies and devices that do not work with an exact run."""
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
    if trainer.precision not in ("32-true", "64-true"):
        raise MisconfigurationException(
            f"`Trainer(precision={trainer.precision!r})` is not supported with "
            f"{solver} on all data: small differences of large numbers would be lost. Use 32-true "
            "or 64-true."
        )


def check_all_declared(module: nn.Module, declaration: Declaration) -> None:
    """Refuse parameters of another module, and trainable ones that belong to no level."""
    call = f"`{type(module).__name__}.declare`"
    foreign = f"{call} was given a parameter that is not the module's own."
    declared = {id(p) for p in declaration.parameters}
    own = dict(module.named_parameters())
    if not declared <= {id(p) for p in own.values()}:
        raise MisconfigurationException(foreign)
    forgotten = [name for name, p in own.items() if p.requires_grad and id(p) not in declared]
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


def other_data(call: str, solver: BilevelOptimizer) -> MisconfigurationException:
    """Return the refusal of data that change in the course of an exact run."""
    return MisconfigurationException(
        f"`{call}` was given a batch with other values than the one before, as mini-batches, "
        f"shuffling and augmentation make them. {type(solver).__name__} needs the same data in "
        "each step: give it all of them, by a FullBatchDataModule; or run on mini-batches: "
        f"{ON_MINI_BATCHES}."
    )


def check_epoch(call: str, solver: BilevelOptimizer, declaration: Declaration) -> None:
    """Refuse an epoch without iterations, and parameters that were frozen in its course."""
    if solver.progress.iterations == 0:
        raise MisconfigurationException(
            f"`{call}` made no outer iteration in a whole epoch: its loaders must yield batches, "
            "and its `training_step` must call `super().training_step(batch, batch_idx)` or be "
            "left out."
        )
    if any(level.has_changed() for level in declaration.levels):
        raise MisconfigurationException(
            f"a parameter of `{call}` was frozen or unfrozen in the middle of a run, whose vectors "
            "x and y have a fixed length: do it before `Trainer.fit`."
        )


def warn_of_sample(loader: Any) -> None:
    """Warn of a run that ends before its sample is all data."""
    sample = getattr(loader, "sample", None)
    if sample is not None and sample.share is not None:
        rank_zero_warn(
            f"The run ended on {sample}, and its certificate is of all data: run longer, or let "
            "the sample grow earlier with `Growing(every=...)`."
        )
