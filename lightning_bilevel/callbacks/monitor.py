"""The common part of the monitors: what they watch, when they look, where their numbers go."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_bilevel.callbacks.tensorboard import show_layout
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.plugin.loggers import log_numbers
from lightning_bilevel.plugin.mixin import BilevelMixin
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StreamInfo

__all__ = [
    "CertificateMonitor",
    "Monitor",
    "is_underway",
    "publish",
    "solver_of",
    "usual_tolerance",
]


def solver_of(trainer: Trainer) -> BilevelOptimizer:
    """Return the solver of a run."""
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, BilevelOptimizer)
    return optimizer


def publish(trainer: Trainer, metrics: dict[str, float], iteration: int) -> None:
    """Give numbers to callbacks (``trainer.callback_metrics``) and loggers.

    `self.log` would take milliseconds for this.
    """
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    log_numbers(trainer, metrics, iteration)


def is_underway(trainer: Trainer, pl_module: Any) -> bool:
    """Tell whether a validation belongs to a fit that has made a step.

    `Trainer.validate` and the sanity check before training do not.
    """
    return (
        trainer.state.fn == TrainerFn.FITTING
        and not trainer.sanity_checking
        and pl_module.last_step is not None
    )


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
        every_n_seconds: Look whenever this many seconds have passed.
    """

    def __init__(
        self, every_n_steps: int | None = None, every_n_seconds: float | None = None
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("every_n_seconds", every_n_seconds)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(
                    f"`{type(self).__name__}({name}={value})` must be positive and finite, or None."
                )
        self.every_n_steps = every_n_steps
        self.every_n_seconds = every_n_seconds
        self._looked = 0.0
        self._published: dict[str, float] = {}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, BilevelMixin):
            raise MisconfigurationException(
                f"`{type(self).__name__}` was given a {type(pl_module).__name__}: it needs a "
                "bilevel module, whose solver it watches."
            )
        self._looked = time.monotonic()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        first_monitor = next(c for c in callbacks if isinstance(c, Monitor))
        if first_monitor is self:
            if not trainer.loggers:
                rank_zero_info(
                    "There is no logger: what the monitors find is in `trainer.callback_metrics`, "
                    "and in the certificate at the end."
                )
            show_layout(trainer, solver_of(trainer))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._published:
            for name in self._published:
                trainer.callback_metrics.pop(name, None)
            self._published = {}

    def publish(self, trainer: Trainer, metrics: dict[str, float], iteration: int) -> None:
        """Give numbers of the current iteration to callbacks and loggers."""
        self._published |= metrics
        publish(trainer, metrics, iteration)

    def due(self, iteration: int, usual: int | None = None) -> bool:
        """Tell whether an interval has passed: the user's, or else the usual number of steps."""
        steps = self.every_n_steps or usual
        if steps is not None and iteration % steps == 0:
            return True
        if (
            self.every_n_seconds is not None
            and time.monotonic() - self._looked >= self.every_n_seconds
        ):
            self._looked = time.monotonic()
            return True
        return False


class CertificateMonitor(Monitor):
    """A monitor that looks at the certificate of the current point.

    It looks at the given intervals, at the end, and at every validation as long as all certificates
    together have taken at most a share of the optimisation time. If another callback
    (EarlyStopping, ModelCheckpoint) monitors one of its numbers, it looks whenever that callback
    does, whatever the share. Monitors that look at the same point share one evaluation, which does
    not count as optimisation time.

    In a run on a growing sample f and g are those of all data, in every stage. In a run on
    mini-batches they are those of a fixed sample, the first eight batches of the run, in eval mode.
    A certificate that cannot be evaluated there is a warning, once, and no end of the run.

    Args:
        every_n_steps: Look at every n-th outer iteration.
        every_n_seconds: Look whenever this many seconds have passed.
        share: The time for looks at validation, as a share of the optimisation time; ``inf`` looks
            at every validation, 0 at the first one only.
        tolerance: The accuracy of the proximal point, as the norm of its gradient mapping; None is
            1e-3, as in the paper, and 1e-6 in float64, which resolves the stationarity better.
        envelope: The Moreau envelope (rho, sigma, delta); None is the module's.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_seconds: float | None = None,
        share: float = 0.01,
        tolerance: float | None = None,
        envelope: Envelope | None = None,
    ) -> None:
        super().__init__(every_n_steps, every_n_seconds)
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"`{type(self).__name__}(tolerance={tolerance})` must be positive.")
        if not share >= 0:
            raise ValueError(f"`{type(self).__name__}(share={share})` must be at least 0.")
        self.share = share
        self.tolerance = tolerance
        self.envelope = envelope
        self._seen = 0
        self._warned = False
        self._watched_by: list[Any] = []

    # A run on mini-batches keeps a sample of its data for it.
    looks_at_certificates: ClassVar[bool] = True
    # The names of the numbers that it publishes.
    names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def observe(
        self, trainer: Trainer, pl_module: Any, certificate: Certificate, iteration: int
    ) -> None:
        """Use the certificate of the current point."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._seen = 0
        self._warned = False
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._watched_by = [
            callback for callback in callbacks if getattr(callback, "monitor", None) in self.names
        ]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = self.due(pl_module.last_step.iteration)
        if self.every_n_seconds is not None:
            # The clocks of the processes differ, and a certificate needs all processes.
            due = trainer.strategy.broadcast(due)
        if due or any(_saves_at(callback, trainer.global_step) for callback in self._watched_by):
            self._look(trainer, pl_module)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if is_underway(trainer, pl_module) and (
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
        on_mini_batches = isinstance(pl_module.last_step, StreamInfo)
        try:
            certificate = pl_module.certify(
                envelope=self.envelope, tolerance=tolerance, sample=on_mini_batches
            )
        except BilevelError as error:
            if not on_mini_batches:
                raise
            # A run on mini-batches goes on without it.
            if not self._warned:
                rank_zero_warn(f"{type(self).__name__} has no certificate to look at: {error}")
            self._warned = True
            return
        if certificate is not None:
            if certificate.evaluated_on and not self._seen:
                rank_zero_info(f"{type(self).__name__} looks at {certificate.evaluated_on}.")
            self._seen = pl_module.last_step.iteration
            self.observe(trainer, pl_module, certificate, self._seen)


def _saves_at(callback: Any, step: int) -> bool:
    """Tell whether a ModelCheckpoint looks at its monitored quantity after a step."""
    every = getattr(callback, "_every_n_train_steps", 0)
    return bool(every >= 1 and step % every == 0)
