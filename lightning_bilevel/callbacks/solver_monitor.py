"""The work of the solver: its parameters, line search and inner loop, and their cost."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_bilevel.callbacks.monitor import Monitor
from lightning_bilevel.plugin.publishing import is_logged
from lightning_bilevel.report.tally import Tally
from lightning_bilevel.solvers.record import PenaltyInfo, StepInfo

__all__ = ["SolverMonitor"]


class SolverMonitor(Monitor):
    r"""Logs the solver's parameters, and the cost of its iterations averaged over the interval.

    For every method it logs ``bilevel/mean_inner_iterations`` (per outer iteration, since the last
    look), ``bilevel/calls_upper``, ``bilevel/calls_lower``, ``bilevel/calls_gap``,
    ``bilevel/calls_products`` and ``bilevel/passes`` (since the
    start) and ``bilevel/optimization_time``. For IVSP it also logs
    ``bilevel/smoothing`` (:math:`\mu`), ``bilevel/accuracy`` (:math:`\zeta`),
    ``bilevel/curvature`` (L), ``bilevel/curvature_start`` (the L that the line search started from)
    and ``bilevel/mean_trials``.

    Args:
        every_n_steps: The interval; None is the Trainer's ``log_every_n_steps``.
        every_n_seconds: Also report whenever this many seconds have passed.

    Attributes:
        tally: The counts since the start of the run.
    """

    def __init__(
        self, every_n_steps: int | None = None, every_n_seconds: float | None = None
    ) -> None:
        super().__init__(every_n_steps, every_n_seconds)
        self.tally = Tally()
        self._before = Tally()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._before = Tally(**self.tally.as_dict())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info: StepInfo = pl_module.last_step
        self.tally.add(info)
        if self.due(info.iteration, usual=trainer.log_every_n_steps) or info.iteration == 1:  # type: ignore[attr-defined]
            self._report(trainer, info)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.last_step is not None:
            self._report(trainer, pl_module.last_step)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.tally.as_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tally = Tally(**state_dict)

    def _report(self, trainer: Trainer, info: StepInfo) -> None:
        now = self.tally
        before = self._before
        steps = now.iterations - before.iterations
        if steps == 0:
            return
        inner_iterations = now.inner_iterations - before.inner_iterations
        metrics = {
            "bilevel/mean_inner_iterations": inner_iterations / steps,
            "bilevel/calls_upper": now.upper_calls,
            "bilevel/calls_lower": now.lower_calls,
            "bilevel/calls_gap": now.gap_calls,
            "bilevel/calls_products": now.product_calls,
            "bilevel/passes": info.passes,
            "bilevel/optimization_time": info.optimization_time,
        }
        if isinstance(info, PenaltyInfo):
            metrics |= {
                "bilevel/smoothing": info.mu,
                "bilevel/accuracy": info.zeta,
                "bilevel/curvature": info.L,
                "bilevel/curvature_start": info.L_start,
                "bilevel/mean_trials": (now.trials - before.trials) / steps,
            }
        # Numbers that the module itself has logged at this step need not be written twice.
        logged = info.metrics() if is_logged(trainer, info.iteration) else {}
        self.publish(
            trainer,
            {name: float(value) for name, value in metrics.items() if name not in logged},
            info.iteration,
        )
        self._before = Tally(**now.as_dict())
