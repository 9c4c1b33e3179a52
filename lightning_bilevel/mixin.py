"""What a LightningModule inherits to become a bilevel problem."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_bilevel.checkpoints import KEY as CHECKPOINT_KEY
from lightning_bilevel.checkpoints import check_record, record
from lightning_bilevel.data.fullbatch import Chunks, as_chunks
from lightning_bilevel.evaluation import Declared, ModuleFunctions, parameters_of
from lightning_bilevel.kkt import Certificate, certify
from lightning_bilevel.leaves import leaves
from lightning_bilevel.moreau import Envelope
from lightning_bilevel.problem import BilevelError, BilevelProblem
from lightning_bilevel.processes import agree, check_parts, part_of, total
from lightning_bilevel.sets import ConvexSet, Free, Product
from lightning_bilevel.solvers.base import BilevelOptimizer, SolverCallable, StepInfo
from lightning_bilevel.solvers.ivsp import IVSP

__all__ = ["BilevelMixin", "BilevelModule", "IVSPMixin"]

Sets = ConvexSet | Sequence[ConvexSet]


@dataclass
class _Declaration:
    upper: list[nn.Parameter]
    lower: list[nn.Parameter]
    upper_set: ConvexSet
    lower_set: ConvexSet
    units: tuple[float, float]
    solver: SolverCallable
    envelope: Envelope | None
    qualification: str | Callable[[Envelope], str]

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": self.upper, "level": "upper"}, {"params": self.lower, "level": "lower"}]


@dataclass
class _Current:
    """The problem of the batch that is being trained on, and what tells that batch from another."""

    contents: list[tuple[Any, int]]
    problem: BilevelProblem
    scaled: BilevelProblem

    def serves(self, contents: list[tuple[Any, int]]) -> bool:
        return len(contents) == len(self.contents) and all(
            a is b and version == other for (a, version), (b, other) in zip(contents, self.contents, strict=True)
        )


@dataclass
class _Evaluated:
    """The certificate that was evaluated last, and all that it depends on."""

    given: tuple[BilevelProblem, Envelope, float | None, float | None]
    point: tuple[Tensor, Tensor]
    certificate: Certificate
    iteration: int

    def serves(self, given: tuple[BilevelProblem, Envelope, float | None, float | None], point: tuple[Tensor, Tensor]) -> bool:
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
        levels = []
        for name, declared, sets in (("upper", upper, upper_set), ("lower", lower, lower_set)):
            items = parameters_of(declared)
            parameters = [p for item in items for p in item]
            if not parameters:
                raise ValueError(f"`{type(self).__name__}.declare({name}=...)` has no trainable parameter.")
            known = {id(p) for p in module.parameters()}
            if any(id(p) not in known for p in parameters):
                raise ValueError(f"`{type(self).__name__}.declare({name}=...)` has a parameter that is not the module's own.")
            levels.append((parameters, _set_of(f"{type(self).__name__}.declare({name}_set=...)", sets, items)))
        (x, x_set), (y, y_set) = levels
        self._declaration = _Declaration(x, y, x_set, y_set, (upper_unit, lower_unit), solver, envelope, qualification)
        # Built once to refuse bad arguments here, before any data are loaded; the solver of a run is built when it starts.
        solver(self._declaration.groups())
        self._current: _Current | None = None
        self._evaluated: _Evaluated | None = None
        self.last_step: StepInfo | None = None
        # Seconds that certificates have taken since the start of fit.
        self.evaluation_time = 0.0
        self._monitored = False
        module.automatic_optimization = False

    def bilevel_problem(self, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g on a batch ``{"upper": ..., "lower": ...}`` as functions of flat x and y."""
        declared = self._declared()
        if not isinstance(batch, dict) or not {"upper", "lower"} <= batch.keys():
            got = f"a dict with {sorted(batch)}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
            raise MisconfigurationException(
                f'`{type(self).__name__}` was given {got} as a training batch: it must be {{"upper": ..., "lower": ...}}, as a '
                "CombinedLoader over two loaders or a FullBatchDataModule gives it."
            )
        functions = ModuleFunctions(self._module(), declared.upper, declared.lower)
        upper, lower = as_chunks(batch["upper"]), as_chunks(batch["lower"])

        def terms(make: Callable[..., Any], method: str, chunks: Chunks) -> list[Any]:
            return [make(method, part, scale=weight) for part, weight in zip(chunks.batches, chunks.shares, strict=True)]

        encoded, split = self.lower_features is not None, self.lower_outputs is not None
        make = functions.decoder if encoded else functions.weighing if split else functions.function
        return BilevelProblem(
            terms(functions.function, "upper_loss", upper),
            terms(make, "lower_loss", lower),
            declared.upper_set,
            declared.lower_set,
            encoder=[functions.encoder("lower_features", part) for part in lower.batches] if encoded else None,
            body=[functions.body("lower_outputs", part) for part in lower.batches] if split else None,
        )

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Do one outer iteration."""
        optimizer = cast(Any, self._module().optimizers())
        info: StepInfo = optimizer.step(problem=self._problem_on(batch).scaled)
        self.last_step = info
        trainer: Any = self._module().trainer
        logged = is_logged(trainer, info.iteration)
        if logged or self._monitored:
            metrics = info.metrics()
            # What EarlyStopping and ModelCheckpoint look at; `self.log` takes milliseconds for the same.
            trainer.callback_metrics.update(zip(metrics, torch.tensor(list(metrics.values())).unbind(), strict=True))
        if logged:
            self._check_agreement(trainer, info.iteration)
            for logger in trainer.loggers if trainer.is_global_zero else []:
                logger.log_metrics(metrics, step=info.iteration)

    def configure_optimizers(self) -> BilevelOptimizer:
        """Make the solver."""
        declared, module = self._declared(), self._module()
        self._check_trainer()
        ours = {id(p) for p in (*declared.upper, *declared.lower)}
        forgotten = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in ours]
        if forgotten:
            raise MisconfigurationException(
                f"`{type(self).__name__}.declare` names neither as upper nor as lower: {', '.join(forgotten)}. Each trainable "
                "parameter belongs to one level; a constant has `requires_grad=False`."
            )
        self._current = self._evaluated = None
        self.evaluation_time = 0.0
        callbacks: Any = cast(Any, module.trainer).callbacks
        self._monitored = any(str(getattr(callback, "monitor", "")).startswith("bilevel/") for callback in callbacks)
        return declared.solver(declared.groups())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say in the checkpoint which solver and which problem it is of."""
        declared = self._declared()
        checkpoint[CHECKPOINT_KEY] = record(declared.solver(declared.groups()))
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run, and load a float64 one as float64.

        The Trainer converts the module only after it has loaded the weights.
        """
        declared, trainer = self._declared(), self._module()._trainer
        if trainer is not None:
            resumes = trainer.state.fn == TrainerFn.FITTING
            check_record(type(self).__name__, checkpoint, declared.solver(declared.groups()), resumes=resumes)
            if trainer.precision == "64-true":
                self._module().double()
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope of the certificate, in y: that of the solver, or the declared one."""
        declared = self._declared()
        return self._envelope_with(declared.solver(declared.groups()))

    def _envelope_with(self, solver: BilevelOptimizer) -> Envelope | None:
        declared, own = self._declared(), solver.envelope
        if own is None:
            return declared.envelope
        # |v - v'|^2/(2 rho) in the unit of y is |y - y'|^2/(2 rho unit^2).
        square = declared.units[1] ** 2
        return Envelope(rho=own.rho * square, sigma=own.sigma / square, delta=own.delta)

    @property
    def point(self) -> tuple[Tensor, Tensor]:
        """The current x and y, each as one flat vector of its own."""
        declared = self._declared()
        x, y = (torch.cat([p.detach().reshape(-1) for p in level]) for level in (declared.upper, declared.lower))
        return x.clone(), y.clone()

    @point.setter
    def point(self, point: tuple[Tensor, Tensor]) -> None:
        declared = self._declared()
        with torch.no_grad():
            for level, vector in zip((declared.upper, declared.lower), point, strict=True):
                for parameter, block in zip(level, torch.split(vector, [p.numel() for p in level]), strict=True):
                    parameter.copy_(block.view_as(parameter))

    def certify(
        self, *, batch: Any = None, envelope: Envelope | None = None, tolerance: float | None = None
    ) -> Certificate | None:
        """Return the certificate of the current point; None without an envelope.

        Args:
            batch: The training batch to evaluate f and g on; None is the last one.
            envelope: Another Moreau envelope than the module's.
            tolerance: The accuracy of the proximal point.
        """
        declared = self._declared()
        if batch is not None:
            self._problem_on(batch)
        if self._current is None:
            raise RuntimeError(f"`{type(self).__name__}.certify()` needs a training batch: call it after `Trainer.fit`.")
        # The solver of the run, not one made anew: after a resume its constants are the checkpoint's.
        optimizer = cast(Any, self._module().optimizers()).optimizer
        envelope = envelope or self._envelope_with(optimizer)
        if envelope is None:
            return None
        given, point = (self._current.problem, envelope, tolerance, optimizer.multiplier), self.point
        if self._evaluated is None or not self._evaluated.serves(given, point):
            began, known = time.perf_counter(), declared.qualification
            certificate = certify(
                self._current.problem,
                *point,
                envelope,
                multiplier=optimizer.multiplier,
                tolerance=tolerance,
                qualification=known if isinstance(known, str) else known(envelope),
            )
            # Agreed among the processes: it decides whether the next certificate, a collective, is evaluated.
            self.evaluation_time += self._current.problem.agreed(time.perf_counter() - began, point[0])
            self._evaluated = _Evaluated(given, point, certificate, optimizer.memory["iteration"])
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

    def _declared(self) -> _Declaration:
        declared: _Declaration | None = getattr(self, "_declaration", None)
        if declared is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}` has not declared its levels: call `self.declare(upper=..., lower=...)` at the end of "
                "its `__init__`."
            )
        return declared

    def _problem_on(self, batch: Any) -> _Current:
        contents = list(_contents(batch))
        if self._current is None or not self._current.serves(contents):
            declared, point = self._declared(), None
            if self._current is None:
                levels = ((declared.upper, declared.upper_set), (declared.lower, declared.lower_set))
                x, y = (of.project(torch.cat([p.detach().reshape(-1) for p in level])) for level, of in levels)
                point = x, y
            problem = self._problem_of_all(batch, point)
            if point is not None:
                problem.check(*point)
            self._current = _Current(contents, problem, problem.in_units(*declared.units))
        return self._current

    def _problem_of_all(self, batch: Any, point: tuple[Tensor, Tensor] | None) -> BilevelProblem:
        """The problem on a batch, shared by all processes of the Trainer; checked at a point if there is one."""
        trainer, whole = self._module()._trainer, self.bilevel_problem(batch)
        if trainer is None or trainer.world_size == 1:
            return whole
        name = type(self).__name__
        # Loaders with distributed samplers repeat or drop samples, so a batch that came split is never the exact full batch.
        if not agree((leaf for leaf, _ in _contents(batch)), trainer.strategy.root_device):
            raise MisconfigurationException(
                f"`{name}` was given different batches in different processes: it splits a batch itself, so that each sample "
                "counts once. Use a FullBatchDataModule, or `Trainer(use_distributed_sampler=False)` with the same seed in all "
                "processes."
            )
        (upper, of_upper), (lower, of_lower) = (
            part_of(batch[level], trainer.global_rank, trainer.world_size) for level in ("upper", "lower")
        )
        spread = self.bilevel_problem({**batch, "upper": upper, "lower": lower}).spread(of_upper, of_lower, total)
        if point is not None:
            check_parts(name, whole, spread, *point, batch, {"upper": upper, "lower": lower})
        return spread

    def _check_agreement(self, trainer: Any, iteration: int) -> None:
        """Stop where processes have come apart, such as on machines that round differently."""
        declared = self._declared()
        if trainer.world_size > 1 and not agree((*declared.upper, *declared.lower), trainer.strategy.root_device):
            raise BilevelError(
                f"after outer iteration {iteration} the processes do not hold the same point: they must run on the same kind of "
                "hardware with the same versions, and nothing but the solver may change the parameters."
            )

    def _check_trainer(self) -> None:
        trainer = self._module().trainer
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


# Lightning looks up the signature of `training_step` at every step; here it finds it made already.
vars(BilevelMixin)["training_step"].__signature__ = inspect.signature(BilevelMixin.training_step)


class IVSPMixin(BilevelMixin):
    """:class:`BilevelMixin` with IVSP as the solver unless another one is declared."""

    default_solver: ClassVar[type[IVSP] | None] = IVSP


class BilevelModule(BilevelMixin, LightningModule):
    """:class:`BilevelMixin` on LightningModule, for those who do not want to think about the order of bases."""


def _set_of(call: str, sets: Sets | None, items: list[list[nn.Parameter]]) -> ConvexSet:
    if sets is None:
        return Free()
    if isinstance(sets, ConvexSet):
        return sets
    if not isinstance(sets, Sequence) or len(sets) != len(items) or not all(isinstance(s, ConvexSet) for s in sets):
        raise ValueError(f"`{call}` must be one set, or a list with one set for each of the {len(items)} declared items.")
    return Product(sets, [sum(p.numel() for p in item) for item in items])
