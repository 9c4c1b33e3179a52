"""What every method is: a torch optimizer over two levels that returns a record of each outer iteration."""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Calls
from lightning_bilevel.core.vectors import norm

__all__ = ["BilevelOptimizer", "SolverCallable", "StepInfo"]


@dataclass(frozen=True)
class StepInfo:
    r"""What one outer iteration did.

    Attributes:
        iteration: The number of the iteration, from 1.
        upper: f at the last point where the iteration evaluated it (for IVSP the new point; each method says which).
        lower: g(x, y), likewise.
        step: :math:`\|w^{k+1} - w^k\|`.
        inner_iterations: Gradient steps on the lower level.
        calls: Evaluations of f and g.
        optimization_time: Seconds spent in the solver since the start of the run.
    """

    iteration: int
    upper: float
    lower: float
    step: float
    inner_iterations: int
    calls: Calls
    optimization_time: float

    # Logged name of each attribute; a method adds its own.
    NAMES: ClassVar[dict[str, str]] = {
        "upper": "bilevel/upper",
        "lower": "bilevel/lower",
        "step": "bilevel/step",
        "inner_iterations": "bilevel/inner_iterations",
        "optimization_time": "bilevel/optimization_time",
    }

    # Those that an ordinary progress bar shows.
    SHOWN: ClassVar[tuple[str, ...]] = ("bilevel/upper", "bilevel/lower")

    def metrics(self) -> dict[str, float]:
        """Return what loggers and callbacks see of the iteration."""
        return {name: float(getattr(self, attribute)) for attribute, name in self.NAMES.items()}


