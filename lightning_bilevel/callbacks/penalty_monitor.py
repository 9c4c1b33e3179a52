"""The penalty of a run: when and why it was strengthened, and how long it has been constant."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_bilevel.callbacks.monitor import Monitor
from lightning_bilevel.plugin.loggers import log_text
from lightning_bilevel.solvers.record import PenaltyInfo

__all__ = ["PenaltyMonitor"]

# How many updates the logged text shows; `events` has them all.
_SHOWN = 30


class PenaltyMonitor(Monitor):
    r"""Records every update of the penalty, and how long it has been constant.

    IVSP strengthens its penalty if :math:`\tilde R^{k+1} > 2 a_\phi \mu_k` although
    :math:`\|w^{k+1} - w^k\| \le c_2 \mu_k \gamma_k`, and does so finitely often. An update appears
    at once as a point of the series ``bilevel/penalty_at_update``, with the new :math:`\gamma`. The
    table of updates (as text) and ``bilevel/penalty_constant_for`` (iterations since the last one)
    appear at the interval. For a method without such a penalty there is nothing to report.

    Args:
        every_n_steps: The interval; None is the Trainer's ``log_every_n_steps``.
        every_n_seconds: Also report whenever this many seconds have passed.

    Attributes:
        events: The updates, each with iteration, gamma before and after, residual, threshold
            (:math:`2 a_\phi \mu`), step, and bound (:math:`c_2 \mu \gamma`).
        iteration: The latest iteration.
    """

    def __init__(
        self, every_n_steps: int | None = None, every_n_seconds: float | None = None
    ) -> None:
        super().__init__(every_n_steps, every_n_seconds)
        self.events: list[dict[str, float]] = []
        self.iteration = 0
        self._reported = 0

    @property
    def last_update(self) -> int:
        """The iteration of the last update, 0 for none."""
        return int(self.events[-1]["iteration"]) if self.events else 0

    @property
    def constant_for(self) -> int:
        """For how many iterations the penalty has been constant."""
        return self.iteration - self.last_update

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = pl_module.last_step
        if not isinstance(info, PenaltyInfo):
            return
        self.iteration = info.iteration
        if info.penalty_updated:
            event = {
                "iteration": info.iteration,
                "before": info.gamma,
                "after": info.gamma_next,
                "residual": info.residual,
                "threshold": info.threshold,
                "step": info.step,
                "bound": info.step_bound,
            }
            self.events.append(event)
            self.publish(trainer, {"bilevel/penalty_at_update": event["after"]}, info.iteration)
        if self.due(info.iteration, usual=trainer.log_every_n_steps):  # type: ignore[attr-defined]
            self._report(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if isinstance(pl_module.last_step, PenaltyInfo):
            self._report(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"events": self.events, "iteration": self.iteration}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.events = state_dict["events"]
        self.iteration = state_dict["iteration"]

    def text(self) -> str:
        """Return the latest updates as a Markdown table, with a sentence on the penalty since."""
        if not self.events:
            return f"The penalty has not been updated in {self.iteration} iterations."
        rows = [
            "| update | iteration | gamma | residual > 2 a_phi mu | step <= c2 mu gamma |",
            "| --- | --- | --- | --- | --- |",
        ]
        for number, e in list(enumerate(self.events, 1))[-_SHOWN:]:
            rows.append(
                f"| {number} | {e['iteration']} | {e['before']:.4g} -> {e['after']:.4g} | "
                f"{e['residual']:.3g} > {e['threshold']:.3g} | "
                f"{e['step']:.3g} <= {e['bound']:.3g} |"
            )
        last = (
            f"Constant for the {self.constant_for} iterations since update {len(self.events)}, at "
            f"iteration {self.last_update}."
        )
        return "\n".join([*rows, "", last])

    def _report(self, trainer: Trainer) -> None:
        self.publish(
            trainer, {"bilevel/penalty_constant_for": float(self.constant_for)}, self.iteration
        )
        if self._reported != len(self.events) or not trainer.training:
            log_text(trainer, "penalty updates", self.text(), self.iteration)
            self._reported = len(self.events)
