"""The state of a run: its exact steps, which point the module shows, and the latest certificate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate, certify
from lightning_bilevel.core.curvature import reachable_envelope
from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.declaration import check_batch
from lightning_bilevel.distributed import check_parts, check_same_point, parts_of, total
from lightning_bilevel.functional import BatchProblem, ModuleFunctions, problem_of
from lightning_bilevel.logging import is_logged, publish_step
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo, StreamInfo

Point = tuple[Tensor, Tensor]
# The name of a point that `restore` has written into the module.
RESTORED = "an earlier point of the run, which was restored"
# How to run on mini-batches, for messages of exact runs.
_ON_MINI_BATCHES = (
    "return two torch optimisers, one per level, from `configure_optimizers`, and say `method=` in "
    "place of `solver=`"
)
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
        stamp: The norm of the point when the last epoch ended. Another one afterwards tells that
            somebody else has written to it, as callbacks that average weights do.
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
    stamp: float | None = None
    seconds: float = 0.0
    certificate: tuple[Any, Point, int, Certificate] | None = None

    def training_step(self, module: Any, batch: Any) -> None:
        """Do one outer iteration."""
        current = self.current
        if self.step is None or current is None or not current.is_of(batch):
            current = self._next(module, batch)
        # Lightning counts only steps through its own wrapper of the optimizer.
        info: StepInfo = module.optimizers().step(problem=current.problem)
        self.has_moved(info)
        if self.functions is not None and self.functions.copies:
            self.functions.update_buffers(current.part, shared=current.problem.reduce is not None)
        trainer = module.trainer
        logged = is_logged(trainer, info.iteration)
        if logged and trainer.world_size > 1:
            check_same_point(module._declared().parameters, info.iteration)
        if logged or self.watched:
            publish_step(trainer, info, logged=logged)

    def has_moved(self, step: StepInfo) -> None:
        """Keep the record of a step, which goes on from whatever was written into the module."""
        self.step = step
        self.last = self.multiplier = self.stamp = None
        self.shown = ""

    def epoch_end(self, module: Any) -> None:
        """Refuse an epoch without a step; show the last numbers to whoever monitors."""
        if self.solver.progress.iterations == 0:
            raise MisconfigurationException(
                f"`{type(module).__name__}` made no outer iteration in a whole epoch: its loaders "
                "must yield batches, and an own `training_step` must call "
                "`super().training_step(batch, batch_idx)`."
            )
        if self.step is not None:
            publish_step(module.trainer, self.step, logged=False)

    def _next(self, module: Any, batch: Any) -> BatchProblem:
        """Return the problem of the first step, or on another batch: a sample that has grown."""
        trainer, name = module.trainer, type(module).__name__
        sample: Any = getattr(trainer.train_dataloader, "sample", None)
        if self.step is None:
            check_optimizer(module, module.optimizers())
            monitors = [str(getattr(callback, "monitor", "")) for callback in trainer.callbacks]
            self.watched = any(monitor.startswith("bilevel/") for monitor in monitors)
            # The checks of the first problem are of all data.
            self.whole = None if sample is None else self.problem_on(module, sample.batch)
        elif not (sample and sample.begins):
            raise MisconfigurationException(
                f"`{name}` was given a batch with other values than the one before, as "
                "mini-batches, shuffling and augmentation make them. "
                f"{type(self.solver).__name__} needs the same data in each step: give it all of "
                f"them, by a FullBatchDataModule; or run on mini-batches: {_ON_MINI_BATCHES}."
            )
        self.current = current = self.problem_on(module, batch)
        if self.whole is not None:
            current.problem.sampled_from(self.whole.problem, sample.share)
            if sample.begins:
                self.solver.problem_changed()
        return current

    def problem_on(self, module: Any, batch: Any) -> BatchProblem:
        """Return the problem on a batch, shared by all processes; the first one is checked.

        None is all data of a growing sample, or the latest batch.
        """
        for known in (self.whole, self.current):
            if known is not None and (batch is None or known.is_of(batch)):
                return known
        call = type(module).__name__
        if batch is None:
            raise RuntimeError(
                f"`{call}.certify()` needs a training batch: call it after `Trainer.fit` in the "
                "same process, or give it one, `certify(batch=...)`."
            )
        first = self.functions is None
        self.functions = self.functions or module_functions(module)
        trainer, part, problem = module._attached, batch, self.problem_of(module, batch)
        levels = zip(module._declared().levels, module.point, strict=True)
        x, y = (level.feasible.project(vector) for level, vector in levels)
        if trainer is not None and trainer.world_size > 1:
            # Distributed samplers repeat or drop samples: the parts are cut here.
            ranks = trainer.global_rank, trainer.world_size
            part, upper, lower = parts_of(module, batch, *ranks)
            whole, shared = problem, self.problem_of(module, part)
            problem = shared.on_this_rank(upper, lower, total)
            if first:
                check_parts(call, whole, problem, (x, y))
        if first:
            self._check(self.functions, problem, (x, y))
        known = BatchProblem(batch, part, problem)
        self.current = self.current or known
        return known

    def _check(self, functions: ModuleFunctions, problem: BilevelProblem, point: Point) -> None:
        """Refuse losses that change from call to call; note the gradients at the start."""
        if functions.copies:
            with problem.uncounted():
                problem.upper(*point)
                problem.at(point[0]).value(point[1])
            functions.protect_written()
        try:
            start = problem.check(*point)
        except NonFiniteError:
            raise
        except BilevelError as error:
            raise type(error)(
                f"{error} Nor may a loss depend on vectors of a spectral norm. Or run on "
                f"mini-batches: {_ON_MINI_BATCHES}."
            ) from error
        self.start = self.start or start

    def problem_of(self, module: Any, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g on a batch, in this process."""
        check_batch(type(module).__name__, batch)
        upper, lower = module._declared().levels
        functions = self.functions or module_functions(module)
        return problem_of(functions, batch, upper.feasible, lower.feasible)

    def shown_point(self, module: Any) -> tuple[Point, float | None, str]:
        """Return the point in the module, its multiplier if the method has one, and its name."""
        point, multiplier, step = module.point, self.multiplier, self.step
        method = module._declared().method
        if multiplier is None and not isinstance(step, StreamInfo):
            multiplier = self.solver.multiplier
        elif isinstance(step, StreamInfo) and method is not None and method.envelope is not None:
            multiplier = float(step.multiplier) if multiplier is None else multiplier
        iteration = self.solver.progress.iterations if step is None else step.iteration
        name = self.shown or (f"the last iterate, iteration {iteration}" if iteration else "")
        written = self.stamp is not None and not math.isclose(
            self.stamp, size_of(module._declared().parameters)
        )
        if written and not self.shown:
            name = f"weights that were written after iteration {iteration}, such as an average"
        return point, multiplier, name

    def proved_point(self, module: Any, envelope: Envelope) -> tuple[Point, float | None, str]:
        """Return the point of the theorem likewise, or refuse a run that has none."""
        kept = self.solver.proved
        if kept is None:
            raise MisconfigurationException(
                f"`{type(module).__name__}.certify(proved=True)` has no point to certify: "
                f"{self.solver.unproved}."
            )
        # Its bounds are those of the solver's own relaxation.
        name = str(kept) if envelope == self.solver.envelope else kept.name
        return (kept.x, kept.y), kept.multiplier, name

    def certify(
        self,
        problem: BilevelProblem,
        point: Point,
        envelope: Envelope,
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
            reachable: Whether an envelope whose proximal point takes too many passes gives way to
                one with a smaller rho.
            options: Those of :func:`~lightning_bilevel.core.certificate.certify`.
        """
        asked = problem, envelope, reachable, dict(options)
        if self.certificate is not None:
            known, where, _, certificate = self.certificate
            if known == asked and all(map(torch.equal, where, point)):
                return certificate
        began, before, found = time.perf_counter(), problem.calls, envelope
        words, limit = options["evaluated_on"], options["passes"]
        if limit is not None:
            options["tolerance"] = options["tolerance"] or _MINI_BATCH_TOLERANCE
        if reachable:
            found = reachable_envelope(problem, *point, envelope)
        searched = (problem.calls - before).passes
        if found != envelope:
            # The multiplier of the solver belongs to its own envelope.
            options["multiplier"] = None
            words += (
                f"; rho = {found.rho:.2g} from the curvature of g and delta = {found.delta:.2g} of "
                f"the same meaning, because the solver's rho = {envelope.rho:g} would take too "
                "many passes"
            )
        certificate = certify(problem, *point, found, start=self.start, **options)
        reached = certificate.tolerance
        if limit is not None and reached > options["tolerance"]:
            error = reached**2 / (2 * found.modulus)
            words += f"; z to {reached:.1e} after {limit} passes, so R may be larger by {error:.1e}"
        certificate = replace(certificate, passes=searched + certificate.passes, evaluated_on=words)
        # All processes must hold the same time: it decides whether they evaluate the next
        # certificate, which they do together.
        self.seconds += problem.mean_over_ranks(time.perf_counter() - began, point[0])
        iteration = 0 if self.step is None else self.step.iteration
        self.certificate = asked, point, iteration, certificate
        return certificate

    def __getstate__(self) -> dict[str, Any]:
        # Functions of a batch cannot be pickled. They are made again for the next batch.
        dropped = ("functions", "current", "whole", "certificate")
        return {**vars(self), **dict.fromkeys(dropped)}


def module_functions(module: Any) -> ModuleFunctions:
    """Return the losses of a bilevel module, with all its buffers protected."""
    upper, lower = module._declared().levels
    return ModuleFunctions(module, upper.parameters, lower.parameters, module.buffers())


def check_automatic(trainer: Any) -> None:
    """Refuse what works in automatic optimisation only; Lightning would advise to switch to it."""
    clip, accumulated = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    if clip or accumulated != 1:
        raise MisconfigurationException(
            f"`Trainer(gradient_clip_val={clip}, accumulate_grad_batches={accumulated})` does not "
            "reach the steps of a bilevel solver. On mini-batches use "
            "`declare(gradient_clip_val=..., accumulate=...)`; on all data let the loader yield "
            "the larger batch, as `Chunks` if it does not fit into memory."
        )


def check_trainer(trainer: Any, solver: str) -> None:
    """Refuse strategies and precisions that do not work with an exact run."""
    # By type: DeepSpeed's strategy is a DDPStrategy to isinstance.
    strategy = type(trainer.strategy)
    if not issubclass(strategy, SingleDeviceStrategy) and strategy is not DDPStrategy:
        raise MisconfigurationException(
            f"`Trainer(strategy={strategy.__name__})` is not supported: a solver needs whole "
            'vectors x and y, which this strategy cuts into pieces. Use `strategy="ddp"`, and '
            "`Chunks` for a batch that is larger than memory."
        )
    if trainer.precision not in ("32-true", "64-true"):
        raise MisconfigurationException(
            f"`Trainer(precision={trainer.precision!r})` is not supported with {solver} on all "
            "data: small differences of large numbers would be lost. Use 32-true or 64-true."
        )


def check_optimizer(module: LightningModule, optimizer: Any) -> None:
    """Refuse automatic optimisation, and an optimizer (in Lightning's wrapper) of another kind."""
    solver = getattr(optimizer, "optimizer", None)
    if module.automatic_optimization or not isinstance(solver, BilevelOptimizer):
        raise MisconfigurationException(
            f"`{type(module).__name__}` must leave `automatic_optimization` at False, and its "
            "`configure_optimizers` must return the solver of `super().configure_optimizers()`, or "
            "a torch optimiser per level; then an own `configure_callbacks` must add to "
            "`super().configure_callbacks()`."
        )


def size_of(parameters: Iterable[Tensor]) -> float:
    """Return the norm of all parameters together, without a copy of them."""
    return float(torch.stack([p.detach().norm() for p in parameters]).norm())
