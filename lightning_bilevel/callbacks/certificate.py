"""The certificate of a run: looked at on the way, and reported at the end."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_bilevel.callbacks.monitors import Counting, Monitor, solver_of
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.logging import log_hyperparameters, log_text, run_folder
from lightning_bilevel.mini_batches import MiniBatches
from lightning_bilevel.output import table, write_whole
from lightning_bilevel.reading import Tally, advice, reading
from lightning_bilevel.solvers.base import BilevelOptimizer


def usual_tolerance(trainer: Trainer) -> float:
    """Return the accuracy of a proximal point: the paper's 1e-3, or 1e-6 in float64.

    In float64 that is stricter than the paper, which has 1e-3 throughout and names no dtype.
    """
    return 1e-6 if trainer.precision == "64-true" else 1e-3


def _numbers(certificate: Certificate) -> dict[str, float]:
    """Return what is logged of a certificate."""
    return {
        "bilevel/violation": certificate.feasibility,
        "bilevel/prox_distance": certificate.prox_distance,
        "bilevel/prox_distance_bound": certificate.distance_bound,
        "bilevel/kkt_stationarity": certificate.stationarity,
        "bilevel/kkt_feasibility": certificate.feasibility,
        "bilevel/kkt_complementarity": certificate.complementarity,
        "bilevel/kkt_residual": certificate.kkt,
        "bilevel/kkt_multiplier": certificate.multiplier,
    }


# How the names of these numbers begin.
_LOGGED = ("bilevel/violation", "bilevel/prox_distance", "bilevel/kkt_")


@dataclass(frozen=True)
class BestPoint:
    """The point of the smallest KKT residual among those that a monitor has looked at.

    Attributes:
        iteration: Its outer iteration.
        kkt: Its KKT residual.
        multiplier: Its multiplier.
        x: The upper-level variables.
        y: The lower-level variables.
        buffers: The buffers that training writes to, by name.
    """

    iteration: int
    kkt: float
    multiplier: float
    x: Tensor
    y: Tensor
    buffers: dict[str, Tensor]


@dataclass(eq=False, repr=False)
class CertificateMonitor(Monitor):
    r"""Logs the certificate of the current point, and keeps the best point.

    The proximal point z is computed independently of the solver, by projected gradient with
    backtracking from z = y, so the numbers mean the same for every solver:

    - ``bilevel/violation``: :math:`[R(x, y)]_+`, with :math:`R = H - \delta` of the Moreau gap H;
    - ``bilevel/prox_distance``: :math:`\|y - z\|`, and ``bilevel/prox_distance_bound``:
      :math:`\sqrt{2\rho(\delta + [R]_+)/(1 - \rho\sigma)}`, which bounds it;
    - ``bilevel/kkt_stationarity``, ``bilevel/kkt_feasibility``, ``bilevel/kkt_complementarity``,
      their maximum ``bilevel/kkt_residual``, the smallest maximum so far, ``bilevel/kkt_best``, and
      the multiplier, ``bilevel/kkt_multiplier``.

    It looks at the given interval, at the end, and at every validation as long as all certificates
    together have taken at most a share of the optimisation time. If another callback
    (EarlyStopping, ModelCheckpoint) monitors one of its numbers, it looks whenever that callback
    does, whatever the share. To end a run at small residuals, use Lightning's
    ``EarlyStopping("bilevel/kkt_residual", stopping_threshold=1e-4, patience=1000)``. No look
    counts as optimisation time.

    In a run on a growing sample f and g are those of all data, in every stage. In a run on
    mini-batches they are those of a fixed sample, the first eight batches of the run, in eval mode.
    A certificate that cannot be evaluated is a warning, and no end of the run.

    The theory of IVSP promises a good iterate in the second half of a run, which need not be the
    last one; ``module.proved`` is that point. The monitor keeps another one, also in checkpoints:
    the best of all that it has looked at.

    Args:
        every_n_steps: Look at every n-th outer iteration.
        share: The time for looks at validation, as a share of the optimisation time; ``inf`` looks
            at every validation, 0 at the first one only.
        tolerance: The accuracy of the proximal point, as the norm of its gradient mapping; None is
            1e-3, as in the paper, and 1e-6 in float64, which resolves the stationarity better.
        envelope: The Moreau envelope (rho, sigma, delta); None is the module's.
        restore_best: Write the best point into the module when fit ends; :class:`CertificateReport`
            certifies it if it is named after the monitor. A run that is resumed from a checkpoint
            still goes on from its last point.

    Attributes:
        latest: The latest violation.
        best: The best point; None before the first look.
    """

    # A run on mini-batches keeps a sample of its data for it.
    looks_at_certificates: ClassVar[bool] = True

    every_n_steps: int | None = None
    share: float = 0.01
    tolerance: float | None = None
    envelope: Envelope | None = None
    restore_best: bool = False
    latest: float | None = field(default=None, init=False)
    best: BestPoint | None = field(default=None, init=False)
    _seen: int = field(default=0, init=False)
    _watched_by: list[Any] = field(default_factory=list, init=False)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._seen = 0
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        monitored = [(str(getattr(c, "monitor", "")), c) for c in callbacks]
        self._watched_by = [c for name, c in monitored if name.startswith(_LOGGED)]

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        # A ModelCheckpoint may look at what it monitors after a step.
        intervals = [getattr(c, "_every_n_train_steps", 0) for c in self._watched_by]
        saved = any(n >= 1 and trainer.global_step % n == 0 for n in intervals)
        step, every = pl_module.last_step, self.every_n_steps
        if saved or (step is not None and every and step.iteration % every == 0):
            self._look(trainer, pl_module)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        # `Trainer.validate` and the sanity check are not of a run that has made a step.
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and (self._watched_by or pl_module.may_evaluate(self.share)):
            self._look(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._watched_by:
            self._look(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._look(trainer, pl_module)
        best = self.best
        if self.restore_best and best and best.iteration != pl_module.last_step.iteration:
            pl_module.restore((best.x, best.y), best.multiplier, best.buffers)
            rank_zero_info(
                f"CertificateMonitor restored the point of iteration {best.iteration}, whose KKT "
                f"residual is {best.kkt:.2e}."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": None if self.best is None else vars(self.best)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best"]
        self.best = None if best is None else BestPoint(**best)

    def _look(self, trainer: Trainer, pl_module: Any) -> None:
        """Look at the current point, once."""
        step = pl_module.last_step
        if step is None or step.iteration == self._seen:
            return
        tolerance = self.tolerance or usual_tolerance(trainer)
        try:
            found = pl_module.certify(envelope=self.envelope, tolerance=tolerance, sample=True)
        except BilevelError as error:
            rank_zero_warn(f"CertificateMonitor has no certificate to look at: {error}")
            return
        if found is None:
            return
        self._seen = step.iteration
        self.latest = found.feasibility
        if self.best is None or found.kkt < self.best.kkt:
            (x, y), buffers = pl_module.point, pl_module.written_buffers
            self.best = BestPoint(self._seen, found.kkt, found.multiplier, x, y, buffers)
        numbers = {**_numbers(found), "bilevel/kkt_best": self.best.kkt}
        self.publish(trainer, numbers, self._seen)


@dataclass(eq=False, repr=False)
class CertificateReport(Counting):
    """Evaluates the certificate when fit ends, and says in plain words what it means.

    The result is printed first, with its reading and advice, and then the certificate as a table.
    It also goes to ``trainer.callback_metrics`` and to the loggers, as numbers and as text;
    TensorBoard shows it as a line of the HParams table, too. It is saved as ``certificate.json`` in
    the folder of the logs; without a logger, in the Trainer's ``default_root_dir``.

    The certificate is of the point that fit ends with. If the solver keeps the point that its
    convergence theorem speaks of, that one is certified too: in a line below, and under ``proved``
    in the file.

    Args:
        batches: After a run on mini-batches, the most batches of a level that the certificate looks
            at; the table says what data it is of. It may cost as much as the run; 0 leaves it out,
            after any run.

    Attributes:
        certificate: The certificate, once fit has ended. ``module.certify`` evaluates another, with
            a tolerance or an envelope of one's own.
        proved: The certificate of the theorem's point, if there is one.
        tally: The counts that the reading is based on.
    """

    batches: int = 1000
    certificate: Certificate | None = field(default=None, init=False)
    proved: Certificate | None = field(default=None, init=False)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        step, solver = pl_module.last_step, solver_of(trainer)
        if step is None:
            return
        self.certificate = self.proved = None
        try:
            if self.batches > 0:
                self.certificate = pl_module.certify(batches=self.batches)
            if solver.proved is not None:
                self.proved = pl_module.certify(proved=True)
        except (BilevelError, MisconfigurationException) as error:
            # The run is done, and its result is worth more than a report.
            rank_zero_warn(f"There is no certificate: {error}")
        name = getattr(solver, "name", type(solver).__name__)
        title = f"{name} on {type(pl_module).__name__}"
        # The latest numbers that the module itself has logged, such as a validation loss.
        metrics = sorted(trainer.callback_metrics.items())
        final = {tag: float(v) for tag, v in metrics if not tag.startswith("bilevel/")}
        text = as_text(title, self.certificate, self.tally, solver, final)
        if self.proved is not None:
            text += f"\n{_filled(reading(self.proved))}"
        # First of all, because a logger may fail.
        rank_zero_only(print)(f"\n{text}")
        self._save(run_folder(trainer), title, solver)
        if self.certificate is not None:
            found = _numbers(self.certificate)
            self.publish(trainer, found, step.iteration)
            # Markdown shows indented text unchanged.
            log_text(trainer, "certificate", textwrap.indent(text, "    "), step.iteration)
            final |= {key: found[key] for key in ("bilevel/kkt_residual", "bilevel/violation")}
        final["bilevel/optimization_time"] = step.optimization_time
        values = {"solver": name, **solver.hyper_parameters}
        values = pl_module.hparams_initial | {f"bilevel/{key}": v for key, v in values.items()}
        log_hyperparameters(trainer, values, metrics=final, step=step.iteration)

    @rank_zero_only
    def _save(
        self, folder: Path | None, title: str, solver: BilevelOptimizer | MiniBatches
    ) -> None:
        """Save the result, but for a trial run, which has no folder."""
        if folder is None or self.certificate is None:
            return
        content: dict[str, Any] = {
            "run": title,
            "iteration": solver.progress.iterations,
            "optimization_time": solver.progress.optimization_time,
            "reading": reading(self.certificate, self.tally),
            "advice": advice(self.certificate, self.tally),
            "certificate": self.certificate.as_dict(),
            "chosen": dict(solver.chosen),
            "counts": asdict(self.tally),
            "proved": self.proved and self.proved.as_dict(),
        }
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
    solver: BilevelOptimizer | MiniBatches,
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Lay out the result of a run, the reading and advice, and then the certificate."""
    progress = solver.progress
    rows = [
        *((name, f"{value:.4g}") for name, value in (metrics or {}).items()),
        ("outer iterations", f"{progress.iterations}"),
        ("inner iterations", f"{progress.inner_iterations}"),
        ("optimisation time", f"{progress.optimization_time:.2f} s"),
    ]
    if solver.chosen:
        chosen = ", ".join(f"{name} {text.split(' ')[0]}" for name, text in solver.chosen)
        rows.append(("chosen constants", chosen))
    parts = [table(title, rows)]
    if certificate is not None:
        advised = (f"Advice: {line}" for line in advice(certificate, tally))
        parts += map(_filled, [reading(certificate, tally), *advised])
        took = f"The certificate took {certificate.passes} passes over these data."
        parts += [str(certificate), took]
    return "\n".join(parts)


def _filled(sentence: str) -> str:
    return textwrap.fill(sentence, 110, subsequent_indent="  ")
