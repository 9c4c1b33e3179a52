"""The base class of all methods: a torch optimizer over two levels.

Each step is one outer iteration and returns a record of it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Calls
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.level_vectors import LevelVectors, check_levels
from lightning_bilevel.solvers.proved import ProvedPoint
from lightning_bilevel.solvers.record import Progress, StepInfo

__all__ = ["BilevelOptimizer", "SolverCallable"]

# The entries of a parameter group that are not hyper-parameters of the method.
_NOT_CONSTANT = ("params", "level", "name", "unit", "initial_lr")


class BilevelOptimizer(LevelVectors, ABC):
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
    """

    # Whether the method penalises further residuals too, and takes a problem with a single level.
    penalised: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The checkpoint of a module may name its solver among the hyper-parameters. Loading it
        # with `weights_only`, torch's default, needs the class to be registered.
        torch.serialization.add_safe_globals([cls])

    def __init__(self, params: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(check_levels(type(self).__name__, params), {"unit": 1.0, **defaults})
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
        began = time.perf_counter()
        calls = problem.calls
        memory = self.memory
        scaled = self._in_units(problem)
        try:
            with self._undone_by_a_fault():
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
            for group in self.param_groups:
                group["lr"] = info.lr
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
    def _undone_by_a_fault(self) -> Iterator[None]:
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
            where = f"{type(self).__name__} stopped in outer iteration {memory['iteration'] + 1}"
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


def _passes(problem: BilevelProblem, calls: Calls) -> float:
    """Return the passes of some calls, as passes over all data."""
    if problem.share is None:
        return calls.passes
    below = calls.passes - calls.upper
    return problem.share[0] * calls.upper + problem.share[1] * below


SolverCallable = Callable[[Iterable[dict[str, Any]]], BilevelOptimizer]
