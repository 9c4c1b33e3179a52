"""The base classes that make a LightningModule a bilevel problem."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.problem import Start
from lightning_bilevel.mini_batches import MiniBatches
from lightning_bilevel.optimizers import default_optimizers
from lightning_bilevel.plugin.batches import BatchProblem, warn_of_sample
from lightning_bilevel.plugin.certified import CertifiedPoints
from lightning_bilevel.plugin.certifier import Certifier
from lightning_bilevel.plugin.checkpoints import KEY, check_record, leave_out_partials, record_of
from lightning_bilevel.plugin.checks import (
    check_all_declared,
    check_automatic,
    check_optimizer,
    check_precision,
    check_trainer,
)
from lightning_bilevel.plugin.loggers import is_logged, publish_step
from lightning_bilevel.plugin.processes import check_same_point
from lightning_bilevel.plugin.run import RESTORED, Run
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.solvers.record import StepInfo

__all__ = ["BilevelMixin", "BilevelModule", "IVSPMixin"]


class BilevelMixin(CertifiedPoints):
    r"""Makes a LightningModule a bilevel problem that ``Trainer.fit`` solves.

    .. math:: \min_{x, y} f(x, y) \quad\text{s.t.}\quad y \in \arg\min_u g(x, u)

    Inherit from it *before* ``LightningModule``, call :meth:`declare` at the end of ``__init__``,
    and define

    - ``upper_loss(batch)``: f, given the batch of the upper level;
    - ``lower_loss(batch)``: g, given the batch of the lower level;
    - optionally ``lower_features(batch)``: the part of g that depends on x alone, evaluated once
      per x. Then g is ``lower_loss(batch, features)``, which must use no upper-level parameter;
    - or ``lower_outputs(batch)``: the part of g that depends on y alone. It is not evaluated again
      when the same y returns, also at another x. Then g is ``lower_loss(batch, outputs)``, which
      must use no lower-level parameter;
    - optionally ``batch_gradients(step, lower, upper)``: adds the gradients of a mini-batch whose
      lower level is solved anew on each batch, and returns its
      :class:`~lightning_bilevel.stochastic.step.Numbers`. Then x alone has an optimiser;
    - optionally ``constraints(batch)``: a list of scalars that are to be at most 0, beside the
      lower level, given the batch of the upper level. IVSP takes them. Each is a mean over the
      samples of the batch, as a loss is, or does not depend on them.

    A training batch is ``{"upper": ..., "lower": ...}``, each a batch or a list of chunks
    (:class:`~lightning_bilevel.core.chunks.Chunks`). One batch is one outer iteration. As long as
    the batch has the same values, known values at the current point are reused.

    What ``configure_optimizers`` returns makes the mode. A bilevel solver, the default, needs the
    same data in each step. Two torch optimisers, one per level, run on mini-batches by a method of
    :mod:`lightning_bilevel.stochastic`: loaders of any kind and length, dropout, augmentation,
    batch normalisation, ``precision="bf16-mixed"``, and over several processes the usual
    distributed samplers.

    Example:
        >>> class Shift(IVSPMixin, LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.target = nn.Parameter(torch.zeros(1))
        ...         self.model = nn.Linear(1, 1)
        ...         self.declare(upper=self.target, lower=self.model)
        ...     def upper_loss(self, batch):
        ...         return nn.functional.mse_loss(self.model(batch), batch)
        ...     def lower_loss(self, batch):
        ...         return nn.functional.mse_loss(self.model(batch), self.target.expand_as(batch))
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if LightningModule in order and order.index(LightningModule) < order.index(BilevelMixin):
            raise TypeError(
                f"`class {cls.__name__}` names LightningModule before the bilevel mixin, whose "
                "training step would then never run: write the mixin first, or inherit from "
                "BilevelModule."
            )

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Do one outer iteration, or one step on a mini-batch."""
        if self.mini_batches is not None:
            self.last_step = self.mini_batches.training_step(self, batch, batch_idx)
            self._run.has_moved()
            return
        trainer: Any = self._module().trainer
        # Lightning counts only steps through its own wrapper of the optimizer.
        optimizer: Any = self._module().optimizers()
        if self.last_step is None:
            check_optimizer(self._module(), optimizer)
        run = self._run
        current = run.batches.next_problem(
            type(self).__name__, run.solver, batch, self._make_problem, trainer.train_dataloader
        )
        info: StepInfo = optimizer.step(problem=current.problem)
        self._update_buffers(current)
        self.last_step = info
        run.has_moved()
        if is_logged(trainer, info.iteration):
            check_same_point(trainer, self._declared().parameters, info.iteration)
        publish_step(trainer, info)

    def configure_callbacks(self) -> Any:
        """Refuse what Lightning would refuse with another advice; it asks for callbacks before."""
        trainer: Any = self._module()._trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            check_automatic(self._module(), trainer)
        given = super().configure_callbacks()  # type: ignore[misc]
        if self._mini_batches is None or trainer is None or trainer.state.fn == TrainerFn.FITTING:
            self._mini_batches = MiniBatches()
        return [*(given if isinstance(given, (list, tuple)) else [given]), self._mini_batches]

    def on_fit_end(self) -> None:
        """Warn of a run that ends on a sample."""
        if self.last_step is not None:
            warn_of_sample(self._module().trainer.train_dataloader)
        super().on_fit_end()  # type: ignore[misc]

    def on_train_epoch_end(self) -> None:
        """Refuse an epoch without iterations, and parameters that were frozen in its course."""
        if self.mini_batches is not None:
            super().on_train_epoch_end()  # type: ignore[misc]
            return
        if self._run.solver.progress.iterations == 0:
            raise MisconfigurationException(
                f"`{type(self).__name__}` made no outer iteration in a whole epoch: its loaders "
                "must yield batches, and its `training_step` must call "
                "`super().training_step(batch, batch_idx)` or be left out."
            )
        if self._declared().has_changed():
            raise MisconfigurationException(
                f"a parameter of `{type(self).__name__}` was frozen or unfrozen in the middle of a "
                "run, whose vectors x and y have a fixed length: do it before `Trainer.fit`."
            )
        self._run.stamp = self._declared().norms()
        super().on_train_epoch_end()  # type: ignore[misc]

    def configure_optimizers(self) -> Any:
        """Make the solver, or the torch optimisers of a run on mini-batches."""
        declared = self._declared()
        module = self._module()
        if declared.method is not None or any(declared.optimizers):
            declared.resolve()
            return default_optimizers(declared)
        check_precision(module.trainer, self._run.solver)
        check_trainer(module.trainer)
        declared.resolve()
        check_all_declared(module, declared)
        solver = declared.new_solver()
        self._run = Run(solver, Certifier(self._saved_start))
        self._saved_start = None
        self.last_step = None
        if module._compiler_ctx is not None:
            # Lightning compiles the training step of a compiled module. Here that is the solver,
            # whose decisions would take minutes to trace. `forward` stays compiled.
            vars(module).pop("training_step", None)
        return solver

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write into the checkpoint which solver and which problem it belongs to."""
        if self.mini_batches is not None:
            checkpoint[KEY] = {"mini_batches": True, "last": self._run.last}
            super().on_save_checkpoint(checkpoint)  # type: ignore[misc]
            return
        run = self._run
        record = record_of(run.solver)
        if run.certifier.start is not None:
            record["start"] = asdict(run.certifier.start)
        if run.last is not None:
            record["last"] = run.last
        checkpoint[KEY] = record
        leave_out_partials(type(self).__name__, checkpoint)
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another problem, and load float64 weights as float64.

        The Trainer would convert the module only after it has loaded the weights.
        """
        declared = self._declared()
        module = self._module()
        trainer = module._trainer
        resumes = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        by_torch = MiniBatches.__qualname__ in checkpoint.get("callbacks", {})
        if by_torch or checkpoint.get(KEY, {}).get("mini_batches"):
            if trainer is not None and trainer.precision == "64-true":
                module.double()
            if resumes:
                checkpoint["state_dict"] |= checkpoint.get(KEY, {}).get("last") or {}
            super().on_load_checkpoint(checkpoint)  # type: ignore[misc]
            return
        declared.resolve()
        solver = declared.new_solver()
        if trainer is not None:
            check_record(type(self).__name__, checkpoint, solver, resumes=resumes)
            if trainer.precision == "64-true":
                module.double()
        record = checkpoint.get(KEY, {})
        last = record.get("last")
        if resumes:
            # The run is made later, when it starts, and takes this over.
            self._saved_start = _start_of(record)
            checkpoint["state_dict"] |= last or {}
        else:
            self._run.certifier.start = _start_of(record)
            self._run.shown = "" if last is None else RESTORED
            states = checkpoint.get("optimizer_states")
            if states and record.get("solver") == type(solver).__name__:
                solver.load_state_dict(states[0])
                self._run.solver = solver
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]

    def _has_own_optimizers(self) -> bool:
        return type(self).configure_optimizers is not BilevelMixin.configure_optimizers

    def _update_buffers(self, current: BatchProblem) -> None:
        """Update the buffers that evaluations write to at the accepted point."""
        buffers = self._run.buffers
        if buffers.live:
            buffers.follow(
                partial(self._losses, current.part), shared=current.problem.reduce is not None
            )
            if buffers.matter:
                # The losses are other functions now: known values at the point are out of date.
                self._run.batches.forget_points()

    def _losses(self, batch: Any) -> float:
        """Return the sum of both losses at the module's own parameters and buffers."""
        total = 0.0
        split = self.lower_features or self.lower_outputs
        for part in as_chunks(batch["lower"]).batches:
            extra = [] if split is None else [split(part)]
            total += float(self.lower_loss(part, *extra).detach())
        for part in as_chunks(batch["upper"]).batches:
            total += float(self.upper_loss(part).detach())
        return total


def _start_of(record: dict[str, Any]) -> Start | None:
    return Start(**record["start"]) if "start" in record else None


# Lightning looks up the signature of `training_step` at every step. Here it finds it made already,
# which saves a hundredth of a cheap iteration.
vars(BilevelMixin)["training_step"].__signature__ = inspect.signature(BilevelMixin.training_step)


class IVSPMixin(BilevelMixin):
    """:class:`BilevelMixin` with IVSP as the solver unless another one is declared."""

    default_solver: ClassVar[SolverCallable | None] = IVSP


class BilevelModule(BilevelMixin, LightningModule):
    """A LightningModule with :class:`BilevelMixin`, with the bases in the right order."""
