"""What all methods share: constants, a state, steps on g; and the torch optimizer around them."""

from __future__ import annotations

import inspect
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bilevel.core.chunks import map_tensors
from lightning_bilevel.core.errors import (
    BilevelError,
    InnerLoopError,
    LineSearchError,
    NonFiniteError,
)
from lightning_bilevel.core.lower import At, LowerLevel, vector
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import Metric, norm
from lightning_bilevel.solvers.constants import Constants, Power
from lightning_bilevel.solvers.parameters import blocks, by_level, check_dtypes, flat, read
from lightning_bilevel.solvers.record import Progress, StepInfo, evolve
from lightning_bilevel.solvers.theorem import TheoremPoint

S = TypeVar("S", bound="State")
Units = tuple[float, float]
# Every so many steps the values of the parameters are compared with x and y.
_COMPARED = 100


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a run; a method adds its own fields, tensors and plain values.

    Attributes:
        x: The upper-level variables.
        y: The lower-level variables.
        units: The units of x and y (:mod:`lightning_bilevel.core.vectors`).
        k: The iterations so far.
    """

    x: Tensor
    y: Tensor
    units: Units = (1.0, 1.0)
    k: int = 0

    # The parameters hold x and y. A subclass adds what it evaluates again after a load.
    UNSAVED: ClassVar[tuple[str, ...]] = ("x", "y")

    @property
    def metric(self) -> Metric:
        return Metric(self.x.numel(), *self.units)

    def rate_x(self, rate: float) -> float:
        """Return the step length of x itself: the rate times unit^2."""
        return rate * self.units[0] ** 2

    def rate_y(self, rate: float) -> float:
        """Return the step length of y itself: the rate times unit^2."""
        return rate * self.units[1] ** 2

    def after(self: S, x: Tensor, y: Tensor, **more: Any) -> S:
        """Return the state after an iteration to (x, y)."""
        return evolve(self, x=x, y=y, k=self.k + 1, **more)

    def moved(self: S, x: Tensor, y: Tensor) -> S:
        """Return the state after the point, f or g was changed from outside."""
        return evolve(self, x=x, y=y)

    def plain(self) -> dict[str, Any]:
        """Return the state as plain data, for a checkpoint."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.UNSAVED}

    @classmethod
    def load(cls: type[S], saved: dict[str, Any], x: Tensor, y: Tensor) -> S:
        """Return the state that :meth:`plain` has made plain, at the saved point (x, y)."""
        return cls(**{**saved, "units": tuple(saved["units"])}, x=x, y=y)


@dataclass(frozen=True, kw_only=True)
class AheadState(State):
    """The state of a method that evaluates g at the new x, where its next iteration begins.

    Attributes:
        here: g(x, .); None at the start, after a load, and after a change from outside.
    """

    here: LowerLevel | None = None

    UNSAVED: ClassVar[tuple[str, ...]] = (*State.UNSAVED, "here")

    def moved(self, x: Tensor, y: Tensor) -> AheadState:
        return evolve(self, x=x, y=y, here=None)


class Descent(NamedTuple):
    r"""The end of some steps on g(x, .).

    Attributes:
        end: The last point.
        first: The gradient at the first point.
        lower: g at the point before the last step.
        before: The last points before the projection, oldest first; the last of them leads to
            ``end``.
    """

    end: Tensor
    first: Tensor | None
    lower: float
    before: list[Tensor]


def descend(
    lower: LowerLevel, z: At, rate: float, steps: int, lower_set: ConvexSet, keep: int = 1
) -> Descent:
    r"""Repeat :math:`u = z - s \nabla_y g(x, z)`, :math:`z \leftarrow P_Y(u)`; keep the last u."""
    first: Tensor | None = None
    before: list[Tensor] = []
    value = 0.0
    for _ in range(steps):
        value, slope = lower.value_and_gradient(z)
        first = slope if first is None else first
        u = vector(z) - rate * slope
        z = lower_set.project(u)
        before = [*before, u][-keep:]
    return Descent(vector(z), first, value, before)


