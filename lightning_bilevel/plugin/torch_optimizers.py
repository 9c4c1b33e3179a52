"""The torch optimisers and schedulers of a run on mini-batches: whose they are, when they step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_bilevel.levels import Declaration
from lightning_bilevel.stochastic.shadow import check_optimizer

__all__ = ["by_level", "default_optimizers", "step_schedulers", "without_monitors"]

_RIGHT = (
    "`configure_optimizers` of a bilevel module returns one optimiser per level:\n"
    "    return AdamW(upper_parameters, lr=1e-2), AdamW(lower_parameters, lr=1e-4)"
)


def by_level(
    call: str,
    optimizers: Sequence[tuple[Any, Optimizer]],
    declared: Declaration,
    *,
    lower_is_solved: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Sort optimisers by the level whose parameters they have.

    Args:
        call: The name of the module, for messages.
        optimizers: Each optimiser, in Lightning's wrapper and as it is.
        declared: The declaration.
        lower_is_solved: Whether the lower level is solved on each batch, and so has no optimiser.
    """
    levels = [{id(p) for p in level.parameters} for level in declared.levels]
    found: tuple[list[Any], list[Any]] = ([], [])
    seen: set[int] = set()
    for wrapped, optimizer in optimizers:
        check_optimizer(optimizer)
        own = {id(p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
        place = [i for i, level in enumerate(levels) if own <= level]
        if len(place) != 1 or not own:
            both = all(own & level for level in levels)
            raise MisconfigurationException(
                f"`{call}.configure_optimizers`: {type(optimizer).__name__} has parameters of "
                f"{'both levels' if both else 'no level'}. {_RIGHT}"
            )
        found[place[0]].append(wrapped)
        seen |= own
    for level, its in zip(declared.levels, found, strict=True):
        if lower_is_solved and level is declared.lower:
            continue
        if not its:
            raise MisconfigurationException(
                f"`{call}.configure_optimizers` has no optimiser of the {level.name} level. "
                f"{_RIGHT}"
            )
        left = sum(id(p) not in seen for p in level.parameters)
        if left:
            rank_zero_warn(
                f"{left} parameters of the {level.name} level of `{call}` are in no optimiser and "
                "stay as they are."
            )
    return found


def without_monitors(returned: Any, found: dict[int, dict[str, Any]]) -> Any:
    """Take what concerns a metric out of the configurations of schedulers.

    Args:
        returned: What ``configure_optimizers`` has returned.
        found: Where it is put, by the scheduler's id.
    """
    if isinstance(returned, (list, tuple)):
        return type(returned)(without_monitors(each, found) for each in returned)
    if not isinstance(returned, dict):
        return returned
    if "lr_scheduler" in returned:
        return {**returned, "lr_scheduler": without_monitors(returned["lr_scheduler"], found)}
    keys = {"monitor", "strict", "reduce_on_plateau"} & returned.keys()
    found[id(returned.get("scheduler"))] = {key: returned[key] for key in keys}
    return {key: value for key, value in returned.items() if key not in keys}


def step_schedulers(module: Any, interval: str, count: int, *, plateau: bool) -> None:
    """Step the schedulers of an interval, as Lightning does under automatic optimisation.

    Args:
        module: The module.
        interval: ``"step"`` or ``"epoch"``.
        count: The number of batches of the epoch, or of epochs, so far.
        plateau: Whether those that monitor a metric, or the others.
    """
    trainer = module.trainer
    for config in trainer.lr_scheduler_configs:
        if config.interval != interval or config.reduce_on_plateau is not plateau:
            continue
        if count % config.frequency:
            continue
        metric = None
        if plateau:
            metric = trainer.callback_metrics.get(config.monitor)
            if metric is None:
                told = f"the scheduler monitors {config.monitor!r}, which is not logged yet"
                if config.strict:
                    known = ", ".join(sorted(trainer.callback_metrics))
                    raise MisconfigurationException(f"{told}; there are {known}.")
                rank_zero_warn(f"{told}: it makes no step.")
                continue
        module.lr_scheduler_step(config.scheduler, metric)


def default_optimizers(declared: Declaration) -> list[dict[str, Any]]:
    """Return the optimisers and schedulers that were declared, for ``configure_optimizers``."""
    usual = partial(AdamW, lr=1e-2, weight_decay=0.0), partial(AdamW, lr=1e-4)
    found = []
    for level, given, other, scheduler in zip(
        declared.levels, declared.optimizers, usual, declared.schedulers, strict=True
    ):
        if given is None:
            rate = other.keywords["lr"]
            rank_zero_info(f"The {level.name} level has no optimiser: AdamW(lr={rate:g}).")
        optimizer = (given or other)(level.parameters)
        made: dict[str, Any] = {"optimizer": optimizer}
        if scheduler is not None:
            its = scheduler(optimizer)
            made["lr_scheduler"] = {"scheduler": its, "interval": "step"}
            if isinstance(its, ReduceLROnPlateau):  # of Lightning's command line
                made["lr_scheduler"] = {"scheduler": its, "monitor": getattr(its, "monitor", None)}
        found.append(made)
    return found
