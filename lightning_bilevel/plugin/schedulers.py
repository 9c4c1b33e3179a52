"""The scheduler of a declaration: it changes the rates of both levels, per step or per epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["Schedule", "SchedulerDeclared", "SchedulerPlan", "plan_of"]

Interval = Literal["step", "epoch"]
SchedulerCallable = Callable[[BilevelOptimizer], LRScheduler]
SchedulerDeclared = SchedulerCallable | Mapping[str, Any]

_KEYS = ("scheduler", "interval", "frequency", "monitor", "name")


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
        name = type(solver).__name__
        if solver.penalised:
            raise MisconfigurationException(
                f"`{self.call}(scheduler=...)`: {name} has no rate to schedule, its line search is "
                f"the method. Leave the scheduler out, or use `{solver.for_mini_batches}` with "
                "`upper_optimizer` and `lower_optimizer`."
            )
        if not solver.scheduled_levels:
            raise MisconfigurationException(
                f"`{self.call}(scheduler=...)`: no level of {name} has a torch optimiser, and the "
                "paper's step has a schedule of its own. Give the solver an `upper_optimizer` or a "
                "`lower_optimizer`, or leave the scheduler out."
            )
        try:
            scheduler = self.make(solver)
        except (TypeError, ValueError, IndexError) as error:
            raise MisconfigurationException(
                f"`{self.call}(scheduler=...)` makes no scheduler ({error}): {name} has two "
                "levels, and a list of rates or functions needs two entries, for the upper and for "
                "the lower one."
            ) from error
        if not isinstance(scheduler, LRScheduler):
            raise MisconfigurationException(
                f"`{self.call}(scheduler=...)` made a {type(scheduler).__name__}: it must make a "
                "torch scheduler from the solver, as `functools.partial(CosineAnnealingLR, "
                "T_max=1000)` does."
            )
        if isinstance(scheduler, ReduceLROnPlateau) and self.monitor is None:
            raise MisconfigurationException(
                f"`{self.call}(scheduler=...)`: a ReduceLROnPlateau looks at a logged quantity, "
                'name it: `scheduler={"scheduler": ..., "monitor": "val_loss"}`.'
            )
        return Schedule(self, scheduler)


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
        assert plan.monitor is not None
        if plan.monitor not in metrics:
            raise MisconfigurationException(
                f"`{plan.call}(scheduler=...)`: {plan.monitor!r} is not logged at the end of "
                f"{'an epoch' if interval == 'epoch' else 'a step'}, where the scheduler looks at "
                f"it. Logged are: {', '.join(sorted(metrics)) or 'none'}."
            )
        self.scheduler.step(float(metrics[plan.monitor]))


def plan_of(call: str, declared: SchedulerDeclared | None) -> SchedulerPlan | None:
    """Read a scheduler as it was declared: what makes it, or Lightning's dict around that."""
    if declared is None:
        return None
    given: dict[str, Any] = {"scheduler": declared}
    if isinstance(declared, Mapping):
        given = dict(declared)
    unknown = sorted(set(given) - set(_KEYS))
    make = given.get("scheduler")
    if unknown or not callable(make) or isinstance(make, LRScheduler):
        got = f"the keys {unknown}" if unknown else f"a {type(make).__name__}"
        raise MisconfigurationException(
            f"`{call}(scheduler=...)` was given {got}: it must be what makes a torch scheduler "
            "from the solver, such as `functools.partial(CosineAnnealingLR, T_max=1000)`, or a "
            f"dict with some of {', '.join(_KEYS)}."
        )
    interval = given.get("interval", "epoch")
    frequency = given.get("frequency", 1)
    if interval not in get_args(Interval) or not isinstance(frequency, int) or frequency < 1:
        raise MisconfigurationException(
            f"`{call}(scheduler=...)` has interval={interval!r} and frequency={frequency!r}: the "
            'interval is "step" or "epoch", the frequency a positive whole number.'
        )
    return SchedulerPlan(call, make, interval, frequency, given.get("monitor"), given.get("name"))