@dataclass(frozen=True, kw_only=True)
class Method(Constants, ABC, Generic[S]):
    """The constants of a method, with its step.

    It is a function of problem and state: nothing of a run is kept here.
    """

    # S; a subclass of Method[S] need not set it.
    state_type: ClassVar[type[State]] = State
    # Whether the method penalises further residuals, and takes a problem with a single level.
    penalised: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for of in getattr(cls, "__orig_bases__", ()):
            # Method[S]
            cls.state_type = next(iter(get_args(of)), cls.state_type)

    def lr_at(self, k: int) -> float:
        """Return the step size of x in iteration k, which loggers show: the first constant."""
        first = getattr(self, fields(self)[0].name)
        return float(first.at(k) if isinstance(first, Power) else first)

    def start(self, problem: BilevelProblem, x: Tensor, y: Tensor, units: Units) -> S:
        """Return the state of a new run."""
        return cast("S", self.state_type(x=x, y=y, units=units))

    @abstractmethod
    def step(self, problem: BilevelProblem, s: S) -> tuple[S, StepInfo]:
        """Do one outer iteration; :meth:`BilevelOptimizer.step` completes the record."""

    def check(self, problem: BilevelProblem, s: S) -> None:
        """Raise a clearer error if f or g gives other values at the same point."""

    def on_new_data(self, s: S) -> S:
        """Return the state for other data: f and g change, the point stays."""
        return s

    def in_use(self, s: S | None) -> Constants:
        """Return the constants that a run goes by; a method may have estimated some."""
        return self


