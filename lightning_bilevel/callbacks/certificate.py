"""The certificate at the end of a run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_bilevel.kkt import Certificate, table
from lightning_bilevel.mixin import BilevelMixin
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["CertificateReport"]


class CertificateReport(Callback):
    """Prints the certificate as a table when fit ends, and gives it to the loggers.

    Args:
        tolerance: The accuracy of the proximal point, as the norm of its gradient mapping; None is 1e-9 in float64 and 1e-5
            in float32.
    """

    def __init__(self, tolerance: float | None = None) -> None:
        if tolerance is not None and tolerance <= 0:
            raise ValueError(f"`CertificateReport(tolerance={tolerance})` must be positive.")
        self.tolerance = tolerance
        self.certificate: Certificate | None = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, BilevelMixin) or pl_module.last_step is None:
            return
        with torch.enable_grad():
            self.certificate = pl_module.certify(tolerance=self.tolerance)
        rows = self.certificate.rows() if self.certificate is not None else []
        optimizer = trainer.optimizers[0]
        assert isinstance(optimizer, BilevelOptimizer)
        title = f"{type(optimizer).__name__} on {type(pl_module).__name__}"
        self._print(title, [*_validation(trainer), *rows, *_run(optimizer.memory)])
        if self.certificate is not None:
            residuals = {
                "bilevel/kkt_stationarity": self.certificate.stationarity,
                "bilevel/kkt_feasibility": self.certificate.feasibility,
                "bilevel/kkt_complementarity": self.certificate.complementarity,
            }
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in residuals.items()})
            for logger in trainer.loggers:
                logger.log_metrics(residuals, step=pl_module.last_step.iteration)

    @rank_zero_only
    def _print(self, title: str, rows: list[tuple[str, str]]) -> None:
        print(f"\n{table(title, rows)}")


def _validation(trainer: Trainer) -> list[tuple[str, str]]:
    """What the module itself has logged last, such as a validation loss."""
    metrics = sorted(trainer.callback_metrics.items())
    return [(name, f"{float(value):.4g}") for name, value in metrics if not name.startswith("bilevel/")]


def _run(memory: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("outer iterations", f"{memory['iteration']}"),
        ("inner iterations", f"{memory['inner_iterations']}"),
        ("optimisation time", f"{memory['optimization_time']:.2f} s"),
    ]
    return [("penalty updates", f"{memory['penalty_updates']}"), *rows] if "penalty_updates" in memory else rows
