"""The certificate at the end of a run."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from typing_extensions import override

from lightning_bilevel.callbacks.monitor import solver_of
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.files import write_whole
from lightning_bilevel.mini_batches import MiniBatches
from lightning_bilevel.plugin.loggers import log_hyperparameters, log_text, publish, run_folder
from lightning_bilevel.reading import Tally, advice, reading
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StreamInfo
from lightning_bilevel.table import table

__all__ = ["CertificateReport", "as_text", "gap_numbers", "kkt_numbers"]


def kkt_numbers(certificate: Certificate) -> dict[str, float]:
    """Return the logged KKT residuals."""
    return {
        "bilevel/kkt_stationarity": certificate.stationarity,
        "bilevel/kkt_feasibility": certificate.feasibility,
        "bilevel/kkt_complementarity": certificate.complementarity,
        "bilevel/kkt_residual": certificate.kkt,
        "bilevel/kkt_multiplier": certificate.multiplier,
    }


def gap_numbers(certificate: Certificate) -> dict[str, float]:
    """Return the logged numbers of the lower level."""
    return {
        "bilevel/violation": certificate.feasibility,
        "bilevel/prox_distance": certificate.prox_distance,
        "bilevel/prox_distance_bound": certificate.distance_bound,
    }


class CertificateReport(Callback):
    """Evaluates the certificate when fit ends, and says in plain words what it means.

    The result is printed first, with its reading and advice, and then the certificate as a table.
    It also goes to ``trainer.callback_metrics`` and to the loggers, as numbers and as text;
    TensorBoard shows it as a line of the HParams table, too. It is saved as ``certificate.json`` in
    the folder of the logs; without a logger, in the Trainer's ``default_root_dir``.

    The certificate is of the point that fit ends with. If the solver keeps the point that its
    convergence theorem speaks of, that one is certified too: in a line below, and under ``proved``
    in the file.

    Args:
        tolerance: The accuracy of the proximal point, as the norm of its gradient mapping; None is
            1e-9 in float64 and 1e-5 in float32, and 1e-3 after a run on mini-batches.
        batches: After a run on mini-batches, the most batches of a level that the certificate looks
            at; the table says what data it is of. It may cost as much as the run; 0 leaves it out,
            after any run.
        passes: After a run on mini-batches, the most passes of g over these data for the proximal
            point. If they do not suffice, the certificate says how accurate it is.
        envelope: The Moreau envelope (rho, sigma, delta); None is the module's, with a rho from the
            curvature of g if the solver's would take too many passes after a run on mini-batches.

    Attributes:
        certificate: The certificate, once fit has ended.
        proved: The certificate of the theorem's point, if there is one.
        tally: The counts that the reading is based on.
    """

    def __init__(
        self,
        tolerance: float | None = None,
        batches: int = 1000,
        passes: int = 20,
        envelope: Envelope | None = None,
    ) -> None:
        for name, value in (("tolerance", tolerance), ("passes", passes)):
            if value is not None and not value > 0:
                raise ValueError(f"`CertificateReport({name}={value})` must be positive.")
        self.tolerance = tolerance
        self.batches = batches
        self.passes = passes
        self.envelope = envelope
        self.certificate: Certificate | None = None
        self.proved: Certificate | None = None
        self.tally = Tally()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.last_step is not None:
            self.tally.add(pl_module.last_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.last_step is None:
            return
        optimizer, iteration = solver_of(trainer), pl_module.last_step.iteration
        self.certificate = self.proved = None
        limits = {"batches": self.batches, "passes": self.passes, "envelope": self.envelope}
        try:
            if self.batches > 0:
                self.certificate = pl_module.certify(tolerance=self.tolerance, **limits)
            if optimizer.proved is not None:
                self.proved = pl_module.certify(tolerance=self.tolerance, proved=True)
        except (BilevelError, MisconfigurationException) as error:
            # The run is done, and its result is worth more than a report.
            rank_zero_warn(f"There is no certificate: {error}")
        solver = getattr(optimizer, "name", type(optimizer).__name__)
        title = f"{solver} on {type(pl_module).__name__}"
        # The latest numbers that the module itself has logged, such as a validation loss.
        metrics = sorted(trainer.callback_metrics.items())
        final = {name: float(v) for name, v in metrics if not name.startswith("bilevel/")}
        text = as_text(title, self.certificate, self.tally, optimizer, final)
        if self.proved is not None:
            text = f"{text}\n{_filled(reading(self.proved))}"
        if self.certificate is not None and isinstance(pl_module.last_step, StreamInfo):
            text += (
                f"\nThe certificate took {self.certificate.passes} passes over these data, all "
                f"certificates of this run {pl_module.evaluation_time:.1f} s."
            )
        # First of all, because a logger may fail.
        self._give(run_folder(trainer), title, text, optimizer)
        if (c := self.certificate) is not None:
            publish(trainer, kkt_numbers(c) | gap_numbers(c), iteration)
            # Markdown shows indented text unchanged.
            log_text(trainer, "certificate", textwrap.indent(text, "    "), iteration)
            final |= {"bilevel/kkt_residual": c.kkt, "bilevel/violation": c.feasibility}
        final["bilevel/optimization_time"] = pl_module.last_step.optimization_time
        constants = {"solver": solver, **optimizer.hyper_parameters}
        named = {f"bilevel/{name}": value for name, value in constants.items()}
        log_hyperparameters(trainer, {**pl_module.hparams_initial, **named}, final, iteration)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.tally.as_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tally = Tally.from_dict(state_dict)

    @rank_zero_only
    def _give(
        self, folder: Path | None, title: str, text: str, optimizer: BilevelOptimizer | MiniBatches
    ) -> None:
        """Print the result, and save it but for a trial run, which has no folder."""
        print(f"\n{text}")
        if folder is None or self.certificate is None:
            return
        content: dict[str, Any] = {
            "run": title,
            "iteration": optimizer.progress.iterations,
            "optimization_time": optimizer.progress.optimization_time,
            "reading": reading(self.certificate, self.tally),
            "advice": advice(self.certificate, self.tally),
            "certificate": self.certificate.as_dict(),
            "chosen": dict(optimizer.chosen),
            "counts": self.tally.as_dict(),
        }
        if self.proved is not None:
            content["proved"] = self.proved.as_dict()
        path = folder / "certificate.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, f"{json.dumps(content, indent=1)}\n".encode())
        except OSError as error:
            # It is printed, and the other callbacks still have to finish.
            rank_zero_warn(f"{path} could not be written ({error}): it is printed only.")


def as_text(
    title: str,
    certificate: Certificate | None,
    tally: Tally,
    optimizer: BilevelOptimizer | MiniBatches,
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Lay out the result of a run, the reading and advice, and then the certificate."""
    progress = optimizer.progress
    rows = [
        *((name, f"{value:.4g}") for name, value in (metrics or {}).items()),
        ("outer iterations", f"{progress.iterations}"),
        ("inner iterations", f"{progress.inner_iterations}"),
        ("optimisation time", f"{progress.optimization_time:.2f} s"),
    ]
    if optimizer.chosen:
        chosen = ", ".join(f"{name} {text.split(' ')[0]}" for name, text in optimizer.chosen)
        rows.append(("chosen constants", chosen))
    parts = [table(title, rows)]
    if certificate is not None:
        advised = (f"Advice: {line}" for line in advice(certificate, tally))
        parts += map(_filled, [reading(certificate, tally), *advised])
        parts.append(str(certificate))
    return "\n".join(parts)


def _filled(sentence: str) -> str:
    return textwrap.fill(sentence, 110, subsequent_indent="  ")
