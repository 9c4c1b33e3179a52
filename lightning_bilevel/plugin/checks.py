"""Checks before a run: they refuse a Trainer, callback, module or optimizer that cannot work."""

from __future__ import annotations

from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bilevel.plugin.declaration import Declaration, Level
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = [
    "check_all_declared",
    "check_callbacks",
    "check_gradients",
    "check_optimizer",
    "check_own",
    "check_precision",
    "check_trainer",
    "way_to_mini_batches",
]

_EXACT = ("32-true", "64-true")


def check_precision(trainer: Any, solver: BilevelOptimizer, *, mini_batches: bool) -> None:
    """Refuse a precision that does not work with a solver.

    Args:
        trainer: The Trainer.
        solver: The solver.
        mini_batches: Whether it runs on mini-batches.
    """
    refused = f"`Trainer(precision={trainer.precision!r})` is not supported"
    if mini_batches and trainer.precision == "bf16-mixed" and solver.takes_differences:
        raise MisconfigurationException(
            f"{refused} with {type(solver).__name__} as it was made: it subtracts gradients at two "
            "points that are closer than bfloat16 can tell. Use 32-true or 64-true, or a method "
            "without differences, such as `SOBA` or `F2SA`."
        )
    if trainer.precision in _EXACT or (mini_batches and trainer.precision == "bf16-mixed"):
        return
    if mini_batches:
        raise MisconfigurationException(
            f"{refused}: the parameters stay in float32 or float64, and losses of float16 would "
            "need their gradients rescaled. Use bf16-mixed, 32-true or 64-true."
        )
    way = "" if solver.takes_mini_batches else f" and solver {solver.for_mini_batches}"
    raise MisconfigurationException(
        f"{refused}: the Moreau gap is a small difference of large numbers, which half precision "
        f"does not resolve. Use 32-true or 64-true; or bf16-mixed with mini-batches{way}."
    )


def check_gradients(trainer: Any, solver: BilevelOptimizer) -> None:
    """Refuse the Trainer's clipping and accumulation of gradients, which a solver has its own of.

    Lightning refuses them too, but advises automatic optimisation, which is no way out here.
    """
    clip = trainer.gradient_clip_val
    if clip is not None and clip > 0:
        way = (
            f"give {type(solver).__name__} `upper_clip` and `lower_clip`"
            if "upper_clip" in solver.param_groups[0]
            else f"leave it out, because {type(solver).__name__} finds its steps itself"
        )
        raise MisconfigurationException(
            f"`Trainer(gradient_clip_val={clip})` does not reach the directions of a bilevel "
            f"solver: {way}."
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"`Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})` does not work "
            "with a bilevel solver, whose step needs f and g on the same batch: let the loader "
            "yield the larger batch, as `Chunks` if it does not fit into memory."
        )


def check_callbacks(module: LightningModule, solver: BilevelOptimizer) -> None:
    """Refuse callbacks that do not work with a bilevel run, before any of them has its turn.

    Args:
        module: The bilevel module, attached to its Trainer.
        solver: Its solver.
    """
    callbacks: list[Any] = cast(Any, module.trainer).callbacks
    for callback in callbacks:
        why = _why_not(callback, module, solver)
        if why:
            raise MisconfigurationException(
                f"`{type(callback).__name__}` cannot watch `{type(module).__name__}`: {why}"
            )


def check_trainer(trainer: Any) -> None:
    """Refuse strategies and devices that do not work with a bilevel run.

    Args:
        trainer: The Trainer.
    """
    # By type: DeepSpeed's strategy is a DDPStrategy to isinstance.
    if (
        not isinstance(trainer.strategy, SingleDeviceStrategy)
        and type(trainer.strategy) is not DDPStrategy
    ):
        raise MisconfigurationException(
            f"`Trainer(strategy={type(trainer.strategy).__name__})` is not supported: projections, "
            "line search and Moreau gap need whole vectors x and y, which this strategy cuts into "
            'pieces. `strategy="ddp"` splits the data instead, and `Chunks` evaluates a batch '
            "that is larger than memory."
        )
    if trainer.strategy.root_device.type == "mps":
        raise MisconfigurationException(
            "`Trainer(accelerator='mps')` is not supported: norms and gaps are summed in float64, "
            "which this device does not have. Use `accelerator='cpu'`."
        )


def way_to_mini_batches(solver: BilevelOptimizer) -> str:
    """Say how a module with losses that change, as dropout makes them, can be trained."""
    if solver.takes_mini_batches:
        return (
            f"{type(solver).__name__} may keep them on mini-batches: give `Trainer.fit` loaders "
            "that yield mini-batches."
        )
    return (
        f"Or use `{solver.for_mini_batches}` on mini-batches, which may see other losses in each "
        "step."
    )


def check_own(module: nn.Module, level: Level) -> None:
    """Refuse a level with parameters that are not the module's own."""
    own = {id(p) for p in module.parameters()}
    if any(id(p) not in own for p in level.parameters):
        raise ValueError(
            f"`{level.call}({level.name}=...)` has a parameter that is not the module's own."
        )


def check_all_declared(module: nn.Module, declaration: Declaration) -> None:
    """Refuse trainable parameters that belong to no level."""
    declared = {id(p) for p in declaration.parameters}
    forgotten = [
        name for name, p in module.named_parameters() if p.requires_grad and id(p) not in declared
    ]
    if forgotten:
        raise MisconfigurationException(
            f"`{type(module).__name__}.declare` names neither as upper nor as lower: "
            f"{', '.join(forgotten)}. Each trainable parameter belongs to one level; a constant "
            "has `requires_grad=False`."
        )


def check_optimizer(module: LightningModule, optimizer: Any) -> None:
    """Refuse automatic optimisation, and an optimizer that is no solver.

    The optimizer comes in Lightning's wrapper.
    """
    if module.automatic_optimization or not isinstance(
        getattr(optimizer, "optimizer", None), BilevelOptimizer
    ):
        raise MisconfigurationException(
            f"`{type(module).__name__}` must leave `automatic_optimization` at False, and its "
            "`configure_optimizers` must return the solver, as `super().configure_optimizers()` "
            "does: an optimizer such as Adam cannot solve a bilevel problem. Name the solver in "
            "`declare(solver=...)`."
        )


def _why_not(callback: Any, module: LightningModule, solver: BilevelOptimizer) -> str:
    """Say why a callback of Lightning cannot work with a bilevel module; empty if it can."""
    if isinstance(callback, LearningRateFinder):
        rates = (
            "Name the rate of each level, as in `lower_optimizer=partial(torch.optim.AdamW, "
            "lr=1e-4)`, and compare a few of them by validation."
            if solver.stochastic
            else f"{type(solver).__name__} needs no such search."
        )
        return (
            "it looks for one rate by the loss of one optimizer, and a bilevel step has two levels "
            f"and two losses. {rates}"
        )
    if isinstance(callback, StochasticWeightAveraging) and any(
        isinstance(layer, _BatchNorm) for layer in module.modules()
    ):
        return (
            "after its last epoch it runs another one for the statistics of batch normalisation, "
            "in which the solver would go on and leave the average. Use `WeightAveraging`, whose "
            "average has the statistics of training, or normalise by group or layer."
        )
    if isinstance(callback, ModelPruning):
        return (
            "it changes the parameters in the middle of a run, which is then one of another "
            "problem. Prune before or after."
        )
    if isinstance(callback, LearningRateMonitor) and callback.log_weight_decay:
        return "its solver has no weight decay. Leave out `log_weight_decay=True`."
    return ""
