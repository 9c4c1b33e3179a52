"""The monitors of the solver: updates of its penalty, and the cost of its iterations."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, cast

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from lightning_bilevel.logging import is_logged, log_text, publish
from lightning_bilevel.mini_batches import MiniBatches
from lightning_bilevel.reading import Tally
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import PenaltyInfo, StepInfo

# The fields of the record that describe an update of the penalty.
_EVENT = ("iteration", "gamma", "gamma_next", "residual", "threshold", "step", "step_bound")
# How many updates the logged text shows; `events` has them all.
_SHOWN = 30


def solver_of(trainer: Trainer) -> BilevelOptimizer | MiniBatches:
    """Return the solver of a run, or what stands for it on mini-batches."""
    run: MiniBatches | None = cast(Any, trainer.lightning_module).mini_batches
    return cast(BilevelOptimizer, trainer.optimizers[0]) if run is None else run


@dataclass(eq=False, repr=False)
class Monitor(Callback):
    """A callback that watches the solver of a bilevel module.

    ``log_dict`` would log its numbers only at Lightning's interval, and keep them in
    ``trainer.callback_metrics`` until the epoch ends. Here they are logged at the iteration that
    they are of, and leave ``callback_metrics`` when the next iteration starts.
    """

    _published: set[str] = field(default_factory=set, init=False)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        for name in self._published:
            trainer.callback_metrics.pop(name, None)
        self._published.clear()

    def publish(self, trainer: Trainer, metrics: dict[str, float], iteration: int) -> None:
        """Give numbers of the current iteration to callbacks and loggers."""
        self._published |= set(metrics)
        publish(trainer, metrics, iteration)


@dataclass(eq=False, repr=False)
class Counting(Monitor):
    """A monitor that counts over the run.

    Attributes:
        tally: The counts since the start of the run.
    """

    tally: Tally = field(default_factory=Tally, init=False)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if pl_module.last_step is not None:
            self.tally.add(pl_module.last_step)

    @override
    def state_dict(self) -> dict[str, Any]:
        return asdict(self.tally)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tally = Tally.from_dict(state_dict)


@dataclass(eq=False, repr=False)
class PenaltyMonitor(Monitor):
    r"""Records every update of the penalty, and how long it has been constant.

    IVSP strengthens its penalty if :math:`\tilde R^{k+1} > 2 a_\phi \mu_k` although
    :math:`\|w^{k+1} - w^k\| \le c_2 \mu_k \gamma_k`, and does so finitely often. An update appears
    at once as a point of the series ``bilevel/penalty_at_update``, with the new :math:`\gamma`.
    ``bilevel/penalty_constant_for`` (iterations since the last one) appears at the Trainer's
    ``log_every_n_steps``, the table of updates as text at the end. For a method without such a
    penalty there is nothing to report.

    Attributes:
        events: The updates, each with iteration, gamma, gamma_next, residual, threshold
            (:math:`2 a_\phi \mu`), step, and step_bound (:math:`c_2 \mu \gamma`).
        iteration: The latest iteration.
    """

    events: list[dict[str, float]] = field(default_factory=list, init=False)
    iteration: int = field(default=0, init=False)

    @property
    def constant_for(self) -> int:
        """For how many iterations the penalty has been constant."""
        return self.iteration - int(self.events[-1]["iteration"] if self.events else 0)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        info = pl_module.last_step
        if not isinstance(info, PenaltyInfo):
            return
        self.iteration = info.iteration
        if info.penalty_updated:
            self.events.append({name: getattr(info, name) for name in _EVENT})
            updated = {"bilevel/penalty_at_update": info.gamma_next}
            self.publish(trainer, updated, info.iteration)
        if is_logged(trainer, info.iteration):
            constant = {"bilevel/penalty_constant_for": float(self.constant_for)}
            self.publish(trainer, constant, info.iteration)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if isinstance(pl_module.last_step, PenaltyInfo):
            constant = {"bilevel/penalty_constant_for": float(self.constant_for)}
            self.publish(trainer, constant, self.iteration)
            log_text(trainer, "penalty updates", self.text(), self.iteration)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"events": self.events, "iteration": self.iteration}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def text(self) -> str:
        """Return the latest updates as a Markdown table."""
        numbers = [[f"{value:.4g}" for value in e.values()] for e in self.events[-_SHOWN:]]
        rows = [" | ".join(row) for row in (_EVENT, ["---"] * len(_EVENT), *numbers)]
        lines = [f"| {row} |" for row in rows]
        return "\n".join([*lines, "", f"Constant for the last {self.constant_for} iterations."])


@dataclass(eq=False, repr=False)
class SolverMonitor(Counting):
    """Logs what the solver's iterations cost, at ``log_every_n_steps`` and at the end.

    It logs ``bilevel/calls_upper`` and the other evaluations by kind, ``bilevel/passes``, and the
    mean per outer iteration, ``bilevel/mean_inner_iterations``; for methods with a line search also
    ``bilevel/mean_trials``. All of them are since the start of the run.
    """

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        if pl_module.last_step and is_logged(trainer, self.tally.iterations):
            self._report(trainer, pl_module.last_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.last_step and not is_logged(trainer, self.tally.iterations):
            self._report(trainer, pl_module.last_step)

    def _report(self, trainer: Trainer, info: StepInfo) -> None:
        tally, numbers = self.tally, {"bilevel/passes": float(info.passes)}
        numbers |= {f"bilevel/calls_{kind}": n for kind, n in asdict(tally.calls).items()}
        numbers["bilevel/mean_inner_iterations"] = tally.inner_iterations / tally.iterations
        if tally.trials:
            numbers["bilevel/mean_trials"] = tally.trials / tally.iterations
        self.publish(trainer, numbers, info.iteration)
