"""The base classes that make a LightningModule a bilevel problem."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_bilevel import checks
from lightning_bilevel.checkpoint import KEY, check_record, leave_out_partials, record_of
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.core.qualification import Qualification
from lightning_bilevel.levels import Declaration, Declared, Level, Sets
from lightning_bilevel.mini_batches import MiniBatches, default_optimizers
from lightning_bilevel.run import RESTORED, Run
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.theorem import TheoremPoint
from lightning_bilevel.stochastic.step import Method, Options

__all__ = ["BilevelMixin", "BilevelModule"]


class BilevelMixin:
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
    _saved_start: Start | None = None
    _run: Run

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if LightningModule in order and order.index(LightningModule) < order.index(BilevelMixin):
            raise TypeError(
                f"`class {cls.__name__}` names LightningModule before the bilevel mixin, whose "
                "training step would then never run: write the mixin first, or inherit from "
                "BilevelModule."
            )

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
            solver or IVSP,
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
        own = type(self).configure_optimizers is not BilevelMixin.configure_optimizers
        declared.check(has_solver=solver is not None, has_own_optimizers=own)
        # This solver refuses bad arguments before any data are loaded. A run builds its own solver
        # when it starts.
        self._run = Run(declared.new_solver())
        self._module.automatic_optimization = False

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
        written = set(map(id, [] if functions is None else functions.buffers))
        named = self._module.named_buffers()
        return {name: b.detach().clone() for name, b in named if id(b) in written}

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
        declared = self._declared()
        return declared.upper.read(), declared.lower.read()

    @point.setter
    def point(self, point: tuple[Tensor, Tensor]) -> None:
        for level, vector in zip(self._declared().levels, point, strict=True):
            level.write(vector)
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
        if run.last is None:
            run.last = deepcopy(dict(self._module.state_dict()))
        self.point = point[0].to(x), point[1].to(y)
        run.multiplier, run.shown = multiplier, RESTORED
        own = dict(self._module.named_buffers())
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
        asked = batch, envelope, tolerance, proved, sample, batches, passes
        return self._run.certify(self, *asked)

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
        checks.check_batch(type(self).__name__, batch)
        return self._run.problem_of(self, batch)

    def problem_on(self, batch: Any) -> BilevelProblem:
        """Return the problem on a training batch, as all processes share it."""
        return self._run.problem_on(self, batch).problem

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the two levels with their units, as a solver takes them."""
        return self._declared().groups()

    def configure_optimizers(self) -> Any:
        """Make the solver, or the torch optimisers of a run on mini-batches."""
        declared, module = self._declared(), self._module
        declared.resolve()
        if declared.on_mini_batches:
            return default_optimizers(declared)
        checks.check_trainer(module.trainer, type(self._run.solver).__name__)
        solver = declared.new_solver()
        checks.check_all_declared(module, declared)
        self._run = Run(solver, self._saved_start)
        self._saved_start = None
        # Lightning compiles the training step of a compiled module. Here that is the solver, whose
        # decisions would take minutes to trace. `forward` stays compiled.
        vars(module).pop("training_step", None)
        return solver

    def configure_callbacks(self) -> Any:
        """Bring along the mode of mini-batches, which is idle in an exact run."""
        trainer = self._attached
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fits:
            # Lightning asks for callbacks before it checks this, with another advice.
            checks.check_automatic(self._module, trainer)
        given = super().configure_callbacks()  # type: ignore[misc]
        if self._mini_batches is None or trainer is None or fits:
            self._mini_batches = MiniBatches()
        return [*(given if isinstance(given, (list, tuple)) else [given]), self._mini_batches]

    def on_train_epoch_end(self) -> None:
        """Refuse what went wrong in the epoch, and show the last numbers to whoever monitors."""
        if self.mini_batches is None:
            self._run.epoch_end(self)
        super().on_train_epoch_end()  # type: ignore[misc]

    def on_fit_end(self) -> None:
        """Warn of a run that ends on a sample."""
        if self.last_step is not None:
            checks.warn_of_sample(self._module.trainer.train_dataloader)
        super().on_fit_end()  # type: ignore[misc]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write into the checkpoint which solver and which problem it belongs to."""
        run = self._run
        own = {"mini_batches": True} if self.on_mini_batches else record_of(run.solver)
        checkpoint[KEY] = {**own, "start": run.start and asdict(run.start), "last": run.last}
        leave_out_partials(type(self).__name__, checkpoint)
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another problem, and load float64 weights as float64.

        The Trainer would convert the module only after it has loaded the weights.
        """
        declared, module, trainer = self._declared(), self._module, self._attached
        resumes = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        record = checkpoint.get(KEY, {})
        last, start = record.get("last"), record.get("start")
        # A callback that averages weights makes checkpoints without the record.
        by_torch = MiniBatches.__qualname__ in checkpoint.get("callbacks", {})
        if not (by_torch or record.get("mini_batches")):
            declared.resolve()
            solver = declared.new_solver()
            if trainer is not None:
                check_record(type(self).__name__, checkpoint, solver, resumes=resumes)
            # A run that resumes is made later, when it starts.
            self._saved_start = start and Start(**start)
            if not resumes:
                run = self._run
                run.start, self._saved_start = self._saved_start, None
                run.shown = "" if last is None else RESTORED
                states = checkpoint.get("optimizer_states")
                if states and record.get("solver") == type(solver).__name__:
                    solver.load_state_dict(states[0])
                    run.solver = solver
        if trainer is not None and trainer.precision == "64-true":
            module.double()
        if resumes:
            checkpoint["state_dict"] |= last or {}
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]

    @property
    def _module(self) -> LightningModule:
        return cast(LightningModule, self)

    @property
    def _attached(self) -> Any:
        """The Trainer, if there is one."""
        try:
            return self._module.trainer
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


class BilevelModule(BilevelMixin, LightningModule):
    """A LightningModule with :class:`BilevelMixin`, with the bases in the right order."""
