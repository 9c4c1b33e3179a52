"""Record the evaluations of each method of a comparison."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_bilevel.callbacks.monitor import usual_tolerance
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.moreau import Envelope

__all__ = ["NEVER", "Recorder", "evaluation"]

# The value of `Trainer.val_check_batch` that turns validation off.
NEVER = sys.maxsize


class Recorder(Callback):
    """Evaluates a method whenever its optimisation time reaches the next of some times.

    An evaluation includes a validation, if there are validation data and a ``validation_step``. The
    validation comes at that very iteration, whatever the length of an epoch: the Trainer must be
    made with ``val_check_interval=NEVER`` and ``check_val_every_n_epoch=None``. The rows are saved
    in checkpoints, so an interrupted run still has them when it resumes.

    Args:
        times: The times of the evaluations, in seconds of optimisation, in increasing order.
        shown: Is called with the time spent so far, at each iteration.
        envelope: The Moreau envelope of the evaluations; None takes that of the module.

    Attributes:
        rows: One record per evaluation: iteration, optimization_time, passes, and every metric.
    """

    def __init__(
        self,
        times: Sequence[float],
        shown: Callable[[float], None] = lambda spent: None,
        envelope: Envelope | None = None,
    ) -> None:
        self.times = times
        self.shown = shown
        self.envelope = envelope
        self.rows: list[dict[str, float]] = []
        self._due = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        spent = pl_module.last_step.optimization_time
        self.shown(spent)
        evaluated = self.rows[-1]["optimization_time"] if self.rows else 0.0
        next_time = next((time for time in self.times if time > evaluated), float("inf"))
        self._due = spent >= next_time
        # Lightning reads this attribute right after this hook.
        trainer.val_check_batch = 1 if self._due else NEVER

    # After a validation, Lightning calls one of the next two hooks.

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._evaluate(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: Trainer, pl_module: Any) -> None:
        if not self._due:
            return
        self._due = False
        info = pl_module.last_step
        row = {
            "iteration": info.iteration,
            "optimization_time": info.optimization_time,
            "passes": info.passes,
        }
        certificate = pl_module.certify(envelope=self.envelope, tolerance=usual_tolerance(trainer))
        row |= evaluation(trainer.callback_metrics, certificate)
        self.rows.append(row)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]


def evaluation(metrics: Mapping[str, Any], certificate: Certificate | None) -> dict[str, float]:
    """Return what a row has of a point: the metrics of the module, violation and KKT residual.

    Args:
        metrics: What was logged; the names of the library's own numbers are left out.
        certificate: The certificate of the point, if there is one.
    """
    row = {name: float(v) for name, v in metrics.items() if not name.startswith("bilevel/")}
    if certificate is not None:
        row |= {"violation": certificate.feasibility, "kkt_residual": certificate.kkt}
    return row
