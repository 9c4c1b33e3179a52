"""A Trainer that also certifies checkpoints and probes problems: what ``certify`` and ``probe`` run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_bilevel.callbacks.certificate_report import CertificateReport, as_text
from lightning_bilevel.callbacks.monitor import solver_of
from lightning_bilevel.core.certificate import Certificate, table
from lightning_bilevel.plugin.mixin import BilevelMixin
from lightning_bilevel.solvers.ivsp.solver import IVSP

__all__ = ["BilevelTrainer"]


class BilevelTrainer(Trainer):
    """A Trainer that can also certify a checkpoint, and tell the constants that a problem suggests."""

    def certify(
        self,
        model: BilevelMixin,
        datamodule: LightningDataModule,
        ckpt_path: str | None = None,
        tolerance: float | None = None,
        weights_only: bool | None = None,
    ) -> Certificate | None:
        """Print the certificate of a checkpoint.

        Args:
            model: The module that the checkpoint was saved with.
            datamodule: Its data.
            ckpt_path: The checkpoint.
            tolerance: The accuracy of the proximal point, as the norm of its gradient mapping; None is 1e-9 in float64 and
                1e-5 in float32.
            weights_only: As for ``fit``: whether the checkpoint may hold nothing but tensors and plain values.
        """
        if ckpt_path is None or not Path(ckpt_path).is_file():
            raise MisconfigurationException(f"`certify(ckpt_path={ckpt_path})` must be the path of a checkpoint.")
        if tolerance is not None and not tolerance > 0:
            raise MisconfigurationException(f"`certify(tolerance={tolerance})` must be positive.")
        report = CertificateReport()
        batch = self._set_up(report, model, datamodule, ckpt_path, weights_only)
        certificate = model.certify(batch=batch, tolerance=tolerance)
        if certificate is None:
            raise MisconfigurationException(
                f"`certify(model={type(model).__name__})` has no Moreau envelope: name one, as in `declare(envelope=...)`."
            )
        if self.is_global_zero:
            solver = solver_of(self)
            title = f"{type(solver).__name__} on {type(model).__name__}, {Path(ckpt_path).name}"
            print(as_text(title, certificate, report.tally, solver))
        return certificate

    def probe(self, model: BilevelMixin, datamodule: LightningDataModule) -> list[tuple[str, str]]:
        """Print the constants that IVSP would choose for a problem, and why; nothing is trained.

        Args:
            model: The module, with any solver. The relaxation delta is that of its envelope, or 1e-3.
            datamodule: Its data.
        """
        batch = self._set_up(CertificateReport(), model, datamodule, None, None)
        own, (x, y) = solver_of(self), model.point
        envelope = own.envelope or model.envelope
        levels = [{"params": [x], "level": "upper"}, {"params": [y], "level": "lower"}]
        solver = IVSP(levels, delta=1e-3 if envelope is None else envelope.delta)
        problem, unit_x, unit_y = model.problem_in_units(batch)
        rows = solver.probe(problem, problem.upper_set.project(x / unit_x), problem.lower_set.project(y / unit_y))
        given = own.constants if isinstance(own, IVSP) else {}
        shown = [(name, text if given.get(name) is None else f"{text}; given: {given[name]:g}") for name, text in rows]
        if self.is_global_zero:
            print(table(f"IVSP on {type(model).__name__}, delta {solver.constants['delta']:g}: what it would choose", shown))
            print(f"From {problem.calls.passes} passes of f and g at the start. What the config leaves out, IVSP chooses so.")
        return rows

    def _set_up(
        self,
        report: CertificateReport,
        model: BilevelMixin,
        datamodule: LightningDataModule,
        ckpt_path: str | None,
        weights_only: bool | None,
    ) -> Any:
        """Do all of a fit but the steps, and return its batch: module and solver are as they were when it was saved."""
        self.callbacks, self.loggers, self.limit_train_batches = [report], [], 0
        self.fit_loop.max_epochs = -1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
            self.fit(cast(LightningModule, model), datamodule=datamodule, ckpt_path=ckpt_path, weights_only=weights_only)
        batch = self.precision_plugin.convert_input(next(iter(datamodule.train_dataloader())))
        return move_data_to_device(batch, self.strategy.root_device)
