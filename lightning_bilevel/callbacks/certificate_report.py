"""The certificate at the end of a run."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from typing_extensions import override

from lightning_bilevel.callbacks.monitor import publish, solver_of
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.files import write_whole
from lightning_bilevel.plugin.loggers import log_hyperparameters, log_text, run_folder
from lightning_bilevel.plugin.mixin import BilevelMixin
from lightning_bilevel.report.reading import advice, reading
from lightning_bilevel.report.tally import Tally
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.proved import ProvedPoint
from lightning_bilevel.solvers.record import Progress, StreamInfo
from lightning_bilevel.table import table

__all__ = ["CertificateReport", "as_text"]


class CertificateReport(Callback):
    """Evaluates the certificate when fit ends, and says in plain words what it means.

    The certificate is printed as a table, with its reading and advice. It also goes to
    ``trainer.callback_metrics`` and to the loggers, as numbers and as text; TensorBoard shows it as
    a line of the HParams table, too. It is saved as ``certificate.json`` in the folder of the
    checkpoints; without checkpoints, in the folder of the logs; without a logger, in the Trainer's
    ``default_root_dir``.

    The certificate is of the point that fit ends with. If the solver keeps the point that its
    convergence theorem speaks of, that one is certified too: in a table of its own, and under
    ``proved`` in the file.

    Args:
        tolerance: The accuracy of the proximal point, as the norm of its gradient mapping; None is
            1e-9 in float64 and 1e-5 in float32, and 1e-3 after a run on mini-batches.
        batches: After a run on mini-batches, the most batches of a level that the certificate looks
            at; 0 leaves it out, because it may cost as much as the run. The table says what data it
            is of, and how long it took.
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
        if tolerance is not None and tolerance <= 0:
            raise ValueError(f"`CertificateReport(tolerance={tolerance})` must be positive.")
        if batches < 0 or passes < 1:
            raise ValueError(
                f"`CertificateReport(batches={batches}, passes={passes})` needs at least 0 batches "
                "(0 for no certificate) and at least 1 pass."
            )
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
        if isinstance(pl_module, BilevelMixin) and pl_module.last_step is not None:
            self.tally.add(pl_module.last_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not isinstance(pl_module, BilevelMixin) or pl_module.last_step is None:
            return
        optimizer = solver_of(trainer)
        iteration = pl_module.last_step.iteration
        self.certificate, why = self._certify(pl_module)
        title = f"{type(optimizer).__name__} on {type(pl_module).__name__}"
        text = as_text(title, self.certificate, self.tally, optimizer, _validation(trainer))
        self.proved = None
        if optimizer.proved is not None:
            self.proved = pl_module.certify(tolerance=self.tolerance, proved=True)
            text = f"{text}\n{_proved_table(optimizer.proved, self.proved)}"
        if isinstance(pl_module.last_step, StreamInfo) and self.certificate is not None:
            why = (
                f"The certificate took {self.certificate.passes} passes over these data. The "
                f"certificates of this run took {pl_module.evaluation_time:.1f} s."
            )
        self._print("\n".join([text, *([textwrap.fill(why, 110)] if why else [])]))
        final = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.startswith("bilevel/")
        }
        if self.certificate is not None:
            # First of all, because a logger may fail.
            self._save(trainer, run_folder(trainer), title, optimizer)
            metrics = _metrics(self.certificate)
            publish(trainer, metrics, iteration)
            # Markdown shows indented text unchanged.
            log_text(trainer, "certificate", textwrap.indent(text, "    "), iteration)
            final |= {name: metrics[name] for name in ("bilevel/kkt_residual", "bilevel/violation")}
        final["bilevel/optimization_time"] = pl_module.last_step.optimization_time
        solver = {"solver": type(optimizer).__name__, **optimizer.hyper_parameters}
        saved = cast(Any, pl_module).hparams_initial
        log_hyperparameters(trainer, saved, solver, final, iteration)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.tally.as_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tally = Tally(**state_dict)

    def _certify(self, pl_module: Any) -> tuple[Certificate | None, str]:
        """Return the certificate, or None and why there is none."""
        if not isinstance(pl_module.last_step, StreamInfo):
            return pl_module.certify(tolerance=self.tolerance, envelope=self.envelope), ""
        if self.batches == 0:
            return None, "No certificate was asked for (`CertificateReport(batches=0)`)."
        try:
            limits = {"batches": self.batches, "passes": self.passes, "envelope": self.envelope}
            return pl_module.certify(tolerance=self.tolerance, **limits), ""
        except (BilevelError, MisconfigurationException) as error:
            # The run is done, and its result is worth more than a report.
            return None, f"No certificate: {error}"

    @rank_zero_only
    def _print(self, text: str) -> None:
        print(f"\n{text}")

    @rank_zero_only
    def _save(
        self, trainer: Trainer, folder: Path | None, title: str, optimizer: BilevelOptimizer
    ) -> None:
        checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
        if folder is None or self.certificate is None:
            return
        path = Path(checkpoints or folder) / "certificate.json"
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
        if optimizer.proved is not None and self.proved is not None:
            content["proved"] = _proved_entry(optimizer.proved, self.proved)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, f"{json.dumps(content, indent=1)}\n".encode())
        except OSError as error:
            # It is printed, and the other callbacks still have to finish.
            rank_zero_warn(f"{path} could not be written ({error}): it is printed only.")


