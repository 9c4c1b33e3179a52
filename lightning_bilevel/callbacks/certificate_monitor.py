"""The monitors of the certificate: the violation of the lower level, and the KKT residuals."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_bilevel.callbacks.certificate_report import (
    CertificateReport,
    gap_numbers,
    kkt_numbers,
)
from lightning_bilevel.callbacks.monitor import Monitor, usual_tolerance
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.moreau import Envelope

__all__ = ["CertificateMonitor", "KKTMonitor", "MoreauGapMonitor"]


def _is_underway(trainer: Trainer, pl_module: Any) -> bool:
    """Return whether a validation belongs to a fit that has made a step.

    `Trainer.validate` and the sanity check before training do not.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
    return fitting and pl_module.last_step is not None


class CertificateMonitor(Monitor):
    """A monitor that looks at the certificate of the current point.

    It looks at the given interval, at the end, and at every validation as long as all certificates
    together have taken at most a share of the optimisation time. If another callback
    (EarlyStopping, ModelCheckpoint) monitors one of its numbers, it looks whenever that callback
    does, whatever the share. Monitors that look at the same point share one evaluation, which does
    not count as optimisation time.

    In a run on a growing sample f and g are those of all data, in every stage. In a run on
    mini-batches they are those of a fixed sample, the first eight batches of the run, in eval mode.
    A certificate that cannot be evaluated is a warning, and no end of the run.

    Args:
        every_n_steps: Look at every n-th outer iteration.
        share: The time for looks at validation, as a share of the optimisation time; ``inf`` looks
            at every validation, 0 at the first one only.
        tolerance: The accuracy of the proximal point, as the norm of its gradient mapping; None is
            1e-3, as in the paper, and 1e-6 in float64, which resolves the stationarity better.
        envelope: The Moreau envelope (rho, sigma, delta); None is the module's.
    """

    # A run on mini-batches keeps a sample of its data for it.
    looks_at_certificates: ClassVar[bool] = True
    # How the names of its numbers begin.
    names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        every_n_steps: int | None = None,
        share: float = 0.01,
        tolerance: float | None = None,
        envelope: Envelope | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        self.share = share
        self.tolerance = tolerance
        self.envelope = envelope
        self._seen = 0
        self._watched_by: list[Any] = []

    @abstractmethod
    def observe(
        self, trainer: Trainer, pl_module: Any, certificate: Certificate, iteration: int
    ) -> None:
        """Use the certificate of the current point."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._seen = 0
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._watched_by = [
            c for c in callbacks if str(getattr(c, "monitor", "")).startswith(self.names)
        ]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A ModelCheckpoint may look at what it monitors after a step.
        intervals = [getattr(c, "_every_n_train_steps", 0) for c in self._watched_by]
        saved = any(every >= 1 and trainer.global_step % every == 0 for every in intervals)
        step = pl_module.last_step
        if step is not None and (saved or self.due(step.iteration)):
            self._look(trainer, pl_module)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if _is_underway(trainer, pl_module) and (
            self._watched_by or pl_module.may_evaluate(self.share)
        ):
            self._look(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._watched_by:
            self._look(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.last_step is None or pl_module.last_step.iteration == self._seen:
            return
        tolerance = self.tolerance or usual_tolerance(trainer)
        try:
            certificate = pl_module.certify(
                envelope=self.envelope, tolerance=tolerance, sample=True
            )
        except BilevelError as error:
            rank_zero_warn(f"{type(self).__name__} has no certificate to look at: {error}")
            return
        if certificate is not None:
            self._seen = pl_module.last_step.iteration
            self.observe(trainer, pl_module, certificate, self._seen)


class MoreauGapMonitor(CertificateMonitor):
    r"""Logs how far the lower level is violated, in the same way for every solver.

    The proximal point z is computed independently of the solver, by projected gradient with
    backtracking from z = y:

    - ``bilevel/violation``: :math:`[R(x, y)]_+`, with :math:`R = H - \delta` of the Moreau gap H;
    - ``bilevel/prox_distance``: :math:`\|y - z\|`;
    - ``bilevel/prox_distance_bound``: :math:`\sqrt{2\rho(\delta + [R]_+)/(1 - \rho\sigma)}`, which
      bounds that distance.

    Its arguments say when it looks, see
    :class:`~lightning_bilevel.callbacks.certificate_monitor.CertificateMonitor`.

    Attributes:
        latest: The latest violation.
    """

    names = ("bilevel/violation", "bilevel/prox_distance")
    latest: float | None = None

    @override
    def observe(
        self, trainer: Trainer, pl_module: Any, certificate: Certificate, iteration: int
    ) -> None:
        self.latest = certificate.feasibility
        self.publish(trainer, gap_numbers(certificate), iteration)


class KKTMonitor(CertificateMonitor):
    r"""Logs the three KKT residuals, their maximum and the multiplier, and keeps the best point.

    The tags are ``bilevel/kkt_stationarity``, ``bilevel/kkt_feasibility``,
    ``bilevel/kkt_complementarity``, ``bilevel/kkt_residual`` (the maximum), ``bilevel/kkt_best``
    (the smallest maximum so far) and ``bilevel/kkt_multiplier``. The theory of IVSP promises a good
    iterate in the second half of a run, which need not be the last one; ``module.proved`` is that
    point. The monitor keeps another one, also in checkpoints: the best of all that it has looked
    at. To end a run at small residuals, use Lightning's
    ``EarlyStopping("bilevel/kkt_residual", stopping_threshold=1e-4, patience=1000)``.

    Args:
        restore_best: Write the best point into the module when fit ends, before the certificate is
            evaluated. A run that is resumed from a checkpoint still goes on from its last point.
        options: Those of
            :class:`~lightning_bilevel.callbacks.certificate_monitor.CertificateMonitor`.

    Attributes:
        best: The best point: iteration, kkt, multiplier, x, y and buffers. Empty before the first
            look.
    """

    names = ("bilevel/kkt_",)

    def __init__(self, restore_best: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.restore_best = restore_best
        self.best: dict[str, Any] = {}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        earlier = callbacks[: callbacks.index(self)]
        if self.restore_best and any(isinstance(c, CertificateReport) for c in earlier):
            raise MisconfigurationException(
                "`KKTMonitor(restore_best=True)` comes after `CertificateReport`, which would "
                "certify another point than the one that fit ends with: name the monitor first."
            )

    @override
    def observe(
        self, trainer: Trainer, pl_module: Any, certificate: Certificate, iteration: int
    ) -> None:
        if not self.best or certificate.kkt < self.best["kkt"]:
            x, y = pl_module.point
            self.best = {
                "iteration": iteration,
                "kkt": certificate.kkt,
                "multiplier": certificate.multiplier,
                "x": x,
                "y": y,
                "buffers": pl_module.written_buffers,
            }
        numbers = {**kkt_numbers(certificate), "bilevel/kkt_best": self.best["kkt"]}
        self.publish(trainer, numbers, iteration)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        best = self.best
        if self.restore_best and best and best["iteration"] != pl_module.last_step.iteration:
            pl_module.restore((best["x"], best["y"]), best["multiplier"], best["buffers"])
            rank_zero_info(
                f"KKTMonitor restored the point of iteration {best['iteration']}, whose KKT "
                f"residual is {best['kkt']:.2e}."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
