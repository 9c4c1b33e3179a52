"""The monitors of the solver: updates of its penalty, and the cost of its iterations."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from lightning_bilevel.mini_batches import MiniBatches
from lightning_bilevel.plugin.loggers import log_text, publish
from lightning_bilevel.reading import Tally
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import PenaltyInfo, StepInfo, tag_of

__all__ = ["Monitor", "PenaltyMonitor", "SolverMonitor", "solver_of", "usual_tolerance"]

# What the record says of an update of the penalty.
_EVENT = ("iteration", "gamma", "gamma_next", "residual", "threshold", "step", "step_bound")
# How many updates the logged text shows; `events` has them all.
_SHOWN = 30


def solver_of(trainer: Trainer) -> BilevelOptimizer | MiniBatches:
    """Return the solver of a run, or what stands for it on mini-batches."""
    module: Any = trainer.lightning_module
    if module.mini_batches is not None:
        run: MiniBatches = module.mini_batches
        return run
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, BilevelOptimizer)
    return optimizer


def usual_tolerance(trainer: Trainer) -> float:
    """Return the accuracy of a proximal point: the paper's 1e-3, or 1e-6 in float64.

    In float64 that is stricter than the paper, which has 1e-3 throughout and names no dtype.
    """
    return 1e-6 if trainer.precision == "64-true" else 1e-3


class Monitor(Callback):
    """A callback that watches the solver of a bilevel module.

    Its numbers stay in ``trainer.callback_metrics`` until the next iteration starts. So these never
    hold numbers of an earlier iteration.

    Args:
        every_n_steps: Look at every n-th outer iteration.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self._published: set[str] = set()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        for name in self._published:
            trainer.callback_metrics.pop(name, None)
        self._published.clear()

    def publish(self, trainer: Trainer, metrics: dict[str, float], iteration: int) -> None:
        """Give numbers of the current iteration to callbacks and loggers."""
        self._published |= set(metrics)
        publish(trainer, metrics, iteration)

    def due(self, iteration: int, usual: int | None = None) -> bool:
        """Return whether the user's interval has passed, or else the usual one."""
        steps = self.every_n_steps or usual
        return bool(steps) and iteration % steps == 0  # type: ignore[operator]


class PenaltyMonitor(Monitor):
    r"""Records every update of the penalty, and how long it has been constant.

    IVSP strengthens its penalty if :math:`\tilde R^{k+1} > 2 a_\phi \mu_k` although
    :math:`\|w^{k+1} - w^k\| \le c_2 \mu_k \gamma_k`, and does so finitely often. An update appears
    at once as a point of the series ``bilevel/penalty_at_update``, with the new :math:`\gamma`.
    ``bilevel/penalty_constant_for`` (iterations since the last one) appears at the interval, the
    table of updates as text at the end. For a method without such a penalty there is nothing to
    report.

    Args:
        every_n_steps: The interval; None is the Trainer's ``log_every_n_steps``.

    Attributes:
        events: The updates, each with iteration, gamma, gamma_next, residual, threshold
            (:math:`2 a_\phi \mu`), step, and step_bound (:math:`c_2 \mu \gamma`).
        iteration: The latest iteration.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.events: list[dict[str, float]] = []
        self.iteration = 0

    @property
    def constant_for(self) -> int:
        """For how many iterations the penalty has been constant."""
        return self.iteration - int(self.events[-1]["iteration"] if self.events else 0)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = pl_module.last_step
        if not isinstance(info, PenaltyInfo):
            return
        self.iteration = info.iteration
        if info.penalty_updated:
            self.events.append({name: getattr(info, name) for name in _EVENT})
            updated = {"bilevel/penalty_at_update": info.gamma_next}
            self.publish(trainer, updated, info.iteration)
        if self.due(info.iteration, usual=trainer.log_every_n_steps):  # type: ignore[attr-defined]
            self._report(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if isinstance(pl_module.last_step, PenaltyInfo):
            self._report(trainer)
            log_text(trainer, "penalty updates", self.text(), self.iteration)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"events": self.events, "iteration": self.iteration}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.events = state_dict["events"]
        self.iteration = state_dict["iteration"]

    def text(self) -> str:
        """Return the latest updates as a Markdown table."""
        numbers = [[f"{value:.4g}" for value in e.values()] for e in self.events[-_SHOWN:]]
        rows = [" | ".join(row) for row in (_EVENT, ["---"] * len(_EVENT), *numbers)]
        lines = [f"| {row} |" for row in rows]
        return "\n".join([*lines, "", f"Constant for the last {self.constant_for} iterations."])

    def _report(self, trainer: Trainer) -> None:
        constant = {"bilevel/penalty_constant_for": float(self.constant_for)}
        self.publish(trainer, constant, self.iteration)


class SolverMonitor(Monitor):
    r"""Logs the cost of the solver's iterations averaged over the interval, and its parameters.

    For every method it logs ``bilevel/mean_inner_iterations`` (per outer iteration, since the last
    look), ``bilevel/calls_upper`` and the other evaluations by kind, and ``bilevel/passes`` (since
    the start). For IVSP it also logs ``bilevel/accuracy`` (:math:`\zeta`), ``bilevel/curvature``
    (L), ``bilevel/curvature_start`` (the L that the line search started from) and
    ``bilevel/mean_trials``.

    Args:
        every_n_steps: The interval; None is the Trainer's ``log_every_n_steps``.

    Attributes:
        tally: The counts since the start of the run.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.tally = Tally()
        self._before = Tally()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._before = Tally(**vars(self.tally))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info: StepInfo | None = pl_module.last_step
        if info is None:
            return
        self.tally.add(info)
        if info.iteration == 1:
            self._before = Tally()
        if self.due(info.iteration, usual=trainer.log_every_n_steps) or info.iteration == 1:  # type: ignore[attr-defined]
            self._report(trainer, info)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.tally.iterations > self._before.iterations:
            self._report(trainer, pl_module.last_step)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.tally.as_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tally = Tally.from_dict(state_dict)

    def _report(self, trainer: Trainer, info: StepInfo) -> None:
        now, before = self.tally, self._before
        steps = now.iterations - before.iterations
        inner = now.inner_iterations - before.inner_iterations
        metrics = {f"bilevel/calls_{name}": count for name, count in asdict(now.calls).items()}
        metrics |= {"bilevel/mean_inner_iterations": inner / steps, "bilevel/passes": info.passes}
        if isinstance(info, PenaltyInfo):
            metrics |= {tag_of(name): getattr(info, name) for name in ("zeta", "L", "L_start")}
            metrics["bilevel/mean_trials"] = (now.trials - before.trials) / steps
        numbers = {name: float(value) for name, value in metrics.items()}
        self.publish(trainer, numbers, info.iteration)
        self._before = Tally(**vars(now))