class BilevelOptimizer(Optimizer, ABC):
    """A bilevel method: hyper-parameters in ``param_groups``, state in ``state``, the iterate in the parameters.

    A method implements :meth:`advance`, which does one outer iteration on flat vectors and returns the new ones.

    Args:
        params: Two parameter groups, ``[{"params": [...], "level": "upper"}, {"params": [...], "level": "lower"}]``.
        defaults: The hyper-parameters: numbers, strings, None and tuples of numbers only, so that checkpoints load with
            ``weights_only``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A module whose hyper-parameters name its solver is loaded with `weights_only`, which is torch's default.
        torch.serialization.add_safe_globals([cls])

    def __init__(self, params: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(_check_levels(type(self).__name__, params), defaults)
        self._forget()
        self.memory.update(iteration=0, inner_iterations=0, passes=0, optimization_time=0.0)

    @property
    def constants(self) -> dict[str, Any]:
        """The hyper-parameters as they are now (after a load: the saved ones)."""
        return self.param_groups[0]

    @property
    def memory(self) -> dict[str, Any]:
        """The state of the run: tensors, ints, floats and bools."""
        # torch keeps state per parameter; what belongs to the whole run stays with the first one, as in torch's LBFGS.
        state: dict[str, Any] = self.state[self.param_groups[0]["params"][0]]
        return state

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope that the method itself relaxes with, if any."""
        return None

    @property
    def chosen(self) -> list[tuple[str, str]]:
        """The constants that the method has chosen for itself, each with its value and where that comes from."""
        return []

    @property
    def multiplier(self) -> float | None:
        """The method's multiplier of the gap constraint, if it has one."""
        return None

    @abstractmethod
    def advance(self, problem: BilevelProblem, x: Tensor, y: Tensor, unchanged: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Do one outer iteration.

        Args:
            problem: The problem, in the solver's own units.
            x: The upper-level variables.
            y: The lower-level variables.
            unchanged: Whether problem and point are those that the previous iteration ended with.

        Returns:
            The new x and y, and what :meth:`record` needs beyond what is known to this class.
        """

    @abstractmethod
    def record(self, **known: Any) -> StepInfo:
        """Make the record of an iteration."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, problem: BilevelProblem | None = None
    ) -> StepInfo:
        """Do one outer iteration on the problem and write the new point into the parameters.

        Args:
            closure: Called once; it is how Lightning counts a step. Where no problem is given, it returns the problem, as in
                ``solver.step(lambda: problem)``: an optimizer that Fabric has wrapped takes a closure and nothing else.
            problem: f and g. As long as it is the same object, what is known of the current point is used again.
        """
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
            problem = returned if problem is None else problem
        if not isinstance(problem, BilevelProblem):
            got = "no problem" if problem is None else f"a {type(problem).__name__}"
            raise TypeError(
                f"`{type(self).__name__}.step()` was given {got}: it needs f and g, as `step(problem=problem)` "
                "or `step(lambda: problem)` with a BilevelProblem."
            )
        began, calls, memory = time.perf_counter(), problem.calls, self.memory
        unchanged = self._point is not None and self._point[0] is problem and self._is_written()
        # A process that evaluates anew what another one knows would wait for it for ever.
        unchanged = problem.mean_over_ranks(float(unchanged), self.param_groups[0]["params"][0]) == 1.0
        x, y = self._point[1:] if unchanged and self._point else self._start(problem)
        before = dict(memory)
        try:
            new_x, new_y, facts = self.advance(problem, x, y, unchanged)
            # Before it is written: the parameters stay at the last good point.
            if not math.isfinite(facts["step"]):
                sizes = f"{norm(x):.3g}, {norm(y):.3g}"
                raise NonFiniteError(
                    f"the step from a point with norms {sizes} has the length {facts['step']}: make steps shorter."
                )
            x, y = new_x, new_y
        except BaseException as error:
            memory.clear()
            memory.update(before)
            if not isinstance(error, BilevelError):
                raise
            where = f"{type(self).__name__} stopped in outer iteration {memory['iteration'] + 1}"
            raise type(error)(f"{where}: {error}") from error
        self._write(problem, x, y)
        memory["iteration"] += 1
        memory["inner_iterations"] += facts["inner_iterations"]
        memory["passes"] += (problem.calls - calls).passes
        # Processes agree on the time too: what stops by it stops them all in the same iteration.
        memory["optimization_time"] += problem.mean_over_ranks(time.perf_counter() - began, x)
        return self.record(
            iteration=memory["iteration"],
            calls=problem.calls - calls,
            optimization_time=memory["optimization_time"],
            **facts,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters beyond the two levels, such as those that a finetuning callback unfreezes."""
        if len(self.param_groups) == 2:
            raise ValueError(
                f"`{type(self).__name__}.add_param_group` cannot take parameters into a run whose vectors x and y have a fixed "
                "length. Unfreeze them before `Trainer.fit`; to train more, call it once more."
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        # (problem, x, y) after the last step.
        self._point: tuple[BilevelProblem, Tensor, Tensor] | None = None
        # The parameters, each with the part of x or y that was written into it.
        self._written: list[tuple[Tensor, Tensor]] = []

    def _blocks(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters, each with its part of x or y."""
        for group, vector, unit in zip(self.param_groups, (x, y), problem.units, strict=True):
            vector = vector if unit == 1.0 else vector * unit
            blocks = torch.split(vector, [p.numel() for p in group["params"]])
            for parameter, block in zip(group["params"], blocks, strict=True):
                yield parameter, block.view_as(parameter)

    def _is_written(self) -> bool:
        return all(torch.equal(parameter, block) for parameter, block in self._written)

    def _start(self, problem: BilevelProblem) -> tuple[Tensor, Tensor]:
        """Read x and y from the parameters, and into their sets if they are outside."""
        point = []
        levels = zip(self.param_groups, (problem.upper_set, problem.lower_set), problem.units, strict=True)
        for group, convex_set, unit in levels:
            given = torch.cat([p.detach().reshape(-1) for p in group["params"]])
            saved = self.memory.get(f"{group['level']}_in_units")
            if saved is not None and torch.equal(saved * unit, given):
                point.append(saved)
                continue
            given = given / unit
            projected = convex_set.project(given)
            moved = norm(projected - given)
            # A point that was projected before may move by a rounding: a resumed run goes on from where it was.
            if moved <= 1e2 * torch.finfo(given.dtype).eps * norm(given):
                point.append(given)
                continue
            warnings.warn(
                f"The {group['level']}-level start lies outside {convex_set!r}: it was projected, which moved it by "
                f"{moved * unit:.3g}.",
                stacklevel=3,
            )
            point.append(projected)
        return point[0], point[1]

    def _write(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> None:
        self._written = list(self._blocks(problem, x, y))
        for parameter, block in self._written:
            parameter.copy_(block)
        for group, vector, unit in zip(self.param_groups, (x, y), problem.units, strict=True):
            if unit != 1.0:
                # Dividing the parameters by the unit would round once more: a resumed run needs the vector itself.
                self.memory[f"{group['level']}_in_units"] = vector
        self._point = (problem, x, y)


SolverCallable = Callable[[Iterable[dict[str, Any]]], BilevelOptimizer]


def _check_levels(name: str, params: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = list(params)
    rule = 'two groups, [{"params": [...], "level": "upper"}, {"params": [...], "level": "lower"}]'
    if not all(isinstance(group, dict) for group in groups):
        raise TypeError(f"`{name}(params)` must be {rule}.")
    by_level = {group.get("level"): {**group, "params": _as_list(group["params"])} for group in groups}
    if len(groups) != 2 or set(by_level) != {"upper", "lower"}:
        raise ValueError(f"`{name}(params)` was given levels {[g.get('level') for g in groups]}: it needs {rule}.")
    ordered = [by_level["upper"], by_level["lower"]]
    for group in ordered:
        if not group["params"] or not sum(p.numel() for p in group["params"]):
            raise ValueError(f"`{name}(params)`: the {group['level']} level has no parameters.")
    if {id(p) for p in ordered[0]["params"]} & {id(p) for p in ordered[1]["params"]}:
        raise ValueError(f"`{name}(params)`: a parameter is in both levels; each belongs to one.")
    kinds = sorted({f"{p.dtype} on {p.device}" for group in ordered for p in group["params"]})
    if len(kinds) > 1:
        raise ValueError(f"`{name}(params)` has parameters of kind {', '.join(kinds)}: both levels need one dtype and device.")
    dtype = ordered[0]["params"][0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"`{name}(params)` has parameters of {dtype}: only float32 and float64 are supported, because the Moreau gap is a "
            "small difference of large numbers, which half precision does not resolve."
        )
    return ordered


def _as_list(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
