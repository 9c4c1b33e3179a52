"""A picture of the run."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from typing_extensions import override

from lightning_bilevel.callbacks.certificate_monitor import CertificateMonitor, is_underway
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.files import write_whole
from lightning_bilevel.plugin.loggers import run_folder
from lightning_bilevel.report.figures import draw

__all__ = ["ConvergencePlot"]

# A panel cannot show more points than this. A longer series drops every second point.
_POINTS = 1000


class ConvergencePlot(CertificateMonitor):
    """Draws the run: objective, feasibility, KKT residuals, penalty, cost and validation metrics.

    The picture is ``convergence.png`` in the folder of the run, and "convergence" in the loggers.
    It is drawn every few minutes and at the end.

    Args:
        every_n_minutes: The minutes between two pictures.
        every_n_steps: Look at the certificate at every n-th outer iteration.
        share: The time for looks at validation, as a share of the optimisation time, see
            :class:`~lightning_bilevel.callbacks.certificate_monitor.CertificateMonitor`.
        tolerance: The accuracy of the proximal point; None is 1e-3, and 1e-6 in float64.
        envelope: The Moreau envelope (rho, sigma, delta); None is the module's.

    Attributes:
        series: The points of each series, by name: a list of iterations and a list of values.
    """

    def __init__(
        self,
        every_n_minutes: float = 5.0,
        every_n_steps: int | None = None,
        share: float = 0.01,
        tolerance: float | None = None,
        envelope: Envelope | None = None,
    ) -> None:
        super().__init__(every_n_steps, share, tolerance, envelope)
        if not 0 < every_n_minutes < math.inf:
            raise ValueError(
                f"`ConvergencePlot(every_n_minutes={every_n_minutes})` must be positive and finite."
            )
        self.every_n_minutes = every_n_minutes
        self.series: dict[str, list[list[float]]] = {}
        self.stride = 1
        self._drawn = 0.0
        self._folder: Path | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._drawn = time.monotonic()
        self._folder = run_folder(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        info = pl_module.last_step
        if getattr(info, "penalty_updated", False):
            self._add({"update": info.gamma}, info.iteration)
        if info.iteration % self.stride == 0:
            self._add(info.metrics(), info.iteration)
            # A step on a mini-batch need not know f or g, but it has its time.
            if len(self.series["bilevel/optimization_time"][0]) > _POINTS:
                self.stride *= 2
                for name in self.series:
                    if name.startswith("bilevel/"):
                        self.series[name] = [values[1::2] for values in self.series[name]]
        if time.monotonic() - self._drawn >= 60 * self.every_n_minutes:
            self._draw(trainer, info.iteration)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if is_underway(trainer, pl_module):
            metrics = {
                f"validation/{name}": float(value)
                for name, value in trainer.callback_metrics.items()
                if not name.startswith("bilevel/")
            }
            self._add(metrics, pl_module.last_step.iteration)

    @override
    def observe(
        self, trainer: Trainer, pl_module: Any, certificate: Certificate, iteration: int
    ) -> None:
        c = certificate
        residuals = {
            "stationarity": c.stationarity,
            "feasibility": c.feasibility,
            "complementarity": c.complementarity,
        }
        self._add({"residual": c.residual, **residuals}, iteration)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        if self.series:
            self._draw(trainer, pl_module.last_step.iteration)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"series": self.series, "stride": self.stride}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.series = state_dict["series"]
        self.stride = state_dict["stride"]

    def _add(self, values: dict[str, float], iteration: int) -> None:
        for name, value in values.items():
            iterations, numbers = self.series.setdefault(name, [[], []])
            iterations.append(iteration)
            numbers.append(value)

    @rank_zero_only
    def _draw(self, trainer: Trainer, iteration: int) -> None:
        self._drawn = time.monotonic()
        if self._folder is None:
            return
        from matplotlib.image import imsave

        pixels = draw(self.series)
        path = self._folder / "convergence.png"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda file: imsave(file, pixels, format="png"))
        except OSError as error:
            rank_zero_warn(f"{path} could not be written ({error}): the run goes on without it.")
