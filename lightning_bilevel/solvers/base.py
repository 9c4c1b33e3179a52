"""The base class of all methods: a torch optimizer over two levels.

Each step is one outer iteration and returns a record of it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Calls
from lightning_bilevel.core.sample import Sample
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.level_steps import LevelSteps, torch_rules
from lightning_bilevel.solvers.level_vectors import check_levels
from lightning_bilevel.solvers.proved import ProvedPoint
from lightning_bilevel.solvers.record import Progress, StepInfo, StreamInfo
from lightning_bilevel.solvers.streaming import Directions, Streamed, Variable, stream
from lightning_bilevel.solvers.torch_rule import OptimizerCallable

__all__ = ["BilevelOptimizer", "SolverCallable"]

# The entries of a parameter group that are not hyper-parameters of the method.
_NOT_CONSTANT = ("params", "level", "name", "unit", "initial_lr")


class BilevelOptimizer(LevelSteps, ABC):
    """The base class of the bilevel methods.

    Hyper-parameters are in ``param_groups``, the state of the run is in ``state``, and the iterate
    is in the parameters. A method implements :meth:`advance`: one outer iteration on flat vectors,
    which returns the new vectors and a record.

    Args:
        params: Two parameter groups, ``[{"params": [...], "level": "upper"}, {"params": [...],
            "level": "lower"}]``. A group may have a ``unit``: the method then works in u with x =
            unit * u, which makes the steps of that level unit**2 times as long.
        defaults: The hyper-parameters: numbers, strings, None and tuples of them only, so that
            checkpoints load with ``weights_only``.
        optimizers: What makes the torch optimiser of ``"upper"``, ``"lower"`` and ``"inner"``; None
            or a missing one is the paper's step, and for ``"inner"`` a twin of the lower one.
    """

    # Whether the method strengthens a penalty. Its record is then a `PenaltyInfo`.
    penalised: ClassVar[bool] = False
    # Whether it may run on mini-batches: it compares no values of different batches. It then
    # implements `directions`, or is a `BatchIteration`.
    stochastic: ClassVar[bool] = False
    # Why a method that is not stochastic needs all data, for a message.
    needs_all_data: ClassVar[str] = "compares values of f and g, which must be of the same data"
    # What a message recommends for mini-batches in place of a method that is not stochastic.
    for_mini_batches: ClassVar[str] = "StreamingIVSP"
    # Whether `directions` needs the distance of y and z.
    measures_distance: ClassVar[bool] = False
    # So many mini-batches in a row may be not finite before the run ends.
    patience: ClassVar[int] = 10

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The checkpoint of a module may name its solver among the hyper-parameters. Loading it
        # with `weights_only`, torch's default, needs the class to be registered.
        torch.serialization.add_safe_globals([cls])

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        optimizers: Mapping[Variable, OptimizerCallable | None] | None = None,
    ) -> None:
        self._rules = torch_rules(type(self).__name__, optimizers or {})
        super().__init__(check_levels(type(self).__name__, params), {"unit": 1.0, **defaults})
        for group in self.param_groups:
            rule = self._rules.get(group["level"])
            if rule is not None:
                group["lr"] = rule.lr
                group["initial_lr"] = rule.lr
        self._forget()
        self.memory.update(
            iteration=0, inner_iterations=0, passes=0, values=0, optimization_time=0.0
        )

    @property
    def constants(self) -> dict[str, Any]:
        """The hyper-parameters as they are now (after a load: the saved ones)."""
        return {
            name: value for name, value in self.param_groups[0].items() if name not in _NOT_CONSTANT
        }

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        memory = self.memory
        return Progress(
            memory["iteration"],
            memory["inner_iterations"],
            memory["passes"],
            memory["optimization_time"],
        )

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The constants that have a value, for callbacks and reports that show a run."""
        return {
            name: value
            for name, value in self.constants.items()
            if value is not None and name != "lr"
        }

    @property
    def takes_mini_batches(self) -> bool:
        """Whether the method may run on mini-batches with the constants that it has."""
        return self.stochastic

    @property
    def takes_differences(self) -> bool:
        """Whether it subtracts gradients at close points, which half precision does not resolve."""
        return False

    @property
    def samples_upper_at_z(self) -> bool:
        """Whether :meth:`directions` needs f at the inner variable z too."""
        return False

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope of the method's own relaxation, if any, in the user's y."""
        return None

    @property
    def chosen(self) -> list[tuple[str, str]]:
        """The constants that the method has chosen itself, each with its value and its origin."""
        return []

    @property
    def multiplier(self) -> float | None:
        """The method's multiplier of the gap constraint, if it has one."""
        return None

    @property
    def proved(self) -> ProvedPoint | None:
        """The point that the method's convergence theorem speaks of, if the method keeps it."""
        return None

    @property
    def unproved(self) -> str:
        """Why :attr:`proved` is None, in words."""
        return f"{type(self).__name__} does not keep the point of its theorem, only IVSP does"

    def directions(self, sample: Sample, x: Tensor, y: Tensor, z: Tensor) -> Directions:
        """Say where the variables go in a step on a mini-batch.

        Args:
            sample: f and g on the mini-batch, at x, y and z.
            x: The upper-level variables.
            y: The lower-level variables.
            z: The inner variable, which starts at y.
        """
        raise NotImplementedError(f"`{type(self).__name__}` has no step on a mini-batch.")

    def on_batch(self, problem: BilevelProblem, x: Tensor, y: Tensor, seconds: float) -> Streamed:
        """Do one step on a mini-batch.

        Args:
            problem: f and g on the mini-batch.
            x: A copy of the upper-level variables, which may be changed in place.
            y: That of the lower-level variables, likewise.
            seconds: A time that this process has measured.
        """
        return stream(self, problem, x, y, seconds)

    @abstractmethod
    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        """Do one outer iteration.

        Args:
            problem: The problem, in the units of the parameter groups.
            x: The upper-level variables. If nothing has changed since the last iteration, this is
                the same tensor object that it returned.
            y: The lower-level variables, likewise.

        Returns:
            The new x and y, and the record. :meth:`step` fills in its remaining fields.
        """

    def prepare(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> float:
        """Look at the problem before an iteration; return a factor for the unit of x."""
        return 1.0

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, problem: BilevelProblem | None = None
    ) -> StepInfo:
        """Do one outer iteration on the problem and write the new point into the parameters.

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
        if not isinstance(problem, BilevelProblem):
            raise TypeError(
                f"`{type(self).__name__}.step` was given a {type(problem).__name__}: it needs f "
                "and g, as `step(problem=problem)` or `step(lambda: problem)`."
            )
        if problem.beyond and not self.penalised:
            name = type(self).__name__
            raise BilevelError(f"{problem.beyond}, and {name} sees f and g alone: use IVSP.")
        if problem.mini_batch:
            return self._step_on_batch(problem)
        began = time.perf_counter()
        calls = problem.calls
        memory = self.memory
        scaled = self._in_units(problem)
        try:
            with self._undone_by_a_fault("outer iteration"):
                x, y = self._current(scaled)
                factor = self.prepare(scaled, x, y)
                if factor != 1.0:
                    self.param_groups[0]["unit"] *= factor
                    scaled.forget()  # the problem in the old units is not used again
                    spent = scaled.calls
                    scaled = self._in_units(problem)
                    scaled.calls = spent
                    x = x / factor
                new_x, new_y, info = self.advance(scaled, x, y)
                step = info.step
                if math.isnan(step):
                    step = math.hypot(norm(new_x - x), norm(new_y - y))
                # Checked before the parameters are written: they stay at the last good point.
                if not math.isfinite(step):
                    sizes = f"{norm(x):.3g}, {norm(y):.3g}"
                    raise NonFiniteError(
                        f"the step from a point with norms {sizes} has the length {step}: make "
                        "steps shorter."
                    )
        finally:
            problem.calls = scaled.calls
        self._write(scaled, new_x, new_y)
        if info.lr is not None:
            info = self._with_rates(info, info.lr, info.lr)
        memory["iteration"] += 1
        memory["inner_iterations"] += info.inner_iterations
        self._count(problem, problem.calls - calls)
        # Processes agree on the time too, so a time limit stops them in the same iteration.
        memory["optimization_time"] += problem.mean_over_ranks(time.perf_counter() - began, new_x)
        return info.completed(
            iteration=memory["iteration"],
            step=step,
            calls=problem.calls - calls,
            passes=memory["passes"],
            optimization_time=memory["optimization_time"],
        )

    @contextmanager
    def _undone_by_a_fault(self, unit: str) -> Iterator[None]:
        """On an error, leave memory and parameter groups as they were; name the iteration in it.

        Both go together: what the memory keeps is in the units and of the constants in the groups.
        """
        memory = dict(self.memory)
        groups = [dict(group) for group in self.param_groups]
        try:
            yield
        except BaseException as error:
            for now, before in zip(
                (self.memory, *self.param_groups), (memory, *groups), strict=True
            ):
                now.clear()
                now.update(before)
            if not isinstance(error, BilevelError):
                raise
            where = f"{type(self).__name__} stopped in {unit} {memory['iteration'] + 1}"
            raise type(error)(f"{where}: {error}") from error

    def _count(self, problem: BilevelProblem, spent: Calls) -> None:
        """Add what was spent to the passes of the run; values wait until there are 3."""
        spent += Calls(values=self.memory.get("values", 0))
        self.memory["passes"] += _passes(problem, spent)
        self.memory["values"] = spent.values % 3

    def problem_changed(self) -> None:
        """Forget what is known at the point, because f and g of the next step are others.

        Where the data of a run grow, this is called before the first step on more data.
        """
        self._point = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters beyond the two levels, for example of a finetuning callback."""
        if len(self.param_groups) == 2:
            raise ValueError(
                f"`{type(self).__name__}.add_param_group` cannot take parameters into a run whose "
                "vectors x and y have a fixed length. Unfreeze them before `Trainer.fit`; to train "
                "more, call it once more."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # The tensors are the given ones, and steps on mini-batches change them in place.
        for name, value in self.memory.items():
            if isinstance(value, Tensor):
                self.memory[name] = value.clone()
        # torch would bring all numbers of an optimiser to the dtype of the parameters.
        given: dict[str, Any] = next(iter(state_dict["state"].values()), {})
        for variable in get_args(Variable):
            key = f"{variable}_optimizer"
            if key in given:
                self.memory[key] = self._state_of(cast(Variable, variable), given[key])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rules": self._rules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        # The seconds of the last step on a mini-batch, if the processes have not shared them yet.
        self._seconds = 0.0

    def _step_on_batch(self, problem: BilevelProblem) -> StreamInfo:
        self._check_streaming()
        began = time.perf_counter()
        calls = problem.calls
        memory = self.memory
        with self._undone_by_a_fault("step"):
            x, y = self._copies(problem)
            new_x, new_y, info, rates, shared = self.on_batch(problem, x, y, self._seconds)
        if rates is not None:
            self._write_batch(new_x, new_y)
            info = self._with_rates(info, *rates)
        memory["iteration"] += 1
        memory["inner_iterations"] += info.inner_iterations
        memory["passes"] += (problem.calls - calls).passes
        seconds = time.perf_counter() - began
        if problem.reduce is None:
            memory["optimization_time"] += seconds
        else:
            # Processes agree on the time. That of a step is shared along with the next batch.
            memory["optimization_time"] += shared
            self._seconds = seconds
        return replace(
            info,
            iteration=memory["iteration"],
            calls=problem.calls - calls,
            passes=memory["passes"],
            optimization_time=memory["optimization_time"],
        )

    def _check_streaming(self) -> None:
        name = type(self).__name__
        if not self.takes_mini_batches:
            raise BilevelError(
                f"`{name}.step()` was given a mini-batch: {name} {self.needs_all_data}. Give it "
                f"all data in each step, or use `{self.for_mini_batches}`, which may see another "
                "batch in each step."
            )
        if self._units != [1.0, 1.0]:
            raise ValueError(
                f"`{name}.step()` was given a mini-batch, and its levels have the units "
                f"{self._units}: on mini-batches a level's `lr` takes the place of its unit. Leave "
                "the units at 1."
            )


def _passes(problem: BilevelProblem, calls: Calls) -> float:
    """Return the passes of some calls, as passes over all data."""
    if problem.share is None:
        return calls.passes
    below = calls.passes - calls.upper
    return problem.share[0] * calls.upper + problem.share[1] * below


SolverCallable = Callable[[Iterable[dict[str, Any]]], BilevelOptimizer]
