"""What a bilevel module declares, and the problem that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.core.qualification import Qualification
from lightning_bilevel.mini_batches import MiniBatches
from lightning_bilevel.plugin.batches import ON_MINI_BATCHES, BatchProblem, check_batch
from lightning_bilevel.plugin.declaration import Declaration, Level, Sets
from lightning_bilevel.plugin.functional import Declared, problem_of
from lightning_bilevel.plugin.processes import shared_problem
from lightning_bilevel.plugin.run import Run
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.stochastic.step import Method, Options

__all__ = ["DeclaredLevels"]


class DeclaredLevels:
    """The two levels of a module: its losses, its parameters, its sets and its solver."""

    default_solver: ClassVar[SolverCallable | None] = None
    lower_features: Callable[..., Any] | None = None
    lower_outputs: Callable[..., Any] | None = None
    # Adds the gradients of a mini-batch, where the lower level is solved anew on each.
    batch_gradients: Callable[..., Any] | None = None
    # The gradient steps on the lower level in a step on a mini-batch.
    inner_iterations: int = 1
    _mini_batches: MiniBatches | None = None

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
        # Read from the class: an instance would bind a plain function as its method.
        if solver is not None and (method is not None or upper_optimizer or lower_optimizer):
            raise ValueError(
                f"`{type(self).__name__}.declare()` was given a solver, for exact runs, and a "
                "method or optimisers, for mini-batches: give one of the two."
            )
        if method is not None and not isinstance(method, Method):
            raise TypeError(
                f"`{type(self).__name__}.declare(method={getattr(method, '__name__', method)!s})` "
                "must be an instance of a method on mini-batches, such as "
                "`lightning_bilevel.stochastic.F2SA()`; a solver for all data is given as "
                "`solver=`."
            )
        solver = solver or type(self).default_solver
        optimizers = upper_optimizer, lower_optimizer
        by_torch = method is not None or any(optimizers) or self._has_own_optimizers()
        if solver is None and not by_torch:
            raise ValueError(
                f"`{type(self).__name__}.declare()` needs a solver, such as `solver=IVSP`, or "
                "`configure_optimizers` a torch optimiser for each level."
            )
        clip: Any = gradient_clip_val
        steps = upper_scheduler, lower_scheduler, clip, None if accumulate == 1 else accumulate
        if not by_torch and any(given is not None for given in steps):
            raise ValueError(
                f"`{type(self).__name__}.declare()` was given schedulers, `gradient_clip_val` or "
                "`accumulate`, which are for mini-batches: name a method or an optimiser too."
            )
        call = f"{type(self).__name__}.declare"
        self._declaration = Declaration(
            Level(call, "upper", upper, upper_set),
            Level(call, "lower", lower, lower_set),
            (upper_unit, lower_unit),
            solver or IVSP,
            envelope,
            qualification,
            method,
            Options(
                clip=tuple(clip) if isinstance(clip, (tuple, list)) else (clip, clip),
                accumulate=accumulate,
                skip_nonfinite=skip_nonfinite,
            ),
            optimizers,
            (upper_scheduler, lower_scheduler),
        )
        # This solver refuses bad arguments before any data are loaded. A run builds its own solver
        # when it starts.
        self._run = Run(self._declaration.new_solver())
        self._saved_start: Start | None = None
        self.last_step: StepInfo | None = None
        self._module().automatic_optimization = False

    def upper_loss(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return f on the batch of the upper level."""
        raise NotImplementedError(f"`{type(self).__name__}` must define `upper_loss(batch)`, f.")

    def lower_loss(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return g on the batch of the lower level.

        With :attr:`lower_features` or :attr:`lower_outputs`, their result is the second argument.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must define `lower_loss(batch)`, g.")

    def bilevel_problem(self, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g on a batch ``{"upper": ..., "lower": ...}``, for flat x and y."""
        declared = self._declared()
        check_batch(type(self).__name__, batch)
        functions = self._run.buffers.functions_of(self._module(), declared)
        return problem_of(functions, batch, declared.upper.feasible, declared.lower.feasible)

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope of the certificate, in y: the solver's, or else the declared one."""
        method = self._declared().method
        own = self._run.solver.envelope if method is None else method.envelope
        return own or self._declared().envelope

    @property
    def point(self) -> tuple[Tensor, Tensor]:
        """The current x and y, each as a new flat vector."""
        return self._declared().read()

    @point.setter
    def point(self, point: tuple[Tensor, Tensor]) -> None:
        self._declared().write(*point)
        self._run.shown = "a point that was written into the module"

    def problem_on(self, batch: Any) -> BilevelProblem:
        """Return the problem on a training batch, as all processes share it."""
        return self._problem_on(batch).problem

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the two levels with their units, as a solver takes them."""
        return self._declared().groups()

    @property
    def mini_batches(self) -> MiniBatches | None:
        """The run on mini-batches by torch optimisers; None in any other run."""
        run = self._mini_batches
        return run if run is not None and run.step is not None else None

    def _has_own_optimizers(self) -> bool:
        return False

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
                raise type(error)(f"{error} Or run on mini-batches: {ON_MINI_BATCHES}.") from error
            run.certifier.start = run.certifier.start or start
            run.buffers.examine(module, problem, *point)
        return BatchProblem(contents, batch, part, problem)
