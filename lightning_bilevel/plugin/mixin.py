"""What a LightningModule inherits to become a bilevel problem."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor, ModelPruning
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bilevel.core.certificate import Certificate, certify
from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.leaves import leaves
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.plugin.checkpoints import KEY as CHECKPOINT_KEY
from lightning_bilevel.plugin.checkpoints import check_record, record
from lightning_bilevel.plugin.declaration import Declaration, Level, Sets
from lightning_bilevel.plugin.functional import Declared, ModuleFunctions, problem_of
from lightning_bilevel.plugin.processes import agree, check_parts, part_of, total
from lightning_bilevel.solvers.base import BilevelOptimizer, SolverCallable, StepInfo
from lightning_bilevel.solvers.ivsp.solver import IVSP

__all__ = ["BilevelMixin", "BilevelModule", "IVSPMixin"]


# Buffers that change the losses are updated until the losses change by less than that, or so often.
_SETTLED, _MAX_UPDATES = 1e-6, 30


@dataclass
class _Current:
    """The problem of the batch that is being trained on, and what tells that batch from another.

    Attributes:
        contents: The leaves of the batch.
        batch: The batch.
        part: What this process evaluates of it.
        problem: f and g on it.
        scaled: The same in the units of the solver.
    """

    contents: list[tuple[Any, int]]
    batch: Any
    part: Any
    problem: BilevelProblem
    scaled: BilevelProblem

    def serves(self, contents: list[tuple[Any, int]]) -> bool:
        return len(contents) == len(self.contents) and all(
            a is b and version == other for (a, version), (b, other) in zip(contents, self.contents, strict=True)
        )


@dataclass
class _Restored:
    """The last point of a run and its buffers, while the module shows an earlier one, and the multiplier of that one."""

    point: tuple[Tensor, Tensor]
    buffers: dict[str, Tensor]
    multiplier: float


@dataclass
class _Evaluated:
    """The certificate that was evaluated last, and all that it depends on."""

    given: tuple[BilevelProblem, Envelope, float | None, float | None, str]
    point: tuple[Tensor, Tensor]
    certificate: Certificate
    iteration: int

    def serves(self, given: tuple[Any, ...], point: tuple[Tensor, Tensor]) -> bool:
        return given == self.given and all(torch.equal(a, b) for a, b in zip(point, self.point, strict=True))


def _contents(batch: Any) -> Iterator[tuple[Any, int]]:
    """The leaves of a batch, each tensor with its version, which counts in-place changes."""
    return ((leaf, leaf._version if isinstance(leaf, Tensor) else 0) for leaf in leaves(batch))


def is_logged(trainer: Any, iteration: int) -> bool:
    """Tell whether the record of an iteration goes to the loggers."""
    every = trainer.log_every_n_steps  # 0 is never
    return bool(every > 0 and (iteration % every == 0 or iteration == 1))


def _missing(self: BilevelMixin, *args: Any) -> Tensor:
    raise NotImplementedError(
        f"`{type(self).__name__}` must define `upper_loss(batch)`, the function f, and `lower_loss(batch)`, the function g."
    )


class BilevelMixin:
    r"""Makes a LightningModule a bilevel problem that ``Trainer.fit`` solves.

    .. math:: \min_{x, y} f(x, y) \quad\text{s.t.}\quad y \in \arg\min_u g(x, u)

    Inherit from it *before* ``LightningModule``, call :meth:`declare` at the end of ``__init__``, and define

    - ``upper_loss(batch)``: f, given the batch of the upper level;
    - ``lower_loss(batch)``: g, given the batch of the lower level;
    - optionally ``lower_features(batch)``: the part of g that depends on x alone, evaluated once per x. Then g is
      ``lower_loss(batch, features)``, which must use no upper-level parameter;
    - or ``lower_outputs(batch)``: the part of g that depends on y alone, evaluated once for a y that is asked for again, also
      at another x. Then g is ``lower_loss(batch, outputs)``, which must use no lower-level parameter.

    A training batch is ``{"upper": ..., "lower": ...}``, each a batch or a list of chunks
    (:class:`~lightning_bilevel.data.fullbatch.Chunks`). One batch is one outer iteration. As long as the batch has the same
    tensors, what is known of the current point is used again.

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

    default_solver: ClassVar[type[IVSP] | None] = None

    upper_loss: Callable[..., Tensor] = _missing
    lower_loss: Callable[..., Tensor] = _missing
    lower_features: Callable[..., Any] | None = None
    lower_outputs: Callable[..., Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if LightningModule in order and order.index(LightningModule) < order.index(BilevelMixin):
            raise TypeError(
                f"`class {cls.__name__}` names LightningModule before the bilevel mixin, whose training step would then never "
                "run: write the mixin first, or inherit from BilevelModule."
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
        qualification: str | Callable[[Envelope], str] = "not known",
    ) -> None:
        r"""Say what belongs to which level.

        Args:
            upper: The upper-level variables x: a module, a parameter, or several of them.
            lower: The lower-level variables y, likewise.
            upper_set: The set that x lives in, or one set for each of the several.
            lower_set: The set that y lives in, likewise.
            solver: What makes the solver from parameter groups: a solver class, or a partial of one.
            upper_unit: The solver works in u with x = upper_unit * u, which gives the level steps
                :math:`\text{unit}^2` times as long. The sets, the module and the certificate stay in x.
            lower_unit: Likewise for y. The Moreau term is then measured in that unit: rho acts as rho * lower_unit**2.
            envelope: The Moreau envelope (rho, sigma, delta) of the certificate, for solvers that have none.
            qualification: Why the constraint qualification holds for this problem, if that is known, in words; or a function
                that says so for an envelope.
        """
        module = self._module()
        solver = solver or self.default_solver
        if solver is None:
            raise ValueError(f"`{type(self).__name__}.declare()` needs a solver, such as `solver=IVSP`.")
        for name, unit in (("upper_unit", upper_unit), ("lower_unit", lower_unit)):
            if not 0.0 < unit < float("inf"):
                raise ValueError(f"`{type(self).__name__}.declare({name}={unit})` must be positive and finite.")
        call = f"{type(self).__name__}.declare"
        levels = Level(call, "upper", upper, upper_set), Level(call, "lower", lower, lower_set)
        known = {id(p) for p in module.parameters()}
        for level in levels:
            if any(id(p) not in known for p in level.parameters):
                raise ValueError(f"`{call}({level.name}=...)` has a parameter that is not the module's own.")
        self._declaration = Declaration(*levels, (upper_unit, lower_unit), solver, envelope, qualification)
        # Built once to refuse bad arguments here, before any data are loaded; the solver of a run is built when it starts.
        self._solver: BilevelOptimizer = solver(self._declaration.groups())
        self._restored: _Restored | None = None
        # The gradients that the run started with: what later ones are compared to.
        self._start: Start | None = None
        self._resumed_start: Start | None = None
        self.last_step: StepInfo | None = None
        self._forget_run()
        module.automatic_optimization = False

    def _forget_run(self) -> None:
        """Drop what was made for the batches and the buffers of a run."""
        self._current: _Current | None = None
        self._evaluated: _Evaluated | None = None
        self._functions: ModuleFunctions | None = None
        self._batches_change = False
        self._whole_batch_everywhere = False
        self._buffers_matter = False
        # Seconds that certificates have taken since the start of fit.
        self.evaluation_time = 0.0

    def bilevel_problem(self, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g on a batch ``{"upper": ..., "lower": ...}`` as functions of flat x and y."""
        declared = self._declared()
        if not isinstance(batch, dict) or not {"upper", "lower"} <= batch.keys():
            got = f"a dict with {sorted(batch)}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
            raise MisconfigurationException(
                f'`{type(self).__name__}` was given {got} as a training batch: it must be {{"upper": ..., "lower": ...}}, as a '
                "CombinedLoader over two loaders or a FullBatchDataModule gives it."
            )
        written = self._functions.written_buffers if self._functions is not None else ()
        functions = ModuleFunctions(self._module(), declared.upper.parameters, declared.lower.parameters, written)
        self._functions = functions
        return problem_of(functions, batch, declared.upper.feasible, declared.lower.feasible)

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Do one outer iteration."""
        if any(level.has_changed() for level in self._declared().levels):
            raise MisconfigurationException(
                f"a parameter of `{type(self).__name__}` was frozen or unfrozen in the middle of a run, whose vectors x and y "
                "have a fixed length. Freeze before `Trainer.fit`; to train others, call it once more."
            )
        before = self._current
        if before is not None:
            self._check_ended(batch, before.batch)
        current = self._problem_on(batch)
        self._batches_change = self._batches_change or (before is not None and current.contents is not before.contents)
        info: StepInfo = self._optimizer().step(problem=current.scaled)
        self.last_step = info
        self._update_buffers()
        self._publish(info)

    def on_train_epoch_end(self) -> None:
        """Notice a training step that is not ours."""
        if self._solver.memory["iteration"] == 0:
            raise MisconfigurationException(
                f"`{type(self).__name__}.training_step` made no outer iteration in a whole epoch: it must call "
                "`super().training_step(batch, batch_idx)`, or be left out."
            )
        super().on_train_epoch_end()  # type: ignore[misc]

    def configure_optimizers(self) -> BilevelOptimizer:
        """Make the solver."""
        declared, module = self._declared(), self._module()
        self._check_trainer()
        for level in declared.levels:
            level.resolve()
        ours = {id(p) for level in declared.levels for p in level.parameters}
        forgotten = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in ours]
        if forgotten:
            raise MisconfigurationException(
                f"`{type(self).__name__}.declare` names neither as upper nor as lower: {', '.join(forgotten)}. Each trainable "
                "parameter belongs to one level; a constant has `requires_grad=False`."
            )
        self._forget_run()
        self._restored = self.last_step = None
        self._start, self._resumed_start = self._resumed_start, None
        if module._compiler_ctx is not None:
            # Of a compiled module Lightning compiles the training step, which is the solver: its decisions would take minutes to
            # trace. What `forward` does stays compiled.
            vars(module).pop("training_step", None)
        self._solver = declared.solver(declared.groups())
        return self._solver

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say in the checkpoint which solver and which problem it is of."""
        self._declared()
        checkpoint[CHECKPOINT_KEY] = record(self._solver)
        if self._start is not None:
            checkpoint[CHECKPOINT_KEY]["start"] = asdict(self._start)
        if self._restored is not None:
            # The weights are those of the best point; the run goes on from its last one.
            x, y = self._restored.point
            checkpoint[CHECKPOINT_KEY]["last"] = {"upper": x, "lower": y, "buffers": self._restored.buffers}
        _leave_out_partials(type(self).__name__, checkpoint)
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run, and load a float64 one as float64.

        The Trainer converts the module only after it has loaded the weights.
        """
        declared, trainer = self._declared(), self._module()._trainer
        for level in declared.levels:
            level.resolve()
        resumes = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if trainer is not None:
            check_record(type(self).__name__, checkpoint, declared.solver(declared.groups()), resumes=resumes)
            if trainer.precision == "64-true":
                self._module().double()
        saved = checkpoint.get(CHECKPOINT_KEY, {})
        start = Start(**saved["start"]) if "start" in saved else None
        if resumes:
            self._resumed_start = start
            if "last" in saved:
                self._write_into(checkpoint["state_dict"], saved["last"])
        else:
            self._start = start
            self._load_solver(checkpoint)
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]

    def _write_into(self, state_dict: dict[str, Any], last: dict[str, Any]) -> None:
        """Write the last point of a run into the weights of its checkpoint."""
        # A shared parameter has several names there.
        names: dict[int, list[str]] = {}
        for name, parameter in self._module().named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for level in self._declared().levels:
            blocks = torch.split(last[level.name], [p.numel() for p in level.parameters])
            for parameter, block in zip(level.parameters, blocks, strict=True):
                state_dict.update(dict.fromkeys(names[id(parameter)], block.view_as(parameter)))
        state_dict.update({name: buffer for name, buffer in last["buffers"].items() if name in state_dict})

    def _load_solver(self, checkpoint: dict[str, Any]) -> None:
        """Take over the constants and the multiplier of the run that a checkpoint is of, for its certificate."""
        states, declared = checkpoint.get("optimizer_states"), self._declared()
        solver = declared.solver(declared.groups())
        if states and checkpoint.get(CHECKPOINT_KEY, {}).get("solver") == type(solver).__name__:
            solver.load_state_dict(states[0])
            self._solver = solver

    def __getstate__(self) -> dict[str, Any]:
        state = cast(dict[str, Any], super().__getstate__())
        # Functions of a batch cannot be pickled, and are made anew for the next one.
        return {**state, "_current": None, "_evaluated": None, "_functions": None}

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope of the certificate, in y: that of the solver, or the declared one."""
        declared, own = self._declared(), self._solver.envelope
        if own is None:
            return declared.envelope
        # |v - v'|^2/(2 rho) in the unit of y is |y - y'|^2/(2 rho unit^2).
        square = declared.units[1] ** 2
        return Envelope(rho=own.rho * square, sigma=own.sigma / square, delta=own.delta)

    @property
    def point(self) -> tuple[Tensor, Tensor]:
        """The current x and y, each as one flat vector of its own."""
        upper, lower = self._declared().levels
        return upper.read(), lower.read()

    @point.setter
    def point(self, point: tuple[Tensor, Tensor]) -> None:
        for level, vector in zip(self._declared().levels, point, strict=True):
            level.write(vector)

    @property
    def written_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that training writes to, by name, such as the running statistics of batch normalisation."""
        written = {id(buffer) for buffer in self._functions.written_buffers} if self._functions is not None else set()
        return {name: buffer.detach().clone() for name, buffer in self._module().named_buffers() if id(buffer) in written}

    def restore(self, point: tuple[Tensor, Tensor], multiplier: float, buffers: dict[str, Tensor] | None = None) -> None:
        """Write a point that the run has come by, and end with it; a checkpoint still goes on from where the run was.

        Args:
            point: x and y.
            multiplier: The multiplier that belongs to them.
            buffers: The buffers that belong to them, see :attr:`written_buffers`.
        """
        self._restored = _Restored(self.point, self.written_buffers, multiplier)
        x, y = (new.to(old) for new, old in zip(point, self._restored.point, strict=True))
        self.point = x, y
        self._write_buffers(buffers or {})

    def _write_buffers(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in self._module().named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])

    def certify(
        self, *, batch: Any = None, envelope: Envelope | None = None, tolerance: float | None = None
    ) -> Certificate | None:
        """Return the certificate of the current point; None without an envelope.

        Args:
            batch: The training batch to evaluate f and g on; None is the last one.
            envelope: Another Moreau envelope than the module's.
            tolerance: The accuracy of the proximal point.
        """
        declared, note = self._declared(), ""
        if batch is not None:
            self._problem_on(batch)
        elif self._batches_change and getattr(self._module()._trainer, "num_training_batches", 1) != 1:
            note = "the last mini-batch, not all data"
        if self._current is None:
            raise RuntimeError(
                f"`{type(self).__name__}.certify()` needs a training batch: call it after `Trainer.fit` in the same process, or "
                "give it one, `certify(batch=...)`."
            )
        envelope = envelope or self.envelope
        if envelope is None:
            return None
        multiplier = self._solver.multiplier if self._restored is None else self._restored.multiplier
        given, point = (self._current.problem, envelope, tolerance, multiplier, note), self.point
        if self._evaluated is None or not self._evaluated.serves(given, point):
            began, known = time.perf_counter(), declared.qualification
            certificate = certify(
                self._current.problem,
                *point,
                envelope,
                multiplier=multiplier,
                tolerance=tolerance,
                qualification=known if isinstance(known, str) else known(envelope),
                start=self._start,
                evaluated_on=note,
            )
            # Agreed among the processes: it decides whether the next certificate, a collective, is evaluated.
            self.evaluation_time += self._current.problem.mean_over_ranks(time.perf_counter() - began, point[0])
            self._evaluated = _Evaluated(given, point, certificate, self._solver.memory["iteration"])
        return self._evaluated.certificate

    def problem_in_units(self, batch: Any) -> tuple[BilevelProblem, float, float]:
        """Return the problem on a batch in the units that the solver works in, and these units."""
        return self._problem_on(batch).scaled, *self._declared().units

    def may_evaluate(self, share: float) -> bool:
        """Tell whether certificates have taken no more than a share of the optimisation time so far.

        The first one may always be evaluated, and one that is known already costs nothing.
        """
        if self.last_step is None:
            return False
        if self._evaluated is None or self._evaluated.iteration == self.last_step.iteration:
            return True
        return self.evaluation_time <= share * self.last_step.optimization_time

    def _module(self) -> LightningModule:
        return cast(LightningModule, self)

    def _declared(self) -> Declaration:
        declared: Declaration | None = getattr(self, "_declaration", None)
        if declared is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}` has not declared its levels: call `self.declare(upper=..., lower=...)` at the end of "
                "its `__init__`."
            )
        return declared

    def _optimizer(self) -> Any:
        """Return the solver as Lightning wraps it; a step through that wrapper is what it counts."""
        module = self._module()
        optimizer: Any = module.optimizers()
        if module.automatic_optimization or not isinstance(getattr(optimizer, "optimizer", None), BilevelOptimizer):
            raise MisconfigurationException(
                f"`{type(self).__name__}` must leave `automatic_optimization` at False, and its `configure_optimizers` must "
                "return the solver, as `super().configure_optimizers()` does: an optimizer such as Adam cannot solve a bilevel "
                "problem. Name the solver in `declare(solver=...)`."
            )
        return optimizer

    def _check_ended(self, batch: Any, before: Any) -> None:
        for level in ("upper", "lower"):
            if isinstance(batch, dict) and batch.get(level) is None and before[level] is not None:
                raise MisconfigurationException(
                    f"`{type(self).__name__}` was given a batch without data for the {level} level, whose loader has ended: "
                    'use `CombinedLoader(..., "max_size_cycle")`, which starts it again, or "min_size".'
                )

    def _publish(self, info: StepInfo) -> None:
        """Give the record of a step to callbacks and progress bar; and, where its turn has come, to loggers."""
        trainer: Any = self._module().trainer
        metrics = info.metrics()
        # `self.log` takes milliseconds for the same.
        values = dict(zip(metrics, torch.tensor(list(metrics.values())).unbind(), strict=True))
        trainer.callback_metrics.update(values)
        trainer.progress_bar_metrics.update({name: metrics[name] for name in info.SHOWN if name in metrics})
        if is_logged(trainer, info.iteration):
            self._check_agreement(trainer, info.iteration)
            trainer.logged_metrics.update(values)
            for logger in trainer.loggers if trainer.is_global_zero else []:
                logger.log_metrics(metrics, step=info.iteration)

    def _problem_on(self, batch: Any) -> _Current:
        contents = list(_contents(batch))
        if self._current is None or not self._current.serves(contents):
            first = self._current is None
            self._current = self._made_for(batch, contents, self._feasible_point() if first else None)
            if first:
                self._look_at_buffers()
        return self._current

    def _feasible_point(self) -> tuple[Tensor, Tensor]:
        x, y = (level.feasible.project(level.read()) for level in self._declared().levels)
        return x, y

    def _made_for(self, batch: Any, contents: list[tuple[Any, int]], point: tuple[Tensor, Tensor] | None) -> _Current:
        """Make the problem on a batch; if there is a point, check it there."""
        problem, part = self._problem_of_all(batch, point)
        if point is not None:
            start = problem.check(*point)
            self._start = self._start or start
        return _Current(contents, batch, part, problem, problem.in_units(*self._declared().units))

    def _problem_of_all(self, batch: Any, point: tuple[Tensor, Tensor] | None) -> tuple[BilevelProblem, Any]:
        """Return the problem on a batch, shared by all processes of the Trainer, and what this process evaluates of the batch."""
        trainer, whole = self._module()._trainer, self.bilevel_problem(batch)
        if trainer is None or trainer.world_size == 1:
            return whole, batch
        name, world = type(self).__name__, trainer.world_size
        # Loaders with distributed samplers repeat or drop samples, so a batch that came split is never the exact full batch.
        if not agree((leaf for leaf, _ in _contents(batch)), trainer.strategy.root_device):
            raise MisconfigurationException(
                f"`{name}` was given different batches in different processes: it splits a batch itself, so that each sample "
                "counts once. Use a FullBatchDataModule, or `Trainer(use_distributed_sampler=False)` with the same seed in all "
                "processes."
            )
        if not self._whole_batch_everywhere:
            (upper, of_upper), (lower, of_lower) = (
                part_of(batch[level], trainer.global_rank, world) for level in ("upper", "lower")
            )
            part = {**batch, "upper": upper, "lower": lower}
            spread = self.bilevel_problem(part).on_this_rank(of_upper, of_lower, total)
            try:
                if point is not None:
                    check_parts(name, whole, spread, *point, batch, part)
                return spread, part
            except ValueError:
                if not self._normalises_batches():
                    raise
                self._whole_batch_everywhere = True
                rank_zero_warn(
                    f"`{name}` has batch normalisation, which looks at a whole batch: each of the {world} processes evaluates "
                    "all of it, which takes as long as one process. Normalise by group or layer to share the work, or "
                    "synchronise on GPUs with `Trainer(sync_batchnorm=True)`."
                )
        return self.bilevel_problem(batch).on_this_rank(1 / world, 1 / world, total), batch

    def _normalises_batches(self) -> bool:
        return any(isinstance(layer, _BatchNorm) and layer.training for layer in self._module().modules())

    def _look_at_buffers(self) -> None:
        """See whether buffers that evaluations write to change the losses, as the vectors of a spectral norm do."""
        if self._current is None or self._functions is None:
            return
        self._functions.compare_buffers()
        kept = self.written_buffers
        if not kept:
            return
        problem, (x, y) = self._current.problem, self._feasible_point()
        generator = torch.Generator().manual_seed(0)  # the same in all processes
        with problem.uncounted():
            before = problem.upper(x, y).value, problem.at(x, remember=False).value(y)
            for buffer in self._functions.written_buffers:
                if buffer.is_floating_point():
                    buffer.add_(torch.randn(buffer.shape, generator=generator).to(buffer))
            problem.forget()  # what is kept of a point would hide that it changes
            self._buffers_matter = before != (problem.upper(x, y).value, problem.at(x, remember=False).value(y))
        problem.forget()
        self._write_buffers(kept)

    def _update_buffers(self) -> None:
        """Evaluate the losses once more at the point that was reached, with the module's own buffers.

        Trial points write to copies of the buffers. So running statistics follow the accepted points, one update each. Buffers
        that change the losses are updated until these settle: they are to be functions of the point.
        """
        if self._current is None or self._functions is None or not self._functions.written_buffers:
            return
        current, before = self._current, self._evaluate_live()
        if self._buffers_matter:
            for _ in range(_MAX_UPDATES):
                after = self._evaluate_live()
                if abs(after - before) <= _SETTLED * abs(before):
                    break
                before = after
            # Another function than before: nothing that is known of the point holds any more.
            problem = copy(current.problem)
            self._current = replace(current, problem=problem, scaled=problem.in_units(*self._declared().units))
        if current.problem.reduce is not None:
            for buffer in self._functions.written_buffers:
                torch.distributed.broadcast(buffer, 0)

    def _evaluate_live(self) -> float:
        """Evaluate both losses at the module's own parameters, with its own buffers, and return their sum."""
        assert self._current is not None
        total = 0.0
        split = self.lower_features or self.lower_outputs
        for part in as_chunks(self._current.part["lower"]).batches:
            total += float((self.lower_loss(part, split(part)) if split is not None else self.lower_loss(part)).detach())
        for part in as_chunks(self._current.part["upper"]).batches:
            total += float(self.upper_loss(part).detach())
        return total

    def _check_agreement(self, trainer: Any, iteration: int) -> None:
        """Stop where processes have come apart, such as on machines that round differently."""
        declared = self._declared()
        parameters = (p for level in declared.levels for p in level.parameters)
        if trainer.world_size > 1 and not agree(parameters, trainer.strategy.root_device):
            raise BilevelError(
                f"after outer iteration {iteration} the processes do not hold the same point: they must run on the same kind of "
                "hardware with the same versions, and nothing but the solver may change the parameters."
            )

    def _check_trainer(self) -> None:
        trainer: Any = self._module().trainer
        if trainer.precision not in ("32-true", "64-true"):
            raise MisconfigurationException(
                f"`Trainer(precision={trainer.precision!r})` is not supported: the Moreau gap is a small difference of large "
                "numbers, which half precision does not resolve. Use 32-true or 64-true."
            )
        # By type: DeepSpeed's strategy is a DDPStrategy to isinstance.
        if not isinstance(trainer.strategy, SingleDeviceStrategy) and type(trainer.strategy) is not DDPStrategy:
            raise MisconfigurationException(
                f"`Trainer(strategy={type(trainer.strategy).__name__})` is not supported: projections, line search and Moreau "
                'gap need whole vectors x and y, which this strategy cuts into pieces. `strategy="ddp"` splits the data instead, '
                "and `Chunks` evaluates a batch that is larger than memory."
            )
        for callback in trainer.callbacks:
            why = _why_not(callback)
            if why:
                raise MisconfigurationException(f"`{type(callback).__name__}` cannot watch `{type(self).__name__}`: {why}")


# Lightning looks up the signature of `training_step` at every step; here it finds it made already.
vars(BilevelMixin)["training_step"].__signature__ = inspect.signature(BilevelMixin.training_step)


class IVSPMixin(BilevelMixin):
    """:class:`BilevelMixin` with IVSP as the solver unless another one is declared."""

    default_solver: ClassVar[type[IVSP] | None] = IVSP


class BilevelModule(BilevelMixin, LightningModule):
    """:class:`BilevelMixin` on LightningModule, for those who do not want to think about the order of bases."""


def _why_not(callback: Any) -> str:
    """Say why a callback of Lightning's cannot do its work on a bilevel module; nothing if it can."""
    if isinstance(callback, ModelPruning):
        return "it changes the parameters in the middle of a run, which is then one of another problem. Prune before or after."
    if isinstance(callback, LearningRateMonitor) and callback.log_weight_decay:
        return "its solver has no weight decay. Leave out `log_weight_decay=True`."
    return ""


def _leave_out_partials(name: str, checkpoint: dict[str, Any]) -> None:
    """Leave out of a checkpoint what `save_hyperparameters` has kept of a solver with its constants, as it is no plain data."""
    kept = checkpoint.get("hyper_parameters", {})
    partials = [key for key, value in kept.items() if isinstance(value, partial) and _is_solver(value.func)]
    for key in partials:
        del kept[key]
    if partials:
        warnings.warn(
            f"`{name}` keeps {', '.join(partials)} out of its checkpoint, which holds data and no code. Say "
            f"`save_hyperparameters(ignore={partials})`, and give it again where the module is loaded.",
            stacklevel=2,
        )


def _is_solver(made: Any) -> bool:
    return isinstance(made, type) and issubclass(made, BilevelOptimizer)
