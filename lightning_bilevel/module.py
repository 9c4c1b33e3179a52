"""The base classes that make a LightningModule a bilevel problem."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_bilevel.checkpoint import KEY, Record, check_record, leave_out_partials
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.qualification import Qualification
from lightning_bilevel.declaration import Declaration, Declared, Level, Sets, check_all_declared
from lightning_bilevel.mini_batches import MiniBatches, default_optimizers
from lightning_bilevel.run import RESTORED, Run, check_automatic, check_trainer, size_of
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.parameters import blocks, flat
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.theorem import TheoremPoint
from lightning_bilevel.stochastic.step import Method, Options


class BilevelMixin(LightningModule):
    r"""Makes a LightningModule a bilevel problem that ``Trainer.fit`` solves.

    .. math:: \min_{x, y} f(x, y) \quad\text{s.t.}\quad y \in \arg\min_u g(x, u)

    Inherit from it, before any other module, call :meth:`declare` at the end of ``__init__``, and
    define

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
        >>> class Shift(BilevelMixin, LightningModule):
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

    lower_features: Callable[..., Any] | None = None
    lower_outputs: Callable[..., Any] | None = None
    # Adds the gradients of a mini-batch, where the lower level is solved anew on each.
    batch_gradients: Callable[..., Any] | None = None
    # The gradient steps on the lower level in a step on a mini-batch.
    inner_iterations: int = 1
    _mini_batches: MiniBatches | None = None
    _declaration: Declaration | None = None
    # Whether the next run goes on from a checkpoint that has been loaded.
    _resumes: bool = False
    _run: Run

    def declare(
        self,
        *,
        upper: Declared,
        lower: Declared,
        upper_set: Sets | None = None,
        lower_set: Sets | None = None,
        solver: SolverCallable | None = None,
        upper_unit: float = 1.0,
        lower_unit: float = 1.0,
        envelope: Envelope | None = None,
        qualification: Qualification = "not known",
        method: Method | None = None,
        upper_optimizer: OptimizerCallable | None = None,
        lower_optimizer: OptimizerCallable | None = None,
        upper_scheduler: LRSchedulerCallable | None = None,
        lower_scheduler: LRSchedulerCallable | None = None,
        gradient_clip_val: float | tuple[float | None, float | None] | None = None,
        accumulate: int = 1,
        skip_nonfinite: bool = False,
    ) -> None:
        r"""Say what belongs to which level.

        Args:
            upper: The upper-level variables x: a module, a parameter, or several of them.
            lower: The lower-level variables y, likewise.
            upper_set: The set of x, or a list with one set for each of the several.
            lower_set: The set of y, likewise.
            solver: Makes the solver from parameter groups: a solver class, or a partial of one.
                Where there is neither a solver nor a method it is IVSP.
            upper_unit: The solver works in u with x = upper_unit * u, which gives the level steps
                :math:`\text{unit}^2` times as long. The sets, the module and the certificate stay
                in x.
            lower_unit: Likewise for y. The Moreau term is then measured in that unit: rho acts as
                rho * lower_unit**2.
            envelope: The Moreau envelope (rho, sigma, delta) of the certificate, for solvers that
                have none.
            qualification: What is known about the constraint qualification of this problem: a
                :class:`~lightning_bilevel.core.qualification.Condition` such as
                ``StrictlyConvex()``, or words such as "holds: ..." or "fails: ..."; or a function
                of the envelope that returns words. The certificate shows it.
            method: The method of a run on mini-batches, of
                :mod:`lightning_bilevel.stochastic`. Its optimisers are those of
                ``configure_optimizers``, or else the next two.
            upper_optimizer: Makes the torch optimiser of x from its parameters; None is AdamW with
                a rate of 1e-2 and no weight decay.
            lower_optimizer: That of y; None is AdamW with a rate of 1e-4, a tenth of the usual one.
            upper_scheduler: Makes the scheduler of x's optimiser, which steps at every step.
            lower_scheduler: That of y's.
            gradient_clip_val: Such a run clips the gradient of a level to this norm, one number or
                one per level.
            accumulate: The batches of one of its steps.
            skip_nonfinite: Whether it leaves out a batch that is not finite, and ends after ten in
                a row. It costs a device sync per step.
        """
        call = f"{type(self).__name__}.declare"
        clip: Any = gradient_clip_val
        self._declaration = declared = Declaration(
            Level(call, "upper", upper, upper_set, upper_unit),
            Level(call, "lower", lower, lower_set, lower_unit),
            solver,
            envelope,
            qualification,
            method,
            Options(
                clip=tuple(clip) if isinstance(clip, (tuple, list)) else (clip, clip),
                accumulate=accumulate,
                skip_nonfinite=skip_nonfinite,
            ),
            (upper_optimizer, lower_optimizer),
            (upper_scheduler, lower_scheduler),
        )
        # This solver refuses bad arguments before any data are loaded. A run builds its own solver
        # when it starts.
        self._run = Run(declared.new_solver())
        self.automatic_optimization = False

    def upper_loss(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return f on the batch of the upper level."""
        raise NotImplementedError(f"`{type(self).__name__}` must define `upper_loss(batch)`, f.")

    def lower_loss(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return g on the batch of the lower level.

        With :attr:`lower_features` or :attr:`lower_outputs`, their result is the second argument.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must define `lower_loss(batch)`, g.")

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Do one outer iteration, or one step on a mini-batch."""
        stream = self.mini_batches
        if stream is None:
            self._run.training_step(self, batch)
        else:
            self._run.has_moved(stream.training_step(self, batch, batch_idx))

    @property
    def last_step(self) -> StepInfo | None:
        """The record of the last step; None before the first one."""
        return self._run.step

    @property
    def mini_batches(self) -> MiniBatches | None:
        """The run on mini-batches by torch optimisers; None in any other run."""
        run = self._mini_batches
        return run if run is not None and run.step is not None else None

    @property
    def on_mini_batches(self) -> bool:
        """Whether the run is on mini-batches. Its certificate is then of all data."""
        return self.mini_batches is not None

    @property
    def proved(self) -> TheoremPoint | None:
        """The point of the run that the convergence theorem speaks of, if the solver keeps it.

        ``certify(proved=True)`` certifies it. It stays where it is: ``restore((p.x, p.y),
        p.multiplier)`` makes a point p the result of the run.
        """
        return self._run.solver.proved

    @property
    def written_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that training writes to, such as running statistics, by name."""
        functions = self._run.functions
        written = {id(buffer) for buffer in (functions.buffers if functions else ())}
        return {n: b.detach().clone() for n, b in self.named_buffers() if id(b) in written}

    @property
    def evaluation_time(self) -> float:
        """Seconds that certificates have taken since the start of fit."""
        return self._run.seconds

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope of the certificate, in y: the solver's, or else the declared one."""
        declared = self._declared()
        method = declared.method
        return (self._run.solver if method is None else method).envelope or declared.envelope

    @property
    def point(self) -> tuple[Tensor, Tensor]:
        """The current x and y, each as a new flat vector."""
        return flat(self.parameter_groups())

    @point.setter
    def point(self, point: tuple[Tensor, Tensor]) -> None:
        with torch.no_grad():
            for parameter, block in blocks(self.parameter_groups(), *point):
                parameter.copy_(block)
        self._run.shown = "a point that was written into the module"

    def restore(
        self,
        point: tuple[Tensor, Tensor],
        multiplier: float,
        buffers: dict[str, Tensor] | None = None,
    ) -> None:
        """Write an earlier point of the run into the module, as its result.

        A checkpoint that is saved afterwards still goes on from the last point of the run.

        Args:
            point: x and y.
            multiplier: The multiplier of that point.
            buffers: The buffers of that point, see :attr:`written_buffers`.
        """
        run, (x, y) = self._run, self.point
        run.last = run.last or deepcopy(dict(self.state_dict()))
        self.point = point[0].to(x), point[1].to(y)
        run.multiplier, run.shown = multiplier, RESTORED
        own = dict(self.named_buffers())
        for name, buffer in (buffers or {}).items():
            own[name].copy_(buffer)

    def certify(
        self,
        *,
        batch: Any = None,
        envelope: Envelope | None = None,
        tolerance: float | None = None,
        proved: bool = False,
        sample: bool = False,
        batches: int = 1000,
        passes: int = 20,
    ) -> Certificate | None:
        """Return the certificate of the current point; None without an envelope.

        After a run on mini-batches f and g are evaluated in eval mode on all data, which the
        training loaders are asked for once more. Where the lower level is solved on each batch
        there is no certificate, because no y belongs to all data.

        Args:
            batch: The training batch to evaluate f and g on; None is the last one, and after a run
                on mini-batches or a growing sample all data.
            envelope: The Moreau envelope; None is the module's. After a run on mini-batches the rho
                of a solver such as StreamingIVSP is often so large that the proximal point takes
                hundreds of passes. Then None takes a smaller one, from the curvature of g, with a
                delta of the same meaning, and the certificate says so;
                ``envelope=module.envelope`` insists on the solver's.
            tolerance: The accuracy of the proximal point; None is 1e-9 in float64 and 1e-5 in
                float32, and after a run on mini-batches 1e-3.
            proved: Certify :attr:`proved`, the point of the theorem, instead of the current one.
            sample: On mini-batches: look at the first few batches of the run only, and leave the
                loaders alone, as monitors do in the middle of an epoch.
            batches: On mini-batches: the most batches of a level. More data are a sample, and the
                certificate says so.
            passes: On mini-batches: the most passes of g for the proximal point. If they do not
                suffice, the certificate says how accurate it is.
        """
        run, declared, stream = self._run, self._declared(), self.mini_batches
        wanted = envelope or self.envelope
        if wanted is None or (stream is not None and self.batch_gradients is not None):
            return None
        if stream is not None:
            problem, data = stream.evaluated(batch, sample, batches)
        else:
            problem, data = run.problem_on(self, batch).problem, ""
        found = run.proved_point(self, wanted) if proved else run.shown_point(self)
        point, multiplier, name = found
        # Monitors look at a sample: their curve needs one rho from beginning to end.
        fixed = envelope is not None or sample or wanted == declared.envelope
        with nullcontext() if stream is None else stream.evaluating():
            return run.certify(
                problem,
                point,
                wanted,
                reachable=stream is not None and not fixed,
                multiplier=multiplier,
                tolerance=tolerance,
                qualification=declared.qualification,
                kinks=declared.kinks(),
                evaluated_on=data,
                point=name,
                passes=None if stream is None else passes,
            )

    def may_evaluate(self, share: float) -> bool:
        """Compare the time of certificates so far with a share of the optimisation time.

        The first certificate is always allowed. So is one that is known already: it costs nothing.
        """
        run = self._run
        if run.step is None or run.certificate is None or run.certificate[2] == run.step.iteration:
            return run.step is not None
        return run.seconds <= share * run.step.optimization_time

    def bilevel_problem(self, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g on a batch ``{"upper": ..., "lower": ...}``, for flat x and y."""
        return self._run.problem_of(self, batch)

    def problem_on(self, batch: Any) -> BilevelProblem:
        """Return the problem on a training batch, as all processes share it."""
        return self._run.problem_on(self, batch).problem

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the two levels with their units, as a solver takes them."""
        return self._declared().groups()

    def configure_optimizers(self) -> Any:
        """Make the solver, or the torch optimisers of a run on mini-batches."""
        declared = self._declared()
        declared.resolve()
        if declared.on_mini_batches:
            return default_optimizers(declared)
        check_trainer(self.trainer, type(self._run.solver).__name__)
        solver = declared.new_solver()
        check_all_declared(self, declared)
        self._run, self._resumes = Run(solver, self._run.start if self._resumes else None), False
        # Lightning compiles the training step of a compiled module. Here that is the solver, whose
        # decisions would take minutes to trace. `forward` stays compiled.
        vars(self).pop("training_step", None)
        return solver

    def configure_callbacks(self) -> Any:
        """Bring along the mode of mini-batches, where `configure_optimizers` may ask for it."""
        trainer = self._attached
        given: Any = super().configure_callbacks()
        given = list(given) if isinstance(given, (list, tuple)) else [given]
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            # Lightning asks for callbacks before it checks this, with another advice.
            check_automatic(trainer)
            # An idle callback would cost a hundredth of a cheap iteration.
            made_by = getattr(self.configure_optimizers, "__func__", None)
            exact = made_by is BilevelMixin.configure_optimizers
            exact = exact and not self._declared().on_mini_batches
            self._mini_batches = None if exact else MiniBatches()
        return given if self._mini_batches is None else [*given, self._mini_batches]

    def on_train_epoch_end(self) -> None:
        """Refuse an epoch without a step, and show the last numbers to whoever monitors."""
        if self.mini_batches is None:
            self._run.epoch_end(self)
        self._run.stamp = size_of(self._declared().parameters)
        super().on_train_epoch_end()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write into the checkpoint which solver and which problem it belongs to."""
        run = self._run
        upper, lower = (sum(p.numel() for p in each.parameters) for each in self._declared().levels)
        solver = "" if self.on_mini_batches else type(run.solver).__name__
        checkpoint[KEY] = Record(solver, upper, lower, run.start, run.last).plain()
        leave_out_partials(type(self).__name__, checkpoint)
        super().on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another problem, and load float64 weights as float64.

        The Trainer would convert the module only after it has loaded the weights.
        """
        declared, trainer, record = self._declared(), self._attached, Record.load(checkpoint)
        resumes = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        # A callback that averages weights makes checkpoints without the record.
        by_torch = MiniBatches.__qualname__ in checkpoint.get("callbacks", {})
        if not by_torch and (record is None or record.solver):
            declared.resolve()
            run = Run(declared.new_solver())
            if trainer is not None:
                check_record(type(self).__name__, checkpoint, run.solver, resumes=resumes)
            if record is not None:
                run.start, run.shown = record.start, RESTORED if record.last else ""
                states = checkpoint.get("optimizer_states")
                if states and record.solver == type(run.solver).__name__:
                    run.solver.load_state_dict(states[0])
                self._run, self._resumes = run, resumes
        if trainer is not None and trainer.precision == "64-true":
            self.double()
        if resumes and record is not None:
            checkpoint["state_dict"] |= record.last or {}
        super().on_load_checkpoint(checkpoint)

    @property
    def _attached(self) -> Any:
        """The Trainer, if there is one."""
        try:
            return self.trainer
        except RuntimeError:
            return None

    def _declared(self) -> Declaration:
        if self._declaration is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}` has not declared its levels: call "
                "`self.declare(upper=..., lower=...)` at the end of its `__init__`."
            )
        return self._declaration


# Lightning looks up the signature of `training_step` at every step. Here it finds it made already,
# which saves a hundredth of a cheap iteration.
vars(BilevelMixin)["training_step"].__signature__ = inspect.signature(BilevelMixin.training_step)


class BilevelModule(BilevelMixin):
    """A LightningModule that is a bilevel problem: :class:`BilevelMixin` under its usual name."""
