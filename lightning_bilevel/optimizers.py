"""The torch optimisers and schedulers of a run on mini-batches: whose they are, when they step."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_bilevel.levels import Declaration

__all__ = ["Schedulers", "by_level", "default_optimizers"]


def by_level(module: Any, declared: Declaration) -> tuple[list[Any], list[Any]]:
    """Return the module's optimisers of x and of y, in Lightning's wrapper.

    Whose an optimiser is, is known by its parameters. A lower level that is solved on each batch
    has none.
    """
    call, optimizers = f"{type(module).__name__}.configure_optimizers", module.optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    solved = module.batch_gradients is not None
    found: list[list[Any]] = [[], []]
    owned: set[nn.Parameter] = set()
    for wrapped in optimizers:
        groups = wrapped.optimizer.param_groups
        own = {p for group in groups for p in group["params"] if p.requires_grad}
        for level, its in zip(declared.levels, found, strict=True):
            if own and own <= set(level.parameters):
                its.append(wrapped)
        owned |= own
    upper, lower = found
    if len(upper) + len(lower) < len(optimizers) or not upper or not (lower or solved):
        names = ", ".join(type(wrapped.optimizer).__name__ for wrapped in optimizers)
        raise MisconfigurationException(
            f"`{call}` returned {names}: {len(upper)} with parameters of the "
            f"upper level alone, {len(lower)} of the lower. Each belongs to one level:\n"
            "    return AdamW(upper_parameters, lr=1e-2), AdamW(lower_parameters, lr=1e-4)"
        )
    trained = declared.upper.parameters if solved else declared.parameters
    if left := set(trained) - owned:
        rank_zero_warn(f"{len(left)} parameters are in no optimiser of `{call}`: they stay.")
    return upper, lower


def default_optimizers(declared: Declaration) -> list[dict[str, Any]]:
    """Return the optimisers and schedulers that were declared, for ``configure_optimizers``."""
    usual = partial(AdamW, lr=1e-2, weight_decay=0.0), partial(AdamW, lr=1e-4)
    made: list[dict[str, Any]] = []
    for level, given, other, scheduler in zip(
        declared.levels, declared.optimizers, usual, declared.schedulers, strict=True
    ):
        optimizer = (given or other)(level.parameters)
        made.append({"optimizer": optimizer})
        if scheduler is not None:
            its = scheduler(optimizer)
            # One of Lightning's command line names its metric.
            plateau = isinstance(its, ReduceLROnPlateau)
            when = {"monitor": getattr(its, "monitor", None)} if plateau else {"interval": "step"}
            made[-1]["lr_scheduler"] = {"scheduler": its, **when}
    return made


class Schedulers:
    """The schedulers of a run, which Lightning does not step in manual optimisation."""

    def __init__(self) -> None:
        self._metrics: dict[int, dict[str, Any]] = {}

    def without_metrics(self, returned: Any) -> Any:
        """Keep what concerns a metric, which Lightning drops, and return the other settings.

        Args:
            returned: What ``configure_optimizers`` has returned.
        """
        if isinstance(returned, (list, tuple)):
            return type(returned)(map(self.without_metrics, returned))
        if not isinstance(returned, dict):
            return returned
        keys = {"monitor", "strict", "reduce_on_plateau"} & returned.keys()
        scheduler = returned.get("scheduler", returned.get("lr_scheduler"))
        self._metrics[id(scheduler)] = {key: returned[key] for key in keys}
        return {k: self.without_metrics(v) for k, v in returned.items() if k not in keys}

    def start(self, module: Any) -> None:
        """Put what was kept into Lightning's configurations."""
        for config in module.trainer.lr_scheduler_configs:
            config.reduce_on_plateau = isinstance(config.scheduler, ReduceLROnPlateau)
            vars(config).update(self._metrics.get(id(config.scheduler), {}))
            if config.reduce_on_plateau and config.monitor is None:
                raise MisconfigurationException(
                    f"`{type(module).__name__}.configure_optimizers`: `ReduceLROnPlateau` needs "
                    'a metric: return {"scheduler": ..., "monitor": "val_loss"}.'
                )

    def step(self, module: Any, interval: str, count: int, *, plateau: bool = False) -> None:
        """Step the schedulers of an interval, as Lightning does under automatic optimisation.

        Args:
            module: The module.
            interval: ``"step"`` or ``"epoch"``.
            count: The number of batches of the epoch, or of epochs, so far.
            plateau: Whether those that monitor a metric, or the others.
        """
        for config in module.trainer.lr_scheduler_configs:
            asked = config.interval == interval and config.reduce_on_plateau is plateau
            if not asked or count % config.frequency:
                continue
            known = module.trainer.callback_metrics
            metric = known.get(config.monitor) if plateau else None
            if not plateau or metric is not None:
                module.lr_scheduler_step(config.scheduler, metric)
                continue
            told = f"the scheduler monitors {config.monitor!r}, which is not logged yet"
            if config.strict:
                raise MisconfigurationException(f"{told}; there are {', '.join(sorted(known))}.")
            rank_zero_warn(f"{told}: it makes no step.")
