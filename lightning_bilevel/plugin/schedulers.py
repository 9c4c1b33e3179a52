"""The scheduler of a declaration: it changes the rates of both levels, per step or per epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["Schedule", "SchedulerDeclared", "SchedulerPlan", "plan_of"]

Interval = Literal["step", "epoch"]
SchedulerCallable = Callable[[BilevelOptimizer], LRScheduler]
SchedulerDeclared = SchedulerCallable | Mapping[str, Any]


@dataclass(frozen=True)
class SchedulerPlan:
    """How a scheduler is made and when it steps.

    Attributes:
        call: The call that declared it, for messages.
        make: Makes the scheduler from the solver.
        interval: ``"step"`` or ``"epoch"``.
        frequency: It steps at every so many of them.
        monitor: The logged quantity that a ReduceLROnPlateau looks at.
        name: What LearningRateMonitor calls it.
    """

    call: str
    make: SchedulerCallable
    interval: Interval = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None

    def attached_to(self, solver: BilevelOptimizer) -> Schedule:
        """Make the scheduler of a run."""
        if not solver.scheduled_levels:
            raise MisconfigurationException(
                f"`{self.call}(scheduler=...)`: no level of {type(solver).__name__} has a torch "
                "optimiser, whose rate it would change. Leave it out, or give a solver for "
                "mini-batches `upper_optimizer` and `lower_optimizer`."
            )
        return Schedule(self, self.make(solver))


@dataclass
class Schedule:
    """The scheduler of a run.

    Attributes:
        plan: When it steps.
        scheduler: The torch scheduler.
    """

    plan: SchedulerPlan
    scheduler: LRScheduler

    def config(self) -> dict[str, Any]:
        """Return what Lightning keeps of it: it is saved and shown, and the mixin steps it."""
        name = {} if self.plan.name is None else {"name": self.plan.name}
        return {"scheduler": self.scheduler, **name}

    def after(self, interval: Interval, count: int, metrics: Mapping[str, Any]) -> None:
        """Step the scheduler if it is due.

        Args:
            interval: What has just ended.
            count: How many of them the run has made.
            metrics: The logged quantities, by name.
        """
        plan = self.plan
        if interval != plan.interval or count % plan.frequency:
            return
        # A run that resumes at the end of an epoch ends it once more.
        if getattr(self.scheduler, "last_epoch", -1) >= count // plan.frequency:
            return
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            return
        if plan.monitor is None or plan.monitor not in metrics:
            raise MisconfigurationException(
                f"`{plan.call}(scheduler=...)`: its `monitor` {plan.monitor!r} is not logged. "
                f"Logged are: {', '.join(sorted(metrics)) or 'none'}."
            )
        self.scheduler.step(float(metrics[plan.monitor]))


def plan_of(call: str, declared: SchedulerDeclared | None) -> SchedulerPlan | None:
    """Read a scheduler as it was declared: what makes it, or Lightning's dict around that."""
    if declared is None:
        return None
    given = dict(declared) if isinstance(declared, Mapping) else {"scheduler": declared}
    return SchedulerPlan(call, given.pop("scheduler"), **given)
