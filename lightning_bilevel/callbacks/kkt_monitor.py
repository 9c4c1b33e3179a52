"""The KKT residuals of a run, its best point so far, and a stop when they are small."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_bilevel.callbacks.certificate_report import CertificateReport
from lightning_bilevel.callbacks.monitor import CertificateMonitor
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.plugin.loggers import log_text

__all__ = ["KKTMonitor"]


class KKTMonitor(CertificateMonitor):
    r"""Logs the three KKT residuals, their maximum and the multiplier, and keeps the best point.

    The tags are ``bilevel/kkt_stationarity``, ``bilevel/kkt_feasibility``,
    ``bilevel/kkt_complementarity``, ``bilevel/kkt_residual`` (the maximum), ``bilevel/kkt_best``
    (the smallest maximum so far) and ``bilevel/kkt_multiplier``. The theory of IVSP promises a good
    iterate in the second half of a run, which need not be the last one; ``module.proved`` is that
    point. The monitor keeps another one, also in checkpoints: the best of all that it has looked
    at.

    Args:
        epsilon: Stop the run when all three residuals are at most this; None never stops it.
        restore_best: Write the best point into the module when fit ends, before the certificate is
            evaluated. A run that is resumed from a checkpoint still goes on from its last point.
        every_n_steps: Look at every n-th outer iteration.
        every_n_seconds: Look whenever this many seconds have passed.
        share: The time for looks at validation, as a share of the optimisation time, see
            :class:`~lightning_bilevel.callbacks.monitor.CertificateMonitor`.
        tolerance: The accuracy of the proximal point; None is 1e-3, and 1e-6 in float64.
        envelope: The Moreau envelope (rho, sigma, delta); None is the module's.

    Attributes:
        best: The best point: iteration, kkt, multipliers, x, y and buffers. Empty before the first
            look.
        stopped: Why the run was stopped; empty if it was not.
    """

    names = (
        "bilevel/kkt_stationarity",
        "bilevel/kkt_feasibility",
        "bilevel/kkt_complementarity",
        "bilevel/kkt_residual",
        "bilevel/kkt_best",
        "bilevel/kkt_multiplier",
    )

    def __init__(
        self,
        epsilon: float | None = None,
        restore_best: bool = False,
        every_n_steps: int | None = None,
        every_n_seconds: float | None = None,
        share: float = 0.01,
        tolerance: float | None = None,
        envelope: Envelope | None = None,
    ) -> None:
        super().__init__(every_n_steps, every_n_seconds, share, tolerance, envelope)
        if epsilon is not None and not epsilon > 0:
            raise ValueError(
                f"`KKTMonitor(epsilon={epsilon})` must be positive, or None to never stop."
            )
        self.epsilon = epsilon
        self.restore_best = restore_best
        self.best: dict[str, Any] = {}
        self.stopped = ""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self.restore_best and any(
            isinstance(c, CertificateReport) for c in callbacks[: callbacks.index(self)]
        ):
            raise MisconfigurationException(
                "`KKTMonitor(restore_best=True)` comes after `CertificateReport`, which would "
                "certify another point than the one that fit ends with: name the monitor first."
            )

    @override
    def observe(
        self, trainer: Trainer, pl_module: Any, certificate: Certificate, iteration: int
    ) -> None:
        c = certificate
        if not self.best or c.kkt < self.best["kkt"]:
            x, y = pl_module.point
            self.best = {
                "iteration": iteration,
                "kkt": c.kkt,
                "multiplier": c.multiplier,
                "x": x,
                "y": y,
                "buffers": pl_module.written_buffers,
            }
        numbers = (
            c.stationarity,
            c.feasibility,
            c.complementarity,
            c.kkt,
            self.best["kkt"],
            c.multiplier,
        )
        self.publish(trainer, dict(zip(self.names, numbers, strict=True)), iteration)
        if self.epsilon is not None and c.kkt <= self.epsilon and not trainer.should_stop:
            trainer.should_stop = True
            self.stopped = (
                f"KKTMonitor stopped the run at iteration {iteration}: stationarity "
                f"{c.stationarity:.2e}, feasibility {c.feasibility:.2e} and complementarity "
                f"{c.complementarity:.2e} are all at most epsilon = {self.epsilon:g}."
            )
            rank_zero_info(self.stopped)
            log_text(trainer, "stopped", self.stopped, iteration)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        best = self.best
        if self.restore_best and best and best["iteration"] != pl_module.last_step.iteration:
            pl_module.restore(
                (best["x"], best["y"]),
                best["multiplier"],
                best.get("buffers"),
            )
            rank_zero_info(
                f"KKTMonitor restored the point of iteration {best['iteration']}, whose KKT "
                f"residual is {best['kkt']:.2e}."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "stopped": self.stopped}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        self.stopped = ""
