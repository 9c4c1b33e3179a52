"""A Trainer with the commands ``certify`` and ``probe``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lightning_bilevel.callbacks.certificate_report import CertificateReport, as_text
from lightning_bilevel.callbacks.monitor import solver_of
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.data.fullbatch import FullBatchDataModule, Repeated
from lightning_bilevel.plugin.mixin import BilevelMixin
from lightning_bilevel.plugin.streaming import has_changing_batches
from lightning_bilevel.plugin.whole_data import gathered
from lightning_bilevel.reading import Tally
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.table import table

__all__ = ["WITHOUT_STEPS", "BilevelTrainer"]

# The arguments of a Trainer that restores a run without training or writing files. `max_epochs` is
# unlimited, because a checkpoint may be of any epoch. Loaders are made, which no step asks.
WITHOUT_STEPS: dict[str, Any] = {
    "max_steps": 0,
    "max_epochs": -1,
    "fast_dev_run": False,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class BilevelTrainer(Trainer):
    """A Trainer that can also certify a checkpoint and suggest constants for a problem."""

    def certify(
        self,
        model: BilevelMixin,
        datamodule: LightningDataModule,
        ckpt_path: str | None = None,
        tolerance: float | None = None,
        weights_only: bool | None = None,
        proved: bool = False,
    ) -> Certificate | None:
        """Print the certificate of a checkpoint.

        Args:
            model: The module that the checkpoint was saved with.
            datamodule: Its data.
            ckpt_path: The checkpoint.
            tolerance: The accuracy of the proximal point, as the norm of its gradient mapping; None
                means 1e-9 in float64 and 1e-5 in float32.
            weights_only: As for ``fit``: whether to refuse a checkpoint that has anything but
                tensors and plain values.
            proved: Certify the point that the convergence theorem speaks of, instead of the last
                iterate.
        """
        if ckpt_path is None or not Path(ckpt_path).is_file():
            raise MisconfigurationException(
                f"`certify(ckpt_path={ckpt_path})` must be the path of a checkpoint."
            )
        if tolerance is not None and not tolerance > 0:
            raise MisconfigurationException(f"`certify(tolerance={tolerance})` must be positive.")
        self.restore(model, datamodule, ckpt_path, weights_only)
        certificate = self.look(model, datamodule, tolerance=tolerance, proved=proved)
        if certificate is None:
            raise MisconfigurationException(
                f"`certify(model={type(model).__name__})` has no Moreau envelope: name one, as in "
                "`declare(envelope=...)`."
            )
        if self.is_global_zero:
            solver = solver_of(self)
            title = f"{type(solver).__name__} on {type(model).__name__}, {Path(ckpt_path).name}"
            print(as_text(title, certificate, self._tally(), solver))
        return certificate

    def probe(
        self,
        model: BilevelMixin,
        datamodule: LightningDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> list[tuple[str, str]]:
        """Print the constants that IVSP would choose for a problem, and why; nothing is trained.

        Args:
            model: The module, with any solver. The relaxation delta is that of its envelope, or
                1e-3.
            datamodule: Its data.
            ckpt_path: Not used, as constants are chosen at the start of a run. It is here because
                the config that ``fit`` saves has this key.
            weights_only: Not used, for the same reason.
        """
        self.restore(model, datamodule)
        problem = model.problem_on(self._whole_batch(datamodule))
        envelope = model.envelope
        delta = 1e-3 if envelope is None else envelope.delta
        rows = IVSP(model.parameter_groups(), delta=delta).probe(problem)
        configured = solver_of(self).hyper_parameters
        shown = []
        for name, text in rows:
            value = configured.get(name)
            shown.append((name, text if value is None else f"{text}; given: {value:g}"))
        if self.is_global_zero:
            title = f"IVSP on {type(model).__name__}, delta {delta:g}: what it would choose"
            print(table(title, shown))
            print(
                f"From {problem.calls.passes} passes of f and g at the start. What the config "
                "leaves out, IVSP chooses so."
            )
            if ckpt_path is not None:
                print(
                    f"`ckpt_path={ckpt_path}` was not read: constants are chosen at the start of a "
                    "run."
                )
        return rows

    def _tally(self) -> Tally:
        """Return the counts of the restored run; the CertificateReport has restored them."""
        callbacks: list[Callback] = cast(Any, self).callbacks
        reports = [callback for callback in callbacks if isinstance(callback, CertificateReport)]
        return reports[0].tally if reports else Tally()

    def restore(
        self,
        model: BilevelMixin,
        datamodule: LightningDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Run a fit without steps.

        Afterwards module, solver and callbacks have the state of the checkpoint.
        """
        if self.max_steps != 0:
            raise MisconfigurationException(
                f"`BilevelTrainer(max_steps={self.max_steps})` would train: what only looks is "
                "done by a `BilevelTrainer(**WITHOUT_STEPS)`."
            )
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Be aware that when using `ckpt_path`, callbacks"
            )
            module = cast(LightningModule, model)
            self.fit(module, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=weights_only)

    def look(
        self, model: BilevelMixin, datamodule: LightningDataModule, **options: Any
    ) -> Certificate | None:
        """Return the certificate of a restored module, as its run would evaluate it.

        Args:
            model: The module.
            datamodule: Its data. A run on mini-batches asks its loaders for all of them.
            options: Those of :meth:`BilevelMixin.certify`.
        """
        batch = None if model.on_mini_batches else self._whole_batch(datamodule)
        return model.certify(batch=batch, **options)

    def _whole_batch(self, datamodule: LightningDataModule) -> Any:
        """Return the batch of a full-batch run, or all data of one on mini-batches."""
        loader: Any = self.train_dataloader
        if has_changing_batches(self):
            if not isinstance(datamodule, FullBatchDataModule):
                return gathered(self, batches=1000).batch
            loader = FullBatchDataModule.train_dataloader(datamodule)
        batch = loader.batch if isinstance(loader, Repeated) else next(iter(loader))
        batch = self.precision_plugin.convert_input(batch)
        return move_data_to_device(batch, self.strategy.root_device)
