"""The Moreau gap, evaluated independently of the solver."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_bilevel.mixin import BilevelMixin
from lightning_bilevel.moreau import Envelope

__all__ = ["MoreauGapMonitor"]


class MoreauGapMonitor(Callback):
    r"""Logs ``violation`` and ``kkt_residual`` with every validation, for every solver alike.

    The proximal point is computed anew, by projected gradient with monotone backtracking from z = y, so the numbers do not
    depend on what the solver believes. The violation is :math:`[R(x, y)]_+`, the residual the largest of the three KKT
    residuals. None of it counts as optimisation time.

    Args:
        tolerance: The accuracy of the proximal point, as the norm of its gradient mapping; None is 1e-3, as in the paper, and
            1e-6 in float64, where the stationarity can be told more exactly.
        envelope: The Moreau envelope (rho, sigma, delta); None is the module's.
    """

    def __init__(self, tolerance: float | None = None, envelope: Envelope | None = None) -> None:
        if tolerance is not None and tolerance <= 0:
            raise ValueError(f"`MoreauGapMonitor(tolerance={tolerance})` must be positive.")
        self.tolerance = tolerance
        self.envelope = envelope

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, BilevelMixin) or trainer.sanity_checking or pl_module.last_step is None:
            return
        usual = 1e-6 if trainer.precision == "64-true" else 1e-3
        with torch.enable_grad():
            certificate = pl_module.certify(envelope=self.envelope, tolerance=self.tolerance or usual)
        if certificate is not None:
            pl_module.log("violation", certificate.feasibility)
            pl_module.log("kkt_residual", certificate.kkt)