class BilevelOptimizer(Optimizer):
    """A method as a torch optimizer over two levels: reads the point, steps, writes the point.

    Args:
        params: Two parameter groups, ``[{"params": [...], "level": "upper"}, {"params": [...],
            "level": "lower"}]``. A group may have a ``unit`` s: the steps of that level are s**2
            times as long. A bilevel module may stand for its groups.
        constants: The constants of the method.
    """

    method_type: ClassVar[type[Method[Any]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A checkpoint may name its solver among the hyper-parameters of a module. Loading it with
        # `weights_only`, torch's default, needs the class to be registered.
        torch.serialization.add_safe_globals([cls])
        if "method_type" in vars(cls):
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]

    def __init__(self, params: Any, **constants: Any) -> None:
        self.method = self.method_type(**constants)
        self.method.warn()
        groups = params.parameter_groups() if hasattr(params, "parameter_groups") else params
        levels = by_level(type(self).__name__, groups)
        super().__init__(levels, {"unit": 1.0, "lr": self.method.lr_at(0)})
        check_dtypes(type(self).__name__, self.param_groups)
        self.progress = Progress()
        self.run: Any = None
        # The problem of the last step, and the memory and versions of the parameters after it.
        self._problem: BilevelProblem | None = None
        self._written: list[tuple[Tensor, int]] = []

    @property
    def constants(self) -> Constants:
        """The constants as they are now (after a load: the saved ones)."""
        return self.method.in_use(self.run)

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The constants that have a value, for callbacks and reports that show a run."""
        return {name: v for name, v in self.constants.plain().items() if v is not None}

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope of the method's own relaxation, if any, in the user's y."""
        return None

    @property
    def chosen(self) -> list[tuple[str, str]]:
        """The constants that the method has estimated, each with its value and its origin."""
        return []

    @property
    def multiplier(self) -> float | None:
        """The method's multiplier of the gap constraint, if it has one."""
        return None

    @property
    def proved(self) -> TheoremPoint | None:
        """The point that the method's convergence theorem speaks of, if the method keeps it."""
        return None

    @property
    def unproved(self) -> str:
        """Why :attr:`proved` is None, in words."""
        return f"{type(self).__name__} does not keep the point of its theorem, only IVSP does"

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, problem: BilevelProblem | None = None
    ) -> StepInfo:
        """Do one outer iteration on the problem and write the new point into the parameters.

        An error leaves state and parameters as they were.

        Args:
            closure: Called once; Lightning counts a step by it. If ``problem`` is missing, the
                closure returns it, as in ``solver.step(lambda: problem)``: an optimizer that Fabric
                has wrapped takes a closure and nothing else.
            problem: f and g. As long as it is the same object, the evaluation of the current point
                is reused.
        """
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
            problem = returned if problem is None else problem
        name = type(self).__name__
        if not isinstance(problem, BilevelProblem):
            raise TypeError(
                f"`{name}.step` was given a {type(problem).__name__}: it needs f and g, as "
                "`step(problem=problem)` or `step(lambda: problem)`."
            )
        if problem.beyond and not self.method.penalised:
            raise BilevelError(f"{problem.beyond}, and {name} sees f and g alone: use IVSP.")
        began = time.perf_counter()
        calls = problem.calls
        try:
            state = self._current(problem)
            try:
                new, info = self.method.step(problem, state)
            except (InnerLoopError, LineSearchError):
                self.method.check(problem, state)
                raise
            step = info.step
            if math.isnan(step):
                (a, b), (x, y) = state.units, (state.x, state.y)
                step = math.hypot(norm(new.x - x) / a, norm(new.y - y) / b)
            if not math.isfinite(step):
                raise NonFiniteError(f"the step has the length {step}: make steps shorter.")
        except BilevelError as error:
            where = f"{name} stopped in outer iteration {self.progress.iterations + 1}"
            raise type(error)(f"{where}: {error}") from error
        self.run, self._problem, self._written = new, problem, []
        for parameter, block in blocks(self.param_groups, new.x, new.y):
            parameter.copy_(block)
            self._written.append((parameter.detach(), parameter._version))
        lr = self.method.lr_at(state.k) if info.lr is None else info.lr
        for group in self.param_groups:
            group["lr"] = lr
        spent = problem.calls - calls
        # Processes agree on the time, so a time limit stops them in the same iteration.
        seconds = problem.mean_over_ranks(time.perf_counter() - began, new.x)
        self.progress = self.progress.after(info.inner_iterations, spent, problem.share, seconds)
        return evolve(
            info,
            iteration=self.progress.iterations,
            step=step,
            lr=lr,
            calls=spent,
            passes=self.progress.passes,
            optimization_time=self.progress.optimization_time,
        )

    def problem_changed(self) -> None:
        """Forget what is known of f and g at the point, because those of the next step are others.

        Where the data of a run grow, this is called before the first step on more data.
        """
        self._problem = None
        if self.run is not None:
            self.run = self.method.on_new_data(self.run)

    def _current(self, problem: BilevelProblem) -> Any:
        """Return the state at the parameters: the last one if nobody has changed anything."""
        groups, run = self.param_groups, self.run
        if run is not None and self._untouched():
            pairs = blocks(groups, run.x, run.y)
            if run.k % _COMPARED == 0 and not all(torch.equal(p, block) for p, block in pairs):
                raise BilevelError(
                    "parameters were written through `.data`, which the solver does not notice: "
                    "write by `with torch.no_grad(): parameter.copy_(...)`."
                )
            return run if problem is self._problem else run.moved(run.x, run.y)
        x, y = read(groups, problem)
        units = groups[0]["unit"], groups[1]["unit"]
        return self.method.start(problem, x, y, units) if run is None else run.moved(x, y)

    def _untouched(self) -> bool:
        """Whether nobody has written to the parameters since, but for writes through ``.data``."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return bool(self._written) and all(
            p.is_set_to(memory) and p._version == version
            for p, (memory, version) in zip(parameters, self._written, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return groups, constants and the state of the run as plain data."""
        return {**super().state_dict(), "state": self._plain()}

    def _plain(self) -> dict[str, Any]:
        run = None if self.run is None else self.run.plain()
        return {"constants": self.method.plain(), "progress": asdict(self.progress), "run": run}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "state": self._plain()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, from a pickle or through ``load_state_dict``, which ends here."""
        super().__setstate__({**state, "state": defaultdict(dict)})
        saved, like = state["state"], self.param_groups[0]["params"][0]
        self.method = self.method_type(**saved["constants"])
        self.progress = Progress(**saved["progress"])
        self.run, self._problem, self._written = None, None, []
        if saved["run"] is not None:
            run = map_tensors(lambda t: t.detach().to(like, copy=True), saved["run"])
            self.run = self.method.state_type.load(run, *flat(self.param_groups))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters beyond the two levels, for example of a finetuning callback."""
        if len(self.param_groups) == 2:
            raise ValueError(
                f"`{type(self).__name__}.add_param_group` cannot take parameters into a run whose "
                "vectors x and y have a fixed length. Unfreeze them before `Trainer.fit`."
            )
        super().add_param_group(param_group)


def _constructor(cls: type[BilevelOptimizer]) -> Any:
    """Return an ``__init__`` whose signature is that of the method's constants."""

    def __init__(self: BilevelOptimizer, params: Any, **constants: Any) -> None:
        BilevelOptimizer.__init__(self, params, **constants)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = inspect.Parameter("self", kind)
    params = inspect.Parameter("params", kind, annotation=Iterable[dict[str, Any]])
    given = [params, *cls.method_type.parameters()]
    __init__.__signature__ = inspect.Signature([own, *given])  # type: ignore[attr-defined]
    __init__.__annotations__ = {p.name: p.annotation for p in given}
    __init__.__qualname__, __init__.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return __init__


SolverCallable = Callable[[Iterable[dict[str, Any]]], BilevelOptimizer]
