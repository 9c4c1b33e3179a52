"""The base classes that make a LightningModule a bilevel problem."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.core.qualification import Qualification
from lightning_bilevel.plugin.batches import BatchProblem, check_batch
from lightning_bilevel.plugin.buffers import write_buffers
from lightning_bilevel.plugin.certifier import Certifier, Question
from lightning_bilevel.plugin.checkpoints import (
    LastPoint,
    check_record,
    go_on_from_last,
    load_solver,
    saved_name,
    saved_start,
    saved_stream,
    write_record,
)
from lightning_bilevel.plugin.checks import (
    check_all_declared,
    check_gradients,
    check_optimizer,
    check_own,
    check_precision,
    check_trainer,
    way_to_mini_batches,
)
from lightning_bilevel.plugin.declaration import Declaration, Level, Sets
from lightning_bilevel.plugin.functional import Declared, problem_of
from lightning_bilevel.plugin.processes import check_same_point, shared_problem
from lightning_bilevel.plugin.publishing import is_logged, publish_step
from lightning_bilevel.plugin.random_numbers import restore_generators
from lightning_bilevel.plugin.run import Run
from lightning_bilevel.plugin.schedulers import SchedulerDeclared, plan_of
from lightning_bilevel.plugin.streaming import (
    MINI_BATCH_TOLERANCE,
    Stream,
    check_yielded,
    has_changing_batches,
)
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.solvers.proved import ProvedPoint
from lightning_bilevel.solvers.record import StepInfo

__all__ = ["BilevelMixin", "BilevelModule", "IVSPMixin"]


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
    - optionally ``upper_indices(batch)``: the numbers of the upper-level variables that a lower
      batch touches, such as those of its samples. On mini-batches only these then move.

    A training batch is ``{"upper": ..., "lower": ...}``, each a batch or a list of chunks
    (:class:`~lightning_bilevel.core.chunks.Chunks`). One batch is one outer iteration. As long as
    the batch has the same values, known values at the current point are reused.

    A solver that is ``stochastic`` runs on mini-batches, unless the data come from a
    :class:`~lightning_bilevel.data.fullbatch.FullBatchDataModule`: loaders of any kind and length,
    dropout, augmentation, batch normalisation, ``precision="bf16-mixed"``, and over several
    processes the usual distributed samplers. All other solvers need the same data in each step.

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

    default_solver: ClassVar[SolverCallable | None] = None

    lower_features: Callable[..., Any] | None = None
    lower_outputs: Callable[..., Any] | None = None
    upper_indices: Callable[..., Tensor] | None = None

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
        scheduler: SchedulerDeclared | None = None,
    ) -> None:
        r"""Say what belongs to which level.

        Args:
            upper: The upper-level variables x: a module, a parameter, or several of them.
            lower: The lower-level variables y, likewise.
            upper_set: The set of x, or a list with one set for each of the several.
            lower_set: The set of y, likewise.
            solver: Makes the solver from parameter groups: a solver class, or a partial of one.
            upper_unit: The solver works in u with x = upper_unit * u, which gives the level steps
                :math:`\text{unit}^2` times as long. The sets, the module and the certificate stay
                in x.
            lower_unit: Likewise for y. The Moreau term is then measured in that unit: rho acts as
                rho * lower_unit**2.
            envelope: The Moreau envelope (rho, sigma, delta) of the certificate, for solvers that
                have none.
            qualification: What is known about the constraint qualification of this problem: a
                :class:`~lightning_bilevel.core.qualification.Condition` such as
                ``StrictlyConvex()``, a verdict or words; or a function of the envelope that
                returns one of the two. The certificate shows it.
            scheduler: Makes a torch scheduler from the solver, whose groups are the levels; or
                Lightning's dict, ``{"scheduler": ..., "interval": "step" or "epoch", "frequency":
                ..., "monitor": ..., "name": ...}``. It changes the rates of the levels that have a
                torch optimiser.
        """
        # Read from the class: an instance would bind a plain function as its method.
        solver = solver or type(self).default_solver
        if solver is None:
            raise ValueError(
                f"`{type(self).__name__}.declare()` needs a solver, such as `solver=IVSP`."
            )
        call = f"{type(self).__name__}.declare"
        levels = Level(call, "upper", upper, upper_set), Level(call, "lower", lower, lower_set)
        for level in levels:
            check_own(self._module(), level)
        self._declaration = Declaration(
            *levels,
            (upper_unit, lower_unit),
            solver,
            envelope,
            qualification,
            plan_of(call, scheduler),
        )
        # This solver refuses bad arguments before any data are loaded. A run builds its own solver
        # when it starts.
        self._run = Run(self._declaration.new_solver())
        self._resumed_start: Start | None = None
        self._resumed_stream: dict[str, Any] | None = None
        self.last_step: StepInfo | None = None
        self._module().automatic_optimization = False

    def upper_loss(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return f on the batch of the upper level."""
        raise NotImplementedError(self._missing_losses())

    def lower_loss(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return g on the batch of the lower level.

        With :attr:`lower_features` or :attr:`lower_outputs`, their result is the second argument.
        """
        raise NotImplementedError(self._missing_losses())

    def bilevel_problem(self, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g on a batch ``{"upper": ..., "lower": ...}``, for flat x and y."""
        declared = self._declared()
        check_batch(type(self).__name__, batch)
        functions = self._run.buffers.functions_of(self._module(), declared)
        return problem_of(functions, batch, declared.upper.feasible, declared.lower.feasible)

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Do one outer iteration."""
        if self._declared().has_changed():
            raise MisconfigurationException(
                f"a parameter of `{type(self).__name__}` was frozen or unfrozen in the middle of a "
                "run, whose vectors x and y have a fixed length. Freeze before `Trainer.fit`; to "
                "train others, call it once more."
            )
        trainer: Any = self._module().trainer
        # Lightning counts only steps through its own wrapper of the optimizer.
        optimizer: Any = self._module().optimizers()
        check_optimizer(self._module(), optimizer)
        stream = self._stream(trainer)
        info: StepInfo
        if stream is None:
            current = self._run.batches.next_problem(
                type(self).__name__, self._run.solver, batch, self._make_problem
            )
            info = optimizer.step(problem=current.problem)
            self._update_buffers(current)
        else:
            info = stream.step(optimizer, batch)
        self.last_step = info
        self._run.shown = ""
        if self._run.schedule is not None:
            self._run.schedule.after("step", info.iteration, trainer.callback_metrics)
        if is_logged(trainer, info.iteration):
            check_same_point(trainer, self._declared().parameters, info.iteration)
        publish_step(trainer, info)

    def configure_callbacks(self) -> Any:
        """Refuse what Lightning would refuse with another advice; it asks for callbacks before."""
        trainer: Any = self._module()._trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._declared()
            check_gradients(trainer, self._run.solver)
        return super().configure_callbacks()  # type: ignore[misc]

    def on_validation_start(self) -> None:
        """Share running statistics between the processes of a run on mini-batches."""
        if self._run.stream is not None:
            self._run.stream.share_buffers()
        super().on_validation_start()  # type: ignore[misc]

    def on_fit_end(self) -> None:
        """Refuse loaders that yield nothing."""
        check_yielded(type(self).__name__, self._module().trainer)
        super().on_fit_end()  # type: ignore[misc]

    def on_train_epoch_end(self) -> None:
        """Refuse a training step that does not call the solver."""
        trainer: Any = self._module().trainer
        check_yielded(type(self).__name__, trainer)
        if self._run.schedule is not None:
            count = trainer.current_epoch + 1
            self._run.schedule.after("epoch", count, trainer.callback_metrics)
        if self._run.stream is not None:
            self._run.stream.share_buffers()
        if self._run.solver.progress.iterations == 0:
            raise MisconfigurationException(
                f"`{type(self).__name__}.training_step` made no outer iteration in a whole epoch: "
                "it must call `super().training_step(batch, batch_idx)`, or be left out."
            )
        super().on_train_epoch_end()  # type: ignore[misc]

    def configure_optimizers(self) -> Any:
        """Make the solver, and its scheduler if one is declared."""
        declared = self._declared()
        module = self._module()
        may_stream = self._run.solver.stochastic
        check_precision(module.trainer, self._run.solver, mini_batches=may_stream)
        check_trainer(type(self).__name__, module.trainer)
        declared.resolve()
        solver = declared.new_solver()
        check_all_declared(module, declared)
        run = Run(solver, Certifier(start=self._resumed_start), resumed=self._resumed_stream)
        self._run = run
        self._resumed_start = None
        self._resumed_stream = None
        if run.resumed is not None:
            # Before the loaders start, because they draw the order of the samples.
            restore_generators(run.resumed["generators"])
        self.last_step = None
        if module._compiler_ctx is not None:
            # Lightning compiles the training step of a compiled module. Here that is the solver,
            # whose decisions would take minutes to trace. `forward` stays compiled.
            vars(module).pop("training_step", None)
        if declared.scheduler is None:
            return solver
        run.schedule = declared.scheduler.attached_to(solver)
        return {"optimizer": solver, "lr_scheduler": run.schedule.config()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write into the checkpoint which solver and which problem it belongs to."""
        self._declared()
        write_record(
            type(self).__name__,
            checkpoint,
            self._run.solver,
            self._run.certifier.start,
            self._run.last,
            None if self._run.stream is None else self._run.stream.state(),
        )
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another problem, and load float64 weights as float64.

        The Trainer would convert the module only after it has loaded the weights.
        """
        declared = self._declared()
        module = self._module()
        trainer = module._trainer
        resumes = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        declared.resolve()
        solver = declared.new_solver()
        if trainer is not None:
            check_record(type(self).__name__, checkpoint, solver, resumes=resumes)
            if trainer.precision == "64-true":
                module.double()
        if resumes:
            # The run is made later, when it starts, and takes this over.
            self._resumed_start = saved_start(checkpoint)
            self._resumed_stream = saved_stream(checkpoint)
            go_on_from_last(checkpoint, module, declared.levels)
        else:
            self._run.certifier.start = saved_start(checkpoint)
            self._run.shown = saved_name(checkpoint)
            if load_solver(checkpoint, solver):
                self._run.solver = solver
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope of the certificate, in y: the solver's, or else the declared one."""
        return self._run.solver.envelope or self._declared().envelope

    @property
    def point(self) -> tuple[Tensor, Tensor]:
        """The current x and y, each as a new flat vector."""
        return self._declared().read()

    @point.setter
    def point(self, point: tuple[Tensor, Tensor]) -> None:
        self._declared().write(*point)
        self._run.shown = "a point that was written into the module"

    @property
    def proved(self) -> ProvedPoint | None:
        """The point of the run that the convergence theorem speaks of, if the solver keeps it.

        ``certify(proved=True)`` certifies it. It stays where it is: ``restore((p.x, p.y),
        p.multiplier)`` makes a point p the result of the run.
        """
        return self._run.solver.proved

    @property
    def written_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that training writes to, such as running statistics, by name."""
        return self._run.buffers.copies(self._module())

    @property
    def evaluation_time(self) -> float:
        """Seconds that certificates have taken since the start of fit."""
        return self._run.certifier.seconds

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
        last = LastPoint(*self.point, self.written_buffers)
        self._run.last = last
        self._run.certifier.multiplier = multiplier
        self.point = point[0].to(last.upper), point[1].to(last.lower)
        self._run.shown = "an earlier point of the run, which was restored"
        write_buffers(self._module(), buffers or {})

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
        training loaders are asked for once more.

        Args:
            batch: The training batch to evaluate f and g on; None is the last one, and after a run
                on mini-batches all data.
            envelope: Another Moreau envelope than the module's.
            tolerance: The accuracy of the proximal point.
            proved: Certify :attr:`proved`, the point of the theorem, instead of the current one.
            sample: On mini-batches: look at the first few batches of the run only, and leave the
                loaders alone, as monitors do in the middle of an epoch.
            batches: On mini-batches: the most batches of a level. More data are a sample, and the
                certificate says so.
            passes: On mini-batches: the most passes of g for the proximal point. If they do not
                suffice, the certificate says how accurate it is.
        """
        declared = self._declared()
        run = self._run
        envelope = envelope or self.envelope
        stream = run.stream
        problem: BilevelProblem | None = None
        if stream is not None and envelope is not None:
            problem, label = stream.evaluated(batch, sample, batches)
            tolerance = tolerance or MINI_BATCH_TOLERANCE
        elif stream is None:
            current = run.batches.current if batch is None else self._problem_on(batch)
            problem, label = None if current is None else current.problem, ""
            if problem is None:
                raise RuntimeError(
                    f"`{type(self).__name__}.certify()` needs a training batch: call it after "
                    "`Trainer.fit` in the same process, or give it one, `certify(batch=...)`."
                )
        if envelope is None or problem is None:
            return None
        if proved:
            kept = self._proved()
            # Its bounds are those of the solver's own relaxation.
            name = str(kept) if envelope == run.solver.envelope else kept.name
            point = (kept.x, kept.y)
            multiplier: float | None = kept.multiplier
            step = None
        else:
            name = run.point_name
            point = self.point
            multiplier = run.certifier.multiplier
            if multiplier is None:
                multiplier = run.solver.multiplier
            step = self.last_step
        limit = None if stream is None else passes
        question = Question(problem, envelope, tolerance, multiplier, label, name, limit)
        with nullcontext() if stream is None else stream.evaluating():
            return run.certifier.certify(question, point, declared, step)

    def problem_on(self, batch: Any) -> BilevelProblem:
        """Return the problem on a training batch, as all processes share it."""
        return self._problem_on(batch).problem

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the two levels with their units, as a solver takes them."""
        return self._declared().groups()

    def may_evaluate(self, share: float) -> bool:
        """Tell whether certificates took at most a share of the optimisation time so far.

        The first certificate is always allowed. So is one that is known already: it costs nothing.
        """
        if self.last_step is None:
            return False
        return self._run.certifier.may_evaluate(share, self.last_step)

    def _module(self) -> LightningModule:
        return cast(LightningModule, self)

    def _declared(self) -> Declaration:
        declared: Declaration | None = getattr(self, "_declaration", None)
        if declared is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}` has not declared its levels: call "
                "`self.declare(upper=..., lower=...)` at the end of its `__init__`."
            )
        return declared

    def _proved(self) -> ProvedPoint:
        kept = self.proved
        if kept is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}.certify(proved=True)` has no point to certify: "
                f"{self._run.solver.unproved}. Leave `proved` out for the current point."
            )
        return kept

    def _missing_losses(self) -> str:
        return (
            f"`{type(self).__name__}` must define `upper_loss(batch)`, the function f, and "
            "`lower_loss(batch)`, the function g."
        )

    def _stream(self, trainer: Any) -> Stream | None:
        """Return what a run on mini-batches keeps; None for a run on all data."""
        run = self._run
        if not run.examined:
            run.examined = True
            if run.solver.stochastic and has_changing_batches(trainer):
                run.stream = Stream(self._module(), self._declared(), trainer, run.resumed)
            else:
                check_precision(trainer, run.solver, mini_batches=False)
        return run.stream

    def _problem_on(self, batch: Any) -> BatchProblem:
        return self._run.batches.problem_on(batch, self._make_problem)

    def _make_problem(
        self, batch: Any, contents: list[tuple[Any, int]], before: BatchProblem | None
    ) -> BatchProblem:
        """Make the problem on a batch; the first one is checked at the start point of the run."""
        declared = self._declared()
        run = self._run
        module = self._module()
        point = declared.feasible_point() if before is None else None
        split = before is None or before.is_split
        problem, part = shared_problem(
            module, self.bilevel_problem, module._trainer, batch, point=point, split=split
        )
        if point is not None:
            try:
                start = problem.check(*point)
            except NonFiniteError:
                raise
            except BilevelError as error:
                raise type(error)(f"{error} {way_to_mini_batches(run.solver)}") from error
            run.certifier.start = run.certifier.start or start
            run.buffers.examine(module, problem, *point)
        return BatchProblem(contents, batch, part, problem)

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


class IVSPMixin(BilevelMixin):
    """:class:`BilevelMixin` with IVSP as the solver unless another one is declared."""

    default_solver: ClassVar[SolverCallable | None] = IVSP


class BilevelModule(BilevelMixin, LightningModule):
    """A LightningModule with :class:`BilevelMixin`, with the bases in the right order."""
