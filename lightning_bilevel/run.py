"""The state of a run: its exact steps, the names of its points, and their certificates."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel import checks
from lightning_bilevel.core.certificate import Certificate, certify
from lightning_bilevel.core.curvature import reachable_envelope
from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.distributed import check_parts, check_same_point, shared_problem
from lightning_bilevel.exact import BatchProblem, ModuleFunctions, functions_of, problem_of
from lightning_bilevel.logging import is_logged, publish_step
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo, StreamInfo

__all__ = ["RESTORED", "Run"]

Point = tuple[Tensor, Tensor]
# The name of a point that `restore` has written into the module.
RESTORED = "an earlier point of the run, which was restored"
# The accuracy of the proximal point in a certificate after mini-batches, as in the paper.
_MINI_BATCH_TOLERANCE = 1e-3


@dataclass
class Run:
    """The state of a module's run. Each run has a new one, so nothing is left of an earlier run.

    Attributes:
        solver: The solver.
        start: The gradients at the start of the run. Certificates compare later ones with them.
        step: The record of the last step.
        functions: The losses as functions of flat vectors.
        current: The problem on the latest batch.
        whole: The problem on all data, in a run on a growing sample; None otherwise.
        watched: Whether a callback monitors a number of the steps.
        last: The weights that the run goes on from, if :meth:`BilevelMixin.restore` has written
            earlier ones into the module.
        multiplier: The multiplier of the restored point; None is the solver's.
        shown: Which point the module shows, in words, if it is not the last iterate.
        stamp: The norms of the parameters when the last epoch ended. Others afterwards tell that
            somebody else has written to them, as callbacks that average weights do.
        seconds: The time that certificates have taken.
        certificate: The latest certificate, with what was asked, the point and the iteration. It is
            returned again for the same question at the same point.
    """

    solver: BilevelOptimizer
    start: Start | None = None
    step: StepInfo | None = None
    functions: ModuleFunctions | None = None
    current: BatchProblem | None = None
    whole: BatchProblem | None = None
    watched: bool = False
    last: dict[str, Any] | None = None
    multiplier: float | None = None
    shown: str = ""
    stamp: Tensor | None = None
    seconds: float = 0.0
    certificate: tuple[Any, Point, int, Certificate] | None = None

    def training_step(self, module: Any, batch: Any) -> None:
        """Do one outer iteration."""
        current = self.current
        if current is None or not current.is_of(batch):
            current = self._next(module, batch)
        # Lightning counts only steps through its own wrapper of the optimizer.
        info: StepInfo = module.optimizers().step(problem=current.problem)
        self.has_moved(info)
        if self.functions is not None and self.functions.copies:
            self.functions.update_buffers(current.part, shared=current.problem.reduce is not None)
        trainer = module.trainer
        if logged := is_logged(trainer, info.iteration):
            check_same_point(trainer, module._declared().parameters, info.iteration)
        if logged or self.watched:
            publish_step(trainer, info, logged=logged)

    def epoch_end(self, module: Any) -> None:
        """Look at an epoch that has ended."""
        declared = module._declared()
        checks.check_epoch(type(module).__name__, self.solver, declared)
        self.stamp = declared.norms()
        if self.step is not None:
            publish_step(module.trainer, self.step, logged=False)

    def _next(self, module: Any, batch: Any) -> BatchProblem:
        """Return the problem on another batch: the first one, or a sample that has grown."""
        trainer = module.trainer
        sample: Any = getattr(trainer.train_dataloader, "sample", None)
        before = self.current
        if before is None:
            checks.check_optimizer(module, module.optimizers())
            monitors = [str(getattr(callback, "monitor", "")) for callback in trainer.callbacks]
            self.watched = any(monitor.startswith("bilevel/") for monitor in monitors)
            if sample is not None:
                # The checks of the first problem are of all data.
                self.whole = self.problem_on(module, sample.batch)
        if before is not None and not (sample and sample.begins):
            raise checks.other_data(type(module).__name__, self.solver)
        self.current = current = self.problem_on(module, batch)
        if self.whole is not None:
            current.problem.sampled_from(self.whole.problem, sample.share)
            if sample.begins:
                self.solver.problem_changed()
        return current

    def problem_on(self, module: Any, batch: Any) -> BatchProblem:
        """Return the problem on a batch, shared by all processes; the first one is checked."""
        for known in (self.current, self.whole):
            if known is not None and known.is_of(batch):
                return known
        checks.check_batch(type(module).__name__, batch)
        first = self.functions is None
        if first:
            self.functions = functions_of(module)
        make = partial(self.problem_of, module)
        problem, part = shared_problem(module, make, module._attached, batch)
        if first:
            point = module._declared().feasible_point()
            if part is not batch:
                check_parts(type(module).__name__, make(batch), problem, point)
            self._check(problem, *point)
        known = BatchProblem(batch, part, problem)
        self.current = self.current or known
        return known

    def _check(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> None:
        """Refuse losses that change from call to call; note the gradients at the start."""
        functions, words = self.functions, f"Or run on mini-batches: {checks.ON_MINI_BATCHES}."
        if functions is not None and functions.copies:
            with problem.uncounted():
                problem.upper(x, y)
                problem.at(x).value(y)
            functions.protect_written()
            if functions.copies:
                words = f"Nor may a loss depend on vectors of a spectral norm. {words}"
        try:
            start = problem.check(x, y)
        except NonFiniteError:
            raise
        except BilevelError as error:
            raise type(error)(f"{error} {words}") from error
        self.start = self.start or start

    def problem_of(self, module: Any, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g on a batch, in this process."""
        upper, lower = module._declared().levels
        functions = self.functions or functions_of(module)
        return problem_of(functions, batch, upper.feasible, lower.feasible)

    def problem_to_certify(self, module: Any, batch: Any) -> BilevelProblem:
        """Return the problem on a batch; None is all data, or the last batch."""
        known = self.whole or self.current if batch is None else self.problem_on(module, batch)
        if known is None:
            raise RuntimeError(
                f"`{type(module).__name__}.certify()` needs a training batch: call it after "
                "`Trainer.fit` in the same process, or give it one, `certify(batch=...)`."
            )
        return known.problem

    def has_moved(self, step: StepInfo) -> None:
        """Keep the record of a step, which goes on from whatever was written into the module."""
        self.step = step
        self.last = self.multiplier = self.stamp = None
        self.shown = ""

    def point_name(self, norms: Tensor) -> str:
        """Name the point in the module; the name is empty before the first iteration.

        Args:
            norms: Those of the parameters now.
        """
        iterations = self.solver.progress.iterations
        if self.shown or iterations == 0:
            return self.shown
        if self.stamp is not None and not torch.equal(self.stamp, norms.to(self.stamp)):
            return f"weights that were written after iteration {iterations}, such as an average"
        return f"the last iterate, iteration {iterations}"

    def certify(
        self,
        module: Any,
        batch: Any,
        envelope: Envelope | None,
        tolerance: float | None,
        proved: bool,
        sample: bool,
        batches: int,
        passes: int,
    ) -> Certificate | None:
        """Return what :meth:`BilevelMixin.certify` returns, in either mode."""
        declared, stream = module._declared(), module.mini_batches
        if stream is not None and module.batch_gradients is not None:
            return None
        # Monitors look at a sample: their curve needs one rho from beginning to end.
        reachable = stream is not None and envelope is None and not sample
        reachable = reachable and module.envelope != declared.envelope
        envelope = envelope or module.envelope
        if envelope is None:
            return None
        iteration = 0 if self.step is None else self.step.iteration
        point, multiplier = module.point, self.multiplier
        if stream is None:
            problem, data = self.problem_to_certify(module, batch), ""
            name = self.point_name(declared.norms())
            multiplier = self.solver.multiplier if multiplier is None else multiplier
        else:
            problem, data = stream.evaluated(batch, sample, batches)
            name = self.shown or f"the last iterate, step {iteration}"
            tracked = declared.method is not None and declared.method.envelope is not None
            if multiplier is None and tracked and isinstance(self.step, StreamInfo):
                multiplier = float(self.step.multiplier)
        if proved:
            kept = self.solver.proved
            if kept is None:
                raise MisconfigurationException(
                    f"`{type(module).__name__}.certify(proved=True)` has no point to certify: "
                    f"{self.solver.unproved}."
                )
            # Its bounds are those of the solver's own relaxation.
            name = str(kept) if envelope == self.solver.envelope else kept.name
            point, multiplier, iteration = (kept.x, kept.y), kept.multiplier, 0
        with nullcontext() if stream is None else stream.evaluating():
            return self._certify(
                problem,
                point,
                envelope,
                iteration,
                reachable=reachable,
                multiplier=multiplier,
                tolerance=tolerance,
                qualification=declared.qualification,
                kinks=declared.kinks(),
                evaluated_on=data,
                point=name,
                passes=None if stream is None else passes,
            )

    def _certify(
        self,
        problem: BilevelProblem,
        point: Point,
        envelope: Envelope,
        iteration: int,
        /,
        *,
        reachable: bool = False,
        **options: Any,
    ) -> Certificate:
        """Return the certificate of a point.

        Args:
            problem: f and g.
            point: x and y.
            envelope: The Moreau envelope.
            iteration: The iteration of the run.
            reachable: Whether an envelope whose proximal point takes too many passes gives way to
                one with a smaller rho.
            options: Those of :func:`~lightning_bilevel.core.certificate.certify`.
        """
        asked = problem, envelope, reachable, dict(options)
        if self.certificate is not None:
            known, where, _, certificate = self.certificate
            if known == asked and all(map(torch.equal, where, point)):
                return certificate
        limit = options["passes"]
        if limit is not None and options["tolerance"] is None:
            options["tolerance"] = _MINI_BATCH_TOLERANCE
        began = time.perf_counter()
        found, searched = envelope, 0
        if reachable:
            calls = problem.calls
            with problem.uncounted():
                found = reachable_envelope(problem, *point, envelope)
                searched = (problem.calls - calls).passes
        if found != envelope:
            # The multiplier of the solver belongs to its own envelope.
            options["multiplier"] = None
            options["evaluated_on"] += (
                f"; rho = {found.rho:.2g} from the curvature of g and delta = {found.delta:.2g} of "
                f"the same meaning, because the solver's rho = {envelope.rho:g} would take too "
                "many passes"
            )
        certificate = certify(problem, *point, found, start=self.start, **options)
        words = certificate.evaluated_on
        if limit is not None and certificate.tolerance > options["tolerance"]:
            error = certificate.tolerance**2 / (2 * found.modulus)
            words += (
                f"; z to {certificate.tolerance:.1e} after {limit} passes, so R may be larger by "
                f"{error:.1e}"
            )
        certificate = replace(certificate, passes=searched + certificate.passes, evaluated_on=words)
        # All processes must hold the same time: it decides whether they evaluate the next
        # certificate, which they do together.
        self.seconds += problem.mean_over_ranks(time.perf_counter() - began, point[0])
        self.certificate = asked, point, iteration, certificate
        return certificate

    def __getstate__(self) -> dict[str, Any]:
        # Functions of a batch cannot be pickled. They are made again for the next batch.
        dropped = ("functions", "current", "whole", "stamp", "certificate")
        return {**vars(self), **dict.fromkeys(dropped)}