def as_text(
    title: str,
    certificate: Certificate | None,
    tally: Tally,
    optimizer: BilevelOptimizer,
    validation: list[tuple[str, str]] | None = None,
) -> str:
    """Lay out a certificate and its run as a table, with the reading and the advice below."""
    rows = certificate.rows() if certificate is not None else []
    chosen = ", ".join(f"{name} {text.split(' ')[0]}" for name, text in optimizer.chosen)
    if chosen:
        rows = [*rows, ("chosen constants", chosen)]
    drawn = table(title, [*(validation or []), *rows, *_run(optimizer.progress)])
    if certificate is None:
        return drawn
    sentences = [
        reading(certificate, tally),
        *(f"Advice: {line}" for line in advice(certificate, tally)),
    ]
    filled = [textwrap.fill(sentence, 110, subsequent_indent="  ") for sentence in sentences]
    return "\n".join([drawn, *filled])


def _proved_table(point: ProvedPoint, certificate: Certificate | None) -> str:
    """Lay out the certificate of the theorem's point, with the bounds of the theorem."""
    assert certificate is not None  # a solver with such a point has an envelope

    def bounded(value: float, bound: float) -> str:
        return f"{value:.3e}" + ("" if math.isinf(bound) else f" (at most {bound:.3e})")

    rows = [
        ("iteration", f"{point.iteration} of {point.iterations} (k^ = {point.iteration - 1})"),
        ("KKT stationarity", f"{certificate.stationarity:.3e}"),
        ("KKT feasibility", bounded(certificate.feasibility, point.feasibility_bound)),
        ("KKT complementarity", bounded(certificate.complementarity, point.complementarity_bound)),
        ("multiplier", f"{certificate.multiplier:.4g}"),
    ]
    return table("the theorem's point", rows)


def _proved_entry(point: ProvedPoint, certificate: Certificate) -> dict[str, Any]:
    bounds = {
        "feasibility_bound": point.feasibility_bound,
        "complementarity_bound": point.complementarity_bound,
    }
    return {
        "iteration": point.iteration,
        "omega": point.omega,
        # JSON has no infinity.
        **{name: None if math.isinf(bound) else bound for name, bound in bounds.items()},
        "certificate": certificate.as_dict(),
    }


def _metrics(certificate: Certificate) -> dict[str, float]:
    c = certificate
    return {
        "bilevel/kkt_stationarity": c.stationarity,
        "bilevel/kkt_feasibility": c.feasibility,
        "bilevel/kkt_complementarity": c.complementarity,
        "bilevel/kkt_residual": c.kkt,
        "bilevel/kkt_multiplier": c.multiplier,
        "bilevel/violation": c.feasibility,
        "bilevel/prox_distance": c.prox_distance,
    }


def _validation(trainer: Trainer) -> list[tuple[str, str]]:
    """Return the latest numbers that the module itself has logged, such as a validation loss."""
    metrics = sorted(trainer.callback_metrics.items())
    return [
        (name, f"{float(value):.4g}") for name, value in metrics if not name.startswith("bilevel/")
    ]


def _run(progress: Progress) -> list[tuple[str, str]]:
    rows = [
        ("outer iterations", f"{progress.iterations}"),
        ("inner iterations", f"{progress.inner_iterations}"),
        ("optimisation time", f"{progress.optimization_time:.2f} s"),
    ]
    if progress.penalty_updates is None:
        return rows
    return [("penalty updates", f"{progress.penalty_updates}"), *rows]
